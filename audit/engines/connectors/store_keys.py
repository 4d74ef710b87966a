"""The keys under which a connector's store looks a request's KV up, one for each chunk of tokens.

The keys are made from what the connector passes to its lookup: the tokens of each chunk and of all chunks
before it, and every other argument except the request's id. Two requests with equal arguments get one object
of the store; with different arguments they are taken to get two. A key is hashed with the secret of the
isolation classes, so it reveals no token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ... import events as ev
from ...hooks import Hook, Hooks
from ..connector_metadata.metadata_reader import MetadataReader
from ..pool.isolation import IsolationClasses
from ..step_log import StepLog

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
