"""Answers and their writers: one table, as text, Markdown and on a page."""

from __future__ import annotations

import msgspec
import pytest
from tests.exporters.reports.printed import lines, text

from kvledger.exporters.answer import Answer, Bars, Lines, Sum, Table, Words, made, notes, records
from kvledger.exporters.writers import as_text, page


class Row(msgspec.Struct):
    name: str
    hit: int
    prompt_tokens: int
    seconds: float | None


ROWS = [Row("<a>", 1200, 2400, 0.5), Row("b", 0, 0, None)]
TABLE = Table(
    [*ROWS, Sum(("sum", 1200, 0.5, 0.5))],
    "=name | hit | of prompt=hit/prompt_tokens:% | took=seconds:s",
    "Rows",
)
ANSWER = Answer(
    ROWS,
    ["violated: see tests/one and https://a.client", Words("Only in part.", "dim")],
    [
        TABLE,
        Table([], "a"),
        Lines([]),
        Bars([("x", 1.0, "1")], "Chart"),
        Lines(["broken: https://ours"], "One", anchor="tests/one"),
    ],
    records(Row, ROWS, "seconds"),
)


def test_text_has_the_conclusion_then_tables_with_figures_on_the_right() -> None:
    assert [
        "violated: see tests/one and https://a.client",
        "Only in part.",
        "",
        "Rows",
        "       hit  of prompt     took",
        "<a>  1,200     50.0 %  0.500 s",
        "b        0          -        -",
        "sum  1,200     50.0 %  0.500 s",
        "",
        "One",
        "broken: https://ours",
    ] == text(ANSWER).splitlines()


def test_markdown_has_the_same_cells() -> None:
    markdown = as_text(ANSWER, "markdown")

    assert (
        "#### Rows\n\n|  | hit | of prompt | took |\n|---|---:|---:|---:|\n"
        "| \\<a> | 1,200 | 50.0 % | 0.500 s |" in markdown
    )


def test_csv_and_json_have_the_data() -> None:
    assert "name,hit,prompt_tokens\n<a>,1200,2400\nb,0,0" == lines(ANSWER)
    assert msgspec.to_builtins(ROWS) == msgspec.json.decode(as_text(ANSWER, "json"))
    assert '"x"' in as_text(ANSWER._replace(plain=lambda: "x"), "json")


def test_a_page_escapes_names_and_links_a_name_to_its_section() -> None:
    html = page(ANSWER, "Heading", "title")

    assert "&lt;a&gt;" in html and "<a>" not in html
    assert '<b class="bad">violated</b>: see <a href="#tests-one">tests/one</a> and https://a.client<' in html
    assert 'broken: <a href="https://ours">https://ours</a>' in html
    assert '<section id="tests-one">' in html
    assert 1 == html.count("<table>"), "a table without rows is left out"


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "-"), ("", ""), (1234567, "1,234,567"), (4e-05, "0.00004")]
)
def test_values_are_written_by_their_type(value: object, shown: str) -> None:
    assert [[shown]] == Table([(value,)], "x").cells()


def test_notes_are_told_once_and_structs_are_made_of_attributes() -> None:
    assert ["  a", "  b"] == notes(["a", "b", "a"]).lines
    assert Row("c", 0, 0, None) == made(Row, ROWS[1], name="c")
