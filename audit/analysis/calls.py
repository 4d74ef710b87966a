"""A client's call: the requests that engines made of it, and their figures counted once.

A call with n samples or several prompts is several requests. Each has an account of its own, and the same
prompt is in n of them. What a client is billed for is the call, so here a prompt counts once, whatever the
number of its samples, and a prompt token is *cached* only if no sample of the call computed it.

With a prefill and a decode engine, each has a request for the prompt. What the decode engine received is no
cache hit: where it came from stands in the prefill engine's account, and the output in the decode engine's.
Both requests are joined by the id that the connector gives the decode engine, else by the call's id, the
prompt, and the order of their arrival. An id alone joins nothing: the router asked for a transfer
(``kv_transfer_params``), or the engines have the KV roles of a producer and a consumer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from ..client_ids import Part, part_of
from ..ledger.account import Account, AccountStatement

PREFILL, DECODE = "prefill", "decode"
"""Roles of the two requests of one prompt in two engines. A request that one engine serves has no role."""


NOTHING: dict[str, int] = {}
"""Of a call of one request, which counts all its tokens; nobody changes it."""

FAILED_TRANSFER = ("failed", "not_planned", "never_loaded")
"""Causes for which promised tokens did not arrive."""


class CallAccount(msgspec.Struct, array_like=True, frozen=True):
    """What a call needs of an account. Counts are tokens, summed over the prompt's chunks; see
    :class:`~kvledger.audit.ledger.account.AccountStatement`."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    """Tokens of the sequence behind the prompt."""
    added_at: int
    outcome: str
    local: int
    """Prompt tokens that hit the engine's own prefix cache."""
    external: int
    """Prompt tokens that a connector loaded."""
    computed: int
    """Prompt tokens that the engine computed."""
    unattained: int
    """Prompt tokens that never had valid KV."""
    known: bool
    """Whether the account is complete and settled."""
    plan: tuple[int, int] | None = None
    reported: tuple[int, int, int] | None = None
    transferred: bool = False
    remote_decode: bool = False
    remote_request: str = ""
    load_failed: bool = False
    """Whether promised tokens did not arrive."""

    @classmethod
    def of(cls, account: Account | AccountStatement) -> CallAccount:
        """The account as it stands now."""
        local = external = computed = unattained = 0
        for each in account.settlements:
            local, external = local + each.local, external + each.external
            computed, unattained = computed + each.computed, unattained + each.unattained
        return cls(
            account.request_id,
            account.prompt_tokens,
            account.sequence_tokens - account.prompt_tokens,
            account.added_at,
            account.outcome,
            local,
            external,
            computed,
            unattained,
            account.unknown is None and bool(account.settlements),
            account.plan,
            account.reported,
            account.transferred,
            account.remote_decode,
            account.remote_request,
            any(account.voided.get(cause) for cause in FAILED_TRANSFER) if account.voided else False,
        )


class FoundRequests(NamedTuple):
    """An account, and what a call needs to know of its engine."""

    account: CallAccount
    engine: str = ""
    kv_role: str = ""
    """vLLM's ``kv_role`` of the engine; empty without a connector."""
    began: float = 0.0
    """Unix time from which the account's times count."""
    tenant: str = ""
    """Whom the request is for; empty: not known."""
    number: int = 0
    """The caller's own number of the account."""


class CallRequest(NamedTuple):
    """One request of a call, with its prompt and sample, in one engine. All counts are tokens."""

    part: Part
    account: CallAccount
    engine: str = ""
    role: str = ""
    """:data:`PREFILL`, :data:`DECODE`, or empty."""
    tenant: str = ""
    number: int = 0
    """That of :class:`FoundRequests`."""

    @property
    def cached(self) -> int:
        """Prompt tokens from a cache. KV that a prefill engine hands over is no cache hit."""
        return self.account.local + (0 if self.role == DECODE else self.account.external)


class CallFigures(NamedTuple):
    """The figures of a call, each prompt counted once. All but ``prompts`` and ``requests`` are tokens."""

    requests: int
    prompts: int
    prompt_tokens: int
    cached: int
    output_tokens: int
    known: bool
    """Whether every account is complete and settled."""
    not_counted: dict[str, int]
    """Tokens of its requests that count nowhere else in the call, by cause, see :func:`not_counted`."""


def calls_of(found: Sequence[FoundRequests], *, suffixed: bool) -> list[list[CallRequest]]:
    """The calls of one id, in the order of arrival. Several: the client used the id again.

    The n-th request for a prompt and sample belongs to the n-th call; a prefill engine and the decode engine
    that it hands KV over to count as one. ``suffixed``: see :func:`part_of`.
    """
    if len(found) == 1:  # as nearly all calls are
        account = found[0].account
        part = part_of(account.request_id, suffixed=suffixed)
        return [[_request(part, found[0], _own_role(account))]]
    arrived = sorted(
        ((part_of(each.account.request_id, suffixed=suffixed), each) for each in found), key=_arrival
    )
    calls: list[list[CallRequest]] = []
    seen: Counter[tuple[int, int]] = Counter()
    for unit in _units(arrived):
        place = unit[0].part[1:]
        if seen[place] == len(calls):
            calls.append([])
        calls[seen[place]] += unit
        seen[place] += 1
    return [sorted(call, key=lambda each: (each.role == DECODE, each.engine)) for call in calls]


def _arrival(row: tuple[Part, FoundRequests]) -> tuple[float, int, int]:
    part, found = row
    return found.began + found.account.added_at / 1e6, part.prompt, part.sample


