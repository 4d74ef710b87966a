"""``kvledger doctor faults``: what is known of a release; and what ``kvledger explain`` says of a name."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import groupby
from typing import Any

import msgspec

from ...audit import glossary
from ...audit.checks import engine_metrics, registry
from ...audit.errors import LedgerError
from ...audit.faults.catalogue import (
    HARMS,
    Fault,
    Kind,
    KnownFault,
    KnownOfRelease,
    catalogue,
    checked,
    facts,
    level_of,
    of_all,
    of_release,
    shown_by,
)
from ...audit.release_semantics import CONTRACTS, Product
from ..answer import DIM, DOUBT, Answer, Lines, Records, Table, Words, counted, listed

KINDS: tuple[Kind, ...] = ("fault", "drift")
COLUMNS = ("release", *(field.name for field in msgspec.structs.fields(KnownFault)))


def faults(asked: Mapping[Product, str], installed: Mapping[str, str]) -> list[KnownOfRelease]:
    """What is known of these releases; of those installed if none is given, and of all if none is installed.

    Raises :class:`LedgerError` for a release that is none, or of which nothing is known.
    """
    if given := {product: version for product, version in asked.items() if version}:
        return [of_release(product, checked(product, version)) for product, version in given.items()]
    here = [of_release(product, installed[product]) for product in CONTRACTS if product in installed]
    return here or [of_all(product) for product in CONTRACTS]


def answer(known: Sequence[KnownOfRelease]) -> Answer:
    """Each release: how many faults it has, then each fault, the worst first.

    CSV has one line per release and fault; several findings or links stand in one cell, with blanks between.
    """
    rows = (
        (each.release, *map(_cell, msgspec.structs.astuple(row))) for each in known for row in each.faults
    )
    more = Words("kvledger explain ID prints one of them in full.", DIM)
    return Answer(
        known,
        [line for each in known for line in _sentences(each)],
        [
            *(part for each in known for part in _release(each)),
            Lines([more] if any(each.faults for each in known) else []),
        ],
        Records(COLUMNS, rows),
        lambda: [{"examined": each.is_examined, **msgspec.to_builtins(each)} for each in known],
    )


def _cell(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _release(known: KnownOfRelease) -> Iterator[Lines]:
    for harm, rows in groupby(known.of_kind("fault"), key=lambda row: row.harms):
        yield Lines([line for row in rows for line in _entry(row)], _capital(HARMS[harm]))
    drifts = [line for row in known.of_kind("drift") for line in _entry(row)]
    yield Lines(drifts, "Figures counted by a rule that misleads (drifts)")


def _sentences(known: KnownOfRelease) -> Iterator[str]:
    """``vLLM 0.18.1: 14 faults and 14 drifts known.``"""
    if not known.is_examined:
        yield Words(known.says, DOUBT)
        return
    counts = [counted(len(rows), kind) for kind in KINDS if (rows := known.of_kind(kind))]
    name = known.name if known.release else f"{known.name}, all releases"
    yield f"{name}: {listed(counts) if counts else 'no fault'} known."
    yield from [known.says] if known.says else []


def _entry(row: KnownFault) -> Iterator[str]:
    """One fault: what is wrong, under which conditions, in which releases, and what shows it."""
    maybe = " (may have it)" if row.state == "may have" else ""
    yield f"  {row.id}{maybe}: {row.title}"
    lines = (row.condition, f"{row.releases}; found by {_found(row)}", *row.links)
    yield from (f"    {line}" for line in lines if line)


def fault_sentence(row: KnownFault) -> str:
    """``failed-load-stays-cached: blocks stay in the cache, if a load fails. Not fixed in 0.33.0.``"""
    maybe = " may be there" if row.state == "may have" else ""
    condition = f", {row.condition}" if row.condition else ""
    until = f"Fixed in {row.fixed}" if row.fixed else f"Not fixed in {CONTRACTS[row.product].examined[-1]}"
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
        _wrapped(f"{_capital(fault.title)}."),
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


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 80, break_long_words=False, break_on_hyphens=False)


# --- explain --------------------------------------------------------------------------------------------


def explanation(name: str) -> str:
    """An invariant by its id, else a term by its name, else a known fault by its id, else an engine's figure.

    Raises :class:`LedgerError` for none of them.
    """
    if name in registry.catalogue():
        return "\n\n".join(filter(None, (registry.explain(name), behind(name))))
    term = glossary.term(name)
    if term is not None:
        return glossary.explain(term)
    fault = catalogue().get(name)
    if fault is not None:
        return explained(fault)
    figure = engine_metrics.named(name)
    if figure is not None:
        return engine_metrics.explain(figure)
    raise LedgerError(f"no invariant, term, fault or figure is called {name!r}{_suggestion(name)}")


def _suggestion(name: str) -> str:
    """The closest names; an alias suggests its term."""
    figures = [each for row in engine_metrics.engine_metrics().figures for each in row.names]
    names = [*registry.catalogue(), *glossary.spellings(), *catalogue(), *figures]
    close = get_close_matches(name.casefold(), names, n=5, cutoff=0.6)
    names = [row.name if (row := glossary.term(each)) else each for each in close]
    unique = list(dict.fromkeys(names))[:3]
    return f"; did you mean {', '.join(unique)}?" if unique else ""


def names() -> Answer:
    """Every term by section, every invariant with its promise, and the number of faults."""
    invariants = registry.catalogue()
    terms = [(section, ", ".join(row.name for row in rows)) for section, rows in glossary.SECTIONS.items()]
    return Answer(
        None,
        [
            f"{len(glossary.TERMS)} terms, {len(invariants)} invariants and {len(catalogue())} known faults "
            "have an explanation: kvledger explain NAME prints one. kvledger doctor faults lists the faults."
        ],
        [
            Table(terms, ("", ""), "Terms"),
            Table([(row.id, _promise(row)) for row in invariants.values()], ("", ""), "Invariants"),
        ],
    )


def _promise(row: registry.Invariant) -> str:
    promise = " ".join(row.must_hold.replace("``", "").split())
    return promise if row.severity == "violation" else f"{promise} (drift)"
