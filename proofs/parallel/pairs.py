"""A mixed load on a prefill and a decode engine: streams, repeats, clients that leave, growing prompts."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.serving.pair import PLAIN, SHARING, Pair, load, prompt
from tests.serving.processes import BLOCK_TOKENS

AGAIN, STREAMED, LEFT, LOOPS, TURNS = 2, 4, 4, 2, 4
ANSWERS = PLAIN + SHARING + 2 * AGAIN + STREAMED + LEFT + LOOPS * TURNS

CONNECTORS = {
    "example-pair": "ExampleConnector",
    "nixl-pair": "NixlConnector",
    "lmcache-pair": "LMCacheMPConnector",
    "changed-byte": "NixlConnector",
    "expired-lease": "NixlConnector",
}
"""Pairs by name: a store in a folder, a transfer between both engines, and the server of LMCache.

In ``changed-byte`` a byte of a received block is changed before the decode engine reads it. In
``expired-lease`` the prefill engine keeps blocks for a second, and the decode engine reads those of one
request later.
"""

CHANGED_PROMPT = 80
LEASED_PROMPT, LEASED_BLOCKS = 85, 4
OTHER_PROMPTS, OTHER_BLOCKS = range(400, 424), 6
"""What the prefill engine computes when the lease is over, so that it needs every block of its pool."""

CONTENT = {"KVLEDGER_CONTENT_KEY": "a key of these servers", "KVLEDGER_CONTENT_STORE": "fleet"}


@contextlib.contextmanager
def store(connector: str) -> Iterator[None]:
    """What a connector needs beside both engines: LMCache its server."""
    if connector != "LMCacheMPConnector":
        yield
        return
    import stores

    with stores.store("multiprocess") as server:
        os.environ["LMCACHE_SERVER_PORT"] = str(server.port)
        yield


@contextlib.contextmanager
def running(name: str, folder: Path, level: str) -> Iterator[Pair]:
    """A pair, which ends so that its journals are complete."""
    folder.mkdir(parents=True)
    connector = CONNECTORS[name]
    with store(connector):
        changed = {"CHANGED_REQUEST": "cmpl-changed-", "CHANGED_FILE": str(folder / "changed.json")}
        more = {"changed-byte": changed, "expired-lease": {"LEASE_SECONDS": "1"}}.get(name, {})
        pair = Pair(folder, connector, KVLEDGER_LEVEL=level, **CONTENT, **more)
        try:
            pair.start()
            yield pair
            pair.end()
        finally:
            pair.kill()


def send(pair: Pair) -> None:
    """Send the load, as several clients at once after the first calls. Fails if an answer is no success."""
    load(pair)
    with ThreadPoolExecutor(3) as clients:
        sent = [clients.submit(_again, pair, number) for number in range(AGAIN)]
        sent += [clients.submit(_streamed, pair, number) for number in range(STREAMED)]
        sent += [clients.submit(_left_and_again, pair, number) for number in range(LEFT)]
        sent += [clients.submit(_loop, pair, number) for number in range(LOOPS)]
        for each in sent:
            each.result()


def send_changed(pair: Pair) -> None:
    """Send the load, and then the call of which the decode engine receives other KV than was computed."""
    send(pair)
    pair.complete("changed", prompt(CHANGED_PROMPT))


def send_late(pair: Pair) -> None:
    """Send the load, and then a call that the decode engine gets when the lease of its blocks is over."""
    load(pair)
    tokens = prompt(LEASED_PROMPT, LEASED_BLOCKS)
    transfer = pair.prefilled("leased", tokens)
    time.sleep(3)
    for number in OTHER_PROMPTS:
        pair.prefilled(f"other-{number}", prompt(number, OTHER_BLOCKS))
    pair.decoded("leased", tokens, transfer)


def problems_of_lease(violations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What the finding does not say of the blocks that were read after their lease."""
    found = [each for each in violations if each["severity"] == "violation"]
    if ["content/transfer"] != [each["id"] for each in found]:
        yield f"one content/transfer is expected, not {[each['id'] for each in found]}"
        return
    figures = found[0]["figures"]
    reader, (writer, _, prefill) = figures["reader"], figures["writer"].partition(" in ")
    if len(figures["blocks"]) != LEASED_BLOCKS or figures["tokens"] != LEASED_BLOCKS * BLOCK_TOKENS:
        yield f"the finding names the blocks {figures['blocks']} and {figures['tokens']} tokens"
    if not (reader.startswith("cmpl-leased-") and writer.startswith("cmpl-leased-") and " pid " in prefill):
        yield f"the finding names {reader!r} and {figures['writer']!r}"


def problems_of_change(folder: Path, violations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What the finding does not say of the changed byte: block, layer, and both engines' requests."""
    done = json.loads((folder / "changed.json").read_text())
    found = [each for each in violations if each["severity"] == "violation"]
    if ["content/transfer"] != [each["id"] for each in found]:
        yield f"one content/transfer is expected, not {[each['id'] for each in found]}"
        return
    figures = found[0]["figures"]
    said = figures["blocks"], figures["layers"], figures["reader"]
    if said != ([done["block"]], [done["layers"] - 1], done["request"]):
        yield f"the finding says {said} of {done}"
    decode, writer = found[0]["engine"], figures["writer"]
    request, _, prefill = writer.partition(" in ")
    if not request.startswith("cmpl-changed-") or " pid " not in prefill or prefill == decode:
        yield f"the finding of {decode} names the prefill engine's request as {writer!r}"


def _again(pair: Pair, number: int) -> None:
    for _ in range(2):
        pair.complete(f"again-{number}", prompt(60 + number))


def _streamed(pair: Pair, number: int) -> None:
    tokens = prompt(100 + number)
    transfer = pair.prefilled(f"streamed-{number}", tokens)
    more = {"kv_transfer_params": transfer} if transfer else {}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    pair.decode.body(f"streamed-{number}", prompt=tokens, max_tokens=4, **options, **more)


def _left_and_again(pair: Pair, number: int) -> None:
    """A client leaves the stream of the decode engine, and sends its call again with the same id."""
    tokens = prompt(200 + number)
    transfer = pair.prefilled(f"left-{number}", tokens)
    more = {"kv_transfer_params": transfer} if transfer else {}
    pair.decode.leave(f"left-{number}", prompt=tokens, max_tokens=200, **more)
    pair.complete(f"left-{number}", tokens)


def _loop(pair: Pair, number: int) -> None:
    """Calls of one conversation: each prompt has the one before it, and more."""
    whole = prompt(300 + number, 2 + TURNS)
    for turn in range(TURNS):
        pair.complete(f"loop-{number}-{turn}", whole[: (2 + turn) * BLOCK_TOKENS + 7])
