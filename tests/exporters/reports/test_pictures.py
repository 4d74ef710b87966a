"""The charts of the report as files: well-formed, with axes, and PNG only where resvg is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests import journals
from tests.command_line import exit_code
from tests.histories import events
from tests.simulated_trace import write_trace

from kvledger.audit.errors import LedgerError
from kvledger.exporters.reports import pictures
from kvledger.exporters.reports.html_data import PageData, gather

NAMES = {"prompt-tokens", "hit-rate", "misses", "requests", "preemptions", "waits", "first-token"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PageData:
    folder = tmp_path_factory.mktemp("trace")
    write_trace(folder, 300)
    return gather([folder])


def test_each_chart_with_data_is_a_well_formed_svg_with_axes(data: PageData) -> None:
    drawn = dict(pictures.drawings(data))

    assert NAMES == drawn.keys()
    for name, text in drawn.items():
        root = ElementTree.fromstring(text)
        texts = ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]
        assert pictures.TITLES[name] == texts[0]
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert ">100 %<" in drawn["hit-rate"] and ">time (UTC)<" in drawn["hit-rate"]


def test_charts_without_data_are_no_files(tmp_path: Path) -> None:
    little = gather([journals.write(tmp_path / "little", events(10, "A0+0 s10 o+"))])

    files = pictures.save(little, tmp_path / "svg", None)

    assert "preemptions.svg" not in [path.name for path in files]
    assert sorted(files) == sorted((tmp_path / "svg").iterdir())


def test_nothing_is_drawn_unless_asked_for(data: PageData) -> None:
    assert [] == pictures.save(data, None, None)


def test_a_folder_that_can_not_be_written_is_one_sentence(data: PageData, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(LedgerError, match="can't be written"):
        pictures.save(data, file, None)


def test_png_without_resvg_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    journal = journals.clean(tmp_path / "one")

    assert 2 == exit_code("report", journal, "-o", tmp_path / "page.html", "--png", tmp_path)
    assert capsys.readouterr().err.endswith("install it with: pip install 'kvledger[pictures]'.\n")


def test_png_files_are_pictures_of_twice_the_size(data: PageData, tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")

    files: list[Any] = pictures.save(data, None, tmp_path)

    assert NAMES == {path.stem for path in files}
    for path in files:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert 2 * pictures.WIDTH == int.from_bytes(content[16:20], "big")
