"""Histories written as words, the events an adapter would record for them, and the golden table.

This file has the words (:func:`parse`), a small correct engine that reports its own counters
(:class:`Engine`), the delta encoding of steps and outputs (:class:`Encoder`), and :data:`GOLDEN`.
No accounting is done here: this file does not know the origin of a token.

The words of ``histories.md``, and what is added here (marked +):

=============== =====================================================================================
``A<l>+<e>``    admitted with l local and e promised external tokens; asynchronous when ``L`` comes
                before the first ``s`` of the life, or nothing does; + a final ``a`` says so outright
``L`` ``L<k>``  the promised tokens are loaded, or the first k only; + k < 0: local hits fall too;
                + a final ``!``: the outputs of the steps after the failed one are delivered
``R<n>``        n tokens rolled back; + ``:replay`` names another cause
``s<n>``        a step schedules n positions; + ``/<k>`` of them drafts (else from the output word)
``o`` ``o+``    the oldest step's output: nothing sampled, one token sampled
``o<a>/<k>``    k drafts, a accepted
``P`` ``p``     preempted, the output in flight is delivered or dropped; + ``:reset`` names the cause
``F``           finished or aborted; + ``-<n>``: the last n accepted tokens lie beyond the stop;
                + ``:aborted`` names the reason
``W:<cause>`` + a step leaves requests waiting, by the cause's name after ``queued_``
``C<n>`` +      the step's load plan covers n of the promised tokens
``S`` +         a session's chunk stops; ``-<n>`` as for ``F``
``X<n>`` +      a session's next chunk of n tokens comes
``b.`` +        before a word: it is about request b (a is 0)
``&`` +         between words: one step, or one output, of several requests
=============== =====================================================================================
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvledger.audit.events import (
    Admitted,
    CacheReset,
    Census,
    Delivered,
    DeliveredWhole,
    Event,
    Extended,
    Finished,
    LeftWaiting,
    LoadFailed,
    LoadFinished,
    LoadPlanned,
    LookedUp,
    Matched,
    Preempted,
    Repeated,
    RequestAdded,
    RolledBack,
    Stepped,
)

# --- words ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Word:
    """One word. ``first`` and ``second`` are its numbers, ``mark`` its cause, reason or flag."""

    kind: str
    request: int = 0
    first: int | None = None
    second: int | None = None
    mark: str = ""
    joined: bool = False
    """Belongs to the same step or output as the word before it."""


_GRAMMAR = (
    ("A", re.compile(r"A(\d+)\+(-?\d+)(a?)")),
    ("L", re.compile(r"L(-?\d+)?()(!?)")),
    ("C", re.compile(r"C(\d+)()()")),
    ("R", re.compile(r"R(\d+)()(?::(\w+))?")),
    ("s", re.compile(r"s(\d+)(?:/(\d+))?()")),
    ("o", re.compile(r"o(\d+)/(\d+)()")),
    ("o", re.compile(r"o()()(\+?)")),
    ("P", re.compile(r"P()()(?::(\w+))?")),
    ("p", re.compile(r"p()()(?::(\w+))?")),
    ("F", re.compile(r"F(?:-(\d+))?()(?::(\w+))?")),
    ("W", re.compile(r"W()()(?::(\w+))?")),
    ("S", re.compile(r"S(?:-(\d+))?()()")),
    ("X", re.compile(r"X(\d+)()()")),
)
_REPEAT = re.compile(r"\(([^()]*)\)x(\d+)")


def parse(prompt_tokens: int, words: str) -> list[Word]:
    """The words of one history, or of several woven together. Raises ValueError for an unknown word.

    ``prompt_tokens`` only limits the hit of the first admission.
    """
    while match := _REPEAT.search(words):
        many = " ".join([match[1]] * int(match[2]))
        words = words[: match.start()] + many + words[match.end() :]
    parsed: list[Word] = []
    for group in words.split():
        for place, text in enumerate(group.split("&")):
            parsed.append(_word(text, joined=place > 0))
    for word in parsed:
        if word.kind == "A" and word.request == 0:
            if (word.first or 0) + (word.second or 0) > prompt_tokens:
                raise ValueError(f"{words!r}: a first hit longer than {prompt_tokens} tokens")
            break
    return parsed


def _word(text: str, *, joined: bool) -> Word:
    request = 0
    body = text
    if re.match(r"[a-z]\.", text):
        request, body = ord(text[0]) - ord("a"), text[2:]
    for kind, pattern in _GRAMMAR:
        if match := pattern.fullmatch(body):
            first, second, mark = match.groups()
            return Word(
                kind,
                request,
                int(first) if first else None,
                int(second) if second else None,
                mark or "",
                joined,
            )
    raise ValueError(f"not a word: {text!r}")


# --- the delta encoding ---------------------------------------------------------------------------


class Encoder:
    """Encodes full steps and outputs as differences from the one before."""

    def __init__(self) -> None:
        self._scheduled: dict[int, tuple[int, int]] = {}
        self._sampled: dict[int, int] = {}

    def stepped(
        self,
        at: int,
        step: int,
        rows: Iterable[tuple[int, int, int, int]],
        restated: Collection[int] = (),
    ) -> Stepped:
        """``rows``: request, scheduled, drafts, computed after. ``restated``: always written."""
        changed: list[int] = []
        scheduled: dict[int, tuple[int, int]] = {}
        for request, tokens, drafts, computed in rows:
            scheduled[request] = (tokens, drafts)
            if request in restated or self._scheduled.get(request) != (tokens, drafts):
                changed += (request, tokens, drafts, computed)
        dropped = [request for request in self._scheduled if request not in scheduled]
        self._scheduled = scheduled
        return Stepped(at, step, changed, dropped)

    def delivered(self, at: int, rows: Iterable[tuple[int, int]], ignored: Sequence[int] = ()) -> Delivered:
        """``rows``: request, sampled. An ignored request is always written, and may have a row."""
        changed: list[int] = []
        sampled: dict[int, int] = {}
        for request, tokens in rows:
            if request in ignored or self._sampled.get(request) != tokens:
                changed += (request, tokens)
            if request not in ignored:
                sampled[request] = tokens
        self._sampled = sampled
        return Delivered(at, changed, list(ignored))


def compressed(events: Sequence[Event]) -> list[Event]:
    """The same stream with unchanged pairs of step and output as :class:`Repeated`.

    A pair is compressed when both name nothing and the output before had thrown nothing away.
    """
    result: list[Event] = []
    clean = False
    place = 0
    while place < len(events):
        times = 0
        while clean and _unchanged(events[place + 2 * times : place + 2 * times + 2]):
            times += 1
        if times:
            place += 2 * times
            result.append(Repeated(events[place - 1].at, times))
            continue
        event = events[place]
        if isinstance(event, Delivered):
            clean = not event.ignored
        result.append(event)
        place += 1
    return result


def _unchanged(pair: Sequence[Event]) -> bool:
    match pair:
        case [Stepped(changed=[], dropped=[]), Delivered(changed=[], ignored=[])]:
            return True
    return False


def whole_outputs(events: Iterable[Event]) -> list[Event]:
    """The same stream, with every output that ignored no request as :class:`DeliveredWhole`."""
    result: list[Event] = []
    sampled: dict[int, int] = {}
    named: list[int] = []
    for event in events:
        if isinstance(event, Delivered):
            sampled.update(zip(event.changed[::2], event.changed[1::2], strict=True))
            if not event.ignored:
                requests = [] if list(sampled) == named else list(sampled)
                event = DeliveredWhole(event.at, requests, bytes(sampled.values()))
                named = list(sampled)
        result.append(event)
    return result


def request_id(request: int) -> str:
    """The text id that every stream of this file gives to a request."""
    return f"request-{request}"


# --- a small correct engine -----------------------------------------------------------------------


@dataclass
class Counters:
    """The engine's own counters of one request; vLLM's names, shortened."""

    request: int
    prompt_tokens: int
    sequence_tokens: int
    pooling: bool = False
    output_tokens: int = 0
    computed: int = 0
    in_flight: int = 0
    placeholders: int = 0
    resumed: bool = False
    finished: bool = False
    local: int = 0
    external: int = 0
    waits: bool = False
    """The external tokens promised to this life are neither loaded nor failed yet."""
    asynchronous: bool = False


@dataclass
class Part:
    """One request's share of a step in flight.

    ``fate``: live, stale (delivered, of an ended life), invalid (delivered, above a failed load) or dropped.
    """

    request: int
    tokens: int
    drafts: int
    samples: bool
    fate: str = "live"


@dataclass
class Engine:
    """Keeps the counters of vLLM 0.32's schedulers and writes what an adapter would see.

    Every method is one thing that an engine does; who calls decides what happens, this class
    only counts. ``asynchronous`` engines have output placeholders, others state 0.
    """

    asynchronous: bool = False
    events: list[Event] = field(default_factory=list)
    requests: dict[int, Counters] = field(default_factory=dict)
    flight: deque[list[Part]] = field(default_factory=deque)
    step: int = 0

    def __post_init__(self) -> None:
        self._encoder = Encoder()

    # Small helpers.

    def _at(self) -> int:
        return 10 * (len(self.events) + 1)

    def _placeholders(self, one: Counters) -> int:
        return one.placeholders if self.asynchronous else 0

    def parts(self, request: int) -> list[Part]:
        """The request's shares of the steps in flight, oldest first."""
        return [part for step in self.flight for part in step if part.request == request]

    # A request comes and is admitted.

    def add(
        self, request: int, prompt_tokens: int, *, pooling: bool = False, resumable: bool = False
    ) -> None:
        self.requests[request] = Counters(request, prompt_tokens, prompt_tokens, pooling)
        self.events.append(
            RequestAdded(
                self._at(),
                request,
                request_id(request),
                prompt_tokens,
                pooling=pooling,
                resumable=resumable,
            )
        )

    def look_up(self, request: int, local: int, external: int | None, asynchronous: bool) -> None:
        step = self.step + 1
        self.events.append(LookedUp(self._at(), request, step, local))
        if external != 0:
            self.events.append(Matched(self._at(), request, step, local, external, asynchronous))

    def leave_waiting(self, cause: str) -> None:
        self.events.append(LeftWaiting(self._at(), cause))

    def admit(self, request: int, local: int, external: int, asynchronous: bool) -> None:
        one = self.requests[request]
        assert one.computed == 0 and not one.finished
        one.computed = local + external
        one.local, one.external = local, external
        one.waits, one.asynchronous = external > 0, asynchronous
        self.events.append(
            Admitted(
                self._at(),
                request,
                self.step + 1,
                one.resumed,
                local,
                external,
                asynchronous,
                one.computed,
            )
        )
        one.resumed = False

    # External tokens.

    def plan_load(self, request: int, covered: int) -> None:
        missing = self.requests[request].external - covered
        blocks = list(range(1000, 1000 + (missing + 15) // 16))
        self.events.append(LoadPlanned(self._at(), request, self.step + 1, covered, blocks))

    def finish_load(self, request: int) -> None:
        one = self.requests[request]
        one.waits = False
        # A late completion, after steps had run over the promise, still names what was promised.
        loaded = min(one.computed, one.local + one.external)
        self.events.append(LoadFinished(self._at(), request, loaded))

    def fail_load(self, request: int, computed: int, *, later_delivered: bool = False) -> None:
        """Truncates at ``computed``; what is in flight of the request will be thrown away.

        ``later_delivered``: only the output of the failed step is, as in vLLM 0.32, which also subtracts
        drafts rejected in the later ones.
        """
        one = self.requests[request]
        before, one.computed = one.computed, computed
        one.placeholders = 0
        for place, part in enumerate(self.parts(request)):
            part.fate = "invalid" if later_delivered and place else "dropped"
        self.events.append(LoadFailed(self._at(), request, before, computed, one.asynchronous))

    def release(self, request: int) -> None:
        """After a load that failed wholly: the request is looked up again."""
        self.events.append(RolledBack(self._at(), request, "released", 0, 0))

    def roll_back(self, request: int, cause: str, tokens: int) -> None:
        one = self.requests[request]
        before = one.computed
        one.computed -= tokens
        self.events.append(RolledBack(self._at(), request, cause, before, one.computed))

    # Steps and outputs.

    def schedule(self, rows: Sequence[tuple[int, int, int]], restated: Collection[int] = ()) -> None:
        """One step. ``rows``: request, tokens, drafts among them."""
        stated: list[tuple[int, int, int, int]] = []
        step: list[Part] = []
        for request, tokens, drafts in rows:
            one = self.requests[request]
            one.computed += tokens
            one.in_flight += tokens
            samples = one.computed >= one.sequence_tokens + one.placeholders and not one.pooling
            if samples:
                one.placeholders += 1 + drafts
            step.append(Part(request, tokens, drafts, samples))
            stated.append((request, tokens, drafts, one.computed))
        self.step += 1
        self.flight.append(step)
        self.events.append(self._encoder.stepped(self._at(), self.step, stated, restated))

    def deliver(self, sampled: dict[int, int]) -> None:
        """The oldest step's output; ``sampled``: by request, accepted drafts plus one."""
        rows: list[tuple[int, int]] = []
        ignored: list[int] = []
        for part in self.flight.popleft():
            one = self.requests[part.request]
            tokens = sampled.get(part.request, 0)
            if one.finished:
                ignored.append(part.request)
                continue
            rows.append((part.request, tokens))
            one.in_flight -= part.tokens
            if part.fate == "dropped":
                ignored.append(part.request)
                continue
            one.sequence_tokens += tokens
            one.output_tokens += tokens
            rejected = part.drafts - (tokens - 1) if part.drafts and tokens else 0
            if part.fate == "invalid" and one.computed:  # a fault of vLLM 0.32
                one.computed -= rejected
            if part.fate == "live":
                one.computed -= rejected
                if part.samples:
                    one.placeholders -= rejected + tokens
                if one.waits and not one.asynchronous:
                    one.waits = False
        self.events.append(self._encoder.delivered(self._at(), rows, ignored))

    # Preemption, sessions, the end.

    def preempt(self, request: int, cause: str, delivered: bool) -> None:
        one = self.requests[request]
        self.events.append(
            Preempted(
                self._at(),
                request,
                self.step + 1,
                cause,
                one.computed,
                one.in_flight,
                self._placeholders(one),
                0,
                0,
                delivered,
            )
        )
        one.computed = one.placeholders = 0
        one.waits = False
        one.resumed = True
        for part in self.parts(request):
            if part.fate in ("live", "invalid"):
                part.fate = "stale" if delivered else "dropped"

    def reset(self, running: bool) -> None:
        """The prefix cache is reset; the caller preempts the running requests."""
        self.events.append(CacheReset(self._at(), True, running))

    def _cut(self, one: Counters, tokens: int) -> None:
        one.sequence_tokens -= tokens
        one.output_tokens -= tokens

    def stop_chunk(self, request: int, beyond: int = 0, *, silent: bool = False) -> None:
        """A session's chunk stops; ``silent``: no event if the count does not fall."""
        one = self.requests[request]
        self._cut(one, beyond)
        # A preempted request, whose output in flight stops the chunk, has no computed tokens.
        before, one.computed = one.computed, 0 if one.resumed else one.sequence_tokens - 1
        one.placeholders = 0
        for part in self.parts(request):
            part.fate = "dropped"
        if before != one.computed or not silent:
            self.events.append(RolledBack(self._at(), request, "session", before, one.computed))

    def extend(self, request: int, tokens: int) -> None:
        one = self.requests[request]
        one.prompt_tokens = one.sequence_tokens = one.computed + tokens
        one.output_tokens = 0
        self.events.append(Extended(self._at(), request, one.prompt_tokens, one.computed))

    def finish(self, request: int, reason: str, beyond: int = 0) -> None:
        one = self.requests[request]
        self._cut(one, beyond)
        one.finished = True
        self.events.append(
            Finished(
                self._at(),
                request,
                reason,
                one.computed,
                one.in_flight,
                self._placeholders(one),
                one.sequence_tokens,
                one.output_tokens,
            )
        )

    def census(self) -> None:
        rows: list[int] = []
        for one in self.requests.values():
            if not one.finished and one.computed:
                rows += (
                    one.request,
                    one.computed,
                    one.in_flight,
                    self._placeholders(one),
                    one.sequence_tokens,
                )
        self.events.append(Census(self._at(), self.step, rows, 0, 0, 0))


# --- from words to events -------------------------------------------------------------------------


def events(
    prompt_tokens: int,
    words: str | Sequence[Word],
    *,
    request: int = 0,
    pooling: bool = False,
    drain: bool = True,
) -> list[Event]:
    """The stream an adapter would record for one history.

    ``drain``: steps still in flight when the words end are answered by an output that is ignored.
    """
    parsed = parse(prompt_tokens, words) if isinstance(words, str) else list(words)
    return weave({request: prompt_tokens}, parsed, pooling={request} if pooling else (), drain=drain)


def weave(
    prompts: dict[int, int],
    words: str | Sequence[Word],
    *,
    pooling: Collection[int] = (),
    drain: bool = True,
) -> list[Event]:
    """The stream for several requests; the word for request a is about the first of ``prompts``."""
    parsed = parse(max(prompts.values()), words) if isinstance(words, str) else list(words)
    numbers = list(prompts)
    drafts, overlaps = _look_ahead(parsed)
    engine = Engine(asynchronous=overlaps)
    for request, prompt_tokens in prompts.items():
        resumable = any(word.kind in "SX" and numbers[word.request] == request for word in parsed)
        engine.add(request, prompt_tokens, pooling=request in pooling, resumable=resumable)
    place = 0
    while place < len(parsed):
        end = place + 1
        while end < len(parsed) and parsed[end].joined:
            end += 1
        group = parsed[place:end]
        if group[0].kind == "s":
            engine.schedule(
                [
                    (numbers[word.request], word.first or 0, drafts.get(place + offset, 0))
                    for offset, word in enumerate(group)
                ]
            )
        elif group[0].kind == "o":
            engine.deliver({numbers[word.request]: _sampled(word) for word in group})
        else:
            for offset, word in enumerate(group):
                _play(engine, numbers[word.request], word, parsed[place + offset + 1 :])
        place = end
    while drain and engine.flight:
        engine.deliver({})
    return engine.events


def _look_ahead(words: Sequence[Word]) -> tuple[dict[int, int], bool]:
    """The drafts of each ``s`` word, taken from its output word, and whether steps overlap."""
    drafts = {place: word.second for place, word in enumerate(words) if word.second is not None}
    drafts = {place: number for place, number in drafts.items() if words[place].kind == "s"}
    steps: deque[list[int]] = deque()
    current: list[int] = []
    overlaps = False
    for place, word in enumerate(words):
        if word.kind == "s":
            if word.joined:
                steps[-1].append(place)
            else:
                steps.append([place])
                overlaps = overlaps or len(steps) > 1
        elif word.kind == "o":
            if not word.joined:
                current = steps.popleft()
            for step in current:
                if words[step].request == word.request and word.second is not None:
                    drafts[step] = word.second
    return drafts, overlaps


def _sampled(word: Word) -> int:
    if word.first is not None:
        return word.first + 1
    return 1 if word.mark == "+" else 0


def _play(engine: Engine, request: int, word: Word, rest: Sequence[Word]) -> None:
    number = word.first or 0
    match word.kind:
        case "A":
            external = word.second or 0
            asynchronous = external > 0 and (word.mark == "a" or _waits(word, rest))
            engine.look_up(request, number, external, asynchronous)
            engine.admit(request, number, external, asynchronous)
        case "L":
            _load(engine, engine.requests[request], word.first, later_delivered=word.mark == "!")
        case "W":
            engine.leave_waiting(f"queued_{word.mark}")
        case "C":
            engine.plan_load(request, number)
        case "R":
            engine.roll_back(request, word.mark or "full_hit", number)
        case "P" | "p":
            engine.preempt(request, word.mark or "blocks", word.kind == "P")
        case "S":
            engine.stop_chunk(request, number)
        case "X":
            engine.extend(request, number)
        case "F":
            ended = engine.requests[request].output_tokens or engine.requests[request].pooling
            engine.finish(request, word.mark or ("stopped" if ended else "aborted"), number)


def _waits(admission: Word, rest: Sequence[Word]) -> bool:
    """Whether the request waits for its remote KV: the load ends, or the request does, before it runs."""
    for word in rest:
        if word.request == admission.request and word.kind in "LsPpF":
            return word.kind != "s"
    return True


def _load(engine: Engine, one: Counters, tokens: int | None, *, later_delivered: bool) -> None:
    if not one.asynchronous:
        if tokens is not None:
            engine.fail_load(one.request, one.local + tokens, later_delivered=later_delivered)
        return
    if tokens is not None:
        engine.fail_load(one.request, one.local + tokens)
    engine.finish_load(one.request)
    if one.computed == 0:
        engine.release(one.request)


# --- the golden table -----------------------------------------------------------------------------

Settled = tuple[int, int, int, int]
"""Local, external, computed, unattained."""


@dataclass(frozen=True)
class Golden:
    """One row: a history of one request, and its figures to the token."""

    title: str
    prompt_tokens: int
    words: str
    scheduled: int
    first_prompt: int
    first_output: int
    rework: int
    rejected: int
    overrun: int
    settled: Settled
    plan: tuple[int, int] | None
    loaded_again: int
    hit_again: int
    rework_by_cause: dict[str, int] | None = None
    voided: dict[str, int] | None = None
    later: tuple[Settled, ...] = ()
    """What a session's later chunks settled."""
    pooling: bool = False

    def events(self) -> list[Event]:
        """The row's stream."""
        return events(self.prompt_tokens, self.words, pooling=self.pooling)


@dataclass(frozen=True)
class Woven:
    """A history of several requests; ``rows`` give each one's figures (their words are not used)."""

    title: str
    words: str
    rows: tuple[Golden, ...]

    def events(self) -> list[Event]:
        """The stream; requests are numbered as the rows."""
        prompts = {number: row.prompt_tokens for number, row in enumerate(self.rows)}
        return weave(prompts, self.words)


# fmt: off
DOCUMENTED = (
    Golden("cold prompt, three tokens out", 100,
           "A0+0 s100 o+ s1 o+ s1 o+ F",
           102, 100, 2, 0, 0, 0, (0, 0, 100, 0), (0, 0), 0, 0),
    Golden("local prefix hit", 100,
           "A64+0 s36 o+ s1 o+ F",
           37, 36, 1, 0, 0, 0, (64, 0, 36, 0), (64, 0), 0, 0),
    Golden("chunked prefill", 200,
           "A0+0 s128 o s72 o+ s1 o+ F",
           201, 200, 1, 0, 0, 0, (0, 0, 200, 0), (0, 0), 0, 0),
    Golden("external, synchronous, loaded", 200,
           "A0+160 s40 L o+ F",
           40, 40, 0, 0, 0, 0, (0, 160, 40, 0), (0, 160), 0, 0),
    Golden("external, asynchronous, loaded before it runs", 200,
           "A32+128 L s40 o+ F",
           40, 40, 0, 0, 0, 0, (32, 128, 40, 0), (32, 128), 0, 0),
    Golden("full external hit, last token executed again", 96,
           "A0+96 L R1 s1 o+ F",
           1, 0, 0, 1, 0, 0, (0, 96, 0, 0), (0, 96), 0, 0, {"full_hit": 1}),
    Golden("vLLM#36752: preempted in mid-prefill, asked again", 200,
           "A0+32 L s56 o P A0+160 L s40 o+ F",
           96, 96, 0, 0, 0, 0, (0, 104, 96, 0), (0, 32), 88, 0),
    Golden("preempted in decode, resumed from the cache", 64,
           "A0+0 s64 o+ s1 o+ s1 o+ P A64+0 s3 o+ s1 o+ F",
           70, 64, 4, 2, 0, 0, (0, 0, 64, 0), (0, 0), 0, 64, {"blocks": 2}),
    Golden("preempted in decode, resumed cold", 64,
           "A0+0 s64 o+ s1 o+ P A0+0 s66 o+ F",
           131, 64, 2, 65, 0, 0, (0, 0, 64, 0), (0, 0), 0, 0, {"blocks": 65}),
    Golden("LMCache#1969: resumed, local then external", 34,
           "A0+0 s34 o+ (s1 o+)x14 P A16+18 L s15 o+ F",
           63, 34, 15, 14, 0, 0, (0, 0, 34, 0), (0, 0), 18, 16, {"blocks": 14}),
    Golden("asynchronous load fails in part, recomputed", 200,
           "A0+160 L64 s136 o+ F",
           136, 136, 0, 0, 0, 0, (0, 64, 136, 0), (0, 160), 0, 0, {}, {"failed": 96}),
    Golden("asynchronous load fails wholly, looked up anew", 200,
           "A0+160 L0 A0+0 s200 o+ F",
           200, 200, 0, 0, 0, 0, (0, 0, 200, 0), (0, 0), 0, 0, {}, {"failed": 160}),
    Golden("speculative: 3 drafts, 1 accepted", 50,
           "A0+0 s50 o+ s4 o1/3 s4 o3/3 F",
           58, 50, 6, 0, 2, 0, (0, 0, 50, 0), (0, 0), 0, 0),
    Golden("async scheduling, one step ahead, overrun at stop", 40,
           "A0+0 s40 s1 o+ s1 o+ F",
           42, 40, 1, 0, 0, 1, (0, 0, 40, 0), (0, 0), 0, 0),
    Golden("async, preempted with a step in flight, delivered", 40,
           "A0+0 s40 o+ s1 P o+ A32+0 s10 o+ F",
           51, 40, 2, 9, 0, 0, (0, 0, 40, 0), (0, 0), 0, 32, {"blocks": 9}),
    Golden("async, preempted with a step in flight, dropped", 40,
           "A0+0 s40 o+ s1 p o+ A32+0 s9 o+ F",
           50, 40, 1, 9, 0, 0, (0, 0, 40, 0), (0, 0), 0, 32, {"blocks": 9}),
    Golden("aborted in mid-prefill", 300,
           "A0+0 s128 o F",
           128, 128, 0, 0, 0, 0, (0, 0, 128, 172), (0, 0), 0, 0),
    Golden("aborted while waiting for remote KV", 300,
           "A64+128 F",
           0, 0, 0, 0, 0, 0, (64, 0, 0, 236), None, 0, 0, {}, {"finished": 128}),
)
"""The table of ``histories.md``, word for word."""

FURTHER = (
    Golden("session: two chunks, the last sampled token is given up", 20,
           # Position 20 holds output; the second chunk's own tokens stand at 21..30.
           "A0+0 s20 o+ s1 o+ S X10 s10 o+ F",
           31, 30, 1, 0, 0, 0, (0, 0, 20, 0), (0, 0), 0, 0, {}, {}, ((0, 0, 10, 0),)),
    Golden("session: the step in flight when a chunk stops is overrun", 20,
           "A0+0 s20 s1 o+ s1 o+ S X10 s10 o o+ F",
           32, 30, 1, 0, 0, 1, (0, 0, 20, 0), (0, 0), 0, 0, {}, {}, ((0, 0, 10, 0),)),
    Golden("session: its turn stops while it is preempted", 20,
           "A0+0 s20 o+ s1 P o+ S F",
           21, 20, 1, 0, 0, 0, (0, 0, 20, 0), (0, 0), 0, 0),
    Golden("session: the stop lies within the accepted drafts", 20,
           # 20..23 executed and accepted; 22 and 23 lie past the stop and are overrun.
           # The new chunk stands at 22..26: other tokens, so its KV has not come to be before.
           "A0+0 s20 o+ s4 o3/3 S-2 X5 s5 o+ F",
           29, 25, 2, 0, 0, 2, (0, 0, 20, 0), (0, 0), 0, 0, {}, {}, ((0, 0, 5, 0),)),
    Golden("session: preempted in the second chunk, resumed from the cache", 20,
           "A0+0 s20 o+ S X10 s6 o P A24+0 s6 o+ F",
           32, 30, 0, 2, 0, 0, (0, 0, 20, 0), (0, 0), 0, 24, {"blocks": 2}, {},
           ((0, 0, 10, 0),)),
    Golden("session: the second chunk is aborted before it runs", 20,
           "A0+0 s20 o+ S X10 F",
           20, 20, 0, 0, 0, 0, (0, 0, 20, 0), (0, 0), 0, 0, {}, {}, ((0, 0, 0, 10),)),
    Golden("session: part of the second chunk comes from the connector after a preemption", 20,
           "A0+0 s20 o+ S X12 s2 o P A16+8 L s8 o+ F",
           30, 30, 0, 0, 0, 0, (0, 0, 20, 0), (0, 0), 6, 16, {}, {}, ((0, 2, 10, 0),)),
    Golden("replay window after a local hit", 100,
           "A64+0 R16:replay s52 o+ F",
           52, 36, 0, 16, 0, 0, (64, 0, 36, 0), (64, 0), 0, 0, {"replay": 16}),
    Golden("replay window after an asynchronous load", 100,
           "A0+64 L R16:replay s52 o+ F",
           52, 36, 0, 16, 0, 0, (0, 64, 36, 0), (0, 64), 0, 0, {"replay": 16}),
    Golden("replay window over a synchronous load: loaded, then executed again", 100,
           "A0+64 R16:replay s52 L o+ F",
           52, 36, 0, 16, 0, 0, (0, 64, 36, 0), (0, 64), 0, 0, {"replay": 16}),
    Golden("synchronous load fails in part", 200,
           "A0+160 s40 L64 o s136 o+ F",
           176, 136, 0, 40, 0, 0, (0, 64, 136, 0), (0, 160), 0, 0, {"load_failed": 40},
           {"failed": 96}),
    Golden("synchronous load failure invalidates a local hit", 200,
           "A64+96 s40 L-32 o s168 o+ F",
           208, 168, 0, 40, 0, 0, (32, 0, 168, 0), (64, 96), 0, 0, {"load_failed": 40},
           {"failed": 96}),
    Golden("synchronous load failure with the next step in flight, both outputs dropped", 200,
           "A0+160 s40 s1 L64 o s136 o o+ s1 o+ F",
           178, 136, 1, 41, 0, 0, (0, 64, 136, 0), (0, 160), 0, 0, {"load_failed": 41},
           {"failed": 96}),
    Golden("synchronous load failure with the next step in flight, whose output is delivered", 200,
           # The first output comes before 64..199 have valid KV; they are computed with the next one.
           "A0+160 s40 s1 L64! o o+ s137 o+ F",
           178, 136, 1, 41, 0, 0, (0, 64, 136, 0), (0, 160), 0, 0, {"load_failed": 41},
           {"failed": 96}),
    Golden("the same, and aborted before the tokens are computed again", 200,
           "A0+160 s40 s1 L64! o o+ s64 o F:aborted",
           105, 104, 1, 0, 0, 0, (0, 64, 64, 72), (0, 160), 0, 0, {}, {"failed": 96}),
    Golden("asynchronous load fails wholly, the local hit stays", 200,
           "A64+96 L0 s136 o+ F",
           136, 136, 0, 0, 0, 0, (64, 0, 136, 0), (64, 96), 0, 0, {}, {"failed": 96}),
    Golden("a resumed request's load fails in part", 100,
           # 0..59 were computed before; 0..31 are loaded again, 32..59 are rework.
           "A0+0 s60 o P A0+96 L32 s68 o+ F",
           128, 100, 0, 28, 0, 0, (0, 0, 100, 0), (0, 0), 32, 0, {"blocks": 28}, {"failed": 64}),
    Golden("speculative under async scheduling: a rejection moves the next step down", 50,
           "A0+0 s50 s4 o+ s4 o1/3 s4 o0/3 o3/3 F",
           62, 50, 7, 0, 5, 0, (0, 0, 50, 0), (0, 0), 0, 0),
    Golden("speculative step in flight at preemption, delivered", 30,
           "A0+0 s30 o+ s4 P o1/3 A16+0 s17 o+ F",
           51, 30, 3, 16, 2, 0, (0, 0, 30, 0), (0, 0), 0, 16, {"blocks": 16}),
    Golden("speculative step in flight at preemption, dropped", 30,
           "A0+0 s30 o+ s4 p o1/3 A16+0 s15 o+ F",
           49, 30, 2, 15, 2, 0, (0, 0, 30, 0), (0, 0), 0, 16, {"blocks": 15}),
    Golden("stopped in the middle of accepted drafts", 50,
           # 50..53 executed; the sequence ends with position 52.
           "A0+0 s50 o+ s4 o3/3 F-2",
           54, 50, 3, 0, 0, 1, (0, 0, 50, 0), (0, 0), 0, 0),
    Golden("stopped in the middle of accepted drafts, and the engine lowers its count", 50,
           # vLLM 0.33 subtracts the cut tokens from the computed count; the work is the same.
           "A0+0 s50 o+ s4 o3/3 R2:past_stop F-2",
           54, 50, 3, 0, 0, 1, (0, 0, 50, 0), (0, 0), 0, 0),
    Golden("async, stopped in the middle of accepted drafts with a step in flight", 50,
           "A0+0 s50 o+ s4/3 s4/3 o3/3 F-2",
           58, 50, 3, 0, 0, 5, (0, 0, 50, 0), (0, 0), 0, 0),
    Golden("async, the same, and the engine lowers its count", 50,
           "A0+0 s50 o+ s4/3 s4/3 o3/3 R2:past_stop F-2",
           58, 50, 3, 0, 0, 5, (0, 0, 50, 0), (0, 0), 0, 0),
    Golden("preempted again and again", 64,
           "A0+0 s64 o+ P A0+0 s32 o P A32+0 s33 o+ F",
           129, 64, 1, 64, 0, 0, (0, 0, 64, 0), (0, 0), 0, 32, {"blocks": 64}),
    Golden("reset with a step in flight, resumed in the same step", 40,
           "A0+0 s40 o+ s1 p:reset A0+0 s41 o+ o+ F",
           82, 40, 1, 41, 0, 0, (0, 0, 40, 0), (0, 0), 0, 0, {"reset": 41}),
    Golden("resumed while two chunks of the ended life are in flight, and hits both", 200,
           # The steps run in order: the two chunks computed 0..127 before the new life reads them.
           "A0+0 s64 s64 p A128+0 s64 o o s8 o o+ F",
           200, 200, 0, 0, 0, 0, (0, 0, 200, 0), (0, 0), 0, 128),
    Golden("resumed while a chunk is in flight, and hits a part of it", 100,
           "A0+0 s60 p A48+0 s52 o o+ F",
           112, 100, 0, 12, 0, 0, (0, 0, 100, 0), (0, 0), 0, 48, {"blocks": 12}),
    Golden("aborted while the chunk that the new life has hit is in flight", 200,
           "A0+0 s64 p A64+0 s64 F",
           128, 64, 0, 0, 0, 64, (0, 0, 64, 136), (0, 0), 0, 64),
    Golden("the first output arrives after the preemption, and settles", 40,
           "A0+0 s40 P o+ A32+0 s9 o+ F",
           49, 40, 1, 8, 0, 0, (0, 0, 40, 0), (0, 0), 0, 32, {"blocks": 8}),
    Golden("asynchronous promise never loaded", 200,
           "A0+160a s40 o+ F",
           40, 40, 0, 0, 0, 0, (0, 0, 40, 160), (0, 160), 0, 0, {}, {"never_loaded": 160}),
    Golden("synchronous promise, half of it in the load plan", 200,
           "A32+128 C64 s40 o+ F",
           40, 40, 0, 0, 0, 0, (32, 64, 40, 64), (32, 128), 0, 0, {}, {"not_planned": 64}),
    Golden("LMCache#1969 as it was: the resumed request's load is not planned", 34,
           "A0+0 s34 o+ (s1 o+)x14 P A16+18 C0 s15 o+ F",
           63, 34, 15, 14, 0, 0, (0, 0, 34, 0), (0, 0), 0, 16, {"blocks": 14},
           {"not_planned": 18}),
    Golden("aborted with a step in flight", 300,
           "A0+0 s128 o s128 F",
           256, 128, 0, 0, 0, 128, (0, 0, 128, 172), (0, 0), 0, 0),
    Golden("preempted while a step in flight loads, and its output comes", 200,
           "A0+160 s40 P o+ A160+0 s41 o+ F",
           81, 40, 1, 40, 0, 0, (0, 160, 40, 0), (0, 160), 0, 160, {"blocks": 40}),
    Golden("preempted while a step in flight loads, and aborted before its output", 200,
           "A0+160 s40 P F:aborted",
           40, 0, 0, 0, 0, 40, (0, 0, 0, 200), (0, 160), 0, 0, {}, {"preempted": 160}),
    Golden("preempted while a step in flight loads, and the new life hits the loaded blocks", 200,
           "A0+160 s40 p A160+0 s40 o o+ F",
           80, 40, 0, 40, 0, 0, (0, 160, 40, 0), (0, 160), 0, 160, {"blocks": 40}),
    Golden("the same, but the new life hits a part, and is aborted before any output", 200,
           # The hit proves that 0..63 were loaded; of the others nothing is known.
           "A0+160 s40 p A64+0 s136 F:aborted",
           176, 0, 0, 0, 0, 176, (0, 64, 0, 136), (0, 160), 0, 64, {}, {"preempted": 96}),
    Golden("aborted before any admission", 50,
           "F",
           0, 0, 0, 0, 0, 0, (0, 0, 0, 50), None, 0, 0),
    Golden("resumed, and aborted while waiting for remote KV", 64,
           "A0+0 s64 o+ P A0+64 F",
           64, 64, 0, 0, 0, 0, (0, 0, 64, 0), (0, 0), 0, 0, {}, {"finished": 64}),
    Golden("pooling: settled at the end", 80,
           "A32+0 s16 o s32 o F",
           48, 48, 0, 0, 0, 0, (32, 0, 48, 0), (32, 0), 0, 0, pooling=True),
)
"""Computed by hand, position by position."""

GOLDEN = (*DOCUMENTED, *FURTHER)

WOVEN = (
    Woven(
        "a failed synchronous load takes another request's local hit with it",
        "a.A0+64 b.A64+0 a.s16&b.s16 a.L32 b.L-32 a.o&b.o a.s48&b.s48 a.o+&b.o+ a.F b.F",
        (
            Golden("the one that loads", 80, "", 64, 48, 0, 16, 0, 0,
                   (0, 32, 48, 0), (0, 64), 0, 0, {"load_failed": 16}, {"failed": 32}),
            Golden("the one that shares", 80, "", 64, 48, 0, 16, 0, 0,
                   (32, 0, 48, 0), (64, 0), 0, 0, {"load_failed": 16}),
        ),
    ),
    Woven(
        "async, one preempted with a step in flight, one stopped with a step in flight",
        "a.A0+0 b.A16+0 a.s40&b.s8 a.s1&b.s1 a.o+&b.o+ a.P b.s1 a.o+&b.o+"
        " a.A32+0 a.s10&b.s1 b.o+ b.F a.o+ a.F",
        (
            Golden("preempted", 40, "", 51, 40, 2, 9, 0, 0,
                   (0, 0, 40, 0), (0, 0), 0, 32, {"blocks": 9}),
            Golden("stopped", 24, "", 11, 8, 2, 0, 0, 1, (16, 0, 8, 0), (16, 0), 0, 0),
        ),
    ),
    Woven(
        "a reset ends two lives in one step",
        "a.A0+0 b.A0+0 a.s20&b.s30 a.o+&b.o+ a.p:reset b.p:reset a.A0+0 b.A0+0 a.s21&b.s31"
        " a.o+&b.o+ a.F b.F",
        (
            Golden("first", 20, "", 41, 20, 1, 20, 0, 0,
                   (0, 0, 20, 0), (0, 0), 0, 0, {"reset": 20}),
            Golden("second", 30, "", 61, 30, 1, 30, 0, 0,
                   (0, 0, 30, 0), (0, 0), 0, 0, {"reset": 30}),
        ),
    ),
)
"""Several requests interleaved."""
# fmt: on
