"""The demo command: it starts its engine, follows the journal, survives a crash and compares counters.

All tests but the last use a stand-in engine, a program that writes a journal and a result. test_engine.py
tests the real engine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests import journals
from tests.exporters.reports.printed import text
from tests.histories import events

from kvledger.audit.analysis.source_differences import Figures
from kvledger.audit.demo import run as demo
from kvledger.audit.demo.run import Demo, EngineFailed
from kvledger.audit.errors import LedgerError
from kvledger.audit.events import HookFailed
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.replay.observers import KeptAccounts
from kvledger.exporters import writers
from kvledger.exporters.reports import demo as demo_report
from kvledger.exporters.reports.audit import report

COUNTERS = {
    'vllm:prompt_tokens_by_source{source="local_cache_hit"}': 0,
    'vllm:prompt_tokens_by_source{source="external_kv_transfer"}': 0,
    'vllm:prompt_tokens_by_source{source="local_compute"}': 168,
}
STAND_IN = """#!{python}
import json, os, sys
sys.path[:0] = {path}
from pathlib import Path
from tests import journals
words = dict(zip(sys.argv[3::2], sys.argv[4::2]))
def write(name):
    getattr(journals, name)(Path(os.environ["KVLEDGER_DIR"]) / "engine")
def finish(**more):
    Path(words["--output"]).write_text(json.dumps({{"version": "0.32.0", "elapsed_seconds": 2.0}} | more))
{body}
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a program with this ``body`` the demo's engine."""

    def make(body: str) -> None:
        program = tmp_path / "engine"
        program.write_text(STAND_IN.format(python=sys.executable, path=sys.path, body=body))
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())

    return make


def run(folder: Path, inject: str | None = None) -> tuple[Demo, list[tuple[int, int]]]:
    progress: list[tuple[int, int]] = []
    result = demo.run(inject, folder, lambda done, total: progress.append((done, total)))
    return result, progress


def code(result: Demo) -> int:
    return demo_report.exit_code(result, report(result.audit))


def test_a_clean_run_exits_with_0(stand_in: Any, tmp_path: Path) -> None:
    stand_in(f"write('clean'); print('noise'); print('{json.dumps({'done': 1, 'of': 2})}'); finish()")
    result, progress = run(tmp_path / "demo")

    assert [(0, 0), (1, 2)] == progress
    assert tmp_path / "demo" / "journal" == result.journal
    assert result.statement is not None
    assert "request-0" == result.statement.account.request_id
    assert 0 == code(result)


def test_a_violation_without_an_injection_exits_with_1(stand_in: Any, tmp_path: Path) -> None:
    stand_in("write('violated'); finish()")

    assert 1 == code(run(tmp_path / "demo")[0])


@pytest.mark.parametrize(("journal", "expected"), [("violated", 0), ("clean", 1)])
def test_an_injection_exits_with_0_if_it_was_found(
    stand_in: Any, tmp_path: Path, journal: str, expected: int
) -> None:
    stand_in(f"assert words['--inject'] == 'negative-local-hit'; write('{journal}'); finish()")

    assert expected == code(run(tmp_path / "demo", "negative-local-hit")[0])


def test_increments_that_the_counters_refused_are_a_named_difference(stand_in: Any, tmp_path: Path) -> None:
    """-128 local is refused, and the 160 external of the same iteration are not counted either."""
    stand_in(f"write('violated'); finish(counters={COUNTERS!r})")
    result, _ = run(tmp_path / "demo")
    (difference,) = result.to_counters.values()

    assert ["refused"] == list(result.to_counters)
    assert (128, -160, 0) == (
        difference.figures.local,
        difference.figures.external,
        difference.figures.computed,
    )


def test_a_counter_difference_without_a_cause_is_unexplained(stand_in: Any, tmp_path: Path) -> None:
    counters = {name: value + 7 for name, value in COUNTERS.items()}
    stand_in(f"write('violated'); finish(counters={counters!r})")
    result, _ = run(tmp_path / "demo")

    assert ["refused", "unexplained"] == list(result.to_counters)
    assert 21 == result.to_counters["unexplained"].figures.total


