"""The scheduler side of a live KV connector, apart from what each admission shows.

Here: the connector's own token counts, the blocks it keeps of ended requests, and the answers of a
``MultiConnector``'s children. Its matches, promises and metadata are handled with the admissions
(``admissions``). Nothing here runs in a step of decodes: the counts are read when a life ends and at a
census.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ... import events as ev
from ...hooks import Hook, Hooks
from ...text import cut_id
from ..connector_metadata import reader_of
from ..connector_metadata.metadata_reader import MetadataReader
from ..pool.requirements import IsolationClasses
from ..step_log import StepLog

# --- The keys under which a connector's store looks a request's KV up, one for each chunk of tokens.
#
# The keys are made from what the connector passes to its lookup: the tokens of each chunk and of all chunks
# before it, and every other argument except the request's id. Two requests with equal arguments get one
# object of the store; with different arguments they are taken to get two. A key is hashed with the secret
# of the isolation classes, so it reveals no token.

TOKENS = "token_ids"
"""The parameter with the tokens that are looked up."""

NO_PART_OF_A_KEY = frozenset(("lookup_id", "request_id", "reserve_last_token"))
"""Parameters of a lookup that do not select the object."""


class StoreKeys:
    """Emits ``StoreKeys`` for each lookup of a connector whose reader names its lookup.

    Nothing is emitted for a lookup that can't be read. ``close`` restores the connector.
    """

    def __init__(
        self, reader: MetadataReader, classes: IsolationClasses, log: StepLog, step: Callable[[], int]
    ) -> None:
        self._classes = classes
        """Has the secret with which keys are hashed."""
        self._log = log
        self._step = step
        self._chunk_tokens = reader.chunk_tokens
        """Tokens per chunk of the store."""
        self._asking = ""
        """The request about which the connector was asked last."""
        self._emitted: dict[str, int] = {}
        """How many keys were emitted for each request, by its id."""
        owner, _, name = reader.LOOKUP.rpartition(".")
        lookup = Hook(owner, name, (), after="looked_up")
        asked = Hook("", "get_num_new_matched_tokens", (), before="asked")
        method: Any = reader.connector
        for part in reader.LOOKUP.split("."):
            method = getattr(method, part)
        self._signature = inspect.signature(method)
        self._hooks = Hooks((asked, lookup), reader.connector, self, self._failed)

    def close(self) -> None:
        """Restore the connector."""
        self._hooks.remove()

    def _failed(self, _: str, __: Exception, ___: bool) -> None:
        """A lookup can't be read: no key of it is known, and nothing else is wrong."""

    def asked(self, request: Any, *_: Any, **__: Any) -> None:
        """``get_num_new_matched_tokens`` is called, which may look the request up in the store."""
        self._asking = request.request_id

    def looked_up(self, _: None, __: Any, *args: Any, **kwargs: Any) -> None:
        """The lookup returned. Emits ``StoreKeys`` if there are more keys than before."""
        arguments = self._signature.bind(*args, **kwargs).arguments
        ids = self._log.ids
        own = [value for name, value in arguments.items() if name.endswith("_id") and value in ids]
        request_id = own[0] if own else self._asking
        tokens = arguments.pop(TOKENS)
        count = len(tokens) // self._chunk_tokens
        number = ids.get(request_id)
        if number is None or self._emitted.get(request_id, 0) >= count:
            return
        if len(self._emitted) > 2 * len(ids):
            self._emitted = {each: keys for each, keys in self._emitted.items() if each in ids}
        self._emitted[request_id] = count
        others = {name: value for name, value in arguments.items() if name not in NO_PART_OF_A_KEY}
        keys = self._keys(tokens, others)
        self._log.emit(ev.StoreKeys(self._log.now(), number, self._step(), self._chunk_tokens, keys))

    def _keys(self, tokens: Any, others: Mapping[str, Any]) -> list[int]:
        listed: Iterable[int] = tokens.tolist() if hasattr(tokens, "tolist") else tokens
        return self._classes.keys(list(listed), repr(sorted(others.items())), self._chunk_tokens)


