"""Requests that are not what they should be: shapes, sizes, slowness, other sites, tokens, limits."""
import contextlib
import json
import re
import socket
import sqlite3
import stat
import subprocess
import time

import pytest
from conftest import BINARY, CANARIES, Reply, job_file, quoted, read_all, read_one


def head(server, *lines, method="GET", path="/api/v1/jobs", host=True, token=True, close=True):
    given = [f"{method} {path} HTTP/1.1"]
    given += [f"Host: 127.0.0.1:{server.port}"] if host else []
    given += [f"Authorization: Bearer {server.token}"] if token else []
    given += ["Connection: close"] if close else []
    return ("\r\n".join([*given, *lines]) + "\r\n\r\n").encode()


POST = {"method": "POST", "path": "/api/v1/validate"}
JSON = "Content-Type: application/json"

# what is sent, what may come back; 0: the connection is closed without an answer
SHAPES = [
    ("Content-Length and Transfer-Encoding", lambda s: head(s, JSON, "Content-Length: 5", "Transfer-Encoding: chunked", **POST) + b"0\r\n\r\nGET /api/v1/health HTTP/1.1\r\n\r\n", {0, 200, 400}),
    ("two lengths", lambda s: head(s, JSON, "Content-Length: 2", "Content-Length: 3", **POST) + b"{} ", {0, 400}),
    ("length with a sign", lambda s: head(s, JSON, "Content-Length: +2", **POST) + b"{}", {0, 400}),
    ("length in words", lambda s: head(s, JSON, "Content-Length: two", **POST) + b"{}", {0, 400}),
    ("negative length", lambda s: head(s, JSON, "Content-Length: -1", **POST) + b"{}", {0, 400}),
    ("length beyond 64 bits", lambda s: head(s, JSON, "Content-Length: 99999999999999999999", **POST) + b"{}", {0, 400}),
    ("chunk size in words", lambda s: head(s, JSON, "Transfer-Encoding: chunked", **POST) + b"zz\r\n{}\r\n0\r\n\r\n", {0, 400}),
    ("chunk size beyond 64 bits", lambda s: head(s, JSON, "Transfer-Encoding: chunked", **POST) + b"fffffffffffffffff\r\n{}\r\n0\r\n\r\n", {0, 400}),
    ("chunk longer than its size", lambda s: head(s, JSON, "Transfer-Encoding: chunked", **POST) + b"1\r\n{}\r\n0\r\n\r\n", {0, 400}),
    ("obfuscated Transfer-Encoding", lambda s: head(s, JSON, "Transfer-Encoding: xchunked", **POST) + b"0\r\n\r\n", {0, 400}),
    ("Transfer-Encoding: chunked, identity", lambda s: head(s, JSON, "Transfer-Encoding: chunked, identity", **POST) + b"0\r\n\r\n", {0, 400}),
    ("space before the colon", lambda s: head(s, "Content-Length : 5", **POST), {0, 400}),
    ("folded header", lambda s: head(s, "X-A: a\r\n b"), {0, 400}),
    ("NUL in a header", lambda s: head(s, "X-A: a\0b"), {0, 400}),
    ("bare line feed in the path", lambda s: head(s, path="/api/v1/jobs\nX: y"), {0, 400}),
    ("carriage return in a header", lambda s: head(s, "X-A: a\rb"), {0, 400}),
    ("header of 1 MB", lambda s: head(s, "X-A: " + "a" * 1_000_000), {0, 400, 431}),
    ("path of 1 MB", lambda s: head(s, path="/" + "a" * 1_000_000), {0, 400, 414, 431}),
    ("10,000 headers", lambda s: head(s, *[f"X-{n}: a" for n in range(10_000)]), {0, 400, 431}),
    ("2,000 short headers", lambda s: head(s, *["a: b"] * 2000), {0, 400, 431}),
    ("no Host", lambda s: head(s, host=False), {400}),
    ("two Host headers", lambda s: head(s, f"Host: 127.0.0.1:{s.port}"), {400}),
    ("two Host headers, one of another server", lambda s: head(s, "Host: evil.example"), {400}),
    ("HTTP/0.9", lambda s: b"GET /api/v1/jobs\r\n\r\n", {0, 400}),
    ("HTTP/2 preface", lambda s: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {0, 400}),
    ("TLS", lambda s: bytes.fromhex("16030100c8010000c40303") + b"\0" * 200, {0, 400}),
    ("unknown method", lambda s: head(s, method="BREW"), {405}),
    ("TRACE", lambda s: head(s, method="TRACE"), {405}),
    ("CONNECT", lambda s: head(s, method="CONNECT", path="127.0.0.1:22"), {0, 400, 404, 405}),
    ("another server in the target", lambda s: head(s, path="http://evil.example/api/v1/jobs"), {200, 400, 404, 421}),
]


