"""The register of workloads: a name for each variant of each."""

from collections.abc import Callable
from functools import partial
from typing import Any

from kvledger.audit.conformance.driver import Driver

Course = Callable[..., Driver]
"""Called with `attach`, or with nothing; leaves the engine idle."""

WORKLOADS: dict[str, Course] = {}
BOTH: dict[str, dict[str, Any]] = {"sync": {}, "async": {"asynchronous": True}}


def workload(**variants: dict[str, Any]) -> Callable[[Course], Course]:
    """Register a workload, as `name_variant` once for each variant of its engine."""

    def register(course: Course) -> Course:
        for suffix, setup in (variants or {"": {}}).items():
            name = f"{course.__name__}_{suffix}".rstrip("_")
            WORKLOADS[name] = partial(course, **setup) if setup else course
        return course

    return register
