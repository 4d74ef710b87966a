"""Draws mutants of the vLLM of this process, and shows which harmful ones are found.

Usage: python -m proofs.mutants.drawn MUTANTS [--first SEED] [--write]; `make proof NAME=mutants
ARGS="drawn 400"` runs it on the release of RELEASE. `--write` writes docs/reference/drawn-mutants.md.

Nobody chooses the mutants: every place of the scheduler, the block pool and the KV cache managers that the
random histories execute is one, and as many as asked for are drawn of them. Each is driven through histories
in which the release does nothing wrong. Whether it does harm is said by the oracles of `tests/differential`,
which see the scheduler's calls and none of kvledger's events:

- *KV*: a request hits or reads positions without their KV, or gets a token that was sampled from them;
- *figures*: the hits that the engine tells of a request, or counts, are not what happened;
- *outputs*: a client gets fewer or more tokens than asked for;
- *blocks*: the engine is idle, and blocks are missing in the pool;
- *stands still*: the engine does not come to an end.

Of a mutant that makes the engine raise the engine itself tells; it counts only if it does harm in another
history. One that stands still, or of which the oracles can't follow the calls, does not count either.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import inspect
import logging
import multiprocessing
import os
import random
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from kvledger.audit.planted.fault import CORE, PLACES, Change, NotFound, PlantedFault, planted

from .drives import LEVELS, TooLong, limited, warm_up

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "drawn-mutants.md"
RELEASE = "0.33.0"
HISTORIES = 120
"""How many histories each mutant is driven through; the release does nothing wrong in any."""
HARMED = 5
"""In how many histories with harm an audit is asked."""
UNHARMED = 15
"""In how many histories without harm an audit is asked."""
NOT_SWAPPED = ("isinstance", "getattr", "hasattr", "min", "max", "zip", "cast")
STRICT = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add}


# --- what can be changed --------------------------------------------------------------------------------


def _changes(node: ast.AST) -> Iterator[str]:
    """The kinds of mistake that can be made at a node."""
    match node:
        case ast.If() | ast.While() | ast.IfExp():
            yield "condition negated"
        case ast.Expr(ast.Call()):
            yield "call left out"
            yield "call doubled"
        case ast.Constant(int(value)) if not isinstance(value, bool):
            yield "constant off by one"
        case ast.Call(ast.Name(name), [_, _, *_]) if name in NOT_SWAPPED:
            pass
        case ast.Call(_, [first, second, *_]) if not isinstance(first, ast.Starred):
            yield "arguments swapped" if not isinstance(second, ast.Starred) else ""
        case ast.Compare(_, [op]) if type(op) in STRICT:
            yield "comparison at its edge"
        case ast.BinOp(_, op) | ast.AugAssign(_, op) if type(op) in SIGNS:
            yield "sign turned"


def _change(node: Any, kind: str) -> None:
    """Make the mistake."""
    match kind:
        case "condition negated":
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case "call left out":
            node.value = ast.Constant(None)
        case "call doubled":
            node.value = ast.Tuple([node.value, copy.deepcopy(node.value)], ast.Load())
        case "constant off by one":
            node.value += 1
        case "arguments swapped":
            node.args[:2] = reversed(node.args[:2])
        case "comparison at its edge":
            node.ops = [STRICT[type(node.ops[0])]()]
        case "sign turned":
            node.op = SIGNS[type(node.op)]()


def _nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function's statements, without its header, checks of its own, and what it logs."""
    for child in ast.iter_child_nodes(function):
        logs = isinstance(child, ast.Expr) and ast.unparse(child).startswith(("logger.", "log_"))
        if isinstance(child, ast.arguments | ast.Assert | ast.Raise) or logs:
            continue
        if child in getattr(function, "decorator_list", ()) or child is getattr(function, "returns", None):
            continue
        yield child
        yield from _nodes(child)


@dataclass(frozen=True)
class Site:
    """One place, and the mistake that can be made there."""

    where: str
    kind: str
    line: int
    """The line in the file of the release."""
    place: int
    """Which node of the function, in the order of `_nodes`."""


def sites(executed: set[tuple[str, int]]) -> list[Site]:
    """Every place on an executed line."""
    found = []
    for first, path in PLACES.items():
        if not path.startswith(CORE):
            continue
        module = importlib.import_module(path)
        holder = getattr(module, first, module)
        for name, value in sorted(vars(holder).items()):
            function = inspect.unwrap(getattr(value, "__func__", value))
            if not inspect.isfunction(function) or function.__module__ != path:
                continue
            file, begin = function.__code__.co_filename, function.__code__.co_firstlineno
            for place, node in enumerate(_nodes(ast.parse(_source(function)).body[0])):
                line = begin + getattr(node, "lineno", 0) - 1
                if (file, line) in executed:
                    found += [Site(f"{first}.{name}", kind, line, place) for kind in _changes(node) if kind]
    return found


