"""The demo around its engine: how it starts it, follows it, survives it, and compares counters.

The engine is a stand-in here, a program that writes a journal and a result, but for the last test; the
real one is in test_engine.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import journals
from tests.histories import events

from kvledger.audit.analysis.reconciliation import Figures
from kvledger.audit.demo import lookups
from kvledger.audit.demo import run as demo
from kvledger.audit.demo.run import Demo, EngineFailed
from kvledger.audit.errors import LedgerError
from kvledger.audit.events import HookFailed
from kvledger.audit.replay.journals import audit_paths
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
def tell(**more):
    Path(words["--output"]).write_text(json.dumps({{"version": "0.32.0", "elapsed_seconds": 2.0}} | more))
{body}
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes ``body`` the engine."""

    def make(body: str) -> None:
        program = tmp_path / "engine"
        program.write_text(STAND_IN.format(python=sys.executable, path=sys.path, body=body))
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())

    return make


def run(folder: Path, inject: str | None = None) -> tuple[Demo, list[tuple[int, int]]]:
    moves: list[tuple[int, int]] = []
    found = demo.run(inject, folder, lambda done, total: moves.append((done, total)))
    return found, moves


def code(found: Demo) -> int:
    return demo_report.exit_code(found, report(found.audit))


def test_a_clean_run(stand_in: Any, tmp_path: Path) -> None:
    stand_in(f"write('clean'); print('noise'); print('{json.dumps({'done': 1, 'of': 2})}'); tell()")
    found, moves = run(tmp_path / "demo")

    assert [(0, 0), (1, 2)] == moves
    assert tmp_path / "demo" / "journal" == found.journal
    assert found.statement is not None
    assert "request-0" == found.statement.account.request_id
    assert 0 == code(found)


def test_a_violation_without_an_injection_is_1(stand_in: Any, tmp_path: Path) -> None:
    stand_in("write('violated'); tell()")

    assert 1 == code(run(tmp_path / "demo")[0])


@pytest.mark.parametrize(("journal", "expected"), [("violated", 0), ("clean", 1)])
def test_an_injection_is_0_where_it_was_found(
    stand_in: Any, tmp_path: Path, journal: str, expected: int
) -> None:
    stand_in(f"assert words['--inject'] == 'negative-local-hit'; write('{journal}'); tell()")

    assert expected == code(run(tmp_path / "demo", "negative-local-hit")[0])


def test_what_the_counters_refused_is_named(stand_in: Any, tmp_path: Path) -> None:
    """-128 local is refused, and the 160 external of the same iteration are not counted either."""
    stand_in(f"write('violated'); tell(counters={COUNTERS!r})")
    found, _ = run(tmp_path / "demo")
    (difference,) = found.to_counters.differences.values()

    assert "refused" == difference.cause
    assert (128, -160, 0) == (
        difference.figures.local,
        difference.figures.external,
        difference.figures.computed,
    )


def test_a_counter_that_nothing_explains(stand_in: Any, tmp_path: Path) -> None:
    more = {name: value + 7 for name, value in COUNTERS.items()}
    stand_in(f"write('violated'); tell(counters={more!r})")
    found, _ = run(tmp_path / "demo")

    assert ["refused", "unexplained"] == list(found.to_counters.differences)
    assert 21 == found.to_counters.differences["unexplained"].figures.total


