"""Logs of what clients were told: JSON Lines of responses, or of a gateway.

:data:`PRODUCERS` has a row for each kind of line: where it has the ids and the figures, and what its prompt
figure counts. The first row that finds a figure reads the line. A line that none understands is counted, and
the first one of them is said with its reason; the others are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..audit.analysis.usage import Told, ToldOfCalls
from ..audit.foreign import Unreadable, count, lines_of, parsed
from ..audit.text import shown_id


class Producer(NamedTuple):
    """What lines of one kind tell. A path names a value in nested objects; of several, the first that is.

    ``where``: who writes such lines, and what is special in them. ``ids``: of the call, the most exact first.
    ``rest``: the prompt figure leaves out the tokens that were read from the cache and those that were
    written to it. ``marks``: only a line that has one of these is of this kind; none: its figures suffice.
    ``tenant``: who pays, if the writer has authenticated the client.
    """

    name: str
    where: str
    ids: Sequence[str]
    prompt: Sequence[str]
    cached: Sequence[str]
    output: Sequence[str]
    written: Sequence[str] = ()
    rest: bool = False
    marks: Sequence[str] = ()
    tenant: Sequence[str] = ()


_IDS = ("x-request-id", "x_request_id", "request_id", "trace_id")
_CHAT = "prompt_tokens_details/cached_tokens"

PRODUCERS = (
    Producer(
        "LiteLLM's standard logging payload",
        "https://docs.litellm.ai/docs/proxy/logging_spec; it gives a response its own id, and may keep the "
        "server's in the response",
        ("response/id", "id", "litellm_call_id", "trace_id"),
        ("prompt_tokens",),
        (f"metadata/usage_object/{_CHAT}", f"response/usage/{_CHAT}"),
        ("completion_tokens",),
        marks=("call_type",),
        tenant=(
            "metadata/user_api_key_team_id",
            "metadata/user_api_key_org_id",
            "metadata/user_api_key_hash",
        ),
    ),
    Producer(
        "completions and chat",
        "OpenAI's form, of vLLM, SGLang and Dynamo's frontend, also below `response`; vLLM's chat says what "
        "was written",
        ("id", *_IDS),
        ("usage/prompt_tokens",),
        (f"usage/{_CHAT}",),
        ("usage/completion_tokens",),
        ("usage/prompt_tokens_details/created_cache_tokens",),
    ),
    Producer(
        "messages",
        "Anthropic's form, `/v1/messages`: `input_tokens` is what was neither read nor written. vLLM without "
        "`--enable-prompt-tokens-details` tells neither, and has the whole prompt there",
        ("id", *_IDS),
        ("usage/input_tokens",),
        ("usage/cache_read_input_tokens",),
        ("usage/output_tokens",),
        ("usage/cache_creation_input_tokens",),
        rest=True,
        marks=("usage/cache_read_input_tokens", "usage/cache_creation_input_tokens"),
    ),
    Producer(
        "responses",
        "OpenAI's `/v1/responses`; vLLM says what was written, too",
        ("id", *_IDS),
        ("usage/input_tokens",),
        ("usage/input_tokens_details/cached_tokens",),
        ("usage/output_tokens",),
        ("usage/input_tokens_details/cache_write_tokens",),
    ),
    Producer(
        "SGLang's /generate",
        "`meta_info` of the native endpoint",
        ("meta_info/id", *_IDS),
        ("meta_info/prompt_tokens",),
        ("meta_info/cached_tokens",),
        ("meta_info/completion_tokens",),
    ),
    Producer(
        "Langfuse's export of observations",
        "`usageDetails`, whose parts add up to its total: `input` is what was not cached",
        ("metadata/response_id", "traceId", "id"),
        ("usageDetails/input",),
        ("usageDetails/input_cached_tokens", "usageDetails/cache_read_input_tokens"),
        ("usageDetails/output",),
        ("usageDetails/cache_creation_input_tokens",),
        rest=True,
    ),
    Producer(
        "spans and access logs",
        "OpenTelemetry's `gen_ai.*` of both registries (the older names are those of vLLM's own spans), and "
        "Envoy AI Gateway's metadata keys",
        ("gen_ai.response.id", "gen_ai.request.id", *_IDS),
        ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm_input_token"),
        (
            "gen_ai.usage.cache_read.input_tokens",
            "gen_ai.usage.cache_read_input_tokens",
            "llm_cached_input_token",
        ),
        ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm_output_token"),
        ("gen_ai.usage.cache_creation.input_tokens",),
    ),
)
"""Each kind of line, in the order in which they are tried."""


BEGINS, ENDS = "<!-- kinds of lines, from exporters/usage_logs.py -->", "<!-- end -->"
"""What stands around the table of :data:`PRODUCERS` in docs/usage.md."""


def replaced(page: str) -> str:
    """docs/usage.md with the table of :data:`PRODUCERS`."""
    rows = ["| line | from | id of the call | prompt tokens | cached tokens |", "|---|---|---|---|---|"]
    for each in PRODUCERS:
        paths = [
            ", ".join(f"`{path.replace('/', '.')}`" for path in of)
            for of in (each.ids, each.prompt, each.cached)
        ]
        rest = " + read + written" if each.rest else ""
        rows.append(f"| {each.name} | {each.where} | {paths[0]} | {paths[1]}{rest} | {paths[2]} |")
    before, _, after = page.partition(BEGINS)
    return f"{before}{BEGINS}\n\n" + "\n".join(rows) + f"\n\n{ENDS}" + after.partition(ENDS)[2]


class UsageLog(NamedTuple):
    """What a log tells of calls.

    ``other_lines``: how many lines tell of none. ``first_other``: the first of them and why, a sentence.
    ``free``: how many calls a gateway priced at 0.
    """

    told: ToldOfCalls
    other_lines: int
    first_other: str = ""
    free: int = 0


def read(path: Path, tenant: str = "") -> UsageLog:
    """Read a log. Raises LedgerError if it can't be opened; a bad line is one of the others.

    ``tenant``: the field of a line that says who pays, ``a/b`` in nested objects; "": that of its kind.
    """
    told = ToldOfCalls()
    others, free, first = 0, 0, ""
    for number, line in lines_of(path):
        try:
            record = parsed(line, dict[str, Any])
            payer = _first(record, [tenant]) if tenant else None
            found = list(_told(record, number))
            for each in found:
                told.add(each._replace(tenant=_id(payer)) if tenant else each)
            free += bool(found) and record.get("response_cost") == 0
            why = "" if found else "has no usage, or no id"
        except Unreadable as error:
            why = str(error)
        others += bool(why)
        first = first or (f"line {number} {why}" if why else "")
    return UsageLog(told, others, first, free)


def _told(record: dict[str, Any], number: int) -> Iterator[Told]:
    """What one line tells of calls. Raises Unreadable for a figure that is no count of tokens."""
    for each in _records(record):
        for producer in PRODUCERS:
            if producer.marks and _first(each, producer.marks) is None:
                continue
            prompt, cached, output, written = (
                None if (value := _first(each, paths)) is None else count(value)
                for paths in (producer.prompt, producer.cached, producer.output, producer.written)
            )
            if (prompt, cached, output) != (None, None, None) and (names := _names(each, producer.ids)):
                if producer.rest and prompt is not None:
                    prompt += (cached or 0) + (written or 0)
                payer = _id(_first(each, producer.tenant))
                yield Told(names, prompt, cached, output, number, written, payer)
                break


def _records(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects of a line that may tell of a call: spans of OTLP's JSON, a span, a response, the line."""
    if "resourceSpans" in record:
        for resource in _list(record["resourceSpans"]):
            for scope in _list(resource.get("scopeSpans", [])):
                for span in _list(scope.get("spans", [])):
                    values = {
                        str(each.get("key")): next(iter(_object_or_empty(each.get("value")).values()), None)
                        for each in _list(span.get("attributes", []))
                    }
                    yield values | {"trace_id": span.get("traceId")}
    elif isinstance(record.get("attributes"), dict):
        trace = str(_object_or_empty(record.get("context")).get("trace_id", "")).removeprefix("0x")
        yield record["attributes"] | {"trace_id": trace}
    elif isinstance(record.get("response"), dict) and "call_type" not in record:
        yield {name: record[name] for name in _IDS if name in record} | record["response"]
    else:
        yield record


def _list(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise Unreadable("is no OTLP: a list of objects is something else")
    return value


def _object_or_empty(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _first(record: Mapping[str, Any], paths: Sequence[str]) -> object:
    """The first value that is there; gateways write ``-`` for none."""
    for path in paths:
        if "/" not in path:
            value: Any = record.get(path)
        else:
            value = record
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
                if value is None:
                    break
        if value not in (None, "", "-"):
            return value
    return None


def _id(value: object) -> str:
    return "" if value is None else shown_id(str(value))


def _names(record: Mapping[str, Any], paths: Sequence[str]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for path in paths:
        value = _first(record, [path]) if "/" in path else record.get(path)
        if value not in (None, "", "-"):
            found[shown_id(str(value))] = None
    return tuple(found)
