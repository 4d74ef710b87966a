"""``kvledger query``: SQL over the rows of requests, and nothing else."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import duckdb
import pytest
from msgspec.structs import replace
from tests import journals
from tests.command_line import exit_code
from tests.histories import GOLDEN, events

from kvledger.audit.errors import LedgerError
from kvledger.audit.events import Snapshot
from kvledger.audit.journal.writer import JournalWriter
from kvledger.exporters.facts import tables
from kvledger.exporters.facts.compact import compact
from kvledger.exporters.facts.dataset import facts
from kvledger.exporters.facts.replayed import Wanted
from kvledger.exporters.facts.tables import Facts, connect
from kvledger.exporters.reports.query import ask
from kvledger.exporters.reports.summary import summarize
from kvledger.exporters.trace.columns import QUESTIONS


def run(*words: str | Path) -> tuple[object, str, str]:
    """The exit code of ``kvledger``, and what it prints."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = exit_code(*words)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Golden histories, and a violation."""
    folder = tmp_path_factory.mktemp("trace")
    for number, row in enumerate(GOLDEN[::5]):
        journals.write(
            folder / f"engine-{number:02d}", row.events(), configuration={"model": f"m{number % 2}"}
        )
    journals.violated(folder / "violated")
    return folder


def test_each_of_the_twenty_five_questions_of_the_page_has_an_answer(trace: Path) -> None:
    with facts([trace], wanted=Wanted(checks=True, activity=True, blocks=True)) as found:
        found.mount_sums()
        assert 25 == len([question.words for question in QUESTIONS if found.answer(question.sql)[0]])


def test_the_causes_of_a_figure_sum_to_it(trace: Path) -> None:
    for figure in ("rework", "voided", "discarded", "missed"):
        by_cause = f"select sum(tokens) from causes where figure = '{figure}'"
        ((of_requests, of_causes),) = ask([trace], f"select sum({figure}), ({by_cause}) from requests").rows
        assert of_requests == of_causes


def test_verdicts_and_findings_are_rows(trace: Path) -> None:
    violated = "select journal, request_id from requests where verdict = 'violated' order by all"
    found = "select distinct journal, request_id from findings where severity = 'violation' order by all"
    assert ["violated", "request-0"] in ask([trace], violated).rows
    assert ask([trace], found).rows == ask([trace], violated).rows


@pytest.mark.parametrize(
    ("sql", "sentence"),
    [
        ("select modle from requests", "Candidate bindings: "),
        ("select * from request", "Did you mean"),
        ("selec 1", "syntax error"),
        ("copy requests to '/tmp/stolen.csv'", "A query is one SELECT, and this is COPY."),
        ("select 1; select 2", "A query is one SELECT, and this is SELECT, SELECT."),
        ("", "A query is one SELECT, and this is nothing."),
        ("select * from read_csv('/etc/passwd')", "disabled"),
        ("set enable_external_access = true", "A query is one SELECT"),
    ],
)
def test_anything_else_is_refused_with_a_sentence(trace: Path, sql: str, sentence: str) -> None:
    code, out, err = run("query", trace, sql)

    assert (2, "") == (code, out)
    assert sentence in err and "Traceback" not in err


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a journal that was compacted. No test changes it."""
    folder = tmp_path_factory.mktemp("kept")
    journal = journals.write(folder / "engine-1", events(200, journals.CLEAN))
    asked = "select request_id, local, external, verdict from requests"
    before = ask([folder], asked)
    compact(journal)
    assert before == ask([folder], asked)
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


COPIES = (
    "copy (select 42 as a) to '{file}' (format parquet)",
    "with gone as (copy (select 42 as a) to '{file}' (format parquet)) select * from gone",
    "with gone as (copy (select 42 as a) to '{file}' (format csv)) select * from requests",
    "with gone as (copy (select 42 as a) to '{new}') select 1",
    "select 1 where 1 in (with gone as (copy requests to '{file}') select 1)",
    "with recursive n as (select 1 union all (with gone as (copy requests to '{new}') select 2)) from n",
    "from query($$ with gone as (copy requests to '{file}') select 1 $$)",
    "with gone as (copy (select 42 as a) to '{spill}') select 1",
    "from query($$ with gone as (copy requests to '{spill}') select 1 $$)",
    "from json_execute_serialized_sql(json_serialize_sql("
    "$$ with gone as (copy requests to '{file}') select 1 $$))",
)
OTHERS = (
    "export database '{folder}'",
    "import database '{folder}'",
    "attach '{new}' as other",
    "install httpfs",
    "load httpfs",
    "create table more as select 1",
    "create view requests as select 1",
    "create or replace persistent secret s (type s3)",
    "with more as (insert into engines select * from engines returning *) select * from more",
    "with gone as (delete from engines returning *) select * from gone",
    "checkpoint",
    "pragma enable_profiling",
    "set profile_output = '{new}'",
    "select 1; copy requests to '{file}'",
    "from read_text('{file}')",
    "from read_blob('{folder}/**')",
    "from read_parquet('{file}')",
    "from parquet_metadata('{file}')",
    "from '{file}'",
    "from glob('{folder}/*')",
    "from sniff_csv('{file}')",
    "select getenv('HOME')",
)


@pytest.mark.parametrize("sql", COPIES + OTHERS)
def test_no_query_writes_or_opens_a_file(kept: Path, tmp_path: Path, sql: str) -> None:
    before = contents(kept)
    file = next(path for path in before if path.suffix == ".parquet")
    new, spill = tmp_path / "new", "' || current_setting('temp_directory') || '/x"
    text = sql.format(file=file, folder=kept, new=new, spill=spill)

    code, out, err = run("query", kept, text)

    assert (2, "") == (code, out)
    assert "Traceback" not in err
    assert before == contents(kept)


@pytest.mark.parametrize("sql", COPIES)
def test_no_condition_writes_a_file(kept: Path, sql: str) -> None:
    before = contents(kept)
    file = next(path for path in before if path.suffix == ".parquet")
    text = sql.format(file=file, folder=kept, new=kept / "new", spill=kept / "spill")
    for condition in (f"1 in ({text})", f"true) limit 0; {text}; select 1 where (true"):
        assert 2 == run("summary", kept, "--where", condition)[0]
    assert before == contents(kept)


def test_duckdb_itself_can_open_no_file(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A statement that gets past the parser finds every file closed."""
    monkeypatch.setattr(Facts, "_require_one_select", lambda *_: None)
    before = contents(kept)
    file = next(path for path in before if path.suffix == ".parquet")
    with facts([kept]) as found:
        for sql in COPIES + OTHERS:
            if "{file}" in sql or "{new}" in sql:
                with pytest.raises(LedgerError):
                    found.rows(sql.format(file=file, folder=kept, new=tmp_path / "new"))
                assert before == contents(kept), sql


