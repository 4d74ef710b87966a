"""The demo's requests, in waves, as data.

Here: lengths, prefixes and order of the requests, the engine settings that fit them, and the waves that lead
to each planted fault. Not here: the run (engine.py). The schedule depends only on lengths, so the same
requests are admitted, hit, preempted and resumed in the same steps on every run; a seed only changes the
token ids.

ExampleConnector identifies a prompt by its whole blocks. It has limits that this workload stays within,
so that only an injected defect shows (each limit was seen on vLLM 0.32):

- The connector saves a new prompt in the step that admits it, as many whole blocks as that step
  computes. So the first chunk of a prompt that is matched later reaches the prompt's last whole block.
- The connector loads a resumed request by the blocks of its *sequence*. It never saved these if the
  sequence has more whole blocks than the prompt. So a request that can be matched ends within the block
  after its prompt's last whole block ("fit", "bare"). Then its match can't be negative either.
- A prompt of whole blocks and one token is saved under one name and looked up under another, which has
  a block less. So such a request ("grow", "lead") is never matched and may grow freely. "overtaken" is
  such a request too, but another request saved a file under the shorter name. It must not resume alone,
  or its one chunk would reach the block that the file lacks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ..planted.table import BY_NAME
from .model import VOCABULARY_TOKENS

BLOCK_TOKENS = 32
BLOCKS = 11
"""Blocks of the pool with the null block. Ten are usable; six running requests would need twenty."""

STEP_TOKENS = 192
CHUNK_TOKENS = 32
SEQUENCE_TOKENS = 320
RUNNING_REQUESTS = 6


@dataclass(frozen=True)
class DemoRequest:
    """One request: `prompt_tokens` long, the first `shared_tokens` of them from `prefix`."""

    id: str
    content: str
    prompt_tokens: int
    output_tokens: int
    prefix: str = ""
    shared_tokens: int = 0
    aborted_after: str = ""
    """The id of another request; its first output aborts this request, as if the client had left."""

    def token_ids(self, seed: int) -> list[int]:
        """The prompt's token ids; the same seed, prefix and content give the same ids."""
        own_tokens = self.prompt_tokens - self.shared_tokens
        shared = _tokens(seed, self.prefix, self.shared_tokens)
        return shared + _tokens(seed, self.content, own_tokens)


@dataclass(frozen=True)
class Wave:
    """Requests that arrive together, after all earlier ones have finished."""

    requests: tuple[DemoRequest, ...]
    reset: bool = False
    """Reset the engine's own prefix cache first; the connector keeps what it saved."""


def _tokens(seed: int, content: str, count_tokens: int) -> list[int]:
    generator = random.Random(f"{seed} {content}")
    return [generator.randrange(2, VOCABULARY_TOKENS) for _ in range(count_tokens)]


def _request(
    wave: str,
    role: str,
    prompt_tokens: int,
    output_tokens: int,
    shared_tokens: int,
    topic: str = "",
) -> DemoRequest:
    prefix = "system" if shared_tokens else ""
    content = f"{topic} {role}"
    return DemoRequest(f"{wave}-{role}", content, prompt_tokens, output_tokens, prefix, shared_tokens)


def _lead(wave: str) -> DemoRequest:
    """A request that runs alone, so that the shared prefix is in the local cache before the others."""
    return _request(wave, "lead", 97, 4, 64)


def _contention(wave: str, topic: str) -> tuple[DemoRequest, ...]:
    """Nine requests in a pool that holds five of them.

    When one of the two "grow" requests crosses a block boundary, the request admitted last is preempted:
    a "fit" in decode, a "bare" (no shared prefix) between its two prefill chunks.
    """

    return (
        _request(wave, "grow-1", 97, 70, 64, topic),
        _request(wave, "grow-2", 97, 50, 64, topic),
        _request(wave, "fit-1", 99, 12, 64, topic),
        _request(wave, "fit-2", 100, 14, 64, topic),
        _request(wave, "bare-1", 60, 4, 0, topic),
        _request(wave, "fit-3", 98, 26, 64, topic),
        _request(wave, "fit-4", 101, 27, 64, topic),
        _request(wave, "bare-2", 60, 4, 0, topic),
        _request(wave, "bare-3", 50, 10, 0, topic),
    )


