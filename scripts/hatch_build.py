"""Adds the few real files of src/kvledger to a wheel.

The rest of src/kvledger is links, and the wheel takes what they point to from the real folders. A
plain `force-include` in pyproject.toml would do, were it not put into editable installs too, where
the copied `__init__.py` hides the package of links.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FILES = ("__init__.py", "__main__.py", "py.typed")


class RealFiles(BuildHookInterface[Any]):
    """Runs at each wheel build; hatchling finds it by its base class."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Put FILES at the root of the package; paths are relative to it, as `sources` says."""
        if version == "standard":
            build_data["force_include"].update({f"src/kvledger/{name}": name for name in FILES})
