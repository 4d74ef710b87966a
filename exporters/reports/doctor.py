"""What ``kvledger doctor`` prints: known faults, whether an engine here would be observed, and why."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...audit.entry.doctor import ContentsDiagnosis, Diagnosis
from ...audit.faults.listing import KnownOfRelease
from ..csv_cells import csv_of
from .faults import fault_sentence
from .terminal import blocks, bullets, counted, indented, title


def as_data(diagnosis: Diagnosis) -> dict[str, Any]:
    """The whole diagnosis, for JSON."""
    data: dict[str, Any] = {"observed": diagnosis.observed, **msgspec.to_builtins(diagnosis)}
    return data


def as_csv(diagnosis: Diagnosis) -> str:
    """One line per fact: topic, name, and what the diagnosis says of it."""
    rows: list[tuple[str, str, str]] = [("observed", "", str(diagnosis.observed).lower())]
    known = [row for release in diagnosis.faults.releases for row in release.faults]
    rows += [("faults", row.id, f"{row.title} {row.condition}".rstrip()) for row in known]
    for topic, value in msgspec.to_builtins(diagnosis).items():
        if topic == "faults":
            continue
        if isinstance(value, dict):
            rows += [(topic, name, _joined(text)) for name, text in value.items()]
        elif isinstance(value, list):
            rows += [(topic, *_name_and_text(each)) for each in value]
        else:
            rows.append((topic, "", str(value or "")))
    return csv_of(("topic", "name", "says"), rows)


def _joined(value: Any) -> str:
    """A value of a nested topic in one cell."""
    if isinstance(value, dict):
        value = [f"{name}: {text}" for name, text in value.items()]
    return "; ".join(value) if isinstance(value, list) else str(value or "")


def _name_and_text(value: Any) -> tuple[str, str]:
    return (str(value["figure"]), str(value["says"])) if isinstance(value, dict) else (str(value), "")


def render(diagnosis: Diagnosis, *, verbose: bool = False) -> Group:
    """Known faults, the answer, and the facts behind it.

    ``verbose`` adds what figures mean and what is not checked.
    """
    known: list[RenderableType | None] = [_known(each, diagnosis) for each in diagnosis.faults.releases]
    parts = [*known, _answer(diagnosis), _facts(diagnosis)]
    if verbose:
        meanings = {row.figure: row.says for row in diagnosis.meanings}
        parts += [
            _section("What the engine's figures mean in this release", meanings),
            _section("Invariants checked in part", diagnosis.checked_in_part),
            _section("Invariants not checked", diagnosis.not_checked),
            _section("What is read of each connector's metadata", diagnosis.connectors),
            _section("What level content checks", _contents_rows(diagnosis.contents)),
        ]
    elif diagnosis.adapter:
        parts.append(
            Text("-v lists what the figures mean, what is not checked, and connectors.", style="dim")
        )
    return blocks(*parts)


def _known(known: KnownOfRelease, diagnosis: Diagnosis) -> Group:
    """The faults of one installed release that can concern an engine here."""
    if not known.is_examined:
        return Group(Text(known.says, style="bold yellow"))
    rows, drifts = known.of_kind("fault"), len(known.of_kind("drift"))
    journal = diagnosis.faults.journal
    settings = f"settings of {journal}" if journal else "its settings are not known"
    head = f"{known.name}: {counted(len(rows), 'known fault')} can concern an engine here ({settings})."
    more = f"kvledger doctor faults has their links, and {counted(drifts, 'drift')} of figures."
    lines = [head, known.says] if known.says else [head]
    return Group(
        *(Text(line, style="bold" if line is head else "") for line in lines),
        *(bullet for row in rows for bullet in bullets([fault_sentence(row)])),
        Text(more, style="dim"),
    )


def _answer(diagnosis: Diagnosis) -> Group:
    if diagnosis.observed:
        return Group(Text("An engine started here would be observed.", style="bold green"))
    reasons = [Text(f"- {problem}", overflow="fold") for problem in diagnosis.problems]
    return Group(Text("An engine started here would not be observed:", style="bold red"), *reasons)


class Fact(NamedTuple):
    """One line about this environment: whether it is right, in part, or missing."""

    state: str
    name: str
    text: str


STYLES = {"ok": "green", "partly": "yellow", "missing": "red", "": ""}


def facts(diagnosis: Diagnosis) -> list[Fact]:
    """The facts behind the answer."""
    found = diagnosis.adapter is not None
    version = diagnosis.versions.get("vllm")
    rows = [Fact("ok" if found else "missing", "vLLM", _vllm(version, diagnosis))]
    if found:
        hooks = f"{len(diagnosis.hooks)} fit"
        if diagnosis.missing_hooks:
            hooks += f"; not in this release: {', '.join(diagnosis.missing_hooks)}"
        limited = diagnosis.not_checked or diagnosis.checked_in_part
        rows += [
            Fact("ok", "hooks", hooks),
            Fact("partly" if limited else "ok", "invariants", _invariants(diagnosis)),
        ]
    has_problem = {name: any(name in each for each in diagnosis.problems) for name in _SETTINGS}
    plugin_ok = diagnosis.plugin is not None and not has_problem["VLLM_PLUGINS"]
    folder_ok = diagnosis.directory is not None and not has_problem["KVLEDGER_DIR"]
    rows += [
        Fact("ok" if plugin_ok else "missing", "plugin", diagnosis.plugin or "not installed"),
        Fact("ok" if folder_ok else "missing", "KVLEDGER_DIR", diagnosis.directory or "not set"),
    ]
    if diagnosis.contents is not None:
        rows.append(_contents_fact(diagnosis.contents))
    others = {name: number for name, number in diagnosis.versions.items() if name != "vllm"}
    installed = [f"{name} {number}" if number else f"no {name}" for name, number in others.items()]
    return [*rows, Fact("", "also", ", ".join(installed))]


def _contents_fact(found: ContentsDiagnosis) -> Fact:
    """What level ``content`` would check here, and what it checked in the newest journal."""
    if found.problem:
        return Fact("missing", "contents", f"level content checks nothing: {found.problem}")
    count = len(found.checked)
    kinds = (
        f"places of blocks from {found.places}; {count} {'kind' if count == 1 else 'kinds'} of KV caches "
        "can be checked"
    )
    if found.not_checked:
        kinds += f", {len(found.not_checked)} can't be"
    if found.journal:
        kinds += f"; in {found.journal}: {_seen(found)}"
    return Fact("partly" if found.excluded else "ok", "contents", kinds)


def _contents_rows(found: ContentsDiagnosis | None) -> dict[str, str]:
    """Each kind of KV cache, and each group of the newest journal."""
    if found is None or found.problem:
        return {}
    rows = dict.fromkeys(found.checked, "checked") | {
        name: f"not checked: {why}" for name, why in found.not_checked.items()
    }
    rows["fingerprints"] = found.form
    if found.journal:
        rows[found.journal] = _seen(found)
    return rows


def _seen(found: ContentsDiagnosis) -> str:
    """What was checked in the newest journal, and what not."""
    recomputed = [found.recomputed] if found.recomputed else []
    return "; ".join([*(found.groups or ["no group"]), *found.excluded, *recomputed])


_SETTINGS = ("KVLEDGER_DIR", "VLLM_PLUGINS")
_HOW = {"source": "source files read, not imported", "import": "imported"}


def _vllm(version: str | None, diagnosis: Diagnosis) -> str:
    if version is None:
        return "not installed"
    adapter = f"adapter {diagnosis.adapter}" if diagnosis.adapter else "no adapter fits"
    return f"{version}, {adapter} ({_HOW[diagnosis.examined]})"


def _facts(diagnosis: Diagnosis) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for state, name, text in facts(diagnosis):
        table.add_row(Text(state, style=STYLES[state]), Text(name), Text(text))
    return table


def _invariants(diagnosis: Diagnosis) -> str:
    limits = [
        f"{len(names)} {how}"
        for names, how in (
            (diagnosis.checked_in_part, "of them in part"),
            (diagnosis.not_checked, "can't be"),
        )
        if names
    ]
    return ", ".join([f"{len(diagnosis.checked)} can be checked", *limits])


def _section(heading: str, rows: dict[str, str]) -> Group | None:
    return Group(title(heading), indented(_table(rows))) if rows else None


def _table(rows: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    return table
