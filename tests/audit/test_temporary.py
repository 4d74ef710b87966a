"""Temporary folders: made in one place, for this user alone, and gone afterwards."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvledger.audit import temporary

ROOT = Path(temporary.__file__).parents[1]


def test_a_folder_is_for_this_user_alone_and_has_a_name_that_nobody_can_guess(tmp_path: Path) -> None:
    with temporary.folder(within=tmp_path) as one, temporary.folder(within=tmp_path) as other:
        assert one != other
        for made in (one, temporary.of_process("model")):
            assert (0o700, os.geteuid()) == (os.stat(made).st_mode & 0o777, os.stat(made).st_uid)
    assert [] == list(tmp_path.iterdir())
    assert temporary.of_process("model") == temporary.of_process("model")


@pytest.mark.parametrize("ends", ["by itself", "by SIGTERM"])
def test_it_goes_with_the_command(ends: str, tmp_path: Path) -> None:
    text = """
import sys, time
from kvledger import cli, cli_run
from kvledger.audit import temporary
def app(*_, **__):
    with temporary.folder():
        temporary.of_process("model").joinpath("config.json").write_text("{}")
        print("begun", flush=True)
        time.sleep(60 if sys.argv[1] == "by SIGTERM" else 0)
cli_run.app = app
cli.main()
"""
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", text, ends], env=environ, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert b"begun\n" == process.stdout.readline()
        if ends == "by SIGTERM":
            assert 2 == len(list(tmp_path.iterdir()))
            process.send_signal(signal.SIGTERM)
        process.wait(20)

    assert (143 if ends == "by SIGTERM" else 0) == process.returncode
    assert [] == list(tmp_path.iterdir())


def test_no_other_module_makes_one() -> None:
    found = set()
    for folder in ("audit", "exporters", "dashboards"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_bytes())):
                names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
                names += [str(node.module)] if isinstance(node, ast.ImportFrom) and not node.level else []
                if "tempfile" in names:
                    found.add(path.name)
    assert {"temporary.py"} == found
