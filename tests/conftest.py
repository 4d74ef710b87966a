"""Loads the Hypothesis profile: ``thorough``, unless ``--hypothesis-profile`` names another."""

import tests.examples  # noqa: F401  registers the profiles
from hypothesis import settings

settings.load_profile("thorough")
