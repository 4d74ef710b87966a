"""A client's call: the requests that the engine made of it, and their figures counted once.

A call with n samples or several prompts is several requests. Each has an account of its own, and the same
prompt is in n of them. What a client is billed for is the call, so here a prompt counts once, whatever the
number of its samples, and a prompt token is *cached* only if no sample of the call computed it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..client_ids import Part, part_of
from ..ledger.frozen import AccountStatement


class CallRequest(NamedTuple):
    """One request of a call, with its prompt and sample. All counts are tokens."""

    part: Part
    account: AccountStatement

    @property
    def local(self) -> int:
        """Prompt tokens that hit the engine's own prefix cache."""
        return sum(each.local for each in self.account.settlements)

    @property
    def external(self) -> int:
        """Prompt tokens that a connector loaded."""
        return sum(each.external for each in self.account.settlements)

    @property
    def computed(self) -> int:
        """Prompt tokens that the engine computed."""
        return sum(each.computed for each in self.account.settlements)

    @property
    def unattained(self) -> int:
        """Prompt tokens that never had valid KV."""
        return sum(each.unattained for each in self.account.settlements)

    @property
    def cached(self) -> int:
        """Prompt tokens from a cache. KV that a prefill engine hands over is no cache hit."""
        return self.local + (0 if self.account.transferred else self.external)

    @property
    def output_tokens(self) -> int:
        """Tokens of the sequence behind the prompt."""
        return self.account.sequence_tokens - self.account.prompt_tokens


class CallFigures(NamedTuple):
    """The figures of a call, each prompt counted once. All but ``prompts`` and ``requests`` are tokens."""

    requests: int
    prompts: int
    prompt_tokens: int
    cached: int
    output_tokens: int
    known: bool
    """Whether every account is complete and settled."""


def requests_of(accounts: Iterable[AccountStatement], *, suffixed: bool) -> list[CallRequest]:
    """The accounts as requests of calls, by prompt and sample. ``suffixed``: see :func:`part_of`."""
    requests = [CallRequest(part_of(each.request_id, suffixed=suffixed), each) for each in accounts]
    return sorted(requests, key=lambda each: (each.account.added_at, each.part.prompt, each.part.sample))


def attempts(requests: Iterable[CallRequest]) -> list[list[CallRequest]]:
    """Split the requests of one id where a prompt and sample come again: the client used the id again."""
    calls: list[list[CallRequest]] = []
    taken: set[tuple[int, int]] = set()
    for request in requests:
        place = request.part.prompt, request.part.sample
        if not calls or place in taken:
            calls.append([])
            taken = set()
        taken.add(place)
        calls[-1].append(request)
    return calls


def figures(requests: Iterable[CallRequest]) -> CallFigures:
    """The figures of one call."""
    by_prompt: dict[int, list[CallRequest]] = {}
    for request in requests:
        by_prompt.setdefault(request.part.prompt, []).append(request)
    every = [request for samples in by_prompt.values() for request in samples]
    return CallFigures(
        requests=len(every),
        prompts=len(by_prompt),
        prompt_tokens=sum(samples[0].account.prompt_tokens for samples in by_prompt.values()),
        cached=sum(min(sample.cached for sample in samples) for samples in by_prompt.values()),
        output_tokens=sum(request.output_tokens for request in every),
        known=all(each.account.unknown is None and bool(each.account.settlements) for each in every),
    )
