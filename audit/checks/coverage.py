"""What an audit examined, and what it could not: by the level of its journal, its release and its settings.

:func:`verdict_words` and :func:`count_words` make the words of every verdict that is printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ..events import EngineStarted
from ..ledger.ledger import Ledger
from ..release_semantics import contract, limits, meanings
from .auditor import Found
from .registry import ENCODER, EVENTS, FAMILIES, KINDS, LOADS, WEIGHTS, Invariant, Kind, catalogue

LEVELS = ("tokens", "blocks", "content")
"""The levels of observation; each has what the level before has."""

IN_PART = " in part"

OUT_OF_REACH = " (not for this engine)"
"""Of a kind of invariants that need a level at which an engine can't be observed."""

SAME_PREFIX = "blocks/same-prefix"

_OPAQUE = {
    "connector/promise-not-loaded": "the connector's metadata can't be read: only asynchronous loads that a "
    "request did not wait for are checked"
}


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """What was examined in one engine, or in all of several.

    ``examined`` and ``not_examined`` are kinds of invariants; one that was examined in part, or in some of
    the engines, says so. ``unchecked`` and ``in_part``: invariants of the examined kinds that could not be
    checked, or only in part, each with the reason.
    """

    levels: list[str] = []
    examined: list[str] = []
    not_examined: list[str] = []
    unchecked: dict[str, str] = {}
    in_part: dict[str, str] = {}

    @property
    def words(self) -> str:
        """``at level tokens: counts; not examined: ownership, block contents``; "" if nothing is known."""
        if not self.levels:
            return ""
        at = f"at level{'s' if len(self.levels) > 1 else ''} {' and '.join(self.levels)}"
        missing = f"; not examined: {', '.join(self.not_examined)}" if self.not_examined else ""
        return f"{at}: {', '.join(self.examined)}{missing}"

    @property
    def limits(self) -> str:
        """Which invariants could not be checked, and which level examines more; "" if all was examined."""
        parts = [
            f"{len(rows)} {'invariant' if len(rows) == 1 else 'invariants'} {how}"
            for rows, how in ((self.unchecked, "can't be checked"), (self.in_part, "only in part"))
            if rows
        ]
        limited = [f"In this release and with these settings {', and '.join(parts)}."] if parts else []
        higher = [
            f"KVLEDGER_LEVEL={kind.level} examines {kind.examines}"
            for kind in KINDS
            if any(name.startswith(kind.examines) and OUT_OF_REACH not in name for name in self.not_examined)
            and kind.level not in self.levels
        ]
        return " ".join([*limited, *([f"{', '.join(higher)}."] if higher else [])])


def coverage(
    engine: EngineStarted | None,
    excluded: Iterable[str] = (),
    *,
    weights_changed: bool = False,
    unknown_prefixes: int = 0,
) -> Coverage:
    """What is examined of an engine that describes itself so; nothing of one that nobody saw start.

    ``excluded``: why the contents of some blocks are not checked, a sentence each. ``weights_changed``: while
    they do not, all KV is of one version, and nothing is said about it. ``unknown_prefixes``: how many hit
    blocks could not be compared with the reader's prefix.
    """
    if engine is None or engine.level not in LEVELS:
        return Coverage()
    settings = engine.configuration
    unchecked, in_part = limits(meanings(engine.version, engine.adapter, engine.engine))
    if settings.get("plan") == "opaque" and settings.get("connector"):
        in_part = _OPAQUE | in_part
    if settings.get("prefixes") != "compared":
        unchecked = unchecked | {SAME_PREFIX: "hit blocks were not compared with the reader's prefix"}
    elif unknown_prefixes:
        in_part = in_part | {SAME_PREFIX: f"the prefix of {unknown_prefixes:,} hit blocks is not known"}
    level = LEVELS.index(engine.level)
    absent = {
        LOADS: not settings.get("connector"),
        EVENTS: "kv_events_port" not in settings,
        WEIGHTS: not weights_changed,
        ENCODER: settings.get("encoder_cache") is None,
    }
    kinds = [kind for kind in KINDS if not absent.get(kind)]
    seen = [kind for kind in kinds if LEVELS.index(kind.level) <= level]
    parts = {FAMILIES["content"]} if any(excluded) else set[Kind]()
    rows = [row for row in catalogue().values() if row.kind in seen]
    limited = [row for row in rows if row.id in unchecked or row.id in in_part]
    parts |= {row.kind for row in limited if row.severity == "violation"}
    reached = LEVELS.index(contract(engine.engine).level)
    nothing = {kind for kind in seen if all(row.id in unchecked for row in rows if row.kind is kind)}
    return Coverage(
        levels=[engine.level],
        examined=[f"{k.examines}{IN_PART if k in parts else ''}" for k in seen if k not in nothing],
        not_examined=sorted(
            f"{k.examines}{OUT_OF_REACH if LEVELS.index(k.level) > reached else ''}"
            for k in kinds
            if k not in seen or k in nothing
        ),
        unchecked=_of(limited, unchecked),
        in_part=_of(limited, in_part),
    )


