"""What clients were told about their calls, beside the accounts of these calls.

A response carries ``usage``: prompt tokens, how many of them were cached, and output tokens. vLLM's server
makes it from what the engine reports for one request of the call. Here it is compared with the settled
accounts of all of them (:mod:`kvledger.audit.analysis.calls`). A difference has a cause only if the cause
gives exactly the figure that the client was told; any other difference is unexplained.

Causes of ``cached``:

- ``one-sample``: the figure of one of n samples. Another sample computed what this one hit.
- ``one-prompt``: the figure of one of several prompts of the call.
- ``plan``: the hits of the first admission. Some were lost, in a failed load or a preemption, and computed.
- ``transfer``: KV that a prefill engine handed over, counted as hits.
- ``decode-engine``: the decode engine's own hits, of tokens that its prefill engine computed or hit.
- ``engine-report``: what the engine reported for the request; ``kvledger show`` has its findings.
- ``not-told``: the server gives no cached figure (vLLM: ``--enable-prompt-tokens-details``).

Causes of ``prompt`` and ``output``:

- ``prompt-per-sample``: the prompt was counted once for each sample.
- ``aborted``: the client left, so it was told fewer output tokens than the engine computed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..client_ids import client_names
from ..ledger.account import AccountStatement
from ..release_semantics import CONTRACTS, OUTPUTS, Product, Relation, sources_add_up
from .calls import DECODE, CallFigures, CallRequest, FoundRequests, calls_of, figures

EQUAL, EXPLAINED, UNEXPLAINED, UNKNOWN, UNTRACED, REPEATED = (
    "equal",
    "explained",
    "unexplained",
    "unknown",
    "not in the trace",
    "told again",
)
VERDICTS = (EQUAL, EXPLAINED, UNEXPLAINED, UNKNOWN, UNTRACED, REPEATED)
"""Of a line of the log. The last: an earlier line has told the same of the same call."""


class Told(NamedTuple):
    """What a client was told about one call. Tokens; None: it was not told.

    ``names`` are ids of the call, the most exact first: the response's id, the ``X-Request-Id``, a trace id.
    ``line`` is the line in the log, from 1. ``written``: tokens written to the cache, as the server says.
    ``tenant``: who pays, as the gateway says that wrote the log; "": not said.
    """

    names: tuple[str, ...]
    prompt_tokens: int | None
    cached: int | None
    output_tokens: int | None
    line: int
    written: int | None = None
    tenant: str = ""


class Reconciled(NamedTuple):
    """One call: what the client was told, what the ledger has, and why they differ."""

    told: Told
    verdict: str
    causes: tuple[str, ...]
    ledger: CallFigures | None
    requests: tuple[CallRequest, ...]

    @property
    def group(self) -> str:
        """The tenant by the labels of the requests, which a client can choose; "": none."""
        return next((each.tenant for each in self.requests if each.tenant), "")


class Usage(NamedTuple):
    """All calls of a log beside the calls of a trace."""

    calls: list[Reconciled]
    unlogged: list[list[CallRequest]]
    """Calls of the trace that no line of the log tells of, such as an attempt that a gateway repeated."""


NOT_FOUND: tuple[int, list[FoundRequests]] = sys.maxsize, []
"""Of an id that names no account; nobody changes it."""


class CallIndex:
    """Finds the requests of the calls in a log, and of calls that no line names; holds their accounts."""

    def __init__(self, told: Sequence[Told], *, suffixed: bool) -> None:
        self._suffixed = suffixed
        """Whether the engine's release appends random digits to ids."""
        self._by_name: dict[str, tuple[int, list[FoundRequests]]] = {
            name: NOT_FOUND for each in told for name in each.names
        }
        """By each id in the log: how exactly it names accounts, and those that it names most exactly."""
        self._others: dict[str, list[FoundRequests]] = {}
        """Accounts of calls that no id in the log names, by the call's id."""

    def add(
        self,
        account: AccountStatement,
        engine: str = "",
        kv_role: str = "",
        began: float = 0.0,
        tenant: str = "",
    ) -> None:
        """Take an account of the trace, with what :class:`FoundRequests` has of it."""
        found = FoundRequests(account, engine, kv_role, began, tenant)
        named = False
        call = ""
        for place, name in client_names(account.request_id, account.traceparent, suffixed=self._suffixed):
            call = name if place == 1 and not call else call
            known = self._by_name.get(name)
            if known is None:
                continue
            named = True
            if place < known[0]:
                self._by_name[name] = place, [found]
            elif place == known[0] and found not in known[1][-1:]:
                known[1].append(found)
        if not named:
            self._others.setdefault(call, []).append(found)

    def calls(self, names: Iterable[str]) -> list[list[CallRequest]]:
        """The calls that the first known one of ``names`` means; several if the id was used again."""
        for name in names:
            _, accounts = self._by_name.get(name, NOT_FOUND)
            if accounts:
                return calls_of(accounts, suffixed=self._suffixed)
        return []

    def others(self) -> Iterator[list[CallRequest]]:
        """The calls that no id in the log names."""
        for accounts in self._others.values():
            yield from calls_of(accounts, suffixed=self._suffixed)


