"""Random histories of an engine.

A history is a setup and a list of operations, drawn from one seed before anything runs. An operation that is
not possible when its turn comes is passed over, so any part of a history is a history, and a failing one can
be shortened by leaving operations out. :mod:`tests.differential.player` plays them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

BLOCK = 4
"""Tokens of a block."""
SEVERAL = (
    ("full", "sliding", "sliding"),
    ("full", "chunked"),
    ("full", "sliding", "chunked"),
    ("full", "mamba"),
    ("full", "mamba"),
    ("full", "mamba", "mamba"),
    ("full", "sliding", "mamba"),
)
"""The KV cache groups of models with more than full attention."""


class Add(NamedTuple):
    """A request comes. Requests of one family have a common prefix of ``shared`` tokens."""

    name: str
    prompt: int
    max_tokens: int
    family: int
    shared: int
    stop_at: int | None = None
    resumable: bool = False
    priority: int = 0
    stored: int = 0
    """Tokens that the external cache holds."""
    asynchronous: bool = False
    """Whether the external cache loads them asynchronously."""
    delay_free: bool = False
    images: tuple[tuple[str, int, int], ...] = ()
    """Encoder inputs of the prompt: name, first position and tokens of each."""


class Store(NamedTuple):
    """The external cache holds another number of a request's tokens from here on."""

    which: int
    stored: int
    asynchronous: bool


class Defer(NamedTuple):
    """The connector asks to be asked again at the request's next lookup."""

    which: int


class Chunk(NamedTuple):
    """The next chunk of a session; with 0 tokens the session ends."""

    which: int
    tokens: int
    max_tokens: int


class Schedule(NamedTuple):
    """`schedule()`, if a further batch may be in flight."""


class Output(NamedTuple):
    """The oldest step's output."""

    accepted: int | None = None
    """Drafts accepted; None: random."""
    finish: int = 1
    """Which asynchronous loads are reported finished: 0 none, 1 all, 2 the first."""
    failure: int = 0
    """0: no load fails; otherwise which load fails, and where."""
    late: bool = False
    """A failed asynchronous load is reported finished with a later output."""
    sent: bool = True


class Step(NamedTuple):
    """One iteration of the engine loop: schedule, then take an output if no more batches may be in flight."""

    output: Output = Output()


class Abort(NamedTuple):
    which: int


class Preempt(NamedTuple):
    which: int
    drop: bool


class ResetCache(NamedTuple):
    running: bool


class ChangeWeights(NamedTuple):
    """The weights of the model change between two steps."""


Operation = (
    Add | Store | Defer | Chunk | Schedule | Output | Step | Abort | Preempt | ResetCache | ChangeWeights
)


@dataclass(frozen=True)
class History:
    """One history. Its repr is Python that makes it again."""

    seed: int
    setup: dict[str, Any]
    depth: int
    """Most batches in flight."""
    operations: tuple[Operation, ...]

    def __repr__(self) -> str:
        lines = "".join(f"\n    {operation!r}," for operation in self.operations)
        return f"History({self.seed}, {self.setup!r}, {self.depth}, ({lines}\n))"


# --- drawing --------------------------------------------------------------------------------------


def draw(seed: int) -> History:
    """The history of a seed."""
    dice = random.Random(seed)
    setup, depth = _setup(dice)
    kinds = random.Random(f"kinds of {seed}")
    _add_groups(kinds, setup)
    drawing = _Drawing(dice, kinds, setup, depth)
    operations = _change_weights(random.Random(f"weights of {seed}"), drawing.operations())
    return History(seed, setup, depth, tuple(operations))


def _setup(dice: random.Random) -> tuple[dict[str, Any], int]:
    asynchronous = dice.random() < 0.45
    depth = dice.choice((2, 2, 3)) if asynchronous else dice.choice((1, 1, 1, 1, 2))
    setup: dict[str, Any] = {
        "block_size": BLOCK,
        "blocks": dice.choice((20, 22, 26, 32, 48)),
        "max_running": dice.choice((1, 2, 3, 4, 8)),
        "max_batched_tokens": dice.choice((8, 12, 16, 24, 32, 64)),
        "max_model_len": 256,
        "asynchronous": asynchronous,
    }
    if dice.random() < 0.55:
        setup["connector"] = "scripted"
        setup["load_failure_policy"] = dice.choice(("recompute", "recompute", "fail"))
        setup["kv_role"] = dice.choice(("kv_both", "kv_both", "kv_consumer", "kv_producer"))
    if dice.random() < 0.3:
        setup["drafts"] = dice.choice((1, 2, 3))
        setup["drafter"] = dice.choice(("ngram", "ngram", "eagle"))
    if dice.random() < 0.15:
        kind = dice.choice(("sliding", "sliding", "replay"))
        setup |= {"groups": ("full", kind), "sliding_window": dice.choice((4, 8, 12))}
        setup["blocks"] *= 2
    if dice.random() < 0.08:
        setup["prefix_caching"] = False
    if dice.random() < 0.1:
        setup["policy"] = "priority"
    if dice.random() < 0.1:
        setup["reserve_full_isl"] = True
    if "drafts" not in setup and dice.random() < 0.05:
        setup["pooling"] = True
    return setup, depth


