"""No cell of any CSV that is printed is a formula, whatever clients chose as names."""

from __future__ import annotations

import ast
import csv
import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests import journals
from tests.command_line import exit_code
from tests.exporters.labels import WORDS
from tests.histories import events, weave

from kvledger.audit import events as ev
from kvledger.exporters.writers import cell, csv_of

ROOT = Path(__file__).parents[2]
RUN = ("=", "+", "-", "@", "\t", "\r")

NAMES = ("=1+1", "+1+1", "-1+1")
COMMANDS = (
    "audit {}",
    "show {} @id-0",
    "summary {} --by lora",
    "summary {} --by group",
    "summary {} --by engine",
    "summary {} --by model",
    "why {}",
    "why {} --by lora",
    "query {} QUERY",
    "journals {}",
    "journals {} --audit",
    "diff {} {}",
    "journals prune {} --older-than 1d",
    "journals compact {}",
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal whose clients and operator chose names that are formulas, and that has a finding."""
    folder = tmp_path_factory.mktemp("hostile")
    stream: list[Any] = []
    for event in weave({0: 10, 1: 10, 2: 10}, WORDS):
        if isinstance(event, ev.RequestAdded):
            name = NAMES[event.request]
            labels = ev.RequestLabels(lora=name, group=name)
            event = replace(event, labels=labels, request_id=f"@id-{event.request}")
        stream.append(event)
    settings: dict[str, ev.Setting] = {"model": "=cmd()", "instance": "@here"}
    journals.write(folder / "engine-1-1-0", stream, configuration=settings)
    added, *rest = journals.reported(events(200, journals.CLEAN), local=-128, external=160, computed=168)
    journals.write(folder / "engine-2-1-0", [replace(added, request_id="+id"), *rest], configuration=settings)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_no_cell_is_a_formula(command: str, hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word.replace("{}", str(hostile)) for word in command.split()]
    words = [
        word.replace("QUERY", "select request_id, lora, '\t=1' as \"=x\" from requests") for word in words
    ]
    code = exit_code(*words, *([] if "--format" in words else ["--format", "csv"]))
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))

    assert code in (0, 1, 3)
    assert len(rows) > 1 or "prune" in command
    for text in (text for row in rows for text in row if text.startswith(RUN)):
        float(text)


@given(st.text(alphabet="'=+-@\t\r\n,\"1ea", max_size=8))
def test_a_text_is_read_back_as_it_was(text: str) -> None:
    ((_,), (written,)) = csv.reader(io.StringIO(csv_of(["name"], [[text]]) + "\n"))

    assert written == cell(text)
    assert text == (written[1:] if re.match(r"'+[=+\-@\t\r]", written) else written)


def test_numbers_are_numbers() -> None:
    assert "a,b,c,d\n-1,-0.5,,-2.5e-07" == csv_of("abcd", [[-1, -0.5, None, "-2.5e-07"]])


def test_one_module_writes_csv() -> None:
    found = [
        str(path.relative_to(ROOT))
        for folder in ("audit", "exporters", "dashboards")
        for path in (ROOT / folder).rglob("*.py")
        if any(
            isinstance(node, ast.Attribute)
            and node.attr in ("writer", "DictWriter")
            and ast.unparse(node.value) == "csv"
            for node in ast.walk(ast.parse(path.read_bytes()))
        )
    ]

    assert ["exporters/writers.py"] == found
