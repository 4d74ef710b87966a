"""Lets SGLang be imported on a CPU without its compiled packages. Import it before SGLang.

A stub can be imported, subclassed and asked for attributes. A call of it raises, so nothing is faked
silently.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

STUBS = frozenset(("sgl_kernel", "IPython", "torchvision", "gguf", "soundfile", "torchao"))
"""Packages that SGLang imports and does not call on a CPU."""

OWN_LAYERS = frozenset(("vllm.model_executor.layers.layernorm", "vllm.model_executor.layers.activation"))
"""Until 0.5.9 SGLang takes these layers from vLLM on a CPU without AMX. Here it keeps its own."""

VLLM = OWN_LAYERS | {"vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm._custom_ops"}
"""What SGLang sees of vLLM."""

MODELS = "sglang.srt.models."
MODEL = "sglang.srt.models.qwen3"
"""The one model of which the module is imported, of some 200."""


class _Stub(type):
    """The class of stubs: its attributes are stubs too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stub(f"{cls.__qualname__}.{name}")


def _stub(name: str) -> _Stub:
    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{name} is a stub")

    return _Stub(name.rpartition(".")[2], (), {"__qualname__": name, "__init__": refuse})


class _Module(ModuleType):
    __path__ = ()  # type: ignore[assignment]
    __version__ = "99.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _own_layer(name) if self.__name__ in OWN_LAYERS else None
        if found is None:
            found = _stub(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


def _own_layer(name: str) -> Any:
    """The class of this name that the importing module has just defined; None if it has none."""
    frame = sys._getframe(2)
    while "importlib" in frame.f_code.co_filename and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        package = name.partition(".")[0]
        if package == "vllm" and name not in VLLM:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if package in STUBS or package == "vllm":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """A stub has nothing to execute."""


def _one_model(iter_modules: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def modules(path: Any = None, prefix: str = "") -> Iterator[Any]:
        for module in iter_modules(path, prefix):
            if prefix != MODELS or module.name == MODEL:
                yield module

    return modules


def _allow_known_configurations() -> None:
    """Let 0.5.10 to 0.5.17 register configurations that a newer transformers has itself."""
    from transformers import AutoConfig

    auto: Any = AutoConfig
    register = auto.register
    auto.register = staticmethod(lambda name, config, exist_ok=False: register(name, config, exist_ok=True))


sys.meta_path.insert(0, _Finder())
pkgutil.iter_modules = _one_model(pkgutil.iter_modules)
if importlib.util.find_spec("transformers"):
    _allow_known_configurations()
