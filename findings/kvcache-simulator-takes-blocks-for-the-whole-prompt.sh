#!/usr/bin/env bash
# kvcache-simulator: a prompt is as long as its blocks, not as its `input_length`, so a trace of full blocks hits 100%.
#
# Versions: kvcache-simulator 0.1.3 (PyPI wheel), the Python backend.
# Expected: a record has `input_length`, "prefill input token count for this request", and a hit rate is hit tokens by
# the input tokens of the window. The README says so of the speedup: at 1.0x "every prefill input token is computed".
# Behaviour: `input_length` only cuts the last blocks. Tokens behind the last hash are in no sum. Engines hash full
# blocks only, and a trace of such hashes is valid: 40 prompts of 1,000 tokens that share the first block of 512 and
# have 488 of their own. They have a hit rate of 100% and a thousandfold speedup, and `averageInputTokens` is 512,
# without a warning (`skippedRecords` is 0). With one more hash for the rest of each prompt, as Mooncake's traces have
# it, the same prompts have 51.2% and 2.05x.
# So hit rates of two traces are comparable only when both hash the partial block or both don't; the shorter the
# prompts and the larger the blocks, the more a trace of full blocks flatters. How many blocks a budget of memory has is
# computed from `averageInputTokens`, too, where a model's bytes a token depend on the length.
#
# Output seen (2026-11-28):
#   full blocks:   1000 tokens each, told 512; hit rate 1.000, speedup 1000.00, of 10240 tokens, skipped 0
#   and the rest:  1000 tokens each, told 1000; hit rate 0.512, speedup 2.05, of 20000 tokens, skipped 0
set -eu
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m pip install --quiet --quiet --disable-pip-version-check --no-warn-conflicts --target "$folder/lib" \
    kvcache-simulator==0.1.3
PYTHONPATH="$folder/lib" "$python" - "$folder" <<'PYTHON'
import json
import subprocess
import sys
from pathlib import Path

LENGTH, BLOCK, PROMPTS = 1000, 512, 40


def told(words, rest):
    """Write the prompts down, with a hash for the rest of each or without; simulate a cache of one prompt's blocks."""
    trace = Path(sys.argv[1], "trace.jsonl")
    with trace.open("w") as lines:
        for number in range(PROMPTS):
            hashes = [1, 100 + number] if rest else [1]
            lines.write(json.dumps({"block_size": BLOCK, "hash_ids": hashes, "input_length": LENGTH}) + "\n")
    command = f"{sys.executable} -m kvcache_sim run --trace {trace} --model glm-5.2 --backend python --format json"
    command += f" --budgets-gib {0.1 if rest else 0.05}"
    run = subprocess.run(command.split(), capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    metadata, (point,) = found["metadata"], found["points"]
    lru = point["results"]["lru"]
    assert point["cacheBlocks"] == 1 + rest and metadata["requestCount"] == PROMPTS, "the behaviour has changed"
    seen = (metadata["averageInputTokens"], lru["hitRate"], lru["totalTokens"], metadata["skippedRecords"])
    speedup = lru["idealPrefillSpeedup"]
    print(
        f"{words} {LENGTH} tokens each, told {seen[0]:.0f}; hit rate {seen[1]:.3f}, speedup {speedup:.2f},"
        f" of {seen[2]} tokens, skipped {seen[3]}"
    )
    return seen


full, whole = told("full blocks:  ", rest=False), told("and the rest: ", rest=True)
assert (full, whole) == ((512, 1, 10240, 0), (1000, 0.512, 20000, 0)), "the behaviour has changed"
PYTHON
