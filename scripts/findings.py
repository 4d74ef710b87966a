"""Faults of released engines that the ledger shows beside the upstream reports, each shown anew.

Usage: python3 scripts/findings.py [--write] [NAME...]     all faults, or these

Drives the real scheduler of the releases in a fault's row (scripts/releases.py) through one scenario,
and prints what the engine's own figures are, what they should be, and what the ledger finds. Exits
with 1 where a fault does not show as its row states. `--write` makes docs/findings.md of a whole run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "findings.md"
SCHEDULER = "`Scheduler.{}` (`vllm/v1/core/sched/scheduler.py`)"


# --- in a release: one scenario, observed ----------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """One scenario under observation: its events, and what came of them."""

    events: Sequence[Any]
    auditor: Any
    scheduler: Any
    raised: str

    def of(self, kind: str, request_id: str) -> list[Any]:
        """Events of one kind about one request, in order."""
        numbers = {e.request for e in self.kind("RequestAdded") if e.request_id == request_id}
        return [event for event in self.kind(kind) if event.request in numbers]

    def kind(self, kind: str) -> list[Any]:
        return [event for event in self.events if type(event).__name__ == kind]

    def account(self, request_id: str) -> Any:
        """The request's account, frozen."""
        (found,) = [a for a in self.auditor.ledger.accounts() if a.request_id == request_id]
        return found.freeze()

    def scheduled(self, request_id: str) -> list[int]:
        """Tokens scheduled for a request in each step that says anything new of it."""
        (added,) = self.of("RequestAdded", request_id)[:1]
        rows = [
            step.changed[i : i + 4] for step in self.kind("Stepped") for i in range(0, len(step.changed), 4)
        ]
        return [row[1] for row in rows if row[0] == added.request]


@dataclass(frozen=True)
class Figures:
    """What an engine says, and what it should say, in words that are the same in every run."""

    engine: str
    right: str
    found: tuple[tuple[str, str], ...]
    """Ids and messages."""


def watch(drive: Callable[..., Any], level: str = "tokens") -> Seen:
    """Drive a scheduler under observation at ``level``; what the host raises is part of what is seen."""
    from kvledger.audit.checks.auditor import Auditor
    from kvledger.audit.engines import choose, host_version
    from kvledger.audit.journal.recorder import MemoryRecorder

    sink, observers, schedulers, raised = MemoryRecorder(), [], [], ""

    def attach(scheduler: Any) -> None:
        observer: Any = choose(scheduler)(scheduler, sink, version=host_version(), level=level)
        observer.start()
        observers.append(observer)
        schedulers.append(scheduler)

    try:
        drive(attach)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    for observer in observers:
        observer.stop("exit")
    auditor = Auditor(keep_closed=True, debug=True)
    events = sink.take()
    auditor.feed_all(events)
    return Seen(events, auditor, schedulers[0], raised)


def scenario(name: str) -> Seen:
    from tests.scenarios.corpus import SCENARIOS

    return watch(SCENARIOS[name])


def figures(seen: Seen, engine: str, right: str) -> Figures:
    return Figures(engine, right, tuple((v.id, v.message) for v in seen.auditor.violations))


def split(seen: Seen, request_id: str) -> Figures:
    """Where a prompt came from, as the engine reports it and as the ledger settled it."""
    (said,) = seen.of("Reported", request_id)
    (settled,) = seen.account(request_id).settlements
    return figures(
        seen,
        f"{said.local_tokens} local, {said.external_tokens} external, {said.computed_tokens} computed",
        f"{settled.local} local, {settled.external} external, {settled.computed} computed",
    )


# --- the probes -----------------------------------------------------------------------------------------


def placeholder_leak() -> Figures:
    seen = scenario("load_failure_sync_async")
    (failed,), (ended,) = seen.of("LoadFailed", "r"), seen.of("Finished", "r")
    prompt = seen.of("RequestAdded", "r")[0].prompt_tokens
    again = seen.scheduled("r")[1]
    return figures(
        seen,
        f"{again} tokens executed again, {ended.placeholder_tokens} placeholders at the end",
        f"{prompt - failed.computed_tokens} tokens executed again, 0 placeholders at the end",
    )


