#!/usr/bin/env bash
# LMCache: its cache simulator and its server are both LRU, and evict a prompt from opposite ends.
#
# Versions: lmcache 0.5.6 (PyPI wheel, no dependencies), sortedcontainers 2.4.0.
# Expected: `lmcache tool cache-simulator` replays the server's own lookup log through "a simulated LRU cache", with the
# server's definition of a hit (a prefix of chunks), to tell which hit rate a capacity gives. The server's
# `--eviction-policy LRU` is the cache it simulates.
# Behaviour: the simulator uses and inserts a prompt's chunks from first to last, so the first is the oldest and goes
# first, and what is left of the prompt is no prefix. The server's policy takes the same chunks from last to first and
# evicts the end of a prompt. Of a prompt of 8 chunks that is asked for again after another one of 8, the server has
# kept the beginning, as much as there was room for, and hits it. The simulator has kept the end and hits nothing,
# until there is room for both.
# So a sweep over capacities shows a cliff that the server doesn't have, and where prompts compete it asks for more
# memory than is needed: here 16 chunks for any hit, where 10 give a quarter of the prompt.
#
# `simulate` is called as the commands `simulate` and `sweep` do (with `fast` for the sweep; both tell the same). For
# the server the script makes the calls of its policy that a request leads to, written and then used as a whole, and
# evicts what the policy says when room is needed. The server asks it for a share at a watermark, in the same order.
#
# Output seen (2026-11-28), chunks that the second request of the first prompt hits:
#   room for  8 chunks: simulator 0, server's policy 0
#   room for 10 chunks: simulator 0, server's policy 2
#   room for 12 chunks: simulator 0, server's policy 4
#   room for 14 chunks: simulator 0, server's policy 6
#   room for 16 chunks: simulator 8, server's policy 8
set -eu
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m pip install --quiet --quiet --disable-pip-version-check --no-warn-conflicts --no-deps \
    --target "$folder/lib" sortedcontainers==2.4.0
"$python" -m pip download --quiet --quiet --disable-pip-version-check --no-deps --dest "$folder" lmcache==0.5.6
"$python" -m zipfile -e "$folder"/lmcache-0.5.6-*.whl "$folder/lmcache"
PYTHONPATH="$folder/lib" "$python" - "$folder/lmcache" <<'PYTHON'
import sys
import types
from pathlib import Path

# The packages' own __init__ files would import torch. Of the modules that the policy imports it needs three names.
for name in ("", ".tools", ".v1", ".v1.distributed", ".v1.distributed.eviction_policy"):
    name = f"lmcache{name}"
    package = types.ModuleType(name)
    package.__path__ = [str(Path(sys.argv[1], *name.split(".")))]
    sys.modules[name] = package
named = {
    "api": {"ObjectKey": str},
    "eviction": {"EvictionPolicy": object},
    "internal_api": {
        "EvictionAction": types.SimpleNamespace,
        "EvictionDestination": types.SimpleNamespace(DISCARD="discard"),
    },
}
for name, names in named.items():
    module = types.ModuleType(f"lmcache.v1.distributed.{name}")
    vars(module).update(names)
    sys.modules[module.__name__] = module

from lmcache.tools.cache_simulator.simulator import simulate
from lmcache.v1.distributed.eviction_policy.lru import LRUEvictionPolicy

CHUNK, CHUNKS = 256, 8
first, second = ([f"{prompt}{place}" for place in range(CHUNKS)] for prompt in "ab")
events = [
    {"timestamp": float(number), "seq_len": CHUNK * CHUNKS, "chunk_size": CHUNK, "chunk_hashes": hashes}
    for number, hashes in enumerate([first, second, first])
]


def served(capacity):
    """How many chunks of the first prompt are hit after the second, if what the server's policy says is evicted."""
    policy, held = LRUEvictionPolicy(), set()
    for keys in (first, second):
        while len(held) + len(keys) > capacity:
            for action in policy.get_eviction_actions(1 / len(held)):
                policy.on_keys_removed(action.keys)
                held.difference_update(action.keys)
        held.update(keys)
        policy.on_keys_created(keys)  # written
        policy.on_keys_touched(keys)  # the request has ended
    return next((place for place, key in enumerate(first) if key not in held), CHUNKS)


seen = []
for capacity in (8, 10, 12, 14, 16):
    (hit,) = {simulate(events, capacity, 1, fast=fast)["total_hit_tokens"] // CHUNK for fast in (False, True)}
    seen.append((hit, served(capacity)))
    print("room for {:2} chunks: simulator {}, server's policy {}".format(capacity, *seen[-1]))
assert seen == [(0, 0), (0, 2), (0, 4), (0, 6), (8, 8)], "the behaviour has changed"
PYTHON
