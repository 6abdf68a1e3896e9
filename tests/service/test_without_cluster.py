"""The program that `cargo build -p stillhouse` makes has no cluster, and says which one has it. (The Rust tests have a program with the cluster.)"""
import json
import subprocess

import pytest
from conftest import BINARY, CORPUS, TEACHER

SCHEDULER = "127.0.0.1:9"
JOB = {
    "version": 1,
    "name": "small",
    "input": {"format": "jsonl", "paths": [str(CORPUS)]},
    "tokenizer": {"path": str(TEACHER)},
    "pack": {"length": 64},
    "output": {"path": "out"},
}


def refused(folder, *arguments):
    done = subprocess.run([BINARY, *arguments], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done
    assert "this program has no cluster support" in done.stderr, done.stderr
    assert not (folder / "out").exists()
    return done.stderr


@pytest.mark.parametrize("verb", ["run", "plan"])
def test_a_job_for_a_cluster(tmp_path, verb):
    job = JOB | {"engine": {"kind": "ballista", "scheduler": SCHEDULER}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    said = refused(tmp_path, verb, "job.yaml")
    assert "engine.kind: got ballista" in said and "--features distributed" in said, said


def test_a_run_on_a_cluster(tmp_path):
    (tmp_path / "job.yaml").write_text(json.dumps(JOB))
    refused(tmp_path, "run", "job.yaml", "--scheduler", SCHEDULER)


@pytest.mark.parametrize("arguments", [["--check"], []])
def test_a_service_with_a_cluster(tmp_path, arguments):
    (tmp_path / "service.yaml").write_text(
        json.dumps(
            {
                "listen": "127.0.0.1:0",
                "data": str(tmp_path / "data"),
                "folder": str(tmp_path),
                "access": {"read": [str(tmp_path)], "write": [str(tmp_path)]},
                "cluster": {"scheduler": SCHEDULER},
            }
        )
    )
    assert "cluster.scheduler" in refused(tmp_path, "serve", "--config", "service.yaml", *arguments)
