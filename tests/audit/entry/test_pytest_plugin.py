"""The pytest plugin, in test runs of its own: real schedulers, with and without a fault."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.command_line import exit_code
from tests.scenarios.driving import start
from vllm.v1.core.sched.scheduler import Scheduler

import kvledger.audit.entry.pytest_observer  # noqa: F401
from kvledger import attach
from kvledger.audit.engines import LEVELS
from kvledger.audit.entry import pytest_plugin

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[3]
PYPROJECT = (ROOT / "pyproject.toml").read_text()

CLEAN = """
    from tests.scenarios.driving import start

    def test_a_scenario():
        driver = start()
        driver.add("a", 40, 4)
        driver.run()
"""
FREE_TWICE = """
    from tests.scenarios.driving import start

    def free_twice():
        driver = start()
        driver.add("a", 40, 4)
        driver.step()
        manager = driver.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        blocks = list(manager.req_to_blocks["a"])
        manager.free("a")
        manager.req_to_blocks["a"] = blocks
        manager.free("a")
        return blocks
"""
TWICE = f"""{FREE_TWICE}
    def test_a_table_freed_twice():
        blocks = free_twice()
        assert {{holds}}
"""


@pytest.fixture(scope="module", autouse=True)
def everything_is_imported() -> None:
    """The inner runs forget what they import, and vLLM can't be imported twice."""
    driver = start(lambda scheduler: attach(scheduler, level="blocks"), connector="scripted")
    driver.add("a", 40, 4)
    driver.run()


def run(pytester: pytest.Pytester, source: str, *options: str, **words: object) -> pytest.RunResult:
    pytester.makepyfile(source.format(**words) if words else source)
    if not any(option.startswith("--kvledger=") for option in options):
        options = ("--kvledger", *options)
    return pytester.runpytest_inprocess("-p", pytest_plugin.__name__, *options)


def test_a_clean_test_passes_and_its_engine_is_counted(pytester: pytest.Pytester) -> None:
    result = run(pytester, CLEAN)

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines("kvledger: 1 engines observed at level blocks, 0 left alone, 0 violations")


