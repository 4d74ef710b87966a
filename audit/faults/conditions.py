"""The words in which a fault says when it shows: settings of an engine, and what must happen on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..release_semantics import release

Settings = Mapping[str, object]
"""An engine's configuration, as ``EngineStarted`` has it, with ``v0``, whether the v0 scheduler runs, and
``lmcache``, the release of LMCache beside it, or None. What is not known is absent; a connector of an unknown
class is ""."""


class Condition(NamedTuple):
    """One condition. ``says``: the words after *if*.

    ``met``: whether an engine's settings fulfil it, rule it out, or (None) leave it open. ``trait``: the word
    of the same condition for a workload that ``kvledger repro`` made; empty if a workload does not tell.
    """

    says: str
    met: Callable[[Settings], bool | None] | None = None
    trait: str = ""


def _above(name: str, least: int) -> Callable[[Settings], bool | None]:
    def met(settings: Settings) -> bool | None:
        value = settings.get(name)
        return value > least if isinstance(value, int) else None

    return met


def _connector(name: str = "") -> Callable[[Settings], bool | None]:
    """Whether the connector's class has a name that begins so; MultiConnector may have it among its own."""

    def met(settings: Settings) -> bool | None:
        if "connector" not in settings:
            return None
        connector = settings["connector"]
        if connector is None:
            return False
        return None if name and connector in ("", "MultiConnector") else str(connector).startswith(name)

    return met


def _equals(name: str, wanted: object) -> Callable[[Settings], bool | None]:
    return lambda settings: settings[name] == wanted if name in settings else None


def _with_connector(settings: Settings) -> bool | None:
    """Without a connector there is no load; with one, the settings do not tell what becomes of it."""
    return False if settings.get("connector", "unknown") is None else None


def _encoder(settings: Settings) -> bool | None:
    """With an encoder cache, the settings do not tell what requests bring; older journals do not name it."""
    return False if settings.get("encoder_cache", "unknown") is None else None


LMCACHE = "LMCacheConnectorV1"


def _lmcache(settings: Settings) -> bool | None:
    return False if settings.get("lmcache", "unknown") is None else _connector(LMCACHE)(settings)


def _bundled(settings: Settings) -> bool | None:
    """The bundled adapter can't be imported together with LMCache 0.4 and later."""
    version = settings.get("lmcache")
    return False if isinstance(version, str) and release(version) >= (0, 4) else None


CONDITIONS: dict[str, Condition] = {
    # how the engine is configured
    "async": Condition("async scheduling is on", _equals("asynchronous", True), "async"),
    "drafts": Condition("speculative decoding is on", _above("drafts", 0), "drafts"),
    "groups": Condition("the model has several KV cache groups", _above("groups", 1), "groups"),
    "replayed window": Condition("a KV cache group replays the last window of a hit"),
    "window": Condition("a KV cache group has a sliding window"),
    "states": Condition("a KV cache group has states, such as Mamba layers"),
    "adapters": Condition("LoRA adapters are served", _above("loras", 0), "lora"),
    "encoder inputs": Condition("requests have images or other encoder inputs", _encoder),
    "encoder-decoder": Condition("the model is an encoder-decoder, such as Whisper", _encoder),
    "priority": Condition("the scheduling policy is priority", _equals("policy", "priority")),
    "larger blocks": Condition("blocks of states are larger than the blocks by which prefixes are hashed"),
    "kv events": Condition("KV events are published", lambda settings: "kv_events_port" in settings or None),
    "copies": Condition("requests compute the same tokens at the same time"),
    "connector": Condition("a KV connector is configured", _connector(), "connector"),
    "lmcache": Condition(f"{LMCACHE} is the connector", _lmcache, "lmcache"),
    "bundled adapter": Condition("`use_native` selects the adapter that vLLM bundles", _bundled, "bundled"),
    "cpu offload": Condition(
        "SimpleCPUOffloadConnector is the connector", _connector("SimpleCPUOffloadConnector")
    ),
    "decode engine": Condition(
        "a prefill engine hands KV over to this engine", _equals("kv_role", "kv_consumer")
    ),
    "policy fail": Condition(
        "the load failure policy is `fail` (the default since 0.17)",
        _equals("load_failure_policy", "fail"),
        "policy fail",
    ),
    "policy recompute": Condition(
        "the load failure policy is `recompute` (the default before 0.17)",
        _equals("load_failure_policy", "recompute"),
    ),
    "v0": Condition("the v0 scheduler runs", _equals("v0", True), "v0"),
    # what must happen
    "failed load": Condition("a load fails", _with_connector, "failed load"),
    "failed synchronous load": Condition("a synchronous load fails", _with_connector, "failed load"),
    "failed asynchronous load": Condition("an asynchronous load fails", _with_connector, "failed load"),
    "asynchronous load": Condition("a load is asynchronous", _with_connector),
    "unaligned load": Condition("the connector promises tokens that end within a block", _with_connector),
    "full hit": Condition("a load covers the whole prompt", _with_connector),
    "aborted": Condition("a client aborts a request"),
    "aborted load": Condition("a client aborts a request during its load", _with_connector),
    "batches": Condition("three or more batches are in flight"),
    "preempted": Condition("a request is preempted"),
    "preempted in prefill": Condition("a request is preempted during prefill"),
    "lost": Condition("its request is aborted or preempted before it computes the blocks"),
    "lost prompt": Condition("a preemption in prefill or a failed load loses KV of a prompt"),
    "never ran": Condition("a request ends, or is looked up again, before its admission runs"),
    "no room": Condition("a waiting request can't be admitted at first"),
    "oversized prompt": Condition("a prompt needs more blocks than the pool has"),
    "full pool": Condition("the pool runs out of blocks"),
    "swapped": Condition("a request is swapped out and grows longer than the pool"),
    "reset": Condition("`reset_prefix_cache` preempts running requests", None, "reset"),
    "session": Condition("a client streams its input in chunks (a session)", None, "session"),
    "chunks": Condition("a prompt is computed in several chunks"),
    "several clients": Condition("clients with different cache salts or LoRA adapters share the store"),
    "samples": Condition("a request asks for several samples (`n` > 1)"),
    "weights changed in a pause": Condition("weights are updated while the engine is paused"),
    "full report": Condition("a client asks for `kv_cache_report_mode: full`"),
    "no reading": Condition("requests may not read a cache, as those with `prompt_logprobs`"),
}
"""Every condition by its word in the files of ``data/``."""


def unmet(words: Sequence[str], settings: Settings) -> list[str] | None:
    """Those of the conditions that these settings leave open; None if a setting rules the fault out."""
    left = []
    for word in words:
        met = CONDITIONS[word].met
        holds = met(settings) if met is not None else None
        if holds is False:
            return None
        if holds is None:
            left.append(word)
    return left


def sentence(words: Sequence[str]) -> str:
    """``if a and b``; empty for no condition."""
    says = [CONDITIONS[word].says for word in words]
    return "if " + ", ".join(says[:-1]) + " and " * (len(says) > 1) + says[-1] if says else ""


def traits(words: Sequence[str]) -> frozenset[str]:
    """What a workload that shows the fault contains, as far as a workload tells."""
    return frozenset(CONDITIONS[word].trait for word in words) - {""}
