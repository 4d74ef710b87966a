"""``%load_ext kvledger`` and ``%%audit``, with a stand-in for IPython's shell and a real scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.scenarios.driving import start

import kvledger
from kvledger.exporters.magic import CellFailed


class Shell:
    """What the extension uses of IPython's InteractiveShell."""

    def __init__(self, **variables: Any) -> None:
        self.user_ns: dict[str, Any] = variables
        self.magics: dict[str, Any] = {}

    def register_magic_function(self, function: Any, magic_kind: str, magic_name: str) -> None:
        assert "cell" == magic_kind
        self.magics[magic_name] = function

    def ev(self, expression: str) -> Any:
        return eval(expression, self.user_ns)

    def run_cell(self, cell: str) -> Any:
        raised = None
        try:
            exec(cell, self.user_ns)
        except Exception as error:
            raised = error
        return SimpleNamespace(error_before_exec=None, error_in_exec=raised)


@pytest.fixture
def shell() -> Shell:
    """A notebook with a scheduler and a driver, in which the extension is loaded."""
    driver = start()
    made = Shell(driver=driver, scheduler=driver.scheduler)
    kvledger.load_ipython_extension(made)
    return made


CELL = "driver.add('a', 40, 4)\ndriver.run()"


def test_the_result_of_the_cell_is_its_audit(shell: Shell) -> None:
    audit = shell.magics["audit"]("scheduler", CELL)

    assert isinstance(audit, kvledger.AttachedAudit)
    assert ("clean", 40) == (audit.verdict, audit.totals.computed)
    assert audit is shell.user_ns["audit"]


def test_after_the_cell_the_engine_is_not_observed(shell: Shell) -> None:
    audit = shell.magics["audit"]("scheduler --level blocks -o mine", CELL)
    shell.run_cell("driver.add('b', 40, 4)\ndriver.run()")

    assert audit is shell.user_ns["mine"]
    assert 1 == audit.totals.requests


def test_a_cell_that_raises_ends_its_audit_too(shell: Shell) -> None:
    before = shell.user_ns["scheduler"].schedule
    with pytest.raises(CellFailed, match=r"The cell raised ZeroDivisionError\. audit has what .* clean"):
        shell.magics["audit"]("scheduler", "1 / 0")

    audit = shell.user_ns["audit"]
    assert before == shell.user_ns["scheduler"].schedule
    assert 0 == audit.totals.requests


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", "%%audit: the following arguments are required: ENGINE. usage: %%audit"),
        ("nothing", "%%audit: name 'nothing' is not defined."),
        ("driver.add", "No scheduler is reachable from this method"),
        ("scheduler --level all", "There is no level 'all'"),
    ],
)
def test_a_wrong_line_prints_one_sentence_and_runs_no_cell(
    line: str, sentence: str, shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell.magics["audit"](line, "ran = True") is None
    assert capsys.readouterr().err.startswith(sentence)
    assert "ran" not in shell.user_ns


def test_help_is_printed(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.magics["audit"]("--help", "ran = True") is None
    assert "usage: %%audit" in capsys.readouterr().out
    assert "ran" not in shell.user_ns
