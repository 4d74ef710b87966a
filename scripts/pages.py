"""Writes what is generated from the code's own tables: `make docs`. A test fails when a file is stale.

Not here: pages that hold what a run found, such as docs/performance.md. The run writes those.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvledger.audit import glossary
from kvledger.audit.checks import figures_page, registry
from kvledger.audit.faults import release_rules
from kvledger.dashboards import boards, rules
from kvledger.exporters.metrics import metric_list
from kvledger.exporters.trace import columns

ROOT = Path(__file__).resolve().parents[1]


def generated() -> Iterator[tuple[str, str]]:
    """Each generated file, relative to the repository, and the text that it must have."""
    yield "docs/invariants.md", registry.markdown()
    yield "docs/reconciliation.md", figures_page.replaced((ROOT / "docs/reconciliation.md").read_text())
    yield "docs/differences.md", release_rules.replaced((ROOT / "docs/differences.md").read_text())
    yield "docs/glossary.md", glossary.markdown()
    yield "docs/metrics.md", metric_list.markdown()
    yield "docs/tables.md", columns.markdown()
    yield "docs/alerts.md", rules.markdown()
    yield f"dashboards/generated/{rules.FILE}", rules.text()
    for form in boards.FORMS:
        for name, text in boards.files(form):
            yield f"dashboards/generated/{form}/{name}", text


if __name__ == "__main__":
    for name, text in generated():
        (ROOT / name).write_text(text)