@pytest.mark.whole_engine
def test_an_engine_is_observed_if_its_test_is_the_first_to_import_vllm(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_a_scenario():
            assert "vllm.v1.core.sched.scheduler" not in sys.modules
            from tests.scenarios.driving import start

            driver = start()
            driver.add("a", 40, 4)
            driver.run()
        """
    )
    result = pytester.runpytest_subprocess(
        "-p", pytest_plugin.__name__, "--kvledger", "-o", f"pythonpath={ROOT}"
    )

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines("kvledger: 1 engines observed at level blocks, 0 left alone, 0 violations")


def test_a_violation_fails_the_test_with_the_report(pytester: pytest.Pytester) -> None:
    result = run(pytester, TWICE, holds=True)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "blocks/double-free: Block * was freed at step 1 for request a, life 1, group 0, which does no*",
            "block * of pool 0, *; the engine counts -1 references",
            "    step 1: allocated, request a, life 1, group 0, by allocate_new_blocks",
            "    step 1: freed, request a, life 1, group 0, by free",
        ]
    )


def test_a_test_that_fails_anyway_also_gets_the_report(pytester: pytest.Pytester) -> None:
    result = run(pytester, TWICE, holds="blocks == 7")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E * == 7*", "*- Captured kvledger call -*", "blocks/double-free: *"])


def kept(pytester: pytest.Pytester) -> list[Path]:
    """The journals that a run left in pytest's cache."""
    return sorted((pytester.path / ".pytest_cache/d/kvledger").glob("*/*"))


def test_a_failing_test_keeps_its_journal_until_what_it_breaks_is_allowed(
    pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(pytester, TWICE, holds=True)
    (journal,) = kept(pytester)
    command = f"kvledger audit .pytest_cache/d/kvledger/{journal.parent.name}"

    result.stdout.fnmatch_lines(["*- kvledger: its journal is kept, next -*", command])
    result.stdout.fnmatch_lines(["The journals of failing tests are kept: 1. Next:", f"    {command}"])
    capsys.readouterr()
    assert 1 == exit_code("audit", journal.parent, "--format", "json")
    audited = json.loads(capsys.readouterr().out)
    assert "blocks/double-free" in {each["id"] for each in audited["violations"]}

    ids = ("blocks/double-free", "blocks/free-iff-unreferenced", "blocks/references", "tokens/balance")
    allowed = [f"--kvledger-allow={each}" for each in ids]
    run(pytester, TWICE, *allowed, holds=True).assert_outcomes(passed=1)
    assert [] == kept(pytester)


@pytest.mark.parametrize(("holds", "journals"), [("1 == 2", 1), ("pytest.xfail()", 0), ("pytest.skip()", 0)])
def test_a_test_that_fails_by_itself_keeps_its_journal_too(
    holds: str, journals: int, pytester: pytest.Pytester
) -> None:
    result = run(pytester, f"    import pytest\n{CLEAN}        assert {holds}\n")

    assert journals == len(kept(pytester)) == str(result.stdout).count("    kvledger audit .pytest_cache")


def test_the_next_command_rebuilds_a_finding_that_a_figure_of_the_scheduler_shows(
    pytester: pytest.Pytester,
) -> None:
    counted = """
    from tests.scenarios.driving import start

    def test_a_count():
        driver = start()
        driver.add("a", 40, 4)
        driver.step()
        driver.scheduler.requests["a"].num_computed_tokens -= 3
        driver.run()
    """
    result = run(pytester, counted)

    result.stdout.fnmatch_lines(
        "    kvledger repro .pytest_cache/d/kvledger/*-test_a_count-* --finding tokens/*"
    )


def test_without_pytests_cache_no_journal_is_kept(pytester: pytest.Pytester) -> None:
    result = run(pytester, TWICE, "-p", "no:cacheprovider", holds=True)

    result.assert_outcomes(failed=1)
    assert [] == kept(pytester)
    result.stdout.no_fnmatch_line("*Next:*")


def test_allowing_one_invariant_does_not_allow_another(pytester: pytest.Pytester) -> None:
    result = run(pytester, TWICE, "--kvledger-allow=tokens/balance", holds=True)

    result.assert_outcomes(failed=1)


def test_level_tokens_observes_no_blocks(pytester: pytest.Pytester) -> None:
    result = run(pytester, TWICE, "--kvledger=tokens", holds=True)

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines("kvledger: 1 engines observed at level tokens, *")


def test_with_stacks_each_operation_has_the_line_that_led_to_it(pytester: pytest.Pytester) -> None:
    result = run(pytester, TWICE, "--kvledger-stacks", holds=True)

    result.stdout.fnmatch_lines(
        [
            "    step 1: freed, request a, life 1, group 0, by free",
            "      *test_with_stacks*.py:* test_a_table_freed_twice",
        ]
    )


def test_a_manager_without_a_scheduler_is_observed(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        from tests.scenarios.driving import start
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        def test_a_manager():
            made = start().scheduler.kv_cache_manager
            manager = KVCacheManager(
                made.kv_cache_config, 1024, 16, 16, enable_caching=True, log_stats=False
            )
            manager.block_pool.get_new_blocks(2)[0].ref_cnt = 0
        """,
    )

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines("blocks/references: Block 1 has 0 references, but 1 known holders*")


def test_a_connector_replaced_before_the_first_step_is_observed(pytester: pytest.Pytester) -> None:
    """Also after requests were added; and the mock still counts its calls."""
    result = run(
        pytester,
        """
        from unittest.mock import Mock
        from tests.scenarios.driving import start

        def test_a_scenario():
            driver = start(connector="scripted")
            connector = driver.scheduler.connector
            driver.add("a", 100, 4)
            driver.scheduler.connector = Mock(wraps=connector)
            driver.scheduler.connector.held = set()
            connector.answer_lookups("a", 64)
            scheduled = driver.schedule()
            assert scheduled.num_scheduled_tokens == {"a": 36}
            assert driver.scheduler.connector.get_num_new_matched_tokens.call_count == 1
            driver.output()
        """,
    )

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines("kvledger: 1 engines observed *, 0 left alone, 0 violations")


def test_the_output_of_the_first_step_is_observed_if_its_method_was_bound_before(
    pytester: pytest.Pytester,
) -> None:
    """As in ``scheduler.update_from_output(scheduler.schedule(), output)``, which upstream tests write."""
    result = run(
        pytester,
        """
        from tests.scenarios.driving import start

        def test_a_scenario():
            driver = start(asynchronous=True)
            driver.add("a", 40, 4)
            update = driver.scheduler.update_from_output
            scheduled = driver.schedule()
            step = driver.in_flight.popleft()
            update(scheduled, driver.runner.answer(step, driver.scheduler.requests, None))
            driver.schedule()
            driver.preempt("a")
            driver.run()
        """,
    )

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines("kvledger: 1 engines observed *, 0 left alone, 0 violations")


SHAPES = {
    "calls super": """
        def update_from_output(self, scheduler_output, model_runner_output):
            self.calls.append("update")
            return super().update_from_output(scheduler_output, model_runner_output)
    """,
    "forwards": """
        def schedule(self, *args, **kwargs):
            self.calls.append("schedule")
            return super().schedule(*args, **kwargs)

        def update_from_output(self, *args, **kwargs):
            self.calls.append("update")
            return super().update_from_output(*args, **kwargs)

        def add_request(self, *args, **kwargs):
            return super().add_request(*args, **kwargs)

        def _free_request(self, *args, **kwargs):
            return super()._free_request(*args, **kwargs)
    """,
    "names the base": """
        def schedule(self, *args, **kwargs):
            self.calls.append("schedule")
            return Scheduler.schedule(self, *args, **kwargs)
    """,
    "returns what it made": """
        def schedule(self, *args, **kwargs):
            self.calls.append("schedule")
            made = super().schedule(*args, **kwargs)
            return made

        def _preempt_request(self, request, *rest, **named):
            return super()._preempt_request(request, *rest, **named)
    """,
    "takes more": """
        def update_from_output(self, scheduler_output, model_runner_output, trace=None):
            self.calls.append("update")
            return super().update_from_output(scheduler_output, model_runner_output)
    """,
    "sets attributes": """
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            below = self.schedule
            self.schedule = lambda *args, **kwargs: below(*args, **kwargs)
            update = self.update_from_output
            self.update_from_output = lambda *args, **kwargs: update(*args, **kwargs)
    """,
}
SUBCLASS = """
    import pytest
    from tests.scenarios.driving import start
    from vllm.v1.core.sched.scheduler import Scheduler
    from kvledger.audit.traffic import engine_setup

    class Mine(Scheduler):
        calls = []
{methods}

    @pytest.mark.parametrize("broken", [False, True])
    def test_a_subclass(monkeypatch, broken):
        Mine.calls.clear()
        monkeypatch.setattr(engine_setup, "_scheduler_class", lambda setup: Mine)
        driver = start()
        driver.add("a", 40, 4)
        driver.add("b", 60, 3)
        driver.step()
        driver.preempt("b")
        steps = 1
        while driver.scheduler.has_unfinished_requests():
            driver.step()
            steps += 1
        assert set(Mine.calls) <= {{"schedule", "update"}}
        assert all(Mine.calls.count(name) == steps for name in set(Mine.calls)), (Mine.calls, steps)
        if broken:
            driver.add("c", 40, 4)
            driver.step()
            driver.scheduler.requests["c"].num_computed_tokens += 1
            driver.run()
"""


@pytest.mark.parametrize("level", ["tokens", "blocks"])
def test_a_subclass_is_observed_and_what_it_breaks_is_found(level: str, pytester: pytest.Pytester) -> None:
    """Schedulers of all shapes, each once sound and once with a figure changed, in one run."""
    sources = {f"test_{n}": SUBCLASS.format(methods=methods) for n, methods in enumerate(SHAPES.values())}
    pytester.makepyfile(**sources)
    options = ("-p", pytest_plugin.__name__, f"--kvledger={level}", "--tb=no")
    result = pytester.runpytest_inprocess(*options, "--junit-xml=junit.xml", "-o", "junit_family=xunit1")

    result.assert_outcomes(passed=len(SHAPES), failed=len(SHAPES))
    result.stdout.fnmatch_lines(f"kvledger: {2 * len(SHAPES)} engines observed *, 0 left alone, *")
    for test, properties in properties_of_tests(pytester).items():
        assert ("kvledger.engines", f"{level} 1") in properties
        found = {text.partition(":")[0] for name, text in properties if name == "kvledger.violation"}
        assert ("tokens/balance" in found) == bool(found) == test.endswith("[True]"), test


def properties_of_tests(pytester: pytest.Pytester) -> dict[str, list[tuple[str, str]]]:
    """The properties of each test in the junit file, by its module and name."""
    return {
        f"{case.get('classname')}.{case.get('name')}": [
            (str(each.get("name")), str(each.get("value"))) for each in case.iter("property")
        ]
        for case in ElementTree.parse(pytester.path / "junit.xml").iter("testcase")
    }


@pytest.fixture
def no_adapter_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_fits(*_: Any) -> Any:
        raise RuntimeError("no adapter for this")

    monkeypatch.setattr("kvledger.audit.entry.pytest_observer.choose", none_fits)


def test_a_test_whose_engine_cannot_be_observed_fails(
    no_adapter_fits: None, pytester: pytest.Pytester
) -> None:
    result = run(pytester, CLEAN)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        "kvledger: a scheduler was not observed: RuntimeError: no adapter for this. Mark*"
    )
    result.stdout.fnmatch_lines("kvledger: 1 left alone: RuntimeError: no adapter for this")


def test_a_test_may_allow_that_its_engine_is_not_observed(
    no_adapter_fits: None, pytester: pytest.Pytester
) -> None:
    result = run(pytester, CLEAN, "--kvledger-allow=unobserved")

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines("kvledger: 1 left alone: RuntimeError: no adapter for this")


def test_the_classes_are_restored_when_the_run_ends(pytester: pytest.Pytester) -> None:
    before = Scheduler.__init__, Scheduler.schedule
    run(pytester, CLEAN)

    assert before == (Scheduler.__init__, Scheduler.schedule)


# --- one test: its marker and its fixture -----------------------------------------------------------

MARKED = f"""
    import pytest
{FREE_TWICE}
    {{marker}}
    def test_marked():
        free_twice()

    def test_not_marked():
        free_twice()
"""
OF_A_DOUBLE_FREE = [
    "blocks/double-free", "blocks/free-iff-unreferenced", "blocks/references", "tokens/balance"
]  # fmt: skip


def run_marked(pytester: pytest.Pytester, marker: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(MARKED.format(marker=f"@pytest.mark.kvledger{marker}"))
    return pytester.runpytest_inprocess("-p", pytest_plugin.__name__, *options)


def test_a_marked_test_is_observed_in_a_run_that_observes_no_other(pytester: pytest.Pytester) -> None:
    result = run_marked(pytester, "")

    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        ["*= kvledger =*", "kvledger: 1 engines observed at level blocks, 0 left alone, * violations"]
    )
    result.stdout.fnmatch_lines("violation  blocks/double-free  1")


@pytest.mark.parametrize(
    ("marker", "options", "failed"),
    [
        ("(level='tokens')", (), 0),
        ("(level='tokens')", ("--kvledger=blocks",), 1),  # the test that has no marker
        ("(level='off')", ("--kvledger=blocks",), 1),
        (f"(allow={OF_A_DOUBLE_FREE})", (), 0),
        ("(allow='tokens/balance')", (), 1),
        (f"(allow={OF_A_DOUBLE_FREE})", ("--kvledger",), 1),
    ],
)
def test_a_marker_sets_the_level_and_what_is_allowed(
    marker: str, options: tuple[str, ...], failed: int, pytester: pytest.Pytester
) -> None:
    run_marked(pytester, marker, *options).assert_outcomes(failed=failed, passed=2 - failed)


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("(level='all')", "*test_marked: marker kvledger: 'all' is not a level*"),
        ("('tokens')", "*the marker kvledger takes level=... and allow=* only*"),
    ],
)
def test_a_marker_that_is_not_understood_is_a_usage_error(
    marker: str, message: str, pytester: pytest.Pytester
) -> None:
    result = run_marked(pytester, marker)

    assert pytest.ExitCode.USAGE_ERROR == result.ret
    result.stderr.fnmatch_lines(message)


def test_the_ini_file_may_allow_invariants(pytester: pytest.Pytester) -> None:
    lines = "\n    ".join(OF_A_DOUBLE_FREE)
    pytester.makeini(f"[pytest]\nkvledger = blocks\nkvledger_allow =\n    {lines}\n")

    run_marked(pytester, "").assert_outcomes(passed=2)


def test_the_fixture_has_the_figures_of_the_running_test(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        from tests.scenarios.driving import start

        def test_figures(kvledger_audit):
            assert ("unknown", 0) == (kvledger_audit.verdict, kvledger_audit.engines)
            for name in ("a", "b"):
                driver = start()
                driver.add(name, 40, 4)
                driver.run()
            assert ("clean", 2) == (kvledger_audit.verdict, kvledger_audit.engines)
            assert (2, 80) == (kvledger_audit.totals.requests, kvledger_audit.totals.computed)
            assert 40 == kvledger_audit.account("b").settlements[0].computed
            assert [] == kvledger_audit.violations
        """,
        "--kvledger=tokens",
    )

    result.assert_outcomes(passed=1)


def test_the_fixture_observes_in_a_run_that_observes_no_other_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(MARKED.format(marker="").replace("def test_marked()", "def test(kvledger_audit)"))
    result = pytester.runpytest_inprocess("-p", pytest_plugin.__name__)

    result.assert_outcomes(failed=1, passed=1)


def test_findings_are_properties_in_the_junit_file(pytester: pytest.Pytester) -> None:
    run_marked(pytester, "(allow='tokens/balance')", "--junit-xml=junit.xml", "-o", "junit_family=xunit1")
    (properties, not_marked) = properties_of_tests(pytester).values()

    assert ("kvledger.engines", "blocks 1") in properties
    assert any(
        name == "kvledger.violation" and value.startswith("blocks/double-free: ")
        for name, value in properties
    )
    assert [] == not_marked


def test_with_workers_the_summary_counts_the_engines_of_all(pytester: pytest.Pytester) -> None:
    """The summary is that of a process that runs no test: it reads the properties of the reports."""
    summary = pytest_plugin.Summary("blocks")
    report = pytest.TestReport(
        "t", ("t", 0, "t"), {}, "passed", None, "call",
        user_properties=[("kvledger.engines", "blocks 2"), ("kvledger.drift", "tokens/x: text")],
    )  # fmt: skip
    lines: list[str] = []
    summary.pytest_runtest_logreport(report)
    summary.pytest_runtest_logreport(report)
    summary.pytest_terminal_summary(SimpleNamespace(section=lines.append, write_line=lines.append))

    assert "kvledger: 4 engines observed at level blocks, 0 left alone, 0 violations" in lines
    assert "drift  tokens/x  2" in lines


# --- in an environment that has kvledger ------------------------------------------------------------


PRINTS_ITS_MODULES = """
import sys

def test_modules(pytestconfig):
    print("vllm" in sys.modules, "msgspec" in sys.modules)
    print("observer", pytestconfig.pluginmanager.has_plugin("kvledger-observer"))
"""
RUN_EACH = """
import os, sys
import pytest

for number, options in enumerate(eval(sys.argv[1])):
    if not os.fork():
        os.dup2(os.open(f"out{number}", os.O_CREAT | os.O_WRONLY), 1)
        os.dup2(1, 2)
        code = pytest.main(["-s", "-p", "no:cacheprovider", *options])
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
print(sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(number + 1)))
"""
"""A process for each run, which has imported nothing but pytest."""

NOT_ASKED_FOR = ()
SWITCHED_OFF = ("-p", "no:kvledger")
ACTIVE = (
    ("--kvledger",),
    ("--kvledger", "test_modules.py"),
    ("--kvledger=blocks",),
    ("-o", "kvledger=blocks"),
    ("-p", "kvledger", "--kvledger"),
    ("-p", pytest_plugin.__name__, "--kvledger"),  # registered by its path and by its entry point
)
OVERRIDDEN = ("-o", "kvledger=blocks", "--kvledger=tokens")
REFUSED = (("--kvledger=all",), ("-o", "kvledger=all"))
RUNS = (NOT_ASKED_FOR, SWITCHED_OFF, *ACTIVE, OVERRIDDEN, *REFUSED)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], str]:
    """What runs print whose only pytest plugin is the one that this tree's pyproject.toml registers."""
    (value,) = re.findall(r'^\[project.entry-points.pytest11\]\nkvledger = "(.*)"$', PYPROJECT, re.MULTILINE)
    folder = tmp_path_factory.mktemp("runs")
    metadata = folder / "installed" / "kvledger_entry-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvledger-entry\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[pytest11]\nkvledger = {value}\n")
    (folder / "test_modules.py").write_text(PRINTS_ITS_MODULES)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(metadata.parent), str(ROOT / "src")])}
    run = [sys.executable, "-c", RUN_EACH, repr(RUNS)]
    codes = subprocess.run(run, cwd=folder, env=environ, capture_output=True, text=True, check=True).stdout
    refused = int(pytest.ExitCode.USAGE_ERROR)
    assert str([0] * 9 + [refused] * 2) == codes.strip()
    return {options: (folder / f"out{number}").read_text() for number, options in enumerate(RUNS)}


