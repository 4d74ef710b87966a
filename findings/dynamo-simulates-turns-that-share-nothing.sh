#!/usr/bin/env bash
# Dynamo's replay: the turns of a synthetic session share nothing, so multi-turn traffic has a hit rate of 0.
#
# Versions: ai-dynamo-runtime 1.6.1 (PyPI wheel), CPython 3.11; its offline replay of a synthetic workload, with
# the default engine and one worker.
# Expected: a turn of a conversation repeats the turns before it. So with `turns_per_session` 5 a later turn hits what
# its session has in the cache, if the cache has room for all.
# Behaviour: every turn has `input_tokens` tokens, and none of an earlier turn: of 100,000 tokens in 20 sessions none is
# reused, as in 100 single requests. The report has the sessions' ids and counts their turns from 0 to 4.
# `shared_prefix_ratio` makes tokens equal, but for all sessions of a group: with one group and a ratio of 0.5, as much
# is reused by turns as by single requests.
# So a hit rate from such a run is not one of multi-turn traffic.
#
# Output seen (2026-11-28):
#   ratio 0.0, 100 single requests:    100000 input tokens, 0 reused
#   ratio 0.0, 20 sessions of 5 turns: 100000 input tokens, 0 reused
#   ratio 0.5, 100 single requests:    100000 input tokens, 50688 reused
#   ratio 0.5, 20 sessions of 5 turns: 100000 input tokens, 50688 reused
set -eu
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check ai-dynamo-runtime==1.6.1
"$folder/venv/bin/python" - 2>/dev/null <<'PYTHON'
import sys

from dynamo._core import run_mocker_synthetic_trace_replay

seen = []
for ratio, groups in ((0.0, 0), (0.5, 1)):
    for sessions, turns in ((100, 1), (20, 5)):
        result = run_mocker_synthetic_trace_replay(
            1000,
            200,
            sessions,
            arrival_interval_ms=1_000_000.0,
            turns_per_session=turns,
            shared_prefix_ratio=ratio,
            num_prefix_groups=groups,
            capture_per_request=True,
        )
        requests = result.per_request
        if len({one["turn_index"] for one in requests}) != turns or len(requests) != 100:
            sys.exit("the behaviour has changed")
        seen.append(tuple(sum(one[name] for one in requests) for name in ("input_length", "reused_input_tokens")))
        words = f"{sessions} sessions of {turns} turns:" if turns > 1 else f"{sessions} single requests:"
        print("ratio {}, {:23} {} input tokens, {} reused".format(ratio, words, *seen[-1]))
if seen != [(100_000, 0)] * 2 + [(100_000, 50_688)] * 2:
    sys.exit("the behaviour has changed")
PYTHON
