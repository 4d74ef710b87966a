"""``kvledger export --format openmetrics``: past metrics, and a real Prometheus that shows them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests import history, journals
from tests.histories import events

from kvledger.audit.errors import LedgerError
from kvledger.audit.events import CacheReset
from kvledger.audit.journal.writer import JournalWriter
from kvledger.exporters.metrics import backfill
from kvledger.exporters.metrics.metric_list import collect

AllSeries = dict[tuple[str, frozenset[tuple[str, str]]], list[tuple[float, float]]]
LABELS = {"job": "a", "instance": "b"}
LINE = re.compile(r"(\w+)\{(.*)\} (\S+) (\S+)")


def exported(folder: Path, interval: float = 1.0) -> AllSeries:
    """Each series with its times and values.

    prometheus_client's parser is of no use here: it drops samples of a histogram's second time.
    """
    file = folder.parent / f"{folder.name}.om"
    backfill.export([folder], file, interval, LABELS)
    series: AllSeries = {}
    for line in file.read_text().splitlines():
        if not line.startswith("#"):
            name, block, value, at = LINE.fullmatch(line).groups()  # type: ignore[union-attr]
            key = name, frozenset(re.findall(r'(\w+)="([^"]*)"', block))
            series.setdefault(key, []).append((float(at), float(value)))
    return series


def test_each_family_and_each_histogram_is_whole(tmp_path: Path) -> None:
    history.trace(tmp_path / "trace", 200)
    exported(tmp_path / "trace")
    lines = (tmp_path / "trace.om").read_text().splitlines()
    keys = [re.sub(r'\ble="[^"]*",|(_bucket|_count|_sum)(?=\{)|\}.*', "", line) for line in lines]
    groups = [key for key, _ in itertools.groupby(keys) if not key.startswith("#")]

    assert "# EOF" == lines[-1]
    assert len(set(groups)) == len(groups)


def test_the_file_is_valid_and_ends_with_the_sums_of_the_audit(tmp_path: Path) -> None:
    history.trace(tmp_path / "trace", 200)
    series = exported(tmp_path / "trace")
    audited = sum(
        float(sample.value)
        for metric, samples in collect(journals.followed_audits(tmp_path / "trace"))
        if metric.name == "kvledger_prompt_tokens"
        for sample in samples
        if isinstance(sample.value, int | float)
    )
    prompts = [values for (name, _), values in series.items() if name == "kvledger_prompt_tokens_total"]

    assert audited == sum(values[-1][1] for values in prompts)
    for values in prompts:
        assert values == sorted(values)  # neither time nor a counter goes back
    assert all({("job", "a"), ("instance", "b")} <= labels for _, labels in series)


def test_a_restarted_engine_continues_its_series(tmp_path: Path) -> None:
    """Two engines that run at one time have numbers."""
    for number, wall_seconds in enumerate((1.7e9, 1.7e9, 1.8e9)):
        writer = JournalWriter(tmp_path / "j" / f"engine-{number}")
        writer.rotate()
        given = {"process_id": number, "wall_seconds": wall_seconds, "configuration": {"model": "m"}}
        writer.write([replace(journals.STARTED, **given), *journals_of_one_request()])
        writer.close()
    ends = {
        dict(labels)["engine"]: values[-1][1]
        for (name, labels), values in exported(tmp_path / "j", 1e6).items()
        if name == "kvledger_requests_total" and values[-1][1]
    }

    assert {"m / engine 0": 2.0, "m / engine 1": 1.0} == ends


def journals_of_one_request() -> list[object]:
    return [journals.Snapshot(0, 0, [], 0), *events(200, journals.CLEAN)]


def test_an_event_centuries_after_the_others_is_one_sentence(tmp_path: Path) -> None:
    journals.write(tmp_path / "engine", [CacheReset(1 << 53, True, False)], stopped=False)

    with pytest.raises(LedgerError, match="would lie between two events"):
        exported(tmp_path / "engine")
    assert not (tmp_path / "engine.om").exists()


def test_a_label_that_is_none_is_one_sentence() -> None:
    with pytest.raises(LedgerError, match="'job' is no label such as job=kvledger"):
        backfill.labels_of(["job"])


@pytest.mark.programs
def test_a_prometheus_shows_the_past(tmp_path: Path) -> None:
    folder = history.trace(tmp_path / "trace")
    totals = journals.followed_audits(folder)
    with history.served(tmp_path, folder) as (server, end):
        ask = {
            source: server.series(f'sum(kvledger_prompt_tokens_total{{source="{source}"}} @ {end})')[0][1]
            for source in ("local", "external", "computed", "unattained")
        }
        hour_before = server.series(f"sum(kvledger_prompt_tokens_total @ {end - 20})")[0][1]

    assert ask == {source: sum(getattr(one.closed, source) for one in totals) for source in ask}
    assert 0 < hour_before < sum(ask.values())