def failed_load_counted() -> Figures:
    return split(scenario("load_failure_sync_sync"), "r")


def ended_before_it_ran() -> Figures:
    return split(scenario("load_failure_async_policy_fail_sync"), "r")


def reset_drops_valid_token() -> Figures:
    seen = scenario("reset_running_async")
    (ended,) = seen.of("Finished", "b")
    at_end = "{} computed of {} tokens, {} placeholders at the end"
    sequence = ended.sequence_tokens
    return figures(
        seen,
        at_end.format(ended.computed_tokens, sequence, ended.placeholder_tokens),
        at_end.format(sequence - 1, sequence, 0),
    )


def rejection_of_a_past_life() -> Figures:
    seen = scenario("reset_running_speculative")
    (drop, *_) = [v for v in seen.auditor.violations if v.id == "tokens/unexplained-drop"]
    down, before = re.findall(r"\b\d+\b", drop.message)
    return figures(seen, f"{down} computed tokens", f"{before} computed tokens")


def load_rounded_up() -> Figures:
    seen = scenario("resumed_local_then_external")
    admitted = seen.of("Admitted", "r")[-1]
    landed = seen.of("LoadFinished", "r")[-1]
    return figures(
        seen,
        f"{landed.computed_tokens} computed tokens when the load has ended",
        f"{admitted.local_tokens} local + {admitted.external_tokens} external = "
        f"{admitted.local_tokens + admitted.external_tokens}",
    )


def session_skips_tokens() -> Figures:
    from tests.scenarios.driving import start

    def drive(attach: Callable[[Any], object]) -> None:
        driver = start(attach, drafts=3)
        driver.add("s", 40, 2, resumable=True)
        driver.step()
        driver.step(accepted=3)
        driver.add("s", 20, 1, resumable=True)
        driver.run()
        driver.close("s")
        driver.run()

    seen = watch(drive)
    (extended, *_) = seen.of("Extended", "s")
    left = extended.prompt_tokens - extended.computed_tokens
    return figures(
        seen, f"{left} tokens of the chunk left to execute", "20 tokens of the chunk left to execute"
    )


def session_stops() -> Figures:
    seen = scenario("session_async_speculative")
    return figures(seen, seen.raised or "nothing raised", "the session waits for its next chunk")


def session_never_ends() -> Figures:
    seen = scenario("session_async_speculative")
    pool = seen.scheduler.kv_cache_manager.block_pool
    held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    return figures(seen, f"{held} blocks held by nobody at the end {seen.raised}".strip(), "0 blocks")


def hybrid_pool() -> Figures:
    seen = scenario("crowd_hybrid")
    return figures(seen, seen.raised or "nothing raised", "a request is preempted")


def lookups_disagree() -> Figures:
    from tests.scenarios.driving import start

    def aborted(attach: Callable[[Any], object]) -> None:
        driver = start(attach, connector="scripted")
        driver.connector.say("r", 160)
        driver.add("r", 200, 3)
        driver.schedule()
        driver.abort("r")
        driver.drain()
        driver.run()

    parts = {
        "load failed wholly": scenario("load_failure_async_total_sync"),
        "ended by its failed load": scenario("load_failure_async_policy_fail_sync"),
        "aborted before an output": watch(aborted),
    }
    said, right = [], []
    for what, seen in parts.items():
        hits = sum(max(0, e.external_hits) for e in seen.kind("LookupsCounted"))
        told = sum(e.external_tokens for e in seen.of("Reported", "r"))
        said.append(f"{what}: look-ups {hits}, prompts {told}")
        right.append(f"{what}: {sum(s.external for s in seen.account('r').settlements)} in both")
    return figures(parts["load failed wholly"], "; ".join(said), "; ".join(right))


def full_hit_runs_unseen() -> Figures:
    seen = scenario("full_external_hit")
    (said,) = seen.of("Reported", "r")
    account = seen.account("r")
    rework = ", ".join(f"{tokens} for {cause}" for cause, tokens in account.rework.items())
    return figures(
        seen,
        f"{said.computed_tokens} tokens of the prompt computed",
        f"{account.first_prompt} computed first, and again: {rework}",
    )


