"""`kvledger check usage`: tokens told and settled by tenant, cause and sign."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests import journals
from tests.command_line import exit_code
from tests.histories import events

from kvledger.audit.events import Event, RequestAdded, RequestLabels

HISTORY = "A0+0 s200 o+ F"
"""A prompt of 200 tokens, none of them cached."""


def compared(folder: Path, cached: list[int], *words: str, payers: Sequence[str] = ()) -> int:
    """The exit code of ``usage`` for a request of group ``acme`` for each cached figure that was told."""
    lines = []
    for number, told in enumerate(cached):
        stream: list[Event] = []
        for event in events(200, HISTORY):
            if isinstance(event, RequestAdded):
                labels = RequestLabels(group="acme")
                event = replace(event, request_id=f"cmpl-c{number}-0-0a1b2c3d", labels=labels)
            stream.append(event)
        journals.write(folder / "journals" / f"engine-{number}", stream)
        details = {"cached_tokens": told}
        usage = {"prompt_tokens": 200, "completion_tokens": 1, "prompt_tokens_details": details}
        team = {"team": payers[number]} if payers else {}
        lines.append(json.dumps({"id": f"cmpl-c{number}", "usage": usage, **team}))
    log = folder / "usage.jsonl"
    log.write_text("\n".join(lines))
    return exit_code("check", "usage", folder / "journals", "--log", log, *words)


def row(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("acme")]
    return " ".join(line.split())


def test_a_constant_offset_of_a_tenant_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 1 == compared(tmp_path, [16, 16, 16])
    assert "acme ? unexplained cached cached 48 0 +48 +16 in all 3" == row(capsys)

    exit_code("check", "usage", tmp_path / "journals", "--log", tmp_path / "usage.jsonl", "--format", "json")
    (difference,) = json.loads(capsys.readouterr().out)["differences"]
    told = tuple(difference[name] for name in ("tenant", "group", "sign", "told", "settled"))
    assert ("", "acme", "+", 48, 0) == told


def test_who_pays_is_who_the_gateway_says_and_not_the_group_that_a_client_chose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both clients call themselves acme in their request ids; one of them is globex."""
    assert 1 == compared(tmp_path, [16, 32], "--tenant", "team", payers=["acme", "globex"])
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    assert "globex unexplained cached cached 32 0 +32 1 call" in printed
    assert "acme unexplained cached cached 16 0 +16 1 call" in printed
    assert "Calls of group acme are paid by 2 tenants: acme, globex." in printed
    assert not [line for line in printed if "?" in line]


def test_differences_of_several_sizes_are_no_constant_offset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 1 == compared(tmp_path, [16, 16, 17])
    assert "acme ? unexplained cached cached 49 0 +49 +16 to +17 in 3" == row(capsys)


def test_one_call_has_no_constant_offset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 1 == compared(tmp_path, [16, 0])
    assert "acme ? unexplained cached cached 16 0 +16 1 call" == row(capsys)


def test_equal_calls_have_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == compared(tmp_path, [0, 0])
    assert "acme" not in capsys.readouterr().out


def test_a_line_that_stands_twice_is_one_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared(tmp_path, [0, 0])
    log = tmp_path / "usage.jsonl"
    log.write_text("\n".join([log.read_text()] * 2))
    capsys.readouterr()

    assert 0 == exit_code("check", "usage", tmp_path / "journals", "--log", log)
    out = capsys.readouterr().out
    assert "2 calls in the log: 2 equal" in out and "2 lines of the log told of a call again" in out


def test_a_copy_with_another_figure_is_no_copy(tmp_path: Path) -> None:
    compared(tmp_path, [0])
    log = tmp_path / "usage.jsonl"
    log.write_text(
        "\n".join([log.read_text(), log.read_text().replace('"prompt_tokens": 200', '"prompt_tokens": 9')])
    )

    assert 1 == exit_code("check", "usage", tmp_path / "journals", "--log", log)


@pytest.mark.parametrize("text", ["", "{}\n", "no JSON\n"])
def test_a_log_that_tells_of_no_call_is_unknown(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    compared(tmp_path, [0])
    log = tmp_path / "usage.jsonl"
    log.write_text(text)
    capsys.readouterr()

    assert 3 == exit_code("check", "usage", tmp_path / "journals", "--log", log)
    assert not text or "1 line of the log told of no call; line 1 " in capsys.readouterr().out
