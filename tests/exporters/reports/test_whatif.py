"""`kvledger whatif` and `kvledger summary prefixes`: what they print and refuse."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests import journals
from tests.audit.analysis.test_blocks import Recording, label

from kvledger import cli

Run = Callable[..., tuple[Any, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process: exit code, standard output, standard error."""

    def call(*words: str | Path) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvledger", *map(str, words)])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        printed = capsys.readouterr()
        return exited.value.code, printed.out, printed.err

    return call


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A pool of four blocks and two prefixes of three blocks, which evict each other's ends."""
    a, b = [11 << 40, 12 << 40, 13 << 40], [21 << 40, 22 << 40, 23 << 40]
    recording = Recording(blocks=5)
    recording.request([], [*zip((1, 2, 3), a, strict=True)])
    recording.request([], [*zip((4, 3, 2), b, strict=True)])
    for _ in range(2):
        recording.request([1], [*zip((2, 3), a[1:], strict=True)])
        recording.request([4], [*zip((3, 2), b[1:], strict=True)])
    recording.request([4, 3, 2], [(1, 24 << 40)])
    return journals.write(
        tmp_path / "blocks",
        recording.events,
        level="blocks",
        configuration={"block_bytes": 1024, "workers": 2},
    )


def trace_file(folder: Path, requests: int = 600) -> Path:
    """A request trace of conversations; every line names the blocks of its whole prompt."""
    rng, talks, ids = random.Random(3), list[list[int]](), iter(range(1, 1 << 30))
    systems = [[next(ids) for _ in range(rng.randrange(1, 6))] for _ in range(8)]
    lines = []
    for number in range(requests):
        if len(talks) < 30 or rng.random() < 0.3:
            talks.append(list(rng.choice(systems)))
        if len(talks) > 30:
            talks.pop(rng.randrange(len(talks)))
        talk = rng.choice(talks)
        talk += [next(ids) for _ in range(rng.randrange(1, 4))]
        tokens = 64 * len(talk) - rng.randrange(64)
        line = {"timestamp": number, "input_length": tokens, "output_length": 9, "hash_ids": list(talk)}
        lines.append(json.dumps(line))
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


# --- journals -----------------------------------------------------------------------------------------------


def test_whatif_begins_with_the_conclusion_and_its_calibration(run: Run, journal: Path) -> None:
    code, out, err = run("whatif", journal)

    assert (0, "") == (code, err)
    first = " ".join(out.split())
    assert first.startswith("Twice the blocks (8) would turn"), out
    assert "points of" in first and "misses into hits; more than 6 blocks gain nothing." in first
    assert "a residual of +0.00 points (7 of 7 admissions equal)" in first
    assert "4 (present)" in first


def test_whatif_of_several_engines_begins_with_the_one_that_gains_most(
    run: Run, journal: Path, tmp_path: Path
) -> None:
    shutil.copytree(journal, tmp_path / "other")

    code, out, _ = run("whatif", tmp_path)

    assert 0 == code
    assert out.startswith("Of 2 engines, vllm 0.32.0 pid 4000 would gain most by more blocks: ")


def test_whatif_as_json_has_the_curve_and_the_second_tier(run: Run, journal: Path) -> None:
    code, out, _ = run("whatif", journal, "--blocks", "4,6", "--tiers", "12KiB", "--format", "json")
    [one] = json.loads(out)["engines"]

    assert 0 == code
    assert [4, 6] == [point["blocks"] for point in one["curve"]]
    assert one["calibration"]["trusted"] and one["ideal"]["blocks"] is None
    assert (2048, [6]) == (one["block_bytes"], [tier["blocks"] for tier in one["tiers"]])


@pytest.mark.parametrize("window", [(), ("--since", "2020-01-01"), ("--since", "1h")])
def test_whatif_prints_the_same_from_kept_rows(
    run: Run, journal: Path, tmp_path: Path, window: tuple[str, ...]
) -> None:
    words = ("whatif", tmp_path, "--tiers", "12KiB", "--format", "json", *window)
    before = run(*words)
    code, out, _ = run("journals", "compact", tmp_path)
    assert 0 == before[0] == code and "of Parquet." in " ".join(out.split())
    assert before == run(*words)
    shutil.rmtree(journal)
    if window[-1:] == ("1h",):
        assert 2 == run(*words)[0], "the trace that is left ended before the window"
    else:
        assert before == run(*words)


