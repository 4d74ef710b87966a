"""The one reader of text that others wrote."""

from __future__ import annotations

import ast
import gzip
from pathlib import Path
from typing import Any

import pytest

from kvledger.audit import foreign
from kvledger.audit.errors import LedgerError
from kvledger.audit.foreign import Sample, Unreadable, count, families, lines_of, parsed, whole_number
from kvledger.audit.release_semantics import release


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "is no JSON"),
        (b"{", "is no JSON"),
        (b"\xff", "is no JSON"),
        (b'"\\ud800"', "is no JSON"),
        (b"NaN", "is no JSON"),
        (b"[" * 100_000, "is nested too deeply"),
        (b"9" * 5_000, "is not as it should be: Integer value out of range"),
        (b"1e999", "is not as it should be: Number out of range"),
    ],
)
def test_json_that_can_not_be_read_has_a_reason(text: bytes, why: str) -> None:
    with pytest.raises(Unreadable, match=f"^{why}$"):
        parsed(text, Any)


def test_json_of_another_type_has_a_reason() -> None:
    with pytest.raises(Unreadable, match=r"^is not as it should be: Expected `object`, got `array`$"):
        parsed(b"[1]", dict[str, int])
    assert {"a": 1} == parsed('{"a": 1}', dict[str, int])


def test_a_long_line_is_cut_and_refused_and_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "MOST_LINE_BYTES", 10)
    (tmp_path / "log").write_bytes(b'"1"\n\n"' + b"x" * 95 + b'"\n"3"')
    found = dict(lines_of(tmp_path / "log"))

    assert [1, 3, 4] == list(found)
    with pytest.raises(Unreadable, match="longer than 10 bytes"):
        parsed(found[3], str)
    assert ("1", "3") == (parsed(found[1], str), parsed(found[4], str))


def test_a_packed_file_unpacks_to_a_bound_and_a_damaged_one_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = gzip.compress(b"1\n" * 1000, mtime=0)
    path = tmp_path / "log.gz"
    path.write_bytes(whole)
    assert 1000 == len(list(lines_of(path)))
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 0x10
        for data in (bytes(changed), whole[:place]):
            path.write_bytes(data)
            try:
                list(lines_of(path))
            except LedgerError as error:
                assert str(error).startswith(f"{path} can't be read: ")
    path.write_bytes(whole)
    monkeypatch.setattr(foreign, "MOST_UNPACKED_BYTES", 1_999)
    with pytest.raises(LedgerError, match="unpacks to more than 1,999 bytes"):
        list(lines_of(path))


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(LedgerError, match="can't be read: "):
            list(lines_of(path))


def test_a_count_may_be_text() -> None:
    assert [7, 7, 7] == [count(value) for value in (7, 7.0, "7")]
    for value in (
        True,
        -1,
        1.5,
        "",
        "-1",
        "1.5",
        "9" * 19,
        1 << 53,
        float("inf"),
        float("nan"),
        None,
        [],
        {},
    ):
        with pytest.raises(Unreadable, match="has a token count that is no number"):
            count(value)


def test_a_number_of_many_digits_is_none() -> None:
    assert (16, None, None, None) == tuple(map(whole_number, ("16", "9" * 4_300, "٣", "-1")))
    assert ((0, 12, 0), (), ()) == (release("0.12.0.post2+cpu"), release("9" * 4_300), release("v1"))


METRICS = """
# HELP vllm:hits_total Hits.
# TYPE vllm:hits_total counter
vllm:hits_total{engine="0",model_name="a \\"b\\" \\\\ \\n}"} 3.0
vllm:hits_total{engine="1",} 1e3 1700000000000
vllm:hits_total -1
# TYPE vllm:empty gauge
vllm:other{le="+Inf"} what {
vllm:hits_total_more 5
"""


