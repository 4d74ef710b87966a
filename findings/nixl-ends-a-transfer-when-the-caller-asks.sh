#!/usr/bin/env bash
# NIXL: a transfer ends when its caller asks, not when its bytes are there: the target isn't told before, and
# `xferDuration` is as long.
#
# Versions: nixl-cu12 1.5.1 (PyPI wheel, runs without CUDA), UCX over TCP between two agents of one process, both with
# the progress thread; numpy 2.3.5.
# Expected: the progress thread completes a posted write and sends the notification that goes with it.
# `get_xfer_telemetry(handle)` then has the duration of the transfer, and `totalBytes` by it is the link's bandwidth.
# Behaviour: of two writes of 8 MiB, the caller asks for the state of the first all the time, and of the second after
# two seconds. The bytes of both are in the target's memory in a fraction of a second.
#   - The second's notification reaches the target only after the first `check_xfer_state`: for two seconds it has all
#     the bytes and doesn't know it.
#   - `xferDuration` of the second is two seconds. Nothing takes the time when the last byte is written; it is taken in
#     the check that answers DONE.
# A transfer that is done when `transfer` returns, as small ones through shared memory may be, is told right.
# So where an engine asks once a step, as vLLM's connector does, its "transfer time" and "throughput" are those of its
# steps: they get worse with longer steps on the same link. That they equal the time requests waited proves nothing, and
# blocks that are freed on the notification are held as much longer.
#
# Output seen (2026-11-28):
#   asked at once:     bytes there after 0.0 s, target told after 0.0 s, xferDuration 0.0 s for 8388608 bytes
#   asked after 2.0 s: bytes there after 0.0 s, target told after 2.0 s, xferDuration 2.0 s for 8388608 bytes
set -eu
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m pip install --quiet --quiet --disable-pip-version-check --no-deps --target "$folder" \
    nixl-cu12==1.5.1 numpy==2.3.5
UCX_TLS=tcp,self PYTHONPATH="$folder" "$python" - 2>/dev/null <<'PYTHON'
import logging
import sys
import time

import numpy
from nixl_cu12._api import nixl_agent, nixl_agent_config

logging.disable(logging.INFO)
SIZE = 8 << 20
LATER = 2.0


def agent(name):
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=True, capture_telemetry=True, backends=["UCX"]))


source, target = agent("source"), agent("target")
here, there = numpy.zeros(SIZE, numpy.uint8), numpy.zeros(SIZE, numpy.uint8)
for owner, array in ((source, here), (target, there)):
    owner.register_memory([(array.ctypes.data, SIZE, 0, "")], "DRAM")
source.add_remote_agent(target.get_agent_metadata())


def write(later):
    """When the bytes were there, when the target was told, and NIXL's duration and bytes; None if done at once."""
    here[:] += 1
    lists = [source.get_xfer_descs([(array.ctypes.data, SIZE, 0)], "DRAM") for array in (here, there)]
    handle = source.initialize_xfer("WRITE", *lists, "target", b"written")
    began = time.monotonic()
    state = source.transfer(handle)
    posted = state
    came = told = None
    while came is None or told is None or state == "PROC":
        now = time.monotonic() - began
        if now > 60:
            sys.exit("no transfer in a minute")
        if came is None and numpy.array_equal(here, there):
            came = now
        if told is None and target.get_new_notifs():
            told = now
        if state == "PROC" and now >= later:
            state = source.check_xfer_state(handle)
    telemetry = source.get_xfer_telemetry(handle)
    source.release_xfer_handle(handle)
    return (came, told, telemetry.xferDuration / 1e6, telemetry.totalBytes) if posted == "PROC" else None


def pending(later):
    for _ in range(30):
        if seen := write(later):
            return seen
    sys.exit("every transfer was done when it was posted")


pending(0)  # the first one connects
for words, later in (("asked at once:    ", 0), (f"asked after {LATER} s:", LATER)):
    came, told, duration, size = pending(later)
    print(
        f"{words} bytes there after {came:.1f} s, target told after {told:.1f} s,"
        f" xferDuration {duration:.1f} s for {size} bytes"
    )
    if came > LATER / 2 or not later <= told < later + LATER / 2 or not later <= duration < later + LATER / 2:
        sys.exit("the behaviour has changed")
PYTHON
