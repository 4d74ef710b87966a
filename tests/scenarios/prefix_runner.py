"""A model runner whose KV follows from the tokens, as a model's does, but for rounding.

The KV of a position follows from the tokens up to it, if the KV below it is right; else it is garbage. Drafts
that are rejected, and loads that fail, leave garbage. Two computations of one position differ by noise.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from tests.scenarios.kv_runner import HEADS, LAYERS, WIDTH, DriverWithCaches, KVRunner, attach_content

from kvledger.audit.entry.attach import LiveAudit

NOISE = 1e-3
"""How much two computations of one position differ."""

GARBAGE = 0


class PrefixRunner(KVRunner):
    """Writes KV that follows from the tokens."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self._scheduler = scheduler
        self._noise = np.random.default_rng(0)
        self._prefixes: dict[str, list[int]] = {}
        """By request: a number for each of its known prefixes."""
        self._values: dict[tuple[int, int], Any] = {}
        self.wrong: set[str] = set()
        """Requests whose KV is computed wrongly."""
        self._slots = {
            number: np.zeros((layers[0].shape[0], layers[0].shape[2]), dtype=np.int64)
            for number, layers in self.caches.items()
            if not self.has_states(scheduler.kv_cache_config.kv_cache_groups[number].kv_cache_spec)
        }
        """By group of attention: the prefix whose KV is in each position of each block."""

    def execute_model(self, scheduler_output: Any) -> str:
        """Note the tokens of the step, and write what a real runner would write."""
        self._output = output = scheduler_output
        for source, target in getattr(output, "kv_cache_block_copies", None) or ():
            for slots in self._slots.values():
                slots[target] = slots[source]
        return super().execute_model(output)

    def _note(self, request_id: str, output: Any) -> None:
        """The tokens that the positions of this step have, as far as they are accepted."""
        request = self._scheduler.requests.get(request_id)
        if request is None:  # it was aborted while the step was in flight
            return
        drafts = output.scheduled_spec_decode_tokens.get(request_id, ())
        base = self._computed[request_id] + output.num_scheduled_tokens[request_id] - len(drafts)
        tokens = [int(token) for token in request.all_token_ids]
        self._prefixes[request_id] = _prefixes([*tokens[:base], *self.accepted.get(request_id, ())])

    def compute(self, request_id: str, group: int, table: list[int], start: int, end: int) -> None:
        """Write the positions that a step executes for a request."""
        if group == 0:
            self._note(request_id, self._output)
        if group not in self._slots:  # of states
            super().compute(request_id, group, table, start, end)
            return
        known, slots = self._prefixes.get(request_id, []), self._slots[group]
        size = slots.shape[1]
        last = max(0, start - 1)
        below = table[last // size] if last // size < len(table) else 0
        right = start == 0 or not below or (last < len(known) and slots[below, last % size] == known[last])
        for position in range(start, min(end, len(table) * size)):
            right = right and position < len(known) and request_id not in self.wrong
            number = known[position] if right else GARBAGE
            self._put(group, table[position // size], position % size, number)

    def load(self, request_id: str, group: int, blocks: Any, tokens: int) -> None:
        """Write the external tokens of a request."""
        if group not in self._slots:
            super().load(request_id, group, blocks, tokens)
            return
        local, size = self._local[request_id], self._slots[group].shape[1]
        request = self._scheduler.requests.get(request_id)
        known = [] if request is None else _prefixes([int(token) for token in request.all_token_ids])
        for position in range(local, min(local + tokens, len(known), len(blocks) * size)):
            block = blocks[position // size]
            if block and block not in self.load_errors:
                self._put(group, block, position % size, known[position])

    def _put(self, group: int, block: int, offset: int, number: int) -> None:
        self._slots[group][block, offset] = number
        for layer, cache in enumerate(self.caches[group]):
            content = self._value(number, layer) if number else self._noise.standard_normal(HEADS * 2 * WIDTH)
            content = content + NOISE * self._noise.standard_normal(content.shape)
            cache[block, :, offset] = self._torch.from_numpy(content.reshape(HEADS, 2 * WIDTH))

    def _value(self, number: int, layer: int) -> Any:
        found = self._values.get((number, layer))
        if found is None:
            dice = np.random.default_rng(number * LAYERS + layer)
            found = self._values[number, layer] = dice.standard_normal(HEADS * 2 * WIDTH)
        return found


def _prefixes(tokens: list[int]) -> list[int]:
    """A number for every prefix of a sequence, the shortest first."""
    numbers, last = [], 1
    for token in tokens:
        last = zlib.crc32(token.to_bytes(8, "little"), last) or 1
        numbers.append(last)
    return numbers


class DriverWithPrefixes(DriverWithCaches):
    """A driver whose steps are executed by a :class:`PrefixRunner`, which knows of loads that fail."""

    def output(self, *, accepted: Any = None, **transfers: Any) -> dict[int, Any]:
        """Deliver the oldest step's output."""
        kv_runner = self.scheduler.kv_runner
        if kv_runner is not None:
            kv_runner.load_errors = set(transfers.get("invalid_blocks", ()))
        return super().output(accepted=accepted, **transfers)


def attach_sketches(scheduler: Any) -> LiveAudit:
    """Audit a scheduler at level ``content`` with sketches."""
    return attach_content(scheduler, runner_type=PrefixRunner)
