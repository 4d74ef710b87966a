"""Reproduces the faults of released engines one by one, and writes the page of all known faults.

Usage: .venv/bin/python scripts/findings.py [--write | --text] [NAME...]     all faults, or these

A fault with `runs` in its file of audit/faults/data has a probe here. Drives the real scheduler of the
releases in its runs (scripts/releases.py) through one scenario, and prints the engine's own figures, the
right figures, and the findings of the audit. Exits with 1 if a fault does not appear as its file says.
`--write` writes docs/reference/findings.md after a run of all faults; `--text` runs nothing and writes the
page again around the figures that it has.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvledger.audit.faults.catalogue import HARMS, Fault, Run, catalogue, facts
from kvledger.audit.release_semantics import contract

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "findings.md"
SHARED = {"failed-load-as-local-hit": "failed-load-counted"}
"""Faults that the probe of another fault shows."""


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
    from kvledger.audit.traffic.driver import Observation

    observation, raised = Observation(level), ""
    try:
        drive(observation)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    auditor = Auditor(keep_closed=True, debug=True)
    events = observation.stop()
    auditor.feed_all(events)
    return Seen(events, auditor, observation.schedulers[0], raised)


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

Probe = Callable[[], Figures]
PROBES: dict[str, Probe] = {}
"""By the fault's id, which is the function's name."""


def probe(function: Probe) -> Probe:
    PROBES[function.__name__.replace("_", "-")] = function
    return function


@probe
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


@probe
def failed_load_counted() -> Figures:
    return split(scenario("load_failure_sync_sync"), "r")


@probe
def ended_before_it_ran() -> Figures:
    return split(scenario("load_failure_async_policy_fail_sync"), "r")


@probe
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


@probe
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


@probe
def rejection_before_a_failed_load() -> Figures:
    seen, _ = failed_load_with_drafts(3)
    (drop,) = [v for v in seen.auditor.violations if v.id == "tokens/unexplained-drop"]
    before, down = re.findall(r"from (\d+) to (\d+)", drop.message)[0]
    return figures(seen, f"{down} computed tokens", f"{before} computed tokens")


@probe
def output_above_a_failed_load() -> Figures:
    seen, tokens = failed_load_with_drafts(0)
    words = "{} tokens handed to the client before the failed blocks are computed"
    return figures(seen, words.format(tokens), words.format(0))


@probe
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


@probe
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


@probe
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


@probe
def session_enqueued_twice() -> Figures:
    seen = scenario("session_async_speculative")
    return figures(seen, seen.raised or "nothing raised", "the session waits for its next chunk")


@probe
def session_waits_with_placeholders() -> Figures:
    seen = scenario("session_async_speculative")
    pool = seen.scheduler.kv_cache_manager.block_pool
    held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    return figures(seen, f"{held} blocks held by nobody at the end {seen.raised}".strip(), "0 blocks")


@probe
def hybrid_pool_exhausted() -> Figures:
    seen = scenario("crowd_hybrid")
    return figures(seen, seen.raised or "nothing raised", "a request is preempted")


@probe
def lookups_without_a_prompt() -> Figures:
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


@probe
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


@probe
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


@probe
def never_fits_again() -> Figures:
    from tests.scenarios.v0.audit import SCENARIOS

    seen = watch(SCENARIOS["never_fits_again_sync"])
    kept = [e for e in seen.kind("LookupKept") if e.ended]
    return figures(seen, f"{len(kept)} lookups kept for a request that has ended", "0 lookups kept")


@probe
def last_step_not_offloaded() -> Figures:
    from tests.scenarios.offload_race import offloaded

    seen = watch(lambda attach: offloaded(attach, asynchronous=False, output=1, shared=208))
    admitted = seen.of("Admitted", "third")[0]
    found = "the next request with these 208 tokens finds {} of them"
    return figures(seen, found.format(admitted.local_tokens + admitted.external_tokens), found.format(208))


NOT_DRIVEN = (
    (
        "LMCache",
        "pull/4762",
        "LMCacheMPConnector loads although MultiConnector chose another connector, up to 0.5.4: the "
        "journal does not say which of several connectors promised a load.",
    ),
    (
        "vllm",
        "issues/47812",
        "Block numbers of one KV cache group are taken for those of another: not tried yet.",
    ),
    ("vllm", "pull/52912", "A tier serves its peer too few blocks: it needs two engines over NIXL."),
    (
        "vllm",
        "issues/49829",
        "A request waits for a write to a second tier that never ends: no driver has a second tier.",
    ),
    (
        "vllm",
        "issues/49176",
        "A read of a second tier fails once and is tried for ever: no driver has a second tier.",
    ),
    (
        "vllm",
        "pull/47021",
        "A block is read after its lease ended: it needs two engines over NIXL and a lease that ends.",
    ),
    (
        "vllm",
        "pull/56855",
        "MooncakeConnector reports the blocks of a failed load by their numbers, in a model with several KV "
        "cache groups: it needs two engines and Mooncake's transfer engine.",
    ),
    (
        "vllm-ascend",
        "issues/16639",
        "Hits happen and the engine counts none: vllm-ascend needs Ascend's libraries.",
    ),
)
"""Public reports that no scenario drives: owner's repository, path and why."""


