"""The situations of a score card: how a connector is driven into each, and how the events show that it was.

Each situation fills the store through the connector itself: a request runs to its end, and then the
local prefix cache is emptied. Whether the situation came about is read from the events, never from the
connector.

A drawn situation is a random history: prompts that share beginnings of any length, steps of any budget,
aborts, preemptions and resets. Nobody chose it, so it also meets what the fixed ones do not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Protocol

from .. import events as ev

Events = list[ev.Event]
SetupOptions = dict[str, Any]
MAX_WAIT_STEPS = 400
"""Steps to wait for a request that does not start to run."""


class EngineStarter(Protocol):
    """Starts the engines of one situation; a second engine reads what the first one saved."""

    def start(self, **setup: Any) -> Any:
        """Start an engine; returns its driver."""


class Situation(NamedTuple):
    """One situation: ``drive`` makes it happen, ``reached`` checks its events to see whether it did."""

    title: str
    drive: Callable[[EngineStarter, SetupOptions], None]
    reached: Callable[[Events], bool]


def _save(driver: Any, name: str, tokens: int) -> None:
    driver.add(name, tokens, 1)
    driver.run()
    driver.reset_prefix_cache()


def _repeat(driver: Any, name: str, tokens: int, of: str, output_tokens: int = 3) -> None:
    """Add a prompt whose first ``tokens`` are those of the earlier request ``of``."""
    driver.add(name, tokens, output_tokens, shares=(of, tokens))


def _run_until_output(driver: Any, name: str, output_tokens: int) -> None:
    for _ in range(MAX_WAIT_STEPS):
        request = driver.scheduler.requests.get(name)
        if request is None or request.num_output_tokens >= output_tokens:
            break
        driver.step()
    driver.drain()


def _preempt(driver: Any, name: str) -> bool:
    """Preempt a request if it is running; returns whether it was."""
    running = driver.scheduler.requests.get(name) in driver.scheduler.running
    if running:
        driver.preempt(name)
    return running


# --- was it reached? --------------------------------------------------------------------------------------


def _looked_up(events: Events) -> bool:
    return any(isinstance(e, ev.Matched) for e in events)


def _hit(events: Events, least: int = 1) -> bool:
    return any(isinstance(e, ev.Admitted) and e.external_tokens >= least for e in events)


def _hit_on_part(events: Events) -> bool:
    """Whether a hit left more of a prompt to compute than its last token, which is always computed."""
    prompts: dict[int, int] = {}
    parts: list[bool] = []
    for event in events:  # engine by engine: request numbers repeat only after a RequestAdded
        if isinstance(event, ev.RequestAdded):
            prompts[event.request] = event.prompt_tokens
        if isinstance(event, ev.Admitted) and event.external_tokens > 0:
            parts.append(event.local_tokens + event.external_tokens < prompts.get(event.request, 0) - 1)
    return any(parts)


def _deferred(events: Events) -> bool:
    return _hit(events) and any(isinstance(e, ev.AdmissionFailed) and e.reason == "deferred" for e in events)


def _hit_on_all(events: Events) -> bool:
    return _hit(events, 95)


def _hit_beyond_local(events: Events) -> bool:
    return any(isinstance(e, ev.Admitted) and e.local_tokens and e.external_tokens > 0 for e in events)


def _preempted_with_hit(events: Events) -> bool:
    return _hit(events) and any(isinstance(e, ev.Preempted) for e in events)


def _resumed_with_hit(events: Events) -> bool:
    return any(isinstance(e, ev.Admitted) and e.resumed and e.external_tokens > 0 for e in events)


def _load_failed(events: Events) -> bool:
    return _hit(events) and any(isinstance(e, ev.LoadFailed | ev.RolledBack) for e in events)


def _loaded_asynchronously(events: Events) -> bool:
    return any(isinstance(e, ev.Admitted) and e.asynchronous for e in events)


# --- how to get there --------------------------------------------------------------------------------------


def cache_miss(engines: EngineStarter, setup: SetupOptions) -> None:
    driver = engines.start(**setup)
    driver.add("a", 100, 3)
    driver.add("b", 40, 3)
    driver.run()


def hits_of_two_lengths(engines: EngineStarter, setup: SetupOptions) -> None:
    driver = engines.start(**setup)
    _save(driver, "a", 100)
    driver.add("longer", 150, 3, shares=("a", 96))
    driver.run()
    driver.reset_prefix_cache()
    _repeat(driver, "again", 100, "a")
    driver.run()


def beyond_local_hit(engines: EngineStarter, setup: SetupOptions) -> None:
    driver = engines.start(**setup)
    _save(driver, "a", 160)
    _repeat(driver, "short", 64, "a", 1)
    driver.run()
    _repeat(driver, "again", 160, "a")
    driver.run()


def whole_prompt(engines: EngineStarter, setup: SetupOptions) -> None:
    driver = engines.start(**setup)
    _save(driver, "a", 96)
    _save(driver, "b", 97)
    _repeat(driver, "whole", 96, "a")
    _repeat(driver, "but one", 97, "b")
    driver.run()


def preempted_before_load(engines: EngineStarter, setup: SetupOptions) -> None:
    """Preempt as soon as it runs, before the output of its first step."""
    driver = engines.start(**setup)
    _save(driver, "a", 100)
    _repeat(driver, "r", 100, "a", 6)
    for _ in range(MAX_WAIT_STEPS):
        driver.schedule()
        if _preempt(driver, "r"):
            break
        driver.drain()
    driver.drain()
    driver.reset_prefix_cache()
    driver.run()


def preempted_after_load(engines: EngineStarter, setup: SetupOptions) -> None:
    driver = engines.start(**setup)
    _save(driver, "a", 100)
    _repeat(driver, "r", 100, "a", 12)
    _run_until_output(driver, "r", 3)
    _preempt(driver, "r")
    driver.reset_prefix_cache()
    driver.run()


def reset_while_running(engines: EngineStarter, setup: SetupOptions) -> None:
    """The reset preempts all running requests; the next step may resume them."""
    driver = engines.start(**setup)
    _save(driver, "a", 100)
    _repeat(driver, "r", 100, "a", 12)
    _run_until_output(driver, "r", 3)
    driver.reset_prefix_cache(running=True)
    driver.run()


def resumed_after_saving(engines: EngineStarter, setup: SetupOptions) -> None:
    """Its first lookup misses; when it resumes it hits what it saved itself."""
    driver = engines.start(**setup)
    driver.add("r", 100, 40)
    _run_until_output(driver, "r", 20)
    _preempt(driver, "r")
    driver.reset_prefix_cache()
    driver.run()


def load_fails_for_some_blocks(engines: EngineStarter, setup: SetupOptions) -> None:
    _fail_load(engines, setup, 3)


def load_fails_for_all_blocks(engines: EngineStarter, setup: SetupOptions) -> None:
    _fail_load(engines, setup, 0)


def _fail_load(engines: EngineStarter, setup: SetupOptions, first_block: int) -> None:
    driver = engines.start(**setup)
    _save(driver, "a", 100)
    driver.breaks["r"] = first_block
    _repeat(driver, "r", 100, "a", 4)
    driver.add("other", 40, 6)
    driver.run()


def aborted_while_loading(engines: EngineStarter, setup: SetupOptions) -> None:
    driver = engines.start(**setup)
    _save(driver, "a", 100)
    _repeat(driver, "r", 100, "a", 4)
    driver.schedule()
    driver.abort("r")
    driver.drain()
    _repeat(driver, "again", 100, "a", 4)
    driver.run()


def saved_in_chunks(engines: EngineStarter, setup: SetupOptions) -> None:
    driver = engines.start(**{**setup, "max_batched_tokens": 48})
    driver.add("left", 200, 1)
    driver.step()
    driver.drain()
    driver.abort("left")
    driver.reset_prefix_cache()
    _save(driver, "a", 150)
    driver.add("left again", 200, 2, shares=("left", 200))
    _repeat(driver, "again", 150, "a", 4)
    driver.run()


def new_engine(engines: EngineStarter, setup: SetupOptions) -> None:
    _save(engines.start(**setup), "a", 100)
    driver = engines.start(**setup)
    _repeat(driver, "again", 100, "a")
    driver.run()


SITUATIONS: tuple[Situation, ...] = (
    Situation("nothing in the store", cache_miss, _looked_up),
    Situation("hit after a deferred lookup", hits_of_two_lengths, _deferred),
    Situation("hit on part of the prompt", hits_of_two_lengths, _hit_on_part),
    Situation("hit beyond the local hit", beyond_local_hit, _hit_beyond_local),
    Situation("hit on the whole prompt", whole_prompt, _hit_on_all),
    Situation("preempted before its load completes", preempted_before_load, _preempted_with_hit),
    Situation("preempted after its load", preempted_after_load, _preempted_with_hit),
    Situation("local cache reset while it runs", reset_while_running, _preempted_with_hit),
    Situation("resumed after saving more", resumed_after_saving, _resumed_with_hit),
    Situation("load fails for some blocks", load_fails_for_some_blocks, _load_failed),
    Situation("load fails for all blocks", load_fails_for_all_blocks, _load_failed),
    Situation("aborted while it waits for its load", aborted_while_loading, _loaded_asynchronously),
    Situation("chunked save aborted midway", saved_in_chunks, _hit),
    Situation("new engine on the same store", new_engine, _hit),
)


# --- drawn situations -------------------------------------------------------------------------------------


class Operation(NamedTuple):
    """One operation on the engine of a drawn situation. ``shared``: tokens of the prompt of ``of``."""

    do: Literal["add", "step", "abort", "preempt", "reset", "empty"]
    name: str = ""
    tokens: int = 0
    of: str = ""
    shared: int = 0
    output: int = 1

    def __str__(self) -> str:
        shares = f" ({self.shared} of {self.of})" if self.shared else ""
        return {
            "add": f"add {self.name}: {self.tokens} tokens{shares}, {self.output} out",
            "step": f"step {self.tokens} times",
            "empty": "let all end, and reset the local cache",
            "reset": "reset the local cache of running requests",
        }.get(self.do, f"{self.do} {self.name}")


class Drawn(NamedTuple):
    """A drawn situation. ``budget``: tokens of a step; ``blocks``: blocks of the local cache."""

    budget: int
    blocks: int
    operations: tuple[Operation, ...]

    def __str__(self) -> str:
        words = "; ".join(map(str, self.operations))
        return f"steps of {self.budget} tokens, {self.blocks} blocks: {words}"

    def drive(self, engines: EngineStarter, setup: SetupOptions) -> None:
        """Do all of it, and let every request end."""
        driver = engines.start(**{**setup, "max_batched_tokens": self.budget, "blocks": self.blocks})
        for each in self.operations:
            living = each.name in driver.scheduler.requests
            match each.do:
                case "add":
                    shares = (each.of, each.shared) if each.shared else None
                    driver.add(each.name, each.tokens, each.output, shares=shares)
                case "step":
                    for _ in range(each.tokens):
                        driver.step()
                case "empty":
                    driver.run()
                    driver.reset_prefix_cache()
                case "reset":
                    driver.drain()
                    held = driver.scheduler.requests.values()
                    if all(request.status.name != "WAITING_FOR_REMOTE_KVS" for request in held):
                        driver.reset_prefix_cache(running=True)  # vLLM refuses it while a load is awaited
                case "abort" if living:
                    driver.abort(each.name)
                case "preempt" if living:
                    _preempt(driver, each.name)
        driver.run()

    def smaller(self) -> Iterator[Drawn]:
        """The same history with less of one operation, or without it."""
        for place, each in enumerate(self.operations):
            before, after = self.operations[:place], self.operations[place + 1 :]
            yield self._replace(operations=before + after)
            if each.tokens > 1:
                half = each._replace(tokens=max(1, each.tokens // 2), shared=each.shared // 2)
                yield self._replace(operations=(*before, half, *after))


_PROMPT = 150
"""Most tokens of a drawn prompt."""
_OFTEN = ("add", "add", "add", "add", "step", "step", "step", "empty", "empty", "abort", "preempt", "reset")


def draw(seed: int) -> Drawn:
    """The drawn situation of a seed."""
    dice = random.Random(seed)
    operations: list[Operation] = []
    names: list[str] = []
    for _ in range(dice.randint(8, 24)):
        match dice.choice(_OFTEN):
            case "step":
                operations.append(Operation("step", tokens=dice.randint(1, 6)))
            case "reset" | "empty" as do:
                operations.append(Operation(do))
            case "abort" | "preempt" as do if names:
                operations.append(Operation(do, dice.choice(names)))
            case _:
                name, tokens = f"r{len(names) + 1}", dice.randint(1, _PROMPT)
                names.append(name)
                shared = dice.choice((tokens, dice.randint(1, tokens)))
                operations.append(
                    Operation("add", name, tokens, dice.choice("ab"), shared, dice.choice((1, 2, 9, 40)))
                )
    budget = dice.choice((17, 24, 40, 48, 100, 8192))
    return Drawn(budget, dice.choice((14, 24, 64)), tuple(operations))