@pytest.mark.parametrize(("what", "made", "statuses"), SHAPES, ids=[s[0] for s in SHAPES])
def test_shapes(server, found, what, made, statuses):
    with server.connect() as s:
        with contextlib.suppress(ConnectionError):
            s.sendall(made(server))
        raw = read_all(s)  # ends when the server closes
        server.seen.append(raw)
        reply = Reply(raw)
        assert reply.status in statuses, reply
        # nobody else's request was smuggled in
        assert raw.count(b"HTTP/1.1 ") <= 1 or b"bad" in raw, raw
        found(f"HTTP: {what}", "raw bytes", reply.status or "connection closed")
    assert server.ask("GET", "/api/v1/health", token=None).status == 200


def test_bodies_over_the_limit(start, found):
    server = start(config={"limits": {"body_kilobytes": 64}})
    text = "a" * 64_001
    for path in ("/api/v1/validate", "/api/v1/jobs"):
        assert server.ask("POST", path, text).status == 413
        chunks = b"".join(b"1000\r\n" + b"a" * 4096 + b"\r\n" for _ in range(16)) + b"0\r\n\r\n"
        lines = (JSON, "Transfer-Encoding: chunked")
        assert server.send(head(server, *lines, method="POST", path=path) + chunks).status == 413
        assert server.ask("POST", path, "#" * 64_000).status in (200, 422)
        # told before the body comes, or without reading it all
        assert server.send(head(server, JSON, "Content-Length: 9000000000", method="POST", path=path) + b"x" * 70_000).status == 413
    found("body over the limit", "with its length, without (chunked), 9 GB announced", "413")


def test_what_follows_a_refusal_takes_no_memory(start, found):
    server = start(config={"limits": {"header_seconds": 300, "body_seconds": 300}})
    assert server.ask("POST", "/api/v1/jobs", "a" * 2_000_000).status == 413
    before = server.memory_bytes()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(server.connect()) for _ in range(50)]
        for s in clients:
            s.sendall(head(server, JSON, "Content-Length: 9000000000", method="POST", path="/api/v1/jobs", close=False))
        for s in clients:
            s.sendall(b"x" * 4_000_000)  # all of it is taken: the connection is there still
        assert server.memory_bytes() - before < 50_000_000
        for s in clients:
            reply = Reply(read_all(s))
            assert reply.status == 413 and reply.headers["connection"] == "close"
        assert server.ask("GET", "/api/v1/jobs").status == 200
    found("sending on after a refusal", "50 clients, 4 MB each after a 413", "thrown away: every one reads its 413, and memory stays")


SLOW = {"header_seconds": 1, "body_seconds": 1}


def test_slow_clients_lose_their_connection_and_keep_nobody_waiting(start, found):
    server = start(config={"limits": {**SLOW, "connections": 40, "connections_per_address": 30}})
    got = []
    for what, first in [("nothing", b""), ("half a head", b"GET /api/v1/jobs HTTP/1.1\r\nHost: a"), ("half a body", head(server, JSON, "Content-Length: 9", **POST) + b"{"),
                        ("idle after an answer", head(server, close=False))]:
        with server.connect() as s:
            s.sendall(first)
            assert server.ask("GET", "/api/v1/jobs").status == 200
            rest = read_all(s)  # ends when the server closes
            got.append((what, Reply(rest).status if rest else 0))
    assert [status for _, status in got] == [0, 0, 408, 200] or [status for _, status in got] == [0, 408, 408, 200], got
    found("slow client", "nothing, half a head, half a body, idle after an answer", f"closed after the configured seconds: {dict(got)}; others are served")


