"""What pages, reproductions and the terminal say of one fault, in the same words."""

from __future__ import annotations

from collections.abc import Iterator

from .catalogue import HARMS, Fault

UNTRACED = "not traced to a place in the code"
UNCOVERED = "none; no invariant covers it"


def facts(fault: Fault) -> Iterator[tuple[str, str]]:
    """What is known of a fault besides its sentences: the fact's name, and what it is."""
    note = f" ({fault.releases.note})" if fault.releases.note else ""
    yield f"Releases of {fault.project}", fault.span + note
    if fault.condition:
        yield "Condition", fault.condition.removeprefix("if ")
    yield "Harm", HARMS[fault.harms]
    yield "Where", fault.where or UNTRACED
    found = " or ".join(f"`{each}`" for each in fault.findings)
    yield "Finding", (found + " (a drift)" if fault.kind == "drift" else found) if found else UNCOVERED


def level_of(finding: str) -> str:
    """The lowest level of observation at which an invariant is checked: tokens, blocks or content."""
    family = finding.partition("/")[0]
    return family if family in ("blocks", "content") else "tokens"
