"""Servers for the tests of the service: each its own process, folders and port, killed afterwards.

The binary is STILLHOUSE_BIN, or target/debug/stillhouse. `Server` asks it over raw sockets as well: what a test sends is what arrives.
"""
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse

import pytest

REPO = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("STILLHOUSE_BIN", str(REPO / "target/debug/stillhouse"))
TEACHER = REPO / "assets/teacher-nano-gpt2"
CORPUS = REPO / "assets/corpus/sotu-small.jsonl.gz"
OVER = {"succeeded", "failed", "cancelled"}

# what must never be seen in any answer, log, database or manifest
CANARIES = {
    "AWS_ACCESS_KEY_ID": "AKIACANARYCANARY0001",
    "AWS_SECRET_ACCESS_KEY": "canary-aws-secret-b7e1",
    "AWS_SESSION_TOKEN": "canary-aws-session-4d02",
    "HF_TOKEN": "hf_canaryhubtoken93ac",
}


class Reply:
    """What came back: everything until the connection closed, or until the answer was whole."""

    def __init__(self, raw):
        self.raw = raw
        head, _, self.body = raw.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        found = re.match(r"HTTP/1\.[01] (\d{3})", lines[0])
        self.status = int(found[1]) if found else 0
        self.headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
        if self.headers.get("transfer-encoding") == "chunked":
            self.body = unchunked(self.body)

    def json(self):
        return json.loads(self.body)

    def text(self):
        return self.body.decode("utf-8", "replace")

    def __repr__(self):
        return f"{self.status} {self.body[:600]!r}"


def unchunked(data):
    out = b""
    while data:
        size, _, rest = data.partition(b"\r\n")
        n = int(size or b"0", 16)
        if n == 0:
            break
        out, data = out + rest[:n], rest[n + 2:]
    return out


class Server:
    """One running service."""

    def __init__(self, root, *, config=None, env=None, tokens=True):
        self.root = pathlib.Path(root)
        self.allowed, self.data = self.root / "allowed", self.root / "data"
        self.allowed.mkdir(parents=True, exist_ok=True)
        self.config = {
            "data": str(self.data), "auth": "token" if tokens else "auto", "folder": str(self.allowed),
            "access": {"read": [str(self.allowed)], "write": [str(self.allowed)]},
            "capacity": {"running_jobs": 1, "cpu_slots": 1, "threads_per_job": 1},
            "limits": {"requests_per_minute": 4_000_000, "submissions_per_minute": 1_000_000, "cancel_seconds": 1},
        }
        for key, value in (config or {}).items():
            if isinstance(value, dict):
                self.config.setdefault(key, {}).update(value)
            else:
                self.config[key] = value
        self.env = {**os.environ, "STILLHOUSE_LOG": "info", **(env or {})}
        self.log = self.root / "server.log"
        self.seen = []  # every answer, for the search after secrets
        self.process, self.port, self.token = None, free_port(), None

    def start(self):
        file = self.root / "service.yaml"
        file.write_text(json.dumps(self.config))
        command = [BINARY, "serve", "--config", str(file), "--listen", f"127.0.0.1:{self.port}", "--log-format", "json"]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, env=self.env, stdout=log, stderr=log)
        while True:
            assert self.process.poll() is None, f"the server ended: {self.log.read_text()[-2000:]}"
            with contextlib.suppress(OSError):
                if self.ask("GET", "/api/v1/ready", token=None).status == 200:
                    return self
            time.sleep(0.05)

    def stop(self):
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def new_token(self, user, *scopes, id_too=False):
        command = [BINARY, "token", "create", "--user", user, "--data", str(self.data), "--json"]
        for scope in scopes:
            command += ["--scope", scope]
        made = json.loads(subprocess.run(command, env=self.env, check=True, capture_output=True).stdout)
        return (made["token"], made["id"]) if id_too else made["token"]

    def connect(self, address="127.0.0.1"):
        # a bound for a server that hangs, not for one that is slow
        return socket.create_connection((address, self.port), timeout=120)

    def send(self, raw, *, close=False):
        """Sends bytes as they are and reads one answer. `close`: reads until the server closes."""
        with self.connect() as s:
            with contextlib.suppress(ConnectionError):
                s.sendall(raw)
            reply = Reply(read_all(s) if close else read_one(s))
        self.seen.append(reply.raw)
        return reply

    def ask(self, method, path, body=None, *, token="own", headers=(), host=None, media="application/json"):
        token = self.token if token == "own" else token
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host or f'127.0.0.1:{self.port}'}", "Connection: close"]
        if token:
            lines.append(f"Authorization: Bearer {token}")
        if body is not None:
            body = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
            lines.append(f"Content-Length: {len(body)}")
            if media:
                lines.append(f"Content-Type: {media}")
        lines += list(headers)
        return self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b""))

    def submit(self, job, *, query="", **options):
        return self.ask("POST", f"/api/v1/jobs{query}", job, **options)

    def wait(self, job_id, states=OVER):
        while True:
            job = self.ask("GET", f"/api/v1/jobs/{job_id}").json()
            if job["state"] in states:
                return job
            time.sleep(0.1)

    def run(self, job, **options):
        """Submits a job and waits for its end."""
        reply = self.submit(job, **options)
        return self.wait(reply.json()["id"]) if reply.status == 201 else reply

    def job_log(self, job_id):
        return self.ask("GET", f"/api/v1/jobs/{job_id}/logs").text()

    def memory_bytes(self):
        with open(f"/proc/{self.process.pid}/status") as f:
            return int(re.search(r"VmRSS:\s+(\d+) kB", f.read())[1]) * 1024


