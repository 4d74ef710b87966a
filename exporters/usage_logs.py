"""Logs of what clients were told: JSON Lines of OpenAI responses, or of a gateway.

One reader per kind of line; the kind is found by its keys.

- An OpenAI response or last chunk (completions, chat, responses), with ``id`` and ``usage``, as it was sent,
  or below ``response``. The middleware of :mod:`kvledger.exporters.usage_middleware` writes such lines.
- LiteLLM's standard logging payload: https://docs.litellm.ai/docs/proxy/logging_spec
- OpenTelemetry spans with ``gen_ai.usage.*``, one a line, or OTLP's JSON:
  https://github.com/open-telemetry/semantic-conventions-genai
- Access logs of Envoy AI Gateway, with the same attributes or with its metadata keys ``llm_input_token``,
  ``llm_cached_input_token`` and ``llm_output_token``: https://aigateway.envoyproxy.io
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..audit.analysis.usage import Told
from ..audit.errors import LedgerError
from ..audit.text import shown_id

NAMES = ("gen_ai.response.id", "x-request-id", "x_request_id", "request_id", "trace_id")
PROMPT = ("gen_ai.usage.input_tokens", "llm_input_token")
CACHED = (
    "gen_ai.usage.cache_read.input_tokens",
    "gen_ai.usage.cache_read_input_tokens",
    "llm_cached_input_token",
)
OUTPUT = ("gen_ai.usage.output_tokens", "llm_output_token")


class UsageLog(NamedTuple):
    """The lines of a log that tell of a call, and how many others it has."""

    told: list[Told]
    other_lines: int


def read(path: Path) -> UsageLog:
    """Read a log. Raises LedgerError if it can't be read, or a line is no JSON object."""
    told: list[Told] = []
    others = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    found = told_in(line, path, number)
                    told += found
                    others += not found
    except OSError as error:
        raise LedgerError(f"{path} can't be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise LedgerError(f"{path} is no text in UTF-8.") from error
    return UsageLog(told, others)


def told_in(line: str | bytes, path: Path, number: int) -> list[Told]:
    """What one line of a log tells of calls. Raises LedgerError if it is no JSON object."""
    return list(_line(line, path, number))


def _line(line: str | bytes, path: Path, number: int) -> Iterator[Told]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise LedgerError(f"Line {number} of {path} is no JSON object.")
    try:
        for each in _told(record, number):
            if each.names and (each.prompt_tokens, each.cached, each.output_tokens) != (None, None, None):
                yield each
    except (TypeError, ValueError, AttributeError) as error:
        raise LedgerError(f"Line {number} of {path} has a token count that is no number.") from error


def _told(record: dict[str, Any], number: int) -> Iterator[Told]:
    if "resourceSpans" in record:
        for resource in record["resourceSpans"]:
            for scope in resource.get("scopeSpans", ()):
                for span in scope.get("spans", ()):
                    values = {each["key"]: _otlp_value(each["value"]) for each in span.get("attributes", ())}
                    yield _attributes(values | {"trace_id": span.get("traceId")}, number)
    elif "call_type" in record and "prompt_tokens" in record:
        yield _litellm(record, number)
    elif isinstance(record.get("attributes"), dict):
        trace = str((record.get("context") or {}).get("trace_id", "")).removeprefix("0x")
        yield _attributes(record["attributes"] | {"trace_id": trace}, number)
    elif any(key in record for key in (*PROMPT, *OUTPUT)):
        yield _attributes(record, number)
    else:
        response = record.get("response") if isinstance(record.get("response"), dict) else record
        if isinstance(response, dict) and isinstance(response.get("usage"), dict):
            names = [response.get("id"), *(record.get(name) for name in NAMES)]
            yield _usage(response["usage"], names, number)


def _usage(usage: Mapping[str, Any], names: Sequence[object], number: int) -> Told:
    """The ``usage`` of an OpenAI response, by the names of completions or of responses."""
    new = "input_tokens" in usage
    details = usage.get("input_tokens_details" if new else "prompt_tokens_details") or {}
    return Told(
        _names(names),
        _count(usage.get("input_tokens" if new else "prompt_tokens")),
        _count(details.get("cached_tokens")),
        _count(usage.get("output_tokens" if new else "completion_tokens")),
        number,
    )


def _litellm(record: Mapping[str, Any], number: int) -> Told:
    """LiteLLM gives a response its own id, and may keep the server's id in the response."""
    response = record.get("response")
    response = response if isinstance(response, dict) else {}
    usage = (record.get("metadata") or {}).get("usage_object") or response.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    names = [response.get("id"), record.get("id"), record.get("litellm_call_id"), record.get("trace_id")]
    return Told(
        _names(names),
        _count(record.get("prompt_tokens")),
        _count(details.get("cached_tokens")),
        _count(record.get("completion_tokens")),
        number,
    )


def _attributes(values: Mapping[str, Any], number: int) -> Told:
    return Told(
        _names([values.get(name) for name in NAMES]),
        _count(_first(values, PROMPT)),
        _count(_first(values, CACHED)),
        _count(_first(values, OUTPUT)),
        number,
    )


def _otlp_value(value: Mapping[str, Any]) -> object:
    return next(iter(value.values()), None)


def _first(values: Mapping[str, Any], names: Sequence[str]) -> object:
    return next((values[name] for name in names if values.get(name) not in (None, "", "-")), None)


def _names(values: Sequence[object]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(shown_id(str(value)) for value in values if value not in (None, "", "-")))


def _count(value: object) -> int | None:
    """A count of tokens; gateways write some as text. Raises ValueError or TypeError."""
    if value is None:
        return None
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(value)
    return int(value)  # type: ignore[call-overload, no-any-return]
