"""What a check says of a real server whose cache is too small; the proof has eleven others."""

from __future__ import annotations

from pathlib import Path

import pytest
from proofs.hit_reasons import PLANTED, asked, named

pytestmark = pytest.mark.serving


def test_the_reason_is_named(tmp_path: Path) -> None:
    reasons = [each["id"] for each in named(asked("a small cache", tmp_path))]

    assert [PLANTED["a small cache"].reason] == reasons[:1]
