"""What a running server of an engine says of itself over HTTP: release, models, configuration, counters.

Nothing of kvledger is installed there. A server that is slow, endless or none is refused in bounded time;
what it does not say is not known.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ..audit.analysis.hit_reasons import Outside, Probe
from ..audit.errors import LedgerError
from ..audit.foreign import Sample, Unreadable, families, number, parsed, whole_number
from ..audit.release_semantics import CONTRACTS, Product, ServerMetrics, release, servers
from ..audit.text import printable
from .answer import listed
from .http_client import check_url, fetch, shown
from .sidecar.engine_metrics import ScrapedEngine, counter_names, counters

PAUSE_SECONDS = 1.0
"""Between the two scrapes."""

LIMIT_SECONDS = 4.0
"""A server that has not answered everything by then is refused."""

PROBE_SECONDS = 9.0
"""The same with a probe."""

LARGEST_ANSWER = 1 << 20
"""Bytes of an answer to a request of ours."""

PATHS = ("/metrics", "/version", "/v1/models")
EXTERNAL = "external_queried_tokens"
HITS = ("local_hit_tokens", "external_hit_tokens")
UNITS = ("cache_hit_alignment_tokens", "hash_block_size", "prefix_match_unit", "block_size")
"""Labels of the cache's configuration: the first that has a number is the unit of hits, in tokens."""
STARTED = "process_start_time_seconds"
"""This stays the same while a server lives, and differs from server to server."""

NAMES = " or ".join(CONTRACTS[product].name for product in servers())
"""The products of which servers are known."""

Get = Callable[[str], str]


class Scraped(NamedTuple):
    """One answer of ``/metrics``."""

    families: dict[str, list[Sample]]
    engines: dict[ScrapedEngine, dict[str, float]]
    product: Product

    @property
    def server(self) -> ServerMetrics:
        """What servers of the product say."""
        return servers()[self.product]

    @property
    def identity(self) -> list[tuple[str, tuple[tuple[str, str], ...], float]]:
        """What tells this server from others; empty if nothing does."""
        return sorted(
            (each.name, tuple(sorted(each.labels.items())), each.value)
            for name in (STARTED, self.server.created)
            for each in self.families.get(name, ())
        )


class Server(NamedTuple):
    """A server. ``release`` and ``models`` are empty if it does not say them."""

    url: str
    release: str
    models: tuple[str, ...]
    settings: dict[str, object]
    """As far as they are known, by the names that ``EngineStarted`` has."""
    first: Scraped
    second: Scraped
    longest: int | None = None
    """Tokens of the longest sequence that it serves."""
    probe: Probe | None = None
    unprobed: str = ""
    """Why a probe that was asked for could not be made, a sentence."""


class _Version(msgspec.Struct):
    version: str = ""


class _ServerInfo(msgspec.Struct):
    """What a server with a path for it says of its configuration."""

    version: str = ""
    page_size: int | None = None
    disable_radix_cache: bool | None = None


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


def ask(
    url: str,
    *,
    probe: bool = False,
    get: Get = fetch,
    pause: Callable[[float], None] = time.sleep,
    limit: float = LIMIT_SECONDS,
) -> Server:
    """Ask the server at ``url``. Raises :class:`LedgerError` if no server of an engine answers in time.

    ``probe``: also send it four small requests, see :func:`_probed`.
    """
    base, ends = _base(url), time.monotonic() + limit
    metrics, version, models = _all_of([base + path for path in PATHS], get, ends)
    first = _scraped(base, metrics)
    named, adapters, longest = _models(models)
    pause(PAUSE_SECONDS)
    more = [base + first.server.info] if first.server.info else []
    again, *info = _all_of([base + PATHS[0], *more], get, ends)
    second = _scraped(base, again)
    if info:
        number, settings = _told(*info)
    else:
        number = _version(version)
        settings = _settings(second, number)
        if adapters:
            settings["loras"] = settings.get("loras") or adapters
    server = Server(base, number, named, settings, first, second, longest)
    if not probe:
        return server
    if not second.server.key:
        probed = listed([CONTRACTS[product].name for product, each in servers().items() if each.key])
        return server._replace(unprobed=f"Only a server of {probed} can be probed.")
    try:
        return server._replace(probe=_probed(server, get, ends + PROBE_SECONDS - limit))
    except LedgerError as error:
        return server._replace(unprobed=str(error))


# --- why few tokens hit ---------------------------------------------------------------------------------


