"""The ids by which a client knows a request of an engine, by the rules of vLLM's API server.

A *call* is what a client sends: one HTTP request, or one prompt given to ``LLM.generate``. Its id is the
``id`` of the response: a kind, and the header ``X-Request-Id`` or random digits, as in ``cmpl-ID``,
``chatcmpl-ID`` and ``resp_ID``. The engine runs a call as one request or several, named after the call:

- ``cmpl-ID-1``: the second prompt of a completion. Every completion has such a number.
- ``chatcmpl-ID_1``: the second conversation of a batch.
- ``resp_ID_1``: the second round of a response with tools.
- ``2_cmpl-ID-0``: the third of n samples of one prompt.
- ``cmpl-ID-HEX-beam-1``: the second beam of one step of a beam search, which has a request per beam and step.
- Since 0.14 vLLM appends ``-`` and eight random hex digits, unless VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is
  set.

Sources: vllm/entrypoints/openai/*/serving.py, vllm/v1/engine/parallel_sampling.py,
vllm/v1/engine/input_processor.py, https://github.com/vllm-project/vllm/pull/27987.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_SAMPLE = re.compile(r"(\d{1,4})_(.+)", re.DOTALL)
_SUFFIX = re.compile(r"(.+)-[0-9a-f]{8}", re.DOTALL)
_BEAM = re.compile(r"(.+)-[0-9a-f]{32}-beam-(\d{1,4})", re.DOTALL)
_NUMBERED = (
    re.compile(r"(cmpl-.+)-(\d{1,5})", re.DOTALL),
    re.compile(r"(chatcmpl-.+)_(\d{1,5})", re.DOTALL),
    re.compile(r"(resp_.+)_(\d{1,5})", re.DOTALL),
)
_NUMBERED_KINDS = ("cmpl-", "chatcmpl-", "resp_")
_KIND = re.compile(
    r"(?:cmpl-|chatcmpl-|resp_|generate-tokens-|embd-|pooling-|classify-|score-|rerank-)(.+)", re.DOTALL
)
_RANDOM = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class Part(NamedTuple):
    """A request of an engine as a part of a client's call.

    ``prompt``: number of the prompt, conversation or round in the call, from 0. ``sample``: number of the
    sample or beam, from 0; -1 if the call asked for one sample.
    """

    call: str
    prompt: int
    sample: int


def part_of(request_id: str, *, suffixed: bool = True) -> Part:
    """The call that an engine's request belongs to. ``suffixed``: its release appends random digits."""
    sample, stem = _without_sample(request_id)
    if suffixed:
        stem = _without_suffix(stem)
    if "-beam-" in stem and (beam := _BEAM.fullmatch(stem)):
        return Part(beam[1], 0, int(beam[2]))
    if stem.startswith(_NUMBERED_KINDS):  # the patterns cost more, and most requests have no such id
        for pattern in _NUMBERED:
            if numbered := pattern.fullmatch(stem):
                return Part(numbered[1], int(numbered[2]), sample)
    return Part(stem, 0, sample)


def client_names(
    request_id: str, traceparent: str | None, *, suffixed: bool = True
) -> Iterator[tuple[int, str]]:
    """Every id by which a client may ask for a request of an engine, each with a rank.

    Ids of a lower rank are more exact: 0 the engine's own id, 1 the call's id, 2 the ``X-Request-Id``, 3 a
    part of the call without the random digits, 4 the trace id.
    """
    yield 0, request_id
    call = part_of(request_id, suffixed=suffixed).call
    yield 1, call
    _, stem = _without_sample(request_id)
    bare = _without_suffix(stem) if suffixed else stem
    if bare != call and _NUMBERED[1].fullmatch(
        bare
    ):  # an X-Request-Id may end as the number of a conversation does
        yield 1, bare
    kind = _KIND.fullmatch(call)
    if kind:
        yield 2, kind[1]
    yield 3, bare
    if stem != request_id:
        yield 3, stem
        yield 3, _without_suffix(request_id) if suffixed else request_id
    if traceparent and (trace := _TRACE.fullmatch(traceparent)):
        yield 4, trace[1]


def rank(asked: str, request_id: str, traceparent: str | None = None, *, suffixed: bool = True) -> int:
    """How exactly ``asked`` names a request; the rank of :func:`client_names`, or -1 if it does not.

    A whole id matches, or one that ends within random digits of vLLM (rank 5). ``cmpl-a-4`` never matches
    ``cmpl-a-40-0``.
    """
    trace = _TRACE.fullmatch(asked)
    asked = trace[1] if trace else asked
    if asked not in request_id and asked not in (traceparent or ""):
        return -1  # every id that a client knows is a part of these
    names = client_names(request_id, traceparent, suffixed=suffixed)
    ranks = [each for each, name in names if name == asked]
    if ranks:
        return min(ranks)
    return 5 if request_id.startswith(asked) and _ends_in_random_digits(asked, request_id, suffixed) else -1


def _ends_in_random_digits(asked: str, request_id: str, suffixed: bool) -> bool:
    """Whether the end of ``asked`` lies within the random digits of a request's id."""
    suffix = _SUFFIX.fullmatch(request_id) if suffixed else None
    if suffix and len(asked) > len(suffix[1]) + 1:
        return True
    return any(digits.start() < len(asked) < digits.end() for digits in _RANDOM.finditer(request_id))


def _without_sample(request_id: str) -> tuple[int, str]:
    sample = _SAMPLE.fullmatch(request_id) if "_" in request_id[1:5] else None
    return (int(sample[1]), sample[2]) if sample else (-1, request_id)


def _without_suffix(request_id: str) -> str:
    suffix = _SUFFIX.fullmatch(request_id)
    return suffix[1] if suffix else request_id
