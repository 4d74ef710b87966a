"""How many examples a property test tries: all of them, or a share where `make test` asks for a fast run."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

FAST_PERCENT = 20
"""The share of examples that the profile ``fast`` tries."""

# In CI the same examples run every time; elsewhere each run tries others.
DERANDOMIZE = bool(os.environ.get("CI"))
settings.register_profile("thorough", max_examples=100, derandomize=DERANDOMIZE, deadline=None)
settings.register_profile("fast", max_examples=FAST_PERCENT, derandomize=DERANDOMIZE, deadline=None)


def examples(thorough: int, **options: Any) -> settings:
    """Settings of a property test: ``thorough`` examples, and the profile's share of them in a fast run.

    The loaded profile's own ``max_examples`` is that share in percent.
    """
    share = settings().max_examples
    return settings(max_examples=max(1, thorough * share // 100), deadline=None, **options)
