"""The rows of a score card: situations that a connector is driven into, and how one knows that it was.

Each fills the store through the connector itself: a request runs to its end, and then the local cache
is emptied. What a row has reached is read from the events, never from the connector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from .. import events as ev

Events = list[ev.Event]
Setup = dict[str, Any]
WAITS = 400
"""Steps after which a request that does not run is given up waiting for."""


class Stage(Protocol):
    """Where engines are begun; a second one finds what the first has saved."""

    def begin(self, **setup: Any) -> Any:
        """A new engine's driver."""


class Situation(NamedTuple):
    """``reached`` says of a row's events whether it came about."""

    title: str
    drive: Callable[[Stage, Setup], None]
    reached: Callable[[Events], bool]


def _saved(driver: Any, name: str, tokens: int) -> None:
    driver.add(name, tokens, 1)
    driver.run()
    driver.reset_prefix_cache()


def _again(driver: Any, name: str, tokens: int, of: str, output_tokens: int = 3) -> None:
    """A prompt that begins as that of an earlier request."""
    driver.add(name, tokens, output_tokens, shares=(of, tokens))


def _until_decoding(driver: Any, name: str, output_tokens: int) -> None:
    for _ in range(WAITS):
        request = driver.scheduler.requests.get(name)
        if request is None or request.num_output_tokens >= output_tokens:
            break
        driver.step()
    driver.drain()


def _preempt(driver: Any, name: str) -> bool:
    """Preempt a request, if it runs."""
    runs = driver.scheduler.requests.get(name) in driver.scheduler.running
    if runs:
        driver.preempt(name)
    return runs


# --- what was reached -------------------------------------------------------------------------------------


def _asked(events: Events) -> bool:
    return any(isinstance(e, ev.Matched) for e in events)


def _promised(events: Events, least: int = 1) -> bool:
    return any(isinstance(e, ev.Admitted) and e.external_tokens >= least for e in events)


def _promised_part(events: Events) -> bool:
    """Of some prompt less than all but its last token, which is executed here in any case."""
    prompts: dict[int, int] = {}
    parts: list[bool] = []
    for event in events:  # engine by engine, each with its own numbers
        if isinstance(event, ev.RequestAdded):
            prompts[event.request] = event.prompt_tokens
        if isinstance(event, ev.Admitted) and event.external_tokens > 0:
            parts.append(event.local_tokens + event.external_tokens < prompts.get(event.request, 0) - 1)
    return any(parts)


def _deferred(events: Events) -> bool:
    return _promised(events) and any(
        isinstance(e, ev.AdmissionFailed) and e.reason == "deferred" for e in events
    )


def _promised_all(events: Events) -> bool:
    return _promised(events, 95)


def _promised_beyond(events: Events) -> bool:
    return any(isinstance(e, ev.Admitted) and e.local_tokens and e.external_tokens > 0 for e in events)


def _preempted(events: Events) -> bool:
    return _promised(events) and any(isinstance(e, ev.Preempted) for e in events)


def _resumed(events: Events) -> bool:
    return any(isinstance(e, ev.Admitted) and e.resumed and e.external_tokens > 0 for e in events)


def _failed(events: Events) -> bool:
    return _promised(events) and any(isinstance(e, ev.LoadFailed | ev.RolledBack) for e in events)


def _waited(events: Events) -> bool:
    return any(isinstance(e, ev.Admitted) and e.asynchronous for e in events)


# --- what is driven ---------------------------------------------------------------------------------------


def nothing(stage: Stage, setup: Setup) -> None:
    driver = stage.begin(**setup)
    driver.add("a", 100, 3)
    driver.add("b", 40, 3)
    driver.run()


def hits(stage: Stage, setup: Setup) -> None:
    driver = stage.begin(**setup)
    _saved(driver, "a", 100)
    driver.add("longer", 150, 3, shares=("a", 96))
    driver.run()
    driver.reset_prefix_cache()
    _again(driver, "again", 100, "a")
    driver.run()


def beyond_the_local_hit(stage: Stage, setup: Setup) -> None:
    driver = stage.begin(**setup)
    _saved(driver, "a", 160)
    _again(driver, "short", 64, "a", 1)
    driver.run()
    _again(driver, "again", 160, "a")
    driver.run()


