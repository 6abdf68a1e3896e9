"""Everything that can be wrong with a data set is told with the file and what to do."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from shared_fixtures import program

import stillhouse


@pytest.fixture
def copy(plain: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(plain, tmp_path / "copy"))


def change(folder: pathlib.Path, edit: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    edit(manifest)
    text = json.dumps(manifest)
    (folder / "manifest.json").write_text(text)
    (folder / "_SUCCESS").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}  manifest.json\n")


def refused(kind: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind) as raised:
        call()
    text = str(raised.value)
    assert re.search(message, text) and "\n" not in text, text


def test_what_is_no_finished_data_set(copy: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def open_copy() -> Any:
        return stillhouse.open(copy)

    refused(stillhouse.DatasetError, "nowhere: no such folder", lambda: stillhouse.open(tmp_path / "nowhere"))
    refused(stillhouse.DatasetError, "not a Stillhouse data set .no manifest.json.", lambda: stillhouse.open(tmp_path))
    (copy / "_SUCCESS").unlink()
    refused(stillhouse.DatasetError, "copy.*no _SUCCESS.*stillhouse run", open_copy)
    (copy / "manifest.json").rename(copy / "other")
    refused(stillhouse.DatasetError, "the job is not finished", open_copy)
    (copy / "other").rename(copy / "manifest.json")
    change(copy, lambda m: m.update(format_version=99))
    refused(
        stillhouse.DatasetError,
        r"manifest\.json: got format_version 99.*reads up to 1; install a newer stillhouse",
        open_copy,
    )
    (copy / "manifest.json").write_text('{"format_version"')
    refused(stillhouse.DatasetError, r"manifest\.json: is damaged", open_copy)


def test_fields_of_later_minor_versions_do_not_matter(copy: pathlib.Path) -> None:
    change(copy, lambda m: (m.update(later=1), m["job"].update(later={}), m["shards"][0].update(later=2)))  # type: ignore[func-returns-value]
    assert len(stillhouse.open(copy)) > 0


def test_wrong_calls(plain: pathlib.Path) -> None:
    ds = stillhouse.open(plain)
    refused(ValueError, 'got split "test", valid: train', lambda: stillhouse.open(plain, split="test"))
    refused(
        stillhouse.ColumnError,
        'got column "noise", valid: sequence_id, input_ids',
        lambda: ds.select_columns(["noise"]),
    )
    refused(TypeError, "got the string 'input_ids', valid: a list", lambda: ds.select_columns("input_ids"))
    refused(IndexError, rf"row {len(ds)} of .*which has {len(ds)} rows", lambda: ds[len(ds)])
    refused(IndexError, "row -9999999", lambda: ds[[0, -9_999_999]])
    refused(IndexError, "row 18446744073709551615", lambda: ds[np.array([2**64 - 1], np.uint64)])
    refused(TypeError, "valid: integers", lambda: ds[[0.5]])  # type: ignore[list-item]
    refused(ValueError, "cache_megabytes: got 0", lambda: stillhouse.open(plain, cache_megabytes=0))
    refused(ValueError, "storage: unknown field `endpont`", lambda: stillhouse.open(plain, storage={"endpont": "x"}))
    refused(ValueError, "URL", lambda: stillhouse.open("s3://key:SECRET@bucket/x"))
    assert ds[[]].rows == 0 and ds[5:5]["input_ids"].shape == (0, 32)


def test_relative_paths_stay_where_they_are(
    plain: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(plain.parent)
    ds = stillhouse.open(plain.name)
    monkeypatch.chdir(tmp_path)
    assert ds[0]["sequence_id"] == pickle.loads(pickle.dumps(ds))[0]["sequence_id"]


def test_missing_columns_of_a_batch(plain: pathlib.Path) -> None:
    batch = stillhouse.open(plain)[:2]
    refused(
        stillhouse.ColumnError,
        "the batch has no column 'logprob'; it has sequence_id, input_ids",
        lambda: batch["logprob"],
    )
    with pytest.raises(KeyError):
        batch["logprob"]


def shard(copy: pathlib.Path) -> pathlib.Path:
    return sorted((copy / "data").glob("*.parquet"))[1]


def rows_of(copy: pathlib.Path) -> Callable[[], Any]:
    return lambda: stillhouse.open(copy)[:]


def test_a_shard_that_is_gone(copy: pathlib.Path) -> None:
    shard(copy).unlink()
    refused(stillhouse.DatasetError, rf"{shard_name(copy)}.*is missing.*copy", rows_of(copy))


def shard_name(copy: pathlib.Path) -> str:
    return "train-00001-of-"


def test_a_shard_that_is_cut_short(copy: pathlib.Path) -> None:
    path = shard(copy)
    path.write_bytes(path.read_bytes()[:-1000])
    refused(stillhouse.DatasetError, rf"{shard_name(copy)}.*(damaged|cannot read).*stillhouse verify", rows_of(copy))


def test_a_shard_of_another_data_set(copy: pathlib.Path) -> None:
    other = sorted((copy / "data").glob("*.parquet"))[2]
    wrong = other.read_bytes()
    shard(copy).write_bytes(wrong)
    change(copy, lambda m: m["shards"][1].update(bytes=len(wrong)))
    refused(stillhouse.DatasetError, rf"{shard_name(copy)}.*its footer.*the manifest says.*copy", rows_of(copy))
    change(copy, lambda m: m["shards"][1].pop("footer"))  # as versions without checksums wrote it
    refused(
        stillhouse.DatasetError,
        rf"{shard_name(copy)}.*has \d+ rows, the manifest says \d+.*copy it again",
        rows_of(copy),
    )


def test_damage_anywhere_is_found(copy: pathlib.Path) -> None:
    path = shard(copy)
    whole = path.read_bytes()
    random = np.random.default_rng(1)
    for place in random.integers(4, len(whole), 40):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << random.integers(0, 8)
        path.write_bytes(damaged)
        refused(stillhouse.DatasetError, rf"{shard_name(copy)}.*sha256.*copy it again", stillhouse.open(copy).verify)
        refused(stillhouse.DatasetError, rf"{shard_name(copy)}.*is damaged.*stillhouse repair", rows_of(copy))


def test_damage_never_makes_an_epoch_short(demo: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """It is found in threads of their own, which read ahead: that is an error for the trainer, and not the end."""
    copy = pathlib.Path(shutil.copytree(demo, tmp_path / "copy"))
    rows = len(stillhouse.open(copy))
    random = np.random.default_rng(2)
    path = max((copy / "data").glob("train-*.parquet"), key=lambda file: file.stat().st_size)
    whole = path.read_bytes()
    told = 0
    for trial in range(60):
        damaged = bytearray(whole)
        for place in random.integers(4, len(whole), 20):
            damaged[place] ^= 1 << random.integers(0, 8)
        path.write_bytes(damaged)
        try:
            ds = stillhouse.open(copy, cache_megabytes=1 if trial % 2 else 512)
            assert sum(batch.rows for batch in ds.batches(16)) == rows
        except stillhouse.StillhouseError as error:
            assert path.name in str(error) or "row" in str(error), error
            told += 1
    assert told == 60


def test_columns_that_the_manifest_does_not_describe(copy: pathlib.Path) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        manifest["columns"][1]["data_type"] = "fixed_size_list<uint16>[32]"

    change(copy, edit)
    refused(
        stillhouse.ColumnError,
        r"train-0000\d.*: column input_ids has values of type int32, the manifest says uint16.*copy it again",
        rows_of(copy),
    )
    change(copy, lambda m: m["columns"][1].update(data_type="fixed_size_list<int32>[33]", shape="[33]"))
    refused(
        stillhouse.ColumnError, r"train-0000\d.*input_ids has 32 values per row, the manifest says .33.", rows_of(copy)
    )
    change(copy, lambda m: m["columns"][1].update(shape="[32]"))
    change(copy, lambda m: m["columns"][1].update(data_type="fixed_size_list<int32>[32]", name="logprob"))
    refused(stillhouse.ColumnError, r"train-0000\d.*no column logprob", rows_of(copy))


def test_stores(store: dict[str, str], plain: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = subprocess.run([program(), "export", plain, "s3://bucket/plain"], env={**os.environ, **store}, capture_output=True, text=True, check=False)  # fmt: skip
    assert exported.returncode == 0, exported.stderr
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    ds = stillhouse.open("s3://bucket/plain")
    np.testing.assert_array_equal(ds[::50]["input_ids"], stillhouse.open(plain)[::50]["input_ids"])
    assert sum(batch.rows for batch in ds.batches(100)) == len(ds)
    ds.verify()
    refused(
        stillhouse.DatasetError,
        "s3://bucket/nothing.*not a Stillhouse data set",
        lambda: stillhouse.open("s3://bucket/nothing"),
    )
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "WRONG")
    refused(
        stillhouse.StoreError,
        "s3://bucket/plain.*secret key does not belong",
        lambda: stillhouse.open("s3://bucket/plain"),
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    patience = {"retry": {"max_attempts": 2}}
    refused(
        stillhouse.StoreError,
        "no service listens at http://127.0.0.1:9",
        lambda: stillhouse.open("s3://bucket/x", storage=patience),
    )


def test_a_web_server_that_gives_whole_files_only_is_told(plain: pathlib.Path) -> None:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Nothing on stderr."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=plain)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        refused(
            stillhouse.StoreError,
            "gives whole files only.*valid: a server that answers Range requests",
            lambda: stillhouse.open(url)[0],
        )
        server.shutdown()
