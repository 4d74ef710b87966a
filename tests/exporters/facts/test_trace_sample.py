"""Samples of block traces: the whole one changes nothing, and a part of it estimates the hits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.audit.analysis.test_simulated_pool import begin
from tests.exporters.facts.test_kept_blocks import SECOND, WINDOWS, Engine, ended, from_journal

from kvledger.audit.analysis.block_trace import CACHED, RELEASE, BlockTrace, RecordedRequest
from kvledger.audit.analysis.trace_sample import TraceSample, take_sample
from kvledger.audit.analysis.whatif import Options, WhatIf, what_if
from kvledger.audit.replay.block_traces import block_trace
from kvledger.audit.replay.windows import Window
from kvledger.exporters.facts.compact import compact
from kvledger.exporters.facts.kept_blocks import recorded_blocks

pytest.importorskip("libcachesim")

from kvledger.exporters.cache_policies import policies

OPTIONS = Options(policies=policies("lru"), blocks=[20, 39, 78])


def without_sample(result: WhatIf) -> tuple[object, ...]:
    return result.curve, result.ideal, result.preemptions, result.resets, result.calibration.residual_points


@pytest.mark.parametrize("chosen", WINDOWS[:3])
def test_a_sample_of_everything_has_the_hits_of_the_whole_trace(tmp_path: Path, chosen: Window) -> None:
    path = ended(tmp_path).path
    whole, sample = block_trace(from_journal(path), chosen, 1.0)
    assert sample is not None and [] == whole.operations
    sampled = what_if(whole, OPTIONS, sample=sample)
    assert without_sample(what_if(block_trace(from_journal(path), chosen)[0], OPTIONS)) == without_sample(
        sampled
    )
    assert (1.0, 0.0) == (sampled.calibration.sample_share, sampled.calibration.sample_points)


def test_kept_rows_have_the_sample_of_the_whole_journal(tmp_path: Path) -> None:
    engine = Engine(tmp_path, step=60 * SECOND)
    engine.run(400)
    compact(engine.path)
    engine.run(50)
    from_rows = block_trace(recorded_blocks(engine.path), WINDOWS[0], 0.4)
    whole = block_trace(from_journal(engine.path), WINDOWS[0], 0.4)
    curves = [what_if(light, OPTIONS, sample=one) for light, one in (from_rows, whole)]
    assert curves[0] == curves[1] and 0 < curves[0].curve[0].hit_tokens < curves[0].prompt_tokens
    engine.stop()


def sampled(trace: BlockTrace, share: float) -> tuple[BlockTrace, TraceSample]:
    """A sample of a trace whose requests have a life each."""
    requests = [
        RecordedRequest(
            number, number, one.request_id, one.prompt_tokens, lives={number: trace.lives[number]}
        )
        for number, one in enumerate(trace.requests)
    ]
    changes = [
        (kind, life, first, (second,) if kind == CACHED else (), 0)
        for kind, life, first, second in trace.operations
    ]
    return take_sample(trace, requests, lambda: [changes], share)


def conversations(requests: int) -> BlockTrace:
    """Requests of many conversations, eight of which run at the same time."""
    rng, trace = random.Random(5), BlockTrace(block_tokens=16, blocks=2000)
    talks: list[list[int]] = []
    running: list[int] = []
    ids = iter(range(1, 1 << 30))
    systems = [[next(ids) for _ in range(4)] for _ in range(5)]
    for _ in range(requests):
        if len(talks) < 200 or rng.random() < 0.2:
            talks.append(list(rng.choice(systems)))
        if len(talks) > 400:
            talks.pop(rng.randrange(len(talks)))
        talk = rng.choice(talks)
        talk += [next(ids) for _ in range(rng.randrange(1, 6))]
        running.append(begin(trace, list(talk)))
        if len(running) > 8:
            trace.operations.append((RELEASE, running.pop(0), 0, 0))
    return trace


def test_a_sample_estimates_the_hits_of_every_size() -> None:
    trace = conversations(2500)
    options = Options(policies=policies("lru"), blocks=[500, 2000])
    exact = what_if(trace, options)
    whole, sample = sampled(trace, 0.1)
    assert len(sample.trace.operations) < 0.3 * len(trace.operations)
    estimated = what_if(whole, options, sample=sample)
    shares = [point.hit_share for point in exact.curve]
    assert max(shares) - min(shares) > 0.2, "sizes matter"
    assert shares == [pytest.approx(point.hit_share, abs=0.02) for point in estimated.curve]
    assert [] == estimated.block_sizes, "blocks of another size have other hash ids"


def test_a_sample_that_is_too_small_is_named() -> None:
    trace = conversations(300)
    whole, sample = sampled(trace, 0.01)
    found = what_if(whole, Options(policies=policies("lru"), blocks=[2000]), sample=sample)
    assert ["the sample of the present pool has 20 blocks"] == found.calibration.doubts
