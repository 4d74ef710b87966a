"""A pytest plugin for `make proof NAME=upstream ARGS=--level=checks`: the exported checks in vLLM's tests.

`-p upstream_checks` calls `assert_kv_invariants` after each `schedule()` and `update_from_output()` of each
scheduler. The file of the checks is run as it is exported, and kvledger is not imported.
"""

from __future__ import annotations

import functools
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

SCHEDULER = "vllm.v1.core.sched.scheduler"
CHECKS = Path(__file__).resolve().parents[2] / "audit" / "entry" / "kv_invariants.py"
assert_kv_invariants: Any = runpy.run_path(str(CHECKS))["assert_kv_invariants"]


def _checked(method: Any) -> Any:
    @functools.wraps(method)
    def call(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(scheduler, *args, **kwargs)
        assert_kv_invariants(scheduler)
        return result

    call.kvledger_checks = True  # type: ignore[attr-defined]
    return call


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Wrap the two methods of vLLM's class, once it is imported."""
    class_ = getattr(sys.modules.get(SCHEDULER), "Scheduler", None)
    for name in ("schedule", "update_from_output"):
        method = getattr(class_, name, None)
        if method is not None and not hasattr(method, "kvledger_checks"):
            setattr(class_, name, _checked(method))
