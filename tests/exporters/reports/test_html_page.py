"""The page about a trace: one file, everything in it, and plots with data in a real browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests import journals
from tests.histories import events
from tests.simulated_trace import write_trace

from kvledger.audit.checks.auditor import Found
from kvledger.audit.errors import LedgerError
from kvledger.audit.events import Gap, RequestAdded
from kvledger.exporters.reports.page import gather, html, save
from kvledger.exporters.trace.time_series import MOST, TICKS, Series, together

SECTIONS = (
    "Where prompt tokens came from",
    "Hit rate over time",
    "Conclusions",
    "What lost work cost",
    "Why prompt tokens missed the cache",
    "Running and waiting",
    "Preemptions",
    "Work and rework",
    "Drifts",
    "Waits",
    "Most preempted requests",
    "Ledger and engine-reported figures",
    "Journals read",
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    write_trace(folder, 600, engines=2)
    return folder


def test_the_page_loads_nothing_from_a_network(trace: Path) -> None:
    page = html(gather([trace]))

    assert [] == re.findall(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=\"(?!data:,)", page)
    assert "@import" not in page
    assert "url(" not in page


def test_every_section_is_there(trace: Path) -> None:
    page = html(gather([trace]))

    assert list(SECTIONS) == [
        h for h in re.findall(r"<h2>(.*?)</h2>", page.replace("&#x27;", "'")) if h in SECTIONS
    ]


def header(page: str) -> dict[str, str]:
    """The first table, which says what the trace is of."""
    table = page[page.index("<table>") : page.index("</table>")]
    return dict(re.findall(r"<td[^>]*>(.*?)</td><td[^>]*>(.*?)</td>", table))


def test_the_header_says_what_the_trace_is_of(tmp_path: Path) -> None:
    configuration = {"model": "org/<model>", "block_size": 16, "blocks": 8, "connector": "Loader"}
    path = journals.write(tmp_path / "one", events(10, "A0+0 s10 o+ F"), configuration=configuration)

    page = html(gather([path]))

    lines = header(page)
    assert {"Model", "Release", "Connector", "Configuration", "Range", "Engines"} == lines.keys()
    assert ("org/&lt;model&gt;", "Loader", "1 engine") == (
        lines["Model"],
        lines["Connector"],
        lines["Engines"],
    )
    assert "block size 16, 8 blocks" == lines["Configuration"]
    assert journals.STARTED.version in lines["Release"]


def test_lines_without_a_value_are_left_out(tmp_path: Path) -> None:
    page = html(gather([journals.clean(tmp_path / "clean")]))

    names = header(page)
    assert "Range" in names and "Connector" not in names and "Configuration" not in names


def test_violations_and_drifts_are_apart(tmp_path: Path) -> None:
    headings = re.findall(r"<h2>(.*?)</h2>", html(gather([journals.violated(tmp_path / "violated")])))

    assert "Violations" in headings and "Drifts" not in headings
    assert headings.index("Conclusions") < headings.index("Violations")


def test_findings_link_to_their_meaning(tmp_path: Path) -> None:
    page = html(gather([journals.violated(tmp_path / "violated")]))

    assert "violated</b>" in page
    for id in ("tokens-negative", "tokens-set-once"):
        assert f'href="#{id}"' in page
        assert f'<section id="{id}">' in page


def test_request_ids_are_escaped(tmp_path: Path) -> None:
    name = '<script>alert("1")</script>'
    stream = events(200, journals.CLEAN)
    stream[0] = RequestAdded(stream[0].at, 0, name, 200)
    page = html(gather([journals.write(tmp_path / "named", stream)]))

    assert name not in page
    assert "&lt;script&gt;alert(&#34;1&#34;)&lt;/script&gt;" in page


@pytest.mark.parametrize("words", ["A0+0 s10 o+", "F"])
def test_a_trace_with_one_short_request_or_none(tmp_path: Path, words: str) -> None:
    assert "Trace audit" in html(gather([journals.write(tmp_path / "little", events(10, words))]))


def test_a_clean_trace_with_drifts_says_so_first(tmp_path: Path) -> None:
    data = gather([journals.clean(tmp_path / "clean")])

    found = [Found(id="metrics/prompt-missing", severity="drift", findings=2, listed=2, tokens=7)]
    page = html(replace(data, report=replace(data.report, drift=2, found=found)))

    assert "<title>kvledger: clean, 2 drifts of 1 kind: 7 tokens</title>" in page
    assert f'<b class="good">clean</b> {data.report.coverage.words}. 2 drifts of 1 kind: 7 tokens.' in page
    assert "A drift is a figure that the engine counts by a deliberate but misleading rule" in page


def test_the_page_begins_with_at_most_three_sentences(trace: Path) -> None:
    page = html(gather([trace]))

    (listed,) = re.findall(r"<h2>Conclusions</h2>(.*?)</section>", page, re.DOTALL)
    assert 3 == listed.count("<p ")


def test_empty_tables_and_plots_are_left_out(tmp_path: Path) -> None:
    page = html(gather([journals.write(tmp_path / "little", events(10, "A0+0 s10 o+"))]))

    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert "Where prompt tokens came from" in headings
    assert not {"Preemptions", "Most preempted requests", "Ledger and engine-reported figures"} & {*headings}
    assert "rejected drafts" not in page


def test_a_trace_with_lost_events_is_unknown(tmp_path: Path) -> None:
    stream = [*events(10, "A0+0 s10 o+"), Gap(900, 5, "full")]

    assert "events are missing" in html(gather([journals.write(tmp_path / "lost", stream)]))


def test_a_page_that_can_not_be_written_is_one_sentence(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="can't be written"):
        save(gather([trace]), tmp_path / "nowhere" / "page.html")


def test_series_have_bounded_buckets_and_lose_nothing() -> None:
    series = Series()
    for second in range(10 * MOST):
        series.count(second, "preemptions")
        series.level(second, {"running": second})

    assert len(series.counts) <= MOST
    assert 10 * MOST == sum(row["preemptions"] for row in series.counts.values())


def test_series_of_several_engines_are_summed_at_one_width() -> None:
    long, short = Series(), Series()
    for second in range(4 * MOST):
        long.count(second, "preemptions")
    short.count(5, "preemptions", 7)

    both = together([long, short])

    assert 4 * MOST + 7 == sum(row["preemptions"] for row in both.counts.values())


def test_a_long_idle_time_is_not_filled_tick_by_tick() -> None:
    idle = Series()
    idle.level(0, {"running": 1})
    idle.level(10 * 86_400, {"running": 0})

    assert len(together([idle]).levels) <= 2 * MOST


def test_a_level_lasts_until_the_next() -> None:
    one, other = Series(), Series()
    one.level(0, {"running": 3})
    one.level(10, {"running": 0})
    other.level(4, {"running": 2})
    other.level(5, {"running": 0})

    both = together([one, other])

    places = [TICKS * second // both.width_ticks for second in (3, 4, 5)]
    assert [3, 5, 3] == [both.levels[place]["running"] for place in places]
