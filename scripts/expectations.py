"""What the release matrix expects: the upstream reports, and other faults of released engines.

A release is named as in scripts/releases.py. A course is one of `kvledger.audit.conformance`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """An upstream report: the courses that drive an engine into it, and the releases that have it."""

    key: str
    courses: tuple[str, ...]
    ids: tuple[str, ...]
    found_in: tuple[str, ...]
    reference: tuple[str, str]
    says: str


@dataclass(frozen=True)
class Known:
    """A fault of released engines that the corpus shows beside the reports."""

    id: str
    courses: tuple[str, ...]
    first: str
    last: str
    why: str
    host_fails: bool = False

    def covers(self, course: str, release: str) -> bool:
        """Whether it may be found in this course of this release."""
        return course in self.courses and _number(self.first) <= _number(release) <= _number(self.last)


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.removesuffix("-v0").split("."))


REPORTS: tuple[Report, ...] = (
    Report(
        "negative-local-hit",
        ("asked_again_after_preemption",),
        ("tokens/negative", "tokens/source-sum"),
        ("0.17.0", "0.18.1", "0.19.1"),
        ("vLLM#36752", "https://github.com/vllm-project/vllm/pull/36752"),
        "negative in 0.17.0 and 0.18.1, clamped in 0.19.1 so that the sources no longer add up.",
    ),
)

KNOWN: tuple[Known, ...] = ()
