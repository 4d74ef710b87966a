"""The page docs/reference/mutants.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kvledger.audit.planted.fault import PlantedFault
from kvledger.audit.planted.table import FIX

from .drives import CHECKS, HISTORIES, LEVELS
from .judge import ENOUGH, Judgement

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "mutants.md"
UPSTREAM = ROOT / ".upstream"
WORDS = 220
"""Most characters of a finding's sentence."""

HEAD = f"""\
# Mutants of the engine

`make proof NAME=mutants` puts one small fault at a time into vLLM's scheduler, block pool or KV cache
managers (0.32.0), and drives the real scheduler through every scenario of `tests/scenarios` and {HISTORIES}
random histories: observed at level `tokens`, observed at level `blocks`, and with the
[exported checks](../ci.md#checks-without-kvledger) alone. `ARGS=--write` writes this page; `ARGS="NAME..."`
judges the mutants named. A violation counts if the same drive without the mutant does not have it. A level
is left after {ENOUGH} drives with such findings. *Engine*: how vLLM itself
ends a drive: by an exception, or never.
"""


def page(mutants: Sequence[PlantedFault], judged: Sequence[Judgement]) -> str:
    """The whole page."""
    of = {judgement.name: judgement for judgement in judged}
    pairs = [(mutant, of[mutant.name]) for mutant in mutants if mutant.name in of]
    return "\n".join([HEAD, *_totals(pairs), *_upstream(), *_table(pairs), *_missed(pairs), *_shown(pairs)])


Pair = tuple[PlantedFault, Judgement]


def caught(judgement: Judgement, *levels: str) -> bool:
    """Whether a level has a finding."""
    return any(judgement.found.get(level) for level in levels)


def _totals(pairs: Sequence[Pair]) -> list[str]:
    lines = ["| | mutants | level `tokens` | level `blocks` | exported checks | by the engine | by none |"]
    lines.append("|---|" + "---|" * 6)
    for words, fixes in (("own mutants", False), ("reverted fixes", True)):
        mine = [judgement for mutant, judgement in pairs if (mutant.kind == FIX) == fixes]
        counts = [sum(caught(each, level) for each in mine) for level in (*LEVELS, CHECKS)]
        raised = sum(bool(each.raised) for each in mine)
        none = sum(not caught(each, *LEVELS, CHECKS) and not each.raised for each in mine)
        lines.append(f"| {words} | {len(mine)} | {' | '.join(map(str, [*counts, raised, none]))} |")
    either = [judgement for _, judgement in pairs if caught(judgement, *LEVELS)]
    without = sum(each.clean_without for each in either)
    lines += [
        "",
        f"kvledger finds {len(either)} of {len(pairs)}. Without the mutant, the drives shown have no ",
    ]
    lines[-1] += f"violation at all for {without} of these; the others have a known fault of the release too."
    unsure = sum(bool(each.doubted) for _, each in pairs if not caught(each, *LEVELS))
    lines += [
        "",
        f"Of the mutants not found, {unsure} make the engine raise, so that the verdict is *unknown*.",
    ]
    return [*lines, ""]


def _upstream() -> list[str]:
    """What vLLM's own tests say of the exported checks, from the last runs."""
    lines = []
    for file in sorted(UPSTREAM.glob("*-checks.json")):
        rows = json.loads(file.read_text())
        passed = sum(len(row[2]) for row in rows)
        lost = sorted({name.rpartition("::")[2] for row in rows for name in set(row[2]) - set(row[3])})
        fail = f" {len(lost)} fail with them: {', '.join(lost)}." if lost else " All pass with them."
        lines += [
            f"On vLLM {rows[0][0]}, {passed} of its own tests pass without the exported checks.{fail}",
            "",
        ]
    return lines


def _table(pairs: Sequence[Pair]) -> list[str]:
    lines = [
        "## All mutants",
        "",
        "| mutant | kind | the engine's fault | tokens | blocks | checks | engine |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for mutant, judgement in pairs:
        cells = [", ".join(f"`{id}`" for id in ids(judgement, level)) for level in (*LEVELS, CHECKS)]
        raised = _ended(judgement.raised[0][1]) if judgement.raised else ""
        name = f"[{mutant.name}]({mutant.link})" if mutant.link else mutant.name
        lines.append(f"| {name} | {mutant.kind} | {mutant.says} | {' | '.join([*cells, raised])} |")
    return [*lines, ""]


def _ended(line: str) -> str:
    """The exception in one word; the driver itself gives up an engine that does not come to an end."""
    return "never ends" if "not done after" in line else line.partition(":")[0]


def ids(judgement: Judgement, level: str) -> list[str]:
    """The invariants that a level finds broken."""
    return sorted({id for _, id, _ in judgement.found.get(level, ())})


def _missed(pairs: Sequence[Pair]) -> list[str]:
    lines = ["## Not found by kvledger", "", "| mutant | drives with other figures | found by | why |"]
    lines.append("|---|---|---|---|")
    for mutant, judgement in pairs:
        if not caught(judgement, *LEVELS):
            by = ["the exported checks"] * caught(judgement, CHECKS) + ["the engine"] * bool(judgement.raised)
            cells = (
                mutant.name,
                str(judgement.differing),
                ", ".join(by) or "nobody",
                _why(mutant, judgement),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _why(mutant: PlantedFault, judgement: Judgement) -> str:
    if mutant.why or judgement.error:
        return mutant.why or judgement.error
    if not judgement.differing and not judgement.raised:
        return "no drive shows a difference: it is not reached, or the engine does the same"
    if judgement.raised and judgement.doubted:
        return "the engine raises before an event shows it; the verdict is unknown, and says so"
    if not judgement.differing:
        return "the engine ends the drive, and no figure is wrong before"
    return "the checks are blind to it"


def _shown(pairs: Sequence[Pair]) -> list[str]:
    lines = ["## What is said of them", "", "The first finding of each mutant, and the drive.", ""]
    for mutant, judgement in pairs:
        first = next((judgement.found[level][0] for level in LEVELS if judgement.found.get(level)), None)
        if first is not None:
            drive, id, words = first
            short = words if len(words) <= WORDS else f"{words[:WORDS].rsplit(' ', 1)[0]} ..."
            lines.append(f"- **{mutant.name}**: `{id}` in `{drive}`: {short}")
    return [*lines, ""]
