"""A script: what is done with one scheduler, as plain values; and a workload: a script with its requests.

The reader of journals writes scripts in the recorded order, and the drivers of a scheduler carry them out.

A workload never contains tokens. Its prompts are made of *families* of invented tokens: two prompts that
begin with the same families, of the same lengths, are equal there. Every subset of a workload can be driven
as well, because the driver skips an operation that makes no sense: see :class:`Op`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

Segment: TypeAlias = tuple[str, int]
"""The first n tokens of a family."""

Answer: TypeAlias = int | tuple[int, bool] | None
"""A connector's answer to a lookup: external tokens, with True where they load asynchronously; None to be
asked again later. For LMCache: the tokens that its store has, or None."""

OUT = " out"
"""The family ``"r1 out"`` has the tokens that ``r1`` generates, so a prompt can go on after them."""


class Request(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One request. ``stop_at`` n: its n-th output token is the stop token.

    ``chunks``: the further chunks of a streaming session. ``salt``: requests with different salts share no
    KV. ``answers``: the connector's answer to each lookup in order; after the last it has nothing.
    ``hold``: the connector keeps the blocks after the end, until an output reports them as sent.
    """

    prompt: tuple[Segment, ...]
    max_tokens: int = 16
    stop_at: int | None = None
    priority: int = 0
    resumable: bool = False
    chunks: tuple[tuple[Segment, ...], ...] = ()
    salt: str = ""
    lora: int = 0
    answers: tuple[Answer, ...] = ()
    hold: bool = False

    @property
    def prompt_tokens(self) -> int:
        return sum(count for _, count in self.prompt)


Do: TypeAlias = Literal[
    "add", "chunk", "close", "abort", "reset", "schedule", "output", "repeat", "empty", "preempt", "lost"
]


class Scheduled(msgspec.Struct):
    """What was recorded of a step, by the numbers of requests.

    ``changed``: tokens, drafts, and computed tokens after the step, of each request in which it differs from
    the step before; ``dropped``: requests that run no more. ``admitted``: requests, each with the end of its
    hits. ``preempted``: for lack of blocks.
    """

    changed: dict[int, tuple[int, int, int]] = {}
    dropped: list[int] = []
    admitted: list[tuple[int, int]] = []
    preempted: list[int] = []


class Op(msgspec.Struct, omit_defaults=True):
    """One operation on the engine. ``output`` answers the oldest scheduled step.

    ``add`` adds the request, and in a workload its next chunk when it is there already; elsewhere a ``chunk``
    has its index in ``count``. ``close`` ends a session. ``preempt``: somebody else than the scheduler
    preempts, between two steps. ``lost``: the request was preempted for another reason than blocks.
    ``running``: a reset preempts running requests; a ``preempt`` drops output in flight. ``repeat``: the last
    step and output, ``count`` times. ``empty``: ``count`` steps that scheduled nothing. ``count`` 1 of a
    schedule and its output: the step is empty, and its output has an operation. ``at``: microseconds since
    the recorded engine started.

    Of an output: ``accepted`` drafts by request (the others accept none), and ``proposed`` ones for the next
    step; ``failed`` table positions [first, end) of a request's blocks that were not loaded, ``failed_whole``
    requests of which nothing was loaded, ``loaded`` and ``sent`` transfers that finished. ``step``: what was
    recorded of a schedule, where the reader was asked for it.

    Skipped: an operation on a request that is not open, a schedule without any request, an output without a
    scheduled step, and transfers that are not under way.
    """

    do: Do
    request: str = ""
    running: bool = False
    accepted: dict[str, int] = {}
    failed: dict[str, tuple[int, int]] = {}
    failed_whole: tuple[str, ...] = ()
    loaded: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    at: int = 0
    count: int = 0
    proposed: dict[str, int] = {}
    step: Scheduled | None = None

    @property
    def details(self) -> dict[str, Any]:
        """What an output reports, without what is empty."""
        fields = ("accepted", "failed", "failed_whole", "loaded", "sent")
        return {name: value for name in fields if (value := getattr(self, name))}

    def renamed(self, names: Mapping[str, str]) -> Op:
        """An operation of a workload with what this one says of the requests ``names``, under their new
        names."""
        return Op(
            self.do,
            names.get(self.request, ""),
            self.running,
            accepted={names[name]: n for name, n in self.accepted.items() if name in names},
            failed={names[name]: n for name, n in self.failed.items() if name in names},
            failed_whole=tuple(names[name] for name in self.failed_whole if name in names),
            loaded=tuple(names[name] for name in self.loaded if name in names),
            sent=tuple(names[name] for name in self.sent if name in names),
        )


class Workload(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Requests, and the script of operations that drives them.

    ``release``: the vLLM version of the journal. ``engine``: the arguments of
    :class:`~kvledger.audit.traffic.engine_setup.EngineSetup` that differ from its defaults. There,
    ``connector`` may also be ``scripted`` (the answers of the requests), ``lmcache`` or ``lmcache bundled``
    (LMCache's own adapter, with a table in place of its store), and ``scheduler`` may be ``v0``.
    """

    release: str
    engine: dict[str, Any]
    requests: dict[str, Request]
    script: tuple[Op, ...]

    @property
    def steps(self) -> int:
        """How many steps the script schedules."""
        return sum(op.do == "schedule" for op in self.script)

    def keeping(self, names: set[str]) -> Workload:
        """The workload with only these of its requests."""
        kept = {name: name for name in names}
        script = tuple(op.renamed(kept) for op in self.script if not op.request or op.request in kept)
        requests = {name: request for name, request in self.requests.items() if name in names}
        return msgspec.structs.replace(self, requests=requests, script=script)


class Check(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the reproduction asserts: the engine's figure, and the right one.

    ``probe``: a function of ``engine_figures.py``. ``after``: how many operations were carried out when it is
    read; -1: all. ``finding``: the id of the invariant. ``says``: what the figure is.
    """

    probe: str
    request: str
    engine: Any
    right: Any
    says: str
    finding: str
    after: int = -1


def script_literal(script: tuple[Op, ...]) -> list[tuple[Any, ...]]:
    """The script as rows of a table: a schedule and its output are one ``step``, equal ones are counted."""
    rows: list[tuple[Any, ...]] = []
    place = 0
    while place < len(script):
        op = script[place]
        place += 1
        if op.do == "schedule" and place < len(script) and script[place].do == "output":
            details = script[place].details
            place += 1
            if details:
                rows.append(("step", details))
            elif rows and rows[-1][0] == "step" and isinstance(rows[-1][-1], int):
                rows[-1] = ("step", rows[-1][1] + 1)
            else:
                rows.append(("step", 1))
        elif op.do == "output":
            rows.append(("output", op.details) if op.details else ("output",))
        elif op.do == "reset":
            rows.append(("reset", "running") if op.running else ("reset",))
        else:
            rows.append((op.do, op.request) if op.request else (op.do,))
    return rows