def reconcile(told: Sequence[Told], index: CallIndex) -> Usage:
    """Compare each line of a log with its call. A call is taken by one line; one that says the same is a
    copy."""
    taken: dict[int, tuple[Told, ...]] = {}
    untraced: set[Told] = set()
    rows: list[Reconciled] = []
    unlogged: dict[int, list[CallRequest]] = {}
    for each in told:
        every = index.calls(each.names)
        free = [call for call in every if _key(call) not in taken]
        if not free:
            same = each._replace(line=0)
            earlier = (told for call in every for told in taken[_key(call)])
            if same in untraced or any(told._replace(line=0) == same for told in earlier):
                rows.append(Reconciled(each, REPEATED, (), None, ()))
                continue
            if not every:
                untraced.add(same)
        rows.append(_row(each, free or every))
        if rows[-1].requests:
            key = _key(rows[-1].requests)
            taken[key] = (*taken.get(key, ()), each)
        if len(every) > 1:
            unlogged |= {_key(call): call for call in every}
    left = [call for key, call in unlogged.items() if key not in taken]
    return Usage(rows, [*left, *index.others()])


# --- differences ----------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """Calls of one tenant that differ in one figure, for one cause, in one direction. Tokens.

    ``tenant``: who pays, as the log says; "": it does not. ``group``: the tenant by the requests' labels,
    where the log does not say who pays; a client can choose it. ``least`` and ``most``: what one call was
    told beyond the ledger.
    """

    tenant: str
    group: str
    figure: str
    cause: str
    sign: str
    calls: int
    told: int
    settled: int
    least: int
    most: int


NOT_CACHED = {"prompt-per-sample": "prompt", "aborted": "output"}
"""The figure that a cause is about, of the causes that are not about cached tokens."""

FIGURES = {"prompt": "prompt_tokens", "cached": "cached", "output": "output_tokens"}
"""The field of each figure, in what was told and in the ledger."""


def differences(usage: Usage) -> list[Difference]:
    """The differences of all calls, most tokens first."""
    found: dict[tuple[str, str, str, str, str], list[tuple[int, int]]] = {}
    for row in usage.calls:
        for cause in row.causes:
            figure = NOT_CACHED.get(cause, cause.removeprefix(f"{UNEXPLAINED} "))
            figure = figure if figure in FIGURES else "cached"
            told, settled = getattr(row.told, FIGURES[figure]), getattr(row.ledger, FIGURES[figure])
            if told is not None:
                payer = row.told.tenant
                key = payer, "" if payer else row.group, figure, cause, "+" if told > settled else "-"
                found.setdefault(key, []).append((told, settled))
    rows = [
        Difference(
            *key,
            calls=len(pairs),
            told=sum(told for told, _ in pairs),
            settled=sum(settled for _, settled in pairs),
            least=min((told - settled for told, settled in pairs), key=abs),
            most=max((told - settled for told, settled in pairs), key=abs),
        )
        for key, pairs in found.items()
    ]
    return sorted(rows, key=lambda row: (-abs(row.told - row.settled), row[:5]))


def shared_groups(usage: Usage) -> dict[str, list[str]]:
    """The groups by labels whose calls several tenants pay for, with these tenants."""
    payers: dict[str, set[str]] = {}
    for row in usage.calls:
        if row.group and row.told.tenant:
            payers.setdefault(row.group, set()).add(row.told.tenant)
    return {group: sorted(found) for group, found in sorted(payers.items()) if len(found) > 1}


def _key(call: Sequence[CallRequest]) -> int:
    """The index holds the accounts, so each has an identity of its own."""
    return id(call[0].account)


def _row(told: Told, calls: list[list[CallRequest]]) -> Reconciled:
    """The line beside the first call that it equals; if none, beside the first that explains it."""
    rows = [_compared(told, call) for call in calls]
    if not rows:
        return Reconciled(told, UNTRACED, (), None, ())
    return min(rows, key=lambda row: VERDICTS.index(row.verdict))


def _compared(told: Told, call: list[CallRequest]) -> Reconciled:
    counted = figures(call)
    causes = [*_prompt(told, call, counted), *_cached(told, call, counted), *_output(told, call, counted)]
    if not counted.known:
        verdict, causes = UNKNOWN, []
    elif any(cause.startswith(UNEXPLAINED) for cause in causes):
        verdict = UNEXPLAINED
    else:
        verdict = EXPLAINED if [cause for cause in causes if cause != "not-told"] else EQUAL
    return Reconciled(told, verdict, tuple(causes), counted, tuple(call))


def _prompt(told: Told, call: list[CallRequest], counted: CallFigures) -> Iterator[str]:
    if told.prompt_tokens in (None, counted.prompt_tokens):
        return
    if told.prompt_tokens == sum(each.account.prompt_tokens for each in call):
        yield "prompt-per-sample"
    else:
        yield f"{UNEXPLAINED} prompt"


def _cached(told: Told, call: list[CallRequest], counted: CallFigures) -> Iterator[str]:
    if told.cached == counted.cached:
        return
    if told.cached is None:
        yield "not-told"
        return
    for cause, values in _other_figures(call, counted):
        if told.cached in values:
            yield cause
            return
    yield f"{UNEXPLAINED} cached"


def _other_figures(call: list[CallRequest], counted: CallFigures) -> Iterator[tuple[str, set[int]]]:
    """Each cause of another cached figure, and the figures that it gives."""
    if any(each.part.sample > 0 for each in call):
        yield "one-sample", {each.cached for each in call}
    if counted.prompts > 1:
        yield "one-prompt", {each.cached for each in call}
    received = [each for each in call if each.role == DECODE]
    if received:
        yield "transfer", {each.local + each.external for each in received}
        yield "decode-engine", {each.local for each in received}
    yield "plan", {sum(each.account.plan) for each in call if each.account.plan is not None}
    yield (
        "engine-report",
        {sum(each.account.reported[:2]) for each in call if each.account.reported is not None},
    )


def _output(told: Told, call: list[CallRequest], counted: CallFigures) -> Iterator[str]:
    if told.output_tokens in (None, counted.output_tokens):
        return
    aborted = any(each.account.outcome == "aborted" for each in call)
    if aborted and (told.output_tokens or 0) < counted.output_tokens:
        yield "aborted"
    else:
        yield f"{UNEXPLAINED} output"


# --- Which of an engine's own counters contradict each other, in two scrapes of its metrics.
#
# Nothing here needs the ledger. Traffic does not stop while an engine answers, so no two counters are of
# one instant. But counters only grow: what must not exceed another figure may not exceed it as it was read
# later. So only what holds under every order of reading is a contradiction, and a small one can stay hidden
# while requests run.

Figures = Mapping[str, float]
"""An engine's counters in one scrape, by figure."""