def test_a_drop_at_a_time_does_not_help(start, found):
    server = start(config={"limits": SLOW})
    with server.connect() as s, contextlib.suppress(ConnectionError):
        s.sendall(b"GET /api/v1/jobs HTTP/1.1\r\n")
        sent = 0
        while sent < 10_000:
            s.sendall(b"a: b\r\n"[sent % 6:sent % 6 + 1])
            sent += 1
            time.sleep(0.05)
            s.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                if s.recv(1000) == b"":
                    break
            s.setblocking(True)
    assert sent < 10_000
    found("slow client", "a byte of the head every 50 ms", "closed after the configured seconds")


def test_connections_over_the_limit(start, found):
    server = start(config={"limits": {"connections": 60, "connections_kept": 4, "connections_per_address": 20, "header_seconds": 300}})
    admin = server.new_token("root", "admin")
    idle = [server.connect() for _ in range(20)]
    for s in idle:
        s.sendall(b"GET /")
    # silence gives way to who comes later
    more = [server.connect() for _ in range(10)]
    closed = sum(read_all(s) == b"" for s in more[:6])
    assert closed == 6
    reply = server.ask("GET", "/api/v1/jobs")
    assert reply.status == 429 and int(reply.headers["retry-after"]) >= 1 and reply.headers["connection"] == "close"
    # who looks after the service is served all the same
    for path, token in [("/api/v1/health", None), ("/api/v1/ready", None), ("/metrics", server.token), ("/api/v1/jobs", admin)]:
        assert server.ask("GET", path, token=token).status == 200, path
    # and so is another address
    with socket.socket() as s:
        s.bind(("127.0.0.9", 0))
        s.connect(("127.0.0.1", server.port))
        s.sendall(head(server))
        assert Reply(read_one(s)).status == 200
    for s in idle + more:
        s.close()
    while (reply := try_ask(server)) is None:
        time.sleep(0.05)
    assert reply.status == 200
    found("idle connections", "30 from one address, 20 allowed", "429, or closed for the next one; health, figures, admin tokens and other addresses are served")


def try_ask(server):
    with contextlib.suppress(ConnectionError):
        reply = server.ask("GET", "/api/v1/health", token=None)
        return reply if reply.status else None


SITES = [
    ("Host of another server", ["Host: evil.example"], 421),
    ("Host with another port", ["Host: 127.0.0.1:1"], 421),
    ("rebound name", ["Host: 127.0.0.1.evil.example:{port}"], 421),
    ("user in Host", ["Host: 127.0.0.1:{port}@evil.example"], 421),
    ("empty Host", ["Host: "], 421),
    ("Origin of another site", ["Host: 127.0.0.1:{port}", "Origin: http://evil.example"], 403),
    ("Origin null", ["Host: 127.0.0.1:{port}", "Origin: null"], 403),
    ("Origin with another port", ["Host: 127.0.0.1:{port}", "Origin: http://127.0.0.1:1"], 403),
    ("sec-fetch-site: cross-site", ["Host: 127.0.0.1:{port}", "Sec-Fetch-Site: cross-site"], 403),
    ("sec-fetch-site: same-site", ["Host: 127.0.0.1:{port}", "Sec-Fetch-Site: same-site"], 403),
    ("navigation to the API from another site", ["Host: 127.0.0.1:{port}", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate"], 403),
]


@pytest.mark.parametrize(("what", "lines", "status"), SITES, ids=[s[0] for s in SITES])
@pytest.mark.parametrize("tokens", [True, False], ids=["token", "open"])
def test_other_sites(server, open_server, found, what, lines, status, tokens):
    one = server if tokens else open_server
    lines = [line.format(port=one.port) for line in lines]
    reply = one.send(head(one, *lines, host=False, token=tokens))
    assert reply.status == status, reply
    assert "access-control-allow-origin" not in reply.headers
    found(what, "; ".join(lines).replace(str(one.port), "PORT"), status)


@pytest.fixture(scope="module")
def open_server(tmp_path_factory):
    from conftest import Server, furnish
    one = Server(tmp_path_factory.mktemp("open"), tokens=False)
    try:
        furnish(one.start())
        one.token = None
        yield one
    finally:
        one.stop()


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None, "text/plain;application/json", "application/jsonx"])
def test_forms_submit_nothing(open_server, found, media):
    """What another site's form can send without asking first."""
    reply = open_server.submit(job_file(), media=media)
    assert reply.status == 415 and open_server.ask("GET", "/api/v1/jobs").json()["jobs"] == []
    found("form of another site", f"content type {media}", 415)


