"""Versions of the weights under which KV and output tokens were computed.

The weights of a running engine change. Each change has a number, the *version* of the weights from there on;
version 0 is what the engine had before. The KV of a position has two versions: that of the weights that
computed it, and the oldest one in its *chain*, the positions that it was computed from. An output token is
suspect if the step that sampled it read KV whose chain has an older version than the step's own weights.

A look at the weights that finds a change does not tell when it took place: at some time since the last look
that found none. So each look that finds none begins a *stage* within the version, and KV is kept by stages:
``version * STAGES`` plus the looks since. Once a change is found, it is not known of the last stage before it
which of the two weights it has.

Nothing is kept before the first change or look: everything is of stage 0 then. A request with an adapter runs
under the model's weights and the adapter's; its version is the number of the last change of either.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from .. import causes
from ..figures.sums import add_tokens
from .account import Account, InFlight, Life, Made, Sampled

UNKNOWN = -1
"""A version that is not known. It is below all others, so the oldest of it and another one is not known."""

STAGES = 1 << 32
"""The number of a version's first stage is the version times this."""

BEFORE: Made = (0, 0, 0)
"""Everything that was computed before the first change."""

MODEL = ""
"""Stands for the model itself, where other names are those of adapters."""


class Weights(msgspec.Struct, eq=False):
    """The versions of an engine's weights."""

    stage: int = 0
    """The present stage."""
    looked: int = 0
    """The stage that the last look at the model's weights began."""
    changes: dict[str, list[int]] = {}
    """The stages that changes of the model, and of each adapter, began."""
    possible: set[int] = set()
    """Changes of which it is not known whether the weights became others."""
    found: dict[int, int] = {}
    """Of each change that a look found: the stage within which it took place."""
    counted: list[tuple[Account, str, int, int, int]] = []
    """What was counted as not older since the last look: account, figure, stage, oldest stage, tokens."""
    outcomes: dict[tuple[str, int], dict[int, tuple[bool, bool | None]]] = {}
    """By method and number of a call, of each worker: whether it raised, and left its weights equal."""
    last_calls: dict[str, tuple[int, str]] = {}
    """Of each method that all workers were asked for: the number of the last call, and its adapter."""
    handed_over: bool = False
    """Whether KV was loaded that a prefill engine computed, whose weights are not known."""
    label: str = ""
    """What the caller called the weights last."""
    loaded_in: int = -1
    """The step after which a worker's model last loaded weights, until a call of the engine returned."""
    differing: dict[tuple[str, int], str] = {}
    """Last calls with other outcomes on some workers than on others, before a step runs; the adapter."""
    cached_since: int = 0
    """None of the blocks of the prefix cache is of an older stage."""
    reset_stage: int = 0
    """The stage at the last reset of the prefix cache."""
    refused: tuple[int, int] | None = None
    """A reset that was refused after a change, since the last one that was not: its step, and version.
    None: there is none, or a request that hit the cache since was reported."""

    @property
    def version(self) -> int:
        """The number of the last change."""
        return self.stage // STAGES

    def of(self, adapter: str) -> int:
        """The stage in which a request with this adapter runs now."""
        return max([self.looked, *(each[-1] for each in self._changes(adapter))])

    def age(self, adapter: str, stage: int, oldest: int) -> int:
        """How many changes lie between two stages for a request with this adapter; -1: not known."""
        if oldest == UNKNOWN:
            return UNKNOWN
        later = [n for each in self._changes(adapter) for n in each[bisect_right(each, oldest) :]]
        between = [n for n in later if self.found.get(n, n) <= stage]
        certain = [
            n for n in between if oldest < self.found.get(n, n) and n <= stage and n not in self.possible
        ]
        return UNKNOWN if between and not certain else len(certain)

    def version_of(self, adapter: str, stage: int) -> int:
        """The number of the last change, for a request with this adapter, before a stage; -1: not known."""
        places = [(each, bisect_right(each, stage)) for each in self._changes(adapter)]
        later = (each[place] for each, place in places if place < len(each))
        if stage == UNKNOWN or any(self.found.get(n, n) <= stage for n in later):
            return UNKNOWN
        return max((each[place - 1] for each, place in places if place), default=0) // STAGES

    def _changes(self, adapter: str) -> Iterator[list[int]]:
        return (self.changes[name] for name in {MODEL, adapter} if name in self.changes)


def version_words(version: int) -> str:
    """A version in a sentence."""
    words = {0: "the weights before the first change", UNKNOWN: "a version that is not known"}
    return words.get(version, f"version {version}")


def age_cause(age: int) -> str:
    """The cause that stands for an age in versions."""
    if age == UNKNOWN:
        return causes.AGE_UNKNOWN
    return tuple(causes.OLDER)[min(age, 3) - 1]