def test_text_that_looks_like_a_parsed_statement_is_text(trace: Path) -> None:
    text = '"type":"COPY_QUERY_NODE" "function_name":"query"'
    assert [[text, text]] == ask([trace], f"select '{text}', '{text}'").rows


STATEMENTS = {
    "INSERT": "insert into engines select * from engines",
    "UPDATE": "update engines set version = 'x'",
    "CREATE": "create table more as select 1",
    "DELETE": "delete from engines",
    "PREPARE": "prepare one as select 1",
    "EXECUTE": "execute one",
    "ALTER": "alter table engines add column more int",
    "TRANSACTION": "begin transaction",
    "COPY": "copy requests to 'new.csv'",
    "ANALYZE": "analyze",
    "VARIABLE_SET": "set variable one = 1",
    "CREATE_FUNC": "create macro one() as 1",
    "EXPLAIN": "explain select 1",
    "DROP": "drop table engines",
    "EXPORT": "export database 'new'",
    "PRAGMA": "pragma enable_profiling",
    "VACUUM": "vacuum",
    "CALL": "call pragma_version()",
    "SET": "set threads = 1",
    "LOAD": "load json",
    "ATTACH": "attach ':memory:' as other",
    "DETACH": "detach other",
    "MULTI": "pivot engines on version",
    "COPY_DATABASE": "copy from database memory to other",
    "MERGE_INTO": "merge into engines using engines as e on true when matched then delete",
}
NOT_WRITTEN = {"INVALID", "SELECT", "RELATION", "EXTENSION", "LOGICAL_PLAN"}
"""Kinds that are a SELECT, or that no SQL of DuckDB's own is."""


def test_of_all_kinds_of_statements_that_duckdb_has_one_is_run(trace: Path) -> None:
    kinds = {name.removeprefix("StatementType.") for name in duckdb.StatementType.__members__}
    with facts([trace]) as found:
        for name in {name.replace("_STATEMENT", "") for name in kinds} - NOT_WRITTEN:
            with pytest.raises(LedgerError):
                found.rows(STATEMENTS[name])


def test_every_connection_is_locked_from_the_beginning() -> None:
    connection = connect()
    for name, value in {"enable_external_access": False, "lock_configuration": True}.items():
        assert (value,) == connection.execute(f"select current_setting('{name}')").fetchone()


