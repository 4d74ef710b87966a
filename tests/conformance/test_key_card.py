"""What parts the KV of two requests, on the prefix cache and connectors of the installed release."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("vllm")

import torch

from kvledger.audit.conformance.connector_classes import find_connector
from kvledger.audit.conformance.key_card import DIFFERENCES, EVENTS, PREFIX_CACHE, KeyCard, key_card
from kvledger.audit.errors import LedgerError
from kvledger.cli import app

OFFLOADING = {
    "spec_name": "CopyingSpec",
    "spec_module_path": "kvledger.audit.conformance.cpu_offloading",
    "cpu_bytes_to_use": 1 << 24,
}
OF_ENGINES = {
    *("model", "model's revision", "dtype of the KV cache", "quantisation of the KV cache", "block size")
}
ALWAYS_SHARED = {"LoRA adapter, loaded in place", "mask of prompt embeddings"}
"""Differences that no place of vLLM 0.32 knows (vLLM#56655 is the second)."""


def cells(card: KeyCard, place: str) -> dict[str, str]:
    return {row.difference: row.cells[place] for row in card.rows}


def of_connector(name: str, options: Mapping[str, Any] | None = None) -> dict[str, str]:
    return cells(key_card(find_connector(name, None, options)), name)


@pytest.fixture(scope="module")
def card() -> KeyCard:
    """The card without a connector."""
    return key_card()


def test_the_prefix_cache_parts_all_but_an_adapter_loaded_in_place_and_the_mask_of_embeddings(
    card: KeyCard,
) -> None:
    found = cells(card, PREFIX_CACHE)

    assert "violated" == card.verdict
    assert ALWAYS_SHARED == {name for name, cell in found.items() if cell == "shares"}
    assert OF_ENGINES == {name for name, cell in found.items() if cell == "not here"}
    assert {64, 48} == {row.shared for row in card.rows if row.difference in ALWAYS_SHARED}
    assert not any(row.problem for row in card.rows)


def test_kv_events_do_not_tell_the_path_of_an_adapter(card: KeyCard) -> None:
    found = cells(card, EVENTS)

    assert {*ALWAYS_SHARED, "LoRA adapter's path, name and id kept"} == {
        name for name, cell in found.items() if cell == "shares"
    }


def test_a_store_by_tokens_alone_shares_what_tokens_do_not_tell() -> None:
    """ExampleConnector names its files by tokens and the identities of images (vLLM#53496)."""
    found = of_connector("ExampleConnector")

    assert {"other tokens", "multimodal input's identity"} == {
        name for name, cell in found.items() if cell == "parts"
    }
    assert len(DIFFERENCES) - 2 == list(found.values()).count("shares")


def test_a_store_by_block_hashes_parts_what_the_prefix_cache_parts() -> None:
    found = of_connector("OffloadingConnector", OFFLOADING)

    assert ALWAYS_SHARED == {name for name, cell in found.items() if cell == "shares"}
    assert OF_ENGINES == {name for name, cell in found.items() if cell == "no control"}  # in memory


def test_engines_start_though_this_process_has_run_torch_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of it would hang: torch's threads are not in the fork."""
    of_an_engine = next(difference for difference in DIFFERENCES if difference.of_second)
    monkeypatch.setattr("kvledger.audit.conformance.key_card.DIFFERENCES", (of_an_engine,))
    torch.ones(4096, 4096).mul_(2).sum()

    assert {of_an_engine.name: "shares"} == of_connector("ExampleConnector")


def test_a_difference_that_breaks_the_engine_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise RuntimeError("no scheduler")

    monkeypatch.setattr("kvledger.audit.conformance.key_card._run", breaks)
    card = key_card()

    assert "unknown" == card.verdict
    assert {"broke", "not here"} == {cell for row in card.rows for cell in row.cells.values()}
    assert "no scheduler" in card.rows[0].problem


@pytest.mark.parametrize("format", ["text", "json", "markdown"])
def test_the_command_prints_the_card_and_exits_with_its_verdict(
    format: str, card: KeyCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvledger.exporters.reports.conformance.key_card", lambda *_: card)
    done = CliRunner().invoke(app, ["conformance", "--keys", "--format", format])

    assert 1 == done.exit_code
    assert "mask of prompt embeddings" in done.stdout
    if format == "json":
        assert [PREFIX_CACHE, EVENTS] == json.loads(done.stdout)["places"]


def test_a_card_of_a_connector_needs_its_name() -> None:
    done = CliRunner().invoke(app, ["conformance"])

    assert isinstance(done.exception, LedgerError)
    assert "--keys" in str(done.exception)