def watch_store_keys(
    reader: MetadataReader | None, classes: IsolationClasses, log: StepLog, step: Callable[[], int]
) -> StoreKeys | None:
    """Observe the lookups of a connector; None if kvledger can't read its keys."""
    if reader is None or not reader.LOOKUP:
        return None
    try:
        return StoreKeys(reader, classes, log, step)
    except Exception:  # another release of the connector: its keys are not known
        return None


TABLE: tuple[Hook, ...] = (
    Hook("", "request_finished", (), after="request_finished", optional=True),
    Hook("", "request_finished_all_groups", (), after="request_finished", optional=True),
)
CHILD_TABLE: tuple[Hook, ...] = (Hook("", "get_num_new_matched_tokens", (), after="matched", optional=True),)

Failed = Callable[[str, Exception, bool], None]
Raised = Callable[[str, Exception], None]


def in_connector(raised: Raised) -> Raised:
    """``raised`` for the hooks of a connector, whose methods it names by ``connector.``."""
    return lambda method, error: raised(f"connector.{method}", error)


class ConnectorWatch:
    """Observes one scheduler's connector, and its children if it has any.

    ``classes``: the isolation classes, at level ``blocks``. With these, keys of the connector's store are
    recorded.
    """

    def __init__(
        self,
        scheduler: Any,
        log: StepLog,
        step: Callable[[], int],
        computed: Callable[[Any], int],
        failed: Failed,
        raised: Raised,
        classes: IsolationClasses | None = None,
    ) -> None:
        self.reader: MetadataReader | None = reader_of(scheduler.connector)
        """Reads the connector's metadata; None if kvledger has no reader for it."""
        self._scheduler = scheduler
        self._log = log
        self._step = step
        self._tracks = self.reader is not None and "tracker" in self.reader.READS
        """Whether the connector keeps token counts that the reader can read."""
        self._recent = _steps_ahead(scheduler) * (1 + max(0, int(getattr(scheduler, "num_spec_tokens", 0))))
        """The most tokens of a request that the connector may not have seen yet."""
        self._ended: dict[str, int] = {}
        """Id and number of the request that is ending."""
        self._delayed: dict[str, int] = {}
        """Numbers of the ended requests whose blocks the connector keeps, by request id."""
        self._computed = computed
        """Returns the engine's count of a request's computed tokens; -1 while it keeps none."""
        self._block_tokens, self._trims = _tables(scheduler)
        """Tokens per block, 0 if the tables have no positions, or there are several; and whether the engine
        hands over only the blocks of computed tokens."""
        self._store_keys = watch_store_keys(self.reader, classes, log, step) if classes is not None else None
        """Observes lookups in the store; None if their keys can't be read."""
        self._hooks = [Hooks(TABLE, scheduler.connector, self, failed, raised=in_connector(raised))]
        children = getattr(scheduler.connector, "_connectors", ())
        for place, child in enumerate(children if isinstance(children, list | tuple) else ()):
            watch = _Child(f"{place} {type(child).__name__}", log, step)
            self._hooks.append(Hooks(CHILD_TABLE, child, watch, failed))

    def remove(self) -> None:
        """Restore the connector."""
        for hooks in self._hooks:
            hooks.remove()
        if self._store_keys is not None:
            self._store_keys.close()

    def ends(self, request_id: str) -> None:
        """A request ends: the connector may be about to keep its blocks."""
        number = self._log.ids.get(request_id)
        if number is not None:
            self._ended = {request_id: number}

    def track(self, request: Any, computed_tokens: int, waits: bool) -> None:
        """Emit ``Tracked``: the connector's counts for a request, but not while it waits for a load."""
        if not self._tracks or waits or computed_tokens <= 0:
            return
        assert self.reader is not None
        tokens = min(computed_tokens, request.num_tokens)
        tracking = self.reader.tracking(request, tokens - self._recent)
        number = self._log.ids.get(request.request_id)
        if tracking is None or number is None:
            return
        self._log.emit(
            ev.Tracked(
                at=self._log.now(),
                request=number,
                step=self._step(),
                tracked_tokens=tracking.tracked,
                saved_tokens=tracking.saved,
                due_tokens=tracking.due,
                computed_tokens=tokens,
                recent_tokens=self._recent,
            )
        )

    def request_finished(self, _: None, result: Any, request: Any, block_ids: Any) -> None:
        """``request_finished`` returned.

        Emits ``HandedOver``, and ``FreeDelayed`` if the connector keeps the blocks.
        """
        request_id, log = request.request_id, self._log
        number = self._ended.pop(request_id, None)
        if number is None:
            return
        groups = [block_ids] if block_ids and isinstance(block_ids[0], int) else block_ids
        blocks = sum(map(len, groups))
        computed = self._computed(request)
        room, trimmed = blocks * self._block_tokens if self._block_tokens else -1, self._trims
        step, now = self._step(), log.now()
        name = cut_id(request_id)
        log.emit(ev.HandedOver(now, number, step, name, computed, blocks, room, trimmed))
        if result[0]:
            self._delayed[request_id] = number
            log.emit(ev.FreeDelayed(now, number, step, name, blocks))

    def at_rest(self) -> None:
        """Emit ``FreeCompleted`` for each kept request that the scheduler has dropped since."""
        requests = self._scheduler.requests
        for request_id in [each for each in self._delayed if each not in requests]:
            number = self._delayed.pop(request_id)
            self._log.emit(ev.FreeCompleted(self._log.now(), number, self._step()))


