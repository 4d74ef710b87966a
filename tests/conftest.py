"""Loads the Hypothesis profile ``thorough``, unless ``--hypothesis-profile`` names another."""

import functools
import gc
import os

import tests.examples  # noqa: F401  registers the profiles
import typer.main
from hypothesis import settings

settings.load_profile("thorough")

if "PYTEST_XDIST_WORKER" in os.environ:
    # pytest-xdist sets a width of 80, and tests would print narrower tables than without workers.
    os.environ.pop("COLUMNS", None)

# A user's process builds the commands once, and this one runs hundreds of command lines.
typer.main.get_command = functools.cache(typer.main.get_command)

# The imports of an engine leave a million objects, which the collector would walk again and again.
gc.set_threshold(50_000, 20, 20)
