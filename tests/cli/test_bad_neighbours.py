"""A journal that can't be read is left out of what a folder's other journals say, and said."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import journals
from tests.command_line import runner

from kvledger.audit.journal.format import frame, header, segment_name
from kvledger.audit.journal.reader import Reader

BAD = "engine-1-1-0"


def _newer(number: int) -> Callable[[Path], object]:
    return lambda journal: (journal / segment_name(number)).write_bytes(
        header(99) + frame(b"\x93\x00\x00\x90")
    )


def _no_journal(journal: Path) -> None:
    (journal / segment_name(1)).write_bytes(b"something else")


def _is_a_loop(journal: Path) -> None:
    shutil.rmtree(journal)
    journal.symlink_to(journal)


BADS: dict[str, Callable[[Path], object]] = {
    "newer schema": _newer(1),
    "newer schema in a later segment": _newer(2),
    "no journal": _no_journal,
}

COMMANDS = ("audit", "summary", "why", "journals", "journals compact")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("spoil", BADS.values(), ids=BADS)
def test_the_others_are_read(
    spoil: Callable[[Path], object], command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    for folder in (alone, beside):
        journals.clean(folder / "engine-0-1-0")
    spoil(journals.clean(beside / BAD))
    run = runner(capsys, *command.split())
    expected, found = (run(folder, "--format", "json") for folder in (alone, beside))

    assert (0, "") == (expected.code, expected.err)
    assert 3 == found.code
    (said,) = found.err.splitlines()
    assert said.startswith("Left out: ") and (BAD in said or "schema 99" in said)
    assert _places(json.loads(expected.out), alone) == _places(json.loads(found.out), beside)


def _places(data: Any, folder: Path) -> str:
    return json.dumps(data).replace(str(folder), "")


@pytest.mark.parametrize("command", ["audit", "summary", "why"])
def test_one_that_is_removed_while_it_is_read(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    journals.clean(tmp_path / "engine-0-1-0")
    journals.clean(tmp_path / BAD)
    original = Reader.__init__

    def removing(self: Reader, path: str | Path, *args: Any, **given: Any) -> None:
        if Path(path).name == BAD:
            shutil.rmtree(path, ignore_errors=True)
        original(self, path, *args, **given)

    monkeypatch.setattr(Reader, "__init__", removing)
    found = runner(capsys, command)(tmp_path, "--format", "json")

    assert 3 == found.code
    assert f"Left out: There is no {tmp_path / BAD}." == found.err.strip()


def test_what_is_no_folder_and_what_is_hidden_is_nobody_s_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journals.clean(tmp_path / "engine-0-1-0")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / ".hidden").mkdir(mode=0)
    found = runner(capsys, "audit")(tmp_path, "--format", "json")

    assert (0, "") == (found.code, found.err)


def test_if_none_can_be_read_it_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        _newer(1)(journals.clean(tmp_path / f"engine-{number}-1-0"))

    outcome = runner(capsys, "summary")(tmp_path)

    assert 2 == outcome.code and "schema 99" in outcome.sentence
