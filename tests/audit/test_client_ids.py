"""Ids that clients know, by the rules of vLLM's API server; the ids were seen on a real server of 0.32."""

from __future__ import annotations

import pytest

from kvledger.audit.client_ids import Part, part_of, rank
from kvledger.audit.release_semantics import has_random_suffix

BEAM = "cmpl-a-0123456789abcdef0123456789abcdef-beam-1-0a1b2c3d"


@pytest.mark.parametrize(
    ("request_id", "part"),
    [
        ("cmpl-client-4-0-0a1b2c3d", Part("cmpl-client-4", 0, -1)),
        ("cmpl-client-4-1-12345678", Part("cmpl-client-4", 1, -1)),
        ("2_cmpl-client-4-1-0a1b2c3d", Part("cmpl-client-4", 1, 2)),
        ("chatcmpl-client-4-0a1b2c3d", Part("chatcmpl-client-4", 0, -1)),
        ("3_chatcmpl-x-0a1b2c3d", Part("chatcmpl-x", 0, 3)),
        ("chatcmpl-x_1-0a1b2c3d", Part("chatcmpl-x", 1, -1)),
        ("resp_7f_2-0a1b2c3d", Part("resp_7f", 2, -1)),
        (BEAM, Part("cmpl-a", 0, 1)),
        ("17-0a1b2c3d", Part("17", 0, -1)),
        ("1_17-0a1b2c3d", Part("17", 0, 1)),
        ("cmpl--0-0a1b2c3d", Part("cmpl--0", 0, -1)),
        ("", Part("", 0, -1)),
    ],
)
def test_a_request_belongs_to_its_call(request_id: str, part: Part) -> None:
    assert part == part_of(request_id)


def test_releases_before_0_14_append_no_random_digits() -> None:
    assert not has_random_suffix("vllm", "0.12.0")
    assert has_random_suffix("vllm", "0.14.0")
    assert not has_random_suffix("sglang", "0.14.0")
    assert Part("chatcmpl-client-deadbeef", 0, -1) == part_of("chatcmpl-client-deadbeef", suffixed=False)
    assert -1 == rank("chatcmpl-client", "chatcmpl-client-deadbeef", suffixed=False)


@pytest.mark.parametrize(
    "asked",
    [
        "2_cmpl-client-4-1-0a1b2c3d",
        "cmpl-client-4",
        "client-4",
        "cmpl-client-4-1",
        "cmpl-client-4-1-0a1b2c3d",
        "2_cmpl-client-4-1",
        "2_cmpl-client-4-1-0a1",
        "4bf92f3577b34da6a3ce929d0e0e4736",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    ],
)
def test_a_client_finds_its_request_by(asked: str) -> None:
    traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-1111111111111111-00"

    assert 0 <= rank(asked, "2_cmpl-client-4-1-0a1b2c3d", traceparent)


@pytest.mark.parametrize(
    "neighbour",
    [
        "cmpl-client-40-0-0a1b2c3d",
        "cmpl-client-4x-0-0a1b2c3d",
        "chatcmpl-client-4-0a1b2c3d",
        "cmpl-xclient-4-0-00000000",
    ],
)
def test_a_neighbour_is_not_found(neighbour: str) -> None:
    for asked in ("cmpl-client-4", "cmpl-client-4-0", "cmpl-client-4-0-"):
        assert -1 == rank(asked, neighbour)


def test_random_digits_may_be_cut_short() -> None:
    assert 5 == rank("cmpl-4f", f"cmpl-4f{30 * 'a'}-0-0a1b2c3d")
    assert 5 == rank("10-0", "10-0a1b2c3d")
    assert -1 == rank("cmpl-", f"cmpl-4f{30 * 'a'}-0-0a1b2c3d")
    assert -1 == rank("cmpl-1000000", "cmpl-10000001-0-0a1b2c3d")


def test_the_call_is_meant_before_a_part_of_another_call() -> None:
    """``cmpl-a-1`` is a call, and the second prompt of the call ``cmpl-a`` without its random digits."""
    assert rank("cmpl-a-1", "cmpl-a-1-0-0a1b2c3d") < rank("cmpl-a-1", "cmpl-a-1-0a1b2c3d")


def test_an_id_that_ends_like_a_conversation_of_a_batch_is_found() -> None:
    assert 1 == rank("chatcmpl-user_3", "chatcmpl-user_3-0a1b2c3d")
