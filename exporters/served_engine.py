"""What a running vLLM server says of itself over HTTP: release, models, configuration, counters.

Nothing of kvledger is installed there. A server that is slow, endless or none is refused in bounded time;
what it does not say is not known.
"""

from __future__ import annotations

import re
import threading
import time
import urllib.error
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ..audit.errors import LedgerError
from ..audit.release_semantics import release
from ..audit.text import printable
from .sidecar.engine_metrics import COUNTERS, ENDED, ScrapedEngine, counters, fetch

PAUSE_SECONDS = 1.0
"""Between the two scrapes."""

LIMIT_SECONDS = 4.0
"""A server that has not answered everything by then is refused."""

PATHS = ("/metrics", "/version", "/v1/models")
PREFIX = "vllm:"
CACHE = "vllm:cache_config_info"
ADAPTERS = "vllm:lora_requests_info"
DRAFTS = "vllm:spec_decode_num_accepted_tokens_per_pos"
EXTERNAL = "external_queried_tokens"
IDENTITIES = ("process_start_time_seconds", "vllm:prompt_tokens_created")
"""Samples that stay the same while a server lives, and differ from server to server."""

_WANTED = "|".join(
    map(re.escape, {CACHE, ADAPTERS, DRAFTS, *IDENTITIES, ENDED, *(name for name, _ in COUNTERS)})
)
_NEEDED = re.compile(rf"^(?:# (?:HELP|TYPE) )?(?:{_WANTED}).*$", re.MULTILINE)
"""The lines that are parsed; the histograms of many engines take seconds."""

Get = Callable[[str], str]


class Scraped(NamedTuple):
    """One answer of ``/metrics``."""

    families: dict[str, Metric]
    engines: dict[ScrapedEngine, dict[str, float]]

    @property
    def identity(self) -> list[tuple[str, tuple[tuple[str, str], ...], float]]:
        """What tells this server from others; empty if nothing does."""
        samples = (sample for family in self.families.values() for sample in family.samples)
        return sorted(
            (each.name, tuple(sorted(each.labels.items())), each.value)
            for each in samples
            if each.name in IDENTITIES
        )


class Server(NamedTuple):
    """A vLLM server. ``release`` and ``models`` are empty if it does not say them."""

    url: str
    release: str
    models: tuple[str, ...]
    settings: dict[str, object]
    """As far as they are known, by the names that ``EngineStarted`` has."""
    first: Scraped
    second: Scraped


class _Version(msgspec.Struct):
    version: str = ""


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


def ask(
    url: str, *, get: Get = fetch, pause: Callable[[float], None] = time.sleep, limit: float = LIMIT_SECONDS
) -> Server:
    """Ask the server at ``url``. Raises :class:`LedgerError` if no vLLM server answers in time."""
    base, ends = _base(url), time.monotonic() + limit
    metrics, version, models = _all_of([base + path for path in PATHS], get, ends)
    first = _scraped(base, metrics)
    named, adapters = _models(models)
    pause(PAUSE_SECONDS)
    second = _scraped(base, _all_of([base + PATHS[0]], get, ends)[0])
    number = _version(version)
    settings = _settings(second, number)
    if adapters:
        settings["loras"] = settings.get("loras") or adapters
    return Server(base, number, named, settings, first, second)


def _base(url: str) -> str:
    base = re.sub(r"/(metrics|version|v1(/models)?)?/*$", "", url)
    if not re.match(r"https?://[^/\s]+", base):
        raise LedgerError(f"{url!r} is no URL of a server; an example is http://localhost:8000.")
    return base


def _all_of(urls: list[str], get: Get, ends: float) -> list[str | Exception]:
    """What each URL answers, asked at the same time; TimeoutError for what is not there when time ``ends``.

    A thread that waits for its server ends with the process.
    """
    answers: list[str | Exception] = [TimeoutError()] * len(urls)

    def one(place: int) -> None:
        try:
            answers[place] = get(urls[place])
        except Exception as error:
            answers[place] = error

    threads = [threading.Thread(target=one, args=(place,), daemon=True) for place in range(len(urls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))
    return answers


def _scraped(base: str, text: str | Exception) -> Scraped:
    if isinstance(text, TimeoutError) or "timed out" in str(text):
        raise LedgerError(f"{base} does not answer in {LIMIT_SECONDS:g} seconds.")
    if isinstance(text, urllib.error.HTTPError):
        raise LedgerError(f"{base}/metrics answers with status {text.code}: this is no vLLM server.")
    if isinstance(text, Exception):
        reason = getattr(text, "reason", None) or text
        raise LedgerError(
            f"{base} can't be read: {printable(getattr(reason, 'strerror', None) or str(reason))}."
        )
    if PREFIX not in text:
        raise LedgerError(
            f"{base}/metrics has no metric of vLLM: this is no vLLM server, or its metrics are off."
        )
    needed = "\n".join(_NEEDED.findall(text)) + "\n"
    try:
        families = {family.name: family for family in text_string_to_metric_families(needed)}
        return Scraped(families, counters(needed, base))
    except ValueError as error:
        raise LedgerError(f"{base}/metrics is no text of metrics: {printable(str(error))}.") from None


def _version(text: str | Exception) -> str:
    try:
        number = msgspec.json.decode(text, type=_Version).version if isinstance(text, str) else ""
    except msgspec.MsgspecError:
        return ""
    return printable(number) if release(number) else ""


def _models(text: str | Exception) -> tuple[tuple[str, ...], int]:
    """The served names of the models, and how many of them are LoRA adapters."""
    try:
        found = msgspec.json.decode(text, type=_Models).data if isinstance(text, str) else []
    except msgspec.MsgspecError:
        return (), 0
    models = tuple(printable(each.id) for each in found if each.parent is None)
    return models, len(found) - len(models)


def _settings(scraped: Scraped, number: str) -> dict[str, object]:
    """What the metrics say of the configuration. Families that only a feature has show it."""
    families = scraped.families
    settings: dict[str, object] = {}
    cache = next((sample.labels for sample in families[CACHE].samples), {}) if CACHE in families else {}
    for name, label in (("block_size", "block_size"), ("blocks", "num_gpu_blocks")):
        if cache.get(label, "").isdecimal():
            settings[name] = int(cache[label])
    if cache.get("enable_prefix_caching") in ("True", "False"):
        settings["prefix_caching"] = cache["enable_prefix_caching"] == "True"
    if any(figures.get("prompt_tokens") for figures in scraped.engines.values()):  # else they may still come
        settings["drafts"] = int(DRAFTS in families)
        settings["loras"] = _adapters(families)
    if any(figures.get(EXTERNAL) for figures in scraped.engines.values()):
        settings["connector"] = ""
    if number and release(number) >= (0, 10):
        settings["v0"] = False
    return settings


def _adapters(families: Mapping[str, Metric]) -> int:
    """The most LoRA adapters at a time; 1, if it is not said yet; 0 without."""
    if ADAPTERS not in families:
        return 0
    said = (sample.labels.get("max_lora", "") for sample in families[ADAPTERS].samples)
    return next((int(each) for each in said if each.isdecimal()), 1)
