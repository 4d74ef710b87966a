"""Where text is put into a language that something runs or parses, and what escapes it there.

A syntax tree shows every place. Each names the function that it calls for text of others, or says why it
needs none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.packaging.test_one_opener import ROOT, sources, tree

PLACES: dict[str, dict[str, str]] = {
    "source": {
        "audit/demo/sglang/loop.py": "ours: names of a module that the demo replaces",
        "audit/figures/row.py": "ours: the names of figures that are declared",
        "audit/figures/totals.py": "ours: the names of figures that are declared",
        "audit/hooks.py": "ours: the signature of an engine's method that runs here",
        "audit/planted/fault.py": "ours: the engine's own source with a planted fault",
        "exporters/repro/pytest_file.py": "_literal()",
        "exporters/files.py": "ours: autoescape is on",
    },
    "SQL": {
        "exporters/facts/blocks.py": "ours: columns",
        "exporters/facts/dataset.py": "ours: columns; values are parameters",
        "exporters/facts/hours.py": "ours: columns",
        "exporters/facts/misses.py": "ours: columns, causes and conditions",
        "exporters/facts/compact.py": "quoted()",
        "exporters/facts/tables.py": "_require_one_select()",
        "exporters/facts/sums.py": "quoted()",
        "exporters/reports/page.py": "ours: columns",
    },
    "process": {
        "audit/demo/run.py": "ours: a list of words",
        "audit/demo/sglang/run.py": "ours: a list of words",
        "audit/repro/bisect.py": "ours: a list of words, with interpreters that the user names",
        "audit/repro/launcher.py": "ours: the list of words that workers.py gives it",
        "audit/repro/workers.py": "ours: a list of words, with interpreters that the user names",
        "audit/traffic/processes.py": "ours: a list of words",
        "exporters/sidecar/processes.py": "ours: a list of words",
    },
    "HTML": {
        "exporters/notebook.py": "escape()",
        "exporters/writers.py": "escape()",
    },
    "Markdown": {
        "audit/checks/engine_metrics.py": "ours: documentation",
        "audit/checks/figures.py": "ours: documentation",
        "audit/checks/registry.py": "ours: documentation",
        "audit/faults/catalogue.py": "ours: documentation",
        "audit/glossary.py": "ours: documentation",
        "exporters/metrics/metric_list.py": "ours: documentation",
        "exporters/repro/bug_report.py": "markdown_text()",
        "exporters/trace/columns.py": "ours: documentation",
        "exporters/usage_logs.py": "ours: documentation",
        "exporters/writers.py": "markdown_text()",
    },
    "CSV": {"exporters/writers.py": "cell()"},
    "metrics": {"exporters/metrics/openmetrics.py": "escaped()"},
    "path": {
        "audit/demo/sglang/run.py": "ours: a release",
        "audit/entry/pytest_audits.py": "sub()",
        "audit/replay/atomic_files.py": "ours: a name that is there, and random digits",
        "audit/simulate/study.py": "ours: a number",
        "dashboards/boards.py": "ours: the name of a board",
        "exporters/facts/compact.py": "partition()",
        "exporters/facts/dataset.py": "ours: the name of a table",
        "exporters/facts/kept.py": "quote()",
        "exporters/files.py": "ours: a name that is there",
        "exporters/kv_events.py": "ours: numbers",
        "exporters/trace/parquet.py": "ours: the name of a table",
    },
    "pattern": {
        "audit/engines/configuration.py": "ours: the operator's own pattern",
        "audit/journal/format.py": "escape()",
        "audit/replay/checkpoint.py": "ours: a constant",
        "exporters/answer.py": "ours: words of verdicts",
        "exporters/facts/groups.py": "ours: the user's own pattern",
        "exporters/facts/compact.py": "escape()",
        "exporters/trace/groups.py": "ours: the user's own pattern",
        "exporters/writers.py": "ours: each name goes through re.escape",
    },
}
"""By language and file. No YAML is made: rules and files for Kubernetes are copied as they are."""

_SQL = re.compile(r"\s*(?:SELECT|CREATE|INSERT|SET|COPY|ATTACH|WITH|UNION| WHERE)\s")
_WRITTEN = {
    "HTML": re.compile(r"<[a-z/]+[ >{]"),
    "metrics": re.compile(r"# (?:TYPE|UNIT|HELP) "),
    "Markdown": re.compile(r"^\||^#+ (?!TYPE|UNIT)|```|\]\(\{"),
}
_CALLS = {
    "source": re.compile(r"(?:exec|eval|compile|__import__)|.*\.from_string"),
    "SQL": re.compile(r"(?:self\._)?connection\.execute(?:many)?|duckdb\.(?:sql|execute)"),
    "process": re.compile(r"subprocess\.\w+|os\.(?:system|popen|exec\w+|spawn\w+)"),
    "HTML": re.compile(r"Markup"),
    "CSV": re.compile(r"csv\.(?:writer|DictWriter)"),
    "YAML": re.compile(r"yaml\.\w*dump\w*"),
}
_OF_PATHS = {"with_name", "with_suffix", "joinpath", "Path"}


def languages(tree: ast.AST) -> Iterator[str]:
    """The languages into which a file puts text, or whose programs it starts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            yield from (language for language, calls in _CALLS.items() if calls.fullmatch(called))
            if called == "Environment" and "loader" in {given.arg for given in node.keywords}:
                yield "source"
            if called == "re.compile" and not isinstance(node.args[0], ast.Constant):
                yield "pattern"
            if called.rpartition(".")[2] in _OF_PATHS and any(map(_is_made, node.args)):
                yield "path"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and _is_made(node.right):
            yield "path"
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            text = "".join(map(str, parts))
            if _SQL.match(text):
                yield "SQL"
            yield from (language for language, written in _WRITTEN.items() if written.search(text))


