"""vLLM v1, releases 0.9.2 to 0.11: where they differ from 0.12.

``schedule()`` preempts without calling a method for it: a preemption shows only in that a running request's
blocks are freed. The preemption is examined when the step is over, and emitted before the step's admissions.
Before 0.11 the engine does not count preemptions, so they are counted here, and no load can fail.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from ..hooks import Hook
from .hook_tables import amended, signature
from .polled_loads import PolledCounts, PolledLoads
from .steps import Steps
from .v1_since_0_27 import Parts, V1Observer
from .v1_until_0_15 import HOOKS as HOOKS_012
from .v1_until_0_15 import V1Observer012
from .v1_until_0_26 import Lives020

HOOKS = amended(
    HOOKS_012,
    signature(HOOKS_012, "_free_request", ("request",)),
    signature(HOOKS_012, "_handle_invalid_blocks", ("invalid_block_ids",))._replace(
        optional=True  # since 0.11
    ),
    signature(HOOKS_012, "reset_prefix_cache", ()),
    Hook("kv_cache_manager", "free", (("request",),), "lives.free_begins", "lives.freed"),
    without=("_preempt_request", "_handle_stopped_request", "_update_request_as_session"),
)


class _Victim(NamedTuple):
    """A request that was running when its blocks were freed, and the engine's counts before."""

    request: Any
    before: tuple[int, int, int]
    held_blocks: int


class Counts009(PolledCounts):
    """Preemptions are counted here."""

    def __init__(self) -> None:
        super().__init__()
        self.preempted: dict[str, int] = {}
        """How often each living request was preempted, by request id."""

    def preemptions(self, request: Any) -> int:
        own = self.preempted.get(request.request_id, 0)
        return int(getattr(request, "num_preemptions", own))

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self.preempted.pop(request_id, None)


class Loads009(PolledLoads):
    """The scheduler polls, and its outputs do not name the loads that arrived."""

    def received(self, model_output: Any) -> Any:
        return None


class Lives009(Lives020):
    """A running request whose blocks are freed has been preempted."""

    _counts: Counts009

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._victims: list[_Victim] = []
        """Preemptions of this step that have not been emitted."""

    def free_begins(self, request: Any) -> tuple[int, int, int] | None:
        """``KVCacheManager.free`` is called: of a running request it is a preemption."""
        return self.preemption_begins(request) if request.status.name == "RUNNING" else None

    def freed(self, before: tuple[int, int, int] | None, _: None, request: Any) -> None:
        """The blocks are free. ``Preempted`` is emitted when the step is over."""
        if before is None:
            return
        request_id, preempted = request.request_id, self._counts.preempted
        preempted[request_id] = preempted.get(request_id, 0) + 1
        if self._log.undelivered:
            self.draining.add(request_id)
        self._victims.append(_Victim(request, before, self.held_blocks(request)))

    def finished(self, request: Any, *_: Any, **__: Any) -> None:
        self.emit_victims()
        super().finished(request)

    def emit_victims(self) -> None:
        """Emit ``Preempted`` for each request preempted in this step."""
        for victim in self._victims:
            self.emit_preempted(victim.request, victim.before, victim.held_blocks, delivered=True)
        self._victims = []


class Steps009(Steps):
    """Preemptions of the step come before its admissions."""

    _lives: Lives009

    def scheduled(self, _: None, output: Any, *__: Any, **___: Any) -> None:
        self._lives.emit_victims()
        super().scheduled(None, output)


class V1Observer009(V1Observer):
    """Observes one scheduler of these releases."""

    NAME: ClassVar[str] = "v1-0.9"
    FIGURES: ClassVar[str] = "none"
    OUTPUT: ClassVar[tuple[str, ...]] = ()
    HOOKS: ClassVar[tuple[Hook, ...]] = HOOKS
    PARTS: ClassVar[Parts] = V1Observer012.PARTS._replace(
        counts=Counts009, loads=Loads009, lives=Lives009, steps=Steps009
    )