def test_an_answer_has_a_bound(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MOST_VALUES", 20)
    code, out, err = run("query", trace, "select range, range from range(11)")

    assert (2, "") == (code, out)
    assert "The answer has more than 20 values: select fewer columns" in err
    assert 10 == len(ask([trace], "select range, range from range(10)").rows)


class Database:
    """A connection whose query stops when it is interrupted, or never."""

    def __init__(self, *, stops: bool) -> None:
        self.stops = stops
        self.closed = False
        self.interrupted = threading.Event()

    def interrupt(self) -> None:
        if self.stops:
            self.interrupted.set()

    def close(self) -> None:
        self.closed = True

    def query(self) -> None:
        self.interrupted.wait(30)
        raise duckdb.InterruptException("INTERRUPT Error: Interrupted!")


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize(
    "limit, said", [("MOST_SECONDS", "took longer than"), ("MOST_GROWTH", "needs more than")]
)
def test_a_query_ends_at_its_limits(
    stops: bool, limit: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, limit, -(1 << 40))
    monkeypatch.setattr(tables, "left_behind", [])
    database = Database(stops=stops)
    began = time.monotonic()
    with pytest.raises(LedgerError, match=said):
        tables.ended(database, database.query)
    took = time.monotonic() - began
    tables.close(database)
    database.interrupted.set()

    assert took < 2
    assert stops == database.closed


SLOW = "select sum(a.range + b.range) from range(10000000) a, range(10000000) b"


BEGUN = """
import sys
from kvledger import cli
from kvledger.exporters.facts import tables
ended = tables.ended
def begun(connection, work):
    print("begun", file=sys.stderr, flush=True)
    return ended(connection, work)
tables.ended = begun
cli.main()
"""


def test_ctrl_c_ends_a_query_within_two_seconds(trace: Path) -> None:
    command = [sys.executable, "-c", BEGUN, "query", str(trace), SLOW]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may have it ignored
    ) as process:
        assert process.stderr is not None
        assert b"begun\n" == process.stderr.readline()
        time.sleep(0.5)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        try:
            out, _ = process.communicate(timeout=10)
        finally:
            process.kill()
        took = time.monotonic() - began

    assert (130, b"") == (process.returncode, out)
    assert took < 2


def test_formats(trace: Path) -> None:
    asked = "select model, count(*) as requests from requests group by model order by model"

    shown = run("query", trace, asked)[1]
    assert "model" in shown and "m1" in shown
    found = json.loads(run("query", trace, asked, "--format", "json")[1])
    assert ["model", "requests"] == found["columns"]
    assert "model,requests" == run("query", trace, asked, "--format", "csv")[1].splitlines()[0]


@pytest.mark.parametrize("by", ["model,outcome", "journal", "preemptions", "lives,model"])
def test_the_summary_groups_by_any_columns(trace: Path, by: str) -> None:
    *groups, total = summarize([trace], by)

    assert len({row.group for row in groups}) == len(groups) > 1
    for figure in ("requests", "prompt_tokens", "local", "rework", "scheduled"):
        assert sum(getattr(row, figure) for row in groups) == getattr(total, figure)


def test_a_word_that_is_no_column_is_refused_with_the_nearest(trace: Path) -> None:
    code, _, err = run("summary", trace, "--by", "modle")
    assert 2 == code and "Did you mean model" in err
    code, _, err = run("summary", trace, "--percentiles", "mised")
    assert 2 == code and "Did you mean missed" in err
    code, _, err = run("summary", trace, "--where", "rewrok > 0")
    assert 2 == code and "rework" in err


def test_a_condition_selects_requests(trace: Path) -> None:
    preempted = summarize([trace], where="preemptions > 0")[-1]
    others = summarize([trace], where="not preemptions > 0")[-1]

    assert 0 < preempted.requests < summarize([trace])[-1].requests
    assert summarize([trace])[-1].rework == preempted.rework + others.rework


def test_percentiles_are_exact(trace: Path) -> None:
    values = sorted(
        row[0] for row in ask([trace], "select missed from requests where missed is not null").rows
    )
    (total,) = summarize([trace], percentiles="missed")

    for percent, found in total.percentiles["missed"].items():
        below = sum(value <= found for value in values)
        assert found in values and below >= int(percent) / 100 * len(values)
        assert sum(value < found for value in values) < int(percent) / 100 * len(values)


def test_a_number_of_an_engine_that_no_column_holds_is_not_known(tmp_path: Path) -> None:
    """A damaged journal may say anything of its engine; ``export html`` ended with 70."""
    started = replace(journals.STARTED, process_id=(1 << 64) - 1, configuration={"block_size": 1 << 63})
    writer = JournalWriter(tmp_path / "engine-00")
    writer.rotate()
    writer.write([started, Snapshot(0, 0, [], 0), *events(200, journals.CLEAN)])
    writer.close()

    with facts([tmp_path]) as found:
        assert [(None, None)] == found.rows("select process_id, block_tokens from engines")