def test_tokens(server, found):
    good, good_id = server.new_token("ada", "read", "submit", id_too=True)
    other, other_id = server.new_token("bob", "read", "submit", id_too=True)
    gone, gone_id = server.new_token("ada", "read", id_too=True)
    subprocess.run([BINARY, "token", "revoke", gone_id, "--data", str(server.data)], check=True, env=server.env)
    over, over_id = server.new_token("ada", "read", id_too=True)
    with sqlite3.connect(server.data / "service.sqlite", timeout=30) as db:
        assert db.execute("UPDATE tokens SET expires_at = 1 WHERE id = ?", [over_id]).rowcount == 1
    secret = good.split("_")[2]
    bad = {
        "none": None, "empty": "", "not one": "abc", "truncated": good[:-1], "without its secret": f"sh_{good_id}_", "longer": good + "0",
        "another id, the same secret": f"sh_{other_id}_{secret}", "upper case": good.upper(), "revoked": gone, "expired": over, "the id alone": good_id,
        "SQL": "sh_' OR 1=1 --_x", "1 KB": "sh_" + "a" * 1000, "two": f"{good}, {other}", "accents": "sh_é_é",
    }
    words = set()
    for what, token in bad.items():
        reply = server.ask("GET", "/api/v1/jobs", token=token)
        assert reply.status == 401 and reply.headers["www-authenticate"].startswith("Bearer"), (what, reply)
        words.add(reply.json()["detail"])
        found("token", what, 401)
    assert len(words) <= 2  # no good token; no token at all in the header
    for what, reply in [
        ("in the query", server.ask("GET", f"/api/v1/jobs?token={good}", token=None)),
        ("in the query of a stream", server.ask("GET", f"/api/v1/events?access_token={good}", token=None)),
        ("in a cookie", server.ask("GET", "/api/v1/jobs", token=None, headers=[f"Cookie: token={good}"])),
        ("Basic", server.ask("GET", "/api/v1/jobs", token=None, headers=["Authorization: Basic YTpi"])),
        ("twice", server.ask("GET", "/api/v1/jobs", token=good, headers=[f"Authorization: Bearer {good}"])),
        ("/metrics without one", server.ask("GET", "/metrics", token=None)),
        ("/metrics with a revoked one", server.ask("GET", "/metrics", token=gone)),
    ]:
        assert reply.status == 401, (what, reply)
        found("token", what, 401)
    assert server.ask("GET", "/metrics", token=good).status == 200
    assert secret not in server.log.read_text()


