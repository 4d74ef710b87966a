"""The demo's engine, bare and observed in several ways, each variant in a fork after one import of vLLM.

`python -m tests.engines.forked FOLDER VARIANT...` writes VARIANT.json, the output of engine.py, and for an
observed variant the journal in VARIANT.journal.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.demo.forked import main

from kvledger.audit.demo import engine
from kvledger.audit.engines.steps import Steps


def bare() -> None:
    """Without an observer."""
    del os.environ["KVLEDGER_DIR"]


def observed() -> None:
    """With the observer, as users run it."""


def broken() -> None:
    """With an observer that raises at every output."""

    def raises(self: Steps, *_: Any, **__: Any) -> None:
        raise RuntimeError("a broken observer")

    Steps.output_taken = raises  # type: ignore[method-assign]


def mismatched() -> None:
    """With a host that lacks a method which the adapter wraps, and which this engine never calls."""
    from vllm.v1.core.sched.scheduler import Scheduler

    del Scheduler._update_request_as_session


VARIANTS = {each.__name__: each for each in (bare, observed, broken, mismatched)}


def run(folder: Path, name: str) -> int:
    os.environ["KVLEDGER_DIR"] = str(folder / f"{name}.journal")
    VARIANTS[name]()
    return engine.main(["--in-process", "--output", str(folder / f"{name}.json")])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:], run))
