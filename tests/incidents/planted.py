"""Planted incidents: what was served before, what then, and the cause that must be named first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.incidents.serving import BEGAN, Plan, serve

QUIET = Plan()
BEFORE_SECONDS, THEN_SECONDS, PAUSE_SECONDS = 45.0, 20.0, 2.0


@dataclass(frozen=True, kw_only=True)
class Incident:
    """``then`` replaces ``before`` at once; if ``restarted``, in another engine process."""

    cause: str
    """The name of the cause; "" if nothing that harms anybody changed."""
    says: str = ""
    """What the first sentence has."""
    before: Plan = QUIET
    then: Plan = QUIET
    restarted: bool = False
    pause: float = PAUSE_SECONDS
    """Seconds between two processes, by the clock of the host: one that is set forward looks like a pause."""
    late: float = 0.0
    """How many seconds after the change the incident is said to begin."""
    seed: int = 0

    @property
    def began(self) -> float:
        """When ``then`` begins, in seconds."""
        return BEFORE_SECONDS + (self.pause if self.restarted else 0.0)

    @property
    def since(self) -> str:
        """When it is said to begin, as --since takes it."""
        return _instant(self.began + self.late - (1.0 if self.restarted else 0.0))

    @property
    def at(self) -> str:
        """When the alarm came, as --at takes it."""
        return _instant(self.began + THEN_SECONDS + 1.0)

    def write(self, folder: Path) -> Path:
        """Write the journals."""
        seed = self.seed
        if self.restarted:
            serve(folder, "before", (self.before, BEFORE_SECONDS), seed=seed)
            serve(folder, "then", (self.then, THEN_SECONDS), began=self.began, seed=seed)
        else:
            serve(folder, "engine", (self.before, BEFORE_SECONDS), (self.then, THEN_SECONDS), seed=seed)
        return folder


def _instant(seconds: float) -> str:
    return datetime.fromtimestamp(BEGAN + seconds, timezone.utc).isoformat()


def _swap_cached_blocks(driver: Any) -> None:
    """Let two hashes of the prefix cache lead to each other's block."""
    cache = driver.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
    hashes = list(cache)
    if len(hashes) > 1:
        cache[hashes[0]], cache[hashes[1]] = cache[hashes[1]], cache[hashes[0]]


ALL = frozenset(QUIET.rates)
STORE = Plan(setup={"connector": "scripted", "asynchronous": True}, stored=112, stamped=ALL)
DRAFTS = Plan(setup={"drafts": 3}, accepted=3, output=16)
URGENT = Plan(
    setup={"policy": "priority", "max_running": 2},
    urgent=0.1,
    output=16,
    rates=dict.fromkeys(QUIET.rates, 6.0),
)
MANY = Plan(prefixes=60, setup={"blocks": 600})
THREE = replace(MANY, engines=3)
TWO = replace(QUIET, engines=2)
WARM = Plan(prefixes=60, setup={"blocks": 2000})
BLOCKS = Plan(level="blocks")

