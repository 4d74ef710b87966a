"""What a file or a report says of a fault: title, one paragraph, and the facts about it."""

from __future__ import annotations

from typing import NamedTuple

from ...audit.checks.registry import catalogue
from ...audit.faults.catalogue import Fault, known
from ...audit.traffic.script import Check, Workload


class Explanation(NamedTuple):
    """``facts``: one sentence each, for a list. ``fault``: None if the cause is not known."""

    title: str
    says: str
    facts: tuple[str, ...]
    fault: Fault | None


def explain(workload: Workload, check: Check) -> Explanation:
    """What goes wrong in this workload, as far as it is known."""
    release, fault = workload.release, known(check.finding, workload.release, traits(workload))
    right = f"Expected: {check.right}" if check.right != "" else "Expected: nothing is raised"
    facts = [f"{_sentence(check.says)}: {check.engine}. {right}.", f"Finding of kvledger: {check.finding}."]
    if fault is None:
        row = catalogue().get(check.finding)
        says = " ".join(f"{row.must_hold} {row.violated_when}".split()).replace("``", "`") if row else ""
        if row and row.references:
            facts.append(f"Such findings were reported in {', '.join(each.url for each in row.references)}.")
        facts.append(f"Seen in vLLM {release}; where in vLLM's source is not known.")
        title = f"vLLM {release}: {check.says} of {check.engine}, not {check.right}"
        return Explanation(title, says, tuple(facts), None)
    if fault.where:
        facts.append(f"Where: {fault.where}.")
    facts.append(f"Releases of {fault.project} with the fault, as far as tried: {fault.releases.words}.")
    if fault.links:
        facts.append(f"Upstream: {', '.join(fault.links)}.")
    under = "LMCache under " if "lmcache" in traits(workload) else ""
    return Explanation(f"{under}vLLM {release}: {fault.title}.", fault.text, tuple(facts), fault)


def traits(workload: Workload) -> frozenset[str]:
    """What a workload contains, in the words of :mod:`~kvledger.audit.faults.conditions`."""
    engine, script = workload.engine, workload.script
    lmcache = str(engine.get("connector") or "").startswith("lmcache")
    has = {
        "async": bool(engine.get("asynchronous")),
        "connector": engine.get("connector") is not None and not lmcache,
        "lmcache": lmcache,
        "bundled": engine.get("connector") == "lmcache bundled",
        "drafts": bool(engine.get("drafts")),
        "failed load": any(op.failed or op.failed_whole for op in script),
        "lora": any(request.lora for request in workload.requests.values()),
        "groups": len(engine.get("groups", ("full",))) > 1,
        "policy fail": engine.get("load_failure_policy") == "fail",
        "reset": any(op.do == "reset" and op.running for op in script),
        "session": any(request.resumable or request.chunks for request in workload.requests.values()),
        "v0": engine.get("scheduler") == "v0",
    }
    return frozenset(name for name, present in has.items() if present)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
