"""A pytest plugin for `make proof NAME=upstream ARGS=--level=checks`: the exported checks in vLLM's tests.

`-p upstream_checks` judges each call of each scheduler. The file of the checks is run as it is exported, and
kvledger is not imported.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

SCHEDULER = "vllm.v1.core.sched.scheduler"
CHECKS = Path(__file__).resolve().parents[2] / "audit" / "entry" / "kv_invariants.py"
exported: Any = runpy.run_path(str(CHECKS))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Wrap the methods of vLLM's class, once it is imported."""
    class_: Any = getattr(sys.modules.get(SCHEDULER), "Scheduler", None)
    if class_ is not None and not hasattr(class_, "kvledger_checks"):
        class_.kvledger_checks = True
        for name in exported["METHODS"]:
            setattr(class_, name, exported["checked"](getattr(class_, name)))
