"""Runs the command line in this process, for tests of what it prints and returns."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvledger import cli


def exit_code(*words: str | Path) -> object:
    """The exit code of ``kvledger`` with these arguments."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exited:
        patch.setattr(sys, "argv", ["kvledger", *map(str, words)])
        cli.main()
    return exited.value.code
