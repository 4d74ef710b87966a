"""The boards as Grafana JSON, in two forms.

*Provisioning*: a file that Grafana loads from a folder; the data source is a variable of the board.
*Sharing*: a file that a person imports; Grafana then asks for the data source ``DS_PROMETHEUS``.

``generated/`` holds the committed copy, which `make docs` writes.
JSON model: https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from ..audit.errors import LedgerError
from . import compare_board, tokens_board, trust_board
from .panels import DATASOURCE, SIDECAR, laid_out, panel_types

Form = Literal["provisioning", "sharing"]
FORMS: tuple[Form, ...] = get_args(Form)

BOARDS: tuple[ModuleType, ...] = (trust_board, tokens_board, compare_board)

OLDEST_GRAFANA = "10.0.0"
SCHEMA_VERSION = 38
"""The version of Grafana's JSON model; a later Grafana upgrades an older model by itself."""

INPUT = "DS_PROMETHEUS"
VLLM_BOARDS = (
    ("vLLM: performance", "performance-statistics", "Deployment_id"),
    ("vLLM: queries", "query-statistics4", "Deployment_id"),
)
"""vLLM's own boards (examples/online_serving/dashboards): title, uid, and their variable of models."""
EXPLANATIONS = "http://127.0.0.1:9464/explain"
"""The address of a sidecar on the machine of the browser."""


def build(board: ModuleType, form: Form = "provisioning") -> dict[str, Any]:
    """Build one board in one form."""
    built = _provisioned(board)
    return built if form == "provisioning" else _shared(built, panel_types(board.ROWS))


def form(word: str) -> Form:
    """Check that ``word`` is a form. Raises :class:`LedgerError` if it is none."""
    for each in FORMS:
        if word == each:
            return each
    raise LedgerError(f"{word!r} is neither {' nor '.join(FORMS)}.")


def files(form: Form) -> Iterator[tuple[str, str]]:
    """File name and JSON text of every board."""
    for board in BOARDS:
        yield f"{board.UID}.json", json.dumps(build(board, form), indent=2) + "\n"


def _provisioned(board: ModuleType) -> dict[str, Any]:
    others = {
        **_link("kvledger", "", ""),
        "type": "dashboards",
        "tags": ["kvledger"],
        "asDropdown": True,
        "includeVars": True,
    }
    return {
        "uid": board.UID,
        "title": board.TITLE,
        "description": board.DESCRIPTION,
        "tags": ["kvledger", "vllm"],
        "editable": False,
        "graphTooltip": 1,
        "schemaVersion": SCHEMA_VERSION,
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "refresh": "30s",
        "annotations": {"list": []},
        "links": [others, *(_link(*each) for each in VLLM_BOARDS)],
        "templating": {"list": _variables()},
        "panels": laid_out(board.ROWS),
    }


def _link(title: str, uid: str, variable: str) -> dict[str, Any]:
    """A link to the board ``uid``, with the chosen models as ``variable``."""
    return {
        "type": "link",
        "title": title,
        "tags": [],
        "asDropdown": False,
        "includeVars": False,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": f"/d/{uid}?var-{variable}=${{model_name:percentencode}}" if uid else "",
    }


def _variables() -> list[dict[str, Any]]:
    datasource = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "refresh": 1,
        "options": [],
    }
    engines = f"kvledger_engine_info{{{SIDECAR}}}"
    of_model = f'kvledger_engine_info{{{SIDECAR}, model_name=~"$model_name"}}'
    explanations = {
        "name": "docs",
        "label": "Explanations",
        "description": "Address of a sidecar's /explain page that your browser can open.",
        "type": "textbox",
        "query": EXPLANATIONS,
        "hide": 0,
        "options": [{"selected": True, "text": EXPLANATIONS, "value": EXPLANATIONS}],
        "current": {"selected": True, "text": EXPLANATIONS, "value": EXPLANATIONS},
    }
    return [
        datasource,
        _variable("job", "Job", "label_values(kvledger_build_info, job)"),
        _variable("instance", "Instance", 'label_values(kvledger_build_info{job=~"$job"}, instance)'),
        _variable("model_name", "Model", f"label_values({engines}, model_name)"),
        _variable("engine", "Engine", f"label_values({of_model}, engine)", all_value=None),
        explanations,
    ]


def _variable(name: str, label: str, query: str, all_value: str | None = ".+") -> dict[str, Any]:
    """A choice among a label's values. Without ``all_value``, *All* means all listed values."""
    variable = {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": f"{name}-values"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "sort": 1,
        "hide": 0,
        "options": [],
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }
    return variable if all_value is None else {**variable, "allValue": all_value}


def _shared(provisioned: dict[str, Any], panels: list[str]) -> dict[str, Any]:
    """The form in which Grafana asks for the data source at import."""
    text = json.dumps(provisioned).replace("${datasource}", f"${{{INPUT}}}")
    board = json.loads(text)
    board["templating"]["list"] = [
        variable for variable in board["templating"]["list"] if variable["type"] != "datasource"
    ]
    prometheus = {
        "name": INPUT,
        "label": "Prometheus",
        "description": "The Prometheus that scrapes the sidecars.",
        "type": "datasource",
        "pluginId": "prometheus",
        "pluginName": "Prometheus",
    }
    required = [
        {"type": "grafana", "id": "grafana", "name": "Grafana", "version": OLDEST_GRAFANA},
        {"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": "1.0.0"},
        *({"type": "panel", "id": kind, "name": kind.capitalize(), "version": ""} for kind in panels),
    ]
    return {"__inputs": [prometheus], "__elements": {}, "__requires": required, **board}


def write(folder: Path, form: Form) -> list[Path]:
    """Write all boards of one form into ``folder``, which is created."""
    return [put(folder, name, text) for name, text in files(form)]


def put(folder: Path, name: str, text: str) -> Path:
    """Write one file, whole or not at all. Raises :class:`LedgerError` if it can't be written."""
    draft = folder / f"{name}.new"
    if folder.exists() and not folder.is_dir():
        raise LedgerError(f"{folder} can't be written: it is a file, not a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_text(text)
        draft.replace(folder / name)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise LedgerError(f"{folder / name} can't be written: {error.strerror}.") from error
    return folder / name