def ledger_coverage(ledger: Ledger, engine: EngineStarted | None = None) -> Coverage:
    """What is examined of the engine of a ledger. ``engine``: its description, if it is known otherwise."""
    changed = ledger.weights.version > 0
    return coverage(
        engine or ledger.engine,
        ledger.contents.excluded,
        weights_changed=changed,
        unknown_prefixes=ledger.sums.prefixes.get("unknown", 0),
    )


def _of(rows: Iterable[Invariant], reasons: dict[str, str]) -> dict[str, str]:
    return {row.id: reasons[row.id] for row in rows if row.id in reasons}


def of_all(engines: Sequence[Coverage]) -> Coverage:
    """What was examined in all of these engines; what was not in some of them says in how many."""
    if len(engines) == 1:
        return engines[0]
    order = [kind.examines for kind in KINDS]
    whole = [name for name in order if _count(engines, name)]
    far = {name: sum(f"{name}{OUT_OF_REACH}" in one.not_examined for one in engines) for name in order}
    missing = {name: far[name] + sum(name in one.not_examined for one in engines) for name in order}
    partly = {name for one in engines for name in one.examined if name.endswith(IN_PART)}
    some = {name: f" ({n} of {len(engines)} engines)" for name, n in missing.items() if n < len(engines)}
    return Coverage(
        levels=[level for level in LEVELS if any(level in one.levels for one in engines)],
        examined=[
            f"{name}{IN_PART if f'{name}{IN_PART}' in partly else ''}" for name in whole if not missing[name]
        ],
        not_examined=sorted(
            f"{name}{some.get(name, '') or (OUT_OF_REACH if far[name] == n else '')}"
            for name, n in missing.items()
            if n
        ),
        unchecked={id: why for one in engines for id, why in one.unchecked.items()},
        in_part={id: why for one in engines for id, why in one.in_part.items()},
    )


def _count(engines: Sequence[Coverage], name: str) -> int:
    return sum(name in one.examined or f"{name}{IN_PART}" in one.examined for one in engines)


def verdict_words(verdict: str, examined: Coverage) -> str:
    """``clean at level tokens: counts, progress; not examined: block contents, ownership``."""
    return f"{verdict} {examined.words}".rstrip()


def count_words(found: Sequence[Found]) -> str:
    """``3,690 violations, 4 drifts: 1,240 tokens``. Findings are counted, also those that no list has."""
    violations = [row for row in found if row.severity == "violation"]
    drifts = [row for row in found if row.severity == "drift"]
    words = _counted(violations, "violation")
    return f"{words}, {drift_words(drifts)}" if drifts else words


def drift_words(found: Sequence[Found]) -> str:
    """``4 drifts: 1,240 tokens``, or ``240 drifts of 2 kinds: ...``, as several engines have the same ones.

    Without the tokens where they are not known; "" without a drift.
    """
    drifts = [row for row in found if row.severity == "drift"]
    if not drifts:
        return ""
    known = [row.tokens for row in drifts if row.tokens is not None]
    tokens = f": {sum(known):,} token{'' if sum(known) == 1 else 's'}" if known else ""
    partly = f" in {len(known)} of {len(drifts)} kinds" if known and len(known) < len(drifts) else ""
    several = sum(row.findings for row in drifts) > len(drifts)
    kinds = f" of {len(drifts)} kind{'' if len(drifts) == 1 else 's'}" if several else ""
    return f"{_counted(drifts, 'drift')}{kinds}{tokens}{partly}"


def _counted(rows: Sequence[Found], noun: str) -> str:
    number = sum(row.findings for row in rows)
    least = "at least " if any(row.at_least for row in rows) else ""
    return f"{least}{number:,} {noun}{'' if number == 1 and not least else 's'}"
