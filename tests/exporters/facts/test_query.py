"""``kvledger query``: SQL over the rows of requests, and nothing else."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from tests import journals
from tests.command_line import exit_code
from tests.histories import GOLDEN, events

from kvledger.audit.errors import LedgerError
from kvledger.exporters.facts.compact import compact
from kvledger.exporters.facts.dataset import facts
from kvledger.exporters.facts.questions import QUESTIONS
from kvledger.exporters.facts.replayed import Wanted
from kvledger.exporters.facts.tables import Facts
from kvledger.exporters.reports.query import ask
from kvledger.exporters.reports.summary import summarize


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


def test_an_answer_has_the_sums_of_the_summary(trace: Path) -> None:
    total = summarize([trace])[-1]

    ((requests, local, rework),) = ask([trace], "select count(*), sum(local), sum(rework) from requests").rows

    assert (total.requests, total.local, total.rework) == (requests, local, rework)


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
        ("select * from '/etc/passwd'", "passwd"),
        ("select * from glob('/*')", "disabled"),
        ("set enable_external_access = true", "A query is one SELECT"),
        ("attach '/tmp/other.db'", "A query is one SELECT"),
        ("install httpfs", "A query is one SELECT"),
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