# --- the faults -----------------------------------------------------------------------------------------


def with_runs() -> dict[str, Fault]:
    """The faults that are reproduced here."""
    return {id: fault for id, fault in catalogue().items() if fault.runs}


def ids_of(fault: Fault, run: Run) -> tuple[str, ...]:
    """Invariants of which at least one is violated in a run; none if no invariant covers the fault."""
    return fault.findings if run.findings is None else run.findings


def shows(fault: Fault, run: Run, seen: Figures) -> bool:
    """Whether the engine's figures are those of the fault, not the right ones, and the audit finds it."""
    ids = {each for each, _ in seen.findings}
    expected = ids_of(fault, run)
    return run.engine == seen.engine != seen.right and (not expected or bool(ids & set(expected)))


# --- in this process: every fault in its releases -------------------------------------------------------


def probed(release: str, names: Sequence[str]) -> dict[str, Figures | str]:
    """The figures of each fault in a release, or the error, by the fault's id."""
    from releases import BIN, environ

    print(f"{release} ...", file=sys.stderr, flush=True)
    variables = environ(release)
    path = os.pathsep.join((variables["PYTHONPATH"], str(ROOT / "src"), str(ROOT)))
    done = subprocess.run(
        [str(BIN / "python"), __file__, "--probe", *names],
        env=variables | {"PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    outcome: dict[str, Figures | str] = dict.fromkeys(names, last)
    for line in filter(lambda each: each.startswith("{"), done.stdout.splitlines()):
        row = json.loads(line)
        findings = tuple((each, message) for each, message in row["findings"])
        outcome[row["id"]] = row["error"] or Figures(row["engine"], row["right"], findings)
    return outcome


def print_figures(names: Sequence[str]) -> None:
    """In a release: print one JSON line for each fault, and no other line."""
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for name in names:
            row: dict[str, object] = {"id": name, "engine": "", "right": "", "findings": [], "error": ""}
            try:
                seen = PROBES[SHARED.get(name, name)]()
                row |= {"engine": seen.engine, "right": seen.right, "findings": seen.findings}
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"
            print(json.dumps(row), file=stdout, flush=True)


def printed(fault: Fault, run: Run, release: str, outcome: Figures | str) -> list[str]:
    """The lines about a fault in one release."""
    if isinstance(outcome, str):
        return [f"{release}: NOT SHOWN: {outcome}"]
    lines = [f"{release}: shown" if shows(fault, run, outcome) else f"{release}: NOT SHOWN"]
    rows = [("engine", outcome.engine), ("right", outcome.right)]
    rows += [(each, message) for each, message in outcome.findings if each in ids_of(fault, run)]
    for head, words in rows:
        lines += textwrap.wrap(f"{head}: {words}", 100, initial_indent="  ", subsequent_indent="    ")
    return lines


# --- the page -------------------------------------------------------------------------------------------


def section(fault: Fault, lines: Sequence[str]) -> list[str]:
    """The section about a fault."""
    says = textwrap.wrap(fault.text, 100, break_long_words=False, break_on_hyphens=False)
    shown = ["```", *lines, "```", ""] if lines else []
    known = [f"- {name}: {text}" for name, text in facts(fault)]
    upstream = [f"- Upstream: {linked(fault)}"] if fault.links else []
    return [f"## {fault.id}", "", *says, "", *known, *upstream, "", *shown]


def linked(fault: Fault) -> str:
    return ", ".join(f"[{name}]({url})" for name, url in fault.named_links)


def drift(fault: Fault) -> str:
    """The row of a drift that is in the table only."""
    note = f"; {fault.releases.note}" if fault.releases.note else ""
    found = ", ".join(f"`{each}`" for each in fault.findings)
    upstream = f" {linked(fault)}" if fault.links else ""
    return (
        f"| {found} | {fault.span}{note} | {fault.text}{upstream} | {fault.condition.removeprefix('if ')} |"
    )


def page(lines: Mapping[str, list[str]]) -> str:
    """docs/reference/findings.md."""
    worst_first = sorted(catalogue().values(), key=lambda fault: (list(HARMS).index(fault.harms), fault.id))
    in_table = [fault for fault in worst_first if fault.kind == "drift" and not fault.runs]
    return "\n".join(
        [
            "# Findings",
            "",
            "Generated by `scripts/findings.py --write` from `audit/faults/data`; do not edit. These are the",
            "known faults of released engines in how they count tokens and blocks, the worst first.",
            "`kvledger doctor faults` prints those of one release.",
            "",
            "Where *engine* and *right* stand, the fault is reproduced on the released package: one",
            "scenario drives its real scheduler, with scripted model output, while kvledger observes.",
            "*engine* shows the engine's own figures, *right* the right ones. Each fault is run in the first",
            "and the last release of the matrix that has it. The scenarios of [detection.md](detection.md)",
            "show it in most releases between, and they show the faults without such figures. The rest are",
            "assumed alike.",
            "",
            *(
                line
                for fault in worst_first
                if fault not in in_table
                for line in section(fault, lines.get(fault.id, ()))
            ),
            "# Drifts of figures",
            "",
            "The engine counts these deliberately by a rule that misleads, so the verdict stays clean.",
            "[reconciliation.md](../reconciliation.md) defines each figure.",
            "",
            "| finding | releases | what is counted | condition |",
            "|---|---|---|---|",
            *map(drift, in_table),
            "",
            "# Reports that are not driven here",
            "",
            *(not_driven(*each) for each in NOT_DRIVEN),
            "",
        ]
    )


def not_driven(repository: str, path: str, why: str) -> str:
    """The line of a report that no scenario drives."""
    owner = "LMCache" if repository == "LMCache" else "vllm-project"
    name = f"{contract(repository).name}#{path.rpartition('/')[2]}"
    return f"- [{name}](https://github.com/{owner}/{repository}/{path}): {why}"


def figures_on(page: str) -> dict[str, list[str]]:
    """The figures that a page has, by the fault's id."""
    sections = (section.split("\n") for section in page.split("\n## ")[1:])
    return {
        head: lines[lines.index("```") + 1 : lines.index("```", lines.index("```") + 1)]
        for head, *lines in sections
        if "```" in lines
    }


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--probe"]:
        print_figures(arguments[1:])
        return 0
    if list(arguments) == ["--text"]:
        PAGE.write_text(page(figures_on(PAGE.read_text())))
        return 0
    sys.path.insert(0, str(Path(__file__).parent))
    from releases import MATRIX, build

    names = [word for word in arguments if word != "--write"]
    known = with_runs()
    if unknown := set(names) - set(known):
        sys.exit(f"kvledger: {', '.join(sorted(unknown))}: not among {' '.join(known)}")
    chosen = [(known[name], run) for name in names or known for run in known[name].runs]
    here = {each: [fault.id for fault, run in chosen if each in run.releases] for each in MATRIX}
    here = {release: faults for release, faults in here.items() if faults}
    build(list(here))
    outcomes: dict[tuple[str, str], Figures | str] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for release, outcome in zip(here, pool.map(probed, here, here.values()), strict=True):
            outcomes |= {(name, release): each for name, each in outcome.items()}
    lines: dict[str, list[str]] = {}
    missing = []
    for fault, run in chosen:
        for release in run.releases:
            outcome_here = outcomes[fault.id, release]
            lines.setdefault(fault.id, []).extend(printed(fault, run, release, outcome_here))
            if isinstance(outcome_here, str) or not shows(fault, run, outcome_here):
                missing.append(f"{fault.id} in {release}")
    for name, mine in lines.items():
        print("\n".join([name, *mine, ""]))
    if "--write" in arguments and not names:
        PAGE.write_text(page(lines))
    print(f"{len(lines)} faults in {len(outcomes)} runs, not reproduced: {', '.join(missing) or 'none'}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
