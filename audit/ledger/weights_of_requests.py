"""The weights of a request's steps and outputs, read off its account."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ..figures.sums import add_tokens
from .account import Account
from .life import InFlight, Life
from .weights import BEFORE, MODEL, UNKNOWN, Sampled, Weights, age_cause, spans


def adapter_of(account: Account) -> str:
    """The name of the request's LoRA adapter; empty: it has none, or its labels were not recorded."""
    return account.labels.lora if account.labels is not None else MODEL


def oldest_of(life: Life) -> int:
    """The oldest version in the chain of a life's last position."""
    return life.made[-1][2] if life.made else BEFORE[2]


def weights_of(weights: Weights, account: Account, flight: InFlight) -> tuple[int, int]:
    """The version of the weights of a step in flight, and the oldest one in the chain of what it reads."""
    return flight.weights or (weights.of(adapter_of(account)), oldest_of(flight.life))


def note_output(weights: Weights, account: Account, flight: InFlight) -> None:
    """An output comes: note under which weights it was sampled, if they are others than before."""
    version, oldest = weights_of(weights, account, flight)
    rows = account.sampled_by
    if not rows or rows[-1][1:3] != (version, oldest):
        age = weights.age(adapter_of(account), version, oldest)
        rows.append((account.sequence_tokens, version, oldest, age))


def is_noted(weights: Weights, account: Account) -> bool:
    """Whether a further output needs no note."""
    assert account.life is not None
    now = weights.of(adapter_of(account)), oldest_of(account.life)
    return bool(account.sampled_by) and account.sampled_by[-1][1:3] == now


def outputs(account: Account, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Start, end, version, oldest version and age of the output tokens below ``end``, by position."""
    rows: list[Sampled] = [(account.prompt_tokens, *BEFORE[1:], 0), *account.sampled_by]
    for place, (start, version, oldest, age) in enumerate(rows):
        stop = min(rows[place + 1][0] if place + 1 < len(rows) else end, end)
        if start < stop:
            yield start, stop, version, oldest, age


def first_version(account: Account) -> int | None:
    """The version of the weights under which the first output was sampled; None: there was none."""
    if not outputs_of(account):
        return None
    return next((version for _, _, version, _, _ in outputs(account, account.sequence_tokens)), None)


def suspect(account: Account, end: int) -> dict[str, int]:
    """Output tokens below position ``end`` whose step read KV of older weights, by how much older."""
    found = dict(account.suspect_outputs)
    for start, stop, _, _, age in outputs(account, end):
        if age:
            add_tokens(found, age_cause(age), stop - start)
    return found


def settle_weights(weights: Weights, account: Account) -> None:
    """A prompt is settled: count its tokens whose KV is of older weights."""
    adapter, life = adapter_of(account), account.life
    if life is None:
        return
    for start, end, _, oldest in spans(life.made, account.carried, account.prompt_tokens):
        age = weights.age(adapter, weights.of(adapter), oldest)
        if age:
            add_tokens(account.older_prompt, age_cause(age), end - start)


def outputs_of(account: Account) -> int:
    """The output tokens of a request, up to now."""
    open_turn = 0 if account.closed_at >= 0 else account.sequence_tokens - account.prompt_tokens
    return account.outputs + max(0, open_turn)


def suspect_of(account: Account) -> dict[str, int]:
    """Those of them whose step read KV of older weights, by how much older."""
    return account.suspect_outputs if account.closed_at >= 0 else suspect(account, account.sequence_tokens)


def end_turn(account: Account, sequence_tokens: int) -> None:
    """A request or a session's turn ended: count its outputs."""
    end = sequence_tokens if sequence_tokens >= 0 else account.sequence_tokens
    account.outputs += max(0, end - account.prompt_tokens)
    if account.sampled_by:
        account.suspect_outputs = suspect(account, end)


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


def weights_used(account: Account) -> WeightsUsed:
    """Under which weights the tokens of a request were computed; of a session, those of its present turn."""
    life = account.life or (account.lives[-1] if account.lives else None)
    prompt = account.prompt_tokens
    length = account.outputs if account.closed_at >= 0 and not account.resumable else outputs_of(account)
    rows = [(start - prompt, end - prompt, *of) for start, end, *of in outputs(account, prompt + length)]
    return WeightsUsed(
        request_id=account.request_id,
        prompt=list(spans(life.made, 0, min(prompt, account.computed or prompt))) if life is not None else [],
        output=[(start, end, version, oldest) for start, end, version, oldest, _ in rows],
        output_tokens=length,
        suspect=[(start, end) for start, end, _, _, age in rows if is_suspect(age)],
        unknown=[(start, end) for start, end, _, _, age in rows if age == UNKNOWN],
    )
