"""The answer of ``kvledger doctor``: whether an engine here would be observed, and why; and known faults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from ...audit.entry.doctor import ContentsDiagnosis, Diagnosis
from ...audit.faults.catalogue import KnownOfRelease
from ..answer import BAD, DIM, DOUBT, GOOD, Answer, Lines, Part, Records, Table, Words, counted
from .faults import fault_sentence


def answer(diagnosis: Diagnosis, *, verbose: bool = False) -> Answer:
    """Whether an engine here would be observed, the facts behind that, and known faults.

    ``verbose`` adds what figures mean and what is not checked.
    """
    parts: list[Part] = [Table(facts(diagnosis), "=state | =name | =text")]
    parts += [_known(each, diagnosis) for each in diagnosis.faults.releases]
    if verbose:
        sections = {
            "What the engine's figures mean in this release": {
                row.figure: row.says for row in diagnosis.meanings
            },
            "Invariants checked in part": diagnosis.checked_in_part,
            "Invariants not checked": diagnosis.not_checked,
            "What is read of each connector's metadata": diagnosis.connectors,
            "What level content checks": _contents_rows(diagnosis.contents),
        }
        parts += [Table(list(rows.items()), ("", ""), heading) for heading, rows in sections.items()]
    elif diagnosis.adapter:
        more = "-v lists what the figures mean, what is not checked, and connectors."
        parts.append(Lines([Words(more, DIM)]))
    if diagnosis.observed:
        sentences = [Words("An engine started here would be observed.", GOOD)]
    else:
        sentences = [Words("An engine started here would not be observed:", BAD)]
    return Answer(
        diagnosis,
        [*sentences, *(f"- {problem}" for problem in diagnosis.problems)],
        parts,
        Records(("topic", "name", "says"), _records(diagnosis)),
        lambda: {"observed": diagnosis.observed, **msgspec.to_builtins(diagnosis)},
        0 if diagnosis.observed else 1,
    )


def _records(diagnosis: Diagnosis) -> Iterator[tuple[str, str, str]]:
    """One line per fact: topic, name, and what the diagnosis says of it."""
    yield "observed", "", str(diagnosis.observed).lower()
    for release in diagnosis.faults.releases:
        for row in release.faults:
            yield "faults", row.id, f"{row.title} {row.condition}".rstrip()
    for topic, value in msgspec.to_builtins(diagnosis).items():
        if topic == "faults":
            continue
        if isinstance(value, dict):
            yield from ((topic, name, _joined(text)) for name, text in value.items())
        elif isinstance(value, list):
            yield from ((topic, *_name_and_text(each)) for each in value)
        else:
            yield topic, "", str(value or "")


def _joined(value: Any) -> str:
    """A value of a nested topic in one cell."""
    if isinstance(value, dict):
        value = [f"{name}: {text}" for name, text in value.items()]
    return "; ".join(value) if isinstance(value, list) else str(value or "")


def _name_and_text(value: Any) -> tuple[str, str]:
    return (str(value["figure"]), str(value["says"])) if isinstance(value, dict) else (str(value), "")


def _known(known: KnownOfRelease, diagnosis: Diagnosis) -> Lines:
    """The faults of one installed release that can concern an engine here."""
    if not known.is_examined:
        return Lines([Words(known.says, DOUBT)])
    rows, drifts = known.of_kind("fault"), len(known.of_kind("drift"))
    journal = diagnosis.faults.journal
    settings = f"settings of {journal}" if journal else "its settings are not known"
    head = f"{known.name}: {counted(len(rows), 'known fault')} can concern an engine here ({settings})."
    more = f"kvledger doctor faults has their links, and {counted(drifts, 'drift')} of figures."
    lines = [*([known.says] if known.says else []), *(f"- {fault_sentence(row)}" for row in rows)]
    return Lines([*lines, Words(more, DIM)], head)


class Fact(NamedTuple):
    """One line about this environment: whether it is right, in part, or missing."""

    state: str
    name: str
    text: str


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
