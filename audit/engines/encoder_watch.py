"""The encoder cache of a multimodal engine: what each step hits, reserves, evicts and computes.

The manager is vLLM's ``vllm/v1/core/encoder_cache_manager.py``, or one that an engine is
configured with. Its methods run only for requests with encoder inputs; a model of text has no watch.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from .. import events as ev
from ..hooks import EngineMismatch, Hook, Hooks
from ..text import cut_id
from .observer import Observer
from .pool.requirements import IsolationClasses

TABLE: tuple[Hook, ...] = (
    Hook("", "check_and_update_cache", (("request", "input_id"),), after="checked"),
    Hook("", "can_allocate", (), after="made_room"),
    Hook("", "allocate", (("request", "input_id"),), after="reserved"),
    Hook("", "reset", ((),), after="cleared", optional=True),
)
OWN = "vllm.v1.core.encoder_cache_manager"
"""The module of vLLM's own managers."""

TOLD = "get_manager_metadata"
"""The method with which a manager directs workers, since 0.32."""

DESCRIBED = 1024
"""After so many requests, all are described again, so that ended ones are forgotten."""


class EncoderWatch:
    """Observes the encoder cache of one scheduler."""

    def __init__(self, observer: Observer) -> None:
        self._scheduler = observer.scheduler
        self._manager = observer.scheduler.encoder_cache_manager
        self._log = observer.log
        self._observer = observer
        self._classes = IsolationClasses()
        self._rows: list[int] = []
        self._freed = len(getattr(self._manager, "freed", ()))
        self._described: dict[int, int] = {}
        """How many inputs of each request are described in this segment."""

        def raised(method: str, error: Exception) -> None:
            observer.engine_raised(f"encoder_cache_manager.{method}", error)

        self._hooks = Hooks(TABLE, self._manager, self, observer._hook_failed, raised=raised)

    @property
    def size(self) -> int:
        """How many embeddings the cache has."""
        return int(self._manager.cache_size)

    def remove(self) -> None:
        """Restore the manager."""
        self._hooks.remove()

    def begin_segment(self) -> None:
        """Emit ``EncoderCacheSeen`` with all entries."""
        self._described = {}
        sizes = getattr(self._manager, "num_embeds_by_hash", {})
        entries: list[int] = []
        for identifier in getattr(self._manager, "cached", ()):
            entries += (self._classes.of_input(identifier), sizes.get(identifier, -1))
        self._seen(entries)

    def census(self) -> None:
        """Emit ``EncoderCacheSeen`` with the outputs that requests hold."""
        cached, freeable = getattr(self._manager, "cached", {}), -1
        holders: Counter[str] = Counter()
        held: list[int] = []
        if hasattr(self._manager, "freeable"):
            freeable = getattr(self._manager, "num_freeable_slots", -1)
            for identifier in cached.keys() - self._manager.freeable.keys():
                if cached[identifier]:
                    held.append(self._classes.of_input(identifier))
                    holders.update(cached[identifier])
        ended = sorted(holders.keys() - self._log.ids.keys())[: ev.ENDED_HOLDERS]
        self._seen(None, freeable, held, {cut_id(each): holders[each] for each in ended})

    def _seen(self, entries: list[int] | None, *of_census: Any) -> None:
        size, free = self.size, self._manager.num_free_slots
        loads = getattr(self._scheduler, "ec_connector", None) is not None
        shared = hasattr(self._manager, "freeable")
        self._log.emit(
            ev.EncoderCacheSeen(
                self._log.now(), self._observer.step, size, free, shared, loads, entries, *of_census
            )
        )

    # --- the manager's methods --------------------------------------------------------------------------

    def checked(self, _: None, result: Any, request: Any, input_id: int) -> None:
        """``check_and_update_cache`` returned whether the cache has the output of an input."""
        if result:
            self._note(ev.ENCODER_HIT, request, input_id)

    def made_room(self, _: None, __: Any, *___: Any, **____: Any) -> None:
        """``can_allocate`` may have evicted outputs."""
        freed = getattr(self._manager, "freed", ())
        for identifier in freed[self._freed :]:
            self._rows += (ev.ENCODER_EVICTED, -1, self._classes.of_input(identifier))
        self._freed = len(freed)

    def reserved(self, _: None, __: Any, request: Any, input_id: int) -> None:
        """``allocate`` reserved space for the output of an input."""
        self._note(ev.ENCODER_RESERVED, request, input_id)

    def cleared(self, _: None, __: Any) -> None:
        """``reset`` emptied the cache."""
        self._freed = 0
        self._rows += (ev.ENCODER_CLEARED, -1, 0)

    def scheduled(self, output: Any) -> None:
        """``schedule`` returned. Emits ``EncoderCacheUsed`` if the step used the cache."""
        computed, removed = output.scheduled_encoder_inputs, output.free_encoder_mm_hashes
        if not (self._rows or computed or removed):
            return
        for request_id, inputs in computed.items():
            request = self._scheduler.requests[request_id]
            for input_id in inputs:
                self._note(ev.ENCODER_COMPUTED, request, input_id)
        for identifier in removed:
            self._rows += (ev.ENCODER_REMOVED, -1, self._classes.of_input(identifier))
        self._freed = len(getattr(self._manager, "freed", ()))
        rows, self._rows = self._rows, []
        self._log.emit(
            ev.EncoderCacheUsed(self._log.now(), self._observer.step, self._manager.num_free_slots, rows)
        )

    def _note(self, code: int, request: Any, input_id: int) -> None:
        number, features = self._log.ids[request.request_id], request.mm_features
        if self._described.get(number) != len(features):
            self._describe(number, request, features)
        self._rows += (code, number, input_id)

    def _describe(self, number: int, request: Any, features: Any) -> None:
        """Emit ``EncoderInputsSeen``."""
        embeddings = getattr(request, "get_num_encoder_embeds", None) or request.get_num_encoder_tokens
        rows: list[int] = []
        for place, feature in enumerate(features):
            position = feature.mm_position
            identity = self._classes.of_input(feature.identifier)
            rows += (identity, position.offset, position.length, embeddings(place))
        if len(self._described) >= DESCRIBED:
            self._described = {}
        self._described[number] = len(features)
        self._log.emit(ev.EncoderInputsSeen(self._log.now(), number, rows))


def _directs_workers(kind: type) -> bool:
    """Whether a manager of this class tells workers more than vLLM's own, such as to use a second tier."""
    ours = [base for base in kind.__mro__ if base.__module__ == OWN]
    told = getattr(kind, TOLD, None)
    return told is not (getattr(ours[0], TOLD, None) if ours else None)


def watch_encoder_cache(observer: Observer) -> EncoderWatch | None:
    """Observe the encoder cache of an engine; None if it has none, or one of another kind."""
    manager = getattr(observer.scheduler, "encoder_cache_manager", None)
    if manager is None or not getattr(manager, "cache_size", 0):
        return None
    if not (hasattr(manager, "freeable") or hasattr(manager, "allocated")):
        return None  # before 0.10.2 no request shares an output
    if _directs_workers(type(manager)):
        return None
    try:
        return EncoderWatch(observer)
    except EngineMismatch:
        return None