def _tables(scheduler: Any) -> tuple[int, bool]:
    """Tokens per block of the only block table, 0 if an index in it is no position; whether it is trimmed."""
    manager = scheduler.kv_cache_manager
    managers: Any = getattr(getattr(manager, "coordinator", None), "single_type_managers", ())
    if len(managers) != 1 or type(managers[0]).__name__ != "FullAttentionManager":
        return 0, False
    size = getattr(managers[0], "block_size", 0)
    if size != scheduler.block_size:
        return 0, False
    # A context that is spread over several ranks has larger blocks than its specification.
    specified = getattr(getattr(managers[0], "kv_cache_spec", None), "block_size", 0)
    return int(size), hasattr(manager, "get_block_ids_for_computed_tokens") and specified == size


def _steps_ahead(scheduler: Any) -> int:
    """How many steps may be scheduled before the output of the first one has arrived."""
    config = scheduler.vllm_config
    asynchronous = bool(getattr(config.scheduler_config, "async_scheduling", False))
    return int(getattr(config.parallel_config, "pipeline_parallel_size", 1)) + asynchronous


class _Child:
    """Observes the matches of one child of a ``MultiConnector``."""

    def __init__(self, name: str, log: StepLog, step: Callable[[], int]) -> None:
        self._name = name
        """The child's place and class."""
        self._log = log
        self._step = step
        self._last: dict[str, tuple[Any, ...]] = {}
        """The last query and answer, by request id."""

    def matched(self, _: None, result: Any, request: Any, num_computed_tokens: int) -> None:
        """``get_num_new_matched_tokens`` answered. Emits ``ChildMatched`` unless the answer is unchanged."""
        number = self._log.ids.get(request.request_id)
        answer = (num_computed_tokens, *result)
        if number is None or self._last.get(request.request_id) == answer:
            return
        if len(self._last) > len(self._log.ids):
            self._last = {each: last for each, last in self._last.items() if each in self._log.ids}
        self._last[request.request_id] = answer
        step, now = self._step(), self._log.now()
        self._log.emit(ev.ChildMatched(now, number, step, self._name, num_computed_tokens, *result))