PLANTED: Mapping[str, Incident] = {
    "pool cut": Incident(
        cause="settings", says="blocks from 400 to 60", then=Plan(setup={"blocks": 60}), restarted=True
    ),
    "smaller steps": Incident(
        cause="settings",
        says="max_batched_tokens from 8192 to 16",
        then=Plan(setup={"max_batched_tokens": 16}),
        restarted=True,
    ),
    "caching switched off": Incident(
        cause="settings",
        says="prefix_caching from True to False",
        then=Plan(setup={"prefix_caching": False}),
        restarted=True,
    ),
    "engine restarted": Incident(
        cause="restart", says="1 of 1 engine started", before=WARM, then=WARM, restarted=True
    ),
    "engine restarted after an hour": Incident(
        cause="restart", says="1 of 1 engine started", before=WARM, then=WARM, restarted=True, pause=3600.0
    ),
    "engine killed": Incident(
        cause="died",
        says="1 of 2 engines died: ",
        before=TWO,
        then=replace(TWO, dies=1),
    ),
    "upgraded": Incident(
        cause="settings",
        says="release from 0.31.0 to 0.32.0",
        before=replace(WARM, version="0.31.0"),
        then=WARM,
        restarted=True,
    ),
    "other weights": Incident(
        cause="settings",
        says="model from small to small-v2",
        before=replace(WARM, model="small"),
        then=replace(WARM, model="small-v2"),
        restarted=True,
    ),
    "prefix broken by a timestamp": Incident(
        cause="prefix", says="Prompts no longer", then=replace(QUIET, stamped=ALL)
    ),
    "prefix broken, at level blocks": Incident(
        cause="prefix",
        says="Prompts no longer begin with a prefix that was seen before",
        before=BLOCKS,
        then=replace(BLOCKS, stamped=ALL),
    ),
    "tenant flood": Incident(
        cause="flood",
        says="Tenant blue asks for",
        then=replace(QUIET, rates={"acme": 4.0, "blue": 40.0, "cyan": 4.0}),
    ),
    "noisy neighbour": Incident(
        cause="flood",
        says="Tenant blue asks for",
        then=replace(QUIET, tails={"blue": 900}),
    ),
    "new client that shares nothing": Incident(
        cause="flood",
        says="it is new",
        then=replace(QUIET, rates={**QUIET.rates, "drone": 12.0}, tails={"drone": 300}, stamped={"drone"}),
    ),
    "pool cut and a flood": Incident(
        cause="settings",
        says="blocks from 400 to 60",
        then=Plan(setup={"blocks": 60}, rates={"acme": 4.0, "blue": 40.0, "cyan": 4.0}),
        restarted=True,
    ),
    "more traffic": Incident(
        cause="traffic",
        says="requests a second come",
        then=replace(QUIET, rates=dict.fromkeys(QUIET.rates, 8.0)),
    ),
    "longer prompts": Incident(
        cause="longer-prompts", says="Prompts are longer", then=replace(QUIET, tail=200)
    ),
    "longer outputs": Incident(
        cause="longer-outputs", says="Outputs are longer", then=replace(QUIET, output=24)
    ),
    "store lost": Incident(
        cause="store-lost", says="of prompt tokens in its store", before=STORE, then=replace(STORE, stored=1)
    ),
    "load failures": Incident(
        cause="loads-fail",
        says="Loads of the KV connector fail",
        before=STORE,
        then=replace(STORE, failing=0.5),
    ),
    "slow loads": Incident(
        cause="slow-loads",
        says="Loads of the KV connector are slower",
        before=STORE,
        then=replace(STORE, load_steps=12),
    ),
    "router restarted": Incident(
        cause="routing", says="of requests go to the engine", before=THREE, then=replace(THREE, pinned=False)
    ),
    "adapter replaced": Incident(
        cause="new-adapter",
        says="Adapter sql-2 is new",
        before=replace(WARM, adapter="sql-1"),
        then=replace(WARM, adapter="sql-2"),
    ),
    "wrong KV": Incident(
        cause="wrong-kv",
        says="Requests read KV that is not theirs",
        before=BLOCKS,
        then=replace(BLOCKS, tamper=_swap_cached_blocks),
    ),
    "slow steps": Incident(
        cause="slow-steps",
        says="The same work takes the engine 2.0 times as long",
        then=replace(QUIET, fixed_step=8e-3, token_seconds=2e-4),
    ),
    "drafts rejected": Incident(
        cause="drafts-rejected", says="Rejected drafts take", before=DRAFTS, then=replace(DRAFTS, accepted=0)
    ),
    "cache resets": Incident(
        cause="resets", says="The prefix cache was reset", then=replace(QUIET, reset_every=1.0)
    ),
    "priority starvation": Incident(
        cause="starved", says="Requests of priority 5 wait", before=URGENT, then=replace(URGENT, urgent=0.85)
    ),
    "clients leave": Incident(
        cause="aborted", says="of requests were aborted", then=replace(QUIET, aborted=0.3)
    ),
}

CONTROLS: Mapping[str, Incident] = {
    **{
        name: Incident(cause="", before=plan, then=plan)
        for name, plan in {
            "quiet": QUIET,
            "connector": STORE,
            "drafts": replace(DRAFTS, accepted=None),
            "priorities": URGENT,
            "three engines": replace(QUIET, engines=3),
            "level blocks": BLOCKS,
        }.items()
    },
    "quiet, other requests": Incident(cause="", seed=1),
    "a pause of a day": Incident(cause="", restarted=True, pause=86_000.0),
    "fewer requests": Incident(cause="", then=replace(QUIET, rates=dict.fromkeys(QUIET.rates, 2.5))),
    "a setting that harms nobody": Incident(
        cause="", restarted=True, then=replace(QUIET, setup={"blocks": 380})
    ),
    "pool cut before": Incident(cause="", restarted=True, then=Plan(setup={"blocks": 60}), late=10.0),
    "noisy neighbour before": Incident(cause="", then=replace(QUIET, tails={"blue": 900}), late=10.0),
}
