"""The weights of a request's steps and outputs, read off its account."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from ..figures.sums import add_tokens
from .account import Account, InFlight, Life
from .weights import BEFORE, MODEL, UNKNOWN, Sampled, Weights, age_cause, spans


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
