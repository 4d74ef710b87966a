"""Reproduces the faults of released engines that kvledger found beyond the upstream reports.

Usage: python3 scripts/findings.py [--write] [NAME...]     all faults, or these

Drives the real scheduler of the releases in a fault's row (scripts/releases.py) through one scenario,
and prints the engine's own figures, the right figures, and the findings of the audit. Exits with 1 if
a fault does not appear as its row says. `--write` writes docs/findings.md after a run of all faults.
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
    """One observed scenario: its events, the audit of them, and the error that the engine raised."""

    events: Sequence[Any]
    auditor: Any
    scheduler: Any
    raised: str

    def of(self, kind: str, request_id: str) -> list[Any]:
        """The events of one kind about one request, in order."""
        numbers = {e.request for e in self.kind("RequestAdded") if e.request_id == request_id}
        return [event for event in self.kind(kind) if event.request in numbers]

    def kind(self, kind: str) -> list[Any]:
        return [event for event in self.events if type(event).__name__ == kind]

    def account(self, request_id: str) -> Any:
        """The request's account, frozen."""
        (account,) = [a for a in self.auditor.ledger.accounts() if a.request_id == request_id]
        return account.freeze()

    def scheduled(self, request_id: str) -> list[int]:
        """Tokens scheduled for a request in each step whose event names the request."""
        (added,) = self.of("RequestAdded", request_id)[:1]
        rows = [
            step.changed[i : i + 4] for step in self.kind("Stepped") for i in range(0, len(step.changed), 4)
        ]
        return [row[1] for row in rows if row[0] == added.request]


@dataclass(frozen=True)
class Figures:
    """The engine's figures and the right ones, in words that are the same in every run."""

    engine: str
    right: str
    findings: tuple[tuple[str, str], ...]
    """Invariant ids and messages."""


