"""Loads the Hypothesis profile: ``thorough``, unless ``--hypothesis-profile`` names another."""

import os

import tests.examples  # noqa: F401  registers the profiles
from hypothesis import settings

settings.load_profile("thorough")

if "PYTEST_XDIST_WORKER" in os.environ:
    # pytest-xdist sets a width of 80, and tests would print narrower tables than without workers.
    os.environ.pop("COLUMNS", None)