def test_a_replay_that_differs_from_the_engine_says_so(run: Run, tmp_path: Path) -> None:
    """The engine reports a hit that its own blocks do not have."""
    recording = Recording()
    recording.request([], [(1, 11), (2, 12), (3, 13)])
    recording.request([], [(4, 21), (5, 22), (6, 23)])
    admitted = recording.events[-2]
    recording.events[-2] = msgspec.structs.replace(admitted, local_tokens=32)
    path = journals.write(tmp_path / "blocks", recording.events, level="blocks")

    _, out, _ = run("whatif", path)
    words = " ".join(out.split())
    assert "a residual of -32.65 points (1 of 2 admissions equal)" in words
    assert "more than 2 points, so do not trust the figures below" in words


def test_prefixes_are_listed_by_what_the_cache_saved_and_lost(run: Run, journal: Path) -> None:
    code, out, _ = run("summary", "prefixes", journal, "--format", "json")
    result = json.loads(out)

    assert 0 == code
    assert [label(24 << 40), label(13 << 40)] == [prefix["label"] for prefix in result["shown"]]
    assert [(80, 64), (32, 64)] == [(row["saved_tokens"], row["lost_tokens"]) for row in result["shown"]]
    assert (112, 128) == (result["saved_tokens"], result["lost_tokens"])
    assert run("summary", "prefixes", journal)[1].startswith(
        "2 prefixes: the cache saved 112 tokens; 128 tokens"
    )


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("whatif",), ("summary", "prefixes")])
def test_a_journal_of_level_tokens_is_refused_in_one_sentence(
    run: Run, tmp_path: Path, command: tuple[str, ...]
) -> None:
    code, out, err = run(*command, journals.clean(tmp_path / "tokens"))
    assert (2, "", 1) == (code, out, len(err.splitlines()))
    assert "was recorded at level tokens" in err and "KVLEDGER_LEVEL=blocks" in err


def test_an_engine_with_several_groups_is_refused(run: Run, tmp_path: Path) -> None:
    recording = Recording()
    recording.events[0] = msgspec.structs.replace(recording.events[0], groups=[0, 16, 2, 1, 16, 1])
    code, _, err = run("whatif", journals.write(tmp_path / "blocks", recording.events, level="blocks"))
    assert 2 == code and "one KV cache group of full attention" in err and "kvledger simulate" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--blocks", "many"), "'many' is no list of block counts"),
        (("--blocks", "0"), "'0' is no list of block counts"),
        (("--tiers", "40 parsecs"), "'40 parsecs' is no size"),
    ],
)
def test_a_wrong_option_is_refused_in_one_sentence(
    run: Run, journal: Path, words: tuple[str, str], sentence: str
) -> None:
    code, out, err = run("whatif", journal, *words)
    assert (2, "", 1) == (code, out, len(err.splitlines()))
    assert sentence in err


def test_tiers_need_the_bytes_of_a_block(run: Run, tmp_path: Path) -> None:
    path = trace_file(tmp_path, 9)
    assert "add --block-bytes" in run("whatif", path, "--tiers", "1GiB")[2]
    assert "add --blocks" in run("whatif", path, "--tiers", "1GiB", "--block-bytes", "1MiB")[2]
    assert 0 == run("whatif", path, "--tiers", "1GiB", "--block-bytes", "1MiB", "--blocks", "9")[0]


def test_a_broken_request_trace_is_refused_with_its_line(run: Run, tmp_path: Path) -> None:
    path = trace_file(tmp_path, 2)
    path.write_text(path.read_text() + '{"hash_ids": [1]}\n')
    code, _, err = run("whatif", path)
    assert 2 == code and "line 3 is no request of a trace" in err
