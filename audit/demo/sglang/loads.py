"""The loads that SGLang's scheduler is driven with: what arrives when, and the server arguments."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from .loop import Plan, abort, message, request

OVERLAP = {"disable_overlap_schedule": False}
TIGHT = {"max_total_tokens": 300, "schedule_conservativeness": 0.05}
"""A pool in which decoding requests are retracted."""
HOST = {
    "max_total_tokens": 400,
    "max_running_requests": 4,
    "enable_hierarchical_cache": True,
    "hicache_ratio": 3.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
    "hicache_write_policy": "write_through",
}
"""A second tier in host memory."""
SMALL_HOST = {**HOST, **TIGHT, "max_total_tokens": 420, "max_running_requests": 6, "hicache_ratio": 2.0}
BACK = {"hicache_write_policy": "write_back"}


class Load(NamedTuple):
    """One load. ``plan`` fills a :class:`Plan`; ``arguments`` are SGLang's server arguments."""

    plan: Callable[[Plan], None]
    arguments: dict[str, Any]


def _words(numbers: random.Random, tokens: int) -> list[int]:
    return [numbers.randrange(2, 500) for _ in range(tokens)]


def _shared(
    plan: Plan, requests: int = 12, prefix: int = 100, tail: int = 20, outputs: int = 24, every: int = 2
) -> None:
    """Requests with one prefix and tails of their own, one in every so many iterations."""
    numbers = random.Random(3)
    shared = _words(numbers, prefix)
    for place in range(requests):
        prompt = shared + _words(numbers, tail)
        plan.messages[place * every].append(request(f"r{place}", prompt, outputs))


def _pressure(plan: Plan) -> None:
    _shared(plan, requests=8, prefix=40, tail=10, outputs=100, every=4)


def _cold(plan: Plan) -> None:
    _shared(plan, requests=6, prefix=0, tail=30, outputs=100, every=3)


def _aborts(plan: Plan) -> None:
    """The first one while its prompt is computed in chunks, one that runs, one that waits."""
    _shared(plan, requests=8, outputs=40)
    for iteration, request_id in ((1, "r0"), (12, "r1"), (15, "r7")):
        plan.messages[iteration].append(abort(request_id))


def _mixed(plan: Plan) -> None:
    """Prompts of many lengths; every other request has one output."""
    for place in range(14):
        prompt = _words(random.Random(place), 30 + 7 * place)
        plan.messages[place * 3].append(request(f"m{place:02d}", prompt, 1 if place % 2 else 30))


def _random(plan: Plan, seed: int = 11, requests: int = 60) -> None:
    numbers = random.Random(seed)
    prefixes = [_words(numbers, numbers.randrange(20, 150)) for _ in range(6)]
    for place in range(requests):
        prefix = numbers.choice(prefixes)
        prompt = prefix[: numbers.randrange(10, len(prefix) + 1)] + _words(numbers, numbers.randrange(1, 30))
        plan.messages[place * 5].append(request(f"q{place:02d}", prompt, numbers.randrange(2, 70)))
        if place % 9 == 8:
            plan.messages[place * 5 + numbers.randrange(1, 6)].append(abort(f"q{place:02d}"))


def _priority(plan: Plan) -> None:
    low = [(place, f"low{place}", 60, 60, 0) for place in range(6)]
    high = [(30 + 4 * place, f"high{place}", 80, 10, 100) for place in range(4)]
    for iteration, name, prompt, outputs, priority in low + high:
        tokens = _words(random.Random(iteration), prompt)
        plan.messages[iteration].append(request(name, tokens, outputs, priority=priority))


def _session(plan: Plan) -> None:
    """Turns of a streaming session, of which the third is refused for its length."""
    opened = {"session_id": "s", "capacity_of_str_len": 100_000, "streaming": True, "timeout": None}
    plan.messages[0].append(message("OpenSessionReqInput", **opened))
    turns = ((1, range(10, 110)), (15, range(110, 150)), (30, [5] * 480), (45, range(150, 170)))
    for number, (iteration, tokens) in enumerate(turns, 1):
        parameters = {"id": "s", "offset": None, "replace": None, "drop_previous_output": None}
        turn = message("SessionParams", **parameters)
        plan.messages[iteration].append(request(f"turn{number}", tokens, 6, session_params=turn))
    plan.messages[60].append(message("CloseSessionReqInput", session_id="s"))


