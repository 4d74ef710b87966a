"""The table of `make proof NAME=parallel`: what counts as a problem, and how it is written into its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import page
from proofs.parallel import report
from proofs.parallel.load import ANSWERS, LEFT

CALLS = {"equal": ANSWERS - 20, "explained": 20, "unexplained": 0, "unknown": 0, "not in the trace": 0}
ROW = report.Row(
    options="--data-parallel-size 2",
    requests=(70, 65),
    calls=CALLS,
    causes={"one-sample": 12, "one-prompt": 8},
    unlogged={"aborted": LEFT},
    violations=(),
    drifts={"metrics/aborted": 1},
    verdict="clean",
    workers=2,
    verified=(300, 300),
    moved=(20, 21),
)


def problems(**changes: Any) -> list[str]:
    return list(report.problems(ROW._replace(**changes), 2, 2, ANSWERS, LEFT))


def test_a_call_without_a_cause_is_a_problem() -> None:
    assert [] == problems()
    unexplained = CALLS | {"explained": 19, "unexplained": 1}
    assert ["1 calls are unexplained"] == problems(calls=unexplained)
    assert ["1 calls are unknown"] == problems(calls=CALLS | {"equal": CALLS["equal"] - 1, "unknown": 1})
    assert [f"{ANSWERS - 1} of {ANSWERS} calls are in the log"] == problems(calls=CALLS | {"explained": 19})


def test_an_engine_or_a_worker_that_nobody_observed_is_a_problem() -> None:
    assert 1 == len(problems(requests=(135,)))
    assert 1 == len(problems(requests=(135, 0)))
    assert ["of 2 workers, 1 verified the KV in their blocks"] == problems(workers=1)
    assert [] == problems(workers=None), "no worker is asked below level content"


def test_a_finding_that_was_induced_must_be_there() -> None:
    def found(**changes: Any) -> list[str]:
        row = ROW._replace(**changes)
        return list(report.problems(row, 2, 2, ANSWERS, LEFT, ("content/transfer",)))

    assert [] == found(violations=("content/transfer",), verdict="violated")
    assert 1 == len(found())
    assert 1 == len(found(violations=("content/transfer", "blocks/balance"), verdict="violated"))
    assert ["wrong"] == found(violations=("content/transfer",), verdict="violated", wrong=("wrong",))


def test_findings_and_calls_that_vanished_are_problems() -> None:
    assert ["the audit is violated: blocks/balance"] == problems(
        violations=("blocks/balance",), verdict="violated"
    )
    assert ["the audit is unknown: no violation"] == problems(verdict="unknown")
    assert 1 == len(problems(unlogged={"aborted": LEFT + 1}))
    assert 1 == len(problems(unlogged={"length_capped": 1}))


def test_the_section_of_the_page_is_replaced_alone(tmp_path: Path) -> None:
    path = tmp_path / "usage.md"
    path.write_text(f"# Page\n\n{report.HEADING}\nold\n\n## One call\n\nkept\n")

    page.put(report.section([report.line(ROW)], "content", "vLLM 0.32.0"), path)

    before, _, rest = path.read_text().partition(report.HEADING)
    section, _, after = rest.partition("\n## ")
    assert "# Page\n\n" == before and "One call\n\nkept\n" == after
    assert (
        "| 70 + 65 " in section
        and "8 one-prompt, 12 one-sample" in section
        and "20 of 21" in section
        and "old" not in section
    )


def test_the_page_keeps_the_lines_of_servers_that_were_not_run(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"# Page\n\n{report.HEADING}\nold\n")
    other = ROW._replace(options="prefill and decode, NixlConnector")
    lines = [report.line(ROW), report.line(other)]
    page.put(report.section(lines, "content", "vLLM 0.32.0"), path)
    assert lines == report.written(path)

    again = report.line(other._replace(requests=(9, 9)))
    assert [lines[0], again] == report.merged(report.written(path), [again])
