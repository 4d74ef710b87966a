"""What ``kvledger explain`` prints: an invariant, a term of the glossary or a known fault, or their list."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...audit import glossary
from ...audit.checks import registry
from ...audit.errors import LedgerError
from ...audit.faults.catalogue import catalogue
from . import faults
from .terminal import indented, plain_table, title


def explanation(name: str) -> str:
    """An invariant by its id, else a term by its name, else a known fault by its id.

    Raises :class:`LedgerError` for none of them.
    """
    if name in registry.catalogue():
        return "\n\n".join(filter(None, (registry.explain(name), faults.behind(name))))
    term = glossary.term(name)
    if term is not None:
        return glossary.explain(term)
    fault = catalogue().get(name)
    if fault is not None:
        return faults.explained(fault)
    raise LedgerError(f"no invariant, term or fault is called {name!r}{_suggestion(name)}")


def _suggestion(name: str) -> str:
    """The closest names; an alias suggests its term."""
    names = [*registry.catalogue(), *glossary.spellings(), *catalogue()]
    close = get_close_matches(name.casefold(), names, n=5, cutoff=0.6)
    names = [row.name if (row := glossary.term(each)) else each for each in close]
    unique = list(dict.fromkeys(names))[:3]
    return f"; did you mean {', '.join(unique)}?" if unique else ""


def listing() -> Group:
    """Every term by section, every invariant with its promise, and the number of faults."""
    invariants = registry.catalogue()
    terms = _table((section, _names(rows)) for section, rows in glossary.SECTIONS.items())
    promises = _table((row.id, _promise(row)) for row in invariants.values())
    return Group(
        Text(
            f"kvledger explain NAME prints one of these {len(glossary.TERMS)} terms and "
            f"{len(invariants)} invariants in full, and any fault that kvledger doctor faults lists."
        ),
        Text(),
        title("Terms"),
        indented(terms),
        Text(),
        title("Invariants"),
        indented(promises),
    )


def _names(rows: tuple[glossary.Term, ...]) -> str:
    return ", ".join(row.name for row in rows)


def _promise(row: registry.Invariant) -> str:
    promise = " ".join(row.must_hold.replace("``", "").split())
    return promise if row.severity == "violation" else f"{promise} (drift)"


def _table(rows: Iterable[tuple[str, str]]) -> Table:
    table = plain_table()
    for name, text in rows:
        table.add_row(Text(name, style="bold"), Text(text))
    return table
