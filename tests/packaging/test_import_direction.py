"""Which module may import which, read from the syntax trees (docs/architecture.md draws the same map).

`RULES` has one row for each module or package; the longest name that matches decides. Every import
counts wherever it stands, except that `lazily` lists libraries that may be imported only inside a
function or for the type checker. The standard library is free to all.
"""

import ast
import graphlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("audit", "exporters", "dashboards")
TOP = "__init__"  # the package itself: kvledger/__init__.py

MSGSPEC = frozenset({"msgspec"})
HOST = frozenset({"lmcache", "safetensors", "sglang", "torch", "vllm"})
NONE: frozenset[str] = frozenset()


class Rule(NamedTuple):
    """What the modules of one row may import."""

    ours: tuple[str, ...] = ()  # names below kvledger; a package stands for everything in it
    libraries: frozenset[str] = MSGSPEC
    lazily: frozenset[str] = NONE
    most_libraries: int | None = None  # in a single file, msgspec not counted; any library is then allowed
    not_ours: tuple[str, ...] = ()


GROUND = (
    "audit.bounded_tables",
    "audit.client_ids",
    "audit.errors",
    "audit.events",
    "audit.causes",
    "audit.release_semantics",
    "audit.faults",
    "audit.glossary",
    "audit.text",
)
LEDGER = (*GROUND, "audit.figures", "audit.ledger")
CHECKS = (*LEDGER, "audit.checks")
ANALYSIS = (*CHECKS, "audit.analysis")
REPLAY = (*ANALYSIS, "audit.foreign", "audit.journal", "audit.replay")
EVENTS = ("audit.errors", "audit.events")
OUTER = Rule(ours=("audit",))

RULES = {
    TOP: Rule(libraries=NONE, ours=("audit", "exporters")),  # gives out names, each at its first use
    "__main__": Rule(libraries=NONE, ours=("cli",)),
    "cli": Rule(ours=("cli_options", "cli_run", *FOLDERS), libraries=frozenset({"typer"})),
    "cli_run": Rule(ours=("cli_options", *FOLDERS), libraries=frozenset({"typer"})),
    "cli_options": Rule(ours=("audit.errors", "audit.replay"), libraries=frozenset({"typer"})),
    # the ground floor
    "audit": Rule(libraries=NONE, ours=("audit.errors",)),
    "audit.errors": Rule(libraries=NONE),
    "audit.events": Rule(ours=("audit.errors",)),
    "audit.causes": Rule(ours=EVENTS),
    "audit.bounded_tables": Rule(libraries=NONE),
    "audit.client_ids": Rule(libraries=NONE),
    "audit.hash_key": Rule(libraries=NONE, ours=("audit.errors",)),
    "audit.journal.possible_events": Rule(ours=EVENTS),
    "audit.text": Rule(ours=EVENTS),
    "audit.temporary": Rule(libraries=NONE),
    "audit.foreign": Rule(ours=("audit.errors", "audit.text")),
    "audit.hooks": Rule(libraries=NONE),
    "audit.release_semantics": Rule(ours=EVENTS),
    "audit.glossary": Rule(ours=GROUND),
    "audit.faults": Rule(ours=("audit.errors", "audit.release_semantics", "audit.faults")),
    # the journal on disk: format <- writer, reader <- folder, and the buffer in front of the writer
    "audit.journal": Rule(ours=(*EVENTS, "audit.journal")),
    "audit.journal.safe_open": Rule(libraries=NONE, ours=("audit.errors",)),
    "audit.journal.format": Rule(ours=(*EVENTS, "audit.journal.safe_open")),
    "audit.journal.host_folders": Rule(ours=(*EVENTS, "audit.text", "audit.journal.reader")),
    "audit.journal.writer": Rule(ours=(*EVENTS, "audit.journal.format", "audit.journal.safe_open")),
    "audit.journal.reader": Rule(
        ours=(
            *EVENTS,
            "audit.text",
            "audit.journal.format",
            "audit.journal.possible_events",
            "audit.journal.safe_open",
        )
    ),
    "audit.journal.recorder": Rule(ours=(*EVENTS, "audit.journal.writer")),
    # accounts, what must hold of them, why figures differ, and journals read again
    "audit.figures": Rule(
        ours=(
            "audit.causes",
            "audit.events",
            "audit.text",
            "audit.figures",
            "audit.ledger.account",
            "audit.ledger.weights",
        ),
    ),
    "audit.ledger": Rule(ours=LEDGER),
    "audit.checks": Rule(ours=CHECKS),
    "audit.analysis": Rule(ours=ANALYSIS),
    "audit.replay": Rule(ours=REPLAY),
    # what touches an engine
    "audit.engines": Rule(
        ours=(
            *EVENTS,
            "audit.bounded_tables",
            "audit.causes",
            "audit.hash_key",
            "audit.hooks",
            "audit.release_semantics",
            "audit.text",
            "audit.journal.recorder",
            "audit.engines",
        ),
        lazily=HOST,
    ),
    # these are imported at level content only, in an environment that has an engine
    "audit.engines.content.fingerprint": Rule(libraries=frozenset({"numpy", "torch"})),
    "audit.engines.content.fingerprint_triton": Rule(
        ours=("audit.engines.content.fingerprint",), libraries=frozenset({"numpy", "torch", "triton"})
    ),
    "audit.engines.content.weight_digest": Rule(libraries=frozenset({"torch"})),
    "audit.engines.content.device_buffers": Rule(libraries=frozenset({"torch"})),
    "audit.engines.content.sketches": Rule(
        ours=("audit.engines.content", "audit.engines.step_log", "audit.events"),
        libraries=frozenset({"numpy", "torch"}),
    ),
    "audit.engines.content.seal_fingerprints": Rule(
        ours=("audit.engines.content",), libraries=frozenset({"numpy", "torch"})
    ),
    # the outer ring
    "audit.entry": OUTER,
    "audit.entry.weights": OUTER._replace(libraries=frozenset({"numpy"})),
    "audit.entry.pytest_plugin": OUTER._replace(libraries=frozenset({"pytest"})),
    "audit.entry.pytest_settings": OUTER._replace(libraries=frozenset({"pytest"})),
    "audit.entry.pytest_observer": OUTER._replace(libraries=frozenset({"pytest"})),
    "audit.planted": Rule(libraries=NONE, ours=("audit.planted",), lazily=HOST),
    "audit.demo": OUTER._replace(libraries=MSGSPEC | HOST),
    "audit.demo.sglang": OUTER._replace(libraries=MSGSPEC | HOST | {"transformers"}),
    "audit.traffic": OUTER._replace(libraries=MSGSPEC | HOST),
    "audit.conformance": OUTER._replace(libraries=MSGSPEC | HOST),
    "audit.repro": OUTER._replace(libraries=MSGSPEC | HOST),
    "audit.simulate": OUTER._replace(libraries=MSGSPEC | HOST),
    # what presents the audit
    "exporters": Rule(ours=("audit", "exporters"), not_ours=("audit.engines",), most_libraries=1),
    "dashboards": Rule(
        ours=(
            *("audit.errors", "audit.foreign", "audit.text", "dashboards"),
            *("exporters.http_client", "exporters.metrics.metric_list"),
        )
    ),
    "dashboards.deploy_files": Rule(ours=("audit.errors", "dashboards"), libraries=frozenset({"yaml"})),
}

