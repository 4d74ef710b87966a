"""The markers by which each invariant is shown from both sides."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Known to ``--strict-markers``; test_catalogue.py holds that every invariant has both."""
    config.addinivalue_line("markers", "violates(id): a history that breaks the invariant")
    config.addinivalue_line("markers", "near_miss(id): one that comes close and does not")