def _change_weights(dice: random.Random, operations: list[Operation]) -> list[Operation]:
    """Change the weights at some places of some histories. The engine does the same as without."""
    for _ in range(dice.choice((0, 0, 1, 2, 4))):
        operations.insert(dice.randint(0, len(operations)), ChangeWeights())
    return operations


def _add_groups(dice: random.Random, setup: dict[str, Any]) -> None:
    """Draw what a model has beside one group of full attention."""
    if "groups" not in setup and dice.random() < 0.3:
        groups = dice.choice(SEVERAL)
        setup |= {"groups": groups, "sliding_window": dice.choice((4, 8, 12))}
        setup["blocks"] *= len(groups)
        if "chunked" in groups and setup.get("drafter") == "eagle":
            setup["drafter"] = "ngram"  # no release has both
        if "mamba" in groups:
            setup.pop("prefix_caching", None)  # without it a block of states has another size
    if dice.random() < 0.1:
        setup["encoder_tokens"] = dice.choice((8, 16, 32))


@dataclass
class _Drawing:
    """Draws the operations of one history."""

    dice: random.Random
    kinds: random.Random
    """Draws what only some kinds of models have."""
    setup: dict[str, Any]
    depth: int
    added: int = 0
    sessions: bool = False

    def operations(self) -> list[Operation]:
        dice = self.dice
        requests = dice.choice((1, 2, 2, 3, 3, 4, 5))
        spice = dice.choice((0.02, 0.08, 0.2))
        self.sessions = dice.random() < 0.15 and not self.setup.get("pooling")
        drawn: list[Operation] = [self.add()]
        while self.added < requests or dice.random() < 0.85:
            if self.added < requests and dice.random() < 0.4:
                drawn.append(self.add())
            elif dice.random() < spice:
                drawn.append(self.rare())
            elif dice.random() < 0.15:
                drawn.append(dice.choice((Schedule(), self.output(spice))))
            else:
                drawn.append(Step(self.output(spice)))
        return drawn

    def add(self) -> Add:
        dice = self.dice
        self.added += 1
        prompt = dice.choice((1, 2, 3, 4, 5, 8, 9, 12, 16, 17, 24, 31, 32, 40))
        shared = dice.choice((0, prompt, prompt, dice.randint(0, prompt)))
        external = "connector" in self.setup and dice.random() < 0.7
        # vLLM takes a producer's connector for one that loads nothing: it defers no free for its sake.
        loads = not (self.setup["asynchronous"] and self.setup.get("kv_role") == "kv_producer")
        return Add(
            f"r{self.added}",
            prompt,
            dice.choice((1, 1, 2, 3, 5, 8, 12)),
            dice.randint(0, 1),
            shared,
            stop_at=dice.choice((None, None, None, 1, 2, 4)),
            resumable=self.sessions and dice.random() < 0.7,
            priority=dice.randint(0, 2) if "policy" in self.setup else 0,
            stored=self.stored(prompt) if external else 0,
            asynchronous=dice.random() < 0.5 and loads,
            delay_free="connector" in self.setup and dice.random() < 0.1,
            images=self.images(prompt) if "encoder_tokens" in self.setup else (),
        )

    def images(self, prompt: int) -> tuple[tuple[str, int, int], ...]:
        """Encoder inputs that requests of a family may have in common. An image has one number of tokens."""
        first, tokens = (self.kinds.choice(sizes) for sizes in ((0, 2, 5), (1, 3, 6)))
        places = first, first + 2 * tokens
        drawn = [(f"{self.kinds.choice(('cat', 'dog'))} {tokens}", at, tokens) for at in places]
        return tuple(image for image in drawn if image[1] + tokens <= prompt)

    def stored(self, prompt: int) -> int:
        return self.dice.choice((prompt, prompt + self.setup["block_size"], self.dice.randint(0, prompt)))

    def rare(self) -> Operation:
        dice = self.dice
        which = dice.randint(0, 7)
        kinds: list[Callable[[], Operation]] = [
            lambda: Abort(which),
            lambda: Preempt(which, dice.random() < 0.3),
            lambda: Preempt(which, dice.random() < 0.3),
            lambda: ResetCache(dice.random() < 0.6),
        ]
        if "connector" in self.setup:
            kinds += [
                lambda: Store(which, self.stored(32), dice.random() < 0.5),
                lambda: Defer(which),
            ]
        if self.sessions:
            tokens = dice.choice((0, 1, 3, 8, 13))
            kinds += 3 * [lambda: Chunk(which, tokens, dice.choice((1, 2, 5)))]
        return dice.choice(kinds)()

    def output(self, spice: float) -> Output:
        dice = self.dice
        failing = "connector" in self.setup and dice.random() < 2 * spice
        return Output(
            accepted=dice.choice((None, None, 0, 1, 3)),
            finish=dice.choice((0, 1, 1, 2)),
            failure=dice.randint(1, 1 << 16) if failing else 0,
            late=dice.random() < 0.2,
            sent=dice.random() < 0.5,
        )