def _source(function: Any) -> str:
    return textwrap.dedent(inspect.getsource(function))


def mutant(site: Site) -> PlantedFault:
    """The mutant of a place."""
    first, _, name = site.where.partition(".")
    module = importlib.import_module(PLACES[first])
    source = _source(inspect.unwrap(getattr(getattr(module, first, module), name)))
    tree = ast.parse(source)
    node = next(node for place, node in enumerate(_nodes(tree.body[0])) if place == site.place)
    before = _line(node)
    _change(node, site.kind)
    new = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    name = f"{site.where}:{site.line} {site.kind}"
    return PlantedFault(name=name, kind=site.kind, says=before, code=(Change(site.where, source, new),))


def _line(node: ast.AST) -> str:
    """What stands at the place, on one line."""
    text = ast.unparse(getattr(node, "test", node)).split("\n")[0]
    return text if len(text) <= 70 else f"{text[:67]}..."


# --- what it does ---------------------------------------------------------------------------------------


@dataclass
class Course:
    """How one history went, as the oracles see it."""

    harm: set[str]
    raised: str = ""
    facts: str = ""
    """Everything that the scheduler did, to see whether a mutant changed anything."""


def course(history: Any) -> Course:
    """Play a history without kvledger."""
    from tests.differential.content import Device
    from tests.differential.oracle import Oracle
    from tests.differential.player import play
    from tests.differential.tape import Tape

    recorded, counts = Tape(), []
    told: dict[str, Any] = {}

    def attach(scheduler: Any) -> None:
        recorded.attach(scheduler)
        call = scheduler.update_from_output

        def update_from_output(*args: Any, **kwargs: Any) -> Any:
            requests = list(scheduler.requests.values())
            outputs = call(*args, **kwargs)
            counts.append([(each.request_id, each.num_output_placeholders) for each in requests])
            for output in (each for of_client in outputs.values() for each in of_client.outputs):
                if output.prefill_stats is not None:
                    told.setdefault(output.request_id, output.prefill_stats)
            return outputs

        scheduler.update_from_output = update_from_output

    try:
        with limited():
            played = play(history, attach)
    except TooLong:
        return Course({"stands still"})
    except Exception as error:  # of a scheduler that can't even be made
        return Course(set(), f"{type(error).__name__}: {error}".split("\n")[0])
    if played.raised:
        return Course(set(), played.raised)
    facts = repr((recorded.facts, counts))
    if not played.idle:
        return Course({"stands still"}, "", facts)
    try:
        device, oracle = Device().read(recorded), Oracle(history.setup["block_size"]).read(recorded.facts)
    except (AssertionError, KeyError, IndexError, ValueError) as error:
        return Course({"not followed"}, "", f"{type(error).__name__}: {error}")
    pool = played.driver.scheduler.kv_cache_manager.block_pool
    harm = {
        "KV": device.bad_hits or device.bad_tokens or device.bad_reads,
        "figures": _wrong_figures(recorded, oracle, told),
        "outputs": _wrong_outputs(history, recorded, oracle),
        "blocks": pool.get_num_free_blocks() != pool.num_gpu_blocks - 1,
    }
    return Course({kind for kind, wrong in harm.items() if wrong}, "", facts)


def _wrong_figures(recorded: Any, oracle: Any, told: dict[str, Any]) -> bool:
    """Whether the engine counted other lookups, or told a client other sources of its prompt."""
    for stats, lookups in (
        (recorded.local_stats, oracle.local),
        (recorded.external_stats, oracle.external),
    ):
        counted = (stats.requests, stats.queries, stats.hits)
        if stats.requests and counted != (lookups.requests, lookups.queries, lookups.hits):
            return True
    for name, stats in told.items():
        account = oracle.accounts[name]
        settled = account.figures()["settlements"]
        if account.undefined or account.load_failures or not settled:
            continue
        sources = (stats.num_local_cached_tokens, stats.num_external_cached_tokens)
        if sources != (settled[0]["local"], settled[0]["external"]):
            return True
    return False


