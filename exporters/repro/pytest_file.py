"""The standalone test of a reproduction: one Python file that needs vLLM and nothing of kvledger.

The file drives vLLM's scheduler through the workload and compares one figure of the engine with the right
one. It has to run on the release with the fault and on the one that fixed it, so it passes each constructor
only the arguments that the installed release has. Parts of the driver that the workload does not need are
left out.

kvledger runs the file, and a journal may hold any text. So a value of the journal enters the file in two ways
only: as a literal of :func:`_literal`, or in the docstring through :func:`_docstring`. Settings that choose
parts of the driver are checked by type first, and :func:`_require_docstring` looks at the finished file.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ... import __version__
from ...audit.errors import LedgerError
from ...audit.faults.catalogue import Fault
from ...audit.repro import engine_figures
from ...audit.repro.rebuild import require_types
from ...audit.traffic.driver_v0 import V0Setup
from ...audit.traffic.engine_setup import EngineSetup
from ...audit.traffic.lmcache import CHUNK_TOKENS, COMPILED
from ...audit.traffic.script import Check, Op, Request, Workload, script_literal
from .bug_report import Explanation, explain

WIDTH = 108
_SETTINGS = {
    "num_blocks": "blocks",
    "block_size": "block_size",
    "enable_prefix_caching": "prefix_caching",
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "max_batched_tokens",
    "max_model_len": "max_model_len",
    "enable_chunked_prefill": "chunked_prefill",
    "scheduler_reserve_full_isl": "reserve_full_isl",
    "policy": "policy",
}
"""The settings in the file by vLLM's names, which its constructors take, and those of EngineSetup."""

_SETTINGS_OF_V0 = {
    "num_blocks": "blocks",
    "num_cpu_blocks": "cpu_blocks",
    "block_size": "block_size",
    "enable_prefix_caching": "prefix_caching",
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "max_batched_tokens",
    "max_model_len": "max_model_len",
    "enable_chunked_prefill": "chunked_prefill",
    "preemption_mode": "preemption_mode",
    "policy": "policy",
}

_LMCACHE = ("lmcache", "lmcache bundled")

_LAYERS = {
    "full": "kv_cache.FullAttentionSpec, **layer",
    "sliding": "kv_cache.SlidingWindowSpec, **layer, sliding_window={window}",
    "cross": "kv_cache.CrossAttentionSpec, **layer",
    "replay": "kv_cache.SlidingWindowMLASpec, **layer, sliding_window={window}, bounded_replay=True",
}
_SUM = "seen == RIGHT or min(seen) >= 0 and sum(seen) == engine.requests[{name}].num_prompt_tokens"
_CONDITIONS = {
    ("reported", "tokens/negative"): (
        _SUM,
        "any release must hold: none is negative, they sum to the prompt",
    ),
    ("reported", "tokens/source-sum"): (_SUM, "any release must hold: they sum to the prompt"),
    ("reported", "tokens/set-once"): (
        "seen[:2] in engine.scheduler.connector.admissions[{name}]",
        "any release must hold: both are of one admission",
    ),
    ("planned_to_load", "connector/promise-not-loaded"): ("seen >= RIGHT", "at least"),
    ("planned_to_save", "connector/save-gap"): ("seen >= RIGHT", "at least"),
    ("tracked", "connector/tracker-lag"): ("seen >= RIGHT", "at least: it may know tokens in flight"),
    ("reported", "connector/failed-load-counted"): ("seen[1] == RIGHT[1]", "is wrong: the external tokens"),
}
"""By probe and finding: the condition where it is not ``seen == RIGHT``, and what it asserts, in words.

Releases differ in which admission of a prompt they report, so a release without the fault may report other
figures than those of kvledger's account.
"""