def test_what_a_token_does_not_allow(server, found):
    reader, bob = server.new_token("eve", "read"), server.new_token("bob", "read", "submit")
    job = server.run(job_file(input__paths=["none.jsonl"]))
    at = f"/api/v1/jobs/{job['id']}"
    for what, token, method, path, body in [
        ("read-only, submits", reader, "POST", "/api/v1/jobs", job_file()), ("read-only, validates", reader, "POST", "/api/v1/validate", job_file()),
        ("read-only, cancels", reader, "POST", f"{at}/cancel", None), ("another user cancels", bob, "POST", f"{at}/cancel", None),
        ("another user retries", bob, "POST", f"{at}/retry", None), ("another user deletes", bob, "DELETE", at, None),
    ]:
        reply = server.ask(method, path, body, token=token)
        assert reply.status == 403, (what, reply)
        found("scope", what, 403)
    writer = server.new_token("wes", "submit")
    nobodys = "/api/v1/jobs/000000000000"
    for path in ("", "/logs", "/file", "/manifest", "/report", "/events", "/rates"):
        replies = [server.ask("GET", f"{one}{path}", token=writer) for one in (at, nobodys)]
        assert [r.status for r in replies] == [403, 403] and len({r.json()["detail"] for r in replies}) == 1, replies
    assert server.ask("GET", "/api/v1/jobs", token=writer).json()["jobs"] == []
    for path in ("/api/v1/jobs?user=ada", "/metrics"):
        assert server.ask("GET", path, token=writer).status == 403, path
    found("scope", "submit-only, reads the jobs of others, asks whether an id is somebody's", "403, the same words; lists and streams hold its own")
    assert server.ask("GET", at).json()["state"] == "failed"


def test_idempotency_keys(server, found):
    bob = server.new_token("bob", "read", "submit")
    one, two = job_file(input__paths=["tiny.jsonl"], output__path="key1"), job_file(input__paths=["tiny.jsonl"], output__path="key2")
    key = ["Idempotency-Key: k-1"]
    first = server.submit(one, headers=key)
    assert first.status == 201 and server.submit(one, headers=key).json()["id"] == first.json()["id"]
    assert server.submit(two, headers=key).status == 422
    assert server.submit(one, headers=key, query="?priority=1").status == 422
    others = server.submit(one, headers=key, token=bob)
    assert others.status == 201 and others.json()["id"] != first.json()["id"] and others.json()["user"] == "bob"
    for bad in ("", "a b", "x" * 201, "é"):
        assert server.submit(one, headers=[f"Idempotency-Key: {bad}"]).status == 400, bad
    found("Idempotency-Key", "another body; other settings; another user; not one", "422; 422; a job of their own; 400")


def test_limits_are_told_with_retry_after(start, found):
    server = start(config={"limits": {"queued_jobs": 3, "queued_jobs_per_user": 2, "watchers": 2, "submissions_per_minute": 1000}})
    bob = server.new_token("bob", "read", "submit")
    busy = server.submit(job_file(extract={"teacher": {"path": "teacher"}, "topk": 1}, output__path="busy")).json()["id"]
    server.wait(busy, {"running"})
    statuses = [server.submit(job_file(output__path=f"q{n}")).status for n in range(2)]
    over = server.submit(job_file(output__path="q3"))
    assert statuses == [201, 201] and over.status == 429 and int(over.headers["retry-after"]) >= 1
    assert server.submit(job_file(output__path="b1"), token=bob).status == 201
    assert server.submit(job_file(output__path="b2"), token=bob).status == 429
    found("queue limit", "of a user, of all", "429 with Retry-After")
    streams = [server.connect() for _ in range(2)]
    for s, path in zip(streams, ["/api/v1/events", f"/api/v1/jobs/{busy}/logs?follow=true"], strict=True):
        s.sendall(head(server, path=path))
        assert b" 200 " in s.recv(1000)
    for path in ("/api/v1/events", f"/api/v1/jobs/{busy}/logs?follow=true", f"/api/v1/jobs/{busy}/events"):
        reply = server.ask("GET", path, headers=["Accept: text/event-stream"])
        assert reply.status == 429 and int(reply.headers["retry-after"]) >= 1
    assert server.ask("GET", f"/api/v1/jobs/{busy}/logs").status == 200
    for s in streams:
        s.close()
    while server.ask("GET", "/api/v1/events").status == 429:
        time.sleep(0.1)
    found("watchers limit", "a third stream where two may be", "429 with Retry-After; free again when one closes")
    server.ask("POST", f"/api/v1/jobs/{busy}/cancel")