def test_lookups_and_preemptions_are_compared_with_the_engines_counters(
    stand_in: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lookup_counters = dict(zip(demo.COUNTERS.values(), (200, 0, 200, 32), strict=True))
    stand_in(f"write('clean'); finish(counters={COUNTERS | lookup_counters | {demo.PREEMPTIONS: 0}!r})")
    result, _ = run(tmp_path / "demo")
    shown = report(result.audit)

    assert 0 == result.engine_preemptions
    assert ["resumed"] == list(result.lookups.to_counters)
    data = demo_report.data(result, shown)["lookups"]
    assert [("admitted", "counters", "resumed", -200)] == [
        (row["from"], row["to"], row["cause"], row["local_queries"]) for row in data["differences"]
    ]
    writers.show(demo_report.answer(result, shown, verbose=True), "text")
    lines = capsys.readouterr().out.splitlines()
    shown_lines = [" ".join(line.split()) for line in lines]
    assert "resumed after a preemption, not counted -200 -200 -160 1" in shown_lines
    assert f"{demo.PREEMPTIONS} counts 0 of 1 preemptions: unexplained" in shown_lines


def test_a_kept_demo_folder_can_be_audited(stand_in: Any, tmp_path: Path) -> None:
    stand_in("write('clean'); finish()")
    run(tmp_path / "demo")

    assert "clean" == audit_paths([tmp_path / "demo"]).verdict


def test_the_journal_of_an_engine_that_crashed_is_audited(stand_in: Any, tmp_path: Path) -> None:
    stand_in("write('violated'); raise ValueError('counters only go up')")
    result, _ = run(tmp_path / "demo")

    errors = tmp_path / "demo" / "engine.err"
    assert f"ValueError: counters only go up (see {errors})" == result.failure
    assert "violated" == result.audit.verdict
    assert 4 == code(result)


def test_an_engine_that_does_not_start_is_an_error(stand_in: Any, tmp_path: Path) -> None:
    stand_in("raise OSError('no memory')")

    with pytest.raises(EngineFailed, match=r"The engine did not start: OSError: no memory \(see ") as raised:
        run(tmp_path / "demo")
    assert 4 == raised.value.exit_code


def test_an_engine_that_was_not_observed_is_an_error(stand_in: Any, tmp_path: Path) -> None:
    stand_in("finish()")

    with pytest.raises(EngineFailed, match="plugin was not loaded"):
        run(tmp_path / "demo")


def test_a_folder_with_files_is_refused(stand_in: Any, tmp_path: Path) -> None:
    """The folder may hold another journal."""
    stand_in("finish()")

    with pytest.raises(LedgerError, match="is not empty"):
        run(tmp_path)


def test_the_plugin_is_added_to_vllm_plugins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora")

    assert "lora,kvledger" == demo._environment(tmp_path, None)["VLLM_PLUGINS"]


def test_the_json_is_one_object(stand_in: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(f"write('violated'); finish(counters={COUNTERS!r})")

    found = demo_report.run("negative-local-hit", tmp_path / "demo")
    writers.show(found, "json")
    assert 0 == found.code
    result = json.loads(capsys.readouterr().out)

    assert ("violated", True) == (result["verdict"], result["found"])
    assert 168 == result["engine_counters"]["computed"]
    assert "request-0" == result["statement"]["account"]["request_id"]
    assert journals.STARTED.version == result["journals"][0]["version"]


def test_the_terminal_output_names_the_next_commands(
    stand_in: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in("write('violated'); finish()")
    writers.show(demo_report.run("negative-local-hit", tmp_path / "demo"), "text")
    shown = capsys.readouterr().out
    journal = tmp_path / "demo" / "journal"

    assert shown.startswith("The injected defect negative-local-hit was found: tokens/negative\n")
    assert shown.splitlines()[2].startswith("violated at level tokens: counts, ")
    assert shown.splitlines()[3].startswith("1 request, ")
    output = "".join(shown.split())
    for command in (f"audit {journal}", f"show {journal} request-0", "explain tokens/negative"):
        assert f"kvledger {command}".replace(" ", "") in output


def test_the_next_command_explains_the_violation_and_no_drift_before_it(
    stand_in: Any, tmp_path: Path
) -> None:
    stand_in("write('violated'); finish()")
    result, _ = run(tmp_path / "demo", "negative-local-hit")
    found = report(result.audit)
    drift = replace(found.violations[0], id="metrics/chunks-in-one-step", severity="drift")
    found = replace(found, violations=[drift, *found.violations])

    shown = text(demo_report.answer(result, found))
    assert "kvledger explain tokens/negative" in shown
    assert "kvledger explain metrics/" not in shown


def test_the_output_ends_with_what_to_type_for_a_server_a_notebook_and_ci(
    stand_in: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stand_in("write('clean'); finish()")
    writers.show(demo_report.run(None, tmp_path / "demo"), "text")
    lines = capsys.readouterr().out.splitlines()
    words = [line.strip() for line in lines]

    assert "KVLEDGER_DIR=~/kvledger vllm serve MODEL" in words
    assert "%load_ext kvledger" in words
    assert any(line.startswith("pytest --kvledger") for line in words)
    assert lines[0].startswith("clean at level tokens: counts, ")
    assert lines[1].startswith("1 request")
    assert len(lines) <= 59  # the set-up and the start of the engine have a line each


def test_where_the_shell_does_not_find_kvledger_the_first_command_activates_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setenv("PATH", "")

    assert [". .venv/bin/activate"] == demo_report._activation()


def test_the_counters_include_a_request_that_is_unknown_here(tmp_path: Path) -> None:
    """kvledger leaves out an account that lost events; the engine's counters include its report."""
    stream = journals.reported(events(10, "A0+0 s10 o+ F"), local=0, external=0, computed=10)
    lost = [*stream[:2], HookFailed(1, "hook", "error", False), *stream[2:]]
    audit = audit_paths([journals.write(tmp_path / "one", lost)], (KeptAccounts,))
    (engine_audit,) = audit.engines

    reconciliation_step = demo.between_reported_and_counters(
        audit.reconciliation, Figures(computed=10), engine_audit.of(KeptAccounts).sums
    )

    assert ["unknown_here"] == list(reconciliation_step)
    assert "in 1 of them: the hook hook failed" in audit.notes


@pytest.mark.whole_engine
def test_the_run_of_the_real_engine_leaves_nothing_unexplained(tmp_path: Path) -> None:
    pytest.importorskip("vllm")

    found = demo_report.run(None, tmp_path / "demo")

    assert 0 == found.code
    assert "unexplained" not in text(found)
