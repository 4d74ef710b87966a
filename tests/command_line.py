"""Runs the command line in this process, for tests of what it prints and returns."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from kvledger import cli


def exit_code(*words: str | Path) -> object:
    """The exit code of ``kvledger`` with these arguments."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exited:
        patch.setattr(sys, "argv", ["kvledger", *map(str, words)])
        cli.main()
    return exited.value.code


class Outcome(NamedTuple):
    """What a command returned and printed."""

    code: object
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one line on standard error, and nothing else anywhere."""
        assert "" == self.out
        (line,) = self.err.splitlines()
        assert not line[0].islower()
        assert line.endswith((".", "?"))
        return line


def runner(capsys: pytest.CaptureFixture[str], *first: str) -> Callable[..., Outcome]:
    """Runs the command line with the words ``first`` and those that it is given."""

    def run(*words: str | Path) -> Outcome:
        code = exit_code(*first, *words)
        printed = capsys.readouterr()
        return Outcome(code, printed.out, printed.err)

    return run
