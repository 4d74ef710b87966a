"""Drivers for tests: kvledger's own driver, and a short name for the scripted connector.

``connector="scripted"`` selects the class of :mod:`tests.scenarios.scripted_connector` that supports
the engine's KV cache groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvledger.audit.traffic.driver import Driver
from kvledger.audit.traffic.engine_setup import EngineSetup, setup_of

__all__ = ["Attach", "Driver", "engine_setup", "images", "lora", "start"]

Attach = Callable[[Any], object]
"""Called with a scheduler before its first request."""

SCRIPTED = "scripted"
SCRIPTED_MODULE = "tests.scenarios.scripted_connector"


def engine_setup(**options: Any) -> EngineSetup:
    """The setup of an engine; ``connector`` may be "scripted"."""
    scripted = options.get("connector") == SCRIPTED
    return setup_of(options, "Scripted" if scripted else "", SCRIPTED_MODULE)


def lora(name: str, number: int, path: str = "") -> dict[str, Any]:
    """The argument of vLLM's Request for a LoRA adapter."""
    from vllm.lora.request import LoRARequest

    return {"lora_request": LoRARequest(name, number, path or f"/adapters/{name}")}


def images(*places: tuple[str, int, int]) -> dict[str, Any]:
    """The argument of vLLM's Request for images: identity, first position, and positions of each."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return {
        "mm_features": [
            MultiModalFeatureSpec(None, "image", identity, PlaceholderRange(offset=first, length=length))
            for identity, first, length in places
        ]
    }


def start(attach: Attach = id, /, **options: Any) -> Driver:
    """A driver whose scheduler is passed to ``attach`` before its first request."""
    driver = Driver(engine_setup(**options))
    attach(driver.scheduler)
    return driver
