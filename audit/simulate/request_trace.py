"""A request trace as traffic: its requests on an engine that the user describes.

Nothing was recorded of it, so there is nothing to calibrate with. Without step times each request ends before
the next one comes, as in simulators that have no time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

from ..analysis.step_times import StepSample
from ..errors import LedgerError
from ..events import Setting
from ..replay.request_traces import TracedRequest, traced_requests
from ..traffic.reader import HASH, RecordedRequest, Traffic
from .study import NAMES, Source

ASSUMED: dict[str, Setting] = {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "async_scheduling": False}
"""Settings that a trace does not have, by vLLM's names; those of a GPU server of vLLM 0.32."""

APART_US = 1_000_000
"""Where lines have no times, requests come one second apart; the first comes after as long."""


LONGEST_TOKENS = 1 << 24


def traced(
    path: Path,
    *,
    block_tokens: int,
    version: str,
    settings: Sequence[tuple[str, Setting]],
    steps: StepSample | None = None,
) -> Source:
    """The traffic of a trace on a release with these settings, by vLLM's names; of several values the first.

    ``version``: "" for the release that runs here. ``block_tokens``: of the trace, if its lines do not say
    it. ``steps``: of a recorded engine, whose step times are taken. Raises LedgerError.
    """
    lines = traced_requests(path, block_tokens)
    longest = max(line.prompt + max(1, line.outputs or 0) for line in lines)
    if longest > LONGEST_TOKENS:
        raise LedgerError(
            f"{path} has a request of {longest:,} tokens, and no model has a context of more than "
            f"{LONGEST_TOKENS:,}: its simulation would not end."
        )
    first = reversed([(NAMES[name], value) for name, value in settings if name in NAMES])
    given = {name: value for name, value in first if name != "block_size"}
    if not isinstance(given.get("blocks"), int):
        raise LedgerError("a request trace has no pool: give it one with --set num_gpu_blocks=N")
    configuration: dict[str, Setting] = {
        "block_size": lines[0].block_tokens,
        "max_model_len": longest,
        **{NAMES[name]: value for name, value in ASSUMED.items()},
        **given,
    }
    requests = _requests(lines)
    traffic = Traffic(
        version=version,
        configuration=configuration,
        requests=requests,
        script=[],
        resets=[],
        groups=["full"],
        group_tokens=[lines[0].block_tokens],
        block_tokens=lines[0].block_tokens,
        doubts=[],
        ended_at=requests[-1].at,
    )
    return Source(traffic, None, steps or StepSample())


def _requests(lines: list[TracedRequest]) -> list[RecordedRequest]:
    """Requests by their times. Those of one time are spread over the time since the last ones."""
    found: list[RecordedRequest] = []
    came_after = at = 0
    for number, line in enumerate(sorted(lines, key=lambda line: line.at or 0)):
        now = (number if line.at is None else 0) * APART_US + APART_US + (line.at or 0)
        if now > at:
            came_after, at = at, now
        request = RecordedRequest(number, str(number + 1), at, came_after, line.prompt)
        request.max_tokens = max(1, line.outputs or 0)
        request.hashes = array(HASH, line.hashes).tobytes()
        found.append(request)
    return found
