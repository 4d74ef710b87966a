"""What must hold: the invariants, how a broken one is told, and the pages made from them.

An invariant is a small pure function, entry in, witnesses out. Its docstring is its definition: the
first paragraph is the promise, the rest says when it is broken. Evidence (:class:`Witness`) is
figures; words are rendered apart, from the template beside the check.

The checks live in ``invariants/``; this module never names them but to fill itself when asked.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import Literal, NamedTuple

import msgspec

from ..errors import LedgerError
from ..ledger.subjects import Entry

Severity = Literal["violation", "drift"]
"""``violation``: the engine is wrong. ``drift``: it counts by a rule that misleads, knowingly."""


class Reference(NamedTuple):
    """An upstream issue or pull request in which this was seen."""

    name: str
    url: str


def _vllm(number: int, kind: str = "issues") -> Reference:
    return Reference(f"vLLM#{number}", f"https://github.com/vllm-project/vllm/{kind}/{number}")


def _lmcache(number: int, kind: str = "issues") -> Reference:
    return Reference(f"LMCache#{number}", f"https://github.com/LMCache/LMCache/{kind}/{number}")


# GitHub leads from /issues/ to /pull/ where a number is a pull request.
VLLM_18955 = _vllm(18955)
VLLM_18957 = _vllm(18957, "pull")
VLLM_25780 = _vllm(25780)
VLLM_26813 = _vllm(26813)
VLLM_28585 = _vllm(28585)
VLLM_30522 = _vllm(30522)
VLLM_33775 = _vllm(33775)
VLLM_34079 = _vllm(34079)
VLLM_36533 = _vllm(36533)
VLLM_36638 = _vllm(36638)
VLLM_36752 = _vllm(36752, "pull")
VLLM_36755 = _vllm(36755)
VLLM_36812 = _vllm(36812)
VLLM_37076 = _vllm(37076)
VLLM_37460 = _vllm(37460, "pull")
VLLM_39146 = _vllm(39146)
VLLM_42571 = _vllm(42571)
VLLM_42903 = _vllm(42903)
VLLM_43736 = _vllm(43736)
VLLM_43884 = _vllm(43884)
VLLM_44409 = _vllm(44409, "pull")
VLLM_48245 = _vllm(48245)
VLLM_49250 = _vllm(49250)
VLLM_57562 = _vllm(57562)
LMCACHE_1361 = _lmcache(1361, "pull")
LMCACHE_1969 = _lmcache(1969)
LMCACHE_2007 = _lmcache(2007)
LMCACHE_2158 = _lmcache(2158)
LMCACHE_2821 = _lmcache(2821, "pull")
LMCACHE_2912 = _lmcache(2912)
LMCACHE_2929 = _lmcache(2929)
LMCACHE_3269 = _lmcache(3269)


Figure = int | str | list[int]
"""A count, a word, or ids."""


class Witness:
    """That an invariant was broken: the figures, and other words than the usual where needed.

    ``story`` tells a person how it came to be, a line each: both sides of a collision.
    """

    __slots__ = ("figures", "says", "story")

    def __init__(self, says: str | None = None, story: Sequence[str] = (), /, **figures: Figure) -> None:
        self.says = says
        self.story = story
        self.figures = figures


Check = Callable[[Entry], Iterator[Witness]]


class Invariant(msgspec.Struct, frozen=True):
    """One thing that must hold. ``says`` is the sentence, with the witness's figures in braces."""

    id: str
    severity: Severity
    on: tuple[type, ...]
    says: str
    references: tuple[Reference, ...]
    near_misses: tuple[str, ...]
    promise: str
    violated_when: str
    check: Check

    @property
    def family(self) -> str:
        """What stands before the slash."""
        return self.id.partition("/")[0]

    def render(self, witness: Witness, request: str | None) -> str:
        """The witness as one sentence."""
        return (witness.says or self.says).format(request=request, **witness.figures)


class Violation(msgspec.Struct, frozen=True):
    """A broken invariant: what, where, since when, and with which figures.

    ``request`` and ``life`` are None where no single request is concerned. ``step`` and ``at``
    (microseconds since the engine started) are of its first sight; ``repeats`` counts later sights
    of the same invariant and request, the last of them at ``last_step``.
    """

    id: str
    severity: Severity
    engine: str
    request: str | None
    life: int | None
    step: int
    at: int
    message: str
    figures: dict[str, Figure]
    references: list[Reference]
    repeats: int
    last_step: int
    story: list[str] = []


