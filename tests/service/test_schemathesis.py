"""Requests made from the OpenAPI document, good and bad ones: no server error, no undocumented answer, nothing bad taken.

    schemathesis run ─► examples, coverage, fuzzing, stateful; every check (schemathesis.toml says what is expected, and why)
"""
import os
import pathlib
import shutil
import subprocess
import sys

from conftest import Server, furnish, job_file

HERE = pathlib.Path(__file__).parent


def test_the_service_does_what_its_document_says(tmp_path):
    server = Server(tmp_path, config={"limits": {"time_limit_hours": 1, "report_seconds": 30}})
    try:
        furnish(server.start())
        server.token = server.new_token("ada", "read", "submit")
        ids = [server.run(job_file(input__paths=["tiny.jsonl"], output__path=f"out{n}"))["id"] for n in range(2)]
        failed = server.run(job_file(input__paths=["none.jsonl"]))
        assert failed["state"] == "failed"
        ids.append(failed["id"])
        (tmp_path / "ids.txt").write_text("".join(f"\"{i}\"\n" for i in ids))
        run = schemathesis(server, tmp_path)
        print(run.stdout)
        assert run.returncode == 0, f"{run.stdout[-30000:]}\n{server.log.read_text()[-3000:]}"
        assert server.ask("GET", f"/api/v1/jobs/{ids[1]}").status in (200, 404)
    finally:
        server.stop()


def schemathesis(server, folder):
    program = shutil.which("schemathesis", path=os.path.dirname(sys.executable)) or "schemathesis"
    base = f"http://127.0.0.1:{server.port}/api/v1"
    env = {
        **server.env, "STILLHOUSE_TOKEN": server.token, "PYTHONPATH": str(HERE), "NO_COLOR": "1", "COLUMNS": "120",
    }
    config = folder / "schemathesis.toml"
    config.write_text((HERE / "schemathesis.toml").read_text().replace("IDS\"", f"{folder / 'ids.txt'}\""))
    command = [
        program, "--config-file", str(config), "run", f"{base}/openapi.json", "--url", base,
        "--checks", "all", "--phases", "examples,coverage,fuzzing,stateful",
    ]
    return subprocess.run(command, env=env, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
