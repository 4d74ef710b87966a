"""A diagnosis for a person at a terminal, drawn with rich; ``as_data`` is the same for a machine."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...audit.entry.doctor import Diagnosis
from .audit import csv_of


def as_data(found: Diagnosis) -> dict[str, Any]:
    """All of it, as JSON would have it."""
    data: dict[str, Any] = {"observed": found.observed, **msgspec.to_builtins(found)}
    return data


def as_csv(found: Diagnosis) -> str:
    """A line a thing that it says: topic, name, what is said."""
    rows: list[tuple[str, str, str]] = [("observed", "", str(found.observed).lower())]
    for topic, said in msgspec.to_builtins(found).items():
        if isinstance(said, dict):
            rows += [(topic, name, str(value or "")) for name, value in said.items()]
        elif isinstance(said, list):
            rows += [(topic, *_pair(one)) for one in said]
        else:
            rows.append((topic, "", str(said or "")))
    return csv_of(("topic", "name", "says"), rows)


def _pair(one: Any) -> tuple[str, str]:
    return (str(one["figure"]), str(one["says"])) if isinstance(one, dict) else (str(one), "")


def diagnosis(found: Diagnosis) -> Group:
    """What is installed, what fits it, what can be checked, what stands in the way."""
    parts: list[RenderableType] = [_facts(found)]
    if found.meanings:
        parts.append(
            _named(
                "What the figures mean in this release", [(row.figure, row.says) for row in found.meanings]
            )
        )
    if found.checked_in_part:
        parts.append(_named("Checked in part", list(found.checked_in_part.items())))
    if found.not_checked:
        parts.append(_named("Not checked", list(found.not_checked.items())))
    if found.connectors:
        parts.append(_named("Read of a connector's plans and books", list(found.connectors.items())))
    parts.append(_verdict(found))
    return Group(*parts)


def _facts(found: Diagnosis) -> Table:
    versions = ", ".join(f"{name} {number}" for name, number in found.versions.items() if number)
    absent = ", ".join(name for name, number in found.versions.items() if not number)
    hooks = f"{len(found.hooks)} fit"
    if found.missing_hooks:
        hooks += f"; not in this release: {', '.join(found.missing_hooks)}"
    rows = [
        ("installed", versions or "nothing"),
        ("absent", absent),
        ("adapter", found.adapter or "none"),
        ("hooks", hooks if found.adapter else ""),
        ("invariants", f"{len(found.checked)} can be checked" if found.adapter else ""),
        ("plugin", found.plugin or "not installed"),
        ("KVLEDGER_DIR", found.directory or "not set"),
    ]
    return _table([row for row in rows if row[1]])


def _named(title: str, rows: list[tuple[str, str]]) -> Group:
    return Group("", Text(title, style="bold"), Padding(_table(rows), (0, 0, 0, 2)))


def _table(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def _verdict(found: Diagnosis) -> Group:
    if found.observed:
        return Group("", Text("An engine started here would be observed.", style="bold green"))
    reasons = [Text(f"- {problem}") for problem in found.problems]
    return Group("", Text("An engine started here would not be observed:", style="bold red"), *reasons)
