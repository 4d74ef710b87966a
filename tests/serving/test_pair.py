"""A real prefill engine and a real decode engine with a store in a folder: each call counts once.

Both engines are at level ``content`` with one key, so what the decode engine loaded is compared with what the
prefill engine stored.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.exporters.sidecar.test_follower import following
from tests.exporters.sidecar.test_paired_engines import once
from tests.serving.pair import PLAIN, SHARING, Pair, load, prompt
from tests.time_limits import RUN_HANGS

pytestmark = pytest.mark.serving

PROMPT, OUTPUT = len(prompt(0)), 4
LONG = len(prompt(0)) + 64
CALLS = PLAIN + SHARING + 4
"""The load, then a retry (two calls), a lost transfer and a changed one."""
STRAIGHT = 1
"""A call that goes to the decode engine alone."""
PROMPTS = (CALLS + STRAIGHT - SHARING) * PROMPT + SHARING * LONG
CONTENT = {
    "KVLEDGER_LEVEL": "content",
    "KVLEDGER_CONTENT_KEY": "a key of this test",
    "KVLEDGER_CONTENT_STORE": "fleet",
}


def store_files(folder: Path) -> set[Path]:
    return set((folder / "store").glob("*/*.safetensors"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The journals of both engines, and the log of what clients were told."""
    folder = tmp_path_factory.mktemp("pair")
    pair = Pair(folder, "ExampleConnector", **CONTENT)
    try:
        pair.start()
        load(pair)
        for _ in range(2):
            pair.complete("again", prompt(60))
        before = store_files(folder)
        transfer = pair.prefilled("lost", prompt(70))
        for path in store_files(folder) - before:
            path.unlink()
            path.parent.rmdir() if not any(path.parent.iterdir()) else None
        pair.decoded("lost", prompt(70), transfer)
        before = store_files(folder)
        transfer = pair.prefilled("changed", prompt(80))
        changed = max(store_files(folder) - before)
        data = bytearray(changed.read_bytes())
        data[-1] ^= 1
        changed.write_bytes(data)
        pair.decoded("changed", prompt(80), transfer)
        pair.decoded("straight", prompt(85), None)
        pair.end()
        yield folder
    finally:
        pair.kill()


def kvledger(*arguments: object) -> tuple[int, Any]:
    """Exit code and JSON of a command."""
    command = [sys.executable, "-m", "kvledger", *map(str, arguments), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_HANGS)
    assert not done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_call_of_two_engines_is_one_statement(folder: Path) -> None:
    _, shown = kvledger("show", folder / "journals", "sharing-1")

    (call,) = shown["calls"]
    prefill, decode = call["requests"]
    once = call["counted_once"]
    assert (LONG, 64, OUTPUT) == (once["prompt_tokens"], once["cached"], once["output_tokens"])
    assert (64, 71, 1) == (prefill["local"], prefill["computed"], prefill["output"])
    assert (64, 64, 7) == (decode["local"], decode["external"], decode["computed"])
    assert {"prefill-output": 1, "transferred": 64, "decode-hit": 64, "recomputed": 7} == once["not_counted"]


def test_clients_are_told_transfers_as_hits_and_nothing_is_unexplained(folder: Path) -> None:
    """vLLM#47136: the decode engine reports what it received from the store as cached."""
    code, result = kvledger("check", "usage", folder / "journals", "--log", folder / "usage.jsonl")

    assert 0 == code
    assert {"equal": 2 + STRAIGHT, "explained": CALLS - 2, "unexplained": 0} == {
        name: result["calls"][name] for name in ("equal", "explained", "unexplained")
    }  # of the lost transfer nothing was cached; the second use of an id hit the same blocks in both engines
    assert {"transfer": CALLS - 2} == result["causes"]
    assert [] == result["unlogged"]


def test_the_sidecar_can_count_each_prompt_once(folder: Path) -> None:
    """Of the loads of both engines none is a hit.

    The prompt of the lost transfer counts once too, and so does the one that no prefill engine had.
    """
    with following(folder / "journals", folder=folder / "sidecar") as follower:
        every = {source: count for source, count in once(follower).items() if count}

    assert PROMPTS == sum(every.values())
    assert "external" not in every
    assert every["local"] == SHARING * 64 + 64  # and those of the second use of an id


def test_each_loaded_block_is_what_the_prefill_engine_stored_but_the_changed_one(folder: Path) -> None:
    code, audit = kvledger("audit", folder / "journals")

    contents = audit["contents"]
    assert 1 == code
    loaded = (
        2 * PLAIN + 4 * SHARING + 2 + 2
    )  # the second use of an id loads nothing, nor does the lost transfer
    counts = tuple(contents[name] for name in ("moved", "moved_differed", "moved_unknown"))
    assert (loaded - 1, 1, 0) == counts
    (found,) = (each for each in audit["violations"] if each["id"].startswith("content/"))
    assert ("content/transfer", 1) == (found["id"], len(found["figures"]["layers"]))
    assert "cmpl-changed-0-" in found["figures"]["reader"]
    assert "cmpl-changed-0-" in found["figures"]["writer"]
