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

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

import msgspec

from ..client_ids import client_names
from ..ledger.account import Account, AccountStatement
from ..release_semantics import CONTRACTS, OUTPUTS, Product, Relation, sources_add_up
from .calls import DECODE, CallAccount, CallFigures, CallRequest, FoundRequests, calls_of, figures

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


Row = TypeVar("Row")
_ENCODER = msgspec.msgpack.Encoder()


class Packed(Generic[Row]):
    """Rows of one kind, each as bytes: a million of them take a tenth of the memory of as many objects."""

    def __init__(self, kind: type[Row]) -> None:
        self._rows: list[bytes] = []
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def add(self, row: Row) -> int:
        """Keep a row; returns its number, from 0."""
        self._rows.append(_ENCODER.encode(row))
        return len(self._rows) - 1

    def __getitem__(self, number: int) -> Row:
        return self._decode(self._rows[number])

    def __iter__(self) -> Iterator[Row]:
        return map(self._decode, self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class ToldOfCalls(Packed[Told]):
    """What clients were told, a row for each call."""

    def __init__(self, told: Iterable[Told] = ()) -> None:
        super().__init__(Told)
        self.numbers: dict[str, Numbers] = {}
        """All ids. The index of the calls puts the accounts here, so a log serves one index."""
        for each in told:
            self.add(each)

    def add(self, row: Told) -> int:
        """Keep a row."""
        for name in row.names:
            self.numbers[name] = NONE
        return super().add(row)


Numbers = int | list[int]
"""Numbers of accounts, most often of one, each with the rank of the id that names it: 8 * number + rank."""

NONE = -1
RANKS = 8


class CallIndex:
    """Finds the requests of the calls in a log, and of calls that no line names; holds their accounts."""

    def __init__(self, told: ToldOfCalls, *, suffixed: bool) -> None:
        self._suffixed = suffixed
        """Whether the engine's release appends random digits to ids."""
        self._accounts: Packed[tuple[int, str, CallAccount]] = Packed(tuple[int, str, CallAccount])
        """Of each account its engine's number and its tenant."""
        self._engines: dict[tuple[str, str, float], int] = {}
        """Name, ``kv_role`` and start of each engine."""
        self._by_name = told.numbers
        """By each id in the log the accounts that it names most exactly."""
        self._others: dict[str, Numbers] = {}
        """Accounts of calls that no id in the log names, by the call's id."""

    def add(
        self,
        account: Account | AccountStatement,
        engine: str = "",
        kv_role: str = "",
        began: float = 0.0,
        tenant: str = "",
    ) -> None:
        """Take an account of the trace, with what :class:`FoundRequests` has of it."""
        place = self._engines.setdefault((engine, kv_role, began), len(self._engines))
        number = self._accounts.add((place, tenant, CallAccount.of(account)))
        named = False
        call = ""
        for rank, name in client_names(account.request_id, account.traceparent, suffixed=self._suffixed):
            call = name if rank == 1 and not call else call
            known = self._by_name.get(name)
            if known is not None:
                named = True
                self._by_name[name] = _most_exact(known, RANKS * number + rank)
        if not named:
            self._others[call] = _most_exact(self._others.get(call, NONE), RANKS * number)

    def __len__(self) -> int:
        """How many accounts there are."""
        return len(self._accounts)

    def calls(self, names: Iterable[str]) -> list[list[CallRequest]]:
        """The calls that the first known one of ``names`` means; several if the id was used again."""
        for name in names:
            if (numbers := self._by_name.get(name, NONE)) != NONE:
                return self._calls(numbers)
        return []

    def others(self) -> Iterator[list[CallRequest]]:
        """The calls that no id in the log names."""
        for numbers in self._others.values():
            yield from self._calls(numbers)

    def _calls(self, numbers: Numbers) -> list[list[CallRequest]]:
        engines = list(self._engines)
        found = []
        for number in [numbers] if isinstance(numbers, int) else numbers:
            place, tenant, account = self._accounts[number // RANKS]
            found.append(FoundRequests(account, *engines[place], tenant, number // RANKS))
        return calls_of(found, suffixed=self._suffixed)


def _most_exact(known: Numbers, new: int) -> Numbers:
    """The accounts that an id names most exactly, with a new one that it names."""
    if known == NONE:
        return new
    first, last = (known, known) if isinstance(known, int) else (known[0], known[-1])
    if new % RANKS != first % RANKS:
        return known if first % RANKS < new % RANKS else new
    if last == new:
        return known
    if isinstance(known, int):
        return [known, new]
    known.append(new)  # a copy for each account would take time by the square of their number
    return known


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
    calls: int = 0
    told: int = 0
    settled: int = 0
    least: int = 0
    most: int = 0

    def with_call(self, told: int, settled: int) -> Difference:
        """With one call more."""
        least = most = told - settled
        if self.calls:
            least, most = min(self.least, least, key=abs), max(self.most, most, key=abs)
        return Difference(*self[:5], self.calls + 1, self.told + told, self.settled + settled, least, most)


NOT_CACHED = {"prompt-per-sample": "prompt", "aborted": "output"}
"""The figure that a cause is about, of the causes that are not about cached tokens."""

FIGURES = {"prompt": "prompt_tokens", "cached": "cached", "output": "output_tokens"}
"""The field of each figure, in what was told and in the ledger."""

NO_CALL = -1


class Usage:
    """All calls of a log beside the calls of a trace: their sums, and each of them when it is asked for.

    A call is taken by one line; one that says the same is a copy.
    """

    def __init__(self, told: ToldOfCalls, index: CallIndex) -> None:
        self._told, self._index = told, index
        self._calls = array("q")
        """For each line the number of its call; NO_CALL: it is a copy, or tells of no call of the trace."""
        self._verdicts = array("b")
        """Its verdict: a place in :data:`VERDICTS`."""
        self._left: list[tuple[int, int]] = []
        """Calls that no line takes although one has their id: this line, and the call's number."""
        self.verdicts: Counter[str] = Counter()
        """Lines of the log, by verdict."""
        self.causes: Counter[str] = Counter()
        """Calls that differ, by cause."""
        self._differences: dict[tuple[str, str, str, str, str], Difference] = {}
        self._payers: dict[str, set[str]] = {}
        """By the group of requests the tenants that pay."""
        for row in self._reconciled():
            self._calls.append(row.requests[0].number if row.requests else NO_CALL)
            self._verdicts.append(VERDICTS.index(row.verdict))
            self.verdicts[row.verdict] += 1
            if row.causes:
                self._add_causes(row)
            if row.told.tenant and row.group:
                self._payers.setdefault(row.group, set()).add(row.told.tenant)

    def _reconciled(self) -> Iterator[Reconciled]:
        """Each line beside its call."""
        first = array("q", [NO_CALL]) * len(self._index)
        """The first line that took a call, by the call's number."""
        later: dict[int, list[int]] = {}
        """The others."""
        untraced: set[bytes] = set()
        more_calls: dict[int, int] = {}
        for place, told in enumerate(self._told):
            every = self._index.calls(told.names)
            free = [call for call in every if first[call[0].number] < 0]
            if not free:
                same = told._replace(line=0)
                numbers = [call[0].number for call in every]
                earlier = (at for number in numbers for at in (first[number], *later.get(number, ())))
                text = b"" if every else _ENCODER.encode(same)
                if text in untraced or any(self._told[at]._replace(line=0) == same for at in earlier):
                    yield Reconciled(told, REPEATED, (), None, ())
                    continue
                if not every:
                    untraced.add(text)
            row = _row(told, free or every)
            if row.requests:
                number = row.requests[0].number
                if first[number] < 0:
                    first[number] = place
                else:
                    later.setdefault(number, []).append(place)
            if len(every) > 1:
                more_calls |= {call[0].number: place for call in every}
            yield row
        self._left = [(place, number) for number, place in more_calls.items() if first[number] < 0]

    def _add_causes(self, row: Reconciled) -> None:
        for cause in row.causes:
            self.causes[cause] += 1
            figure = NOT_CACHED.get(cause, cause.removeprefix(f"{UNEXPLAINED} "))
            figure = figure if figure in FIGURES else "cached"
            told, settled = getattr(row.told, FIGURES[figure]), getattr(row.ledger, FIGURES[figure])
            if told is not None:
                payer = row.told.tenant
                key = payer, "" if payer else row.group, figure, cause, "+" if told > settled else "-"
                known = self._differences.get(key) or Difference(*key)
                self._differences[key] = known.with_call(told, settled)

    def calls(self, verdicts: Collection[str] = VERDICTS) -> Iterator[Reconciled]:
        """The lines with these verdicts, each beside its call."""
        wanted = {VERDICTS.index(each) for each in verdicts}
        for place, (number, verdict) in enumerate(zip(self._calls, self._verdicts, strict=True)):
            if verdict not in wanted:
                continue
            told = self._told[place]
            if number == NO_CALL:
                yield Reconciled(told, VERDICTS[verdict], (), None, ())
            else:
                yield _compared(told, self._call(told, number))

    def unlogged(self) -> Iterator[list[CallRequest]]:
        """Calls of the trace that no line of the log tells of, such as an attempt that a gateway repeated."""
        for place, number in self._left:
            yield self._call(self._told[place], number)
        yield from self._index.others()

    def _call(self, told: Told, number: int) -> list[CallRequest]:
        return next(call for call in self._index.calls(told.names) if call[0].number == number)

    @property
    def differences(self) -> list[Difference]:
        """The differences of all calls, most tokens first."""
        rows = self._differences.values()
        return sorted(rows, key=lambda row: (-abs(row.told - row.settled), row[:5]))

    @property
    def shared_groups(self) -> dict[str, list[str]]:
        """The groups by labels whose calls several tenants pay for, with these tenants."""
        return {group: sorted(found) for group, found in sorted(self._payers.items()) if len(found) > 1}


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
        yield "transfer", {each.account.local + each.account.external for each in received}
        yield "decode-engine", {each.account.local for each in received}
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