def failed_load_stays_cached() -> Figures:
    from tests.scenarios.driving import start

    def drive(attach: Callable[[Any], object]) -> None:
        driver = start(attach, connector="scripted")
        driver.connector.say("r", 160)
        driver.add("r", 200, 3)
        driver.schedule()
        driver.output(invalid_blocks=driver.blocks("r")[4:10])
        driver.abort("r")
        driver.add("next", 200, 3, shares=("r", 200))
        driver.run()

    seen = watch(drive, level="blocks")
    (admitted,) = seen.of("Admitted", "next")
    found = "the next request with this prompt finds {} tokens in the cache"
    return figures(seen, found.format(admitted.local_tokens), found.format(64))


def never_fits_again() -> Figures:
    from tests.scenarios.v0.audit import SCENARIOS

    seen = watch(SCENARIOS["never_fits_again_sync"])
    kept = [e for e in seen.kind("LookupKept") if e.ended]
    return figures(seen, f"{len(kept)} look-ups kept for a request that has ended", "0 look-ups kept")


# --- the faults -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault of released engines. ``shown_in``: releases that it is shown in; ``affected``: in words.

    ``engine``: what the engine's figures are then, the same in each. ``ids``: invariants of which one
    names it, none where no invariant does. ``where`` is empty where the cause is not known.
    """

    name: str
    says: str
    affected: str
    shown_in: tuple[str, ...]
    where: str
    probe: Callable[[], Figures]
    engine: str
    ids: tuple[str, ...] = ()

    def shows(self, seen: Figures) -> bool:
        """Whether the engine's figures are as stated, not as they should be, and are found."""
        found = {each for each, _ in seen.found}
        return self.engine == seen.engine != seen.right and (not self.ids or bool(found & set(self.ids)))