def watch(drive: Callable[..., Any], level: str = "tokens") -> Seen:
    """Drive a scheduler observed at ``level``; an error that the engine raises is part of the result."""
    from kvledger.audit.checks.auditor import Auditor
    from kvledger.audit.engines import choose, host_version
    from kvledger.audit.journal.memory_recorder import MemoryRecorder

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
    """The sources of a prompt, as the engine reports them and as the ledger settled them."""
    (reported,) = seen.of("Reported", request_id)
    (settled,) = seen.account(request_id).settlements
    return figures(
        seen,
        f"{reported.local_tokens} local, {reported.external_tokens} external, "
        f"{reported.computed_tokens} computed",
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
    before, down = re.findall(r"from (\d+) to (\d+)", drop.message)[0]
    return figures(seen, f"{down} computed tokens", f"{before} computed tokens")


def failed_load_with_drafts(drafts: int) -> tuple[Seen, int]:
    """A synchronous load fails while the next step is in flight; also the tokens of that step's output."""
    from tests.scenarios.driving import start

    handed: list[int] = []

    def drive(attach: Callable[[Any], object]) -> None:
        driver = start(attach, connector="scripted", asynchronous=True, drafts=drafts)
        driver.connector.answer_lookups("r", 32)
        driver.add("r", 50, 8)
        driver.schedule()
        driver.schedule()
        driver.output(invalid_blocks=driver.blocks("r")[1:2])
        driver.schedule()
        outputs = driver.output(accepted=0)
        handed.append(sum(len(one.new_token_ids) for each in outputs.values() for one in each.outputs))
        driver.run()

    return watch(drive), handed[0]


def rejection_before_a_failed_load() -> Figures:
    seen, _ = failed_load_with_drafts(3)
    (drop,) = [v for v in seen.auditor.violations if v.id == "tokens/unexplained-drop"]
    before, down = re.findall(r"from (\d+) to (\d+)", drop.message)[0]
    return figures(seen, f"{down} computed tokens", f"{before} computed tokens")


def output_above_a_failed_load() -> Figures:
    seen, tokens = failed_load_with_drafts(0)
    words = "{} tokens handed to the client before the failed blocks are computed"
    return figures(seen, words.format(tokens), words.format(0))


def session_loses_its_tokens() -> Figures:
    from tests.scenarios.driving import start

    lengths: list[str] = []

    def drive(attach: Callable[[Any], object]) -> None:
        driver = start(attach, asynchronous=True)
        session = driver.add("s", 20, 2, resumable=True)
        driver.add("s", 10, 1, resumable=True)
        driver.schedule()
        driver.schedule()
        driver.output()
        driver.preempt("s", drop=False)
        driver.output()
        waits = "waits" if driver.scheduler.has_requests() else "is in no queue"
        lengths.append(f"the session has {session.num_tokens} tokens and {waits}")

    seen = watch(drive)
    return figures(seen, lengths[0] if lengths else seen.raised, "the session has 31 tokens and waits")


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
        driver.connector.answer_lookups("r", 160)
        driver.add("r", 200, 3)
        driver.schedule()
        driver.abort("r")
        driver.drain()
        driver.run()

    parts = {
        "load failed completely": scenario("load_failure_async_total_sync"),
        "ended by its failed load": scenario("load_failure_async_policy_fail_sync"),
        "aborted before an output": watch(aborted),
    }
    engine, right = [], []
    for what, seen in parts.items():
        hits = sum(max(0, e.external_hits) for e in seen.kind("LookupsCounted"))
        reported = sum(e.external_tokens for e in seen.of("Reported", "r"))
        engine.append(f"{what}: lookups {hits}, prompts {reported}")
        right.append(f"{what}: {sum(s.external for s in seen.account('r').settlements)} in both")
    return figures(parts["load failed completely"], "; ".join(engine), "; ".join(right))


def full_hit_runs_unseen() -> Figures:
    seen = scenario("full_external_hit")
    (reported,) = seen.of("Reported", "r")
    account = seen.account("r")
    rework = ", ".join(f"{tokens} for {cause}" for cause, tokens in account.rework.items())
    return figures(
        seen,
        f"{reported.computed_tokens} tokens of the prompt computed",
        f"{account.first_prompt} computed first, and again: {rework}",
    )


def failed_load_stays_cached() -> Figures:
    from tests.scenarios.driving import start

    def drive(attach: Callable[[Any], object]) -> None:
        driver = start(attach, connector="scripted")
        driver.connector.answer_lookups("r", 160)
        driver.add("r", 200, 3)
        driver.schedule()
        driver.output(invalid_blocks=driver.blocks("r")[4:10])
        driver.abort("r")
        driver.add("next", 200, 3, shares=("r", 200))
        driver.run()

    seen = watch(drive, level="blocks")
    (admitted,) = seen.of("Admitted", "next")
    hit = "the next request with this prompt finds {} tokens in the cache"
    return figures(seen, hit.format(admitted.local_tokens), hit.format(64))


def never_fits_again() -> Figures:
    from tests.scenarios.v0.audit import SCENARIOS

    seen = watch(SCENARIOS["never_fits_again_sync"])
    kept = [e for e in seen.kind("LookupKept") if e.ended]
    return figures(seen, f"{len(kept)} lookups kept for a request that has ended", "0 lookups kept")


# --- the faults -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault of released engines.

    ``shown_in``: the releases that reproduce it; ``affected``: all releases that have it, in words.
    ``engine``: the engine's figures, equal in each release. ``ids``: invariants of which at least one
    is violated; none if no invariant covers the fault. ``where``: empty if the cause is not known.
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
        """Whether the engine's figures are those of the fault, not the right ones, and the audit finds it."""
        ids = {each for each, _ in seen.findings}
        return self.engine == seen.engine != seen.right and (not self.ids or bool(ids & set(self.ids)))


FAULTS: tuple[Fault, ...] = (
    Fault(
        "placeholder-leak",
        "Under async scheduling, the scheduler skips the output of a step whose synchronous load failed, and "
        "does not remove the placeholder of its token. The request keeps the placeholder until it ends: its "
        "next step is one token longer than its sequence, and every figure computed as computed tokens "
        "minus placeholders is one too low.",
        "0.12.0 to 0.33.0",
        ("0.12.0", "0.33.0"),
        SCHEDULER.format("update_from_output") + ", for requests that `_handle_invalid_blocks` names",
        placeholder_leak,
        "137 tokens executed again, 1 placeholders at the end",
        ("tokens/in-flight",),
    ),
    Fault(
        "failed-load-counted",
        "External tokens that failed to load and were computed instead stay in the external figure and are "
        "missing from the computed figure. Savings read from it credit the external cache with work that "
        "the device did. Upstream decided this deliberately "
        "([vLLM#37460](https://github.com/vllm-project/vllm/pull/37460)), so it is a drift.",
        "0.20.0 to 0.33.0",
        ("0.20.0", "0.33.0"),
        SCHEDULER.format("schedule") + ", which sets `Request.prefill_stats`; a failure does not",
        failed_load_counted,
        "0 local, 160 external, 40 computed",
        ("connector/failed-load-counted",),
    ),
    Fault(
        "failed-load-as-local-hit",
        "External tokens that failed to load synchronously are subtracted from the external figure but not "
        "from the whole hit, and the local figure is the difference of the two. The front end reports a "
        "local prefix-cache hit where nothing was cached, and too few computed tokens.",
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
        "A request that ends because its asynchronous load failed (policy `fail`), before its first step, "
        "still has -1 cached tokens, which means not set. The front end reads it as a number: it counts one "
        "computed token more than the prompt has, although nothing was computed, and decrements a counter "
        "of local hits.",
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
        "Under async scheduling, `reset_prefix_cache(reset_running_requests=True)` marks the next token of "
        "every running request to be discarded, even for a request in prefill, which has no token in "
        "flight. A later, valid token is discarded instead, and its placeholder stays. The token is "
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
        "After such a reset, the output of the step in flight still arrives. Draft tokens rejected in it "
        "belong to the life that the reset ended, but are subtracted from the count of the new life, which "
        "then executes valid positions again.",
        "0.12.0 to 0.24.0",
        ("0.12.0", "0.24.0"),
        SCHEDULER.format("update_from_output") + ", where rejected drafts are subtracted",
        rejection_of_a_past_life,
        "53 computed tokens",
        ("tokens/unexplained-drop",),
    ),
    Fault(
        "rejection-before-a-failed-load",
        "Under async scheduling, a synchronous load fails while the next step of its request is in flight. "
        "The scheduler lowers the count of computed tokens, so the tokens of that step are no part of it any "
        "more. When the output of that step comes, its rejected draft tokens are subtracted all the same, "
        "and the request executes valid positions again.",
        "0.12.0 to 0.33.0",
        ("0.12.0", "0.33.0"),
        SCHEDULER.format("update_from_output") + ", where rejected drafts are subtracted",
        rejection_before_a_failed_load,
        "55 computed tokens",
        ("tokens/unexplained-drop",),
    ),
    Fault(
        "output-above-a-failed-load",
        "In the same history, the tokens that the step in flight sampled are handed to the client, although "
        "the step read the blocks that failed to load. The scheduler skips only the output of the step that "
        "reported the failure.",
        "0.12.0 to 0.33.0",
        ("0.12.0", "0.33.0"),
        SCHEDULER.format("update_from_output") + ", for requests that `_handle_invalid_blocks` names",
        output_above_a_failed_load,
        "1 tokens handed to the client before the failed blocks are computed",
    ),
    Fault(
        "session-loses-its-tokens",
        "A session is preempted while its last token is in flight, and its next chunk waits. When the output "
        "stops the turn, the chunk begins at the count of computed tokens, which is 0: the scheduler deletes "
        "the tokens of all turns before, but keeps their number as the length of the prompt. It also removes "
        "the session from every queue, so no step schedules it again.",
        "0.32.0; in 0.33.0 the session keeps its tokens and its place",
        ("0.32.0",),
        SCHEDULER.format("_update_request_as_session") + ", called by `_handle_stopped_request`",
        session_loses_its_tokens,
        "the session has 10 tokens and is in no queue",
    ),
    Fault(
        "load-rounded-up",
        "When an asynchronous load ends, the scheduler sets the request's computed tokens to the size of all "
        "blocks that it holds, not to the promised tokens. So up to a block of tokens that were not loaded "
        "count as computed. They are never executed, and the output comes from blocks that were not filled.",
        "0.10.2 to 0.17.0",
        ("0.10.2", "0.17.0"),
        SCHEDULER.format("_update_waiting_for_remote_kv"),
        load_rounded_up,
        "48 computed tokens when the load has ended",
        ("tokens/balance",),
    ),
    Fault(
        "session-skips-tokens",
        "A session's chunk ends after draft tokens beyond its last token were accepted, and the count of "
        "computed tokens includes them. The next chunk begins at that count, so its first tokens count as "
        "computed and are never executed: their KV is that of draft tokens which are not in the sequence.",
        "0.17.0 to 0.32.0",
        ("0.17.0", "0.32.0"),
        SCHEDULER.format("_update_request_as_session"),
        session_skips_tokens,
        "18 tokens of the chunk left to execute",
    ),
    Fault(
        "session-enqueued-twice",
        "A session with drafts under async scheduling stops and waits for its next chunk. An output that was "
        "still in flight stops it a second time, and it is enqueued twice. The scheduler finds the request "
        "running where it must be waiting, and raises, which ends the engine.",
        "0.18.1 to 0.24.0",
        ("0.18.1", "0.24.0"),
        SCHEDULER.format("_handle_stopped_request") + ", called by `update_from_output`",
        session_stops,
        "RuntimeError: Invalid request status: RUNNING",
    ),
    Fault(
        "hybrid-pool-exhausted",
        "With a full-attention and a sliding-window group, the cap on the blocks that a request may need in "
        "the window group is also applied to running requests. The check then asks for fewer blocks than "
        "are allocated, and the scheduler raises instead of preempting a request.",
        "0.20.0",
        ("0.20.0",),
        "`SingleTypeKVCacheManager.get_num_blocks_to_allocate` "
        "(`vllm/v1/core/single_type_kv_cache_manager.py`)",
        hybrid_pool,
        "ValueError: Cannot get 6 free blocks from the pool",
    ),
    Fault(
        "lookups-without-a-prompt",
        "The engine counts external hits when it admits a request, and reports the prompt with the first "
        "output. If the load fails completely, if its failure ends the request, or if the client aborts "
        "before an output, the hit stays in the lookup counters and is in no prompt's figures. The two "
        "disagree from then on, although none of these tokens was used.",
        "0.17.0 to 0.33.0",
        ("0.17.0", "0.33.0"),
        SCHEDULER.format("schedule") + ", where `connector_prefix_cache_stats` is recorded",
        lookups_disagree,
        "load failed completely: lookups 160, prompts 0; ended by its failed load: lookups 160, prompts 0; "
        "aborted before an output: lookups 160, prompts 0",
    ),
    Fault(
        "full-hit-runs-unseen",
        "An asynchronous load that covers the whole prompt leaves nothing to compute, but the last token is "
        "executed again to get its logits. The engine reports no computed token. The ledger posts the token "
        "as rework with the cause `full_hit`: the prompt's sources are right, and the work is counted.",
        "0.20.0 to 0.33.0; up to 0.19.1 the token is added to the computed and to the local tokens",
        ("0.20.0", "0.33.0"),
        SCHEDULER.format("_update_waiting_for_remote_kv"),
        full_hit_runs_unseen,
        "0 tokens of the prompt computed",
    ),
    Fault(
        "never-fits-again",
        "A swapped group that no longer fits into the cache is ignored but not freed, and its prefix-cache "
        "lookup is never released. The engine keeps the result of the lookup for a request that has ended, "
        "one for each such request.",
        "v0 of 0.9.1 and 0.9.2",
        ("0.9.1-v0", "0.9.2-v0"),
        "`Scheduler._schedule_swapped` (`vllm/core/scheduler.py`)",
        never_fits_again,
        "1 lookups kept for a request that has ended",
        ("tokens/stale-lookup",),
    ),
    Fault(
        "failed-load-stays-cached",
        "With the policy `recompute`, the blocks of a failed synchronous load keep their hashes, because the "
        "request will compute them. If the request is aborted or preempted before that, the blocks are "
        "never filled, and the next request with this prefix gets a hit on them: its output is made from "
        "their old content.",
        "0.12.0 to 0.33.0",
        ("0.12.0", "0.33.0"),
        SCHEDULER.format("_handle_invalid_blocks") + ", which evicts them only under the policy `fail`",
        failed_load_stays_cached,
        "the next request with this prompt finds 192 tokens in the cache",
        ("blocks/hash-content",),
    ),
    Fault(
        "session-leaks-blocks",
        "A session with drafts under async scheduling leaves blocks allocated that are never freed: the pool "
        "is smaller by these blocks until the engine restarts.",
        "0.27.1 and 0.30.0",
        ("0.27.1", "0.30.0"),
        "",
        session_never_ends,
        "8 blocks held by nobody at the end",
    ),
)


# --- in this process: every fault in its releases -------------------------------------------------------


def probed(release: str, faults: Sequence[Fault]) -> dict[str, Figures | str]:
    """The figures of each fault in a release, or the error, by the fault's name."""
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
        row = json.loads(line)
        findings = tuple((each, message) for each, message in row["findings"])
        outcome[row["name"]] = row["error"] or Figures(row["engine"], row["right"], findings)
    return outcome


def probe(names: Sequence[str]) -> None:
    """In a release: print one JSON line for each fault, and no other line."""
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for fault in (fault for fault in FAULTS if fault.name in names):
            row: dict[str, object] = {
                "name": fault.name,
                "engine": "",
                "right": "",
                "findings": [],
                "error": "",
            }
            try:
                seen = fault.probe()
                row |= {"engine": seen.engine, "right": seen.right, "findings": seen.findings}
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"
            print(json.dumps(row), file=stdout, flush=True)


def printed(fault: Fault, release: str, outcome: Figures | str) -> list[str]:
    """The lines about a fault in one release."""
    if isinstance(outcome, str):
        return [f"{release}: NOT SHOWN: {outcome}"]
    lines = [f"{release}: shown" if fault.shows(outcome) else f"{release}: NOT SHOWN"]
    rows = [("engine", outcome.engine), ("right", outcome.right)]
    rows += [(each, message) for each, message in outcome.findings if each in fault.ids]
    for head, words in rows:
        lines += textwrap.wrap(f"{head}: {words}", 100, initial_indent="  ", subsequent_indent="    ")
    return lines


def section(fault: Fault, lines: Sequence[str]) -> list[str]:
    """The section about a fault."""
    ids = " or ".join(f"`{each}`" for each in fault.ids) or "none; no invariant covers it"
    facts = [f"- Releases: {fault.affected}", f"- Finding: {ids}"]
    if fault.where:
        facts.insert(1, f"- Where: {fault.where}")
    says = textwrap.wrap(fault.says, 100, break_long_words=False, break_on_hyphens=False)
    return [f"## {fault.name}", "", *says, "", *facts, "", "```", *lines, "```", ""]


def page(lines: dict[str, list[str]]) -> str:
    """docs/findings.md."""
    explained = [fault for fault in FAULTS if fault.where]
    unexplained = [fault for fault in FAULTS if not fault.where]
    return "\n".join(
        [
            "# Findings",
            "",
            "Generated by `python3 scripts/findings.py --write`; do not edit. These are faults in how",
            "released vLLM engines count tokens and blocks, beyond the reports of `docs/detection.md`. Each",
            "is reproduced on the released package: one scenario drives its real scheduler, with scripted",
            "model output, while kvledger observes. *engine* shows the engine's own figures, *right* the",
            "right ones. Each fault is run in the first and the last release of the matrix that has it. The",
            "scenarios of `docs/detection.md` show it in most releases between; the rest are assumed alike.",
            "",
            *(line for fault in explained for line in section(fault, lines[fault.name])),
            "# Faults whose cause is not known",
            "",
            *(line for fault in unexplained for line in section(fault, lines[fault.name])),
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
    outcomes: dict[tuple[str, str], Figures | str] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        here = {each: [fault for fault in chosen if each in fault.shown_in] for each in releases}
        for release, outcome in zip(releases, pool.map(probed, here, here.values()), strict=True):
            outcomes |= {(name, release): each for name, each in outcome.items()}
    lines = {
        f.name: [line for r in f.shown_in for line in printed(f, r, outcomes[f.name, r])] for f in chosen
    }
    for name, mine in lines.items():
        print("\n".join([name, *mine, ""]))
    missing = [f"{name} in {r}" for (name, r), each in outcomes.items() if not _shows(name, each)]
    if "--write" in arguments and not names:
        PAGE.write_text(page(lines))
    print(f"{len(chosen)} faults in {len(outcomes)} runs, not reproduced: {', '.join(missing) or 'none'}")
    return 1 if missing else 0


def _shows(name: str, outcome: Figures | str) -> bool:
    (fault,) = [fault for fault in FAULTS if fault.name == name]
    return isinstance(outcome, Figures) and fault.shows(outcome)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
