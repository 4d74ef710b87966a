"""Sections of pages: a new one replaces the old one and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")  # benchmarks.page prints its version

from benchmarks import page

ROOT = Path(__file__).parents[2]
FIRST = "# What it costs\n\nfirst\n"


def test_the_first_part_is_replaced_alone(tmp_path: Path) -> None:
    written = tmp_path / "performance.md"
    written.write_text(f"# What it costs\n\nold\n\n{page.LONG_RUN}\na day\n")

    page.put_first(FIRST, written)

    assert f"{FIRST}\n{page.LONG_RUN}\na day\n" == written.read_text()


def test_a_new_section_stands_last_and_is_replaced_alone(tmp_path: Path) -> None:
    written = tmp_path / "performance.md"
    written.write_text(f"{FIRST}\n{page.LONG_RUN}\na day\n")

    page.put(f"{page.LONG_JOURNALS}\na week\n", written)
    page.put(f"{page.LONG_RUN}\nanother day\n", written)

    assert f"{FIRST}\n{page.LONG_RUN}\nanother day\n\n{page.LONG_JOURNALS}\na week\n" == written.read_text()


def test_a_section_ends_at_the_next_heading_of_its_level_or_above(tmp_path: Path) -> None:
    written = tmp_path / "page.md"
    written.write_text("# Page\n\n## One\n\n### Part\n\nold\n\n### Kept\n\nkept\n\n## Two\n\ntwo\n")

    page.put("### Part\n\nnew\n", written)
    assert "# Page\n\n## One\n\n### Part\n\nnew\n\n### Kept\n\nkept\n\n## Two\n\ntwo\n" == written.read_text()
    page.put("## One\n\nnew\n", written)
    assert "# Page\n\n## One\n\nnew\n\n## Two\n\ntwo\n" == written.read_text()
    page.put("## Between\n\nnew\n", written, before="## Two")
    assert "# Page\n\n## One\n\nnew\n\n## Between\n\nnew\n\n## Two\n\ntwo\n" == written.read_text()


@pytest.mark.parametrize("name", ["content", "connectors", "performance", "usage"])
def test_a_section_that_has_not_changed_leaves_the_page_as_it_is(name: str, tmp_path: Path) -> None:
    written = tmp_path / "page.md"
    text = (ROOT / "docs" / f"{name}.md").read_text()
    written.write_text(text)
    last = f"\n{text}".rpartition("\n## ")[2]
    page.put(f"## {last}", written)

    assert text == written.read_text()


def test_lines_between_two_marks_are_replaced(tmp_path: Path) -> None:
    written = tmp_path / "page.md"
    written.write_text("above\n<!-- a -->\nold\n<!-- end -->\nbelow\n")

    page.put_between("<!-- a -->", "<!-- end -->", ["one", "two"], written)
    assert "above\n<!-- a -->\none\ntwo\n<!-- end -->\nbelow\n" == written.read_text()