def test_samples_are_read_by_name() -> None:
    found = families(METRICS, frozenset({"vllm:hits_total", "vllm:empty"}))

    assert {
        "vllm:hits_total": [
            Sample("vllm:hits_total", {"engine": "0", "model_name": 'a "b" \\ \n}'}, 3.0),
            Sample("vllm:hits_total", {"engine": "1"}, 1000.0),
            Sample("vllm:hits_total", {}, -1.0),
        ],
        "vllm:empty": [],
    } == found


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("a{", "labels in line 2 that are none"),
        ('a{b="c} 1', "labels in line 2 that are none"),
        ("a{b=1} 1", "labels in line 2 that are none"),
        ("a", None),
        ("a ", "a value in line 2 that is no number"),
        ("a {} x", "a value in line 2 that is no number"),
        ("a 0x10", "a value in line 2 that is no number"),
        ("a " + "1" * 41, "a value in line 2 that is no number"),
        ('a{b="' + "c" * (64 << 10) + '"} 1', "a line of more than 65,536 bytes"),
    ],
)
def test_a_sample_that_can_not_be_read_has_a_reason(line: str, why: str | None) -> None:
    if why is None:
        assert {} == families(f"b 1\n{line}\n", frozenset({"a"}))
        return
    with pytest.raises(Unreadable, match=why):
        families(f"b 1\n{line}\n", frozenset({"a"}))


def test_samples_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "MOST_SAMPLES", 2)
    assert 2 == len(families("a 1\na 1\n", frozenset({"a"}))["a"])
    with pytest.raises(Unreadable, match="more than 2 samples"):
        families("a 1\na 1\na 1\n", frozenset({"a"}))


# --- who else parses ------------------------------------------------------------------------------------

ROOT = Path(foreign.__file__).parents[1]
PARSERS = {
    "loads",
    "load",
    "safe_load",
    "decode",
    "Decoder",
    "text_string_to_metric_families",
    "reader",
}
MODULES = {"json", "yaml", "msgspec", "csv", "tomllib", "pickle", "marshal"}
OURS = {
    "audit/foreign.py": "the one reader",
    "audit/demo/run.py": "what the demo's own process wrote",
    "audit/demo/sglang/run.py": "what the demo's own process wrote",
    "audit/analysis/usage.py": "what this process encoded",
    "audit/checks/engine_metrics.py": "data of this package",
    "audit/conformance/connector_classes.py": "options that were read, with a folder put in",
    "audit/entry/attach.py": "events of this process",
    "audit/events.py": "what this process encoded",
    "audit/faults/catalogue.py": "data of this package",
    "audit/journal/reader.py": "journals: bounds are those of events",
    "audit/replay/checkpoint.py": "a file with a checksum that this user wrote",
    "audit/replay/serialize.py": "a file with a checksum that this user wrote",
    "audit/repro/workers.py": "what a process of its own answers",
    "audit/simulate/study.py": "what this process encoded",
    "audit/simulate/processes.py": "what a process of its own answers",
    "dashboards/boards.py": "data of this package",
    "dashboards/check.py": "data of this package",
    "dashboards/deploy_files.py": "data of this package",
    "exporters/facts/kept.py": "a file with a checksum that this user wrote",
    "exporters/kv_events.py": "batches of a publisher: one function, whose errors are counted",
    "exporters/sidecar/follower.py": "what a process of its own answers",
    "exporters/sidecar/web_config.py": "YAML of the operator, 1 MiB at most",
}


def parsers(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in PARSERS:
            root = ast.unparse(node.value)
            if root.split(".")[0] in MODULES and "(" not in root:
                found.add(ast.unparse(node))
    return found


def test_every_other_place_that_parses_says_what() -> None:
    found = {}
    for folder in ("audit", "exporters", "dashboards"):
        for path in (ROOT / folder).rglob("*.py"):
            if names := parsers(ast.parse(path.read_bytes())):
                found[str(path.relative_to(ROOT))] = names
    assert {} == {name: what for name, what in found.items() if name not in OURS}
    assert {} == {name: why for name, why in OURS.items() if name not in found}