def read_one(s):
    """One answer, as long as it says that it is."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = receive(s)
        if not more:
            return data
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?im)^content-length: *(\d+)", head)
    if b"text/event-stream" in head:
        return data
    while (length is None or len(body) < int(length[1])) and (more := receive(s)):
        body += more
    return head + b"\r\n\r\n" + body


def read_all(s):
    data = b""
    while more := receive(s):
        data += more
    return data


def receive(s):
    try:
        return s.recv(65536)
    except ConnectionError:
        return b""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def quoted(text):
    return urllib.parse.quote(str(text), safe="")


def job_file(**changes):
    """A job that tokenizes the small corpus in the allowed folder within a second; keys are dotted with __."""
    job = {
        "version": 1, "name": "small",
        "input": {"format": "jsonl", "paths": ["corpus.jsonl.gz"], "text": "text"},
        "tokenizer": {"path": "teacher"}, "pack": {"length": 256}, "output": {"path": "out"},
    }
    for key, value in changes.items():
        *folders, last = key.split("__")
        at = job
        for folder in folders:
            at = at.setdefault(folder, {})
        at[last] = value
    return job


def furnish(server):
    """A tokenizer, the teacher and a corpus in the allowed folder."""
    shutil.copytree(TEACHER, server.allowed / "teacher", dirs_exist_ok=True)
    shutil.copy(CORPUS, server.allowed / "corpus.jsonl.gz")
    lines = [json.dumps({"text": f"The state of the union is number {n}. " * 40}) for n in range(30)]
    (server.allowed / "tiny.jsonl").write_text("\n".join(lines) + "\n")
    server.token = server.new_token("ada", "read", "submit")


@pytest.fixture
def start(tmp_path):
    """Starts a server with tokens of the user ada, everything that `Server` takes."""
    servers = []

    def starts(**options):
        server = Server(tmp_path / f"s{len(servers)}", **options)
        servers.append(server)
        server.start()
        furnish(server)
        return server

    yield starts
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for all tests of a file, with secrets in its environment."""
    one = Server(tmp_path_factory.mktemp("service"), env=CANARIES, config={"limits": {"header_seconds": 5, "body_seconds": 5}})
    try:
        furnish(one.start())
        yield one
    finally:
        one.stop()


class Found:
    """What each attack got, as rows of a table: written to the file that STILLHOUSE_ATTACKS names."""

    def __init__(self):
        self.rows = []

    def __call__(self, attack, tried, got):
        # the servers' temporary folders are of no interest
        cells = [re.sub(r"/\S*?/pytest-\d+/[^/\s]+?\d+(/s\d+)?(?=/)", "…", str(cell)) for cell in (attack, tried, got)]
        self.rows.append([cell.replace("|", "\\|").replace("\n", " ") for cell in cells])


@pytest.fixture(scope="session")
def found():
    found = Found()
    yield found
    if path := os.environ.get("STILLHOUSE_ATTACKS"):
        lines = ["| attack | tried | got |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in found.rows)]
        pathlib.Path(path).write_text("\n".join(lines) + "\n")