def _wrong_outputs(history: Any, recorded: Any, oracle: Any) -> bool:
    """Whether a client that waited for its end got another number of tokens than it asked for."""
    from tests.differential import tape
    from tests.differential.random_histories import Add

    got: Counter[str] = Counter()
    gone = set()
    for fact in recorded.facts:
        if isinstance(fact, tape.Output):
            got.update(fact.returned)
        elif isinstance(fact, tape.Aborted):
            gone |= {name for name, state in fact.after.items() if state.finished}
    for add in history.operations:
        if not isinstance(add, Add) or add.resumable or add.name in gone:
            continue
        account = oracle.accounts.get(add.name)
        wanted = min(add.max_tokens, add.stop_at or add.max_tokens)
        if account is not None and not account.load_failures and got[add.name] != wanted:
            return True
    return False


def found(history: Any, level: str) -> set[str]:
    """The violations of an audit at one level."""
    from tests.differential.player import play

    from kvledger.audit.checks.auditor import Auditor
    from kvledger.audit.traffic.driver import Observation

    observation = Observation(level)
    try:
        # A longer history would have the blocks and tables compared in turn; these have few steps.
        with limited(), mock.patch("kvledger.audit.engines.steps.AT_REST_STEPS", 1):
            play(history, observation)
    except (Exception, TooLong):
        return set()
    auditor = Auditor(keep_closed=True)
    auditor.feed_all(observation.stop("shutdown"))  # the whole pool is compared at the end
    return {violation.id for violation in auditor.violations if violation.severity == "violation"}


# --- judged ---------------------------------------------------------------------------------------------


@dataclass
class Judged:
    """What was seen of one mutant."""

    name: str
    says: str
    error: str = ""
    harm: Counter[str] = field(default_factory=Counter)
    """In how many histories there was harm of each kind."""
    raised: str = ""
    """The first exception of the engine."""
    differing: int = 0
    """In how many histories the scheduler did something else."""
    asked: int = 0
    """In how many histories with harm an audit was asked."""
    found: dict[str, Counter[str]] = field(default_factory=lambda: {level: Counter() for level in LEVELS})
    """By level: the invariants, and in how many of these histories each was violated."""
    false: set[str] = field(default_factory=set)
    """Violations in histories in which the scheduler did nothing else."""
    besides: set[str] = field(default_factory=set)
    """Violations in histories in which the scheduler did something else, and no oracle saw harm."""


SOUND: list[tuple[Any, str]] = []
"""The histories, and what the scheduler does in each; forks inherit them."""


def executed() -> set[tuple[str, int]]:
    """Fill SOUND; the lines of the core that its histories execute."""
    from tests.differential.random_histories import draw

    lines: set[tuple[str, int]] = set()

    def trace(frame: Any, event: str, _: Any) -> Any:
        if CORE.replace(".", os.sep) not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    warm_up()
    seed = 0
    while len(SOUND) < HISTORIES:
        history, seed = draw(seed), seed + 1
        went = course(history)
        if went.harm or went.raised or any(found(history, level) for level in LEVELS):
            continue
        SOUND.append((history, went.facts))
        sys.settrace(trace)
        try:
            course(history)
        finally:
            sys.settrace(None)
    return lines


def judge(site: Site) -> Judged:
    """Drive a mutant through every history."""
    fault = mutant(site)
    judged = Judged(fault.name, fault.says)
    unharmed = hung = 0
    try:
        with planted(fault):
            for history, facts in SOUND:
                went = course(history)
                judged.differing += went.facts != facts
                judged.raised = judged.raised or went.raised
                judged.harm.update(went.harm)
                hung += not went.facts and "stands still" in went.harm
                if went.harm and judged.asked < HARMED:
                    judged.asked += 1
                    for level in LEVELS:
                        judged.found[level].update(found(history, level))
                elif not went.harm and not went.raised and unharmed < UNHARMED:
                    unharmed += 1
                    ids = found(history, "blocks")
                    (judged.false if went.facts == facts else judged.besides).update(ids)
                if hung == 2:
                    break
    except (NotFound, SyntaxError) as error:
        judged.error = f"{type(error).__name__}: {error}"
    return judged


def line(judged: Judged) -> str:
    """One mutant as a line of text."""
    harm = ", ".join(f"{kind} {number}" for kind, number in sorted(judged.harm.items())) or "no harm"
    by = "; ".join(f"{level} {', '.join(sorted(ids)) or '-'}" for level, ids in judged.found.items())
    words = f"{judged.name}: {judged.says}: differs {judged.differing}; {harm}; {by}"
    words += f"; raised {judged.raised[:60]}" * bool(judged.raised)
    words += f"; besides {', '.join(sorted(judged.besides))}" * bool(judged.besides)
    return words + f"; FALSE {', '.join(sorted(judged.false))}" * bool(judged.false) + judged.error


