"""What clients are told is compared with the ledger while engines run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests import journals
from tests.histories import events

from kvledger.audit.events import Event, RequestAdded, Snapshot
from kvledger.audit.journal.writer import JournalWriter
from kvledger.exporters.metrics.metric_list import collect
from kvledger.exporters.sidecar import told_usage
from kvledger.exporters.sidecar.follower import Follower
from kvledger.exporters.sidecar.told_usage import KEEP_SECONDS, SETTLE_SECONDS, UsageComparison

PROMPT, LOCAL = 40, 32


class Served:
    """An engine whose journal is followed, the log of its server, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "usage.jsonl"
        self.log.write_text("")
        self.writer = JournalWriter(folder / "journals" / "engine-0")
        self.writer.rotate()
        self.writer.write([journals.STARTED, Snapshot(0, 0, [], 0)])
        self.follower = Follower(folder / "journals")
        self.now = 1_000.0
        self.said: list[str] = []
        self.requests = 0
        self.comparison = UsageComparison(
            [self.log], lambda: self.follower.audits, self.follower.lock, self.said.append, lambda: self.now
        )
        self.follower.on_opened.append(self.comparison.watch)
        self.read()
        self.comparison.turn()

    def request(self, request_id: str) -> None:
        """The engine serves a request: 32 of its 40 prompt tokens were cached."""
        stream: list[Event] = [
            replace(event, request_id=request_id) if isinstance(event, RequestAdded) else event
            for event in events(PROMPT, f"A{LOCAL}+0 s8 o+ F", request=self.requests)
        ]
        self.requests += 1
        self.writer.write(stream)

    def tell(self, name: str, cached: int = LOCAL, prompt: int = PROMPT, output: int = 1) -> None:
        details = {"cached_tokens": cached}
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}
        with self.log.open("a") as log:
            log.write(json.dumps({"id": name, "usage": usage}) + "\n")

    def read(self) -> None:
        self.follower.poll()
        for journal in self.follower.journals.values():
            journal.engine_audit.read_seconds = self.now

    def wait(self, seconds: float = SETTLE_SECONDS) -> None:
        """The logs are read, time passes, and what the journals have by then is compared."""
        self.comparison.turn()
        self.now += seconds
        self.read()
        self.comparison.turn()

    def counted(self) -> dict[tuple[str, ...], float]:
        """The counters that are not zero, by their labels."""
        wanted = ("kvledger_usage_calls", "kvledger_unexplained_tokens")
        return {
            sample.labels: sample.value
            for metric, samples in collect(self.follower.audits)
            if metric.name in wanted
            for sample in samples
            if sample.value
        }


@pytest.fixture
def served(tmp_path: Path) -> Any:
    served = Served(tmp_path)
    yield served
    served.writer.close()
    served.follower.close()


def test_a_call_that_was_told_the_ledgers_figures_is_equal(served: Served) -> None:
    served.request("cmpl-a-0-0a1b2c3d")
    served.tell("cmpl-a")
    served.wait()

    assert {("equal",): 1} == served.counted()


@pytest.mark.parametrize(
    ("told", "counted"),
    [
        ({"cached": 48}, {("cached", "more"): 16}),
        ({"cached": 0}, {("cached", "less"): 32}),
        ({"prompt": 39}, {("prompt", "less"): 1}),
    ],
)
def test_tokens_without_a_cause_are_counted_by_figure_and_direction(
    served: Served, told: dict[str, int], counted: dict[tuple[str, str], int]
) -> None:
    served.request("cmpl-a-0-0a1b2c3d")
    served.tell("cmpl-a", **told)
    served.wait()

    assert {("unexplained",): 1, **counted} == served.counted()


def test_a_difference_with_a_cause_is_explained(served: Served) -> None:
    """The server counts the prompt of two samples twice."""
    served.request("0_cmpl-a-0-0a1b2c3d")
    served.request("1_cmpl-a-0-0a1b2c3e")
    served.tell("cmpl-a", prompt=2 * PROMPT, output=2)
    served.wait()

    assert {("explained",): 1} == served.counted()


