"""Every HTML page in a browser: at a desk and on a phone, light and dark, with a keyboard, by axe-core.

A page that is new goes into :data:`PAGES`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests import journals
from tests.exporters.browser import Browser, axe_core
from tests.exporters.sidecar.test_http_server import served
from tests.exporters.sidecar.test_step_limits import written
from tests.golden.outputs import unpacked
from tests.simulated_trace import write_trace

from kvledger.exporters.reports.page import gather, html

pytestmark = pytest.mark.browser


@contextlib.contextmanager
def trace(folder: Path) -> Iterator[str]:
    """The report of two engines, with more tokens than a narrow tile has room for."""
    write_trace(folder / "trace", 600, engines=2)
    data = gather([folder / "trace"], by="engine")
    totals = replace(data.report.totals, prompt_tokens=6_135_549_810)
    yield _saved(folder, html(replace(data, report=replace(data.report, totals=totals))))


@contextlib.contextmanager
def violated(folder: Path) -> Iterator[str]:
    """The report of an engine with violations, at level blocks."""
    unpacked(folder / "journals", "demo-0.32.0-double-allocation-blocks")
    yield _saved(folder, html(gather([folder / "journals"])))


def _saved(folder: Path, page: str) -> str:
    file = folder / "page.html"
    file.write_text(page)
    return file.as_uri()


@contextlib.contextmanager
def sidecar(folder: Path, path: str = "/", *, ready: bool = True) -> Iterator[str]:
    """A page of a sidecar beside two engines."""
    journals.violated(folder / "engine-0")
    written(folder / "engine-1", hours_ago=0.5)
    with served(folder, ready=ready) as client:
        host, port = client.address
        yield f"http://{host}:{port}{path}"


PAGES: dict[str, Callable[[Path], contextlib.AbstractContextManager[str]]] = {
    "trace": trace,
    "violated": violated,
    "sidecar": sidecar,
    "sidecar-starting": lambda folder: sidecar(folder, ready=False),
    "sidecar-request": lambda folder: sidecar(folder, "/request?id=%3Cb%3E"),
    "sidecar-invariants": lambda folder: sidecar(folder, "/explain/"),
}
"""What serves each page and gives its address."""

WIDTHS = (1280, 400)

LAYOUT = """(() => {
  const scrolls = (each) => ["auto", "scroll"].includes(getComputedStyle(each).overflowX);
  const boxes = [...document.querySelectorAll("*")].filter(scrolls);
  const wide = boxes.filter((each) => each.scrollWidth > each.clientWidth + 1);
  const seen = (each) => each.getClientRects().length && getComputedStyle(each).visibility !== "hidden";
  const hasText = (each) => [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const texts = [...document.querySelectorAll("body *:not(script, style, svg *)")
    ].filter((each) => seen(each) && hasText(each));
  const outside = (each) => {
    if (boxes.some((box) => box !== each && box.contains(each))) return false;
    const range = document.createRange();
    range.selectNodeContents(each);
    return [...range.getClientRects()].some((rect) => rect.left < 0 || rect.right > innerWidth);
  };
  const says = (each) => each.outerHTML.slice(0, 200);
  const style = getComputedStyle(document.body);
  return {
    width: document.documentElement.scrollWidth,
    brightness: [style.backgroundColor, style.color],
    outside: texts.filter(outside).map(says),
    cut: [...document.querySelectorAll("body *:not(svg *)")].filter(seen).filter(
      (each) => !scrolls(each) && each.clientWidth && each.scrollWidth > each.clientWidth + 1).map(says),
    small: texts.filter((each) => parseFloat(getComputedStyle(each).fontSize) < 11).map(says),
    wide: wide.length,
    unshaded: wide.filter((each) => !getComputedStyle(each).backgroundImage.includes("gradient")).map(says),
    flat: [...document.querySelectorAll(".plot")].filter(
      (plot) => ![...plot.querySelectorAll("polygon, polyline")].some(
        (each) => new Set([...each.points].map((point) => point.y)).size > 1)).map(says),
  };
})()"""

CONTROLS = """[...document.querySelectorAll(
  "a[href], button, input, select, textarea, summary, [tabindex]"
)].map((each, n) => each.dataset.control = n)"""

FOCUSED = """(() => {
  const each = document.activeElement, style = getComputedStyle(each), box = each.getBoundingClientRect();
  return {
    control: each.dataset.control ?? null,
    html: each.outerHTML.slice(0, 200),
    ring: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1,
    inside: box.bottom > 0 && box.top < innerHeight,
  };
})()"""

AXE = """axe.run().then((found) => found.violations.map(
  (each) => `${each.impact} ${each.id}: ${each.nodes.map((node) => node.html.slice(0, 150)).join(" ")}`))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return axe_core(tmp_path_factory.mktemp("axe"))


@pytest.fixture(scope="module", params=PAGES)
def page(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """The name of a page and its address."""
    with PAGES[request.param](tmp_path_factory.mktemp("page")) as address:
        yield request.param, address


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_is_whole_at_each_width_and_scheme_and_reached_by_keyboard(
    page: tuple[str, str], width: int, dark: bool, browser: Browser, axe: str, tmp_path: Path
) -> None:
    name, address = page
    browser.open(address, width=width, dark=dark)
    browser.picture(tmp_path / f"{name}-{width}-{'dark' if dark else 'light'}.png")

    layout = browser.value(LAYOUT)
    assert [] == browser.console
    assert width == layout["width"], "the page scrolls sideways"
    for fault in ("outside", "cut", "small", "unshaded", "flat"):
        assert [] == layout[fault], fault
    ground, ink = (sum(map(int, re.findall(r"\d+", color)[:3])) for color in layout["brightness"])
    assert dark == (ground < ink)

    browser.value(axe)
    assert [] == browser.value(AXE)

    controls = set(map(str, browser.value(CONTROLS)))
    assert controls == _reached_by_tab(browser)


def test_arrow_keys_show_the_values_of_a_plot_as_the_pointer_does(browser: Browser, tmp_path: Path) -> None:
    plot = "document.querySelector('[aria-label=\"Running and waiting\"]')"
    legend = f"{plot}.parentElement.querySelector('ul.legend').innerText"
    with trace(tmp_path) as address:
        browser.open(address, width=1280, dark=False)
    browser.value(f"{plot}.focus()")
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowLeft"):
        browser.press(key)
    by_key = browser.value(legend)
    assert re.search(r"^running \d+\nwaiting \d+\n2026-01-01 00:00:00.031$", by_key)
    assert "2026-01-01 00:00:00.031, running " in browser.value(f"{plot}.ariaValueText")

    box = f"{plot}.getBoundingClientRect()"
    x, y, buckets = browser.value(f"[{box}.x, {box}.y, {box}.width / {plot}.ariaValueMax]")
    browser.press("End")
    assert by_key != browser.value(legend)
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x + 1.5 * buckets, y=y + 9)
    assert by_key == browser.value(legend)


def _reached_by_tab(browser: Browser) -> set[str]:
    """The controls that have had the focus before it returns to the page."""
    reached: set[str] = set()
    while True:
        browser.press("Tab")
        focused = browser.value(FOCUSED)
        if focused["control"] is None or focused["control"] in reached:
            return reached
        assert focused["ring"], f"the focus can't be seen: {focused['html']}"
        assert focused["inside"], f"the focus is out of sight: {focused['html']}"
        reached.add(focused["control"])
