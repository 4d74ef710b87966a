"""Tables, their Parquet files and their DataFrames: one schema, and the ledger's figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import journals
from tests.audit.analysis.test_step_times import trace
from tests.exporters.labels import labelled
from tests.histories import events
from tests.simulated_trace import write_trace

from kvledger.audit.errors import LedgerError
from kvledger.audit.events import Delivered, Gap, Stepped
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.replay.observers import Lost, Steps
from kvledger.exporters.reports.summary import summarize
from kvledger.exporters.trace import columns
from kvledger.exporters.trace.columns import TABLES, Rows, rows

ROOT = Path(__file__).parents[3]

pq = pytest.importorskip("pyarrow.parquet")
pd = pytest.importorskip("pandas")

from kvledger.exporters.trace import frames, parquet  # noqa: E402
from kvledger.exporters.trace.parquet import export  # noqa: E402


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return journals.golden(tmp_path / "golden")


def collected(path: Path) -> dict[str, Rows]:
    by_table: dict[str, Rows] = {name: [] for name in TABLES}
    for name, some in rows([path]):
        by_table[name] += some
    return by_table


def test_every_row_has_every_column(golden: Path) -> None:
    by_table = collected(golden)

    for name in ("requests", "lives", "entries", "steps"):
        assert by_table[name]
        assert {len(TABLES[name])} == {len(row) for row in by_table[name]}


def test_requests_sum_to_the_totals(golden: Path) -> None:
    frame, totals = frames.requests(golden), audit_paths([golden]).totals

    for column in ("local", "external", "computed", "unattained", "prompt_tokens", "scheduled", "promised"):
        assert getattr(totals, column) == frame[column].sum()
    assert sum(totals.rework.values()) == frame["rework"].sum()
    work = frame[["first_prompt", "first_output", "rework", "rejected", "overrun"]].sum(axis=1)
    assert (work == frame["scheduled"]).all()


def test_lives_and_entries_belong_to_requests(golden: Path) -> None:
    requests, lives, entries = frames.requests(golden), frames.lives(golden), frames.entries(golden)

    assert requests["lives"].sum() == len(lives)
    assert requests["scheduled"].sum() == lives["scheduled"].sum()
    assert set(entries["request_id"]) == set(requests["request_id"])


def test_steps_sum_to_what_was_scheduled(tmp_path: Path) -> None:
    path = journals.write(tmp_path / "one", events(10, "A0+0 s10 o+ s1 o+ s1 o+ s1 o+ F"))

    frame = frames.steps(path)

    assert audit_paths([path]).totals.scheduled == (frame["tokens"] * frame["times"]).sum()
    assert [1] == list(frame["requests"].unique())


def test_the_times_of_steps_sum_to_the_time_of_the_engine(tmp_path: Path) -> None:
    path = trace(tmp_path / "trace")
    engine_audit = audit_paths([path], (Lost, Steps)).engines[0]

    frame = frames.steps(path)

    assert engine_audit.of(Steps).sums.busy_us / 1e6 == pytest.approx(frame["duration_seconds"].sum())
    assert frame["step"].is_monotonic_increasing
    assert frame["times"].sum() == engine_audit.auditor.ledger.step


def test_a_step_takes_until_its_output_comes(tmp_path: Path) -> None:
    stream = events(10, "A0+0 s10 o+ s1 o+ F")
    stepped, delivered = (
        [event.at for event in stream if isinstance(event, kind)] for kind in (Stepped, Delivered)
    )

    frame = frames.steps(journals.write(tmp_path / "one", stream))

    ends = zip([stepped[0], delivered[0]], delivered, strict=True)
    assert [(end - begin) / 1e6 for begin, end in ends] == pytest.approx(list(frame["duration_seconds"]))


def test_a_step_whose_output_was_not_seen_has_no_time(tmp_path: Path) -> None:
    frame = frames.steps(journals.write(tmp_path / "cut", events(10, "A0+0 s10", drain=False)))

    assert [True] == list(frame["duration_seconds"].isna())


def test_steps_before_a_loss_have_no_time(tmp_path: Path) -> None:
    stream = [*events(10, "A0+0 s10", drain=False), Gap(900, 5, "full")]
    frame = frames.steps(journals.write(tmp_path / "lost", stream))

    assert [1] == list(frame["step"])
    assert frame["duration_seconds"].isna().all()


@pytest.mark.parametrize("name", ["lives", "entries", "steps"])
def test_each_table_has_its_instants_in_utc(tmp_path: Path, name: str) -> None:
    frame = frames.table(name, journals.violated(tmp_path / "violated"))

    assert len(frame)
    for instant in columns.INSTANTS[name]:
        times = frame[columns.time_name(instant)]
        assert "datetime64[us, UTC]" == str(times.dtype)
        since = (times - pd.Timestamp(journals.STARTED.began_seconds, unit="s", tz="UTC")).dt.total_seconds()
        assert frame[instant].dropna().tolist() == pytest.approx(since.dropna().tolist(), abs=2e-6)


def test_labels_of_requests(tmp_path: Path) -> None:
    frame = frames.requests(labelled(tmp_path / "labelled"))

    assert ["french", "french"] == frame["lora"].dropna().tolist()
    assert ["a", "b"] == frame["request_group"].dropna().tolist()
    assert [5, 0, 0] == frame["priority"].tolist()
    assert {3} == set(frame["data_parallel_rank"])


def test_times_of_requests_and_findings_are_in_utc(tmp_path: Path) -> None:
    path = journals.violated(tmp_path / "violated")
    began = pd.Timestamp(journals.STARTED.began_seconds, unit="s", tz="UTC")

    requests, findings = frames.requests(path), frames.findings(path)

    assert [began] == list(requests["began_time"])
    for times in (requests["added_time"], requests["closed_time"], findings["time"]):
        assert "datetime64[us, UTC]" == str(times.dtype)
        assert all(0 <= since < 1 for since in (times - began).dt.total_seconds())


def test_findings(tmp_path: Path) -> None:
    frame = frames.findings(journals.violated(tmp_path / "violated"))

    assert {"tokens/negative", "tokens/set-once"} == set(frame["id"])


def test_figures_of_unknown_requests_are_null(tmp_path: Path) -> None:
    path = journals.write(tmp_path / "unknown", [*events(10, "A0+0 s10 o+"), Gap(900, 5, "full")])

    frame = frames.requests(path)

    assert frame["unknown"].notna().all()
    assert frame[["local", "scheduled", "lives"]].isna().all(axis=None)


def test_dtypes_hold_for_no_rows_at_all(tmp_path: Path) -> None:
    frame = frames.findings(journals.clean(tmp_path / "clean"))

    assert 0 == len(frame)
    kinds = ["string", "Int64", "datetime64[us, UTC]"]
    assert kinds == [str(frame[c].dtype) for c in ("id", "step", "time")]


def test_parquet_is_the_same_as_the_frames(golden: Path, tmp_path: Path) -> None:
    counts = export([golden], tmp_path / "out")

    for name in TABLES:
        read = pq.read_table(tmp_path / "out" / f"{name}.parquet")
        frame = frames.table(name, golden)
        assert counts[name] == read.num_rows == len(frame)
        assert list(frame.columns) == read.column_names
        descriptions = {field.name: field.metadata[b"description"].decode() for field in read.schema}
        assert {column.name: column.description for column in TABLES[name]} == descriptions
    scheduled = pq.read_table(tmp_path / "out" / "requests.parquet")["scheduled"].to_pylist()
    assert frames.requests(golden)["scheduled"].tolist() == scheduled


def test_the_columns_of_exported_requests_add_up_to_the_summary(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace", 300, engines=2)
    export([tmp_path / "trace"], tmp_path / "out", ("requests",))

    (row,) = summarize([tmp_path / "trace"])
    frame = pd.read_parquet(tmp_path / "out" / "requests.parquet")
    assert row.requests == len(frame)
    names = ("prompt_tokens", "local", "external", "computed", "scheduled", "preemptions")
    assert {name: getattr(row, name) for name in names} == {name: frame[name].sum() for name in names}


def test_an_export_that_fails_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(LedgerError, match="There is no"):
        export([tmp_path / "none"], tmp_path / "out")
    assert [] == list((tmp_path / "out").iterdir())
    with pytest.raises(LedgerError, match="can't be written"):
        export([journals.clean(tmp_path / "clean")], tmp_path / "file")


def test_a_full_disk_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is /dev/full."""
    monkeypatch.setattr(parquet, "draft_of", lambda path: _full(path))
    folder = tmp_path / "out"

    with pytest.raises(LedgerError, match="out can't be written: No space left on device"):
        export([journals.clean(tmp_path / "clean")], folder)

    assert [] == list(folder.iterdir())


def _full(path: Path) -> Path:
    draft = path.with_suffix(".full")
    draft.symlink_to("/dev/full")
    return draft
