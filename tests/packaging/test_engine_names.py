"""Which code may name an engine. Everything else asks the contract (``audit/release_semantics.py``).

Names in sentences do not count: a name is an identifier, a module, or a text without a space.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.packaging.test_one_opener import ROOT, sources, tree

NAME = re.compile(r"v_?llm|sglang", re.IGNORECASE)

PLACES = {
    "audit/engines/": "the adapters",
    "audit/release_semantics.py": "the contract of each product",
    "audit/faults/": "the known faults of each product",
    "audit/checks/": "links to upstream issues, and the table of vLLM's figures",
    "audit/planted/": "where each fault is put",
    "audit/conformance/": "drives vLLM's scheduler",
    "audit/demo/": "runs one of the engines",
    "audit/repro/": "drives vLLM's scheduler",
    "audit/simulate/": "drives vLLM's scheduler",
    "audit/traffic/": "drives vLLM's scheduler",
    "audit/entry/": "the entry points that each engine calls, and the doctor and pytest for vLLM",
    "audit/errors.py": "what to install",
    "exporters/reports/demo.py": "runs one of the engines",
    "exporters/reports/doctor.py": "the doctor of vLLM",
    "exporters/repro/": "a test for vLLM",
    "exporters/usage_middleware.py": "runs in vLLM's server",
    "cli.py": "options of demo and faults, and vLLM's log",
}
"""Files and folders, with the reason."""


def named(tree: ast.AST) -> Iterator[str]:
    """The names of engines in code."""
    for node in ast.walk(tree):
        words: list[str | None] = []
        match node:
            case ast.Name():
                words = [node.id]
            case ast.Attribute():
                words = [node.attr]
            case ast.ImportFrom():
                words = [node.module, *(each.name for each in node.names)]
            case ast.Import():
                words = [each.name for each in node.names]
            case ast.FunctionDef() | ast.ClassDef():
                words = [node.name]
            case ast.Constant(value=str() as text) if not re.search(r"\s", text):
                words = [text]
        yield from (word for word in words if word and NAME.search(word))


def test_only_these_places_name_an_engine() -> None:
    found = {str(path.relative_to(ROOT)): set(named(tree(path))) for path in sources()}
    elsewhere = {path: names for path, names in found.items() if names and not path.startswith(tuple(PLACES))}
    unused = [place for place in PLACES if not any(found[path] for path in found if path.startswith(place))]
    assert (elsewhere, unused) == ({}, [])