FAULTS: tuple[Fault, ...] = (
    Fault(
        "placeholder-leak",
        "Under async scheduling, the output of a step whose synchronous load failed is skipped, and with "
        "it the placeholder that its token had. The request keeps it to its end: its next step is one "
        "token longer than its sequence, and every figure made of computed tokens less placeholders is "
        "one too low.",
        "0.12.0 to 0.33.0",
        ("0.12.0", "0.33.0"),
        SCHEDULER.format("update_from_output") + ", for requests that `_handle_invalid_blocks` names",
        placeholder_leak,
        "137 tokens executed again, 1 placeholders at the end",
        ("tokens/in-flight",),
    ),
    Fault(
        "failed-load-counted",
        "External tokens that failed to load and were computed instead stay in the external figure, and "
        "the computed figure lacks them. Whoever reads savings from it credits the external cache with "
        "work that the device did. Upstream decided so "
        "([vLLM#37460](https://github.com/vllm-project/vllm/pull/37460)), which makes it a drift.",
        "0.20.0 to 0.33.0",
        ("0.20.0", "0.33.0"),
        SCHEDULER.format("schedule") + ", which sets `Request.prefill_stats`; a failure does not",
        failed_load_counted,
        "0 local, 160 external, 40 computed",
        ("connector/failed-load-counted",),
    ),
    Fault(
        "failed-load-as-local-hit",
        "External tokens that failed to load synchronously are taken off the external figure, but not off "
        "the whole hit, and local is their difference. The front end reports a hit of the local prefix "
        "cache where nothing was cached, and too few computed tokens.",
        "0.17.0 to 0.19.1",
        ("0.17.0", "0.19.1"),
        SCHEDULER.format("_update_requests_with_invalid_blocks")
        + " and `PromptTokenStats.update_from_output` (`vllm/v1/metrics/stats.py`)",
        failed_load_counted,
        "96 local, 64 external, 40 computed",
        ("tokens/set-once",),
    ),
    Fault(
        "ended-before-it-ran",
        "A request that ends because its asynchronous load failed (policy `fail`), before it was given a "
        "step, still has -1 for its cached tokens, which means not set. The front end takes it for a "
        "number: one more token is counted as computed than the prompt has, of a prompt of which nothing "
        "was computed, and a counter of local hits is asked to go down.",
        "0.17.0 and 0.18.1; in 0.19.1 the -1 is clamped and the computed tokens stay one too many",
        ("0.17.0", "0.18.1"),
        "`Request.num_cached_tokens`, and the error output in " + SCHEDULER.format("update_from_output"),
        ended_before_it_ran,
        "-1 local, 0 external, 201 computed",
        ("tokens/negative",),
    ),
    Fault(
        "ended-before-it-ran-clamped",
        "The same in the release that clamps the negative figure: the sources sum to 201 tokens of a "
        "prompt of 200.",
        "0.19.1",
        ("0.19.1",),
        "`PromptTokenStats.update_from_output` (`vllm/v1/metrics/stats.py`)",
        ended_before_it_ran,
        "0 local, 0 external, 201 computed",
        ("tokens/source-sum",),
    ),
    Fault(
        "reset-drops-valid-token",
        "`reset_prefix_cache(reset_running_requests=True)` under async scheduling notes for every running "
        "request that its next token is to be thrown away, also for one in prefill, which has none in "
        "flight. A later, valid token is thrown away instead, and its placeholder stays: the token is "
        "computed again, and the request ends with one computed token too many.",
        "0.12.0 to 0.20.0",
        ("0.12.0", "0.20.0"),
        SCHEDULER.format("reset_prefix_cache")
        + " and `AsyncScheduler._update_request_with_output` (`vllm/v1/core/sched/async_scheduler.py`)",
        reset_drops_valid_token,
        "162 computed of 162 tokens, 1 placeholders at the end",
        ("tokens/in-flight",),
    ),
    Fault(
        "rejection-of-a-past-life",
        "After such a reset the output of the step in flight still comes. Drafts rejected in it belong to "
        "the life that the reset ended, but are taken off the count of the new one, which then executes "
        "valid positions once more.",
        "0.12.0 to 0.24.0",
        ("0.12.0", "0.24.0"),
        SCHEDULER.format("update_from_output") + ", where rejected drafts are subtracted",
        rejection_of_a_past_life,
        "53 computed tokens",
        ("tokens/unexplained-drop",),
    ),
    Fault(
        "load-rounded-up",
        "When an asynchronous load has ended, the request's count becomes the size of all blocks it "
        "holds, not what was promised: up to a block of tokens that nobody loaded counts as computed. "
        "They are never executed, so the output is made from blocks that were not filled.",
        "0.10.2 to 0.17.0",
        ("0.10.2", "0.17.0"),
        SCHEDULER.format("_update_waiting_for_remote_kv"),
        load_rounded_up,
        "48 computed tokens when the load has ended",
        ("tokens/balance",),
    ),
    Fault(
        "session-skips-tokens",
        "A session's chunk ends while drafts beyond its last token were accepted, and the count keeps "
        "them. The next chunk begins at that count, so its first tokens are taken for computed and are "
        "never executed: their KV is that of drafts which are not in the sequence.",
        "0.17.0 to 0.32.0",
        ("0.17.0", "0.32.0"),
        SCHEDULER.format("_update_request_as_session"),
        session_skips_tokens,
        "18 tokens of the chunk left to execute",
    ),
    Fault(
        "session-enqueued-twice",
        "A session with drafts under async scheduling stops and waits for its next chunk; an output that "
        "was still in flight stops it again, and it is enqueued twice. The scheduler meets it running "
        "where it expects it waiting, and raises, which ends the engine.",
        "0.18.1 to 0.24.0",
        ("0.18.1", "0.24.0"),
        SCHEDULER.format("_handle_stopped_request") + ", called by `update_from_output`",
        session_stops,
        "RuntimeError: Invalid request status: RUNNING",
    ),
    Fault(
        "hybrid-pool-exhausted",
        "With a full and a sliding window group, the cap on what one request of the window group may "
        "need is also applied to requests that run. The check then asks for fewer blocks than are taken, "
        "and instead of preempting a request the scheduler raises.",
        "0.20.0",
        ("0.20.0",),
        "`SingleTypeKVCacheManager.get_num_blocks_to_allocate` "
        "(`vllm/v1/core/single_type_kv_cache_manager.py`)",
        hybrid_pool,
        "ValueError: Cannot get 6 free blocks from the pool",
    ),
    Fault(
        "look-ups-without-a-prompt",
        "External hits are counted when a request is admitted, and its prompt is reported with its first "
        "output. Where the load fails wholly, its failure ends the request, or the client leaves before "
        "an output, the hit stays in the look-up counters and no prompt has it: the two disagree for "
        "ever, and nothing of it was loaded for use.",
        "0.17.0 to 0.33.0",
        ("0.17.0", "0.33.0"),
        SCHEDULER.format("schedule") + ", where `connector_prefix_cache_stats` is recorded",
        lookups_disagree,
        "load failed wholly: look-ups 160, prompts 0; ended by its failed load: look-ups 160, prompts 0; "
        "aborted before an output: look-ups 160, prompts 0",
    ),
    Fault(
        "full-hit-runs-unseen",
        "An asynchronous load that covers the whole prompt leaves nothing to compute, yet its last token "
        "is executed once more to have logits. The engine reports no computed token. In the ledger it is "
        "rework, for the cause `full_hit`: the prompt's sources are right, and the work is not lost.",
        "0.20.0 to 0.33.0; up to 0.19.1 the token is added to the computed and to the local tokens",
        ("0.20.0", "0.33.0"),
        SCHEDULER.format("_update_waiting_for_remote_kv"),
        full_hit_runs_unseen,
        "0 tokens of the prompt computed",
    ),
    Fault(
        "never-fits-again",
        "A swapped group that no longer fits into the cache is ignored without being freed: its look-up "
        "is never released. The engine goes on keeping an answer for a request that is gone, and every "
        "such request adds one.",
        "v0 of 0.9.1 and 0.9.2",
        ("0.9.1-v0", "0.9.2-v0"),
        "`Scheduler._schedule_swapped` (`vllm/core/scheduler.py`)",
        never_fits_again,
        "1 look-ups kept for a request that has ended",
        ("tokens/stale-lookup",),
    ),
    Fault(
        "failed-load-stays-cached",
        "Where failed loads are computed instead (policy `recompute`), the blocks of a synchronous load that "
        "failed keep their hashes, since they will be filled. If the request is aborted or preempted first "
        "they never are, and the next request with this prefix takes them for a hit: its output is made of "
        "what was in these blocks before.",
        "0.12.0 to 0.33.0",
        ("0.12.0", "0.33.0"),
        SCHEDULER.format("_handle_invalid_blocks") + ", which evicts them only under the policy `fail`",
        failed_load_stays_cached,
        "the next request with this prompt finds 192 tokens in the cache",
        ("blocks/hash-content",),
    ),
    Fault(
        "session-leaks-blocks",
        "A session with drafts under async scheduling leaves blocks that are never given back: the pool "
        "is that much smaller until the engine is restarted.",
        "0.27.1 and 0.30.0",
        ("0.27.1", "0.30.0"),
        "",
        session_never_ends,
        "8 blocks held by nobody at the end",
    ),
)


