"""Job files that reach for what they may not have: files, folders, stores, addresses.

Every attack is refused when it is submitted, or by the worker; the words do not say whether what was asked for exists.
"""
import json
import os
import shutil
import socket
import threading

import pytest
from conftest import CANARIES, OVER, Server, furnish, job_file, quoted

SECRET = "the-secret-that-lies-outside"


@pytest.fixture(scope="module")
def outside(server):
    """A folder beside the allowed one, and links in the allowed folder that lead there."""
    outside = server.root / "outside"
    (outside / "data").mkdir(parents=True)
    (outside / "secret.jsonl").write_text(json.dumps({"text": f"{SECRET} " * 200}) + "\n")
    shutil.copytree(server.allowed / "teacher", outside / "teacher")
    a = server.allowed
    (a / "link.jsonl").symlink_to(outside / "secret.jsonl")
    (a / "linked").symlink_to(outside)
    (a / "relative.jsonl").symlink_to("../outside/secret.jsonl")
    (a / "nested/deeper").mkdir(parents=True)
    (a / "nested/deeper/x.jsonl").symlink_to(outside / "secret.jsonl")
    (a / "twice.jsonl").symlink_to("nested/deeper/x.jsonl")
    (a / "dangling.jsonl").symlink_to(outside / "none.jsonl")
    (a / "environ").symlink_to("/proc/self/environ")
    (a / "tokens").symlink_to(server.data / "service.sqlite")
    (a / "out-link").symlink_to(outside / "out")
    (a / "out-data").mkdir()
    (a / "out-data/data").symlink_to(outside / "data")
    (a / "out-manifest").mkdir()
    (a / "out-manifest/manifest.json").symlink_to(outside / "manifest.json")
    for name, file in [("model-link", "model.safetensors"), ("tokenizer-link", "tokenizer.json")]:
        shutil.copytree(a / "teacher", a / name)
        (a / name / file).unlink()
        (a / name / file).symlink_to(outside / "teacher" / file)
    shutil.copytree(a / "teacher", a / "sharded")
    (a / "sharded/model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"a": "../../outside/teacher/model.safetensors"}}
    (a / "sharded/model.safetensors.index.json").write_text(json.dumps(index))
    return outside


def refused(server, job, query=""):
    """What was said to a job that must not run: (where, in words). Fails when it succeeded or made anything outside."""
    reply = server.submit(job, query=query)
    if reply.status != 201:
        assert reply.status == 422, reply
        return "refused", "; ".join(f"{p['field']}: {p['message']}" for p in reply.json()["problems"])
    done = server.wait(reply.json()["id"])
    assert done["state"] == "failed", done
    problems = [f"{p['field']}: {p['message']}" for p in done["failure"]["problems"]]
    return "failed", "; ".join(problems) or done["reason"]


READING = [
    ("plain path", "/etc/passwd"),
    ("plain path", "/proc/self/environ"),
    ("plain path", "/proc/1/environ"),
    ("`..`", "../../../../../../../../etc/passwd"),
    ("`..` after what is not there", "none/../../../../../../../../etc/passwd"),
    ("`..` out of the allowed folder", "../outside/secret.jsonl"),
    ("`..` after a link", "linked/../outside/secret.jsonl"),
    ("file:// URL", "file:///etc/passwd"),
    ("file:// URL with a host", "file://localhost/etc/passwd"),
    ("file:// URL, upper case", "FILE:///etc/passwd"),
    ("file:// URL, `..`", "file://../outside/secret.jsonl"),
    ("link to a file", "link.jsonl"),
    ("relative link", "relative.jsonl"),
    ("link to a link", "twice.jsonl"),
    ("link to nowhere", "dangling.jsonl"),
    ("link to a folder", "linked/secret.jsonl"),
    ("link to /proc/self/environ", "environ"),
    ("link to the service's database", "tokens"),
    ("pattern over links", "*.jsonl"),
    ("pattern over a linked folder", "linked/*.jsonl"),
    ("deep pattern", "nested/**/*.jsonl"),
    ("pattern that climbs", "*/../../outside/*.jsonl"),
    ("pattern with braces", "{linked,nested}/*.jsonl"),
    ("pattern over the root", "/*"),
    ("NUL", "tiny.jsonl\0/../../../etc/passwd"),
    ("line break", "tiny.jsonl\n/etc/passwd"),
    ("percent-encoded", "%2e%2e/outside/secret.jsonl"),
    ("home", "~/.ssh/id_rsa"),
    ("environment", "$HOME/.ssh/id_rsa"),
]


@pytest.mark.parametrize(("how", "path"), READING, ids=[f"{how}-{n}" for n, (how, _) in enumerate(READING)])
def test_nothing_outside_is_read(server, outside, found, how, path):
    for format_ in ("jsonl", "text"):
        job = job_file(input__paths=[path], input__format=format_, output__path="read-out")
        where, said = refused(server, job)
        assert SECRET not in said and "root:" not in said
    found(f"read: {how}", f"`{path!a}`".replace("\\x00", "\\0"), f"{where}: {said[:160]}")


@pytest.mark.parametrize("name", ["service.sqlite", "service.sqlite-wal", "lock", "logs", "scratch", "*", ""])
def test_the_services_own_folder_is_not_read(server, found, name):
    where, said = refused(server, job_file(input__paths=[f"{server.data}/{name}"], input__format="text"))
    assert where == "refused" and "does not allow reading here" in said
    found("read: the service's data", name or "the folder", said[:120])


@pytest.mark.parametrize("data", ["inner", "up/inner", "inner/../deeper/still"])
def test_a_data_folder_inside_an_allowed_one_is_refused(tmp_path, found, data):
    """The kernel confines to folders with all that is in them: such a service does not start."""
    server = Server(tmp_path)
    (server.allowed / "up").symlink_to(server.allowed)
    server.config["data"] = f"{server.allowed}/{data}"
    with pytest.raises(AssertionError, match="which jobs may access"):
        server.start()
    assert server.process.returncode == 2
    found("the service's data inside an allowed folder", f"`{data}`", "the service does not start, exit code 2")


def test_existing_and_missing_forbidden_files_get_the_same_words(server, outside, found):
    """Whatever is asked: the same answer but for the name itself."""
    (server.root / "outside/link-out").symlink_to("/usr/share")
    climb = "../" * len(server.allowed.parts)
    pairs = [
        ("/etc/passwd", "/etc/nobody-has-this"),
        ("../outside/secret.jsonl", "../outside/missing.jsonl"),
        ("link.jsonl", "dangling.jsonl"),
        ("linked/secret.jsonl", "linked/missing.jsonl"),
        ("../outside/link-out/../x", "../outside/link-no/../x"),
        ("/etc/localtime/../x", "/etc/nobody-has-this/../x"),
        (f"{climb}etc/passwd", f"{climb}etc/nobody"),
    ]
    for there, missing in pairs:
        said = []
        for path in (there, missing):
            reply = server.ask("POST", "/api/v1/validate", job_file(input__paths=[path], tokenizer__path=path))
            body = reply.json()
            assert not body["valid"], (path, body)
            said.append([(p["field"], p["message"]) for p in body["problems"]])
        assert said[0] == said[1], (there, missing)
    found("existence of forbidden files", f"{len(pairs)} pairs, one of each there", "the same words for both")


@pytest.mark.parametrize("there", ["/etc/localtime", "/proc/self/cwd", "DANGLING"])
def test_the_folder_does_not_tell_what_is_there(server, outside, found, there):
    """`folder` names a forbidden place and the path climbs out of it: where the place leads must not show."""
    if there == "DANGLING":
        there = str(server.root / "outside/dangling")
        if not os.path.lexists(there):
            os.symlink("/nonexistent/zz", there)
    said = []
    for folder in (there, there + "-is-not-there"):
        climb = "../" * (folder.count("/"))
        job = job_file(input__paths=[f"{climb}{str(server.allowed)[1:]}/tiny.jsonl"])
        body = server.ask("POST", f"/api/v1/validate?folder={quoted(folder)}", job).json()
        said.append([p["message"] for p in body["problems"] if p["field"] == "input.paths[0]"])
    found("existence of forbidden links", f"folder={there} and a path that climbs out", f"{said[0]} / {said[1]}")
    assert said[0] == said[1]


FOLDERS = ["/etc", "/", "/proc/self", "/tmp/../etc", "//etc", "/etc/", "/./etc"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_allows_nothing(server, found, folder):
    job = job_file(input__paths=["passwd"], input__format="text", output__path="out", tokenizer__path=str(server.allowed / "teacher"))
    where, said = refused(server, job, query=f"?folder={quoted(folder)}")
    assert where == "refused" and "input.paths[0]" in said and "output.path" in said
    found("read: folder=", f"`{folder}` with the path `passwd`", said[:120])


@pytest.mark.parametrize("folder", ["", "etc", "../etc", "file:///etc", "/etc\0/x", "C:\\", "/" + "x" * 5000])
def test_folders_that_are_none(server, found, folder):
    reply = server.submit(job_file(), query=f"?folder={quoted(folder)}")
    assert reply.status == 400, reply
    found("folder=", f"{folder[:20]!a}", "400")


MODELS = [
    ("tokenizer outside", {"tokenizer__path": "/etc"}),
    ("tokenizer by `..`", {"tokenizer__path": "../outside/teacher"}),
    ("tokenizer in a linked folder", {"tokenizer__path": "linked/teacher"}),
    ("tokenizer.json that is a link", {"tokenizer__path": "tokenizer-link"}),
    ("tokenizer in the service's folder", {"tokenizer__path": "../data"}),
    ("teacher outside", {"extract": {"teacher": {"path": "../outside/teacher"}}}),
    ("teacher in a linked folder", {"extract": {"teacher": {"path": "linked/teacher"}}}),
    ("model.safetensors that is a link", {"extract": {"teacher": {"path": "model-link"}}}),
    ("safetensors index with `..`", {"extract": {"teacher": {"path": "sharded"}}}),
    ("hub, not allowed", {"tokenizer__path": "hf://openai-community/gpt2"}),
    ("hub, not allowed", {"extract": {"teacher": {"path": "hf://openai-community/gpt2@main"}}}),
    ("hub with `..`", {"tokenizer__path": "hf://../../etc/passwd"}),
]


@pytest.mark.parametrize(("how", "changes"), MODELS, ids=[f"{h}-{n}" for n, (h, _) in enumerate(MODELS)])
def test_no_model_from_outside(server, outside, found, how, changes):
    where, said = refused(server, job_file(input__paths=["tiny.jsonl"], output__path="model-out", **changes))
    assert SECRET not in said
    found(f"model: {how}", f"`{json.dumps(changes)}`", f"{where}: {said[:160]}")


WRITING = [
    ("plain path", "/tmp/stillhouse-attack"),
    ("`..`", "../outside/out"),
    ("link to a folder", "out-link"),
    ("below a linked folder", "linked/out"),
    ("linked data/ in an output", "out-data"),
    ("linked manifest.json", "out-manifest"),
    ("the service's folder", "../data/out"),
    ("the service's scratch folder", "../data/scratch"),
    ("file:// URL", "file:///tmp/stillhouse-attack"),
    ("a file that is there", "../outside/secret.jsonl"),
    ("line break", "out\n/x"),
    ("store that is not allowed", "s3://bucket/prefix"),
    ("web server", "http://127.0.0.1/out"),
]


@pytest.mark.parametrize(("how", "path"), WRITING, ids=[how for how, _ in WRITING])
@pytest.mark.parametrize("overwrite", ["false", "true"])
def test_nothing_outside_is_written(server, outside, found, how, path, overwrite):
    before = sorted(str(p) for p in outside.rglob("*")), os.path.exists("/tmp/stillhouse-attack")
    job = job_file(input__paths=["tiny.jsonl"], output__path=path)
    where, said = refused(server, job, query=f"?overwrite={overwrite}")
    assert before == (sorted(str(p) for p in outside.rglob("*")), os.path.exists("/tmp/stillhouse-attack"))
    found(f"write: {how}", f"`{path!a}`, overwrite={overwrite}", f"{where}: {said[:120]}")


def test_a_foreign_folder_is_not_overwritten(server, found):
    foreign = server.allowed / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    for overwrite in ("false", "true"):
        where, said = refused(server, job_file(input__paths=["tiny.jsonl"], output__path="foreign"), f"?overwrite={overwrite}")
        found("write: a folder that is no data set", f"overwrite={overwrite}", f"{where}: {said[:120]}")
    assert (foreign / "thesis.txt").read_text() == "mine" and len(list(foreign.iterdir())) == 1


def test_another_users_data_set_is_kept_without_overwrite(server, found):
    first = server.run(job_file(input__paths=["tiny.jsonl"], output__path="adas", seed=1))
    assert first["state"] == "succeeded"
    manifest = (server.allowed / "adas/manifest.json").read_bytes()
    bob = server.new_token("bob", "read", "submit")
    job = job_file(input__paths=["tiny.jsonl"], output__path="adas", seed=2)
    done = server.wait(server.submit(job, token=bob).json()["id"])
    assert done["state"] == "failed" and (server.allowed / "adas/manifest.json").read_bytes() == manifest
    found("write: another user's data set", "the same output, another job", done["reason"][:120])


SQL = [
    "SELECT * FROM '/etc/passwd'",
    "SELECT * FROM '/etc/passwd.csv'",
    "SELECT * FROM \"/etc/passwd\"",
    "SELECT * FROM read_csv('/etc/passwd')",
    "COPY (SELECT * FROM input) TO '/tmp/stillhouse-attack.csv'",
    "CREATE EXTERNAL TABLE t STORED AS CSV LOCATION '/etc/passwd'",
    "SELECT text FROM input; DROP TABLE input",
    "SET datafusion.catalog.location = '/etc'",
    "SELECT text FROM information_schema.tables",
    "SELECT value AS text FROM information_schema.df_settings",
    "INSERT INTO input SELECT * FROM input",
    "EXPLAIN ANALYZE SELECT * FROM input",
    "WITH RECURSIVE t AS (SELECT '/etc/passwd' AS text UNION ALL SELECT text FROM '/etc/passwd') SELECT text FROM t",
]


@pytest.mark.parametrize("sql", SQL)
def test_sql_reads_its_input_alone(server, found, sql):
    where, said = refused(server, job_file(input__paths=["tiny.jsonl"], input__sql=sql, output__path="sql-out"))
    assert "root:" not in said and not os.path.exists("/tmp/stillhouse-attack.csv")
    found("SQL", f"`{sql}`", f"{where}: {said[:160]}")


@pytest.fixture
def listener():
    """A server that writes down what it is sent, and redirects when asked to."""
    got, sock = [], socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    port = sock.getsockname()[1]

    def serve():
        while True:
            try:
                client, _ = sock.accept()
            except OSError:
                return
            with client:
                client.settimeout(30)
                try:
                    got.append(client.recv(65536))
                    client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                except OSError:
                    pass

    threading.Thread(target=serve, daemon=True).start()
    yield port, got
    sock.close()


ADDRESSES = [
    "http://127.0.0.1:{port}/x.jsonl", "http://localhost:{port}/x.jsonl", "http://0x7f.1:{port}/x.jsonl", "http://2130706433:{port}/x.jsonl",
    "http://0177.0.0.1:{port}/x.jsonl", "http://127.1:{port}/x.jsonl", "http://[::1]:{port}/x.jsonl", "http://[::ffff:127.0.0.1]:{port}/x.jsonl",
    "http://[::ffff:7f00:1]:{port}/x.jsonl", "http://0.0.0.0:{port}/x.jsonl", "http://[::]:{port}/x.jsonl", "http://169.254.169.254/latest/meta-data/x",
    "http://10.0.0.1/x.jsonl", "http://192.168.0.1/x.jsonl", "http://[fd00::1]/x.jsonl", "http://[64:ff9b::7f00:1]:{port}/x", "http://user:pw@127.0.0.1:{port}/x",
    "http://①②⑦.⓪.⓪.①:{port}/x.jsonl", "http://127.0.0.1%00.example.org:{port}/x",
]


@pytest.fixture(scope="module")
def web_server(tmp_path_factory):
    """A server whose jobs may read any web address of the public internet."""
    one = Server(tmp_path_factory.mktemp("web"), env=CANARIES)
    one.config["access"]["read"] += ["http://*", "https://*"]
    one.config["limits"]["max_attempts"] = 1
    try:
        furnish(one.start())
        yield one
    finally:
        one.stop()


@pytest.mark.parametrize("url", ADDRESSES)
def test_no_private_address_is_asked(web_server, listener, found, url):
    port, got = listener
    where, said = refused(web_server, job_file(input__paths=[url.format(port=port)], output__path="web-out"))
    assert not got, got
    found("http input", f"`{url.format(port='PORT')}`, any public address allowed", f"{where}: {said[:160]}")


@pytest.mark.parametrize("to", ["http://127.0.0.1:{other}/x.jsonl", "http://169.254.169.254/x", "file:///etc/passwd", "/elsewhere/x.jsonl"])
def test_redirects_lead_nowhere_else(start, listener, found, to):
    """One prefix of a private server is allowed; it sends the job elsewhere."""
    other, got = listener
    answer = f"HTTP/1.1 302 Found\r\nLocation: {to.format(other=other)}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
    asked = []
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]

        def redirect():
            while True:
                try:
                    client, _ = sock.accept()
                    with client:
                        asked.append(client.recv(65536))
                        client.sendall(answer)
                except OSError:
                    return

        threading.Thread(target=redirect, daemon=True).start()
        prefix = f"http://127.0.0.1:{port}/ok"
        server = start(config={"limits": {"max_attempts": 1}, "access": {"private_networks": True}})
        server.stop()
        server.config["access"]["read"].append(prefix)
        server.start()
        where, said = refused(server, job_file(input__paths=[f"{prefix}/x.jsonl"], output__path="redirect-out"))
        sock.shutdown(socket.SHUT_RDWR)
    assert asked and not got and all(b"GET /ok/" in a or b"HEAD /ok/" in a for a in asked), (asked, got, said)
    found("http redirect", f"to `{to}`", f"{where}: {said[:160]}")


ENDPOINTS = ["http://127.0.0.1:{port}", "http://169.254.169.254", "http://localhost:{port}/", "https://127.0.0.1:{port}"]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("place", ["storage", "input__storage", "output__storage"])
def test_credentials_go_to_no_other_endpoint(web_server, listener, found, endpoint, place):
    port, got = listener
    job = job_file(input__paths=["s3://corpora/x.jsonl"], output__path="endpoint-out", **{place: {"endpoint": endpoint.format(port=port)}})
    where, said = refused(web_server, job)
    assert not got, got
    found("endpoint", f"`{place}.endpoint: {endpoint.format(port='PORT')}`".replace("__", "."), f"{where}: {said[:160]}")


def test_canaries_are_nowhere(server, web_server):
    """No answer, log line, database page or manifest holds a secret of the environment or of a token."""
    for one in (server, web_server):
        secrets = [*CANARIES.values(), one.token.split("_")[2]]
        answers = b"".join(one.seen)
        files = [p for folder in (one.data, one.allowed) for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]
        for secret in secrets:
            for name, content in [("answers", answers), ("log", one.log.read_bytes()), *((str(p), p.read_bytes()) for p in files)]:
                assert secret.encode() not in content, f"{name} holds {secret[:6]}…"


@pytest.mark.parametrize("kind", ["file", "folder", "output"])
def test_a_link_that_changes_while_the_job_waits(start, found, kind):
    """The check passes, then the name leads elsewhere; the worker's own check, and Landlock, stop it."""
    server = start(env=CANARIES)
    outside = server.root / "outside"
    outside.mkdir()
    (outside / "in.jsonl").write_text(json.dumps({"text": f"{SECRET} " * 500}) + "\n")
    inside = server.allowed / "inside"
    inside.mkdir()
    shutil.copy(server.allowed / "tiny.jsonl", inside / "in.jsonl")
    link = server.allowed / "name"
    target, path = {"file": ("in.jsonl", "name"), "folder": ("", "name/in.jsonl"), "output": ("", "tiny.jsonl")}[kind]
    link.symlink_to(inside / target)
    # the only slot is taken, so the job waits
    busy = server.submit(job_file(extract={"teacher": {"path": "teacher"}, "topk": 1}, output__path="busy")).json()["id"]
    server.wait(busy, {"running"} | OVER)
    output = "name/out" if kind == "output" else "swapped"
    reply = server.submit(job_file(input__paths=[path], output__path=output))
    assert reply.status == 201 and reply.json()["state"] == "queued", reply
    link.unlink()
    link.symlink_to(outside / target)
    server.ask("POST", f"/api/v1/jobs/{busy}/cancel")
    done = server.wait(reply.json()["id"])
    assert done["state"] == "failed" and SECRET not in server.job_log(done["id"])
    assert sorted(p.name for p in outside.iterdir()) == ["in.jsonl"]
    found("link changed while queued", kind, done["reason"][:200])