class Contradiction(NamedTuple):
    """The sum of some figures is more than that of others, which were read later and can't be less.

    ``limits`` are the ``figures`` themselves where a counter fell.
    """

    figures: tuple[str, ...]
    sum: float
    limits: tuple[str, ...]
    limit: float


def relations(words: Mapping[str, str], product: Product) -> tuple[Relation, ...]:
    """What must hold in a release of an engine: ``words`` say what its figures mean."""
    contract = CONTRACTS[product]
    return (*contract.relations, *(contract.of_sources if sources_add_up(words) else ()))


def contradictions(
    first: Figures, second: Figures, words: Mapping[str, str], product: Product
) -> Iterator[Contradiction]:
    """What can't be true of one engine that answered ``first`` and then ``second``."""
    for figure, before in first.items():
        if figure in second and second[figure] < before:
            yield Contradiction((figure,), before, (figure,), second[figure])
    for names, limits, equal in (*relations(words, product), OUTPUTS):
        if not {*names, *limits} <= first.keys() & second.keys():
            continue
        for lesser, more in ((names, limits), (limits, names))[: 1 + equal]:
            total, limit = sum(first[each] for each in lesser), sum(second[each] for each in more)
            if total > limit:
                yield Contradiction(lesser, total, more, limit)
    if sources_add_up(words) and not second.get("preemptions") and second.get("local_hit_tokens") == 0:
        # A preempted request's hits count only in the other figure. A coordinator of a plugin may count none.
        local = first.get("local_tokens", 0.0)
        if local:
            yield Contradiction(("local_tokens",), local, ("local_hit_tokens",), 0.0)