NOT_FROM = {
    "tests": ("benchmarks", "proofs"),
    "benchmarks": ("proofs",),
    "proofs": (),
    "scripts": ("benchmarks", "proofs"),
}
"""What a folder outside the package may not import. Benchmarks and proofs drive engines as tests do."""


class Import(NamedTuple):
    name: str  # dotted, absolute
    line: int
    lazy: bool
    relative: bool


@cache
def imports(source: str, module: str, is_package: bool) -> Sequence[Import]:
    """Every import of a file; `from a import b` is `a.b`, whether `b` is a module or a name in one."""
    package = module.split(".") if is_package else module.split(".")[:-1]

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, lazy, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, lazy, node.level > 0)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from walk(child, True)
            for child in node.orelse:
                yield from walk(child, lazy)
        else:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for child in ast.iter_child_nodes(node):
                if not isinstance(child, ast.expr):  # no expression has an import in it
                    yield from walk(child, lazy or is_function)

    return tuple(walk(ast.parse(source), False))


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def rule_of(module: str) -> Rule | None:
    """The row for a module below kvledger. Each module and folder inside audit needs a row of its own."""
    rows = [name for name in RULES if within(module, (name,)) and (name != "audit" or module == "audit")]
    return RULES[max(rows, key=len)] if rows else None


def absolute(module: str) -> str:
    return "kvledger" if module == TOP else f"kvledger.{module}"


def offences(source: str, module: str, is_package: bool = False) -> list[str]:
    """Each import of one file that its rule forbids, in words; `module` is a name below kvledger."""
    rule = rule_of(module)
    if rule is None:
        return [f"{module} has no row in RULES"]
    forbidden, libraries = [], set()
    for name, line, lazy, relative in imports(source, absolute(module), is_package or module == TOP):
        top, _, rest = name.partition(".")
        where = f"{module}:{line} imports {name}"
        if top in sys.stdlib_module_names:
            continue
        if top in FOLDERS or top == "cli":
            forbidden.append(f"{where}, a second copy of the module: write a relative import")
        elif top == "kvledger":
            allowed = rest in ("", "__version__") or within(rest, rule.ours)
            if not relative:
                forbidden.append(f"{where} by its absolute name: write a relative import")
            elif not allowed or within(rest, rule.not_ours):
                forbidden.append(where)
        elif rule.most_libraries is not None:
            libraries |= {top} - MSGSPEC
        elif top in rule.lazily:
            forbidden += [] if lazy else [f"{where} outside a function"]
        elif top not in rule.libraries:
            forbidden.append(where)
    if rule.most_libraries is not None and len(libraries) > rule.most_libraries:
        forbidden.append(f"{module} imports {len(libraries)} libraries: {', '.join(sorted(libraries))}")
    return forbidden


