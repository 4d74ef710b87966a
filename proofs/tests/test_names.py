"""Every proof says what it proves, in its docstring and in docs/testing.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from proofs.__main__ import NAMES, promise

TESTING = Path(__file__).parents[2] / "docs" / "testing.md"


def test_the_table_of_proofs_has_each_proof_once() -> None:
    rows = TESTING.read_text().partition("## Proofs")[2].partition("\n## ")[0]

    assert sorted(NAMES) == sorted(re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE))


@pytest.mark.parametrize("name", NAMES)
def test_a_proof_says_what_it_does(name: str) -> None:
    assert promise(name).endswith(".")
