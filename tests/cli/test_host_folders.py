"""Every command that reads journals reads those of several hosts below one path, and mixes none of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests import journals
from tests.command_line import exit_code
from tests.exporters.sidecar.routed_engines import Fleet

Printed = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hosts with the same journals of two engines, with blocks and recorded KV events."""
    path = tmp_path_factory.mktemp("hosts")
    (path / "a").mkdir()
    fleet = Fleet(path / "a", 1, lose=False)
    fleet.serve(20)
    fleet.stop()
    shutil.copytree(path / "a", path / "b")
    return path


@pytest.fixture
def copied(hosts: Path, tmp_path: Path) -> Path:
    shutil.copytree(hosts, tmp_path, dirs_exist_ok=True)
    return tmp_path


def printed(capsys: Printed, *words: str | Path) -> Any:
    assert exit_code(*words) in (0, 1, 3)
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("by", ["", "engine"])
def test_summary_has_twice_what_one_host_has(hosts: Path, capsys: Printed, by: str) -> None:
    one = printed(capsys, "summary", hosts / "a", "--by", by or "rank", "--format", "json")
    both = printed(capsys, "summary", hosts, "--by", by or "rank", "--format", "json")

    assert [2 * one[-1]["requests"], 2 * one[-1]["prompt_tokens"]] == [
        both[-1]["requests"],
        both[-1]["prompt_tokens"],
    ]
    if by:
        names = [row["group"] for row in both[:-1]]
        assert ["vllm 0.32.0 pid 4000 in a", "vllm 0.32.0 pid 4000 in b"] == sorted(names)


def test_facts_lie_in_the_folder_of_their_host(copied: Path, capsys: Printed) -> None:
    before = printed(capsys, "summary", copied, "--by", "engine", "--format", "json")
    assert 0 == exit_code("journals", "compact", copied)
    table = capsys.readouterr().out
    assert {"a/engine", "b/engine"} <= set(re.findall(r"\b[ab]/engine", table)), table
    assert 4 == len([*copied.glob("[ab]/.kvledger-facts/*.session")])

    assert before == printed(capsys, "summary", copied, "--by", "engine", "--format", "json")
    shutil.rmtree(next(copied.glob("b/engine-*")))
    assert before == printed(capsys, "summary", copied, "--by", "engine", "--format", "json")


def test_facts_that_a_host_wrote_name_the_host(copied: Path, capsys: Printed) -> None:
    """Each host may compact its own journals, where the folder is flat."""
    before = printed(capsys, "summary", copied, "--by", "engine", "--format", "json")
    for host in "ab":
        assert 0 == exit_code("journals", "compact", copied / host)
    capsys.readouterr()

    assert before == printed(capsys, "summary", copied, "--by", "engine", "--format", "json")


def test_ls_and_prune_name_the_host(copied: Path, capsys: Printed) -> None:
    rows = printed(capsys, "journals", copied, "--format", "json")
    assert 8 == len({row["journal"] for row in rows})

    pruned = printed(capsys, "journals", "prune", copied, "--most", "1", "--yes", "--format", "json")
    assert (8, 0) == (len(pruned["journals"]), pruned["kept"])
    assert [] == [*copied.glob("*/engine-*"), *copied.glob("*/events-*")]


def test_routing_has_the_engines_of_all_hosts(hosts: Path, capsys: Printed) -> None:
    found = printed(capsys, "check", "routing", hosts, "--format", "json")

    assert 40 == found["requests"]
    assert 2 * ["vllm 0.32.0 pid 4000 in a"] + 2 * ["vllm 0.32.0 pid 4000 in b"] == found["engines"]


def test_show_has_a_request_of_one_id_from_each_host(hosts: Path, capsys: Printed) -> None:
    assert 0 == exit_code("show", hosts, "r-3-0", "--format", "json")

    output = capsys.readouterr().out
    assert "vllm 0.32.0 pid 4000 in a" in output and "vllm 0.32.0 pid 4000 in b" in output


def test_usage_has_the_calls_of_all_hosts(hosts: Path, tmp_path: Path, capsys: Printed) -> None:
    (tmp_path / "usage.jsonl").write_text('{"id": "r-3-0", "usage": {"prompt_tokens": 1}}\n')

    assert exit_code("check", "usage", hosts, "--log", tmp_path / "usage.jsonl", "--format", "json") in (
        0,
        1,
        3,
    )
    calls = json.loads(capsys.readouterr().out)["calls"]
    assert 1 == calls["unexplained"]


@pytest.mark.parametrize(
    "words",
    [
        ["audit", "{}", "--format", "json"],
        ["why", "{}", "--format", "json"],
        ["whatif", "{}", "--format", "json"],
        ["summary", "prefixes", "{}", "--format", "json"],
        ["summary", "blocks", "{}", "--format", "json"],
        ["why", "turns", "{}", "--format", "json"],
        ["diff", "{}/a", "{}", "--format", "json"],
        ["audit", "follow", "{}", "--format", "json"],
        ["export", "html", "{}", "-o", "-"],
        ["export", "timeline", "{}", "-o", "-"],
    ],
    ids=lambda words: words[0],
)
def test_a_command_reads_the_folder(copied: Path, capsys: Printed, words: list[str]) -> None:
    code = exit_code(*(word.format(copied) for word in words))

    output = capsys.readouterr()
    assert code in (0, 1, 3) and "no kvledger journal" not in output.err, output.err


def test_a_folder_of_other_things_gives_one_sentence(tmp_path: Path, capsys: Printed) -> None:
    journals.clean(tmp_path / "other" / "deep" / "engine-1")

    assert 2 == exit_code("audit", tmp_path)
    assert f"{tmp_path} holds no kvledger journal.\n" == capsys.readouterr().err
