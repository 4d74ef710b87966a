"""Judges mutants on the vLLM of this process: `python -m proofs.mutants.judge NAME...` prints JSON.

Each mutant is judged in a fork, after one import of vLLM and one run of every drive without a mutant. A
finding counts if the same drive without the mutant does not have it.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from dataclasses import asdict, dataclass, field

from kvledger.audit.planted.fault import PLACES, PlantedFault, planted
from kvledger.audit.planted.table import BY_NAME, PLANTED

from . import drives
from .drives import CHECKS

MUTANTS = [
    fault
    for fault in PLANTED
    if fault.code and all(PLACES[each.where.partition(".")[0]].startswith("vllm.v1") for each in fault.code)
]
"""The planted faults that a real scheduler without a worker can show."""

Seen = dict[tuple[str, str], drives.Seen]


@dataclass
class Judgement:
    """What was found of one mutant."""

    name: str
    error: str = ""
    """Why it could not be judged."""
    found: dict[str, list[tuple[str, str, str]]] = field(default_factory=dict)
    """By level: drive, invariant and sentence of the findings that the drive without the mutant lacks."""
    drives: dict[str, int] = field(default_factory=dict)
    """By level: how many drives have such findings, ENOUGH at most."""
    raised: list[tuple[str, str]] = field(default_factory=list)
    """Drive and exception of the engine, where the drive without the mutant has none."""
    doubted: int = 0
    """How many of the drives at level `tokens` have a verdict that is unknown, and not without the mutant."""
    differing: int = 0
    """How many of the drives at level `tokens` have other figures than without the mutant."""
    clean_without: bool = True
    """Whether the drives shown are without any violation if the mutant is absent."""


SOUND: Seen = {}
"""What every drive shows without a mutant; forks inherit it."""
ENOUGH = 5
"""How many drives with findings are looked for at each level."""


def judge(mutant: PlantedFault) -> Judgement:
    """Run every drive with the mutant, at each level until ENOUGH of them have findings."""
    judgement = Judgement(mutant.name)
    try:
        with planted(mutant):
            for level in (*drives.LEVELS, CHECKS):
                _judge_level(judgement, level)
    except Exception as error:
        judgement.error = f"{type(error).__name__}: {error}"
    return judgement


def _judge_level(judgement: Judgement, level: str) -> None:
    new = judgement.found.setdefault(level, [])
    judgement.drives[level] = 0
    for name in drives.drives():
        sound, seen = SOUND[name, level], drives.seen(name, level)
        more = sorted(seen.findings.keys() - sound.findings.keys(), key=str)
        new += [(name, id, seen.findings[id, request]) for id, request in more]
        judgement.drives[level] += bool(more)
        judgement.clean_without &= not (more and sound.findings)
        judgement.doubted += level == "tokens" and bool(seen.doubts and not sound.doubts)
        judgement.differing += level == "tokens" and seen.figures != sound.figures
        if seen.raised and not sound.raised and len(judgement.raised) < ENOUGH:
            judgement.raised.append((name, seen.raised))
        if judgement.drives[level] == ENOUGH:
            break


def judge_all(mutants: list[PlantedFault], processes: int = 2) -> list[Judgement]:
    """Judge mutants of the installed release, each in a process of its own."""
    every = [(name, level) for name in drives.drives() for level in (*drives.LEVELS, CHECKS)]
    SOUND.update({(name, level): drives.seen(name, level) for name, level in every})
    context = multiprocessing.get_context("fork")
    found = []
    with context.Pool(processes, maxtasksperchild=1) as pool:
        for judgement in pool.imap(judge, mutants, chunksize=1):
            found.append(judgement)
            print(f"{judgement.name}: {summary(judgement)}", file=sys.stderr, flush=True)
    return found


def summary(judgement: Judgement) -> str:
    """One line of what was found."""
    if judgement.error:
        return judgement.error
    ids = {level: sorted({id for _, id, _ in found}) for level, found in judgement.found.items()}
    words = [f"{level} {judgement.drives[level]} {','.join(ids[level])}" for level in ids]
    return "; ".join([*words, f"raised {len(judgement.raised)}", f"figures {judgement.differing}"])


def main(names: list[str]) -> None:
    """Judge the named mutants and print what was found."""
    print(json.dumps([asdict(each) for each in judge_all([BY_NAME[name] for name in names])]))


if __name__ == "__main__":
    main(sys.argv[1:])