def _overtaking() -> tuple[DemoRequest, ...]:
    """Two requests share a prompt and are preempted in prefill; the second saved more of it by then.

    The first step fills eight blocks. "overtaken" computes its first block; "saver" hits that block,
    computes the next one, and saves both. In the second step all four "grow" requests need a block, and
    two blocks are free. So "saver" and "overtaken" are preempted, and their blocks leave the local cache.
    "overtaken" was promised nothing at its first admission. When it resumes, after two "grow" requests
    have ended, the connector has two of its blocks.
    """
    grow = [_request("race", f"grow-{n}", 97, tokens, 64) for n, tokens in enumerate((8, 8, 20, 20), 1)]
    return (
        *grow,
        DemoRequest("race-overtaken", "overtaken", 97, 4, "question", 66),
        DemoRequest("race-saver", "saver", 70, 1, "question", 66),
    )


def _abort_while_waiting() -> tuple[DemoRequest, ...]:
    """Two requests prefill one block per step; at the sixth step no block is free.

    "short" is preempted and waits for many steps, while "long" runs, and is aborted meanwhile. The
    accounts are the same in whichever of these steps the abort arrives.
    """
    return (
        DemoRequest("quit-long", "long", 161, 120),
        DemoRequest("quit-short", "short", 193, 4, aborted_after="quit-long"),
    )


DEFAULT_WAVES = (
    Wave((_lead("cold"),)),
    Wave(_contention("cold", "first")),
    Wave((_lead("again"),), reset=True),
    Wave(_contention("again", "first")),
    Wave((_lead("race"),)),
    Wave(_overtaking()),
    Wave(_abort_while_waiting()),
)
"""The default workload: nine requests cold, the same nine from the connector's folder, then the rest."""

EDGE = ("edge", 125, 30, 64)
FITS = (("fit-1", 99, 30, 64), ("fit-2", 100, 29, 64), ("fit-3", 98, 31, 64))
TINY = ("tiny", 20, 13, 0)
BARE = ("bare", 40, 24, 0)

OUTGROWN = (
    Wave((_lead("outgrown"),)),
    Wave(
        (
            _request("outgrown", "grow-1", 97, 45, 64),
            _request("outgrown", "grow-2", 97, 45, 64),
            _request("outgrown", "bare-1", 60, 60, 0),
        )
    ),
)
"""A request that can be matched grows past its prompt's last block and is preempted in decode.

Its local hit is then longer than the prompt that the connector compares with: the match is negative.
"""

EVICTED_WHILE_WAITING = (
    Wave((_lead("before"),)),
    Wave(tuple(_request("before", *lengths) for lengths in (EDGE, *FITS[:2]))),
    Wave((_lead("after"),), reset=True),
    Wave((_request("before", *BARE),)),
    Wave(tuple(_request("after", *lengths) for lengths in (EDGE, *FITS[:2], TINY, BARE))),
)
"""A request hits its first block, must wait, and the block is evicted meanwhile."""

DEEP = ("deep", 90, 4, 0)

OLDEST_HIT = (
    Wave((_lead("before"),)),
    Wave((_request("before", *DEEP),)),
    Wave(tuple(_request("between", *lengths) for lengths in (*FITS, TINY))),
    Wave((_request("after", *DEEP),)),
)
"""A request allocates a block for its external hit; the next free block is its own local hit."""

COMPUTED_TWICE = (
    Wave((DemoRequest("once-lead", "lead", 97, 4),)),
    Wave((DemoRequest("evicting", "evicting", 289, 4),)),
    Wave((DemoRequest("twice-lead", "lead", 97, 4),)),
)
"""A prompt is computed, its blocks are evicted, and another request computes it again.

The prompt has whole blocks and one token more, so that the connector does not match it.
"""

LEADING_TO = {
    "negative-local-hit": DEFAULT_WAVES,
    "clamped-local-hit": DEFAULT_WAVES,
    "promise-not-loaded": DEFAULT_WAVES,
    "lookup-counted": DEFAULT_WAVES,
    "stale-lookup": EVICTED_WHILE_WAITING,
    "double-allocation": OLDEST_HIT,
    "double-free": DEFAULT_WAVES,
    "negative-match": OUTGROWN,
    "bit-flip": DEFAULT_WAVES,
    "late-write": DEFAULT_WAVES,
    "swapped-blocks": DEFAULT_WAVES,
    "wrong-half": DEFAULT_WAVES,
    "truncated-load": DEFAULT_WAVES,
    "stale-store": DEFAULT_WAVES,
    "wrong-compute": COMPUTED_TWICE,
}
"""The workload that leads to each planted fault which the demo can inject."""

INJECTIONS = {name: BY_NAME[name] for name in LEADING_TO}
