"""The columns that the package has types for are among those that the program's operators declare."""

from __future__ import annotations

import re
import subprocess
import typing

from shared_fixtures import program

from stillhouse.batch import DenseColumn, RaggedColumn


def test_typed_columns_are_those_of_the_program() -> None:
    ran = subprocess.run([program(), "schema", "--columns"], check=True, capture_output=True, text=True)
    row = r"^\| `(?P<name>\w+)` \| [^|]+ \| [^|]+ \| (?P<contract>[^|]+) \|$"
    declared = {found["name"]: found["contract"] for found in re.finditer(row, ran.stdout, re.MULTILINE)}
    assert len(declared) == len(ran.stdout.splitlines()) - 2 > 10
    ragged = {name for name, contract in declared.items() if contract.startswith("[*]")}
    # a column that is new has a type all the same: what a data set holds is read from the data set
    assert set(typing.get_args(RaggedColumn)) <= ragged
    assert set(typing.get_args(DenseColumn)) <= declared.keys() - ragged
