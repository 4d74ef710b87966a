"""The mutants of `make proof NAME=mutants`: each fits the installed vLLM, and a few of them are found."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from proofs.mutants import drives
from proofs.mutants.mutant import Mutant, NotFound, applied
from proofs.mutants.table import MUTANTS

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_mutant_changes_the_installed_release(name: str) -> None:
    with applied(BY_NAME[name]):
        pass


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(MUTANTS) >= 40


def test_the_page_has_every_mutant() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "mutants.md").read_text()

    assert [] == [name for name in BY_NAME if f"| {name} |" not in page and f"| [{name}](" not in page]


def test_a_mutant_whose_text_is_missing_is_not_applied() -> None:
    mutant = Mutant("none", "none", "nothing", "BlockPool.touch", "no such text", "pass")

    with pytest.raises(NotFound, match=r"0 times 'no such text' in BlockPool.touch"), applied(mutant):
        pass


@pytest.mark.parametrize(
    ("name", "drive", "level", "finding"),
    [
        ("preempt-keeps-computed", "preempt_prefill_sync", "tokens", ("tokens/reset-on-preemption", "late")),
        ("rejected-kept", "speculative_sync", "tokens", ("tokens/balance", "a")),
        ("tail-leaks", "cold", "blocks", ("blocks/leak", "r")),
        ("preempt-lost", "preempt_prefill_sync", drives.CHECKS, ("requests/queued-once", None)),
    ],
)
def test_a_mutant_is_found_and_the_engine_is_restored(
    name: str, drive: str, level: str, finding: tuple[str, str | None]
) -> None:
    with applied(BY_NAME[name]):
        seen = drives.seen(drive, level)

    assert finding in seen.findings, seen.raised
    assert {} == drives.seen(drive, level).findings