HARM = ("KV", "figures", "outputs", "blocks")
"""What a mutant is counted for."""

HEAD = f"""\
# Mutants that nobody chose

`make proof NAME=mutants ARGS="drawn 400 --write"` draws places in the scheduler, the block pool and the KV
cache managers of vLLM {RELEASE}, makes one mistake at each, and drives the real scheduler through
{HISTORIES} random histories. In none of them does the release do anything wrong. Whether a mutant does harm
is said by the oracles of the differential test, which see the scheduler's calls and none of kvledger's
events. *KV*: a request reads positions without their KV. *Figures*: the engine tells a client hits that were
none, or the reverse. *Outputs*: a client gets fewer or more tokens than it asked for. *Blocks*: the engine is
idle, and blocks are missing. A mutant is found if an audit has a violation in one of the first {HARMED}
histories with harm; blocks and tables are compared after each step, which an engine does in turn, every
eighth step. `tokens` can't see what blocks hold, and neither level judges outputs.
"""


def page(rows: Sequence[Judged], places: int, seed: int) -> str:
    """The page docs/reference/drawn-mutants.md."""
    harmful = [row for row in rows if any(row.harm[kind] for kind in HARM)]
    rest = [row for row in rows if row not in harmful]
    missed = [row for row in harmful if not row.found["blocks"]]
    lines = ["| harm | mutants | found at `tokens` | found at `blocks` |", "|---|---|---|---|"]
    for kinds in (*((kind,) for kind in HARM), HARM):
        mine = [row for row in harmful if any(row.harm[kind] for kind in kinds)]
        counts = [f"{sum(bool(row.found[level]) for row in mine)}" for level in LEVELS]
        lines.append(f"| {kinds[0] if len(kinds) == 1 else 'any'} | {len(mine)} | {' | '.join(counts)} |")
    raised = sum(bool(row.raised) and not row.harm for row in rest)
    others = Counter(kind for row in rest for kind in row.harm)
    lines += [
        "",
        f"{len(rows)} of {places:,} places were drawn (seed {seed}). Of the other {len(rest)} mutants:",
        "",
        f"- {sum(not row.differing and not row.harm for row in rest)} change nothing that is done;",
        f"- {raised} make the engine raise, and do no harm in a history without that;",
        f"- {others['stands still']} stand still, and the oracles can't follow {others['not followed']};",
        "- the others change the course of a history without harm.",
        "",
        "Violations where the oracles see no difference. They do not read free lists, nor counts that the "
        + "engine keeps for itself. "
        + ("; ".join(f"{row.name}: {_ids(row.false)}" for row in rows if row.false) or "none")
        + ".",
        "",
        "## Not found at level `blocks`",
        "",
        "| mutant | what stood there | harm, in histories |",
        "|---|---|---|",
    ]
    for row in missed:
        harm = ", ".join(f"{kind} {number}" for kind, number in sorted(row.harm.items()))
        lines.append(f"| {row.name} | `{row.says.replace('|', ' ')}` | {harm} |")
    lines += ["", "## Found", "", "| mutant | harm | by |", "|---|---|---|"]
    for row in harmful:
        if row not in missed:
            by = _ids({*row.found["tokens"], *row.found["blocks"]})
            lines.append(f"| {row.name} | {', '.join(sorted(row.harm))} | {by} |")
    return "\n".join([HEAD, *lines, ""])


def _ids(ids: Iterable[str]) -> str:
    return ", ".join(f"`{id}`" for id in sorted(ids))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m proofs.mutants.drawn")
    parser.add_argument("mutants", type=int)
    parser.add_argument("--first", type=int, default=0, help="the seed of the draw")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    logging.disable(logging.ERROR)
    every = sites(executed())
    drawn = random.Random(options.first).sample(every, min(options.mutants, len(every)))
    print(f"{len(drawn)} of {len(every)} places on executed lines", flush=True)
    rows: list[Judged] = []
    with multiprocessing.get_context("fork").Pool(options.processes, maxtasksperchild=1) as pool:
        for judged in pool.imap(judge, drawn, chunksize=1):
            rows.append(judged)
            print(line(judged), flush=True)
    text = page(rows, len(every), options.first)
    print(text.removeprefix(HEAD).partition("## Not")[0])
    if options.write:
        PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