def _is_made(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr)


def test_every_place_says_what_escapes_its_text() -> None:
    found: dict[str, set[str]] = {}
    for path in [*sources(), *sorted((ROOT / "dashboards").rglob("*.py"))]:
        for language in languages(tree(path)):
            found.setdefault(language, set()).add(str(path.relative_to(ROOT)))

    assert {language: {*files} for language, files in PLACES.items()} == found


def test_each_function_that_escapes_is_called() -> None:
    for files in PLACES.values():
        for file, why in files.items():
            if why.endswith("()"):
                nodes = list(ast.walk(tree(ROOT / file)))
                calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
                names = {call.rpartition(".")[2] for call in calls}
                passed = {node.id for node in nodes if isinstance(node, ast.Name)}
                assert why[:-2] in names | passed, file
            else:
                assert why.startswith("ours: "), file


def test_no_template_turns_escaping_off() -> None:
    for path in (ROOT / "exporters").rglob("*.html.j2"):
        assert not re.search(r"\|\s*safe|autoescape", path.read_text()), path


def test_every_door_and_its_tests_exist() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    named = re.findall(r"`((?:audit|exporters|tests|scripts|constraints)/[\w/.-]+)`", page)

    assert 20 < len(named)
    assert [] == [name for name in named if not (ROOT / name).is_file()]


def test_a_place_is_found() -> None:
    for language, text in (
        ("source", "exec(made)"),
        ("SQL", "f'SELECT {column} FROM requests'"),
        ("process", "subprocess.run(words)"),
        ("HTML", "f'<b>{name}</b>'"),
        ("Markdown", "f'| {name} |'"),
        ("CSV", "csv.writer(file)"),
        ("YAML", "yaml.safe_dump(value)"),
        ("path", "folder / f'{engine}.parquet'"),
        ("pattern", "re.compile(given)"),
    ):
        assert [language] == list(languages(ast.parse(text))), text
    assert [] == list(languages(ast.parse("re.compile('a'); folder / 'name'; f'{a} of {b}'")))