def outside(server: Server, engine: ScrapedEngine) -> Outside:
    """What one engine of the server tells of itself."""
    scraped, figures, metrics = server.second, server.second.engines[engine], server.second.server
    labels = _cache(scraped, engine.number)
    caching, block_size = server.settings.get("prefix_caching"), server.settings.get("block_size")

    def samples(name: str) -> list[tuple[dict[str, str], float]]:
        return [
            (each.labels, each.value)
            for each in scraped.families.get(name, ())
            if each.labels.get(metrics.rank, "0") == engine.number
        ]

    unit, capacity = unit_of(labels), whole_number(labels.get("kv_cache_size_tokens", ""))
    blocks, size = whole_number(labels.get("num_gpu_blocks", "")), whole_number(labels.get("block_size", ""))
    if capacity is None and blocks and size:
        capacity = blocks * size
    if capacity is None:
        capacity = next((round(value) for _, value in samples(metrics.capacity)), None)
    if unit is None and isinstance(block_size, int):
        unit = block_size
    lengths = [
        (most, n)
        for each, n in samples(f"{metrics.lengths}_bucket")
        if (most := number(each.get("le", ""))) is not None
    ]
    prompt, cached = figures.get("prompt_tokens", 0.0), figures.get("cached_tokens")
    if cached is None:
        cached = figures.get(metrics.hits)
    return Outside(
        prefix_caching={"True": True, "False": False}.get(
            labels.get("enable_prefix_caching", ""), caching if isinstance(caching, bool) else None
        ),
        unit=unit,
        longest=server.longest,
        capacity=capacity,
        queried=figures.get(metrics.looked_up),
        hits=figures.get(metrics.hits),
        computed=None if cached is None else prompt - cached + figures.get("output_tokens", 0.0),
        prompts=sum(n for _, n in samples(f"{metrics.lengths}_count")) or figures.get("requests", 0.0),
        prompt_tokens=prompt,
        short_prompts=max((n for most, n in lengths if unit is not None and most <= unit), default=0.0),
        adapters=bool(server.settings.get("loras")),
        drafts=bool(server.settings.get("drafts")),
        align=labels.get("mamba_cache_mode") == "align",
        engines=len(scraped.engines),
    )


def unit_of(labels: Mapping[str, str]) -> int | None:
    """The tokens in units of which prompts hit, by the labels of the cache's configuration."""
    return next((size for name in UNITS if (size := whole_number(labels.get(name, "")))), None)


def _cache(scraped: Scraped, engine: str) -> dict[str, str]:
    found = [sample.labels for sample in scraped.families.get(scraped.server.cache, ())]
    return next((each for each in found if each.get("engine", "0") == engine), found[0] if found else {})


