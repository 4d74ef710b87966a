"""A scripted connector with a store that looks up KV by keys, as LMCache does; scheduler side only.

The store saves the whole chunks of each prompt in the step that first schedules the request. ``salted`` says
whether the connector passes the request's cache salt to the lookup.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from tests.scenarios.scripted_connector import ScriptedConnector

from kvledger.audit.engines.connector_metadata import register
from kvledger.audit.engines.connector_metadata.metadata_reader import Saved
from kvledger.audit.traffic.connector import PlannedLoads, PlannedLoadsReader

CHUNK_TOKENS = 32


@dataclass
class KeyedMetadata(PlannedLoads):
    """The connector metadata of one step, with the saves that it orders."""

    saves: tuple[Saved, ...] = ()


class LookupClient:
    """Answers how many tokens of a prompt the store has."""

    def __init__(self) -> None:
        self.saved: set[tuple[Any, ...]] = set()
        """The keys of the chunks in the store."""

    def keys(self, token_ids: list[int], salt: str | None) -> list[tuple[Any, ...]]:
        """One key for each whole chunk."""
        ends = range(CHUNK_TOKENS, len(token_ids) + 1, CHUNK_TOKENS)
        return [(salt, *token_ids[:end]) for end in ends]

    def lookup(self, token_ids: list[int], lookup_id: str, salt: str | None = None) -> int:
        """How many tokens of the prompt are in the store."""
        keys = self.keys(token_ids, salt)
        missing = [place for place, key in enumerate(keys) if key not in self.saved]
        return (missing[0] if missing else len(keys)) * CHUNK_TOKENS


class KeyedConnector(ScriptedConnector):
    """The scheduler side of a store with keys."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.client = LookupClient()
        self.salted = True
        self._to_save: list[Any] = []
        """Requests whose prompts are saved once they run."""

    def _salt(self, request: Any) -> str | None:
        return request.cache_salt if self.salted else None

    def _answer(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        hit = self.client.lookup(list(request.all_token_ids), request.request_id, self._salt(request))
        hit = min(hit, request.num_tokens - 1) // self.block_size * self.block_size
        return max(0, hit - local_tokens), False

    def save(self, request: Any) -> None:
        """Save a request's prompt in its first step."""
        self._to_save.append(request)

    def build_connector_meta(self, scheduler_output: Any) -> KeyedMetadata:
        loads = super().build_connector_meta(scheduler_output).loads
        saves = []
        new = {each.req_id for each in scheduler_output.scheduled_new_reqs}
        for request in [each for each in self._to_save if each.request_id in new]:
            self._to_save.remove(request)
            tokens = list(request.all_token_ids)
            self.client.saved.update(self.client.keys(tokens, self._salt(request)))
            saves.append(Saved(request.request_id, 0, len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS))
        return KeyedMetadata(loads, tuple(saves))


class KeyedReader(PlannedLoadsReader):
    """Reads loads, saves and the lookup."""

    READS: ClassVar[tuple[str, ...]] = ("loads", "saves")
    LOOKUP: ClassVar[str] = "client.lookup"

    @property
    def chunk_tokens(self) -> int:
        return CHUNK_TOKENS

    def saves(self, metadata: Any) -> Iterable[Saved]:
        return metadata.saves


register(KeyedConnector.__name__, KeyedReader)