def test_rate_limits(start, found):
    server = start(config={"limits": {"requests_per_minute": 60, "submissions_per_minute": 5}})
    bob = server.new_token("bob", "read", "submit")
    seen = [server.ask("POST", "/api/v1/validate", job_file()) for _ in range(6)]
    assert [r.status for r in seen[:5]] == [200] * 5 and seen[5].status == 429 and int(seen[5].headers["retry-after"]) >= 1
    replies = [server.ask("GET", "/api/v1/jobs") for _ in range(80)]
    assert replies[-1].status == 429 and int(replies[-1].headers["retry-after"]) >= 1
    assert server.ask("GET", "/api/v1/jobs", token=bob).status == 200
    found("rate limit", "requests and submissions of one user", "429 with Retry-After; others are served")


def test_every_header_comes_once(server):
    """Two content types would leave it to the client which one holds."""
    for method, path, body in [("GET", "/api/v1/jobs", None), ("GET", "/nothing", None), ("PUT", "/api/v1/jobs", None), ("POST", "/api/v1/jobs", "{"),
                               ("GET", "/", None), ("GET", "/api/v1/jobs/aaaaaaaaaaaa", None), ("GET", "/metrics", None)]:
        for token in (server.token, None):
            reply = server.ask(method, path, body, token=token)
            names = [line.split(b":")[0].lower() for line in reply.raw.split(b"\r\n\r\n")[0].split(b"\r\n")[1:]]
            assert len(names) == len(set(names)), (method, path, names)
            if reply.status >= 400:
                assert reply.headers["content-type"] == "application/problem+json" and reply.json()["status"] == reply.status


PATHS = ["/page/..%2f..%2fetc/passwd", "/page/..%2f..%2fetc%2fpasswd", "/page/../../etc/passwd", "/page/%2e%2e/x", "/page//etc/passwd", "/page/index.html%00.css", "/page/..%5cx",
         "/api/v1/jobs/..%2f..%2fetc", "/api/v1/jobs/%00", "/api/v1/jobs/' OR 1=1", "/api/v1/jobs/aaaaaaaaaaaa/..", "/api/v1/jobs/AAAAAAAAAAAA", "/api/v1/jobs/..%2f..%2fservice.sqlite/logs",
         "/%61pi/v1/jobs", "//api/v1/jobs", "/api/v1/../v1/jobs", "/api/v1/jobs/%ff%fe"]


@pytest.mark.parametrize("path", PATHS)
def test_paths_lead_nowhere(server, found, path):
    reply = server.ask("GET", path.replace(" ", "%20"))
    assert reply.status in (400, 404), reply
    found("path", f"`{path}`", reply.status)


NASTY = "\x1b[2J\x1b]0;owned\x07\r\nforged: 1\u202e"


def test_control_characters_stay_out_of_logs_and_headers(server, found):
    """The server's log stays one JSON object per line, the job's log one line per line."""
    for job in (job_file(name=NASTY), job_file(input__paths=[NASTY]), job_file(output__path=NASTY), job_file(tokenizer__path=NASTY), job_file(input__text=NASTY)):
        reply = server.submit(job)
        if reply.status == 201:
            server.wait(reply.json()["id"])
            log = server.job_log(reply.json()["id"])
            assert "\x1b" not in log and "\r" not in log and all(" attempt " in line for line in log.splitlines()), log
        else:
            assert reply.status == 422
    folder = server.allowed / "nasty\x1b[2J\nforged: 1"
    folder.mkdir()
    (folder / "tiny.jsonl").write_bytes((server.allowed / "tiny.jsonl").read_bytes())
    reply = server.submit(job_file(input__paths=["tiny.jsonl"], tokenizer__path=str(server.allowed / "teacher")), query=f"?folder={quoted(folder)}")
    if reply.status == 201:
        server.wait(reply.json()["id"])
        log = server.job_log(reply.json()["id"])
        assert "\x1b" not in log and all(" attempt " in line for line in log.splitlines()), log
    for header in ("User-Agent: \x1b[2J", "X-Request-Id: forged", "Last-Event-ID: \x1b", "X-Forwarded-For: 6.6.6.6"):
        server.ask("GET", "/api/v1/jobs", headers=[header])
    server.ask("GET", f"/api/v1/jobs?name={quoted(NASTY)}&x={quoted(NASTY)}")
    server.ask("GET", f"/{quoted(NASTY)}")
    log = server.log.read_text()
    assert "\x1b" not in log and "forged" not in re.sub(r'"path":"[^"]*"', "", log).replace("\\nforged", "").replace("\\r\\nforged", "")
    for line in log.splitlines():
        assert line.startswith("http://") or isinstance(json.loads(line), dict), line
    assert "6.6.6.6" not in log
    found("terminal escapes, line breaks", "in names, paths, folder=, headers, queries", "escaped: each log line is one JSON object, each line of a job's log one line")


