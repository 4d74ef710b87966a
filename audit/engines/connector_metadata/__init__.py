"""Which metadata reader is for which connector, by the name of the connector's class.

One small file a connector; none imports its connector (``docs/connectors.md``).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .example import ExampleReader
from .lmcache import LMCacheMPReader, LMCacheReader
from .metadata_reader import MetadataReader
from .multi import MultiReader
from .nixl import NixlReader
from .offloading import OffloadingReader, SimpleCPUOffloadReader

_readers: dict[str, type[MetadataReader]] = {
    "ExampleConnector": ExampleReader,
    "LMCacheConnectorV1": LMCacheReader,
    "LMCacheConnectorV1Dynamic": LMCacheReader,
    "LMCacheMPConnector": LMCacheMPReader,
    "LMCacheMPConnectorUpstream": LMCacheMPReader,
    "MultiConnector": MultiReader,
    "NixlConnector": NixlReader,
    "NixlPullConnector": NixlReader,
    "OffloadingConnector": OffloadingReader,
    "SimpleCPUOffloadConnector": SimpleCPUOffloadReader,
}


def metadata_readers() -> Mapping[str, type[MetadataReader]]:
    """Every reader class, by the name of the connector's class."""
    return MappingProxyType(_readers)


def register(connector_name: str, reader_class: type[MetadataReader]) -> None:
    """Read the metadata of connectors whose class is called ``connector_name`` with this class."""
    _readers[connector_name] = reader_class


def reader_of(connector: Any) -> MetadataReader | None:
    """A reader for a live connector; None if kvledger cannot read its metadata."""
    reader_class = _readers.get(type(connector).__name__)
    try:
        if reader_class is None:
            return None
        if issubclass(reader_class, MultiReader):
            return reader_class(connector, reader_of)
        return reader_class(connector)
    except (AttributeError, TypeError, ValueError):  # a class of that name with other attributes
        return None
