"""Who may import whom, read from the syntax trees (docs/architecture.md draws the same).

`RULES` has one row for a module or a package; the longest name that fits decides. An import counts
wherever it stands, except that `lazily` lists what may be imported only inside a function or for the
type checker. The standard library is free to all.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("audit", "exporters", "dashboards")
BARE = (*FOLDERS, "cli")  # importable where the repository's root is on the path, as other modules

MSGSPEC = frozenset({"msgspec"})
HOST = frozenset({"lmcache", "safetensors", "torch", "vllm"})
NONE: frozenset[str] = frozenset()


class Rule(NamedTuple):
    """What the modules of one row may import."""

    ours: tuple[str, ...] = ()  # names below kvledger, packages with all they hold
    libraries: frozenset[str] = MSGSPEC
    lazily: frozenset[str] = NONE
    most_libraries: int | None = None  # of a single file, msgspec not counted; then any library is allowed
    not_ours: tuple[str, ...] = ()


RING = [
    "audit.events",
    "audit.account",
    "audit.blocks",
    "audit.transfers",
    "audit.ledger",
    "audit.catalogue",
    "audit.invariants",
    "audit.auditor",
]
LEFTWARD = {name: Rule(ours=("audit.errors", *RING[: place + 1])) for place, name in enumerate(RING)}
EVENTS = ("audit.errors", "audit.events")
OUTER = Rule(ours=("audit",))

RULES = LEFTWARD | {
    "__init__": Rule(libraries=NONE, ours=("audit.attach",)),
    "__main__": Rule(libraries=NONE, ours=("cli",)),
    "cli": Rule(ours=("attach", *FOLDERS), libraries=frozenset({"rich", "typer"})),
    # the pure part
    "audit": Rule(libraries=NONE, ours=("audit.errors", *RING)),
    "audit.errors": Rule(libraries=NONE),
    "audit.differences": Rule(ours=("audit.events", "audit.account", "audit.ledger")),
    "audit.tallies": Rule(ours=("audit.events", "audit.account")),
    "audit.misses": Rule(ours=("audit.account",)),
    # the journal, in its files: segments <- writer, reader <- journal, and the buffer before the writer
    "audit.segments": Rule(ours=EVENTS),
    "audit.writer": Rule(ours=(*EVENTS, "audit.segments")),
    "audit.reader": Rule(ours=(*EVENTS, "audit.segments")),
    "audit.journal": Rule(ours=(*EVENTS, "audit.segments", "audit.writer", "audit.reader")),
    "audit.recorder": Rule(ours=(*EVENTS, "audit.writer")),
    # what touches a host
    "audit.hooks": Rule(libraries=NONE),
    "audit.engines": Rule(
        ours=("audit.engines", "audit.events", "audit.hooks", "audit.recorder"), lazily=HOST
    ),
    # the outer ring
    "audit.attach": OUTER,
    "audit.plugin": OUTER,
    "audit.housekeeping": Rule(ours=("audit.errors", "audit.segments", "audit.writer")),
    "audit.doctor": OUTER,
    "audit.replay": OUTER,
    "audit.state": OUTER,
    "audit.checkpoint": OUTER,
    "audit.parallel": OUTER,
    "audit.windows": OUTER,
    "audit.workers": OUTER,
    "audit.pytest_plugin": OUTER._replace(libraries=frozenset({"pytest"})),
    "audit.demo": OUTER._replace(libraries=MSGSPEC | HOST),
    "audit.conformance": OUTER._replace(libraries=MSGSPEC | HOST),
    # what reads the audit
    "exporters": Rule(ours=("audit", "exporters"), not_ours=("audit.engines",), most_libraries=1),
    "dashboards": Rule(ours=("audit.errors", "dashboards", "exporters.metrics"), libraries=NONE),
}


class Import(NamedTuple):
    name: str  # dotted, absolute
    line: int
    lazy: bool


def imports(source: str, module: str, is_package: bool) -> Iterator[Import]:
    """Every import of a file, with `from a import b` as `a.b`: only the tree can say if b is a module."""
    package = module.split(".") if is_package else module.split(".")[:-1]

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (Import(f"{base}.{alias.name}", node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from walk(child, True)
            for child in node.orelse:
                yield from walk(child, lazy)
        else:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from walk(child, lazy or is_function)

    return walk(ast.parse(source), False)


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def rule_of(module: str, rules: dict[str, Rule]) -> Rule | None:
    """The row for a module below kvledger. Inside audit each module wants a row of its own."""
    fits = [name for name in rules if within(module, (name,)) and (name != "audit" or module == "audit")]
    return rules[max(fits, key=len)] if fits else None


def faults(source: str, module: str, is_package: bool = False) -> list[str]:
    """What one file imports against its rule, in words; `module` is a name below kvledger."""
    rule = rule_of(module, RULES)
    if rule is None:
        return [f"{module} has no row in RULES"]
    found, seen = [], set()
    absolute = "kvledger" if module == "__init__" else f"kvledger.{module}"
    for name, line, lazy in imports(source, absolute, is_package or module == "__init__"):
        top, _, rest = name.partition(".")
        where = f"{module}:{line} imports {name}"
        if top in sys.stdlib_module_names:
            continue
        if top in BARE:
            found.append(f"{where}, a second copy: write kvledger.{name}")
        elif top == "kvledger":
            own = rest in ("", "__version__") or within(rest, rule.ours)
            if not own or within(rest, rule.not_ours):
                found.append(where)
        elif rule.most_libraries is not None:
            seen |= {top} - MSGSPEC - {"__future__"}
        elif top in rule.lazily:
            found += [] if lazy else [f"{where} outside a function"]
        elif top not in rule.libraries:
            found.append(where)
    if rule.most_libraries is not None and len(seen) > rule.most_libraries:
        found.append(f"{module} imports {len(seen)} libraries: {', '.join(sorted(seen))}")
    return found


def files() -> list[tuple[str, Path]]:
    """Every module of the package: its name below kvledger, and its file."""
    found = [("cli", ROOT / "cli.py")]
    found += [(path.stem, path) for path in (ROOT / "src/kvledger").glob("__*__.py")]
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append((".".join(parts[:-1] if path.name == "__init__.py" else parts), path))
    return sorted(found)


@pytest.mark.parametrize(("module", "path"), files(), ids=[module for module, _ in files()])
def test_imports_follow_the_rules(module: str, path: Path) -> None:
    assert [] == faults(path.read_text(), module, path.name == "__init__.py")


def test_tests_and_benchmarks_import_the_package() -> None:
    """`from audit import events` in a test would make each event class a second time."""
    bare = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for folder in ("tests", "benchmarks", "scripts")
        for path in (ROOT / folder).rglob("*.py")
        for name, line, _ in imports(path.read_text(), "", False)
        if name.partition(".")[0] in BARE
    ]
    assert [] == bare


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("audit.ledger", "from kvledger.audit.checks.auditor import Auditor"),
        ("audit.ledger", "def late():\n    from kvledger.audit import auditor"),
        ("audit.ledger", "from .invariants import tokens"),
        ("audit.ledger", "from audit.events import Event"),
        ("audit.account", "import rich"),
        ("audit.recorder", "from kvledger.audit.ledger.ledger import Ledger"),
        ("audit.hooks", "import msgspec"),
        ("audit.engines.v1", "import vllm"),
        ("audit.engines.v1", "from kvledger.audit.ledger.ledger import Ledger"),
        ("audit.doctor", "def look():\n    import vllm"),
        ("audit.plugin", "from kvledger.exporters import metrics"),
        ("audit.novelty", "import json"),
        ("exporters.frames", "from kvledger.audit.engines import choose"),
        ("exporters.frames", "import pandas, plotly"),
        ("exporters.frames", "import kvledger.cli"),
        ("dashboards.grafana", "from kvledger.exporters.metrics.prometheus import Collector"),
        ("dashboards.grafana", "from kvledger.audit import events"),
        ("cli", "import pandas"),
        ("__init__", "from .exporters import metrics"),
    ],
)
def test_a_violation_is_found(module: str, source: str) -> None:
    assert 1 == len(faults(source, module))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("audit.auditor", "from kvledger.audit.checks.tokens import x\nimport msgspec, json"),
        ("audit.invariants.tokens", "from ..ledger import Entry"),
        ("audit.engines.v1", "def observe():\n    from vllm.v1.request import Request"),
        ("audit.engines.v1", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("audit.attach", "from kvledger.audit.engines import choose"),
        ("exporters.frames", "import msgspec\nimport pandas as pd\nfrom pandas import DataFrame"),
        ("dashboards.grafana", "from kvledger.exporters.metrics.table import METRICS"),
        ("dashboards.grafana", "from kvledger.exporters import metrics"),
        ("cli", "import kvledger\nfrom kvledger import attach\nfrom kvledger.exporters import report"),
    ],
)
def test_what_comes_close_is_allowed(module: str, source: str) -> None:
    assert [] == faults(source, module)
