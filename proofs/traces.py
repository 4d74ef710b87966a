"""Compares `kvledger simulate` of a request trace on three releases with a pool alone and Dynamo's mocker.

Usage: make proof NAME=traces ARGS="FILE [--blocks N ...] [--releases R ...] [--requests N]"

FILE is a trace in the Mooncake format, such as Mooncake's FAST25-release/traces/conversation_trace.jsonl.
Requests come one after another and have one output token, because a pool alone has neither time nor outputs:
that is `kvledger whatif`, which counts hits on partly filled last blocks, too. Dynamo's mocker
(`ai-dynamo-runtime`, in the environment of `make proof NAME=routed`) runs so fast that requests do not
overlap. Prints the local hits of each. Exits with 1 if a release could not be simulated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from proofs.routed import routers

from kvledger.audit.analysis.whatif import Options
from kvledger.audit.replay.request_traces import BLOCK_TOKENS
from kvledger.audit.replay.windows import EVERYTHING
from kvledger.exporters.reports import simulate
from kvledger.exporters.reports.whatif import study

BLOCKS = (5_000, 20_000, 60_000)
RELEASES = ("0.17.0", "0.24.0", "0.33.0")

MOCKER = """
import json, sys
from dynamo import _core
path, blocks, size, longest = sys.argv[1], *map(int, sys.argv[2:])
engine = {"num_gpu_blocks": blocks, "block_size": size, "max_model_len": longest, "speedup_ratio": 1e6}
found = _core.run_mocker_trace_replay([path], {"engine": engine}, trace_block_size=size)
print(json.dumps(found.summary))
"""


def shortened(trace: Path, folder: Path, requests: int) -> tuple[Path, int]:
    """The trace with one output token a request, and its longest prompt."""
    path, longest = folder / trace.name, 0
    with path.open("w") as out:
        for text in trace.read_text().splitlines()[: requests or None]:
            line = json.loads(text) | {"output_length": 1}
            longest = max(longest, line["input_length"])
            out.write(json.dumps(line) + "\n")
    return path, longest


def by_pool(path: Path, sizes: Sequence[int]) -> list[float]:
    """The hits of each pool, as a share of prompt tokens, by `kvledger whatif`."""
    [one] = study([path], Options(blocks=list(sizes))).engines
    return [point.hit_share for point in one.curve if point.blocks in sizes]


def by_mocker(path: Path, longest: int, sizes: Sequence[int]) -> list[float]:
    """The same by Dynamo's mocker."""
    python = str(routers() / "bin" / "python")
    found = []
    for size in sizes:
        words = [python, "-c", MOCKER, str(path), str(size), str(BLOCK_TOKENS), str(longest + 1)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1])["first_admission_prefix_cache_reused_ratio"])
    return found


def by_release(path: Path, release: str, sizes: Sequence[int]) -> list[float]:
    """The same by a release's own scheduler. Exits if it can't be simulated."""
    began = time.monotonic()
    one = simulate.run(
        [path],
        releases=[release],
        settings=[f"num_gpu_blocks={size}" for size in sizes],
        pythons=[],
        rate=1.0,
        closed=False,
        find="",
        wanted="",
        window=EVERYTHING,
    )
    for outcome in one.outcomes:
        if outcome.error or outcome.preemptions:
            sys.exit(f"{outcome.name}: {outcome.error or 'requests overlapped'}")
    seconds = time.monotonic() - began
    print(f"vLLM {release}: {len(sizes)} configurations in {seconds:.0f} s", file=sys.stderr)
    return [outcome.hit_share for outcome in one.outcomes]


def main() -> int:
    """Print one row for each simulator."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS)
    parser.add_argument("--releases", nargs="+", default=RELEASES)
    parser.add_argument("--requests", type=int, default=0, help="the first N requests; 0: all")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, longest = shortened(asked.trace, Path(folder), asked.requests)
        rows = {
            "a pool alone": by_pool(path, asked.blocks),
            "Dynamo's mocker": by_mocker(path, longest, asked.blocks),
        }
        for release in asked.releases:
            rows[f"vLLM {release}"] = by_release(path, release, asked.blocks)
    print(f"| local hits | {' | '.join(f'{size:,} blocks' for size in asked.blocks)} |")
    print("|---" * (1 + len(asked.blocks)) + "|")
    for name, shares in rows.items():
        print(f"| {name} | {' | '.join(f'{share:.2%}' for share in shares)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