def _private(plan: Plan) -> None:
    """A prompt of several chunks whose KV must not enter the tree: the warm-up of a prefill engine."""
    tokens = _words(random.Random(2), 200)
    plan.messages[0].append(request("private", tokens, 4, bootstrap_host="2.2.2.2", bootstrap_room=1))
    plan.messages[60].append(request("later", tokens, 4))


def _pause(plan: Plan) -> None:
    """A pause that retracts, a flush while the requests wait, and the end of the pause."""
    _shared(plan, requests=3, outputs=60)
    plan.messages[20].append(message("PauseGenerationReqInput", mode="retract"))
    plan.messages[23].append(message("FlushCacheReqInput", timeout_s=None))
    plan.messages[26].append(message("ContinueGenerationReqInput"))


def _pause_weights(plan: Plan) -> None:
    """The same, and new weights are loaded in the pause, before the flush."""
    _pause(plan)
    asked = {"model_path": plan.model, "load_format": "auto", "flush_cache": False}
    plan.messages[21].append(message("UpdateWeightFromDiskReqInput", **asked))


def _turns(plan: Plan) -> None:
    """The second prompt is the first one with its output, and more."""
    first = _words(random.Random(7), 100)
    plan.messages[0].append(request("turn1", first, 50))
    plan.messages[120].append(abort("nobody"))  # keeps the loop awake

    def second(plan: Plan) -> None:
        if "turn1" in plan.told:
            plan.before_each.remove(second)
            prompt = [*first, *plan.told["turn1"].output_ids, *_words(random.Random(8), 50)]
            plan.messages[plan.iteration].append(request("turn2", prompt, 10))

    plan.before_each.append(second)


def _rounds(plan: Plan) -> None:
    """Five prefixes in turn, in a pool that holds three or four of them."""
    numbers = random.Random(5)
    prefixes = [_words(numbers, 90) for _ in range(5)]
    for place in range(20):
        prompt = prefixes[place % 5] + _words(numbers, 5)
        plan.messages[place * 14].append(request(f"t{place // 5}p{place % 5}", prompt, 8))


PRIORITY = {
    "max_total_tokens": 600,
    "max_running_requests": 4,
    "enable_priority_scheduling": True,
    "enable_priority_preemption": True,
}

LOADS = {
    "plain": Load(_shared, {}),
    "pressure": Load(_pressure, TIGHT),
    "cold": Load(_cold, TIGHT),
    "overlap": Load(_pressure, TIGHT | OVERLAP),
    "abort": Load(_aborts, {}),
    "overlap-abort": Load(_aborts, OVERLAP),
    "paged": Load(_pressure, TIGHT | {"max_total_tokens": 320, "page_size": 16}),
    "mixed": Load(_mixed, OVERLAP | {"max_total_tokens": 600, "enable_mixed_chunk": True}),
    "random": Load(_random, TIGHT | OVERLAP | {"max_total_tokens": 420}),
    "priority": Load(_priority, PRIORITY),
    "session": Load(_session, {"max_total_tokens": 1200, "enable_streaming_session": True}),
    "private": Load(_private, {"max_total_tokens": 1200}),
    "pause": Load(_pause, OVERLAP),
    "pause-weights": Load(_pause_weights, OVERLAP),
    "turns": Load(_turns, {}),
    "host": Load(_rounds, HOST),
    "host-back": Load(_rounds, HOST | BACK),
    "host-random": Load(_random, SMALL_HOST),
    "host-overlap": Load(_random, SMALL_HOST | OVERLAP),
    "host-tight": Load(_random, SMALL_HOST | {"hicache_ratio": 1.1} | BACK),
}
"""Every load, by name. Those whose name begins with ``host`` have a second tier in host memory."""
