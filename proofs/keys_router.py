"""The partition card of Dynamo's KvRouter, over the KV events that a real vLLM scheduler publishes.

Usage: python -m proofs.keys_router PYTHON     (one of an environment with ai-dynamo-runtime)

For each difference of `kvledger conformance --keys` the events of the first request go through vLLM's own
publisher over ZeroMQ to Dynamo's relay. Then the router is asked which blocks the engine holds of the second
request, with all that `get_overlap_scores` takes: tokens, the adapter's name, identities of images, and the
salt as namespace. If it does not find an equal request so, it is asked by tokens alone. Prints one line of
JSON: the rows of a card.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from proofs.routed import Dynamo, write_tokenizer
from tests.serving.processes import free_port

from kvledger.audit.conformance.key_card import (
    BLOCK,
    DIFFERENCES,
    Arguments,
    Cell,
    Difference,
    KeyCard,
    KeyRow,
    told,
)
from kvledger.audit.conformance.scorecard import quiet
from kvledger.audit.demo.model import write_model

PLACE = "Dynamo's KvRouter"
SALT = "dynamo-cache-salt:"
"""Begins the salts that Dynamo's frontend gives to vLLM; the router reads no others."""
PATIENCE_SECONDS = 20.0
"""So long a router may take to hear of events."""


def _salts_of_its_own() -> tuple[Arguments, Arguments]:
    return {"cache_salt": SALT + "one"}, {"cache_salt": SALT + "two"}


def _images_of_its_own() -> tuple[Arguments, Arguments]:
    """Identities as Dynamo's frontend gives them to vLLM: 16 digits and 48 zeros."""
    first, second = of("multimodal input's identity").requests()
    for request, digit in ((first, "1"), (second, "2")):
        [image] = request["mm_features"]
        image.identifier = digit * 16 + "0" * 48
    return first, second


def of(name: str) -> Difference:
    """A difference of the card."""
    return next(difference for difference in DIFFERENCES if difference.name == name)


OWN = (
    of("cache salt")._replace(name="cache salt of Dynamo's frontend", requests=_salts_of_its_own),
    of("multimodal input's identity")._replace(
        name="multimodal input's identity of Dynamo's frontend", requests=_images_of_its_own
    ),
)


class Router:
    """Dynamo's router over the KV events of :meth:`publish`."""

    def __init__(self, folder: Path, python: str) -> None:
        from vllm.distributed.kv_events import ZmqEventPublisher

        self.folder, self.events = folder, free_port()
        self._publisher = ZmqEventPublisher(0, f"tcp://*:{self.events}")
        write_tokenizer(Path(write_model(folder / "model", 0)))
        self._dynamo = Dynamo(folder, Path(python).parents[1], [self], BLOCK)
        self._dynamo.start()

    def publish(self, events: list[Any]) -> None:
        """Publish events as an engine does."""
        from vllm.distributed.kv_events import KVEventBatch

        self._publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def held(self, asked: Arguments) -> int:
        """The tokens that the engine holds, in the router's index. Raises RuntimeError if it refuses."""
        return self._dynamo.held(asked).get(self.events, 0)

    def close(self) -> None:
        """End the processes."""
        self._dynamo.kill()
        self._publisher.shutdown()


def asked_of(request: Arguments, prompt: list[int]) -> dict[str, Any]:
    """What the router can be told of a request."""
    asked: dict[str, Any] = {"token_ids": prompt}
    if "cache_salt" in request:
        asked["cache_namespace"] = request["cache_salt"].removeprefix(SALT)
    if "lora_request" in request:
        asked["lora_name"] = request["lora_request"].lora_name
    if "mm_features" in request:
        asked["block_mm_infos"] = [
            _images(request["mm_features"], start) for start in range(0, len(prompt) // BLOCK * BLOCK, BLOCK)
        ]
    return asked


def _images(features: list[Any], start: int) -> dict[str, Any] | None:
    """The images of one block, by the first 64 bits of their identities."""
    found = []
    for each in features:
        first = each.mm_position.offset
        begin, end = max(first, start), min(first + each.mm_position.length, start + BLOCK)
        if begin < end:
            place = [[begin - start, end - start]]
            found.append({"mm_hash": int(each.identifier[:16], 16), "offsets": place})
    return {"mm_objects": found} if found else None


def row(router: Router, difference: Difference) -> KeyRow:
    """The cell of one difference."""

    def cell(word: Cell, shared: int = 0, problem: str = "") -> KeyRow:
        return KeyRow(difference.name, {PLACE: word}, shared, problem)

    try:
        with quiet():
            found = told(difference)
    except (ImportError, TypeError):
        return cell("not here")
    router.publish(found.events)
    tokens_alone = [{"token_ids": prompt} for prompt in found.prompts]
    ways = [
        [asked_of(request, prompt) for request, prompt in zip(found.requests, found.prompts, strict=True)]
    ]
    ways += [tokens_alone] if ways[0] != tokens_alone else []
    try:
        if not heard(router, difference, [way[0] for way in ways]):
            return cell("no control")
        way = next(each for each in ways if router.held(each[0]) > difference.common)
        shared = max(0, router.held(way[1]) - difference.common)
    except RuntimeError as error:
        return cell("broke", 0, str(error))
    return cell("shares" if shared else "parts", shared)


def heard(router: Router, difference: Difference, controls: list[dict[str, Any]]) -> bool:
    """Wait until the router finds the first request in one of these ways, and has heard of all its events."""
    until = time.monotonic() + PATIENCE_SECONDS
    while all(router.held(control) <= difference.common for control in controls):
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    time.sleep(1)
    return True


def main() -> None:
    """Print the card's rows."""
    with tempfile.TemporaryDirectory() as folder:
        router = Router(Path(folder), sys.argv[1])
        try:
            rows = [
                row(router, difference) for difference in (*DIFFERENCES, *OWN) if not difference.of_second
            ]
        finally:
            router.close()
    print(msgspec.json.encode(KeyCard("", [PLACE], rows)).decode())


if __name__ == "__main__":
    main()