DEEP = 100_000
FILES = [
    ("YAML aliases", "application/yaml", "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(12))),
    ("YAML of many files", "application/yaml", "---\na: 1\n" * 50_000),
    ("YAML tag", "application/yaml", "!!python/object/apply:os.system [id]"),
    ("YAML nested 2,000 deep", "application/yaml", "[" * 2000 + "]" * 2000),
    ("JSON nested 2,000 deep", "application/json", '{"a":' * 2000 + "1" + "}" * 2000),
    ("number of 100,000 digits", "application/json", '{"version":1' + "0" * 100_000 + "}"),
    ("seed 1e400", "application/json", json.dumps(job_file()).replace('"version": 1', '"version": 1, "seed": 1e400')),
    ("NaN", "application/json", '{"version": NaN}'),
    ("not UTF-8", "application/json", b'{"name": "\xff\xfe"}'),
    ("UTF-16", "application/yaml", "version: 1".encode("utf-16")),
    ("NUL", "application/yaml", b"version: 1\0"),
    ("lone surrogate", "application/json", '{"name": "\\ud800"}'),
    ("empty", "application/yaml", ""),
    ("2,000 unknown keys", "application/json", json.dumps({f"k{n}": 1 for n in range(2000)})),
]


@pytest.mark.parametrize(("what", "media", "body"), FILES, ids=[f[0] for f in FILES])
def test_files_that_are_bombs(server, found, what, media, body):
    submitted, validated = server.submit(body, media=media), server.ask("POST", "/api/v1/validate", body, media=media)
    assert submitted.status in (400, 422) and validated.status in (200, 400), (submitted, validated)
    if validated.status == 200:
        assert validated.json()["valid"] is False
    found("job file", what, f"{submitted.status}: {submitted.json().get('problems', [submitted.json()])[0].get('message', submitted.json()['detail'])[:120]}")


@pytest.mark.parametrize("media", ["application/yaml", "application/json"])
@pytest.mark.parametrize("path", ["/api/v1/jobs", "/api/v1/validate"])
def test_deep_nesting_costs_next_to_nothing(server, found, media, path):
    """As deep as a body may be. Where the parser is quadratic in the depth this takes minutes, and the socket's bound ends it."""
    body = '{"a":' * DEEP + "1" + "}" * DEEP if media.endswith("json") else "[" * DEEP * 5
    reply = server.ask("POST", path, body, media=media)
    assert reply.status in (200, 400, 422), reply
    found("job file", f"{media}, {DEEP:,} levels, {path}", reply.status)


def test_the_data_folder_is_private(server, found):
    assert stat.S_IMODE(server.data.stat().st_mode) == 0o700
    token = server.token.split("_")[2]
    database = b"".join(p.read_bytes() for p in server.data.iterdir() if p.is_file())
    assert token.encode() not in database and bytes.fromhex(token) not in database
    found("the data folder", "its mode; the database", "0700; hashes of tokens alone")


def test_secrets_are_nowhere(server):
    """In no answer, log line or file of the data folder."""
    everything = b"".join(server.seen) + server.log.read_bytes()
    everything += b"".join(p.read_bytes() for p in server.data.rglob("*") if p.is_file())
    for secret in [*CANARIES.values(), server.token, server.token.split("_")[2]]:
        assert secret.encode() not in everything, secret[:6]
