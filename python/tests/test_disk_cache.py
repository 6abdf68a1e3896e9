"""The disk cache against a real S3, seen through a proxy that counts what is asked for."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import pickle
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pyarrow.fs
import pytest
from shared_fixtures import ROOT, free_ports, program

import stillhouse
import stillhouse.torch as st

REQUEST = re.compile(rb"(GET|HEAD) /bucket/([^ ]+) HTTP/1\.1\r\n(.*?)\r\n\r\n", re.DOTALL)

READER = """
import hashlib, json, sys, warnings
import stillhouse
options = json.loads(sys.argv[1])
ds = stillhouse.open(options["url"], disk_cache=options["folder"], disk_cache_gigabytes=options["gigabytes"])
rows = sorted(range(0, len(ds), 64), key=lambda row: hashlib.sha256(f"{options['seed']} {row}".encode()).digest())
if "largest_file" in options:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (options["largest_file"], options["largest_file"]))
sums = {}
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for row in rows:
        sums[row] = hashlib.sha256(ds[row : row + 64]["input_ids"].tobytes()).hexdigest()
print(json.dumps({"sums": sums, "warnings": [str(warning.message) for warning in told]}))
"""


class Proxy(socketserver.ThreadingTCPServer):
    """Hands on bytes in both directions, and remembers the requests."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, target: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target = target
        self.requests: list[tuple[str, str, str]] = []
        """(method, key, range)"""
        self.seen = threading.Condition()
        self.port = self.server_address[1]

    def data(self) -> Counter[tuple[str, str]]:
        """GETs of ranges of shards."""
        return Counter((key, part) for method, key, part in self.requests if method == "GET" and "/data/" in key)

    def heads(self) -> int:
        return sum(method == "HEAD" for method, _, _ in self.requests)


class Handler(socketserver.BaseRequestHandler):
    server: Proxy

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.target)) as store:
            threading.Thread(target=copy, args=(store, self.request), daemon=True).start()
            sent = b""
            while chunk := receive(self.request):
                sent += chunk
                for method, key, headers in REQUEST.findall(sent):
                    part = re.search(rb"(?mi)^range: *(.*?)\r?$", headers)
                    with self.server.seen:
                        self.server.requests.append((method.decode(), key.decode(), part[1].decode() if part else ""))
                        self.server.seen.notify_all()
                    sent = b""
                store.sendall(chunk)


def receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except OSError:
        return b""


def copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while chunk := receive(source):
            target.sendall(chunk)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


@pytest.fixture(scope="module")
def uploaded(store: dict[str, str], long: pathlib.Path) -> str:
    """The data set in the store: its URL."""
    exported = subprocess.run([program(), "export", long, "s3://bucket/cached"], env={**os.environ, **store}, capture_output=True, text=True, check=False)  # fmt: skip
    assert exported.returncode == 0, exported.stderr
    return "s3://bucket/cached"


