"""What the release matrix expects: the upstream reports, and other faults of released engines.

A release is named as in scripts/releases.py. A course is one of `kvledger.audit.conformance`, or the
beginning of the names of its variants.
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

    def drives(self, course: str) -> bool:
        """Whether a course drives an engine into it; variants of a course share its name."""
        return course.startswith(self.courses)


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
        return course.startswith(self.courses) and _number(self.first) <= _number(release) <= _number(
            self.last
        )


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.removesuffix("-v0").split("."))


REPORTS: tuple[Report, ...] = (
    Report(
        "stale-lookup",
        (
            "too_few_blocks_at_first",
            "no_budget_of_requests",
            "no_budget_of_tokens",
            "no_budget_of_chunks",
            "no_room_for_its_lora",
            "no_embeds_beside_tokens",
            "preempts_by_priority",
            "behind_the_swapped",
            "preempted_and_tried_again",
            "ignored_too_long",
            "ignored_never_fits",
            "aborted_after_an_attempt",
        ),
        ("tokens/stale-lookup",),
        ("0.9.1-v0",),
        ("vLLM#18957", "https://github.com/vllm-project/vllm/pull/18957"),
        "a hit count taken at an attempt that failed was used at a later one, or left behind for ever.",
    ),
    Report(
        "negative-local-hit",
        ("asked_again_after_preemption",),
        ("tokens/negative", "tokens/source-sum"),
        ("0.17.0", "0.18.1", "0.19.1"),
        ("vLLM#36752", "https://github.com/vllm-project/vllm/pull/36752"),
        "negative in 0.17.0 and 0.18.1, clamped in 0.19.1 so that the sources no longer add up.",
    ),
)

KNOWN: tuple[Known, ...] = (
    Known(
        "tokens/stale-lookup",
        ("never_fits_again",),
        "0.9.1",
        "0.9.2",
        "a swapped group that no longer fits is ignored without being freed: its look-up is never released",
    ),
    Known(
        "tokens/stale-lookup",
        ("crowd",),
        "0.9.1",
        "0.9.1",
        "the same fault as the report, met at random",
    ),
    Known(
        "connector/failed-load-counted",
        (
            "asynchronous_load_fails_in_part",
            "load_failure_sync_sync",
            "load_failure_sync_async",
            "load_failure_async_partial",
        ),
        "0.20.0",
        "0.33.0",
        "failed loads stay in the external figure, on purpose (vLLM#37460): drift",
    ),
    Known(
        "tokens/in-flight",
        ("load_failure_sync_async", "load_failure_sync_policy_fail_async"),
        "0.32.0",
        "0.33.0",
        "a synchronous load failure under async scheduling leaks an output placeholder",
    ),
)