def render(
    workload: Workload,
    check: Check,
    *,
    assumed: Sequence[str] = (),
    file: str = "test_repro.py",
) -> str:
    """The text of the file. Raises LedgerError where a standalone driver can't do what the workload needs."""
    explained, v0 = explain(workload, check), workload.engine.get("scheduler") == "v0"
    require_types(workload.engine, v0=v0)
    fields = dataclasses.fields(V0Setup if v0 else EngineSetup)
    settings = {field.name: field.default for field in fields} | workload.engine
    if refused := _refused(settings, v0):
        raise LedgerError(f"The finding was reproduced, but no file can show it: {refused}.")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    header = environment.get_template("header.txt.j2").render(
        title=explained.title,
        says=_flowed(explained.says),
        facts=_facts(explained, assumed),
        file=file,
        version=__version__,
    )
    context = {
        "header": _docstring(header),
        **(_settings_of_v0(settings) if v0 else _settings(settings)),
        **_lmcache(settings),
        **_needs(workload, settings),
        **_tables(workload, check, settings),
        **(figure := _figure(check, explained.fault)),
        "plain_answers": not figure["admissions"] and _are_plain(workload.requests.values()),
    }
    text = environment.get_template("v0.py.j2" if v0 else "v1.py.j2").render(context)
    _require_docstring(text, header)
    return text


def _refused(settings: dict[str, Any], v0: bool) -> str:
    """What the file's driver can't do, as the end of a sentence."""
    if v0:
        return "it has no asynchronous output processor of v0" if settings["asynchronous"] else ""
    if settings["connector"] not in (None, "scripted", *_LMCACHE):
        return f"it has no {settings['connector']}"
    return "it has no diffusion model" if settings["canvas"] else ""


# --- parts of the file ----------------------------------------------------------------------------------


def _settings(settings: dict[str, Any]) -> dict[str, Any]:
    window = settings["sliding_window"]
    own = "vllm.v1.core.sched.async_scheduler:AsyncScheduler" if settings["asynchronous"] else ""
    module, _, subclass = (settings["scheduler_class"] or own).partition(":")
    return {
        "subclass": subclass,
        "subclass_module": module,
        **{name: settings[name] for name in ("asynchronous", "pooling", "drafts")},
        "eagle": bool(settings["drafts"]) and settings["drafter"] == "eagle",
        "connector": settings["connector"] == "scripted",
        "groups": [_LAYERS[kind].format(window=window) for kind in settings["groups"]],
    }


def _settings_of_v0(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in ("partial_prefills", "block_size", "max_loras")}


def _lmcache(settings: dict[str, Any]) -> dict[str, Any]:
    """LMCache's options, if it is the connector."""
    if settings.get("connector") not in _LMCACHE:
        return {"lmcache": False}
    options = {
        "use_native": settings["connector"] == "lmcache bundled",
        "lmcache.chunk_size": settings.get("chunk_tokens", CHUNK_TOKENS),
        "lmcache.save_decode_cache": settings.get("save_decoded", False),
        "lmcache.save_unfull_chunk": False,
    }
    rows = [f"{_line(name)}: {_line(value)}," for name, value in options.items()]
    return {
        "lmcache": True,
        "lmcache_options": rows,
        "each_compiled": _wrapped(f"for name in {_literal(COMPILED)}:"),
    }


