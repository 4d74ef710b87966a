"""The findings of one engine: the first ones of each invariant, and how often each was made again.

Memory is bounded by :data:`FINDINGS_KEPT`, and not by the number of violations.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from ..figures.sums import Sums, add_tokens, merge_tokens
from .registry import Violation

FINDINGS_KEPT = 1_000
"""Most findings kept of one invariant; violations in later requests are only counted."""

Key = tuple[str, int | None]
"""An invariant and the number of a request; None: one finding stands for all requests."""


class KeptFinding(msgspec.Struct):
    """A violation as it was first found, and how often it was found again in the same request, or engine.

    ``last_step``: the step in which it was found last. ``in_window``: whether it was found in the auditor's
    window.
    """

    violation: Violation
    last_step: int
    repeats: int = 0
    in_window: bool = True

    @property
    def counted(self) -> Violation:
        """The violation with its repeats."""
        return replace(self.violation, repeats=self.repeats, last_step=self.last_step)


class Findings(Sums):
    """What the checks found. Two of them are added if they are of one journal, the earlier part first; of
    two engines with :meth:`by_invariant`."""

    kept: dict[Key, KeptFinding] = {}
    """In the order in which they were first found."""
    of_invariant: dict[str, int] = {}
    """How many findings of each invariant are kept."""
    not_kept: dict[str, int] = {}
    """How many violations were counted and not kept, by invariant."""
    check_failures: dict[str, int] = {}
    """Defects of kvledger: how often each check raised an exception."""

    def merge(self, more: Findings) -> None:
        """Add later findings. One that was made before is a repeat."""
        for key, later in more.kept.items():
            earlier = self.kept.get(key)
            if earlier is not None:
                earlier.repeats += later.repeats + 1
                earlier.last_step = later.last_step
            elif self.is_full(key[0]):
                add_tokens(self.not_kept, key[0], later.repeats + 1)
            else:
                self.keep(key, replace(later))
        merge_tokens(self.not_kept, more.not_kept)
        merge_tokens(self.check_failures, more.check_failures)

    def copy(self) -> Findings:
        """An independent copy."""
        kept = {key: replace(finding) for key, finding in self.kept.items()}
        return Findings(kept, {**self.of_invariant}, {**self.not_kept}, {**self.check_failures})

    def is_full(self, id: str) -> bool:
        """Whether no further finding of an invariant is kept."""
        return self.of_invariant.get(id, 0) >= FINDINGS_KEPT

    def keep(self, key: Key, finding: KeptFinding) -> None:
        """Keep a new finding, or a finding that replaces an earlier one of its key."""
        if self.kept.pop(key, None) is None:
            add_tokens(self.of_invariant, key[0], 1)
        self.kept[key] = finding

    def by_invariant(self, later_us: int = 0) -> Findings:
        """One finding of each invariant, which counts the others as its repeats.

        ``later_us``: how much later its times are, counted from the start of another engine.
        """
        found = Findings({}, {}, {**self.not_kept}, {**self.check_failures})
        for finding in self.kept.values():
            violation = replace(finding.violation, at=finding.violation.at + later_us)
            found.merge(Findings({(violation.id, None): replace(finding, violation=violation)}))
        return found

    def placed(self) -> Iterator[tuple[Violation, bool]]:
        """All kept findings, and whether each was found in the window."""
        for finding in self.kept.values():
            yield finding.counted, finding.in_window