@pytest.fixture
def proxy(store: dict[str, str], uploaded: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Before the store; the environment leads to it."""
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    with Proxy(int(store["AWS_ENDPOINT_URL"].rpartition(":")[2])) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        yield proxy
        proxy.shutdown()


@pytest.fixture(scope="module")
def truth(long: pathlib.Path) -> dict[str, str]:
    ds = stillhouse.open(long)
    return {
        str(row): hashlib.sha256(ds[row : row + 64]["input_ids"].tobytes()).hexdigest() for row in range(0, len(ds), 64)
    }


def start(folder: pathlib.Path, **options: object) -> subprocess.Popen[str]:
    """A process that reads everything in an order of its own."""
    given = {"url": "s3://bucket/cached", "folder": str(folder), "gigabytes": 1, "seed": 0, **options}
    return subprocess.Popen(
        [sys.executable, "-c", READER, json.dumps(given)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def result(process: subprocess.Popen[str]) -> tuple[dict[str, str], list[str]]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    told = json.loads(out)
    return told["sums"], told["warnings"]


def entries(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in folder.rglob("*-*") if re.fullmatch("[0-9a-f]{32}-[0-9a-f]{32}", path.name)]


def held(folder: pathlib.Path) -> int:
    """Bytes on the disk; the files have holes."""
    return sum(path.stat().st_blocks * 512 for path in entries(folder))


def test_a_second_epoch_asks_for_no_data(
    proxy: Proxy, uploaded: str, tmp_path: pathlib.Path, long: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STILLHOUSE_DISK_CACHE", str(tmp_path / "cache"))
    local = stillhouse.open(long)
    first = st.StreamingShardDataset(uploaded, batch_size=64, seed=1)
    rows = np.concatenate([batch["sequence_id"].numpy() for batch in st.DataLoader(first)])
    data = proxy.data()
    assert data and max(data.values()) == 1
    shards = [shard["path"] for shard in local.manifest["shards"]]
    assert len(entries(tmp_path)) == len(shards) == proxy.heads()

    # as another process: it asks for the manifest and for each shard's version
    before = len(proxy.requests)
    second = st.StreamingShardDataset(uploaded, batch_size=64, seed=2)
    again = np.concatenate([batch["sequence_id"].numpy() for batch in st.DataLoader(second, num_workers=2)])
    assert proxy.data() == data and len(proxy.requests) > before
    np.testing.assert_array_equal(np.sort(rows), np.sort(again))
    assert not np.array_equal(rows, again)

    # in a process that has begun, without a network
    ds = stillhouse.open(uploaded)
    assert ds[0].keys() == local[0].keys()
    for start_row in range(0, len(ds), 500):
        ds[start_row]
    proxy.shutdown()
    proxy.server_close()
    np.testing.assert_array_equal(ds[::50]["input_ids"], local[::50]["input_ids"])
    assert proxy.data() == data
    with pytest.raises(stillhouse.StoreError):
        stillhouse.open(uploaded, storage={"retry": {"max_attempts": 1}})


def test_processes_share_it(proxy: Proxy, tmp_path: pathlib.Path, truth: dict[str, str]) -> None:
    readers = [start(tmp_path / "cache", seed=seed) for seed in range(3)]
    assert [result(reader) for reader in readers] == [(truth, [])] * 3
    parts: dict[str, list[tuple[int, int]]] = {}
    for key, part in proxy.data().elements():
        first, last = map(int, part.removeprefix("bytes=").split("-"))
        parts.setdefault(key, []).append((first, last + 1))
    for key, ranges in parts.items():
        ranges.sort()
        twice = [(a, b) for a, b in zip(ranges, ranges[1:], strict=False) if b[0] < a[1]]
        assert not twice, f"{key}: {twice} came twice"


def test_a_killed_process_leaves_nothing_that_harms(
    proxy: Proxy, tmp_path: pathlib.Path, truth: dict[str, str]
) -> None:
    folder = tmp_path / "cache"
    for run in range(6):
        before = sum(proxy.data().values())
        reader = start(folder, seed=run)
        with proxy.seen:  # in the midst of fetching and writing
            assert proxy.seen.wait_for(lambda: sum(proxy.data().values()) > before + run, timeout=120)  # noqa: B023
        reader.send_signal(signal.SIGKILL)
        reader.communicate()
    assert result(start(folder, seed=99)) == (truth, [])
    requests = sum(proxy.data().values())
    assert result(start(folder, seed=100)) == (truth, [])
    assert sum(proxy.data().values()) == requests
    others = {path.name for path in folder.rglob("*") if path.is_file()} - {path.name for path in entries(folder)}
    assert {name for name in others if not re.fullmatch("[0-9a-f]{3}", name)} == {"lock", "in-use"}


def test_the_bound_is_kept(proxy: Proxy, uploaded: str, tmp_path: pathlib.Path, truth: dict[str, str]) -> None:
    folder = tmp_path / "cache"
    everything = sum(shard["bytes"] for shard in stillhouse.open(uploaded).manifest["shards"])
    for share in (0.5, 0.1, 0.001):  # the last is less than one shard
        bound = int(everything * share)
        readers = [start(folder, seed=seed, gigabytes=bound / 1e9) for seed in range(2)]
        assert [result(reader) for reader in readers] == [(truth, [])] * 2
        assert held(folder) <= bound + 4096 * len(entries(folder))
        assert share < 0.1 or held(folder) > bound / 3


def test_damage_on_the_disk_is_fetched_again(proxy: Proxy, tmp_path: pathlib.Path, truth: dict[str, str]) -> None:
    folder = tmp_path / "cache"
    assert result(start(folder)) == (truth, [])
    random = np.random.default_rng(1)
    for path in entries(folder):
        content = np.fromfile(path, np.uint8)
        content[random.integers(0, content.size, 40)] ^= 16
        content.tofile(path)
    requests = sum(proxy.data().values())
    assert result(start(folder)) == (truth, [])
    assert sum(proxy.data().values()) > requests
    requests = sum(proxy.data().values())
    assert result(start(folder)) == (truth, [])
    assert sum(proxy.data().values()) == requests


def test_what_came_damaged_is_fetched_again(proxy: Proxy, tmp_path: pathlib.Path, truth: dict[str, str]) -> None:
    folder = tmp_path / "cache"
    assert result(start(folder)) == (truth, [])
    unit = 64 << 10
    for path in entries(folder):  # zeros with the right sums, as if they had come over the network
        content = bytearray(path.read_bytes())
        size = int.from_bytes(content[16:24], "little")
        units = -(-size // unit)
        data = -(-(64 + 8 * units) // 4096) * 4096
        last = len(content) - data - (units - 1) * unit
        content[-last:] = bytes(last)
        total = zlib.crc32(bytes(last))
        content[64 + 8 * (units - 1) : 64 + 8 * units] = (total | (total ^ 0xFFFFFFFF) << 32).to_bytes(8, "little")
        path.write_bytes(content)
    requests = sum(proxy.data().values())
    assert result(start(folder)) == (truth, [])
    assert sum(proxy.data().values()) > requests


def test_a_replaced_shard_is_not_served(
    proxy: Proxy, uploaded: str, store: dict[str, str], tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "cache"
    ids = stillhouse.open(uploaded, disk_cache=folder)[:100]["input_ids"]
    shard = stillhouse.open(uploaded).manifest["shards"][0]["path"]
    s3 = pyarrow.fs.S3FileSystem(access_key="KEY", secret_key="SECRET", endpoint_override=store["AWS_ENDPOINT_URL"])
    key = f"bucket/cached/{shard}"
    with s3.open_input_file(key) as file:
        good = file.read()
    try:
        with s3.open_output_stream(key) as file:
            file.write(bytes(len(good)))
        with pytest.raises(stillhouse.DatasetError, match=shard):
            stillhouse.open(uploaded, disk_cache=folder)[:100]
    finally:
        with s3.open_output_stream(key) as file:
            file.write(good)
    np.testing.assert_array_equal(stillhouse.open(uploaded, disk_cache=folder)[:100]["input_ids"], ids)
    objects = Counter(path.name.split("-")[0] for path in entries(folder))
    assert max(objects.values()) == 1, "of one object one version"


def test_a_full_disk_costs_no_data(proxy: Proxy, tmp_path: pathlib.Path, truth: dict[str, str]) -> None:
    # the nearest to a full disk without one: what makes a file longer than this fails
    sums, told = result(start(tmp_path / "cache", largest_file=1 << 20))
    assert sums == truth
    assert len(told) == 1 and "cannot be written" in told[0] and "reading continues without it" in told[0], told


def test_a_web_server_that_tells_times_only(long: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "cache"
    with free_ports(1) as [port]:
        command = [ROOT / ".venv/bin/rclone", "serve", "http", long, f"--addr=127.0.0.1:{port}", "--config=/dev/null"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            try:
                for _ in range(300):
                    try:
                        socket.create_connection(("127.0.0.1", port)).close()
                        break
                    except OSError:
                        assert server.poll() is None
                        time.sleep(0.1)
                ds = stillhouse.open(f"http://127.0.0.1:{port}/", disk_cache=folder, cache_megabytes=1)
                ids = ds[:]["input_ids"]
                assert len(entries(folder)) == len(ds.manifest["shards"])
            finally:
                server.kill()
    np.testing.assert_array_equal(ids, stillhouse.open(long)[:]["input_ids"])
    np.testing.assert_array_equal(ids, ds[:]["input_ids"])  # many times what is kept in memory


def test_nothing_of_it_is_for_others(proxy: Proxy, uploaded: str, tmp_path: pathlib.Path) -> None:
    ds = stillhouse.open(uploaded, disk_cache=tmp_path / "cache")
    ds[:64]
    for path in (tmp_path / "cache").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
        assert "bucket" not in path.name
        if path.is_file():
            assert not any(word in path.read_bytes()[:8192] for word in (b"SECRET", b"KEY", b"bucket"))
    copied = pickle.loads(pickle.dumps(ds))
    np.testing.assert_array_equal(copied[5]["input_ids"], ds[5]["input_ids"])


def test_what_makes_no_sense_is_refused(
    proxy: Proxy, uploaded: str, long: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in (0, -1, float("nan"), "much"):
        with pytest.raises(ValueError, match="disk_cache_gigabytes: got .*valid: a number of gigabytes"):
            stillhouse.open(uploaded, disk_cache=tmp_path / "x", disk_cache_gigabytes=wrong)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"disk cache: the folder .*file cannot be used.*valid: a folder"):
        stillhouse.open(uploaded, disk_cache=tmp_path / "file")
    monkeypatch.setenv("STILLHOUSE_DISK_CACHE", str(tmp_path / "file"))
    stillhouse.open(uploaded, disk_cache="")
    stillhouse.open(long)[0]  # a folder is read as it is
    monkeypatch.setenv("STILLHOUSE_DISK_CACHE_GIGABYTES", "all")
    with pytest.raises(ValueError, match="STILLHOUSE_DISK_CACHE_GIGABYTES: got 'all'"):
        stillhouse.open(long)


def test_a_folder_that_is_gone_later_costs_no_data(proxy: Proxy, uploaded: str, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "cache"
    ds = stillhouse.open(uploaded, disk_cache=folder)
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    folder.write_text("in its place")
    with pytest.warns(RuntimeWarning, match=r"disk cache: the folder .* cannot be used.*continues without it"):
        ds[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ds[1]
