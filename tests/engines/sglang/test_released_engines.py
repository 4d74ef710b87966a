"""The real engine of released SGLang: findings where a release has the fault, none where it does not."""

from __future__ import annotations

import pytest
from scripts.sglang_matrix import CORE_SGLANG, COUNTED_AGAIN, LOADS, Cell, build, cells

pytestmark = pytest.mark.releases


@pytest.fixture(scope="module", params=CORE_SGLANG)
def driven(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    build([request.param])
    return cells(request.param, LOADS[request.param], tmp_path_factory.mktemp(request.param))


def test_each_load_shows_what_its_release_has_and_nothing_else(driven: list[Cell]) -> None:
    assert not {(cell.release, cell.load): cell.wrong for cell in driven if cell.wrong}


def test_the_ledger_has_what_clients_were_told(driven: list[Cell]) -> None:
    """Where no cached token is counted twice, and no request was aborted before its first output."""
    for cell in driven:
        if cell.found or cell.load in ("session", "turns"):
            continue
        told = [row for row in cell.told.values() if row["finish"] == "length"]
        cached = sum(row["cached_tokens"] or 0 for row in told)
        if len(told) == len(cell.told):
            assert cached == cell.totals["local"] + cell.totals["external"], (cell.release, cell.load)


def test_requests_whose_cached_tokens_were_counted_again_are_named(driven: list[Cell]) -> None:
    for cell in driven:
        if cell.load == "pressure" and cell.found == COUNTED_AGAIN:
            named = {request for id, request in cell.named if id == "tokens/negative"}
            told = cell.told
            assert named == {id for id, row in told.items() if row["cached_tokens"] > row["prompt_tokens"]}
