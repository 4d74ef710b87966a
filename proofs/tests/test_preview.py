"""Boards drawn without Grafana: the data of a real Prometheus, and how panels look in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from proofs.preview import charts, units
from proofs.preview import page as preview
from proofs.preview.data import Series, Source, Span, legend, table
from tests import history
from tests.exporters.reports.browser import Visit

from kvledger.audit.errors import LedgerError
from kvledger.dashboards import boards, check

SPAN = Span(1000.0, 100.0, 1.0)
PRESENT = {
    "Engines observed",
    "Journal lag",
    "Sidecars up",
    "Engines",
    "Journal lag by engine",
    "Time in hooks",
    "State lost by the sidecar",
    "Age of the checkpoint",
}
"""Panels of metrics about the present, which a history lacks, and hook times, which a trace lacks."""


@pytest.mark.parametrize(
    "value, unit, text",
    [
        (0.1234, "percentunit", "12.3%"),
        (0, "s", "0 s"),
        (0.00425, "s", "4.25 ms"),
        (90, "s", "1.5 min"),
        (1234.5, "si:tokens/s", "1.23 ktokens/s"),
        (999, "si:tokens/s", "999 tokens/s"),
        (1234567, "locale", "1,234,567"),
        (-3, "none", "-3"),
        (1_200_000, "short", "1.2 Mil"),
        (2, "cps", "2 c/s"),
        (0, "dateTimeAsIso", "1970-01-01 00:00:00"),
        (float("nan"), "s", "NaN"),
    ],
)
def test_values_have_units(value: float, unit: str, text: str) -> None:
    assert text == units.text(value, unit)


def test_every_unit_of_a_board_is_known() -> None:
    known = {"short", "none", "percentunit", "s", "cps", "reqps", "locale", "si:tokens/s"}

    assert known >= {panel["fieldConfig"]["defaults"]["unit"] for _, panel in check.panels()}


def test_variables_are_replaced_the_longest_name_first() -> None:
    source = Source("http://x", Span(0.0, 3600.0, 15.0), {"job": ".+"})

    assert 'rate(a{job=~".+"}[60s]) > 3600 - 3600s' == source.substituted(
        'rate(a{job=~"$job"}[$__rate_interval]) > $__range_s - $__range'
    )


def test_legends_name_labels() -> None:
    assert "a: b" == legend({"legendFormat": "{{x}}: {{y}}"}, {"x": "a", "y": "b"})
    assert "x=a" == legend({"legendFormat": "__auto"}, {"x": "a", "__name__": "up"})


def timeseries(stacking: str = "none", **defaults: Any) -> dict[str, Any]:
    custom = {"stacking": {"mode": stacking}}
    every = {"unit": "none", "custom": custom, "min": 0, **defaults}
    return {"fieldConfig": {"defaults": every, "overrides": []}}


def test_a_hole_in_a_series_is_no_line() -> None:
    values = {901.0: 1.0, 902.0: 1.0, 950.0: 1.0}
    _, (line,) = charts.lines(timeseries(), [("a", Series({}, values))], SPAN)

    assert 2 == line.stroke.count("M")


def test_percent_stacking_ends_at_the_whole() -> None:
    named = [("a", Series({}, {950.0: 1.0})), ("b", Series({}, {950.0: 3.0}))]
    axis, lines = charts.lines(timeseries("percent"), named, SPAN)

    assert (0.0, 1.0) == axis
    assert ["750.0", "0.0"] == [line.stroke.split()[1].split("L")[0] for line in lines]


def test_a_value_that_is_no_number_is_not_drawn() -> None:
    _, (line,) = charts.lines(timeseries(), [("a", Series({}, {950.0: float("nan")}))], SPAN)

    assert ("", "", "") == (line.last, line.most, line.stroke)


def test_a_heatmap_has_the_counts_of_single_buckets() -> None:
    series = [Series({"le": "0.5"}, {950.0: 2.0}), Series({"le": "+Inf"}, {950.0: 2.0})]
    cells, _ = charts.cells(series, SPAN, "percentunit")

    assert [500.0] == [cell.y for cell in cells]


@pytest.mark.parametrize("value, counts", [(0.0, False), (float("nan"), False), (0.1, True)])
def test_zero_and_no_number_leave_a_collapsed_row_out(value: float, counts: bool) -> None:
    assert counts == preview.nonzero([[Series({}, {1.0: value})]])


def test_a_table_has_a_row_for_each_set_of_labels() -> None:
    panel = next(each for each in boards.board("compare")["panels"] if each["type"] == "table")
    names = [f"Value #{query['refId']}" for query in panel["targets"]]
    values = {name: float(place) for place, name in enumerate(names, 1)}
    answers = [[Series({"engine": "e", "figure": "f"}, {1.0: value})] for value in values.values()]

    assert [{"engine": "e", "figure": "f", **values}] == table(panel, answers)


def test_a_prometheus_that_does_not_answer_is_one_sentence() -> None:
    with pytest.raises(LedgerError, match="No Prometheus answers"):
        preview.gather(["trust"], "http://127.0.0.1:1", SPAN)


# --- in a browser -----------------------------------------------------------------------------------------

PROBE = """<script>
const faults = [], boxes = [...document.querySelectorAll("article")];
const rect = (e) => e.getBoundingClientRect();
const apart = (a, b) => a.right - 1 <= b.left || a.bottom - 1 <= b.top;
const over = (a, b) => !apart(a, b) && !apart(b, a);
const clipped = (e) => e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1;
boxes.forEach((box, n) => {
  const say = (what) => faults.push(box.dataset.title + ": " + what);
  if (boxes.slice(n + 1).some((other) => over(rect(box), rect(other)))) say("overlaps");
  if (clipped(box)) say("is clipped");
  const stat = box.querySelector(".stat span");
  if (stat && rect(stat).width > rect(stat.parentElement).width) say("value is clipped");
  const plot = box.querySelector(".plot");
  if (plot && (rect(plot).height < 40 || rect(plot).width < 80)) say("plot is too small");
  if (plot && !plot.querySelector("path, rect")) say("plot is empty");
  const times = [...box.querySelectorAll(".times span")].filter((e) => e.offsetParent);
  if (times.some((e, i) => i && rect(e).left - rect(times[i - 1]).right < 6)) say("times touch");
  const names = [...box.querySelectorAll(".legend td:first-child")];
  if (names.some((e) => rect(e).width < 40)) say("a name in the legend is too narrow");
  if (names.some((e) => !e.textContent.trim())) say("a name in the legend is empty");
});
if ([...document.querySelectorAll("header p")].some(clipped)) faults.push("header is clipped");
if (document.documentElement.scrollWidth > window.innerWidth) faults.push("page is too wide");
document.body.dataset.faults = JSON.stringify(faults);
</script>"""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The page of each board, with the data of a Prometheus that holds the history of a trace."""
    folder = tmp_path_factory.mktemp("history")
    with history.served(folder, history.trace(folder / "trace")) as (server, end):
        span = Span(end, 66.0, history.INTERVAL)
        gathered = {name: preview.gather([name], server.address, span) for name in boards.NAMES}
        yield {name: preview.html(one, span) for name, one in gathered.items()}


@pytest.mark.browser
def test_panels_of_the_past_have_data(drawn: dict[str, str]) -> None:
    for name in ("trust", "tokens"):
        empty = re.findall(r'data-title="kvledger: \w+, ([^"]+)" data-empty', drawn[name])
        assert set(empty) <= PRESENT, name


@pytest.mark.browser
@pytest.mark.parametrize("name", boards.NAMES)
@pytest.mark.parametrize("width", [1440, 800])
def test_no_panel_is_empty_clipped_or_overlaps(
    drawn: dict[str, str], name: str, width: int, tmp_path: Path
) -> None:
    page = tmp_path / f"{name}.html"
    page.write_text(drawn[name].replace("</body>", f"{PROBE}</body>"))

    seen = Visit(page, tmp_path, width=width)

    found = re.search(r'data-faults="([^"]*)"', seen.dom)
    assert [] == seen.console
    assert found is not None and [] == json.loads(unescape(found[1]))
