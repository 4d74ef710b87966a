#!/usr/bin/env bash
# Dynamo's RadixTree: after a block is removed and stored again, the blocks behind it are not found any more.
#
# Versions: ai-dynamo-runtime 1.6.1 (PyPI wheel), CPython 3.10 to 3.12.
# Behaviour: one worker stores the chain 1, 2, 3, and stores 1 and 2 a second time, as an engine does that computes a
# prompt twice at once: it then has two blocks with each hash. KV events name hashes and no blocks.
#   - One removal of 2 removes it, although the second store said that the worker has it twice. The score falls from 3
#     to 1.
#   - When 2 is stored again the score is 2 and not 3: nobody removed 3, and the engine would hit it.
#   - The same holds for the first block: once 1 was removed and stored again, 2 and 3 are not found, and a store
#     below 2 is refused with an error ("Failed to find parent block"), so what the worker adds there is lost, too.
# So a tree that is fed with an engine's own events falls behind for good with the first duplicate that is evicted,
# and only a removal of the worker and a full report mend it. Dynamo's workers count the copies before they publish.
#
# Output seen (2026-11-28):
#   stored 1, 2, 3 and again 1, 2: {(7, 0): 3}
#   removed 2 once:                {(7, 0): 1}
#   stored 2 again:                {(7, 0): 2}
#   removed 1, stored 1 again:     {(7, 0): 1}
#   stored 4 below 2:              Failed to apply event: Failed to find parent block
set -eu
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check ai-dynamo-runtime==1.6.1
"$folder/venv/bin/python" - 2>/dev/null <<'PYTHON'
import itertools
import json
import sys

from dynamo._core import RadixTree

WORKER = 7
numbers = itertools.count()
tree = RadixTree()


def apply(data):
    event = {"event_id": next(numbers), "data": data, "dp_rank": 0}
    tree.apply_event(WORKER, json.dumps(event).encode())


def store(parent, *hashes):
    blocks = [{"block_hash": one, "tokens_hash": 100 + one} for one in hashes]
    apply({"stored": {"parent_hash": parent, "blocks": blocks}})


def remove(*hashes):
    apply({"removed": {"block_hashes": list(hashes)}})


def score(what, expected):
    scores = tree.find_matches([101, 102, 103]).scores
    print(f"{what:30} {scores}")
    if scores != {(WORKER, 0): expected}:
        sys.exit("the behaviour has changed")


store(None, 1, 2, 3)
store(None, 1, 2)
score("stored 1, 2, 3 and again 1, 2:", 3)
remove(2)
score("removed 2 once:", 1)
store(1, 2)
score("stored 2 again:", 2)
remove(1)
store(None, 1)
score("removed 1, stored 1 again:", 1)
try:
    store(2, 4)
except RuntimeError as error:
    print(f"{'stored 4 below 2:':30} {error}")
else:
    sys.exit("the behaviour has changed")
PYTHON
