"""``kvledger doctor faults``: what is known of a release; and what ``explain`` says of one fault."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from ...audit.faults.catalogue import HARMS, Fault, Kind, shown_by
from ...audit.faults.listing import KnownFault, KnownOfRelease, of_all, of_release
from ...audit.faults.releases import EXAMINED, Product, checked
from ...audit.faults.texts import facts, level_of
from ..csv_cells import csv_of
from .terminal import blocks, counted, indented, listed, title

KINDS: tuple[Kind, ...] = ("fault", "drift")
PRODUCTS: tuple[Product, ...] = ("vllm", "lmcache")
COLUMNS = ("release", *(field.name for field in msgspec.structs.fields(KnownFault)))


def faults(vllm: str, lmcache: str, installed: Mapping[str, str]) -> list[KnownOfRelease]:
    """What is known of these releases; of those installed if none is given, and of all if none is installed.

    Raises :class:`LedgerError` for a release that is none, or of which nothing is known.
    """
    asked = zip(PRODUCTS, (vllm, lmcache), strict=True)
    given = {product: version for product, version in asked if version}
    if given:
        return [of_release(product, checked(product, version)) for product, version in given.items()]
    here = [of_release(product, installed[product]) for product in PRODUCTS if product in installed]
    return here or [of_all(product) for product in PRODUCTS]


def as_data(known: Sequence[KnownOfRelease]) -> list[dict[str, Any]]:
    """Every release and its faults, for JSON. ``examined`` is false where nothing is known."""
    return [{"examined": each.is_examined, **msgspec.to_builtins(each)} for each in known]


def as_csv(known: Sequence[KnownOfRelease]) -> str:
    """One line per release and fault; several findings or links stand in one cell, with blanks between."""
    rows = [
        (each.release, *map(_cell, msgspec.structs.astuple(row))) for each in known for row in each.faults
    ]
    return csv_of(COLUMNS, rows)


def _cell(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def render(known: Sequence[KnownOfRelease]) -> Group:
    """Each release: how many faults it has, then each fault, the worst first."""
    parts: list[RenderableType] = [part for each in known for part in _release(each)]
    if any(each.faults for each in known):
        parts.append(Text("kvledger explain ID prints one of them in full.", style="dim"))
    return blocks(*parts)


def _release(known: KnownOfRelease) -> Iterator[RenderableType]:
    if not known.is_examined:
        yield Text(known.says, style="bold yellow")
        return
    wrong, drifts = known.of_kind("fault"), known.of_kind("drift")
    yield Group(Text(_answer(known), style="bold"), *([Text(known.says)] if known.says else []))
    for harm, rows in groupby(wrong, key=lambda row: row.harms):
        yield Group(_heading(HARMS[harm]), *map(entry, rows))
    if drifts:
        yield Group(_heading("figures counted by a rule that misleads (drifts)"), *map(entry, drifts))


def _answer(known: KnownOfRelease) -> str:
    """``vLLM 0.18.1: 14 faults and 14 drifts known.``"""
    counts = [counted(len(rows), kind) for kind in KINDS if (rows := known.of_kind(kind))]
    name = known.name if known.release else f"{known.name}, all releases"
    return f"{name}: {listed(counts) if counts else 'no fault'} known."


def _heading(text: str) -> Text:
    return title(text[:1].upper() + text[1:])


def entry(row: KnownFault) -> RenderableType:
    """One fault: what is wrong, under which conditions, in which releases, and what shows it."""
    maybe = " (may have it)" if row.state == "may have" else ""
    head = Text.assemble((row.id, "bold"), f"{maybe}: {row.title}")
    lines = [row.condition, f"{row.releases}; found by {_found(row)}", *row.links]
    return Group(indented(head), *(indented(Text(line, overflow="fold"), 4) for line in lines if line))


def fault_sentence(row: KnownFault) -> str:
    """``failed-load-stays-cached: blocks stay in the cache, if a load fails. Not fixed in 0.33.0.``"""
    maybe = " may be there" if row.state == "may have" else ""
    condition = f", {row.condition}" if row.condition else ""
    until = f"Fixed in {row.fixed}" if row.fixed else f"Not fixed in {EXAMINED[row.product][-1]}"
    return f"{row.id}{maybe}: {row.title}{condition}. {until}."


def _found(row: KnownFault) -> str:
    """The invariants that find it, with the level that they need."""
    needs = [(each, level_of(each)) for each in row.findings]
    words = [each if level == "tokens" else f"{each} (level {level})" for each, level in needs]
    return ", ".join(words) or "no invariant"


# --- one fault in full, and those behind a finding ----------------------------------------------------------


def explained(fault: Fault) -> str:
    """One fault, for a terminal."""
    parts = [
        f"{fault.id} ({fault.kind} of {fault.project})",
        _wrapped(_sentence(fault.title)),
        _wrapped(fault.text),
    ]
    known = [textwrap.fill(f"{name}: {text}", 80, **_HANGING) for name, text in facts(fault)]
    return "\n\n".join([*parts, "\n".join([*known, *_upstream(fault)])])


def behind(finding: str) -> str:
    """The known faults that an invariant finds, for a terminal; empty if there is none."""
    rows = [
        textwrap.fill(
            f"{fault.id}: {fault.title}. {fault.project} {fault.span}.",
            80,
            initial_indent="  ",
            **_HANGING,
        )
        for fault in shown_by(finding)
    ]
    return "\n".join(["Known faults that it finds:", *rows]) if rows else ""


_HANGING: dict[str, Any] = {"subsequent_indent": "    ", "break_long_words": False, "break_on_hyphens": False}


def _upstream(fault: Fault) -> Iterator[str]:
    if fault.links:
        yield "Upstream:"
        yield from (f"  {name}  {url}" for name, url in fault.named_links)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 80, break_long_words=False, break_on_hyphens=False)
