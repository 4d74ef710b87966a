"""Generated files say what the code says, and docs/testing.md has every target of make."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from scripts.pages import ROOT, generated

FILES = dict(generated())
TESTING = (ROOT / "docs/testing.md").read_text()
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)


@pytest.mark.parametrize("name", FILES)
def test_a_generated_file_is_up_to_date(name: str) -> None:
    assert FILES[name] == (ROOT / name).read_text(), "make docs"


def test_every_target_of_make_is_described() -> None:
    described = set(re.findall(r"`make ([a-z-]+)", TESTING)) | {"help", "demo", "lint", "clean"}

    assert set(TARGETS) == described
    assert 15 >= len(TARGETS)


def test_the_workflow_runs_the_commands_of_the_readme() -> None:
    start = README.partition("\n## ")[0]
    commands = re.findall(r"^    (make [a-z]+)", start, re.MULTILINE)
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["readme"]["steps"]

    assert ["make demo", "make test"] == commands == [step["run"] for step in steps if "run" in step]


def test_documents_name_no_target_that_make_lacks() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *Path(ROOT / "docs").rglob("*.md")]
    named = {word for page in pages for word in re.findall(r"`make ([a-z][a-z-]*)", page.read_text())}

    assert set() == named - set(TARGETS)
