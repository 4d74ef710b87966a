"""Each public attribute that a class sets in ``__init__`` is said in a sentence.

The sentence stands below the attribute as a string, or in the docstring of the class or of ``__init__``,
which then has the attribute's name between double backquotes. A private attribute has a sentence only where
its name does not say all: a unit, a key, what stands for none, or why.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from tests.packaging.test_one_opener import ROOT, tree


def is_sentence(statement: ast.stmt | None) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def attributes(statement: ast.stmt, *, declares: bool) -> Iterator[str]:
    """The attributes of ``self`` that an assignment sets, or the attribute that a class declares."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
    for target in targets:
        for each in ast.walk(target):
            if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self":
                yield each.attr
            elif isinstance(each, ast.Name) and declares:
                yield each.id


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements in a function, without those of functions in it."""
    for name in ("body", "orelse", "finalbody", "handlers"):
        for block in [getattr(node, name, [])]:
            if block and isinstance(block[0], ast.stmt):
                yield block
            for each in block:
                if not isinstance(each, ast.FunctionDef | ast.ClassDef):
                    yield from blocks(each)


def unsaid(cls: ast.ClassDef) -> set[str]:
    """The public attributes of a class that no sentence says."""
    init = next((each for each in cls.body if getattr(each, "name", "") == "__init__"), None)
    if not isinstance(init, ast.FunctionDef):
        return set()
    prose = f"{ast.get_docstring(cls)}{ast.get_docstring(init)}"
    set_here: set[str] = set()
    said: set[str] = set()
    for block in [cls.body, *blocks(init)]:
        for statement, following in zip(block, [*block[1:], None], strict=True):
            in_class = block is cls.body
            names = set(attributes(statement, declares=in_class))
            set_here |= set() if in_class else names
            said |= names if is_sentence(following) else set()
    written = set(re.findall(r"``(\w+)``", prose))
    return {name for name in set_here - said - written if not name.startswith("_")}


FOLDERS = {
    str(path.parent.relative_to(ROOT))
    for top in ("audit", "exporters", "dashboards")
    for path in (ROOT / top).rglob("*.py")
}


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_every_public_attribute_is_said_in_a_sentence(folder: str) -> None:
    assert [] == [
        f"{path.relative_to(ROOT)}: {cls.name}.{name}"
        for path in sorted((ROOT / folder).glob("*.py"))
        for cls in ast.walk(tree(path))
        if isinstance(cls, ast.ClassDef)
        for name in sorted(unsaid(cls))
    ]


ONE = "class A:\n    def __init__(self):\n        self.a = 1\n"
EXAMPLES = {
    ONE: {"a"},
    ONE + '        """A sentence."""': set(),
    ONE.replace(":\n", ':\n    """``a``: one."""\n', 1): set(),
    ONE.replace("a = 1", "_a, self.b = 1, 2"): {"b"},
    ONE.replace("__init__", "other"): set(),
}


@pytest.mark.parametrize("source", EXAMPLES)
def test_which_attributes_are_said(source: str) -> None:
    [cls] = ast.parse(source).body
    assert isinstance(cls, ast.ClassDef)
    assert EXAMPLES[source] == unsaid(cls)
