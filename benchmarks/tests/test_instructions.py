"""How callgrind's counts are evaluated. The counting itself takes minutes: `make instructions`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")  # benchmarks.page prints its version

from benchmarks import page
from benchmarks.instructions import Instructions, read_dump, scheduler_share, section
from benchmarks.scheduler import BY_KEY

ROOT = Path(__file__).parents[2]
DUMP = """# callgrind format
version: 1
desc: Timerange: Basic block 0 - 131156517
desc: Trigger: {trigger}

summary: 670212293

totals: 670212293
"""
ROWS = [(BY_KEY["churn"], Instructions(1_000.0, 1_010.0))]


def test_a_dump_names_its_workload_its_pass_and_its_total() -> None:
    assert ("blocks-256", "bare", 670212293) == read_dump(DUMP.format(trigger="dump blocks-256:bare"))


def test_the_file_that_callgrind_writes_at_the_end_is_ignored() -> None:
    assert read_dump(DUMP.format(trigger="Program termination")) is None


def test_work_outside_the_scheduler_is_subtracted() -> None:
    """Of 700 instructions a step, 200 belong to the scripted model; switching the counter costs 80."""
    share = scheduler_share({"nothing": 80, "bare": 7_080, "doubled": 9_080, "observed": 7_580}, steps=10)

    assert Instructions(bare=500.0, observed=550.0) == share
    assert 1.1 == share.ratio


def test_without_valgrind_the_exit_code_is_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/instructions.py"],
        cwd=ROOT,
        env=os.environ | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert 2 == done.returncode
    assert "Instructions are counted by valgrind, which is not installed.\n" == done.stderr


def test_each_half_of_the_page_is_written_without_the_other(tmp_path: Path) -> None:
    written = tmp_path / "performance.md"
    written.write_text("# What it costs\n\nold\n")

    page.put(section(ROWS), written)
    page.put_first("# What it costs\n\nnew\n", written)

    assert f"# What it costs\n\nnew\n\n{section(ROWS)}" == written.read_text()


def test_the_long_run_stands_last_and_is_replaced_alone(tmp_path: Path) -> None:
    written = tmp_path / "performance.md"
    written.write_text(f"# What it costs\n\nfirst\n\n{page.INSTRUCTIONS}\nold\n")

    page.put(f"{page.LONG_RUN}\na day\n", written)
    page.put(section(ROWS), written)
    page.put(f"{page.LONG_RUN}\nanother day\n", written)

    expected = f"# What it costs\n\nfirst\n\n{section(ROWS)}\n{page.LONG_RUN}\nanother day\n"
    assert expected == written.read_text()


def test_a_new_second_half_replaces_the_old_one(tmp_path: Path) -> None:
    written = tmp_path / "performance.md"
    written.write_text(f"# What it costs\n\nfirst\n\n{page.INSTRUCTIONS}\nold\n")

    page.put(section(ROWS), written)

    assert f"# What it costs\n\nfirst\n\n{section(ROWS)}" == written.read_text()


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
