"""Runs one proof: `make proof NAME=traces ARGS="FILE"`. Without a name it lists them.

docs/testing.md says what each proves, how long it takes and which page it writes.
"""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
NAMES = (
    "cards",
    "content_sketches",
    "evicted",
    "gpu_engine",
    "hit_reasons",
    "keys",
    "long_run",
    "mutants",
    "parallel",
    "repro",
    "routed",
    "simulate",
    "store",
    "traces",
    "trl",
    "turns",
    "upstream",
    "weights",
)


def promise(name: str) -> str:
    """The first line of a proof's docstring."""
    module = FOLDER / name / "__main__.py"
    source = module if module.exists() else FOLDER / f"{name}.py"
    return (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n")[0]


def main() -> int:
    """Run the proof that the first word names, with the other words as its arguments."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in NAMES:
        wrong = f"there is no proof {name!r}" if name else "NAME is missing"
        print(f"kvledger: {wrong}; the proofs are", file=sys.stderr)
        width = max(map(len, NAMES))
        for each in NAMES:
            print(f"  make proof NAME={each.ljust(width)}  {promise(each)}", file=sys.stderr)
        return 2
    del sys.argv[1]
    sys.path.append(str(FOLDER.parent / "scripts"))  # it builds releases of vLLM and starts LMCache's server
    runpy.run_module(f"proofs.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