def _probed(server: Server, get: Get, ends: float) -> Probe:
    """Send a prompt of random token ids twice, once with another last token, and its first half.

    Each asks for one output token. Raises :class:`LedgerError` if that can't be done or measured.
    """
    if not server.models:
        raise LedgerError("The server names no model, so it can't be asked.")
    units = [
        size for engine in server.second.engines if (size := unit_of(_cache(server.second, engine.number)))
    ]
    unit = max(units, default=16)
    whole = min(4, ((server.longest or 4 * unit + 2) - 2) // unit)
    if whole < 1:
        raise LedgerError(f"No sequence here is longer than a unit of {unit:,} tokens.")
    draw = random.Random(os.urandom(16))
    prompt = [draw.randrange(3, 100) for _ in range(whole * unit + 1)]
    half = prompt[: whole // 2 * unit + 1]
    hits: list[int] = []
    told: list[int | None] = []
    counted: list[int | None] = []
    answered: set[object] = set()
    before = server.second
    for asked in (prompt, prompt, [*prompt[:-1], prompt[-1] ^ 1], half):
        told.append(_complete(server, asked, ends))
        # The front end counts a request after it has answered it.
        for _ in range(20):
            after = _scraped(server.url, _all_of([server.url + PATHS[0]], get, ends)[0])
            grown = {
                engine: (
                    figures.get("prompt_tokens", 0) - old.get("prompt_tokens", 0),
                    sum(figures.get(name, 0) - old.get(name, 0) for name in HITS),
                )
                for engine, figures in after.engines.items()
                if (old := before.engines.get(engine, {})) != figures
            }
            if any(prompts >= len(asked) for prompts, _ in grown.values()):
                break
            time.sleep(0.05)
        alone = after.identity == before.identity and [len(asked)] == [
            round(tokens) for tokens, _ in grown.values() if tokens
        ]
        counted.append(round(sum(hit for _, hit in grown.values())) if alone else None)
        answered |= {tuple(after.identity), *(engine.number for engine, row in grown.items() if row[0])}
        before = after
        found = told[-1] if told[-1] is not None else counted[-1]
        if found is None:
            raise LedgerError(
                "The probe can't be measured while others send requests: start the server with "
                "--enable-prompt-tokens-details."
            )
        hits.append(found)
    known = [each for each in counted[1:] if each is not None]
    again, last_differs, at_half = hits[1:]
    return Probe(
        unit,
        whole,
        again,
        last_differs,
        at_half,
        counted=sum(known) if len(known) == len(counted) - 1 else None,
        told=None if None in told else sum(each or 0 for each in told[1:]),
        spread=len(answered) > 2,
    )


def _complete(server: Server, prompt: list[int], ends: float) -> int | None:
    """The cached tokens that the server tells of one completion; None: it does not tell."""
    body = {
        "model": server.models[0],
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "detokenize": False,
    }
    headers = {"Content-Type": "application/json"}
    variable = server.second.server.key
    if key := os.environ.get(variable):
        headers["Authorization"] = f"Bearer {key}"
    address, seconds = f"{server.url}/v1/completions", max(0.1, ends - time.monotonic())
    try:
        text = fetch(address, seconds, data=msgspec.json.encode(body), headers=headers, most=LARGEST_ANSWER)
        answer = parsed(text, dict[str, Any])
    except urllib.error.HTTPError as error:
        key = f"; {variable} holds the key" if error.code in (401, 403) else ""
        raise LedgerError(f"{shown(address)} answers with status {error.code}{key}.") from None
    except (OSError, ValueError, Unreadable) as error:
        raise LedgerError(f"{shown(address)} gave no answer ({type(error).__name__}).") from None
    usage = answer.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else None


# --- what it says ---------------------------------------------------------------------------------------


def _base(url: str) -> str:
    base = re.sub(r"/(metrics|version|v1(/models)?)?/*$", "", url)
    check_url(base, "a server", "http://localhost:8000")
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
    url = shown(base)
    if isinstance(text, TimeoutError) or "timed out" in str(text):
        raise LedgerError(f"{url} does not answer in {LIMIT_SECONDS:g} seconds.")
    if isinstance(text, urllib.error.HTTPError):
        raise LedgerError(f"{url}/metrics answers with status {text.code}: this is no server of {NAMES}.")
    if isinstance(text, Exception):
        reason = getattr(text, "reason", None) or text
        raise LedgerError(
            f"{url} can't be read: {printable(getattr(reason, 'strerror', None) or str(reason))}."
        )
    product = next((product for product, server in servers().items() if server.prefix in text), None)
    if product is None:
        raise LedgerError(
            f"{url}/metrics has no metric of {NAMES}: no server of them, or its metrics are off."
        )
    server = servers()[product]
    try:
        return Scraped(families(text, _wanted(server)), counters(text, base, server), product)
    except Unreadable as error:
        raise LedgerError(f"{url}/metrics is no text of metrics: it {error}.") from None


def _wanted(server: ServerMetrics) -> frozenset[str]:
    """The lines that are parsed; the histograms of many engines take seconds."""
    lengths = {f"{server.lengths}_{part}" for part in ("bucket", "count")}
    names = {server.capacity, server.cache, server.adapters, server.drafts, f"{server.drafts}_total"}
    return counter_names(server) | names | lengths | {STARTED, server.created}


def _told(text: str | Exception = "") -> tuple[str, dict[str, object]]:
    """The release and the settings that the path for them answers with."""
    try:
        info = parsed(text, _ServerInfo) if isinstance(text, str) else _ServerInfo()
    except Unreadable:
        info = _ServerInfo()
    settings: dict[str, object] = {} if info.page_size is None else {"block_size": info.page_size}
    if info.disable_radix_cache is not None:
        settings["prefix_caching"] = not info.disable_radix_cache
    return (printable(info.version) if release(info.version) else ""), settings


def _version(text: str | Exception) -> str:
    try:
        version = parsed(text, _Version).version if isinstance(text, str) else ""
    except Unreadable:
        return ""
    return printable(version) if release(version) else ""


def _models(text: str | Exception) -> tuple[tuple[str, ...], int, int | None]:
    """The served names of the models, how many of them are LoRA adapters, and the longest sequence."""
    try:
        found = parsed(text, _Models).data if isinstance(text, str) else []
    except Unreadable:
        return (), 0, None
    longest = next((each.max_model_len for each in found if each.max_model_len), None)
    models = tuple(printable(each.id) for each in found if each.parent is None)
    return models, len(found) - len(models), longest


def _settings(scraped: Scraped, number: str) -> dict[str, object]:
    """What the metrics say of the configuration. Families that only a feature has show it."""
    families, server = scraped.families, scraped.server
    settings: dict[str, object] = {}
    cache = next((sample.labels for sample in families.get(server.cache, ())), {})
    for name, label in (("block_size", "block_size"), ("blocks", "num_gpu_blocks")):
        if (value := whole_number(cache.get(label, ""))) is not None:
            settings[name] = value
    if cache.get("enable_prefix_caching") in ("True", "False"):
        settings["prefix_caching"] = cache["enable_prefix_caching"] == "True"
    if any(figures.get("prompt_tokens") for figures in scraped.engines.values()):  # else they may still come
        settings["drafts"] = int(not {server.drafts, f"{server.drafts}_total"}.isdisjoint(families))
        settings["loras"] = _adapters(families.get(server.adapters))
    if any(figures.get(EXTERNAL) for figures in scraped.engines.values()):
        settings["connector"] = ""
    if number and release(number) >= (0, 10):
        settings["v0"] = False
    return settings


def _adapters(samples: Sequence[Sample] | None) -> int:
    """The most LoRA adapters at a time; 1, if it is not said yet; 0 without."""
    if samples is None:
        return 0
    said = (whole_number(sample.labels.get("max_lora", "")) for sample in samples)
    return next((each for each in said if each is not None), 1)
