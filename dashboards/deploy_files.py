"""The files in ``deploy/`` that run kvledger beside a server, in a form that can be copied out of the wheel.

In the repository the files refer to each other across folders; a written form has them in one folder, and the
references are rewritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..audit.errors import LedgerError
from .boards import put

# --- The recording and alert rules for Prometheus: ``kvledger-rules.yaml``, their only source.

FILE = "kvledger-rules.yaml"
SOURCE = Path(__file__).parent / FILE


def rules() -> list[dict[str, Any]]:
    """Every rule as Prometheus reads it: those with ``record``, then those with ``alert``."""
    import yaml

    return [rule for group in yaml.safe_load(SOURCE.read_text())["groups"] for rule in group["rules"]]


def write_rules(folder: Path) -> Path:
    """Write the rule file into ``folder``, which is created."""
    return put(folder, FILE, SOURCE.read_text())


ROOT = Path(__file__).parent / "deploy"


class Form(NamedTuple):
    """One way to deploy: its files, and what to do with them once they are in a folder."""

    folder: str
    """The folder below ``deploy``; "" for that folder itself."""
    files: tuple[str, ...]
    needs: tuple[str, ...] = ()
    """Further files, relative to ``deploy``; they are written beside the others."""
    rewritten: tuple[tuple[str, str], ...] = ()
    """References to those files, and what takes their place."""
    next: str = ""


FORMS = {
    "compose": Form(
        "compose",
        ("compose.yaml", "prometheus.yaml"),
        needs=("Containerfile", f"../{FILE}"),
        rewritten=(
            ("docker compose -f dashboards/deploy/compose/compose.yaml up", "docker compose up"),
            (
                "    build:\n      context: ../../..\n      dockerfile: dashboards/deploy/Containerfile\n",
                "",
            ),
            (f"../../{FILE}", f"./{FILE}"),
        ),
        next="Build the image as the Containerfile says, then: docker compose up",
    ),
    "kubernetes": Form(
        "kubernetes",
        (
            "component/kustomization.yaml",
            "component/sidecar.yaml",
            "component/podmonitor.yaml",
            "component/networkpolicy.yaml",
            "example/kustomization.yaml",
            "example/vllm.yaml",
            "tls/kustomization.yaml",
            "tls/sidecar.yaml",
            "tls/web.yaml",
        ),
        rewritten=(("kubectl apply -k dashboards/deploy/kubernetes/example", "kubectl apply -k example"),),
        next="Add component/ to the kustomization of your engine; example/ shows how",
    ),
    "helm": Form(
        "helm",
        (
            "Chart.yaml",
            "values.yaml",
            "templates/deployment.yaml",
            "templates/service.yaml",
            "templates/podmonitor.yaml",
            "templates/networkpolicy.yaml",
        ),
        next="helm install vllm DIR --set image.kvledger=REGISTRY/kvledger",
    ),
    "systemd": Form(
        "systemd",
        ("kvledger.service",),
        next="Copy it to /etc/systemd/system, then: systemctl enable --now kvledger",
    ),
    "containerfile": Form("", ("Containerfile",), next="Build it from the root of the repository"),
}


def form(name: str) -> Form:
    """The form called ``name``. Raises :class:`LedgerError` for another name."""
    if name not in FORMS:
        *others, last = FORMS
        raise LedgerError(f"{name!r} is none of {', '.join(others)} and {last}.")
    return FORMS[name]


def files(chosen: Form) -> Iterator[tuple[str, str]]:
    """Each file of a form: its path below the folder to write, and its text."""
    folder = ROOT / chosen.folder
    paths = [(name, folder / name) for name in chosen.files]
    paths += [(Path(name).name, ROOT / name) for name in chosen.needs]
    for name, path in paths:
        text = path.read_text()
        for old, new in chosen.rewritten:
            text = text.replace(old, new)
        yield name, text


def write(chosen: Form, folder: Path) -> list[Path]:
    """Write the files of a form. Raises :class:`LedgerError` if one can't be written or is there already."""
    made = list(files(chosen))
    for name, _ in made:
        if (folder / name).exists():
            raise LedgerError(f"{folder / name} is there already; name another folder.")
    return [put((folder / name).parent, Path(name).name, text) for name, text in made]


def printed(chosen: Form) -> str:
    """The files of a form as one text; each of several files stands below a line with its name."""
    made = list(files(chosen))
    if len(made) == 1:
        return made[0][1].rstrip("\n")
    return "\n".join(f"---\n# {name}\n{text.rstrip()}" for name, text in made)
