"""A client's call: the requests that the engine made of it, and their figures counted once.

A call with n samples or several prompts is several requests. Each has an account of its own, and the same
prompt is in n of them. What a client is billed for is the call, so here a prompt counts once, whatever the
number of its samples, and a prompt token is *cached* only if no sample of the call computed it.

With a prefill and a decode engine, each has a request for the prompt. What the decode engine received is no
cache hit: where it came from stands in the prefill engine's account, and the output in the decode engine's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from ..client_ids import Part, part_of
from ..ledger.frozen import AccountStatement


class CallRequest(NamedTuple):
    """One request of a call, with its prompt and sample, in one engine. All counts are tokens."""

    part: Part
    account: AccountStatement
    engine: str = ""

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


def requests_of(accounts: Iterable[tuple[AccountStatement, str]], *, suffixed: bool) -> list[CallRequest]:
    """Accounts with their engines as requests of calls, in the order of arrival within each engine.

    A prefill engine comes before the decode engine that it hands KV over to. ``suffixed``: see
    :func:`part_of`.
    """
    requests = [
        CallRequest(part_of(each.request_id, suffixed=suffixed), each, engine) for each, engine in accounts
    ]
    return sorted(
        requests,
        key=lambda each: (each.account.transferred, each.engine, each.account.added_at, *each.part[1:]),
    )


def attempts(requests: Iterable[CallRequest]) -> list[list[CallRequest]]:
    """Split the requests of one id where a prompt and sample come again: the client used the id again.

    The n-th request for a prompt in a decode engine belongs with the n-th one in its prefill engine.
    """
    calls: list[list[CallRequest]] = []
    seen: Counter[tuple[bool, int, int]] = Counter()
    for request in requests:
        place = request.account.transferred, request.part.prompt, request.part.sample
        if seen[place] == len(calls):
            calls.append([])
        calls[seen[place]].append(request)
        seen[place] += 1
    return calls


def figures(requests: Iterable[CallRequest]) -> CallFigures:
    """The figures of one call."""
    every = list(requests)
    by_prompt: dict[int, list[CallRequest]] = {}
    for request in every:
        by_prompt.setdefault(request.part.prompt, []).append(request)
    handed_over = {each.part[1:] for each in every if each.account.transferred}
    answered = [each for each in every if each.account.transferred or each.part[1:] not in handed_over]
    return CallFigures(
        requests=len(every),
        prompts=len(by_prompt),
        prompt_tokens=sum(samples[0].account.prompt_tokens for samples in by_prompt.values()),
        cached=sum(_cached(samples) for samples in by_prompt.values()),
        output_tokens=sum(request.output_tokens for request in answered),
        known=all(each.account.unknown is None and bool(each.account.settlements) for each in every),
    )


def _cached(samples: list[CallRequest]) -> int:
    """The tokens of a prompt that no request computed; of two engines, the prefill engine tells."""
    prefilled = [each for each in samples if not each.account.transferred]
    return min(each.cached for each in prefilled or samples)
