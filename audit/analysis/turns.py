"""The turns of sessions: what each could have reused of the turn before, and why it reused less.

A *session* is a conversation, or the run of an agent: requests whose prompts grow. It is given (vLLM's
``session_id``, or what ``KVLEDGER_SESSION`` finds in the request id), or inferred: a request continues the
one whose last full block it has. Block hashes chain, so two requests share their tokens exactly up
to the first block in which their hash ids differ.

A turn could have reused every token of which the turn before left KV, but for the last token of its own
prompt, which is always computed. Each token below that which the first admission did not hit has one cause.
Causes are found block by block; none is the remainder of a subtraction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

import msgspec

from .. import causes
from ..bounded_tables import keep_newest, take_oldest
from ..events import Event
from ..figures.sums import Sums, add_tokens
from ..ledger.blocks.contents import Change as PoolChange
from .cache_misses import Group, lacking
from .trace_reader import (
    ADMIT,
    AFTER_WEIGHTS,
    CACHED,
    DROP,
    EVICT,
    HIT,
    IN_GROUP,
    RESET,
    Change,
    RecordedRequest,
    TraceLife,
    TraceReader,
    put,
)

MOST_BLOCKS = 1 << 20
"""Blocks of past turns, and blocks that left the cache, that are remembered; the oldest are forgotten."""

MOST_LIVE_BLOCKS = 1 << 17
"""The same, of an engine that is followed: a checkpoint holds them."""

TURNS_KEPT = 8
"""Turns of a session that are remembered: one of them may be the turn before."""

_HOW = {EVICT: causes.EVICTED, DROP: causes.DROPPED}


class Evicted(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that left the prefix cache. Unix seconds; ``by``: the request that got the first block."""

    tokens: int
    seconds: float
    by: str


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a session, which has ended. Counts are tokens, times are Unix seconds.

    ``number`` counts the turns of the session from 1; a request that was sent again has the number of the
    first one. ``before`` is the request id of the turn before; empty: there is none. ``given``: the
    session's id is the client's or operator's, and not inferred. ``hit``: local and external tokens of the
    first admission. ``reusable``: what the turn before left, below the prompt's last token. ``lost``: by
    cause, what of it was not hit. ``shared``: tokens that both turns have for certain, in
    whole blocks. ``kept``: tokens of which this turn left KV.
    """

    engine: str
    journal: str
    session: str
    given: bool
    request_id: str
    number: int
    before: str
    retried: bool
    arrived_seconds: float
    ended_seconds: float
    idle_seconds: float | None
    """From the end of the turn before to the arrival; None: no turn before."""
    prompt_tokens: int
    hit: int
    reusable: int
    shared: int
    kept: int
    lost: dict[str, int]
    evicted: Evicted | None = None
    """The first eviction among the losses, and all tokens that were evicted; None: none was."""
    prefill_seconds: float | None = None
    """Seconds that its engine takes for one more prefill token; None: not known."""

    @property
    def lost_tokens(self) -> int:
        """What was reusable and was not hit."""
        return sum(self.lost.values())

    @property
    def lost_seconds(self) -> float | None:
        """Seconds of engine time that computing the lost tokens took; None: not known.

        A turn that ended early computed only some of them.
        """
        computed = max(0, min(self.reusable, self.kept) - min(self.hit, self.reusable))
        if not computed:
            return 0.0
        return None if self.prefill_seconds is None else self.prefill_seconds * computed

    @property
    def parted_at(self) -> int:
        """The first token of the block in which the prompt differs from the turn before; -1: it does not."""
        return self.shared if any(cause in self.lost for cause in causes.PARTED) else -1


class _Left(msgspec.Struct, frozen=True):
    """How a content left the prefix cache, when, and for which life (-1: not known)."""

    how: str
    at: int
    life: int
    since: int = 0
    """Since when it had been cached."""


class _Life(msgspec.Struct):
    """The blocks of a life, by index: their hash ids, and what became of them before they were computed."""

    hashes: list[int] = []
    hits: set[int] = set()
    left: dict[int, _Left] = {}
    cached_since: dict[int, int] = {}
    """Contents that were cached already when the life cached them, and since when."""
    of_groups: list[tuple[int, int, int]] = []
    """Blocks of other groups whose prefix is not known yet: end, group and hash id."""
    first_of: dict[int, _Left | None] = {}
    """By hash id: contents of other groups that this life cached anew, and how they had left the cache."""
    groups_at: dict[int, dict[int, tuple[int | None, _Left | None]]] = {}
    """By block and group: since when the block that ends with it is cached, or how it left the cache."""


class Past(msgspec.Struct):
    """A turn that ended. ``kept``: tokens of which it left KV, ``hashes``: its full blocks."""

    number: int
    request_id: str
    prompt_tokens: int
    kept: int
    hashes: list[int]
    ended_at: int
    lora: str
    salt: str
    session: str
    given: bool


class TurnReader(msgspec.Struct):
    """Makes turns of the changes and requests of one engine, in their order. It consists of plain data."""

    block_tokens: int = 0
    external: bool = False
    """Whether a connector keeps blocks beside the cache."""
    most: int = MOST_BLOCKS
    """The most blocks that are remembered."""
    lives: dict[int, _Life] = {}
    """The lives of requests that have not ended."""
    copies: dict[int, int] = {}
    """How many blocks hold each cached content."""
    since: dict[int, int] = {}
    """Since when each cached content is cached."""
    left: dict[int, _Left] = {}
    """Contents that left the cache, oldest first."""
    sessions: dict[str, list[Past]] = {}
    """The last turns of each session, least recently used session first."""
    ends: dict[int, str] = {}
    """By the hash id of the last full block of a turn, or of its prompt: the session; "": of several."""
    groups: list[Group] = []
    """The KV cache groups beside the one whose blocks are compared."""
    of_groups: dict[int, dict[int, int]] = {}
    """By the hash id of a block: by group, the hash id of the block that ends with it. Oldest first."""
    incomplete: bool = False
    """Whether contents of groups were forgotten, or events were lost."""
    inferred: int = 0
    """How many sessions were inferred."""
    remembered: int = 0
    """Blocks of all past turns in ``sessions``."""
    forgotten: int = 0
    """Sessions that were forgotten because there were too many."""

    def read(
        self,
        reader: TraceReader,
        changes: Iterable[Change],
        ended: Sequence[RecordedRequest],
        engine: tuple[str, str],
    ) -> Iterator[Turn]:
        """The turns that ended, of what a trace reader has just read; none while it has seen no pool.

        ``engine``: its name and its journal's.
        """
        if not self.block_tokens:
            self.block_tokens = reader.block_tokens
            settings = reader.started.configuration if reader.started else {}
            self.external = bool(settings.get("connector"))
            self.groups = reader.others
        if not self.block_tokens:
            return
        self.incomplete = self.incomplete or bool(reader.lost)
        self.add(changes)

        @cache  # most turns lose nothing to an eviction, so the names are not asked for
        def names() -> dict[int, str]:
            known = (*reader.requests.values(), *ended)
            return {life: one.request_id for one in known for life in one.lives}

        yield from self.ended(ended, engine, reader.began_seconds, lambda life: names().get(life, ""))

    # --- blocks -------------------------------------------------------------------------------------

    def add(self, changes: Iterable[Change]) -> None:
        """Read what the engine did with blocks."""
        for kind, number, index, ids, at in changes:
            if kind == CACHED:
                life = self.lives.setdefault(number, _Life())
                self._cached(life, index, ids, at)
                if self.groups:
                    self._see_groups(life, index, ids)
                    self._place(life)
            elif kind == IN_GROUP:
                life = self.lives.setdefault(number, _Life())
                self._cached_in_group(life, index, ids[0], ids[1], at)
            elif kind == HIT:
                life = self.lives.setdefault(number, _Life())
                put(life.hashes, index, ids)
                life.hits.update(range(index, index + len(ids)))
                if self.groups:
                    self._see_groups(life, index, ids)
            elif kind in (EVICT, DROP):
                for hash_id in ids:
                    self._leave(hash_id, _HOW[kind], at, number)
            elif kind == RESET:
                how = causes.NEW_WEIGHTS if index == AFTER_WEIGHTS else causes.CACHE_RESET
                for hash_id in list(self.copies):
                    self.copies[hash_id] = 1
                    self._leave(hash_id, how, at, -1)
            elif kind == ADMIT:
                self.lives[number] = _Life()

    def _cached(self, life: _Life, first: int, ids: Sequence[int], at: int) -> None:
        put(life.hashes, first, ids)
        for index, hash_id in enumerate(ids, first):
            copies = self.copies.get(hash_id, 0)
            self.copies[hash_id] = copies + 1
            if copies:
                life.cached_since[index] = self.since[hash_id]
                continue
            self.since[hash_id] = at
            left = self.left.pop(hash_id, None)
            if left is not None:
                life.left[index] = left

    def _cached_in_group(self, life: _Life, end: int, group: int, hash_id: int, at: int) -> None:
        copies = self.copies.get(hash_id, 0)
        self.copies[hash_id] = copies + 1
        if not copies:
            self.since[hash_id] = at
            life.first_of[hash_id] = self.left.pop(hash_id, None)
        life.of_groups.append((end, group, hash_id))
        self._place(life)

    def _see_groups(self, life: _Life, first: int, ids: Sequence[int]) -> None:
        """Note what other groups have of a prefix that a life hits or caches."""
        for index, prefix in enumerate(ids, first):
            for group, hash_id in self.of_groups.get(prefix, {}).items():
                since, left = self.since.get(hash_id), self.left.get(hash_id)
                if hash_id in life.first_of:
                    since, left = None, life.first_of[hash_id]
                life.groups_at.setdefault(index, {})[group] = since, left

    def _place(self, life: _Life) -> None:
        """Say of which prefix the blocks of other groups are, as far as the life's prefix is known."""
        rest = []
        for end, group, hash_id in life.of_groups:
            place, behind = divmod(end, self.block_tokens)
            if behind or place < 1:
                continue
            if place > len(life.hashes) or not life.hashes[place - 1]:
                rest.append((end, group, hash_id))
                continue
            self.of_groups.setdefault(life.hashes[place - 1], {})[group] = hash_id
            self.incomplete |= bool(keep_newest(self.of_groups, self.most))
        life.of_groups = rest

    def _leave(self, hash_id: int, how: str, at: int, life: int) -> None:
        copies = self.copies.get(hash_id, 1) - 1
        if copies > 0:
            self.copies[hash_id] = copies
            return
        self.copies.pop(hash_id, None)
        self.left[hash_id] = _Left(how, at, life, self.since.pop(hash_id, 0))
        keep_newest(self.left, self.most)

    # --- requests -----------------------------------------------------------------------------------

    def ended(
        self,
        requests: Iterable[RecordedRequest],
        engine: tuple[str, str],
        began: float,
        name_of: Callable[[int], str],
    ) -> Iterator[Turn]:
        """The turns of requests that ended, after all changes until then.

        A request that was never admitted, or whose end is not known, is no turn.

        ``engine``: its name and its journal's. ``began``: Unix time from which times count. ``name_of``
        gives the request id of a life.
        """
        for request in sorted(requests, key=lambda one: (one.closed_at, one.arrival)):
            if request.lives and request.closed_at >= 0:
                yield self._turn(request, engine, began, name_of)

    def _turn(
        self,
        request: RecordedRequest,
        engine: tuple[str, str],
        began: float,
        name_of: Callable[[int], str],
    ) -> Turn:
        lives = [(number, self.lives.pop(number, _Life())) for number in sorted(request.lives)]
        first = request.lives[lives[0][0]]
        chain = _chain(life for _, life in lives)
        kept = request.lives[lives[-1][0]].computed_tokens or len(chain) * self.block_tokens
        chain = chain[: kept // self.block_tokens]  # the last block of a request trace is not full
        seen = _Seen(self, request, first, lives[0][1], chain)
        session, before, retried = self._before(request, chain)
        reusable, shared, lost, evicted = 0, 0, dict[str, int](), None
        if before is not None:
            reusable, shared, lost = seen.losses(before)
            evicted = seen.eviction(began, name_of, sum(lost.get(cause, 0) for cause in causes.EVICTIONS))
        number = 1 if before is None else before.number + (not retried)
        turn = Turn(
            engine=engine[0],
            journal=engine[1],
            session=session,
            given=bool(request.session),
            request_id=request.request_id,
            number=number,
            before="" if before is None else before.request_id,
            retried=retried,
            arrived_seconds=began + max(0, request.added_at) / 1e6,
            ended_seconds=began + max(0, request.closed_at) / 1e6,
            idle_seconds=None if before is None else max(0, request.added_at - before.ended_at) / 1e6,
            prompt_tokens=request.prompt_tokens,
            hit=seen.hit,
            reusable=reusable,
            shared=shared,
            kept=kept,
            lost=lost,
            evicted=evicted,
        )
        self._remember(
            Past(
                number, request.request_id, request.prompt_tokens, kept, chain, request.closed_at,
                request.lora, request.salt, session, bool(request.session),
            ),
            seen.made,
        )  # fmt: skip
        return turn

    def _before(self, request: RecordedRequest, chain: list[int]) -> tuple[str, Past | None, bool]:
        """The session of a request, the turn before it, and whether it only sends that turn again."""
        session = request.session or self._continued(chain)
        past = [one for one in self.sessions.get(session, ()) if one.ended_at <= request.added_at]
        if not past:
            return request.session or self._new_session(), None, False
        whole = request.prompt_tokens // self.block_tokens
        for one in reversed(past):
            if one.prompt_tokens == request.prompt_tokens and whole and one.hashes[:whole] == chain[:whole]:
                return session, one, True
        size = self.block_tokens
        shared = [_shared(one.hashes, chain) for one in past]
        latest = max(range(len(past)), key=lambda place: past[place].ended_at)
        # A branch goes on with an older turn: it has the block in which the answer of that turn begins.
        known = [place for place, one in enumerate(past) if shared[place] * size > one.prompt_tokens]
        if known or request.session:
            best = max({*known, latest}, key=lambda place: (shared[place], past[place].ended_at))
            return session, past[best], False
        # Only a prompt goes on. If another request goes on with it, too, it was a common beginning.
        before = past[max(range(len(past)), key=shared.__getitem__)]
        self.ends.update(dict.fromkeys(self._ends_of(before), ""))
        return session, before, False

    def _new_session(self) -> str:
        self.inferred += 1
        return f"~{self.inferred}"

    def _continued(self, chain: list[int]) -> str:
        """The inferred session that a chain of blocks goes on with; "": none, or several."""
        return next((self.ends[hash_id] for hash_id in reversed(chain) if hash_id in self.ends), "")

    def _remember(self, past: Past, made: set[int]) -> None:
        turns = self.sessions.pop(past.session, [])
        self.sessions[past.session] = [*turns, past][-TURNS_KEPT:]
        dropped = turns[: max(0, len(turns) + 1 - TURNS_KEPT)]
        self.remembered += len(past.hashes) - sum(len(one.hashes) for one in dropped)
        if not past.given:
            for hash_id in self._ends_of(past):
                # A block that another request made first is a common beginning, and no sign of a session.
                if hash_id in made and self.ends.setdefault(hash_id, past.session) != past.session:
                    self.ends[hash_id] = ""
        while self.remembered > self.most and len(self.sessions) > 1:
            for turns in take_oldest(self.sessions):
                for one in turns:
                    self.remembered -= len(one.hashes)
                    for hash_id in self._ends_of(one):
                        self.ends.pop(hash_id, None)
                self.forgotten += 1

    def _ends_of(self, past: Past) -> set[int]:
        """The last full blocks of a turn's prompt, and of the turn."""
        lengths = past.prompt_tokens // self.block_tokens, len(past.hashes)
        return {past.hashes[length - 1] for length in lengths if 0 < length <= len(past.hashes)}


class _Seen:
    """What the first admission of a request found of its blocks."""

    def __init__(
        self, reader: TurnReader, request: RecordedRequest, first: TraceLife, life: _Life, chain: list[int]
    ) -> None:
        self._request = request
        self._size = reader.block_tokens
        """Tokens per block."""
        self._external = reader.external
        """Whether a connector keeps blocks beside the cache."""
        self._chain = chain
        """The hash ids of the request's full blocks; 0: not known."""
        self._life = life
        """The blocks of its first life."""
        self._groups, self._incomplete = reader.groups, reader.incomplete
        """The other groups, and whether contents may be cached of which nothing is known."""
        self._gone: list[_Left] = []
        """How contents of other groups had left the cache that the admission missed."""
        self._bounded: list[str] | None = None
        """Why no boundary behind each block was hit; None: not asked yet."""
        self._at = first.at
        """When it was admitted."""
        self.hit = _hit(first, life, chain, self._size)
        """Tokens that the first admission hit."""
        found = life.left.keys() | life.cached_since.keys() | life.hits
        self.made = {hash_id for index, hash_id in enumerate(chain) if index not in found}
        """Contents that this request cached first."""

    def losses(self, before: Past) -> tuple[int, int, dict[str, int]]:
        """Reusable tokens, tokens shared with the turn before, and by cause what was not hit."""
        size, chain, request = self._size, self._chain, self._request
        reusable = min(before.kept, request.prompt_tokens - 1)
        shared = _shared(before.hashes, chain)
        reach = min(len(before.hashes), (request.prompt_tokens - 1) // size)
        lost: dict[str, int] = {}
        begin = min(self.hit, reusable)
        while begin < reusable:
            index = begin // size
            if index < min(shared, reach):
                end, cause = min((index + 1) * size, reusable), self._of_block(index, min(shared, reach))
            elif index < reach:
                end, cause = reusable, self._parted(before, index)
            else:
                end, cause = reusable, causes.BELOW_BLOCK
            lost[cause] = lost.get(cause, 0) + end - begin
            begin = end
        return reusable, shared * size, lost

    def _of_block(self, index: int, reach: int) -> str:
        """Why the lookup did not hit one of the ``reach`` blocks that it shares with the turn before."""
        left, since = self._life.left.get(index), self._life.cached_since.get(index)
        if left is not None:
            return causes.TIER if self._external and left.how == causes.EVICTED else left.how
        if since is not None:
            if since >= self._at:
                return causes.BEING_COMPUTED
            return self._boundary(index, reach) if self._groups else causes.NOT_HIT
        return causes.UNKNOWN

    # --- several groups -----------------------------------------------------------------------------

    def _boundary(self, index: int, reach: int) -> str:
        """Why no boundary behind a block that was cached could be hit, if other groups must have it, too."""
        if self._bounded is None:
            self._bounded = self._boundaries(reach)
        place = index - self.hit // self._size
        return self._bounded[place] if place < len(self._bounded) else causes.NOT_HIT

    def _boundaries(self, reach: int) -> list[str]:
        """For each block behind the hit, as far as all are cached: why no boundary behind it was hit."""
        since, first = self._life.cached_since, self.hit // self._size
        end = first
        while end < reach and since.get(end, self._at) < self._at:
            end += 1
        found = lacking(self._groups, self._size, first, end, self._in_group)
        return [cause or causes.NOT_HIT for cause in found]

    def _in_group(self, group: Group, end: int) -> str:
        """Why the block of a group that ends here was not cached at the admission; "": it was."""
        place, behind = divmod(end, self._size)
        if behind:
            return causes.UNKNOWN
        found = self._life.groups_at.get(place - 1, {}).get(group.number)
        if found is None or found == (None, None):
            return causes.UNKNOWN if self._incomplete else group.lacks()
        since, left = found
        if left is None or left.at > self._at:
            since = left.since if left is not None else since
            return "" if since is not None and since < self._at else causes.UNKNOWN
        self._gone.append(left)
        return causes.TIER if self._external and left.how == causes.EVICTED else group.lacks(left.how)

    def _parted(self, before: Past, index: int) -> str:
        """Why the block at ``index`` is another one than that of the turn before."""
        request = self._request
        if request.lora != before.lora:
            return causes.ADAPTER
        if request.salt != before.salt:
            return causes.SALT
        if index >= len(self._chain) or not self._chain[index] or not before.hashes[index]:
            return causes.UNKNOWN
        in_prompt = (index + 1) * self._size <= before.prompt_tokens
        return causes.DIVERGED if in_prompt else causes.ANSWER

    def eviction(self, began: float, name_of: Callable[[int], str], tokens: int) -> Evicted | None:
        """The first eviction of a block that was not hit, if ``tokens`` were evicted."""
        if not tokens:
            return None
        left = (*self._life.left.values(), *self._gone)
        first = min((one for one in left if one.how == causes.EVICTED), key=lambda one: one.at)
        return Evicted(tokens=tokens, seconds=began + first.at / 1e6, by=name_of(first.life))


def _hit(first: TraceLife, life: _Life, chain: list[int], size: int) -> int:
    """Tokens that an admission hit. A trace without admissions has those that were cached already."""
    if first.hit_tokens >= 0:
        return first.hit_tokens + first.external_tokens
    index = 0
    while index < len(chain) and (index in life.hits or index in life.cached_since):
        index += 1
    return index * size


def _chain(lives: Iterator[_Life]) -> list[int]:
    """The hash ids of a request's full blocks, as far as they are known without a gap."""
    chain: list[int] = []
    for life in lives:
        for index, hash_id in enumerate(life.hashes):
            if hash_id and (index >= len(chain) or not chain[index]):
                put(chain, index, (hash_id,))
    return chain[: chain.index(0)] if 0 in chain else chain


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading blocks are the same."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


class TurnCounts(Sums):
    """Sums over turns, in tokens. ``lost`` is by cause."""

    turns: int = 0
    prompt_tokens: int = 0
    hit: int = 0
    reusable: int = 0
    lost: dict[str, int] = {}

    def add(self, turn: Turn) -> None:
        """Add one turn."""
        self.turns += 1
        self.prompt_tokens += turn.prompt_tokens
        self.hit += turn.hit
        self.reusable += turn.reusable
        for cause, tokens in turn.lost.items():
            add_tokens(self.lost, cause, tokens)

    @classmethod
    def of(cls, turns: Iterable[Turn]) -> TurnCounts:
        """The sums over these turns."""
        counts = cls()
        for turn in turns:
            counts.add(turn)
        return counts

    @property
    def lost_tokens(self) -> int:
        """What was reusable and was not hit."""
        return sum(self.lost.values())

    @property
    def reused(self) -> int:
        """What was reusable and was hit."""
        return self.reusable - self.lost_tokens


class LiveTurnState(msgspec.Struct):
    """Where the turns of an engine that is followed go on. ``sums``: of turns that follow another one."""

    sums: TurnCounts = msgspec.field(default_factory=TurnCounts)
    reader: TraceReader = msgspec.field(default_factory=TraceReader)
    turns: TurnReader = msgspec.field(default_factory=lambda: TurnReader(most=MOST_LIVE_BLOCKS))

    def end(self) -> None:
        """The engine has ended: only the counts stay."""
        self.reader, self.turns = TraceReader(), TurnReader(most=MOST_LIVE_BLOCKS)

    def feed(self, event: Event, changes: Sequence[PoolChange]) -> None:
        """Read one event and its ``changes`` of the pool."""
        self.reader.feed(event, changes)
        if self.reader.changes or self.reader.ended:
            for turn in self.turns.read(self.reader, *self.reader.taken(), ("", "")):
                if turn.before:
                    self.sums.add(turn)


def across_engines(turns: Iterable[Turn]) -> list[Turn]:
    """The turns of all engines, by arrival. A session's id is the same everywhere, if it was given.

    Where the turn before ran on another engine, what it left is not in this engine's cache. Hash ids of two
    engines are not compared, so what was not hit has this one cause.
    """
    by_session: dict[str, list[Turn]] = {}
    found: list[Turn] = []
    for turn in turns:
        if turn.given:
            by_session.setdefault(turn.session, []).append(turn)
        else:
            found.append(turn)
    for session in by_session.values():
        several = len({turn.journal for turn in session}) > 1
        found += _of_several(sorted(session, key=lambda turn: turn.arrived_seconds)) if several else session
    return sorted(found, key=lambda turn: (turn.arrived_seconds, turn.ended_seconds))


def _of_several(turns: Sequence[Turn]) -> Iterator[Turn]:
    numbered: list[Turn] = []
    for turn in turns:
        past = [one for one in numbered if one.ended_seconds <= turn.arrived_seconds]
        before = max(past, key=lambda one: one.ended_seconds, default=None)
        if before is not None and turn.before != before.request_id and turn.journal != before.journal:
            reusable = min(before.kept, turn.prompt_tokens - 1)
            missed = reusable - min(turn.hit, reusable)
            turn = msgspec.structs.replace(
                turn,
                number=before.number + 1,
                before=before.request_id,
                retried=False,
                idle_seconds=turn.arrived_seconds - before.ended_seconds,
                reusable=reusable,
                shared=0,
                lost={causes.OTHER_ENGINE: missed} if missed else {},
                evicted=None,
            )
        elif before is not None:
            own = next((one for one in numbered if one.request_id == turn.before), before)
            turn = msgspec.structs.replace(turn, number=own.number + (not turn.retried))
        numbered.append(turn)
        yield turn
