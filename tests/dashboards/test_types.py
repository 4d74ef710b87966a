"""The TypeScript compiler checks the board JSON against Grafana's own types."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests import tools

from kvledger.dashboards import boards

pytestmark = pytest.mark.programs

PINS = Path(__file__).parents[2] / "constraints" / "grafana-schema.json"

OPTIONS = ["--noEmit", "--strict", "--skipLibCheck", "--module", "node16", "--moduleResolution", "node16"]


@pytest.fixture(scope="module")
def modules() -> Path:
    return tools.npm(PINS)


def compiled(modules: Path, folder: Path, source: str) -> str:
    """The compiler's errors for one module; "" if there are none."""
    (folder / "node_modules").symlink_to(modules)
    (folder / "boards.mts").write_text(source)
    done = subprocess.run(
        ["node", modules / "typescript" / "bin" / "tsc", *OPTIONS, "boards.mts"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return done.stdout


# JSON has an enumeration's value where TypeScript wants its member: `${E}` is the type of its values.
PLAIN = """
import type { Dashboard } from '@grafana/schema';
type Plain<T> = T extends string ? (string extends T ? T : `${T}`)
  : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
"""


def module(literals: list[str]) -> str:
    stated = [f"export const board{place}: Plain<Dashboard> = {text};" for place, text in enumerate(literals)]
    return "\n".join([PLAIN, *stated])


def test_every_board_is_a_dashboard_literal(modules: Path, tmp_path: Path) -> None:
    """In a literal, the compiler also refuses fields that the type lacks."""
    literals = [json.dumps(boards.board(name), indent=1) for name in boards.NAMES]

    assert "" == compiled(modules, tmp_path, module(literals))


def test_a_wrong_board_is_refused(modules: Path, tmp_path: Path) -> None:
    board = boards.board("trust") | {"graphToolTip": 1}

    complaints = compiled(modules, tmp_path, module([json.dumps(board)]))

    assert "graphToolTip" in complaints
