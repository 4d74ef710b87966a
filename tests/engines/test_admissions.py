"""What is asked of an admission, and where."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.scenarios.driving import start

from kvledger.audit.engines import choose, host_version
from kvledger.audit.journal.recorder import MemoryRecorder

USED = "kv_cache_manager.record_prefix_cache_stats"


@pytest.mark.parametrize(("setup", "asked"), [({}, False), ({"connector": "scripted"}, True)])
def test_the_hit_that_is_used_is_asked_for_where_it_may_be_another(
    setup: dict[str, Any], asked: bool
) -> None:
    """Without a connector it is the look-up's answer, and a hook a request less."""
    live: list[str] = []

    def attach(scheduler: Any) -> None:
        observer = choose(scheduler)(scheduler, MemoryRecorder(), version=host_version())
        observer.start()
        live.extend(observer.hooks.live)
        observer.stop("exit")

    start(attach, **setup)

    assert asked == (USED in live)
