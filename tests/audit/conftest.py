"""Markers for the two kinds of test that every invariant has."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers; test_registry.py checks that every invariant has a test with each of them."""
    config.addinivalue_line("markers", "violates(id): a history that breaks the invariant")
    config.addinivalue_line("markers", "near_miss(id): a history that nearly breaks the invariant")
