"""One module opens every file beside journals, and each other place says what it opens."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPENER = "audit/journal/safe_open.py"

OTHERS = {
    "audit/traffic/engine_setup.py": "a model of its own",
    "audit/demo/engine.py": "the demo's own log and result",
    "audit/demo/model.py": "the demo's own model",
    "audit/demo/run.py": "the demo's own result",
    "audit/engines/source_files.py": "the source of vLLM",
    "audit/entry/export_checks.py": "a file that the user names",
    "audit/demo/sglang/run.py": "a folder of its own for one command",
    "audit/foreign.py": "a file of others that the user names",
    "audit/checks/engine_metrics.py": "data of this package",
    "audit/faults/catalogue.py": "data of this package",
    "audit/repro/bisect.py": "a file that the user names",
    "audit/repro/launcher.py": "the id map of its own process",
    "audit/repro/workers.py": "the output of its own process",
    "audit/traffic/processes.py": "the threads of its own process",
    "audit/simulate/processes.py": "a folder of its own for one command",
    "audit/simulate/study.py": "a folder of its own for one command",
    "cli_run.py": "the null device",
    "exporters/usage_middleware.py": "a log that the user names",
    "exporters/facts/dataset.py": "a folder of its own for one command",
    "exporters/http_client.py": "an address",
    "exporters/files.py": "a file that the user names",
    "exporters/notebook.py": "a file that the user names",
    "exporters/reports/repro.py": "a file that the user names",
    "exporters/trace/timeline.py": "a file that the user names",
}

OPENERS = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "FileIO", "ParquetFile", "mmap"}
WRAPPED = ("create_file(", "opened")
"""What :data:`OPENER` has opened is wrapped, and not opened again."""


def opens(tree: ast.AST) -> Iterator[int]:
    """The lines that open a file by its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first = ast.unparse(node.args[0]) if node.args else ""
            named = name in OPENERS and (name != "open" or node.args or node.keywords)
            if named and not first.startswith(WRAPPED):
                yield node.lineno


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file; several tests of this folder read all of them."""
    return ast.parse(path.read_bytes())


def sources() -> Iterator[Path]:
    for folder in ("audit", "exporters"):
        yield from sorted((ROOT / folder).rglob("*.py"))
    yield from sorted(ROOT.glob("*.py"))


def test_one_function_opens_every_file_beside_journals() -> None:
    found: dict[str, list[int]] = {}
    for path in sources():
        lines = list(opens(tree(path)))
        if lines:
            found[str(path.relative_to(ROOT))] = lines

    unknown = {name: lines for name, lines in found.items() if name not in OTHERS and name != OPENER}
    assert {} == unknown
    assert {} == {name: why for name, why in OTHERS.items() if name not in found}


def test_a_place_that_opens_a_file_is_found() -> None:
    for text in (
        "open(p)",
        "os.open(p, 0)",
        "p.open('rb')",
        "p.read_bytes()",
        "pq.ParquetFile(p)",
        "FileIO(p)",
    ):
        assert [1] == list(opens(ast.parse(text))), text
    assert [] == list(opens(ast.parse("open(create_file(p, 1), 'wb')")))
