"""vLLM v1, releases 0.12 to 0.15: where they differ from 0.16.

vLLM's front end has no prompt tokens by source, so nothing is reported. The connector's statistics count a
request when it begins to run, and count its whole sequence as queried: no lookup is counted by admission.
"""

from __future__ import annotations

from typing import Any, ClassVar

from .. import events as ev
from ..hooks import Hook
from .hook_tables import amended, signature
from .prompt_reports import PromptReports
from .v1_since_0_27 import Parts, V1Observer
from .v1_until_0_19 import HOOKS_017, V1Observer017
from .v1_until_0_26 import Admissions020

_SESSION_METHODS = ("_handle_stopped_request", "_update_request_as_session")

HOOKS = amended(
    HOOKS_017,
    signature(HOOKS_017, "_free_request", ("request",), ("request", "delay_free_blocks")),
    signature(HOOKS_017, "_handle_invalid_blocks", ("invalid_block_ids",)),
    signature(
        HOOKS_017,
        "reset_prefix_cache",
        ("reset_running_requests",),
        ("reset_running_requests", "reset_connector"),
    ),
    # Sessions came with 0.15.
    *(hook._replace(optional=True) for hook in HOOKS_017 if hook.method in _SESSION_METHODS),
)


class NoPromptReports(PromptReports):
    """These releases report no prompt figures."""

    def _will_report(self, request: Any) -> bool:
        return False


class Admissions012(Admissions020):
    """No lookup is counted once an admission."""

    COUNTED: ClassVar[tuple[str, ...]] = ()

    def _read_statistics(self) -> tuple[int, ...]:
        return 0, 0, 0, 0, 0, 0

    def lookups_counted(self, now: int, admitted: bool) -> ev.LookupsCounted | None:
        return super().lookups_counted(now, admitted) if admitted else None


class V1Observer012(V1Observer):
    """Observes one scheduler of these releases."""

    NAME: ClassVar[str] = "v1-0.12"
    FIGURES: ClassVar[str] = "none"
    OUTPUT: ClassVar[tuple[str, ...]] = ()
    HOOKS: ClassVar[tuple[Hook, ...]] = HOOKS
    PARTS: ClassVar[Parts] = V1Observer017.PARTS._replace(reports=NoPromptReports, admissions=Admissions012)