FAMILIES = ("tokens", "blocks", "connector", "metrics", "content")
"""The families of invariants, as the page orders them."""

CATALOGUE: dict[str, Invariant] = {}
"""Every invariant by its id, in the order of definition; see :func:`catalogue`."""


def invariant(
    id: str,
    *,
    on: tuple[type, ...],
    says: str,
    severity: Severity = "violation",
    references: tuple[Reference, ...] = (),
    near_misses: tuple[str, ...] = (),
) -> Callable[[Check], Check]:
    """Put a check into the catalogue; it sees entries whose subject is exactly one of ``on``."""

    def register(check: Check) -> Check:
        assert id not in CATALOGUE, f"two invariants are called {id}"
        promise, _, rest = inspect.cleandoc(check.__doc__ or "").partition("\n\n")
        assert id.partition("/")[0] in FAMILIES, f"{id} is of no family"
        CATALOGUE[id] = Invariant(
            id=id,
            severity=severity,
            on=on,
            says=says,
            references=references,
            near_misses=near_misses,
            promise=promise,
            violated_when=rest.strip(),
            check=check,
        )
        return check

    return register


def catalogue() -> dict[str, Invariant]:
    """The catalogue with every family in it."""
    # By name: the catalogue stands left of its checks, and only its readers need them all.
    importlib.import_module("kvledger.audit.checks")
    return CATALOGUE


# --- pages ---------------------------------------------------------------------------------------


def explain(id: str) -> str:
    """What an invariant promises and when it is broken, for a terminal; LedgerError if unknown."""
    known = catalogue()
    found = known.get(id)
    if found is None:
        close = get_close_matches(id, known, n=3, cutoff=0.4)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise LedgerError(f"no invariant is called {id!r}{hint}")
    parts = [f"{found.id} ({found.severity})", *_wrapped(found.promise)]
    parts += _wrapped(found.violated_when)
    if found.near_misses:
        parts.append("What looks like it and is not:")
        parts[-1] += "".join(f"\n{_bullet(miss)}" for miss in found.near_misses)
    if found.references:
        parts.append("Seen in:")
        parts[-1] += "".join(f"\n  {name}  {url}" for name, url in found.references)
    return "\n\n".join(parts)


def _wrapped(text: str) -> list[str]:
    """The paragraphs of ``text``, for a terminal."""
    plain = text.replace("``", "")
    return [textwrap.fill(" ".join(p.split()), 80) for p in plain.split("\n\n") if p.strip()]


def _bullet(text: str) -> str:
    return textwrap.fill(text, 80, initial_indent="  - ", subsequent_indent="    ")


def markdown() -> str:
    """docs/invariants.md: the whole catalogue, by family."""
    lines = [
        "# What must hold",
        "",
        "Made by `python -m kvledger.audit.checks.registry`; do not edit.",
        "",
        "A *violation* means that the engine is wrong. A *drift* means that it counts by a rule of",
        "its own that misleads; it never makes a verdict. Accounts touched by lost events are not",
        "judged.",
    ]
    family = ""
    for row in sorted(catalogue().values(), key=_family):
        if row.family != family:
            family = row.family
            lines += ["", f"## {family.capitalize()}"]
        lines += ["", f"### `{row.id}`", "", f"*{row.severity}.* {_flowed(row.promise)}"]
        if row.violated_when:
            lines += ["", _flowed(row.violated_when)]
        if row.near_misses:
            lines += ["", "What looks like it and is not:", ""]
            lines += [f"- {miss}" for miss in row.near_misses]
        if row.references:
            named = ", ".join(f"[{name}]({url})" for name, url in row.references)
            lines += ["", f"Seen in {named}."]
    return "\n".join(lines) + "\n"


def _family(row: Invariant) -> int:
    return FAMILIES.index(row.family)


def _flowed(text: str) -> str:
    """One line a paragraph."""
    paragraphs = (" ".join(p.split()) for p in text.replace("``", "`").split("\n\n"))
    return "\n\n".join(paragraphs)


def main() -> None:
    """Print docs/invariants.md."""
    print(markdown(), end="")


if __name__ == "__main__":
    # Run as a script this module is __main__, and the checks fill the one that is imported.
    importlib.import_module("kvledger.audit.checks.registry").main()