def edges(sources: Mapping[str, tuple[str, bool]]) -> dict[str, set[str]]:
    """The other modules of the package that each module imports, inside functions too.

    The package itself has none: it names for the type checker what it gives out.
    """

    def module_of(name: str) -> str:
        while name not in sources and "." in name:
            name = name.rpartition(".")[0]
        return name if name in sources else TOP

    return {
        module: {
            module_of(imported.name.removeprefix("kvledger."))
            for imported in imports(source, absolute(module), is_package or module == TOP)
            if within(imported.name, ("kvledger",))
        }
        - {module}  # a program imports itself to run the imported copy
        for module, (source, is_package) in sources.items()
        if module != TOP
    } | {TOP: set()}


def circles(graph: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Circles of imports: one edge of each is removed until none is left."""
    graph = {module: set(imported) for module, imported in graph.items()}
    while True:
        try:
            graphlib.TopologicalSorter(graph).prepare()
            return
        except graphlib.CycleError as error:
            circle: list[str] = error.args[1][::-1]  # each imports the next, and the last is the first
            yield circle
            graph[circle[0]].remove(circle[1])


def package_sources() -> dict[str, tuple[str, bool]]:
    """Every module of the package, by its name below kvledger: its text, and whether it is a package."""
    sources = {
        name: ((ROOT / f"{name}.py").read_text(), False)
        for name in (TOP, "__main__", "cli", "cli_options", "cli_run")
    }
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            sources[".".join(parts[:-1] if is_package else parts)] = path.read_text(), is_package
    return dict(sorted(sources.items()))


def test_imports_of_the_package_follow_the_rules() -> None:
    assert [] == [
        offence
        for module, (source, is_package) in package_sources().items()
        for offence in offences(source, module, is_package)
    ]


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert [] == [" -> ".join(circle) for circle in circles(edges(package_sources()))]


def imports_of(folder: str) -> Iterator[tuple[str, Import]]:
    """Every import below a folder outside the package, and where it stands."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for imported in imports(path.read_text(), "", False):
            yield f"{path.relative_to(ROOT)}:{imported.line} imports {imported.name}", imported


@pytest.mark.parametrize("folder", NOT_FROM)
def test_folders_outside_the_package_import_in_one_direction(folder: str) -> None:
    """`from audit import events` in a test would create each event class a second time."""
    forbidden = (*FOLDERS, "cli", "cli_options", "cli_run", *NOT_FROM[folder])
    assert [] == [where for where, imported in imports_of(folder) if within(imported.name, forbidden)]


FORBIDDEN = {
    "a module without a row": ("audit.novelty", "import json"),
    "a layer above, inside a function": ("audit.ledger.ledger", "def f():\n    from ..checks import auditor"),
    "a library": ("audit.causes", "import rich"),
    "an engine's library outside a function": ("audit.engines.v1_since_0_27", "import vllm"),
    "a package left out of one that is allowed": (
        "exporters.trace.frames",
        "from ...audit.engines import choose",
    ),
    "two libraries in one file": ("exporters.trace.frames", "import pandas, pyarrow"),
    "an absolute name": ("audit.ledger.ledger", "from kvledger.audit.events import Event"),
    "a second copy of a module": ("audit.ledger.ledger", "from audit.events import Event"),
}


@pytest.mark.parametrize(("module", "source"), FORBIDDEN.values(), ids=FORBIDDEN)
def test_a_forbidden_import_is_reported(module: str, source: str) -> None:
    assert 1 == len(offences(source, module))


def test_similar_imports_are_allowed() -> None:
    lazy = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\ndef f():\n    import vllm"
    assert [] == offences(lazy, "audit.engines.v1_since_0_27")
    assert [] == offences(
        "import msgspec, json\nimport pandas as pd\nfrom pandas import DataFrame", "exporters.x"
    )


def test_a_circle_is_reported_even_if_one_import_is_inside_a_function() -> None:
    sources = {
        "audit.a": ("from .b import x", False),
        "audit.b": ("def later():\n    from . import c", False),
        "audit.c": ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import y", False),
        "audit.d": ("from . import a, b, c", False),
    }
    [circle] = circles(edges(sources))
    assert {"audit.a", "audit.b", "audit.c"} == set(circle)