# --- here: every fault in its releases ------------------------------------------------------------------


def probed(release: str, faults: Sequence[Fault]) -> dict[str, Figures | str]:
    """By name of a fault, what it gave in a release, or why nothing came."""
    from releases import BIN, environ

    print(f"{release} ...", file=sys.stderr, flush=True)
    variables = environ(release)
    path = os.pathsep.join((variables["PYTHONPATH"], str(ROOT / "src"), str(ROOT)))
    done = subprocess.run(
        [str(BIN / "python"), __file__, "--probe", *(fault.name for fault in faults)],
        env=variables | {"PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    outcome: dict[str, Figures | str] = {fault.name: last for fault in faults}
    for line in filter(lambda each: each.startswith("{"), done.stdout.splitlines()):
        told = json.loads(line)
        found = tuple((each, message) for each, message in told["found"])
        outcome[told["name"]] = told["error"] or Figures(told["engine"], told["right"], found)
    return outcome


def probe(names: Sequence[str]) -> None:
    """In a release: one JSON line a fault, and no other line."""
    said = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for fault in (fault for fault in FAULTS if fault.name in names):
            told: dict[str, object] = {
                "name": fault.name,
                "engine": "",
                "right": "",
                "found": [],
                "error": "",
            }
            try:
                seen = fault.probe()
                told |= {"engine": seen.engine, "right": seen.right, "found": seen.found}
            except Exception as error:
                told["error"] = f"{type(error).__name__}: {error}"
            print(json.dumps(told), file=said, flush=True)


def printed(fault: Fault, release: str, came: Figures | str) -> list[str]:
    """What is said of a fault in one release, in lines of a page."""
    if isinstance(came, str):
        return [f"{release}: NOT SHOWN: {came}"]
    lines = [f"{release}: shown" if fault.shows(came) else f"{release}: NOT SHOWN"]
    rows = [("engine", came.engine), ("right", came.right)]
    rows += [(each, message) for each, message in came.found if each in fault.ids]
    for head, words in rows:
        lines += textwrap.wrap(f"{head}: {words}", 100, initial_indent="  ", subsequent_indent="    ")
    return lines


def section(fault: Fault, lines: Sequence[str]) -> list[str]:
    """A fault on the page."""
    found = " or ".join(f"`{each}`" for each in fault.ids) or "none; no invariant names it"
    facts = [f"- Releases: {fault.affected}", f"- Finding: {found}"]
    if fault.where:
        facts.insert(1, f"- Where: {fault.where}")
    says = textwrap.wrap(fault.says, 100, break_long_words=False, break_on_hyphens=False)
    return [f"## {fault.name}", "", *says, "", *facts, "", "```", *lines, "```", ""]


def page(said: dict[str, list[str]]) -> str:
    """docs/findings.md."""
    known = [fault for fault in FAULTS if fault.where]
    unknown = [fault for fault in FAULTS if not fault.where]
    return "\n".join(
        [
            "# Findings",
            "",
            "Made by `python3 scripts/findings.py --write`; do not edit. Faults of released vLLM engines",
            "in their accounting of tokens and blocks, beside the reports of `docs/detection.md`. Each is",
            "shown on the released package: its real scheduler is driven with made-up model output through",
            "one scenario under observation. *engine* is the engine's own figures, *right* is what they",
            "should be. Each is run in the first and the last release of the matrix that has it; those",
            "between are known from the corpus (`docs/detection.md`) or taken to be alike.",
            "",
            *(line for fault in known for line in section(fault, said[fault.name])),
            "# Seen, cause not known",
            "",
            *(line for fault in unknown for line in section(fault, said[fault.name])),
        ]
    )


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--probe"]:
        probe(arguments[1:])
        return 0
    sys.path.insert(0, str(Path(__file__).parent))
    from releases import MATRIX, build

    names = [word for word in arguments if word != "--write"]
    if unknown := set(names) - {fault.name for fault in FAULTS}:
        sys.exit(f"kvledger: {', '.join(sorted(unknown))}: not among {' '.join(f.name for f in FAULTS)}")
    chosen = [fault for fault in FAULTS if not names or fault.name in names]
    releases = [each for each in MATRIX if any(each in fault.shown_in for fault in chosen)]
    build(releases)
    came: dict[tuple[str, str], Figures | str] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        here = {each: [fault for fault in chosen if each in fault.shown_in] for each in releases}
        for release, outcome in zip(releases, pool.map(probed, here, here.values()), strict=True):
            came |= {(name, release): each for name, each in outcome.items()}
    said = {f.name: [line for r in f.shown_in for line in printed(f, r, came[f.name, r])] for f in chosen}
    for name, lines in said.items():
        print("\n".join([name, *lines, ""]))
    missing = [f"{name} in {r}" for (name, r), each in came.items() if not _shows(name, each)]
    if "--write" in arguments and not names:
        PAGE.write_text(page(said))
    print(f"{len(chosen)} faults, {len(came)} shows, not as stated: {', '.join(missing) or 'none'}")
    return 1 if missing else 0


def _shows(name: str, came: Figures | str) -> bool:
    (fault,) = [fault for fault in FAULTS if fault.name == name]
    return isinstance(came, Figures) and fault.shows(came)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