def _needs(workload: Workload, settings: dict[str, Any]) -> dict[str, Any]:
    """Which parts of the driver the workload needs."""
    script, requests = workload.script, workload.requests.values()
    connector = settings.get("connector") == "scripted"
    loads = any(op.loaded or op.failed_whole for op in script)
    reports = [
        ("loaded", loads),
        ("failed", fails := any(op.failed for op in script)),
        ("failed_whole", fails_whole := any(op.failed_whole for op in script)),
        ("sent", holds := any(request.hold for request in requests)),
    ]
    transfers = [
        ("finished_recving=loaded", loads),
        ("finished_sending=sent", holds),
        ("invalid_block_ids=invalid", fails),
        ("failed_recving=loaded.intersection(failed_whole)", fails_whole),
    ]
    return {
        "transfers": [words for words, needed in transfers if needed],
        "loads": loads,
        "calls": {op.do for op in script},
        "splits": any(op.do == "schedule" for op in script)
        and any(row[0] in ("schedule", "output") for row in script_literal(script)),
        "running": any(op.running for op in script),
        "fails": fails,
        "fails_whole": fails_whole,
        "holds": holds,
        "accepts": any(op.accepted for op in script),
        "proposes": bool(settings.get("drafts")) and not settings["asynchronous"],
        "stops": any(request.stop_at for request in requests),
        "sessions": any(request.resumable or request.chunks for request in requests),
        "lora": any(request.lora for request in requests),
        "options": list(_options(requests)),
        "reports": "".join(f", {name}=()" for name, needed in reports if needed) if connector else "",
    }


def _are_plain(requests: Iterable[Request]) -> bool:
    """True if each admission takes the next answer, which is a number of tokens."""
    return all(
        not request.resumable and not request.chunks and all(isinstance(one, int) for one in request.answers)
        for request in requests
    )


def _options(requests: Iterable[Request]) -> Iterable[str]:
    """Further arguments of vLLM's Request."""
    requests = list(requests)
    if any(request.priority for request in requests):
        yield 'priority=row.get("priority", 0)'
    if any(request.resumable or request.chunks for request in requests):
        yield "resumable=resumable"
    if any(request.salt for request in requests):
        yield 'cache_salt=row.get("salt")'
    if any(request.lora for request in requests):
        yield 'lora_request=row.get("lora") and LoRARequest(f"lora {row[\'lora\']}", row["lora"], "nowhere")'


def _tables(workload: Workload, check: Check, settings: dict[str, Any]) -> dict[str, Any]:
    """The literals: settings, requests, and the script up to where the figure is read."""
    names, pooling = _names_of_settings(workload, settings), settings.get("pooling", False)
    engine = ", ".join(f"{_literal(name)}:{_SPACE}{_literal(settings[ours])}" for name, ours in names.items())
    script = workload.script if check.after < 0 else workload.script[: check.after]
    return {
        "engine": _wrapped(f"{engine},", indent=""),
        "requests": [
            line
            for name, request in workload.requests.items()
            for line in _wrapped(f"{_literal(name)}: {_literal(_row(request, pooling))},")
        ],
        "script": _rows(script),
        "answers": any(request.answers for request in workload.requests.values()),
    }


def _names_of_settings(workload: Workload, settings: dict[str, Any]) -> dict[str, str]:
    """The settings that the workload depends on."""
    if settings.get("scheduler") == "v0":
        return _SETTINGS_OF_V0
    names = dict(_SETTINGS)
    if settings["policy"] == "fcfs":
        del names["policy"]
    if settings["connector"] is not None:
        names["kv_role"] = "kv_role"
        if any(op.failed or op.failed_whole for op in workload.script):
            names["kv_load_failure_policy"] = "load_failure_policy"
    return names


def _row(request: Request, pooling: bool) -> dict[str, Any]:
    """A request as the literal of its row, without what is as usual."""
    row: dict[str, Any] = {"prompt": list(request.prompt)}
    if not pooling:
        row["max_tokens"] = request.max_tokens
    if request.chunks:
        row["chunks"] = [list(chunk) for chunk in request.chunks]
    if request.answers:
        row["answers"] = _answers(request)
    for name in ("stop_at", "priority", "resumable", "salt", "lora", "hold"):
        value = getattr(request, name)
        if value:
            row[name] = value
    return row


def _answers(request: Request) -> Any:
    """The answers of a connector; a tuple of two is one answer, in JSON a list."""
    return [tuple(answer) if isinstance(answer, list) else answer for answer in request.answers]


