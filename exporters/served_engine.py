"""What a running vLLM server says of itself over HTTP: release, models, configuration, counters.

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
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ..audit.analysis.hit_reasons import Outside, Probe
from ..audit.errors import LedgerError
from ..audit.release_semantics import release
from ..audit.text import printable
from .sidecar.engine_metrics import COUNTERS, ENDED, ScrapedEngine, counters, fetch

PAUSE_SECONDS = 1.0
"""Between the two scrapes."""

LIMIT_SECONDS = 4.0
"""A server that has not answered everything by then is refused."""

PROBE_SECONDS = 9.0
"""The same with a probe."""

LARGEST_ANSWER = 1 << 20
"""Bytes of an answer to a request of ours."""

PATHS = ("/metrics", "/version", "/v1/models")
PREFIX = "vllm:"
CACHE = "vllm:cache_config_info"
ADAPTERS = "vllm:lora_requests_info"
DRAFTS = "vllm:spec_decode_num_accepted_tokens_per_pos"
LENGTHS = "vllm:request_prompt_tokens"
GENERATED = "vllm:generation_tokens"
EXTERNAL = "external_queried_tokens"
HITS = ("local_hit_tokens", "external_hit_tokens")
UNITS = ("cache_hit_alignment_tokens", "hash_block_size", "prefix_match_unit", "block_size")
"""Labels of the cache's configuration: the first that has a number is the unit of hits, in tokens."""
IDENTITIES = ("process_start_time_seconds", "vllm:prompt_tokens_created")
"""Samples that stay the same while a server lives, and differ from server to server."""

_WANTED = "|".join(
    map(
        re.escape,
        {CACHE, ADAPTERS, DRAFTS, LENGTHS, GENERATED, *IDENTITIES, ENDED, *(name for name, _ in COUNTERS)},
    )
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
    longest: int | None = None
    """Tokens of the longest sequence that it serves."""
    probe: Probe | None = None
    unprobed: str = ""
    """Why a probe that was asked for could not be made, a sentence."""


class _Version(msgspec.Struct):
    version: str = ""


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
    """Ask the server at ``url``. Raises :class:`LedgerError` if no vLLM server answers in time.

    ``probe``: also send it four small requests, see :func:`_probed`.
    """
    base, ends = _base(url), time.monotonic() + limit
    metrics, version, models = _all_of([base + path for path in PATHS], get, ends)
    first = _scraped(base, metrics)
    named, adapters, longest = _models(models)
    pause(PAUSE_SECONDS)
    second = _scraped(base, _all_of([base + PATHS[0]], get, ends)[0])
    number = _version(version)
    settings = _settings(second, number)
    if adapters:
        settings["loras"] = settings.get("loras") or adapters
    server = Server(base, number, named, settings, first, second, longest)
    if not probe:
        return server
    try:
        return server._replace(probe=_probed(server, get, ends + PROBE_SECONDS - limit))
    except LedgerError as error:
        return server._replace(unprobed=str(error))


# --- why few tokens hit ---------------------------------------------------------------------------------


def outside(server: Server, engine: ScrapedEngine) -> Outside:
    """What one engine of the server tells of itself."""
    families, figures = server.second.families, server.second.engines[engine]
    labels = _cache(server.second, engine.number)

    def samples(family: str, name: str) -> list[tuple[dict[str, str], float]]:
        found = families[family].samples if family in families else []
        return [
            (each.labels, each.value)
            for each in found
            if each.name == name and each.labels.get("engine", "0") == engine.number
        ]

    unit, capacity = unit_of(labels), _number(labels, "kv_cache_size_tokens")
    blocks, block_size = _number(labels, "num_gpu_blocks"), _number(labels, "block_size")
    if capacity is None and blocks and block_size:
        capacity = blocks * block_size
    lengths = [(float(each["le"]), n) for each, n in samples(LENGTHS, f"{LENGTHS}_bucket") if "le" in each]
    prompt, cached = figures.get("prompt_tokens", 0.0), figures.get("cached_tokens")
    if cached is None:
        cached = figures.get("local_hit_tokens")
    generated = sum(value for _, value in samples(GENERATED, f"{GENERATED}_total"))
    return Outside(
        prefix_caching={"True": True, "False": False}.get(labels.get("enable_prefix_caching", "")),
        unit=unit,
        longest=server.longest,
        capacity=capacity,
        queried=figures.get("local_queried_tokens"),
        hits=figures.get("local_hit_tokens"),
        computed=None if cached is None else prompt - cached + generated,
        prompts=sum(n for _, n in samples(LENGTHS, f"{LENGTHS}_count")),
        prompt_tokens=prompt,
        short_prompts=max((n for most, n in lengths if unit is not None and most <= unit), default=0.0),
        adapters=bool(server.settings.get("loras")),
        drafts=bool(server.settings.get("drafts")),
        align=labels.get("mamba_cache_mode") == "align",
        engines=len(server.second.engines),
    )


def unit_of(labels: Mapping[str, str]) -> int | None:
    """The tokens in units of which prompts hit, by the labels of the cache's configuration."""
    return next((size for name in UNITS if (size := _number(labels, name))), None)


def _cache(scraped: Scraped, engine: str) -> dict[str, str]:
    found = [sample.labels for sample in scraped.families[CACHE].samples] if CACHE in scraped.families else []
    return next((each for each in found if each.get("engine", "0") == engine), found[0] if found else {})


def _number(labels: Mapping[str, str], name: str) -> int | None:
    text = labels.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 16 else None


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
    if key := os.environ.get("VLLM_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    asked = urllib.request.Request(f"{server.url}/v1/completions", msgspec.json.encode(body), headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(asked, timeout=max(0.1, ends - time.monotonic())) as response:
            answer: Any = msgspec.json.decode(response.read(LARGEST_ANSWER))
    except urllib.error.HTTPError as error:
        key = "; VLLM_API_KEY holds the key" if error.code in (401, 403) else ""
        raise LedgerError(f"{server.url}/v1/completions answers with status {error.code}{key}.") from None
    except (OSError, ValueError) as error:
        raise LedgerError(f"{server.url}/v1/completions gave no answer ({type(error).__name__}).") from None
    details = (answer.get("usage") or {}).get("prompt_tokens_details") if isinstance(answer, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else None


# --- what it says ---------------------------------------------------------------------------------------


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


def _models(text: str | Exception) -> tuple[tuple[str, ...], int, int | None]:
    """The served names of the models, how many of them are LoRA adapters, and the longest sequence."""
    try:
        found = msgspec.json.decode(text, type=_Models).data if isinstance(text, str) else []
    except msgspec.MsgspecError:
        return (), 0, None
    longest = next((each.max_model_len for each in found if each.max_model_len), None)
    models = tuple(printable(each.id) for each in found if each.parent is None)
    return models, len(found) - len(models), longest


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
