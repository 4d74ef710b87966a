"""Every command takes the short names that `kvledger journals` prints."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from tests import journals
from tests.command_line import runner
from typer.models import ArgumentInfo

from kvledger.audit.errors import LedgerError
from kvledger.audit.replay.find import journals_at, named, short_names
from kvledger.cli import app


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """KVLEDGER_DIR with two clean journals of one process id, a violated one in a host's folder, a worker."""
    root = tmp_path / "journals"
    for name in ("engine-1764000000123-85-0", "engine-1764000000124-85-0", "worker-1764000000125-85-0"):
        journals.clean(root / name)
    journals.violated(root / "node-7" / "engine-1764000000123-85-0")
    monkeypatch.setenv("KVLEDGER_DIR", str(root))
    monkeypatch.chdir(tmp_path)
    return root


def test_a_short_name_is_the_shortest_end_that_no_other_journal_has(folder: Path) -> None:
    names = short_names(journals_at([folder]))
    assert ["engine-1764000000123-85-0", "4-85-0", "7/engine-1764000000123-85-0"] == list(names.values())
    for journal, name in names.items():
        assert journal == named(Path(name)) == named(folder / name)


def test_commands_take_short_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runner(capsys)
    assert 1 == run("audit", "7/engine-1764000000123-85-0").code
    assert 0 == run("audit", "4-85-0").code
    assert 0 == run("show", "journals/4-85-0", "request-0").code
    assert 0 == run("diff", "4-85-0", "5-85-0").code
    listed = run("journals", "4-85-0", "--format", "json")
    assert ["4-85-0"] == [row["name"] for row in json.loads(listed.out)]
    assert 3 == len(json.loads(run("journals", "--format", "json").out))


def test_every_argument_for_journals_takes_short_names(folder: Path) -> None:
    """Each argument that is a path, but for these."""
    others = {(f"deploy {each}", "folder") for each in ("boards", "rules", "check")}
    others |= {("journals prune", "folder"), ("journals record-events", "folder"), ("repro bisect", "file")}
    for command in app.registered_commands:
        name = command.name or command.callback.__name__  # type: ignore[union-attr]
        for each in inspect.signature(command.callback).parameters.values():  # type: ignore[arg-type]
            if isinstance(each.default, ArgumentInfo) and "Path" in str(each.annotation):
                assert ((name, each.name) in others) == (each.default.callback is None), (name, each.name)


def test_a_name_of_several_journals_is_refused_with_their_paths(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = runner(capsys)("audit", "3-85-0")
    assert 2 == outcome.code
    both = [folder / name / "engine-1764000000123-85-0" for name in ("", "node-7")]
    assert f"3-85-0 names 2 journals: {both[0]}, {both[1]}. Write more of the name." == outcome.sentence


def test_a_whole_name_and_a_path_are_never_ambiguous(folder: Path) -> None:
    journals.clean(folder / "0-85-0")
    assert folder / "0-85-0" == named(Path("0-85-0"))
    assert folder / "0-85-0" == named(folder / "0-85-0")


def test_a_name_of_no_journal_is_taken_as_a_path(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Path("9-85-0") == named(Path("9-85-0"))
    assert "There is no 9-85-0." == runner(capsys)("audit", "9-85-0").sentence
    with pytest.raises(LedgerError, match="names 4 journals"):
        named(Path("85-0"))