def _rows(script: Sequence[Op]) -> list[str]:
    rows = []
    for row in script_literal(tuple(script)):
        if row == ("step", 1):
            row = ("step",)
        rows += _wrapped(f"{_literal(row)},")
    return rows


def _literal(value: Any) -> str:
    """A value as source, whatever text it holds. The spaces of a text are NUL until :func:`_wrapped`.

    Text has double quotes. Tuples inside of dictionaries become lists where they are names. Raises
    LedgerError for a value that has no literal.
    """
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{_literal(key)}: {_literal(_listed(one))}" for key, one in value.items()) + "}"
        )
    if isinstance(value, list):
        runs = [(one, len(list(equal))) for one, equal in itertools.groupby(map(_literal, value))]
        return "[" + ", ".join(f"*[{one}] * {n}" if n > 3 else ", ".join([one] * n) for one, n in runs) + "]"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_literal, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, str):
        return '"' + _escaped(value).replace('"', '\\"').replace(" ", _SPACE) + '"'
    if value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    raise LedgerError(f"The finding was reproduced, but no file can show it: {value!r} has no literal.")


def _line(value: Any) -> str:
    """The literal of a value, on a line that is not wrapped."""
    return _literal(value).replace(_SPACE, " ")


_SPACE = "\0"
"""Stands for a space inside of a text, where no line may end. A NUL of the text itself is escaped."""


def _docstring(text: str) -> str:
    """A docstring with exactly this text."""
    lines = [_escaped(line).replace('"""', '\\"\\"\\"') for line in text.split("\n")]
    return '"""' + "\n".join(lines) + '"""'


def _escaped(text: str) -> str:
    """The text for between quotes, on one line: backslashes and what can't be printed as a literal has it."""
    return "".join(one if one.isprintable() and one != "\\" else repr(one)[1:-1] for one in text)


def _require_docstring(text: str, header: str) -> None:
    """Raise LedgerError if the file begins with anything but the header as one docstring, or is no Python."""
    with contextlib.suppress(SyntaxError, ValueError):
        if ast.get_docstring(ast.parse(text), clean=False) == header:
            return
    raise LedgerError("The finding was reproduced, but the text of the journal makes no file of it.")


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) and all(isinstance(one, str) for one in value) else value


def _figure(check: Check, fault: Fault | None) -> dict[str, Any]:
    """The probe, the right figure and the condition."""
    condition, asserted = _CONDITIONS.get((check.probe, check.finding), ("seen == RIGHT", ""))
    words = fault.id if fault else check.finding.partition("/")[2]
    name = _line(check.request)
    return {
        "probe": source(check.probe),
        "probe_name": check.probe,
        "name": name,
        "what": _line(check.says),
        "right": _line(check.right),
        "condition": condition.format(name=name),
        "asserted": asserted,
        "admissions": "admissions" in condition,
        "raises": check.probe == "raised",
        "test": "test_" + re.sub(r"\W", "_", words, flags=re.ASCII),
    }


def source(probe: str) -> str:
    """The text of a probe, without annotations."""
    text = inspect.getsource(getattr(engine_figures, probe))
    text = re.sub(r"^def (\w+)\(.*?\) -> .*?:$", r"def \1(engine, name):", text, count=1, flags=re.M)
    return re.sub(r"^( +\w+): .*? = ", r"\1 = ", text, flags=re.M)


# --- layout ---------------------------------------------------------------------------------------------


def _facts(explained: Explanation, assumed: Sequence[str]) -> str:
    facts = list(explained.facts)
    facts += [f"Assumed: {sentence}" for sentence in assumed]
    return "\n".join(_flowed(fact, "- ") for fact in facts)


def _flowed(text: str, first: str = "") -> str:
    indent = " " * len(first)
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _wrapped(line: str, indent: str = "    ") -> list[str]:
    lines = textwrap.wrap(
        line, WIDTH - 4, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [each.replace(_SPACE, " ") for each in lines]
