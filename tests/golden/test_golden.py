"""Commands print about recorded journals what they printed before.

A difference is a defect, unless the figure before was wrong. Then ``python -m tests.golden.outputs`` writes
the files anew, and the commit says why the new figures are right.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.golden.outputs import PRINTED, corpora, outputs, unpacked


@pytest.mark.golden
@pytest.mark.parametrize("corpus", corpora())
def test_commands_print_what_they_printed_before(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for each in ("scheduler-0.32.0-tokens", corpus):
        unpacked(tmp_path, each)
    before = {path.name: path.read_text() for path in (PRINTED / corpus).iterdir()}

    assert before == dict(outputs(corpus))
