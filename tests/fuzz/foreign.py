"""Fuzz the readers of text that others wrote: ``python -m tests.fuzz.foreign 100000 [SEED]``.

Each reader gets well-formed text that was mutated: bytes flipped, cut and repeated, values replaced by ones
that are hard to read. It must answer with what it read or with its one kind of error, in time and memory.
"""

from __future__ import annotations

import gzip
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
from tests.time_limits import TooLong, limited, limited_memory

from kvledger.audit.errors import LedgerError
from kvledger.audit.events import AnyEvent
from kvledger.audit.foreign import Unreadable
from kvledger.audit.hash_key import HashKey
from kvledger.audit.replay.request_traces import traced_requests
from kvledger.exporters import usage_logs
from kvledger.exporters.kv_events import Contents, Received, decoded
from kvledger.exporters.reports.conformance import options_of
from kvledger.exporters.reports.routing import predictions
from kvledger.exporters.served_engine import _models, _scraped, _settings, _version
from kvledger.exporters.sidecar.web_config import load

MOST_SECONDS = 5.0

USAGE = {"prompt_tokens": 70, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 64}}
CALLS = [
    {"id": "cmpl-1", "usage": USAGE},
    {"call_type": "acompletion", "id": "x", "prompt_tokens": 7, "completion_tokens": 1, "metadata": {}},
    {
        "attributes": {"gen_ai.usage.input_tokens": 5, "gen_ai.response.id": "a"},
        "context": {"trace_id": "0x1"},
    },
    {
        "resourceSpans": [
            {
                "scopeSpans": [
                    {"spans": [{"attributes": [{"key": "llm_input_token", "value": {"intValue": "5"}}]}]}
                ]
            }
        ]
    },
]
TRACE = [
    {"timestamp": 27.5 * n, "input_length": 900 + n, "output_length": 52, "hash_ids": [46, 47, n]}
    for n in range(3)
]
METRICS = """# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 3.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",enable_prefix_caching="True",engine="0"} 1.0
vllm:lora_requests_info{max_lora="4"} 1.7e9
vllm:request_prompt_tokens_bucket{engine="0",le="+Inf"} 3.0
process_start_time_seconds 1.7e+09
"""
CONFIG = """tls_server_config: {cert_file: a, key_file: b}
http_server_config: {headers: {X-Frame-Options: deny}}
basic_auth_users: {alice: $2b$12$abc}
"""
BATCH = [
    1.7e9,
    [
        ["BlockStored", [1, b"h" * 32], None, [1, 2, 3, 4], 2, None, "GPU"],
        {"type": "BlockRemoved", "block_hashes": [5], "medium": "CPU", "group_idx": 1},
        ["AllBlocksCleared"],
    ],
    0,
]

HARD = (
    *(
        b"1e999",
        b"NaN",
        b"-Infinity",
        b"9" * 4_301,
        b"9223372036854775808",
        b"-1",
        b"1e308",
        b"true",
        b"null",
    ),
    *(b'"\\ud800"', b"\xff", b"\x00", b"{}", b"[]", b'""', b"[" * 3_000, b'{"a":' * 3_000, b"\n", b'"', b"}"),
    *(b"1099511627776", b"2001-99-99", b'le="x"', b"\\", b"%", b"\xe2\x80\xa8"),
)
HARD_VALUES = (
    *(float("nan"), float("inf"), -1e308, 1 << 63, -(1 << 63), (1 << 64) - 1, None, True, "", "x" * 5_000),
    *([], {}, [[]], b"", b"\xff" * 40, {"type": []}, ["BlockStored"], [1, 2], 0, -1),
)


def mutated(rng: random.Random, text: bytes) -> bytes:
    """The text with one to four changes."""
    for _ in range(rng.randint(1, 4)):
        place, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        end = min(end, place + 12)
        before, rest = text[:place], text[end:]
        flipped = bytes([rng.randrange(256)]) + text[place + 1 :]
        text = before + rng.choice((rng.choice(HARD) + rest, rest, flipped, b"", text[place - 9 :]))
    return text


def changed(rng: random.Random, value: object) -> object:
    """A value with one of its parts replaced by one that is hard to read."""
    if isinstance(value, (list, dict)) and value and rng.random() < 0.8:
        copy = dict(value) if isinstance(value, dict) else list(value)
        key = rng.choice(list(copy)) if isinstance(copy, dict) else rng.randrange(len(copy))
        copy[key] = changed(rng, copy[key])  # type: ignore[index]
        return copy
    return rng.choice(HARD_VALUES)


def _lines(values: Iterable[object]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in values)


KEY = HashKey("sixteen characters")
_whole = msgspec.msgpack.Decoder(AnyEvent).decode


def _read_batch(payload: bytes) -> None:
    """What is recorded of a batch must be readable in the journal."""
    event = decoded(Received(1, payload, False), 0, 0, KEY, contents=Contents(KEY))
    assert event == _whole(msgspec.msgpack.encode(event))


def _read_metrics(data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise Unreadable("is no text") from error
    _settings(_scraped("http://host", text), _version(text))
    _models(text)


class Reader(NamedTuple):
    """A reader, and the text that is mutated for it."""

    read: Callable[[Path], object]
    text: bytes
    suffix: str = ""


READERS = {
    "usage log": Reader(usage_logs.read, _lines(CALLS)),
    "request trace": Reader(traced_requests, _lines(TRACE), ".jsonl"),
    "packed trace": Reader(traced_requests, gzip.compress(_lines(TRACE), mtime=0), ".jsonl.gz"),
    "predictions": Reader(predictions, _lines([{"request": "r", "predicted": {"5557": 16}}])),
    "metrics": Reader(lambda path: _read_metrics(path.read_bytes()), METRICS.encode()),
    "web config": Reader(load, CONFIG.encode()),
    "options": Reader(
        lambda path: options_of(path.read_bytes().decode("latin-1")), json.dumps({"a": {"b": [1]}}).encode()
    ),
    "KV events": Reader(lambda path: _read_batch(path.read_bytes()), msgspec.msgpack.encode(BATCH)),
}


def failures(number: int, first: int = 0) -> tuple[Counter[str], list[str]]:
    """How many texts each reader read and refused; and a line for each that it did neither with."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + number):
            rng = random.Random(seed)
            name = rng.choice(list(READERS))
            reader = READERS[name]
            text = mutated(rng, reader.text)
            if name == "KV events" and rng.random() < 0.7:
                text = msgspec.msgpack.encode(changed(rng, BATCH))
            path = Path(folder, "text" + reader.suffix)
            path.write_bytes(text)
            began = time.process_time()
            try:
                with limited(), limited_memory():
                    reader.read(path)
                counts[f"{name}: read"] += 1
            except (LedgerError, Unreadable):
                counts[f"{name}: refused"] += 1
            except TooLong:
                wrong.append(f"seed {seed}: {name}: it hangs")
            except Exception as error:
                wrong.append(f"seed {seed}: {name}: {type(error).__name__}: {error}"[:300])
            if time.process_time() - began > MOST_SECONDS:
                wrong.append(f"seed {seed}: {name}: took {time.process_time() - began:.0f} s")
    return counts, wrong


def main() -> int:
    """Returns 1 if a text was neither read nor refused, or took too much."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    counts, wrong = failures(number, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for name, count in sorted(counts.items()):
        print(f"{name} {count:,}")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{number:,} texts, {len(wrong):,} neither read nor refused, {memory} MiB", *wrong[:20], sep="\n  ")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
