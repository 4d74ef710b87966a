"""Requests by group: the same requests under each key, in every report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests import journals
from tests.exporters.labels import labelled
from tests.exporters.reports.printed import lines, text
from tests.histories import events

from kvledger.audit.errors import LedgerError
from kvledger.exporters.reports import diff
from kvledger.exporters.reports import page as pages
from kvledger.exporters.reports import tail as tails
from kvledger.exporters.reports.summary import summarize
from kvledger.exporters.reports.tail import follow
from kvledger.exporters.reports.why import answer, why
from kvledger.exporters.trace.groups import KEYS, time_name


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return labelled(tmp_path / "trace")


@pytest.mark.parametrize(
    ("by", "groups"),
    [
        ("lora", {"french": 2, "no adapter": 1}),
        ("priority", {"0": 2, "5": 1}),
        ("salt", {"ffffffffffffffff": 1, "0000000000000002": 1, "no salt": 1}),
        ("group", {"a": 1, "b": 1, "no group": 1}),
        ("rank", {"3": 3}),
        ("outcome", {"stopped": 3}),
    ],
)
def test_each_key_names_the_groups_of_requests(trace: Path, by: str, groups: dict[str, int]) -> None:
    *rows, _ = summarize([trace], by)
    explained = why([trace], by=by)

    assert groups == {row.group: row.requests for row in rows}
    assert groups == {row.group: row.requests for row in explained.groups}


def test_requests_of_a_journal_without_labels_have_none(tmp_path: Path) -> None:
    path = journals.write(tmp_path / "old", events(10, "A0+0 s10 o+ F"))

    found = [row.group for by in ("lora", "salt", "group", "priority") for row in summarize([path], by)[:-1]]
    assert ["no adapter", "no salt", "no group", "0"] == found


def test_five_minutes_are_named_by_their_beginning() -> None:
    assert "1970-01-01T00:05Z" == time_name(1, 300)
    assert "1970-01-01T01:00Z" == time_name(1, 3600)


@pytest.mark.parametrize("by", ["hour", "5m"])
def test_requests_are_grouped_by_their_arrival(trace: Path, by: str) -> None:
    (row, _) = summarize([trace], by)

    began = journals.STARTED.began_seconds
    length = {"hour": 3600, "5m": 300}[by]
    assert time_name(int(began // length), length) == row.group


@pytest.mark.parametrize("by", KEYS)
def test_the_misses_of_groups_add_up(trace: Path, by: str) -> None:
    result = why([trace], by=by)

    for figure in ("requests", "prompt_tokens", "hit", "no_hit"):
        assert getattr(result, figure) == sum(getattr(group, figure) for group in result.groups)
    assert result.no_hit == sum(row.tokens for group in result.groups for row in group.causes)
    assert result.engine_seconds == why([trace]).engine_seconds
    assert lines(answer(result)).startswith("group,cause,")
    assert text(answer(result))


def test_the_second_request_has_the_rework(trace: Path) -> None:
    rework = {row.group: row.rework for row in summarize([trace], "group")[:-1]}

    assert 0 == rework["a"] == rework["no group"] < rework["b"]


def test_groups_of_two_traces_are_compared(trace: Path, tmp_path: Path) -> None:
    other = journals.write(tmp_path / "other", events(10, "A0+0 s10 o+ F"))

    changes = {change.group: change for change in diff.compare([trace], [other], by="lora").groups}

    assert changes["french"].before is not None and 2 == changes["french"].before.requests
    assert changes["french"].after is None
    assert changes["no adapter"].after is not None and 1 == changes["no adapter"].after.requests


def test_the_report_has_a_table_of_groups(trace: Path) -> None:
    page = pages.html(pages.gather([trace], by="lora"))

    assert "Requests by lora" in page and "french" in page
    assert "Requests by lora" not in pages.html(pages.gather([trace]))


def test_tail_prints_the_groups_of_ended_requests(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    follow(trace, format="json", by="lora", poll_seconds=0.0)

    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    groups = {row["group"]: row["requests"] for row in rows if row["kind"] == "group"}
    assert {"french": 2, "no adapter": 1} == groups


def test_tail_bounds_its_groups(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "MOST_GROUPS", 1)
    tail = tails.LiveTail(trace, "priority")
    tail.poll()
    tail.close()

    assert {"5": 1, "other": 2} == {row.group: row.requests for row in tail.groups()}


def test_a_pattern_that_can_not_be_read_is_refused(trace: Path) -> None:
    for ask in (lambda: why([trace], by="("), lambda: pages.gather([trace], by="(")):
        with pytest.raises(LedgerError, match="no regular expression"):
            ask()
    with pytest.raises(LedgerError, match="no regular expression"):
        diff.compare([trace], [trace], by="(")
    with pytest.raises(LedgerError, match="no regular expression"):
        tails.LiveTail(trace, "(")
