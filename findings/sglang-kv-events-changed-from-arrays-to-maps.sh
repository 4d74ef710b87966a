#!/usr/bin/env bash
# SGLang's KV events: the same events have two wire forms, by release, and no field says which.
#
# Versions: sglang 0.5.13 and 0.5.20 (PyPI wheels), msgspec 0.20.0, pyzmq 27.1.0, pydantic 2.12.5, psutil 7.1.3.
# Behaviour: with the publisher's own structs and encoder, in a batch that is an array in both,
#   - 0.5.13 writes an event as an array that begins with the name of its class, all optional fields included;
#   - 0.5.20 writes it as a map with the key `type`, without the optional fields that are None.
# Topic, sequence number and the names of the events are equal, and nothing in the batch says which form it has. So a
# reader learns the form from the first event's type alone: one that takes fields by their positions is right for the
# first release, and one that takes them by their names for the second. An optional field that is None is null in the
# one and absent in the other. Engines used to add fields at the end of such arrays, and readers were written for that.
#
# Output seen (2026-11-28):
#   0.5.13: ['BlockStored', [7, 8], None, [1, 2, 3, 4], 2, None, None]
#   0.5.13: ['AllBlocksCleared']
#   0.5.20: {'type': 'BlockStored', 'block_hashes': [7, 8], 'parent_block_hash': None, 'token_ids': [1, 2, 3, 4],
#     'block_size': 2, 'lora_id': None}
#   0.5.20: {'type': 'AllBlocksCleared'}
set -eu
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m pip install --quiet --quiet --disable-pip-version-check --target "$folder/lib" \
    msgspec==0.20.0 pyzmq==27.1.0 pydantic==2.12.5 psutil==7.1.3
for release in 0.5.13 0.5.20; do
    "$python" -m pip download --quiet --quiet --disable-pip-version-check --no-deps --dest "$folder" "sglang==$release"
    "$python" -m zipfile -e "$folder"/sglang-"$release"-*.whl "$folder/$release"
    # The packages' own __init__ files would import torch; the module of the events needs none of them.
    PYTHONPATH="$folder/lib" "$python" - "$folder/$release" "$release" <<'PYTHON'
import sys
import types
from pathlib import Path

root, release = Path(sys.argv[1]), sys.argv[2]
for name in ("sglang", "sglang.srt", "sglang.srt.disaggregation", "sglang.srt.utils"):
    package = types.ModuleType(name)
    package.__path__ = [str(root.joinpath(*name.split(".")))]
    sys.modules[name] = package

import msgspec

from sglang.srt.disaggregation import kv_events

stored = kv_events.BlockStored([7, 8], None, [1, 2, 3, 4], 2, None)
encode = msgspec.msgpack.Encoder().encode
expected = {
    "0.5.13": [["BlockStored", [7, 8], None, [1, 2, 3, 4], 2, None, None], ["AllBlocksCleared"]],
    "0.5.20": [
        {
            "type": "BlockStored", "block_hashes": [7, 8], "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4], "block_size": 2, "lora_id": None,
        },
        {"type": "AllBlocksCleared"},
    ],
}[release]
batch = kv_events.KVEventBatch(ts=1.0, events=[stored, kv_events.AllBlocksCleared()])
events = msgspec.msgpack.decode(encode(batch))[1]
for event in events:
    print(f"{release}: {event}")
assert events == expected, "the behaviour has changed"
PYTHON
done