def test_a_run_that_does_not_ask_for_it_imports_nothing_of_it(printed: dict[tuple[str, ...], str]) -> None:
    output = printed[NOT_ASKED_FOR]

    assert "False False\nobserver False" in output and "1 passed" in output
    assert "kvledger: " not in output


def test_an_option_or_the_ini_file_activates_it(printed: dict[tuple[str, ...], str]) -> None:
    for options in ACTIVE:
        assert "observer True" in printed[options]
        assert "kvledger: 0 engines observed at level blocks, " in printed[options]
        assert "1 passed" in printed[options]


def test_the_option_overrides_the_ini_file(printed: dict[tuple[str, ...], str]) -> None:
    assert "kvledger: 0 engines observed at level tokens, " in printed[OVERRIDDEN]


def test_an_unknown_level_is_a_usage_error(printed: dict[tuple[str, ...], str]) -> None:
    for options in REFUSED:
        assert "'all' is not a level; the levels are tokens, blocks" in printed[options]


def test_it_can_be_switched_off(printed: dict[tuple[str, ...], str]) -> None:
    assert "1 passed" in printed[SWITCHED_OFF] and "observer False" in printed[SWITCHED_OFF]


def test_its_levels_are_those_of_the_observers() -> None:
    assert LEVELS == pytest_plugin.LEVELS