def extend(made: list[Made], start: int, stage: int, oldest: int) -> None:
    """From position ``start`` on, KV is of ``stage``; its chain has ``oldest`` besides what is below."""
    while made and made[-1][0] >= start:
        made.pop()
    chain = min(oldest, stage)
    if made:
        chain = min(chain, made[-1][2])
    if not made or made[-1][1:] != (stage, chain):
        made.append((start, stage, chain))


def clipped(made: Sequence[Made], begin: int, end: int) -> list[Made]:
    """The part of ``made`` in the positions [begin, end)."""
    first = max(0, bisect_right(made, begin, key=lambda each: each[0]) - 1)
    rows = [each for each in made[first:] if each[0] < end]
    return [(max(begin, start), stage, oldest) for start, stage, oldest in rows]


def spans(made: Sequence[Made], begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Start, end, stage and oldest stage of each part of [begin, end)."""
    rows = clipped(made or [BEFORE], begin, end)
    for place, (start, stage, oldest) in enumerate(rows):
        stop = rows[place + 1][0] if place + 1 < len(rows) else end
        if start < stop:
            yield start, stop, stage, oldest


def oldest_of_all(groups: Iterable[Sequence[Made]], end: int) -> list[Made]:
    """What a request reads below ``end`` whose KV is in several cache groups: of each position the oldest."""
    tables = [table for table in groups if table]
    starts = sorted({start for table in tables for start, _, _ in table if start < end})
    made: list[Made] = []
    for place, start in enumerate(starts):
        rows = [clipped(table, start, start + 1) for table in tables]
        stages = [row[0] for row in rows if row]
        first = start if place else 0  # nothing reads the positions below a window
        extend(made, first, min(row[1] for row in stages), min(row[2] for row in stages))
    return made


# --- weights of requests -------------------------------------------------------------------------------
#
# The weights of a request's steps and outputs, read off its account.


def adapter_of(account: Account) -> str:
    """The name of the request's LoRA adapter; empty: it has none, or its labels were not recorded."""
    return account.labels.lora if account.labels is not None else MODEL


def oldest_of(life: Life) -> int:
    """The oldest stage in the chain of a life's last position."""
    return life.made[-1][2] if life.made else BEFORE[2]


def weights_of(weights: Weights, account: Account, flight: InFlight) -> tuple[int, int]:
    """The stage of a step in flight, and the oldest one in the chain of what it reads."""
    return flight.weights or (weights.of(adapter_of(account)), oldest_of(flight.life))


def note_output(weights: Weights, account: Account, flight: InFlight) -> None:
    """An output comes: note under which weights it was sampled, if they are others than before."""
    stage, oldest = weights_of(weights, account, flight)
    rows, adapter = account.sampled_by, adapter_of(account)
    if not rows or rows[-1][1:3] != (stage, oldest):
        age = weights.age(adapter, stage, oldest)
        rows.append((account.sequence_tokens, stage, oldest, age, weights.version_of(adapter, stage)))


def is_noted(weights: Weights, account: Account) -> bool:
    """Whether a further output needs no note."""
    assert account.life is not None
    now = weights.of(adapter_of(account)), oldest_of(account.life)
    return bool(account.sampled_by) and account.sampled_by[-1][1:3] == now


def age_outputs(weights: Weights, account: Account) -> None:
    """A look has found a change: note anew how old the KV of the outputs is."""
    adapter = adapter_of(account)
    account.sampled_by = [
        (start, stage, oldest, weights.age(adapter, stage, oldest), weights.version_of(adapter, stage))
        for start, stage, oldest, _, _ in account.sampled_by
    ]


def outputs(account: Account, end: int) -> Iterator[tuple[int, int, Sampled]]:
    """Start and end of the output tokens below ``end``, by position, and the weights that sampled them."""
    rows: list[Sampled] = [(account.prompt_tokens, *BEFORE[1:], 0, 0), *account.sampled_by]
    for place, row in enumerate(rows):
        stop = min(rows[place + 1][0] if place + 1 < len(rows) else end, end)
        if row[0] < stop:
            yield row[0], stop, row


def first_version(account: Account) -> int | None:
    """The version of the weights that sampled the first output; None: there was none, or it is not known."""
    if not outputs_of(account):
        return None
    first = next((row[4] for _, _, row in outputs(account, account.sequence_tokens)), None)
    return None if first == UNKNOWN else first


def count(weights: Weights, account: Account, figure: str, stage: int, oldest: int, tokens: int) -> int:
    """Add tokens to a figure of the account if their KV is older than their stage; returns by how much."""
    age = weights.age(adapter_of(account), stage, oldest)
    if age:
        add_tokens(getattr(account, figure), age_cause(age), tokens)
    elif weights.looked:
        weights.counted.append((account, figure, stage, oldest, tokens))
    return age


def settle_weights(weights: Weights, account: Account) -> None:
    """A prompt is settled: count its tokens whose KV is of older weights."""
    now, life = weights.of(adapter_of(account)), account.life
    if life is not None:
        for start, end, _, oldest in spans(life.made, account.carried, account.prompt_tokens):
            count(weights, account, "older_prompt", now, oldest, end - start)


def outputs_of(account: Account) -> int:
    """The output tokens of a request, up to now."""
    open_turn = 0 if account.closed_at >= 0 else account.sequence_tokens - account.prompt_tokens
    return account.outputs + max(0, open_turn)


def suspect_of(account: Account) -> dict[str, int]:
    """Those of them whose step read KV of older weights, by how much older."""
    if account.closed_at >= 0:
        return account.suspect_outputs
    found = dict(account.suspect_outputs)
    for start, stop, row in outputs(account, account.sequence_tokens):
        if row[3]:
            add_tokens(found, age_cause(row[3]), stop - start)
    return found


def end_turn(weights: Weights, account: Account, sequence_tokens: int) -> None:
    """A request or a session's turn ended: count its outputs."""
    end = sequence_tokens if sequence_tokens >= 0 else account.sequence_tokens
    account.outputs += max(0, end - account.prompt_tokens)
    for start, stop, row in outputs(account, end) if account.sampled_by else ():
        count(weights, account, "suspect_outputs", *row[1:3], stop - start)


def is_suspect(age: int) -> bool:
    """Whether an age is that of older weights, for certain."""
    return age not in (0, UNKNOWN)


Span = tuple[int, int, int, int]
"""Start and end, the version of the weights, and the oldest version in the chain; -1: not known."""


class WeightsUsed(msgspec.Struct, frozen=True):
    """Under which weights the tokens of one request were computed. Versions count changes from 0."""

    request_id: str
    prompt: list[Span]
    """Positions of the prompt, by the weights that computed their KV in the request's last life."""
    output: list[Span]
    """Output tokens, the first one is 0, by the weights of the steps that sampled them. The oldest version is
    that in the chain of the KV which the step read."""
    output_tokens: int
    suspect: list[tuple[int, int]]
    """Output tokens whose step read KV of older weights than its own: start, end."""
    unknown: list[tuple[int, int]]
    """Output tokens of which it is not known whether it did."""


def weights_used(weights: Weights, account: Account) -> WeightsUsed:
    """Under which weights the tokens of a request were computed; of a session, those of its present turn."""
    life = account.life or (account.lives[-1] if account.lives else None)
    prompt, adapter = account.prompt_tokens, adapter_of(account)
    length = account.outputs if account.closed_at >= 0 and not account.resumable else outputs_of(account)
    made = spans(life.made, 0, min(prompt, account.computed or prompt)) if life is not None else ()
    sampled = [(start - prompt, end - prompt, row) for start, end, row in outputs(account, prompt + length)]
    ages = [(start, end, weights.age(adapter, *row[1:3])) for start, end, row in sampled]
    if life is not None and weights.handed_over and not weights.stage:
        held = life.local + (life.loaded if account.transferred else 0)
        if held:
            return _handed_over(account, held, length)
    return WeightsUsed(
        request_id=account.request_id,
        prompt=_by_version(weights, adapter, made),
        output=_by_version(weights, adapter, ((start, end, *row[1:3]) for start, end, row in sampled)),
        output_tokens=length,
        suspect=_joined((start, end) for start, end, age in ages if is_suspect(age)),
        unknown=_joined((start, end) for start, end, age in ages if age == UNKNOWN),
    )


def _handed_over(account: Account, held: int, outputs: int) -> WeightsUsed:
    """The same, of an engine whose weights never changed: those of the engine that computed KV may have.

    ``held``: positions whose KV was loaded, or hit in a cache in which loaded KV is.
    """
    prompt = account.prompt_tokens
    rows = ((0, held, UNKNOWN, UNKNOWN), (held, prompt, 0, UNKNOWN))
    whole = [(0, outputs)] if outputs else []
    return WeightsUsed(
        request_id=account.request_id,
        prompt=[row for row in rows if row[0] < row[1]],
        output=[(start, end, 0, UNKNOWN) for start, end in whole],
        output_tokens=outputs,
        suspect=[],
        unknown=whole,
    )


def _by_version(weights: Weights, adapter: str, rows: Iterable[tuple[int, int, int, int]]) -> list[Span]:
    """Ranges of stages as ranges of versions."""
    return _joined((*row[:2], *(weights.version_of(adapter, stage) for stage in row[2:])) for row in rows)


def _joined(rows: Iterable[Any]) -> list[Any]:
    """Ranges whose other columns are equal and which touch are one."""
    joined: list[Any] = []
    for start, end, *of in rows:
        if joined and joined[-1][1:] == (start, *of):
            start = joined.pop()[0]
        joined.append((start, end, *of))
    return joined
