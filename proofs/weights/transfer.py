"""A backend of vLLM's weight transfer that reads weights from a folder: those that vLLM has need a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)


@dataclass
class _Nothing(WeightTransferInitInfo):  # type: ignore[misc]
    pass


@dataclass
class _Folder(WeightTransferUpdateInfo):  # type: ignore[misc]
    folder: str


class FolderTransfer(WeightTransferEngine[_Nothing, _Folder]):  # type: ignore[misc]
    """Loads the weights of a folder into the model."""

    init_info_cls = _Nothing
    update_info_cls = _Folder

    def init_transfer_engine(self, init_info: _Nothing) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def finish_weight_update(self) -> None:
        """Nothing to finalize."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one chunk. vLLM's method also waits for an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: _Folder) -> None:
        """Load one chunk."""
        from .engine import load_into

        load_into(self.model, update_info.folder)

    def shutdown(self) -> None:
        """Nothing to release."""
