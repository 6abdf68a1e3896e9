"""What is in deploy/: each file checked by the program that it is for, and live streams through a real nginx and a real Caddy.

    client ─TLS─► nginx with deploy/nginx.conf ─► stillhouse serve ─► events, one by one
    client ─────► caddy with deploy/Caddyfile ──┘

Tools come from scripts/setup-service; systemd-analyze is used where the machine has it.
"""
import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import sys

import pytest
import yaml
from conftest import BINARY, REPO, free_port, job_file

DEPLOY = REPO / "deploy"
NAME = "stillhouse.example.org"


def tool(*names):
    """A program of the environment of these tests, or of the machine."""
    own = pathlib.Path(sys.executable).parent
    for name in names:
        folders = f"{own}:{own.parent}/nginx/usr/sbin:{own.parent}/kubernetes-client/usr/bin"
        if found := shutil.which(name, path=folders) or shutil.which(name):
            return found
    pytest.skip(f"{names[0]} is not on this machine; scripts/setup-service installs what it can")


def run(*command, **options):
    return subprocess.run([str(c) for c in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def wait_for(port, process, log):
    while True:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return


@contextlib.contextmanager
def running(command, port, log):
    with open(log, "ab") as out:
        process = subprocess.Popen([str(c) for c in command], stdout=out, stderr=out, env={**os.environ, "HOME": str(log.parent)})
    try:
        wait_for(port, process, log)
        yield
    finally:
        # told to stop they would wait for the streams
        process.kill()
        process.wait()


def changed(text, **changes):
    """The file with the example's values replaced, each of which has to be there."""
    for old, new in changes.values():
        assert old in text, old
        text = text.replace(old, new)
    return text


def nginx(folder, port, upstream):
    program, openssl = tool("nginx"), tool("openssl")
    made = run(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
               "-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}", "-keyout", folder / "key.pem", "-out", folder / "fullchain.pem")
    assert made.returncode == 0, made.stdout
    own = changed(
        (DEPLOY / "nginx.conf").read_text(),
        listen=("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"), upstream=("127.0.0.1:7373", f"127.0.0.1:{upstream}"),
        certificates=("/etc/ssl/stillhouse/", f"{folder}/"),
    )
    paths = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    main = folder / "nginx.conf"
    main.write_text(f"daemon off; pid {folder}/pid; error_log stderr; events {{}} http {{ access_log off; {paths}\n{own}\n}}\n")
    command = [program, "-p", folder, "-c", main, "-e", "stderr"]
    tested = run(*command, "-t")
    assert tested.returncode == 0 and "warn" not in tested.stdout, tested.stdout
    return command


def caddy(folder, port, upstream):
    program = tool("caddy")
    own = changed(
        (DEPLOY / "Caddyfile").read_text(),
        site=(f"{NAME} {{", f"http://{NAME}:{port} {{"), upstream=("127.0.0.1:7373", f"127.0.0.1:{upstream}"),
    )
    file = folder / "Caddyfile"
    file.write_text(f"{{\n\tadmin off\n\tauto_https off\n\tpersist_config off\n}}\n{own}")
    return [program, "run", "--config", file, "--adapter", "caddyfile"]


@pytest.mark.parametrize("proxy", [nginx, caddy], ids=["nginx", "caddy"])
def test_live_streams_pass_each_event_at_once(start, tmp_path, proxy):
    # one job runs at a time: a second one stays in the queue, and its stream stays open with little in it
    server = start(config={"hosts": [NAME]})
    port = free_port()
    folder = tmp_path / "proxy"
    folder.mkdir()
    with running(proxy(folder, port, server.port), port, folder / "log"):
        tls = proxy is nginx

        def connect():
            raw = socket.create_connection(("127.0.0.1", port), timeout=120)
            if not tls:
                return raw
            context = ssl.create_default_context(cafile=folder / "fullchain.pem")
            return context.wrap_socket(raw, server_hostname=NAME)

        def ask(path, method="GET", body=b"", more=()):
            s = connect()
            lines = [f"{method} {path} HTTP/1.1", f"Host: {NAME}", f"Authorization: Bearer {server.token}", "X-Forwarded-For: 6.6.6.6",
                     f"Content-Length: {len(body)}", "Content-Type: application/json", *more]
            s.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
            return s

        def events(s):
            """Events as they come: the test waits for each before it does what brings the next."""
            kind = None
            for line in s.makefile("rb"):
                key, _, value = line.decode().rstrip("\r\n").partition(":")
                if key == "event":
                    kind = value.strip()
                elif key == "data" and kind:
                    yield kind, json.loads(value)

        everything = events(ask("/api/v1/events", more=["Accept: text/event-stream"]))
        job = json.dumps(job_file(input__paths=["tiny.jsonl"])).encode()
        posted = ask("/api/v1/jobs", "POST", job, more=["Connection: close"])
        head = posted.makefile("rb").readline()
        assert b" 201 " in head, head
        seen = []
        while "succeeded" not in seen:
            kind, event = next(everything)
            if kind == "state":
                seen.append(event["data"]["to"])
        assert seen == ["queued", "running", "succeeded"]
        # the stream is still open, and a job that comes now is told in it
        with ask("/api/v1/jobs", "POST", json.dumps(job_file(input__paths=["tiny.jsonl"], output__path="second")).encode()):
            kind, event = next(everything)
            assert (kind, event["data"]["to"]) == ("state", "queued")
        # of one job: history, then live, until its end
        of_one = events(ask(f"/api/v1/jobs/{event['job']}/events", more=["Accept: text/event-stream"]))
        kinds = []
        while "end" not in kinds:
            kinds.append(next(of_one)[0])
        assert kinds[0] == "state" and "finished" in kinds
    # asked under another name the service is not there
    assert server.ask("GET", "/api/v1/jobs", host="evil.example").status == 421


def test_the_caddyfile_is_in_its_own_form(tmp_path):
    program = tool("caddy")
    adapted = run(program, "adapt", "--config", DEPLOY / "Caddyfile", "--pretty", env={**os.environ, "HOME": str(tmp_path)})
    assert adapted.returncode == 0, adapted.stdout
    assert run(program, "fmt", DEPLOY / "Caddyfile").stdout == (DEPLOY / "Caddyfile").read_text()


def test_the_unit_is_one_that_systemd_takes(tmp_path):
    program = tool("systemd-analyze")
    unit = tmp_path / "stillhouse.service"
    text = (DEPLOY / "stillhouse.service").read_text()
    unit.write_text(changed(text, program=("/usr/local/bin/stillhouse serve", f"{BINARY} serve"), manual=("file:///usr/local/share", "file:///usr/share")))
    verified = run(program, "verify", "--man=no", unit)
    assert verified.returncode == 0 and not verified.stdout.strip(), verified.stdout
    # 0 is the least exposed, 100 the most
    graded = run(program, "security", "--offline=true", "--threshold=25", unit)
    assert graded.returncode == 0, graded.stdout
    # the configuration that it names is one that the service takes
    config = json.loads(run(BINARY, "serve", "--config", REPO / "jobs/service.yaml", "--check", "--json").stdout)["configuration"]
    assert config["data"] == "/var/lib/stillhouse" and "StateDirectory=stillhouse\n" in text
    assert config["shutdown_seconds"] < int(text.partition("TimeoutStopSec=")[2].split()[0])


def rendered(folder, tmp_path):
    """What `kubectl apply -k` sends for a folder of deploy/kubernetes, by kind; each part is valid for the API of Kubernetes."""
    made = subprocess.run([tool("kubectl"), "kustomize", DEPLOY / "kubernetes" / folder], text=True, capture_output=True)
    assert made.returncode == 0 and not made.stderr, made.stderr
    file = tmp_path / f"{folder}.yaml"
    file.write_text(made.stdout)
    validated = run(tool("kubernetes-validate"), "--strict", file)
    parts = list(yaml.safe_load_all(made.stdout))
    assert validated.returncode == 0 and validated.stdout.count("passed") == len(parts), validated.stdout
    for part in parts:
        # no container as root, none that gains rights
        if pod := part.get("spec", {}).get("template", {}).get("spec"):
            assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001, part["metadata"]
            for container in pod["containers"]:
                assert not container["securityContext"]["allowPrivilegeEscalation"], container["name"]
    return {part["kind"]: [other for other in parts if other["kind"] == part["kind"]] for part in parts}


def containers(parts):
    return [c for part in parts for c in part["spec"]["template"]["spec"]["containers"]]


def test_a_cluster_on_kubernetes(tmp_path):
    parts = rendered("cluster", tmp_path)
    assert {kind: len(of_kind) for kind, of_kind in parts.items()} == {"Deployment": 2, "Service": 1, "NetworkPolicy": 1}
    assert {c["image"] for c in containers(parts["Deployment"])} == {"stillhouse:distributed"}
    run_parts = rendered("run", tmp_path)
    (configuration,), (job,) = run_parts["ConfigMap"], run_parts["Job"]
    (container,) = containers([job])
    assert container["image"] == "stillhouse:distributed"
    # the run reads the job of this folder, and its scheduler is the service of the cluster
    assert {"name": "job", "configMap": {"name": configuration["metadata"]["name"]}} in job["spec"]["template"]["spec"]["volumes"]
    (service,) = parts["Service"]
    address = f"https://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert container["args"] == ["run", "/job/job.yaml", "--scheduler", address]
    assert all(address in c["args"] for c in containers(parts["Deployment"]) if c["name"] == "executor")
    # the policy admits the run and the executors
    (policy,) = parts["NetworkPolicy"]
    admitted = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"].items()
    for part in [job, *parts["Deployment"]]:
        assert admitted <= part["spec"]["template"]["metadata"]["labels"].items()
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(yaml.safe_load(configuration["data"]["job.yaml"]), json.loads((REPO / "jobs/job.schema.json").read_text()))


def test_the_service_on_kubernetes(tmp_path):
    parts = rendered("service", tmp_path)
    assert {kind: len(of_kind) for kind, of_kind in parts.items()} == {"ConfigMap": 1, "StatefulSet": 1, "Service": 1}
    (configuration,), (state,) = parts["ConfigMap"], parts["StatefulSet"]
    version = (REPO / "Cargo.toml").read_text().partition('version = "')[2].partition('"')[0]
    (container,) = containers([state])
    assert container["image"] == f"stillhouse:{version}"
    # a changed configuration has another name, so that the server is started anew
    named = configuration["metadata"]["name"]
    assert named.startswith("stillhouse-") and {"name": "configuration", "configMap": {"name": named}} in state["spec"]["template"]["spec"]["volumes"]
    # the probes name a host that the configuration admits, and the state is on the volume
    (tmp_path / "service.yaml").write_text(configuration["data"]["service.yaml"])
    checked = run(BINARY, "serve", "--config", tmp_path / "service.yaml", "--check", "--json")
    config = json.loads(checked.stdout)["configuration"]
    for probe in ("livenessProbe", "readinessProbe"):
        (host,) = container[probe]["httpGet"]["httpHeaders"]
        assert host["value"] in config["hosts"], host
    assert config["data"].startswith(container["volumeMounts"][0]["mountPath"] + "/")


def test_the_compose_file_is_valid():
    schema = REPO / ".venv-service/docker-compose/usr/lib/python3/dist-packages/compose/config/compose_spec.json"
    if not schema.exists():
        pytest.skip("the schema of Compose files is not on this machine")
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(compose, json.loads(schema.read_text()))
    version = (REPO / "Cargo.toml").read_text().partition('version = "')[2].partition('"')[0]
    (service,) = compose["services"].values()
    assert service["image"] == f"stillhouse:{version}" and service["read_only"] and service["user"] == "10001:10001"


def test_the_cluster_under_slurm_is_a_sound_script():
    for script in (DEPLOY / "cluster.sbatch", REPO / "scripts/cluster"):
        read = run("bash", "-n", script)
        assert read.returncode == 0, read.stdout
        linted = run(tool("shellcheck"), script)
        assert linted.returncode == 0, linted.stdout


def test_the_cluster_on_this_machine_goes_on_without_an_executor(tmp_path):
    """What docs/cluster.md says of it: an executor that is killed takes nothing along but its splits."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPO / "scripts/cluster", tmp_path / "scripts/cluster")
    program = tmp_path / "target/cluster/stillhouse"
    program.parent.mkdir(parents=True)
    program.write_text("#!/usr/bin/env bash\nexec sleep 600\n")
    program.chmod(0o755)
    cluster = subprocess.Popen([tmp_path / "scripts/cluster"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    # what it never says ends this test, too
    watchdog = threading.Timer(60, cluster.kill)
    watchdog.start()
    try:
        words = cluster.stdout.readline().replace(".", "").split()
        scheduler, executors = int(words[2]), [int(word) for word in words[5:]]
        assert words[:2] + words[3:5] == ["Scheduler:", "process", "Executors:", "processes"] and len(executors) == 2, words
        # the shell says beside it what it killed
        said = (line for line in cluster.stderr if line.startswith(("Executor", "The scheduler")))
        told = [f"its splits go to the others: {executors[1]}\n", "none is left, and runs wait for another one: target/cluster/stillhouse executor "]
        for executor, what in zip(executors, told):
            os.kill(executor, signal.SIGKILL)
            assert next(said).startswith(f"Executor {executor} ended with status 137; {what}")
        assert cluster.poll() is None
        os.kill(scheduler, signal.SIGTERM)
        assert next(said) == "The scheduler ended with status 143, so the cluster stops.\n"
        assert cluster.wait() == 143
    finally:
        watchdog.cancel()
        # it takes its processes along
        cluster.terminate()
        cluster.wait()
