"""The Grafana boards, and the two forms in which they are written.

The files in ``boards/`` are the only source: edit them by hand, or in Grafana and export them. ``check.py``
says what must hold of them. They have the *provisioning* form: Grafana loads them from a folder, and the data
source is a variable of the board. Of the *sharing* form, which a person imports, Grafana asks for the data
source ``DS_PROMETHEUS``.

JSON model: https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from ..audit.errors import LedgerError

FOLDER = Path(__file__).parent / "boards"
NAMES = ("trust", "tokens", "compare")

Form = Literal["provisioning", "sharing"]
FORMS: tuple[Form, ...] = get_args(Form)

OLDEST_GRAFANA = "10.0.0"
INPUT = "DS_PROMETHEUS"


def form(word: str) -> Form:
    """Check that ``word`` is a form. Raises :class:`LedgerError` if it is none."""
    for each in FORMS:
        if word == each:
            return each
    raise LedgerError(f"{word!r} is neither {' nor '.join(FORMS)}.")


def board(name: str) -> dict[str, Any]:
    """One of the boards :data:`NAMES`."""
    return dict(json.loads((FOLDER / f"kvledger-{name}.json").read_text()))


def rows(board: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each heading with its panels, which are inside it or after it."""
    panels = board["panels"]
    places = [place for place, panel in enumerate(panels) if panel["type"] == "row"]
    for place, following in zip(places, [*places[1:], len(panels)], strict=True):
        yield panels[place], [*panels[place]["panels"], *panels[place + 1 : following]]


def files(form: Form) -> Iterator[tuple[str, str]]:
    """File name and JSON text of every board."""
    for name in NAMES:
        found = board(name)
        built = found if form == "provisioning" else shared(found)
        yield f"kvledger-{name}.json", json.dumps(built, indent=2) + "\n"


def shared(provisioned: Mapping[str, Any]) -> dict[str, Any]:
    """The form in which Grafana asks for the data source at import."""
    board = json.loads(json.dumps(provisioned).replace("${datasource}", f"${{{INPUT}}}"))
    variables = board["templating"]["list"]
    board["templating"]["list"] = [each for each in variables if each["type"] != "datasource"]
    prometheus = {
        "name": INPUT,
        "label": "Prometheus",
        "description": "The Prometheus that scrapes the sidecars.",
        "type": "datasource",
        "pluginId": "prometheus",
        "pluginName": "Prometheus",
    }
    kinds = sorted({panel["type"] for _, panels in rows(board) for panel in panels})
    required = [
        {"type": "grafana", "id": "grafana", "name": "Grafana", "version": OLDEST_GRAFANA},
        {"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": "1.0.0"},
        *({"type": "panel", "id": kind, "name": kind.capitalize(), "version": ""} for kind in kinds),
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