def _units(arrived: Sequence[tuple[Part, FoundRequests]]) -> Iterable[list[CallRequest]]:
    """Requests in the order of arrival; the two requests of a transfer stand together."""
    prefills = {
        index: row for index, row in enumerate(arrived) if _may_prefill(row[1]) and not _may_decode(row[1])
    }
    prefill_of: dict[int, int] = {}
    for index, row in enumerate(arrived):
        if _may_decode(row[1]):
            source = _source(index, row, prefills)
            if source is not None:
                prefill_of[source] = index
                del prefills[source]
    received = set(prefill_of.values())
    for index, (part, found) in enumerate(arrived):
        if index in prefill_of:
            decode_part, decode = arrived[prefill_of[index]]
            yield [_request(part, found, PREFILL), _request(decode_part, decode, DECODE)]
        elif index not in received:
            yield [_request(part, found, _own_role(found.account))]


def _source(
    index: int, row: tuple[Part, FoundRequests], prefills: dict[int, tuple[Part, FoundRequests]]
) -> int | None:
    """The prefill request whose KV a request received; None: it is not here."""
    part, found = row
    remote = found.account.remote_request
    if remote:
        return next((at for at, (_, each) in prefills.items() if each.account.request_id == remote), None)
    fitting = [
        at
        for at, (other, each) in prefills.items()
        if other[1:] == part[1:]
        and each.engine != found.engine
        and each.account.prompt_tokens == found.account.prompt_tokens
    ]
    fitting = [at for at in fitting if prefills[at][0].call == part.call] or fitting
    before = [at for at in fitting if at < index]
    if not before and found.account.transferred:  # clocks of two machines differ
        return fitting[0] if fitting else None
    return before[-1] if before else None


def _may_prefill(found: FoundRequests) -> bool:
    """Journals that were recorded before ``remote_decode`` have no ``kv_role`` either."""
    account = found.account
    recorded_before = not found.kv_role and account.output_tokens <= 1
    return account.remote_decode or found.kv_role == "kv_producer" or recorded_before


def _may_decode(found: FoundRequests) -> bool:
    return found.account.transferred or found.kv_role == "kv_consumer"


def _own_role(account: CallAccount) -> str:
    """The role of a request whose counterpart is not here."""
    if account.transferred:
        return DECODE
    return PREFILL if account.remote_decode else ""


def _request(part: Part, found: FoundRequests, role: str) -> CallRequest:
    return CallRequest(part, found.account, found.engine, role, found.tenant, found.number)


def figures(requests: Iterable[CallRequest]) -> CallFigures:
    """The figures of one call."""
    every = list(requests)
    if len(every) == 1:
        one, account = every[0], every[0].account
        return CallFigures(
            1, 1, account.prompt_tokens, one.cached, account.output_tokens, account.known, NOTHING
        )
    by_prompt = prompts_of(every)
    answers = [request for samples in by_prompt.values() for request in answering(samples)]
    return CallFigures(
        requests=len(every),
        prompts=len(by_prompt),
        prompt_tokens=sum(samples[0].account.prompt_tokens for samples in by_prompt.values()),
        cached=sum(min(each.cached for each in computing(samples)) for samples in by_prompt.values()),
        output_tokens=sum(request.account.output_tokens for request in answers),
        known=all(each.account.known for each in every),
        not_counted=dict(sum((not_counted(samples) for samples in by_prompt.values()), Counter())),
    )


def prompts_of(requests: Iterable[CallRequest]) -> dict[int, list[CallRequest]]:
    """The requests of one call by the number of their prompt."""
    by_prompt: dict[int, list[CallRequest]] = {}
    for request in requests:
        by_prompt.setdefault(request.part.prompt, []).append(request)
    return by_prompt


def computing(samples: Sequence[CallRequest]) -> list[CallRequest]:
    """The requests that tell where a prompt came from: of two engines, those of the prefill engine."""
    return [each for each in samples if each.role != DECODE] or list(samples)


def answering(samples: Sequence[CallRequest]) -> list[CallRequest]:
    """The requests whose output the client gets: of two engines, those of the decode engine."""
    decoded = {each.part.sample for each in samples if each.role == DECODE}
    return [each for each in samples if each.role != PREFILL or each.part.sample not in decoded]


def not_counted(samples: Sequence[CallRequest]) -> Counter[str]:
    """Tokens of the requests for one prompt that its figures leave out, by cause.

    - ``another-sample``: prompt tokens that stand in the account of each sample.
    - ``transferred``: prompt tokens that a decode engine received from a prefill engine.
    - ``decode-hit``: prompt tokens that a decode engine had in its own cache.
    - ``recomputed``: prompt tokens that a decode engine computed after a transfer.
    - ``transfer-failed``: the same, where the transfer failed or brought nothing.
    - ``prefill-output``: output tokens of a prefill engine, which the decode engine computes again.

    With them, the figures add up to all tokens of the requests.
    """
    counts: Counter[str] = Counter()
    first, answers = computing(samples), answering(samples)
    took = sum(each.cached + each.account.computed for each in first)
    counts["another-sample"] = (
        took - min(each.cached for each in first) - max(each.account.computed for each in first)
    )
    for each in samples:
        account = each.account
        if each not in answers:
            counts["prefill-output"] += account.output_tokens
        if each not in first:
            counts["transferred"] += account.external
            counts["decode-hit"] += account.local
            nothing_came = not account.external and not account.local
            failed = nothing_came or account.load_failed
            counts["transfer-failed" if failed else "recomputed"] += account.computed
    return +counts
