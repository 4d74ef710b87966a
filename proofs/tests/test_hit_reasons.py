"""A server whose cache is too small, and one that is fine and tells no details: what a check says of each."""

from __future__ import annotations

from pathlib import Path

import pytest
from proofs.hit_reasons import PLANTED, asked, named

pytestmark = pytest.mark.serving


@pytest.mark.parametrize("name", ["a small cache", "nothing, without details"])
def test_the_reason_is_named(tmp_path: Path, name: str) -> None:
    reasons = [each["id"] for each in named(asked(name, tmp_path))]

    assert reasons[:1] == ([PLANTED[name].reason] if PLANTED[name].reason else []), reasons
