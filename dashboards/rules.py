"""The recording and alert rules for Prometheus: ``kvledger-rules.yaml``, their only source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .boards import put

FILE = "kvledger-rules.yaml"
SOURCE = Path(__file__).parent / FILE


def rules() -> list[dict[str, Any]]:
    """Every rule as Prometheus reads it: those with ``record``, then those with ``alert``."""
    import yaml

    return [rule for group in yaml.safe_load(SOURCE.read_text())["groups"] for rule in group["rules"]]


def write(folder: Path) -> Path:
    """Write the rule file into ``folder``, which is created."""
    return put(folder, FILE, SOURCE.read_text())
