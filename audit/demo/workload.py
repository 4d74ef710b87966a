"""What the demo asks of the engine: waves of requests, as data.

Here: lengths, prefixes and order, and the engine settings they were tuned to. Not here: running it
(engine.py). Everything that decides the schedule is a length, so the same requests are admitted,
hit, preempted and resumed in the same steps on every run; a seed only changes the token ids.

The stock ExampleConnector knows a prompt by its whole blocks, and has limits that an honest demo
keeps clear of (each was seen on vLLM 0.32):

- It saves a new prompt in the step that admits it, all of its whole blocks or as many as that step
  reached. So the first chunk of a prompt that can be matched later reaches its last whole block.
- It loads a resumed request by the blocks of its *sequence*, which it never saved once that has
  more whole blocks than the prompt. So a request that can be matched ends in the block after its
  prompt's last whole one ("fit", "bare"). For the same reason its answer can't be negative.
- A prompt of one token more than whole blocks is saved under one name and looked up under another,
  a block less. So such a request ("grow", "lead") is never matched, and may grow as long as it
  likes. "overtaken" is one too, but for another's file under the shorter name: it must then not be
  alone when it resumes, or its one chunk would reach the block that the file lacks.
"""

import random
from dataclasses import dataclass

from .model import VOCABULARY_TOKENS

BLOCK_TOKENS = 32
BLOCKS = 11
"""The pool, with the null block: ten for use, where six running requests would like twenty."""

STEP_TOKENS = 192
CHUNK_TOKENS = 32
SEQUENCE_TOKENS = 320
RUNNING_REQUESTS = 6


@dataclass(frozen=True)
class Ask:
    """One request: `prompt_tokens` long, the first `shared_tokens` of them from `prefix`."""

    id: str
    content: str
    prompt_tokens: int
    output_tokens: int
    prefix: str = ""
    shared_tokens: int = 0
    given_up_at: str = ""
    """The id of a request at whose first output the client of this one gives up; it is aborted."""

    def token_ids(self, seed: int) -> list[int]:
        """The prompt; the same for the same seed, prefix and content."""
        own_tokens = self.prompt_tokens - self.shared_tokens
        shared = _tokens(seed, self.prefix, self.shared_tokens)
        return shared + _tokens(seed, self.content, own_tokens)


@dataclass(frozen=True)
class Wave:
    """Requests that come at once, after all others have finished."""

    asks: tuple[Ask, ...]
    reset: bool = False
    """Empty the engine's own prefix cache first; what the connector saved stays."""


def _tokens(seed: int, content: str, count_tokens: int) -> list[int]:
    generator = random.Random(f"{seed} {content}")
    return [generator.randrange(2, VOCABULARY_TOKENS) for _ in range(count_tokens)]


def _ask(
    wave: str,
    role: str,
    prompt_tokens: int,
    output_tokens: int,
    shared_tokens: int,
    topic: str = "",
) -> Ask:
    prefix = "system" if shared_tokens else ""
    content = f"{topic} {role}"
    return Ask(f"{wave}-{role}", content, prompt_tokens, output_tokens, prefix, shared_tokens)


def _lead(wave: str) -> Ask:
    """Comes alone, so that the prefix the others share is in the local cache, whole."""
    return _ask(wave, "lead", 97, 4, 64)


def _crowd(wave: str, topic: str) -> tuple[Ask, ...]:
    """Nine requests in a pool that holds five of them.

    The two that grow take a block from the last admitted when they cross a boundary: a "fit" loses
    its blocks in decode, a "bare" (no shared prefix) between its two prefill chunks.
    """

    return (
        _ask(wave, "grow-1", 97, 70, 64, topic),
        _ask(wave, "grow-2", 97, 50, 64, topic),
        _ask(wave, "fit-1", 99, 12, 64, topic),
        _ask(wave, "fit-2", 100, 14, 64, topic),
        _ask(wave, "bare-1", 60, 4, 0, topic),
        _ask(wave, "fit-3", 98, 26, 64, topic),
        _ask(wave, "fit-4", 101, 27, 64, topic),
        _ask(wave, "bare-2", 60, 4, 0, topic),
        _ask(wave, "bare-3", 50, 10, 0, topic),
    )


def _race() -> tuple[Ask, ...]:
    """Two that share a prompt are preempted in prefill; the second has saved more of it by then.

    The first step fills eight blocks. It gives "overtaken" its first block; "saver" hits that one,
    computes the next, and saves both. In the second step all four that grow want a block, and there
    are two: the other two are taken from "saver" and from "overtaken", and what these had goes from
    the local cache too. So "overtaken" was promised nothing when it first came, and finds two
    blocks in the connector's folder when two that grow have ended and it resumes.
    """
    grow = [_ask("race", f"grow-{n}", 97, tokens, 64) for n, tokens in enumerate((8, 8, 20, 20), 1)]
    return (
        *grow,
        Ask("race-overtaken", "overtaken", 97, 4, "question", 66),
        Ask("race-saver", "saver", 70, 1, "question", 66),
    )


def _quit() -> tuple[Ask, ...]:
    """Both want a block a step; at the sixth there is none, and the second loses its five.

    It then waits for as long as the first runs, many steps, and its client gives up meanwhile: in
    whichever of them the abort arrives, the accounts are the same.
    """
    return (
        Ask("quit-long", "long", 161, 120),
        Ask("quit-short", "short", 193, 4, given_up_at="quit-long"),
    )


CROWDED = (
    Wave((_lead("cold"),)),
    Wave(_crowd("cold", "first")),
    Wave((_lead("again"),), reset=True),
    Wave(_crowd("again", "first")),
    Wave((_lead("race"),)),
    Wave(_race()),
    Wave(_quit()),
)
"""The default: the same nine cold, then from the connector's folder; a race, and one that gives up."""

EDGE = ("edge", 125, 30, 64)
FITS = (("fit-1", 99, 30, 64), ("fit-2", 100, 29, 64), ("fit-3", 98, 31, 64))
TINY = ("tiny", 20, 13, 0)
BARE = ("bare", 40, 24, 0)

OUTGROWN = (
    Wave((_lead("outgrown"),)),
    Wave(
        (
            _ask("outgrown", "grow-1", 97, 45, 64),
            _ask("outgrown", "grow-2", 97, 45, 64),
            _ask("outgrown", "bare-1", 60, 60, 0),
        )
    ),
)
"""A request that can be matched writes past its prompt's last block, and is preempted in decode.

Its local hit is then longer than the prompt the connector compares with, and the match is negative.
"""

EVICTED_WHILE_WAITING = (
    Wave((_lead("before"),)),
    Wave(tuple(_ask("before", *lengths) for lengths in (EDGE, *FITS[:2]))),
    Wave((_lead("after"),), reset=True),
    Wave((_ask("before", *BARE),)),
    Wave(tuple(_ask("after", *lengths) for lengths in (EDGE, *FITS[:2], TINY, BARE))),
)
"""A request finds its first block in the cache, must wait, and loses it to another meanwhile."""

DEEP = ("deep", 90, 4, 0)

OLDEST_HIT = (
    Wave((_lead("before"),)),
    Wave((_ask("before", *DEEP),)),
    Wave(tuple(_ask("between", *lengths) for lengths in (*FITS, TINY))),
    Wave((_ask("after", *DEEP),)),
)
"""A request takes a block for its external hit, and the next one to be reused is its local hit."""
