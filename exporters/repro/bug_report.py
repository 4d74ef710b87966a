"""The Markdown of a bug report, as `kvledger repro --issue` writes it for upstream's tracker."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ...audit.checks.registry import catalogue
from ...audit.faults.catalogue import Fault, known
from ...audit.traffic.script import Check, Workload
from ..writers import markdown_text

if TYPE_CHECKING:
    from ...audit.repro.reproduction import Reproduction


# --- What a file or a report says of a fault: title, one paragraph, and the facts about it.


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


_SHOWN = {
    "scheduler": "scheduler",
    "asynchronous": "async scheduling",
    "policy": "policy",
    "block_size": "block size",
    "blocks": "GPU blocks",
    "groups": "KV cache groups",
    "max_running": "max_num_seqs",
    "max_batched_tokens": "max_num_batched_tokens",
    "max_model_len": "max_model_len",
    "prefix_caching": "prefix caching",
    "drafts": "speculative tokens",
    "connector": "KV connector",
    "load_failure_policy": "kv_load_failure_policy",
}
"""Settings of the recorded engine that its scheduler depends on, by vLLM's names. No models and hosts."""


def bug_report(reproduction: Reproduction, test: str) -> str:
    """The report around the file ``test``. Nothing in it comes from a prompt, and request ids are renamed."""
    workload, check = reproduction.workload, reproduction.check
    assert workload is not None and check is not None, "only what was reproduced is reported"
    return report(
        workload,
        check,
        test,
        configuration=reproduction.configuration,
        statement=reproduction.statement,
        messages=reproduction.messages,
        assumed=reproduction.assumed,
    )


def report(
    workload: Workload,
    check: Check,
    test: str,
    *,
    configuration: dict[str, object],
    statement: str,
    messages: tuple[str, ...],
    assumed: tuple[str, ...],
) -> str:
    """The parts of the report, in the order in which upstream's form asks for them."""
    explained = explain(workload, check)
    settings = [
        f"- {words}: {_setting(configuration[name])}"
        for name, words in _SHOWN.items()
        if _is_set(configuration.get(name))
    ]
    parts = [
        f"# {explained.title.removesuffix('.')}",
        explained.says,
        "\n".join(f"- {fact}" for fact in explained.facts[1:]),  # the first is the figure
        "## Versions and configuration",
        "\n".join([f"- vLLM {markdown_text(workload.release)}", *settings]),
        "The test needs neither a GPU nor a model. It was cut down from the journal of an engine with this "
        "configuration, and has a smaller one of its own.",
        "## What happened",
        f"{_sentence(check.says)}: {check.engine}",
        *(f"> {markdown_text(message)}" for message in dict.fromkeys(messages)),
        "## Expected",
        f"{_sentence(check.says)}: {check.right}",
    ]
    if statement.strip():
        counted = (
            "kvledger counts each token once, by where its KV came from. The account of the test's request:"
        )
        parts += ["## The request's account", counted, f"```\n{statement.strip()}\n```"]
    fails = "The test fails on this release, and passes on a release without the fault:"
    parts += ["## Test", fails, f"```python\n{_with_short_header(test).strip()}\n```"]
    if assumed:
        parts += ["## Assumed", "\n".join(f"- {sentence}" for sentence in assumed)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _with_short_header(test: str) -> str:
    """The file without what its header says of the fault, because the report says it above the file."""
    header, end, code = test.partition('\n"""\n')
    paragraphs = header.split("\n\n")
    usage = next((i for i, each in enumerate(paragraphs) if each.lstrip().startswith("pytest ")), 1)
    return "\n\n".join([paragraphs[0], *paragraphs[usage:]]) + end + code


def _setting(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return markdown_text(", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))


def _is_set(value: object) -> bool:
    return value is not None and value != ""
