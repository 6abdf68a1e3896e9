"""A wheel with the program in it, installed into an empty environment without a compiler: the first commands of README.md.

STILLHOUSE_WHEEL names the wheel of a release, which scripts/release makes. Without it, the test packs the program of the
other tests into a wheel, and leaves out the demo, which takes minutes in a build without optimisation.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from shared_fixtures import ROOT, program

WHEEL = os.environ.get("STILLHOUSE_WHEEL")
SCRIPTS = ROOT / "python/stillhouse._core.data"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    if WHEEL:
        return (ROOT / WHEEL).resolve()
    out = tmp_path_factory.mktemp("wheel")
    (SCRIPTS / "scripts").mkdir(parents=True)
    try:
        subprocess.run(["strip", "-o", SCRIPTS / "scripts/stillhouse", program()], check=True)
        maturin = pathlib.Path(sys.executable).with_name("maturin")
        build = [maturin, "build", "--quiet", "--profile", "dev", "-m", ROOT / "python/Cargo.toml", "--out", out]
        subprocess.run(build, check=True)
    finally:
        shutil.rmtree(SCRIPTS)
    (made,) = out.glob("*.whl")
    return made


def first_commands() -> list[str]:
    block = re.search(r"^```sh[^\n]*\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block
    return [line.split("#")[0].strip() for line in block[1].splitlines()]


def test_the_first_commands_of_the_readme(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    install, *commands = first_commands()
    assert install.startswith("pip install dist/stillhouse-"), install
    assert [command.split()[1] for command in commands] == ["demo", "inspect"], commands
    if not WHEEL:
        shutil.copy(ROOT / "assets/corpus/sotu-small.jsonl.gz", tmp_path / "corpus.jsonl.gz")
        commands = [
            f"stillhouse init corpus.jsonl.gz --no-teacher --tokenizer {ROOT}/assets/teacher-nano-gpt2 --length 128",
            "stillhouse run job.yaml --quiet",
            "stillhouse verify corpus-data",
        ]
    # no compiler, no cargo, nothing of this repository
    variables = {"PATH": f"{environment}/bin", "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    of_network = re.compile("PIP_|SSL_|.*_PROXY$", re.IGNORECASE)
    variables |= {name: value for name, value in os.environ.items() if of_network.match(name)}
    data_set = "stillhouse-demo/data-set" if WHEEL else "corpus-data"
    load = f"python -c \"import sys, stillhouse; assert len(stillhouse.open('{data_set}')); assert 'torch' not in sys.modules\""
    for command in [f"pip install --quiet {wheel}", *commands, load]:
        done = subprocess.run(
            ["/bin/bash", "-c", command], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
