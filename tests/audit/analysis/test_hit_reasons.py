"""Each reason by the figures that show it, and the near miss that does not."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvledger.audit.analysis.hit_reasons import Outside, Probe, reasons

ENGINE = Outside(
    prefix_caching=True,
    unit=16,
    longest=4096,
    capacity=100_000,
    queried=10_000,
    hits=100,
    computed=11_000,
    prompts=100,
    prompt_tokens=10_000,
)
PROBE = Probe(unit=16, units=4, again=64, last_differs=64, half=32, counted=160, told=160)


def ids(engine: Outside, probe: Probe | None = None) -> list[str]:
    return [each.id for each in reasons(engine, probe)]


def test_an_engine_that_hits_has_no_reason() -> None:
    assert [] == ids(replace(ENGINE, hits=500)) == ids(replace(ENGINE, hits=500), PROBE)
    assert ["nothing-shared"] == ids(replace(ENGINE, hits=499)) == ids(ENGINE, PROBE)


def test_an_engine_without_traffic_has_none_either() -> None:
    assert [] == ids(replace(ENGINE, prompt_tokens=0, prompts=0, queried=0, hits=0))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"prefix_caching": False}, ["caching-off"]),
        ({"short_prompts": 50}, ["short-prompts"]),
        ({"short_prompts": 49}, ["nothing-shared"]),
        ({"longest": 16}, ["short-prompts"]),
        ({"longest": 17}, ["nothing-shared"]),
        ({"computed": 100_001}, ["cache-too-small", "nothing-shared"]),
        ({"computed": 100_001, "capacity": 700}, ["cache-too-small"]),
        ({"computed": 100_000}, ["nothing-shared"]),
        ({"engines": 2}, ["spread", "nothing-shared"]),
        ({"align": True}, ["few-states", "nothing-shared"]),
        ({"drafts": True}, ["drafts", "nothing-shared"]),
        ({"queried": 0.0, "hits": 0.0}, ["not-counted", "nothing-shared"]),
        ({"capacity": None, "unit": None}, []),
    ],
)
def test_what_metrics_show(changes: dict[str, float], expected: list[str]) -> None:
    assert expected == ids(replace(ENGINE, **changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"again": 0, "last_differs": 0, "half": 0}, "never-hits"),
        ({"again": 0, "last_differs": 0, "half": 0, "spread": True}, "spread"),
        ({"again": 48, "last_differs": 48, "half": 16}, "last-unit-dropped"),
        ({"again": 48, "last_differs": 48, "half": 0}, "larger-unit"),
        ({"last_differs": 48}, "next-token-hashed"),
        ({"half": 0}, "few-states"),
        ({"again": 32, "last_differs": 32}, "larger-unit"),
        ({"counted": 0}, "not-counted"),
    ],
)
def test_what_a_probe_shows(changes: dict[str, int], expected: str) -> None:
    assert [expected, "nothing-shared"] == ids(ENGINE, replace(PROBE, **changes))


def test_a_probe_of_one_unit_has_no_half() -> None:
    assert ["nothing-shared"] == ids(ENGINE, Probe(unit=16, units=1, again=16, last_differs=16, half=0))
