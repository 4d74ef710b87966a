"""The environments of other vLLM releases that scripts/releases.py builds, for tests marked ``releases``."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def built(release: str) -> ModuleType:
    """scripts/releases.py as a module. The test is skipped if the environment of ``release`` is not built."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(ROOT / "scripts")
        releases = importlib.import_module("releases")
    if not releases.is_built(release):
        pytest.skip(f"not here: python3 scripts/releases.py build {release}")
    return releases
