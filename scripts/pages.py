"""Writes what is generated from the code's own tables: `make docs`. A test fails when a file is stale.

Not here: pages that hold what a run found, such as docs/performance.md. The run writes those.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from kvledger.audit import glossary
from kvledger.audit.checks import engine_metrics, figures, registry
from kvledger.audit.checks.registry import KINDS, Kind
from kvledger.audit.faults import catalogue
from kvledger.audit.figures.declared import FIGURES
from kvledger.dashboards.deploy_files import SOURCE, rules
from kvledger.exporters import usage_logs
from kvledger.exporters.metrics import metric_list
from kvledger.exporters.trace import columns

ROOT = Path(__file__).resolve().parents[1]


def generated() -> Iterator[tuple[str, str]]:
    """Each generated file, relative to the repository, and the text that it must have."""
    yield "audit/figures/totals.pyi", totals()
    yield "docs/reference/invariants.md", registry.markdown()
    yield "docs/reconciliation.md", figures.replaced((ROOT / "docs/reconciliation.md").read_text())
    yield "docs/engine-metrics.md", engine_metrics.markdown()
    yield "docs/usage.md", usage_logs.replaced((ROOT / "docs/usage.md").read_text())
    yield "docs/differences.md", catalogue.replaced((ROOT / "docs/differences.md").read_text())
    yield "docs/reference/glossary.md", glossary.markdown()
    yield "docs/reference/metrics.md", metric_list.markdown()
    yield "docs/reference/tables.md", columns.markdown()
    yield "docs/reference/alerts.md", alerts()
    yield f"dashboards/{SOURCE.name}", with_violations(SOURCE.read_text())


def totals() -> str:
    """audit/figures/totals.pyi, so that type checkers and editors know the figures."""
    lines = [
        "# ruff: noqa: E501",
        "# The types of totals.py, whose fields are the figures of declared.py. Written by `make docs`.",
        "from ..ledger.account import Account",
        "from .sums import Sums",
        "",
        "class Totals(Sums):",
    ]
    for figure in FIGURES:
        kind = "dict[str, int]" if figure.causes else "int"
        lines += [f"    {figure.name}: {kind} = ...", f'    """In {figure.unit}: {figure.text}."""']
    return "\n".join(
        [
            *lines,
            "",
            "    def add(self, account: Account) -> None: ...",
            "    def of(self, figure: str) -> int: ...",
            "    @property",
            "    def doubtful_requests(self) -> int: ...",
            "",
        ]
    )


def alerts() -> str:
    """docs/reference/alerts.md."""
    lines = [
        "# Alerts",
        "",
        "Made by `make docs`; do not edit.",
        "",
        "`kvledger deploy rules DIR` writes them, with the recording rules, as one file for",
        "Prometheus's `rule_files`. Each alert's `description` holds the same text as below.",
    ]
    for rule in rules():
        if "alert" in rule:
            delay = "at once" if rule["for"] == "0m" else f"after {rule['for']}"
            lines += ["", f"## {rule['alert']}", ""]
            lines += [f"*{rule['labels']['severity']}*, {delay}, while `{rule['expr']}`.", ""]
            lines.append(rule["annotations"]["description"])
    lines += ["", "## Recorded series", "", "| series | expression |", "|---|---|"]
    for rule in rules():
        if "record" in rule:
            lines.append(f"| `{rule['record']}` | `{rule['expr'].replace('|', chr(92) + '|')}` |")
    return "\n".join(lines) + "\n"


NEXT = (
    "Read /findings of the sidecar and run `kvledger explain ID`; `kvledger show JOURNAL REQUEST` prints the "
    "account. docs/reference/detection.md lists which releases have which defect: upgrade, or turn off the "
    "feature it names. The alert ends 15 minutes after the last finding."
)


def with_violations(text: str) -> str:
    """The rule file, with the alerts of the violations that the catalogue has."""
    begin, end = "      # Violations, by kind: ", "      # Everything else."
    before, after = text.split(begin)
    first, rest = after.split("\n", 1)
    lines = [line for kind in KINDS for line in of_kind(kind)]
    return "\n".join([f"{before}{begin}{first}", *lines, end + rest.split(end)[1]])


def of_kind(kind: Kind) -> Iterator[str]:
    """The alert for violations of one kind of invariants, with its words and what stops the harm."""
    found = [row for row in registry.catalogue().values() if row.kind is kind and row.severity == "violation"]
    ids = "|".join(row.id for row in found)
    by_stop: dict[str, list[str]] = {}
    for row in found:
        by_stop.setdefault(row.stop_now, []).append(row.id)
    stops = [f"{', '.join(named)}: {stop}" for stop, named in by_stop.items() if stop]
    if len(by_stop) == 1:
        stops = [stop for stop in by_stop if stop]
    does = [f"What stops the harm now: {' '.join(stops)}"] if stops else []
    expr = f'time() - kvledger_last_violation_timestamp_seconds{{severity="violation", id=~"{ids}"}} < 900'
    yield f"      - alert: {kind.alert}"
    yield from folded("expr", expr, 8)
    yield "        for: 0m"
    yield from ("        labels:", "          severity: critical", "        annotations:")
    yield from folded("summary", f"{{{{ $labels.engine }}}} {kind.wrong}: {{{{ $labels.id }}}}", 10)
    yield from folded("description", " ".join([kind.means, *does, NEXT]), 10)


def folded(key: str, value: str, indent: int) -> Iterator[str]:
    """A text of YAML over several lines."""
    yield f"{' ' * indent}{key}: >-"
    for line in wrap(value, 116 - indent, break_long_words=False, break_on_hyphens=False):
        yield f"{' ' * indent}  {line}"


if __name__ == "__main__":
    for name, text in generated():
        (ROOT / name).write_text(text)
