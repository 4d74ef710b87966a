"""The findings of one engine: how many each invariant has, and the first ones of each.

Every finding is counted, also one that is not kept: memory is bounded by :data:`FINDINGS_KEPT`, and not by
the number of violations, and no total is cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec
from msgspec.structs import replace

from ..figures.sums import Sums, add_tokens, merge_tokens
from .registry import Severity, Violation, catalogue, is_once

FINDINGS_KEPT = 1_000
"""Most findings kept of one invariant; those in later requests are only counted."""

Key = tuple[str, int | None]
"""An invariant and the number of a request; None: one finding stands for all requests."""


class KeptFinding(msgspec.Struct):
    """A violation as it was first found, and how often it was found again in the same request, or engine.

    ``last_step``: the step in which it was found last. ``in_window``: whether it was found in the auditor's
    window. ``counted_before``: the sums of an earlier part count it.
    """

    violation: Violation
    last_step: int
    repeats: int = 0
    in_window: bool = True
    counted_before: bool = False

    @property
    def counted(self) -> Violation:
        """The violation with its repeats."""
        return replace(self.violation, repeats=self.repeats, last_step=self.last_step)


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """How many findings one invariant has, and how many of them are kept to be listed.

    ``findings`` counts requests, or times where no request is concerned; ``at_least``: there may be more, as
    in a window. ``tokens``: how many tokens they were about when each was first found, and of a drift, which
    is found once an engine, in all; None: not known, or none.
    """

    id: str
    severity: Severity
    findings: int
    listed: int
    tokens: int | None = None
    at_least: bool = False

    @property
    def shown(self) -> str:
        """``1,000 of 3,690 shown``; "" where all are."""
        return f"{self.listed:,} of {self.number} shown" if self.is_cut else ""

    @property
    def number(self) -> str:
        """``3,690``, or ``at least 1,000``."""
        return f"{'at least ' if self.at_least else ''}{self.findings:,}"

    @property
    def is_cut(self) -> bool:
        """Whether the list of findings is not whole."""
        return self.at_least or self.listed < self.findings


class Findings(Sums):
    """What the checks found. Two of them are added if they are of one journal, the earlier part first; of
    two engines with :meth:`by_invariant`."""

    kept: dict[Key, KeptFinding] = {}
    """In the order in which they were first found."""
    found: dict[str, int] = {}
    """How many findings each invariant has, kept or not."""
    tokens: dict[str, int] = {}
    """By invariant: the tokens that its findings are about."""
    check_failures: dict[str, int] = {}
    """Defects of kvledger: how often each check raised an exception."""

    def merge(self, more: Findings) -> None:
        """Add later findings. One that was made before is a repeat."""
        kept = Counter(id for id, _ in self.kept)
        for table in ("found", "tokens", "check_failures"):
            merge_tokens(getattr(self, table), getattr(more, table))
        for key, later in more.kept.items():
            earlier = self.kept.get(key)
            if earlier is not None:
                earlier.repeats += later.repeats + 1
                earlier.last_step = later.last_step
                if not later.counted_before:
                    self.found[key[0]] -= 1
                    if later.violation.tokens is not None and not is_once(key[0]):
                        self.tokens[key[0]] -= later.violation.tokens
            elif kept[key[0]] < FINDINGS_KEPT:
                kept[key[0]] += 1
                self.kept[key] = replace(later)

    def copy(self) -> Findings:
        """An independent copy."""
        kept = {key: replace(finding) for key, finding in self.kept.items()}
        return Findings(kept, {**self.found}, {**self.tokens}, {**self.check_failures})

    def is_full(self, id: str) -> bool:
        """Whether no further finding of an invariant is kept."""
        return self.found.get(id, 0) >= FINDINGS_KEPT

    def keep(self, key: Key, finding: KeptFinding) -> None:
        """Keep and count a new finding, or one that replaces an earlier one of its key."""
        if self.kept.pop(key, None) is None and not finding.counted_before:
            add_tokens(self.found, key[0], 1)
        self.kept[key] = finding

    def by_invariant(self, later_us: int = 0) -> Findings:
        """One finding of each invariant, which has the others as its repeats; all of them are counted.

        ``later_us``: how much later its times are, counted from the start of another engine.
        """
        whole = Findings({}, {**self.found}, {**self.tokens}, {**self.check_failures})
        for finding in self.kept.values():
            violation = replace(finding.violation, at=finding.violation.at + later_us)
            one = replace(finding, violation=violation, counted_before=True)
            whole.merge(Findings({(violation.id, None): one}))
        return whole

    def placed(self) -> Iterator[tuple[Violation, bool]]:
        """All kept findings, and whether each was found in the window."""
        for finding in self.kept.values():
            yield finding.counted, finding.in_window

    def totals(self) -> list[Found]:
        """Each invariant with findings, in the order in which they were first found."""
        listed = Counter(id for id, _ in self.kept)
        return [
            Found(
                id=id,
                severity=catalogue()[id].severity,
                findings=findings,
                listed=listed[id],
                tokens=self.tokens.get(id),
            )
            for id, findings in self.found.items()
        ]


def together(totals: Iterable[Found]) -> list[Found]:
    """The totals of several engines, one row for each invariant."""
    sums: dict[str, Found] = {}
    for row in totals:
        before = sums.get(row.id)
        sums[row.id] = (
            row
            if before is None
            else replace(
                before,
                findings=before.findings + row.findings,
                listed=before.listed + row.listed,
                tokens=_sum(before.tokens, row.tokens),
                at_least=before.at_least or row.at_least,
            )
        )
    return list(sums.values())


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