def the_whole(stage: Stage, setup: Setup) -> None:
    driver = stage.begin(**setup)
    _saved(driver, "a", 96)
    _saved(driver, "b", 97)
    _again(driver, "whole", 96, "a")
    _again(driver, "but one", 97, "b")
    driver.run()


def preempted_before(stage: Stage, setup: Setup) -> None:
    """As soon as it runs, its first step still unanswered."""
    driver = stage.begin(**setup)
    _saved(driver, "a", 100)
    _again(driver, "r", 100, "a", 6)
    for _ in range(WAITS):
        driver.schedule()
        if _preempt(driver, "r"):
            break
        driver.drain()
    driver.drain()
    driver.reset_prefix_cache()
    driver.run()


def preempted_after(stage: Stage, setup: Setup) -> None:
    driver = stage.begin(**setup)
    _saved(driver, "a", 100)
    _again(driver, "r", 100, "a", 12)
    _until_decoding(driver, "r", 3)
    _preempt(driver, "r")
    driver.reset_prefix_cache()
    driver.run()


def reset_while_running(stage: Stage, setup: Setup) -> None:
    """A reset preempts what runs, and the next step may resume it at once."""
    driver = stage.begin(**setup)
    _saved(driver, "a", 100)
    _again(driver, "r", 100, "a", 12)
    _until_decoding(driver, "r", 3)
    driver.reset_prefix_cache(running=True)
    driver.run()


def grown(stage: Stage, setup: Setup) -> None:
    """It found nothing at first; what it has saved itself it finds when it resumes."""
    driver = stage.begin(**setup)
    driver.add("r", 100, 40)
    _until_decoding(driver, "r", 20)
    _preempt(driver, "r")
    driver.reset_prefix_cache()
    driver.run()


def fails_in_part(stage: Stage, setup: Setup) -> None:
    _fails(stage, setup, 3)


def fails_wholly(stage: Stage, setup: Setup) -> None:
    _fails(stage, setup, 0)


def _fails(stage: Stage, setup: Setup, first_block: int) -> None:
    driver = stage.begin(**setup)
    _saved(driver, "a", 100)
    driver.breaks["r"] = first_block
    _again(driver, "r", 100, "a", 4)
    driver.add("other", 40, 6)
    driver.run()


def given_up(stage: Stage, setup: Setup) -> None:
    driver = stage.begin(**setup)
    _saved(driver, "a", 100)
    _again(driver, "r", 100, "a", 4)
    driver.schedule()
    driver.abort("r")
    driver.drain()
    _again(driver, "again", 100, "a", 4)
    driver.run()


def in_chunks(stage: Stage, setup: Setup) -> None:
    driver = stage.begin(**{**setup, "max_batched_tokens": 48})
    driver.add("left", 200, 1)
    driver.step()
    driver.drain()
    driver.abort("left")
    driver.reset_prefix_cache()
    _saved(driver, "a", 150)
    driver.add("left again", 200, 2, shares=("left", 200))
    _again(driver, "again", 150, "a", 4)
    driver.run()


def a_new_engine(stage: Stage, setup: Setup) -> None:
    _saved(stage.begin(**setup), "a", 100)
    driver = stage.begin(**setup)
    _again(driver, "again", 100, "a")
    driver.run()


SITUATIONS: tuple[Situation, ...] = (
    Situation("nothing in the store", nothing, _asked),
    Situation("no answer yet, then a number", hits, _deferred),
    Situation("a part of a prompt", hits, _promised_part),
    Situation("a part beyond the local hit", beyond_the_local_hit, _promised_beyond),
    Situation("all of a prompt", the_whole, _promised_all),
    Situation("preempted before its load is answered", preempted_before, _preempted),
    Situation("preempted after its load", preempted_after, _preempted),
    Situation("the cache reset while it runs", reset_while_running, _preempted),
    Situation("resumed with a grown store", grown, _resumed),
    Situation("a load that fails in part", fails_in_part, _failed),
    Situation("a load that fails wholly", fails_wholly, _failed),
    Situation("given up while it waits for its load", given_up, _waited),
    Situation("saved in chunks, one given up midway", in_chunks, _promised),
    Situation("a new engine on the same store", a_new_engine, _promised),
)