def test_look_ups_and_preemptions_stand_beside_the_engines_counters(
    stand_in: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = dict(zip(lookups.COUNTERS.values(), (200, 0, 200, 32), strict=True))
    stand_in(f"write('clean'); tell(counters={COUNTERS | more | {demo.PREEMPTIONS: 0}!r})")
    found, _ = run(tmp_path / "demo")
    shown = report(found.audit)

    assert 0 == found.engine_preemptions
    assert ["resumed"] == list(found.lookups.to_counters)
    data = demo_report.data(found, shown)["lookups"]
    assert [("admitted", "counters", "resumed", -200)] == [
        (row["from"], row["to"], row["cause"], row["local_queries"]) for row in data["differences"]
    ]
    demo_report.terminal.show(demo_report.render(found, shown, verbose=True))
    lines = capsys.readouterr().out.splitlines()
    shown_lines = [" ".join(line.split()) for line in lines]
    assert "resumed after a preemption, not counted -200 -200 -160 1" in shown_lines
    assert f"{demo.PREEMPTIONS} counts 0 of 1 preemptions: unexplained" in shown_lines


def test_a_kept_folder_may_be_audited_itself(stand_in: Any, tmp_path: Path) -> None:
    stand_in("write('clean'); tell()")
    run(tmp_path / "demo")

    assert "clean" == audit_paths([tmp_path / "demo"]).verdict


def test_an_engine_that_dies_is_audited_all_the_same(stand_in: Any, tmp_path: Path) -> None:
    stand_in("write('violated'); raise ValueError('counters only go up')")
    found, _ = run(tmp_path / "demo")

    errors = tmp_path / "demo" / "engine.err"
    assert f"ValueError: counters only go up (see {errors})" == found.failure
    assert "violated" == found.audit.verdict
    assert 4 == code(found)


def test_an_engine_that_does_not_come_up(stand_in: Any, tmp_path: Path) -> None:
    stand_in("raise OSError('no memory')")

    with pytest.raises(EngineFailed, match=r"The engine did not start: OSError: no memory \(see ") as told:
        run(tmp_path / "demo")
    assert 4 == told.value.exit_code


def test_an_engine_that_was_not_observed(stand_in: Any, tmp_path: Path) -> None:
    stand_in("tell()")

    with pytest.raises(EngineFailed, match="plugin was not loaded"):
        run(tmp_path / "demo")


def test_a_folder_in_use_is_refused(stand_in: Any, tmp_path: Path) -> None:
    """What stands there may be somebody's journal."""
    stand_in("tell()")

    with pytest.raises(LedgerError, match="is not empty"):
        run(tmp_path)


def test_the_plugin_is_among_those_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora")

    assert "lora,kvledger" == demo._environment(tmp_path, None)["VLLM_PLUGINS"]


def test_the_json_is_one_object(stand_in: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stand_in(f"write('violated'); tell(counters={COUNTERS!r})")

    assert 0 == demo_report.run("negative-local-hit", tmp_path / "demo", as_json=True)
    found = json.loads(capsys.readouterr().out)

    assert ("violated", True) == (found["verdict"], found["found"])
    assert 168 == found["engine_counters"]["computed"]
    assert "request-0" == found["statement"]["account"]["request_id"]
    assert journals.STARTED.version == found["journals"][0]["version"]


def test_a_person_is_told_what_to_run_next(
    stand_in: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in("write('violated'); tell()")
    demo_report.run("negative-local-hit", tmp_path / "demo", as_json=False)
    shown = capsys.readouterr().out
    journal = tmp_path / "demo" / "journal"

    assert shown.startswith("The injected defect negative-local-hit was found: tokens/negative\n")
    assert shown.splitlines()[2].startswith("violated: 1 request, ")
    told = "".join(shown.split())
    for command in (f"audit {journal}", f"show {journal} request-0", "explain tokens/negative"):
        assert f"kvledger {command}".replace(" ", "") in told


def test_the_counters_hold_what_is_unknown_here(tmp_path: Path) -> None:
    """An account that lost events is in no figure of ours, and its report is in the engine's."""
    stream = journals.reported(events(10, "A0+0 s10 o+ F"), local=0, external=0, computed=10)
    lost = [*stream[:2], HookFailed(1, "hook", "error", False), *stream[2:]]
    audit = audit_paths([journals.write(tmp_path / "one", lost)], keep=True)
    (book,) = audit.engines

    step = demo.between_reported_and_counters(audit.reconciliation, Figures(computed=10), book.accounts)

    assert ["unknown_here"] == list(step.differences)
    assert "in 1 of them: the hook hook failed" in audit.notes


@pytest.mark.whole_engine
def test_the_real_engines_run_leaves_nothing_unexplained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")

    assert 0 == demo_report.run(None, tmp_path / "demo", as_json=False)
    assert "unexplained" not in capsys.readouterr().out
