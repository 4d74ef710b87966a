"""The documentation as a site: every page has a place in it, and mkdocs builds it without a warning."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests import tools

ROOT = Path(__file__).parents[2]
ADDED = {"index.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}
"""Pages that scripts/site_hooks.py adds."""

MKDOCS = "mkdocs-material>=9.5"
"""As in the extra ``docs`` and in `make site`."""


def pages(nav: list[dict[str, Any]]) -> list[str]:
    values = [value for entry in nav for value in entry.values()]
    return [page for value in values for page in (pages(value) if isinstance(value, list) else [value])]


def test_every_page_is_in_the_navigation_once() -> None:
    named = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])

    docs = ROOT / "docs"
    written = {*docs.glob("*.md"), *docs.glob("reference/*.md")}
    assert sorted(named) == sorted(ADDED | {str(path.relative_to(docs)) for path in written})


@pytest.mark.programs
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    mkdocs = tools.environment("mkdocs", MKDOCS) / "mkdocs"
    command = [mkdocs, "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ["NO_MKDOCS_2_WARNING"] = "1"
    subprocess.run(command, cwd=ROOT, env=environ, check=True, timeout=120)

    assert "kvledger" in (tmp_path / "index.html").read_text()