def test_a_line_waits_until_every_journal_is_read_past_it(served: Served) -> None:
    """One sample of a call was read, and a figure of both would look wrong."""
    served.request("0_cmpl-a-0-0a1b2c3d")
    served.read()
    served.tell("cmpl-a")
    served.comparison.turn()
    served.now += 2 * KEEP_SECONDS  # and the journal is not read meanwhile
    served.comparison.turn()
    assert {} == served.counted()

    served.request("1_cmpl-a-0-0a1b2c3e")
    served.read()
    served.comparison.turn()
    assert {("unexplained",): 1, ("output", "less"): 1} == served.counted()


def test_a_call_of_another_server_is_not_in_the_trace(served: Served) -> None:
    served.tell("cmpl-elsewhere")
    served.wait()
    assert {} == served.counted()

    served.wait(KEEP_SECONDS)
    assert {("not in the trace",): 1} == served.counted()


def test_a_request_without_a_line_is_forgotten(served: Served) -> None:
    served.request("cmpl-a-0-0a1b2c3d")
    served.wait()
    served.wait(2 * KEEP_SECONDS)
    served.tell("cmpl-a")
    served.wait(2 * KEEP_SECONDS)

    assert {("not in the trace",): 1} == served.counted()
    assert not served.comparison._by_name


def test_an_id_that_is_used_again_names_another_call(served: Served) -> None:
    for _ in range(2):
        served.request("cmpl-a-0-0a1b2c3d")
        served.tell("cmpl-a")
        served.wait()

    assert {("equal",): 2} == served.counted()


def replaced(served: Served) -> None:
    served.log.unlink()
    served.tell("cmpl-b")


def emptied(served: Served) -> None:
    served.log.write_text("")
    served.comparison.turn()
    served.tell("cmpl-b")


@pytest.mark.parametrize("change", [replaced, emptied])
def test_a_log_that_was_replaced_is_read_from_its_beginning(
    served: Served, change: Callable[[Served], None]
) -> None:
    served.request("cmpl-a-0-0a1b2c3d")
    served.tell("cmpl-a")
    served.wait()
    change(served)
    served.request("cmpl-b-0-0a1b2c3d")
    served.wait()

    assert {("equal",): 2} == served.counted()


@pytest.mark.parametrize("parts", [1, 3])
def test_a_line_above_the_limit_is_said_and_passed_over(served: Served, parts: int) -> None:
    for part in range(parts):
        with served.log.open("a") as log:
            log.write("x" * (told_usage.LARGEST_LINE // parts + 1))
            log.write("\n" if part == parts - 1 else "")
        served.comparison.turn()
    served.request("cmpl-a-0-0a1b2c3d")
    served.tell("cmpl-a")
    served.wait()

    assert {("equal",): 1} == served.counted()
    assert [f"The usage log {served.log} has a line of more than 1,048,576 bytes."] == served.said


def test_what_is_no_line_of_a_log_is_said_once_and_passed_over(served: Served) -> None:
    served.log.write_text("no JSON\n")
    served.comparison.turn()
    served.request("cmpl-a-0-0a1b2c3d")
    served.tell("cmpl-a")
    served.wait()

    assert 1 == len(served.said) and "no JSON object" in served.said[0]
    assert {("equal",): 1} == served.counted()


def test_a_log_that_does_not_exist_is_said_once_and_read_when_it_does(served: Served) -> None:
    served.log.unlink()
    served.comparison.turn()
    served.comparison.turn()
    assert 1 == len(served.said) and "can't be read" in served.said[0]

    served.request("cmpl-a-0-0a1b2c3d")
    served.tell("cmpl-a")
    served.wait()
    assert {("equal",): 1} == served.counted()
