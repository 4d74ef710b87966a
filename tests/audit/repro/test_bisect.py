"""`kvledger repro bisect`: which release is the first and last bad and the first good, and what can't run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvledger.audit.errors import LedgerError
from kvledger.audit.repro import bisect as bisection
from kvledger.audit.repro.bisect import Bisection, Environment, bisect, chosen, given, run_file
from kvledger.exporters.reports.repro import bounds

FILE = """
import sys
word = sys.argv[1]
if word == "old":
    raise TypeError("no such argument")
if word == "other":
    raise SystemExit(1)
print(f"a figure\\n  engine: {[1, 2] if word == 'bad' else 0}\\n  right:  0")
raise SystemExit(1 if word == "bad" else 0)
"""


def over(folder: Path, **words: str) -> Bisection:
    """The file over releases, given as v1_2="bad", newest first; it reads its word from the arguments."""
    file = folder / "test_repro.py"
    file.write_text(FILE)
    run = "import runpy, sys; sys.argv = sys.argv[2:0:-1]; runpy.run_path(sys.argv[0])"
    environments = [
        Environment(name[1:].replace("_", "."), (sys.executable, "-c", run, word))
        for name, word in reversed(words.items())
    ]
    return bisect(file, environments, jobs=2)


def test_first_bad_last_bad_and_first_good_release(tmp_path: Path) -> None:
    found = over(tmp_path, v0_9_1="old", v0_10_2="good", v0_12_0="bad", v0_23_0="bad", v0_24_0="good")
    assert ("0.12.0", "0.23.0", "0.24.0") == (found.first_bad, found.last_bad, found.first_good)
    assert ["error", "passes", "fails", "fails", "passes"] == [run.result for run in found.runs]
    assert "TypeError: no such argument" == found.runs[0].figure
    assert "[1, 2]" == found.runs[2].figure
    assert bounds(found) == "First bad 0.12.0, last bad 0.23.0, first good 0.24.0."


def test_a_release_before_the_fault_is_not_the_first_good_one(tmp_path: Path) -> None:
    found = over(tmp_path, v0_10_2="good", v0_12_0="bad")
    assert "" == found.first_good
    assert bounds(found) == "Bad in 0.12.0 only, which is the newest release tried."


def test_releases_after_the_fault_that_cannot_run_the_file_are_not_good(tmp_path: Path) -> None:
    found = over(tmp_path, v0_12_0="bad", v0_13_0="bad", v0_24_0="other")
    assert ("error", "it printed nothing") == (found.runs[2].result, found.runs[2].figure)
    assert bounds(found) == "First bad 0.12.0, last bad 0.13.0, no later release passes."


def test_a_file_that_fails_nowhere(tmp_path: Path) -> None:
    found = over(tmp_path, v0_12_0="good", v0_13_0="old")
    assert bounds(found).endswith("fails in none of 2 releases and passes in 1.")


def test_a_file_that_does_not_end_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "test_repro.py"
    file.write_text("import time; time.sleep(60)")
    run = run_file(file, Environment("0.12.0", (sys.executable,)), limit=0.3)
    assert ("error", "it did not end within 0 s") == (run.result, run.figure)


def test_bad_input_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="is no file"):
        bisect(tmp_path / "none.py", [])
    with pytest.raises(LedgerError, match="can't be run: No such file"):
        given([str(tmp_path / "python")])


def test_a_release_may_be_given_with_its_interpreter() -> None:
    assert given(["0.23.0=/old/bin/python"]) == [Environment("0.23.0", ("/old/bin/python",))]


def test_an_interpreter_may_be_given_with_any_name(tmp_path: Path) -> None:
    """The names stand beside the releases, by which the runs are ordered; equal releases stay in order."""
    for name, release in ("old", "0.23.0"), ("new", "0.24.0"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {release}\n")
        (tmp_path / name).chmod(0o755)
    old, new = tmp_path / "old", tmp_path / "new"

    found = given([f"bad={new}", f"good={old}", f"patched={old}"])

    releases = ["0.24.0 (bad)", "0.23.0 (good)", "0.23.0 (patched)"]
    assert releases == [each.release for each in found]
    assert [(str(new),), (str(old),), (str(old),)] == [each.command for each in found]
    file = tmp_path / "test_repro.py"
    file.touch()
    assert [*releases[1:], releases[0]] == [run.release for run in bisect(file, found).runs]


def test_a_path_with_an_equals_sign_is_no_name(tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()
    (folder / "python").write_text("#!/bin/sh\necho 0.23.0\n")
    (folder / "python").chmod(0o755)
    assert [Environment("0.23.0", (f"{folder}/python",))] == given([f"{folder}/python"])


@pytest.mark.parametrize(
    ("releases", "own", "names"),
    [
        ("", [], ["0.23.0", "0.24.0"]),
        ("0.24.0..0.33.0", [], ["0.24.0"]),
        ("", ["0.9.9=/mine"], ["0.9.9"]),
        ("0.23.0", ["0.9.9=/mine"], ["0.9.9", "0.23.0"]),
    ],
)
def test_releases_and_interpreters_are_all_run_that_are_named(
    monkeypatch: pytest.MonkeyPatch, releases: str, own: list[str], names: list[str]
) -> None:
    """The releases were passed over once if an interpreter was named."""
    listed = "0.23.0 built here\n0.24.0 built here\n"
    monkeypatch.setattr(bisection.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=listed))
    assert names == [one.release for one in chosen(Path("nowhere"), releases, own)]
