"""Compares the ledger with the oracle over random histories, and shortens a history that differs.

`python -m tests.differential.compare 20000` compares that many, beginning with a seed taken from the clock;
`--first 123` begins with another, `--processes 2` shares the histories among processes, and `--engine sglang`
plays them on SGLang's scheduler. What an engine's history is, and what must be found in it, is in the module
of the engine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tests.columns import columns, statement_figures
from tests.differential.random_histories import History

from kvledger.audit.ledger.account import AccountStatement


@dataclass(frozen=True)
class Difference:
    """One way in which the ledger and the oracle differ; histories are shortened to the same ``kind``."""

    level: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"level {self.level}: {self.kind}: {self.text}"


class Judged(NamedTuple):
    """How one history was judged."""

    found: list[Difference]
    went_wrong: bool
    """Whether the engine itself lost KV that it went on using, or told clients a wrong figure."""
    raised: bool
    """Whether an exception of the engine ended the history."""


Judge = Callable[[History, Sequence[str]], Judged]
"""Plays a history, and compares at some levels, or at all if none is given."""


def compared(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of an account that the oracle and the ledger must both have."""
    more = ("preemptions", "promised", "loaded", "admissions")
    return {**columns(figures), **{name: figures[name] for name in more}}


def ledger_figures(account: AccountStatement) -> dict[str, Any]:
    """The figures of an account, by the names of the oracle's."""
    admissions = [(life.local, life.external) for life in account.lives]
    return compared({**statement_figures(account), "admissions": admissions})


# --- shortening -----------------------------------------------------------------------------------


def shorten(history: History, fails: Callable[[History], bool], seconds: float) -> History:
    """Leave out operations as long as the history still fails."""
    until = time.monotonic() + seconds
    size = max(1, len(history.operations) // 2)
    while size:
        start = 0
        while start < len(history.operations) and time.monotonic() < until:
            operations = history.operations[:start] + history.operations[start + size :]
            shorter = replace(history, operations=operations)
            if fails(shorter):
                history = shorter
            else:
                start += size
        size //= 2
    return history


def report(history: History, judge: Judge, found: Sequence[Difference], seconds: float = 60) -> str:
    """The differences of a history, and the shortest found in ``seconds`` that differs in the same way."""

    def fails(shorter: History) -> bool:
        with contextlib.suppress(AssertionError):
            return any(each.kind == found[0].kind for each in judge(shorter, (found[0].level,)).found)
        return False

    short = shorten(history, fails, seconds)
    again = judge(short, (found[0].level,)).found
    return "\n".join([f"seed {history.seed}", *map(str, found), f"shortened: {short!r}", *map(str, again)])


# --- many histories -------------------------------------------------------------------------------


@dataclass
class Comparison:
    """The result of many histories."""

    judge: Judge
    histories: int = 0
    went_wrong: int = 0
    raised: int = 0
    reports: list[str] = field(default_factory=list)
    """A report for the first history that shows a kind of difference."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Histories by kind of difference."""
    shortening_seconds: float = 60
    """How long a history that differs may be shortened."""

    def add(self, history: History) -> None:
        found, went_wrong, raised = self.judge(history, ())
        self.histories += 1
        self.went_wrong += went_wrong
        self.raised += raised
        new = [each for each in found if each.kind not in self.kinds]
        self.kinds.update({each.kind for each in found})
        if new:
            self.reports.append(report(history, self.judge, new, self.shortening_seconds))

    def merge(self, other: Comparison) -> None:
        self.histories += other.histories
        self.went_wrong += other.went_wrong
        self.raised += other.raised
        self.reports += other.reports
        self.kinds.update(other.kinds)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} in {number}" for kind, number in self.kinds.most_common())
        return (
            f"{self.histories} histories, {self.went_wrong} with a fault of the engine, "
            f"{self.raised} ended by its exception: {kinds or 'no difference'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("histories", type=int)
    parser.add_argument("--first", type=int, default=int(time.time()), help="the first seed")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    options = parser.parse_args()
    started = time.monotonic()
    last = options.first + options.histories
    shares = [range(options.first + share, last, options.processes) for share in range(options.processes)]
    compare = importlib.import_module(f"tests.differential.{options.engine}_engine").compare
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("fork")) as pool:
        result, *more = pool.map(compare, shares)
    for each in more:
        result.merge(each)
    for text in result.reports:
        print(text, end="\n\n")
    print(f"seeds {options.first} to {last - 1}: {result}; {time.monotonic() - started:.0f} s")
    sys.exit(bool(result.kinds))


if __name__ == "__main__":
    main()
