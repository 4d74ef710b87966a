"""Journals replayed by the workers of a Dask cluster. Needs the fleet extra, there and here.

A journal is one task. A task that was on a worker that died is done again by another, and results come
back in the order of the journals: the figures are those of one process to the last digit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from distributed import Client
from distributed.comm.addressing import resolve_address
from distributed.core import coerce_to_address
from distributed.scheduler import KilledWorker

from ..audit.errors import LedgerError
from ..audit.replay.parallel import Result

CONNECT_SECONDS = 10.0


class Fleet:
    """The workers of the scheduler at ``address``, as a :class:`~kvledger.audit.replay.parallel.Run`.

    Paths are read by the workers, so they must see them. Raises :class:`LedgerError` where nobody
    answers.
    """

    def __init__(self, address: str, timeout_seconds: float = CONNECT_SECONDS) -> None:
        try:
            # A client that can't make anything of an address is left half made, and tells so at exit.
            resolve_address(coerce_to_address(address))
            self._client = Client(address, timeout=timeout_seconds, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            raise LedgerError(f"No Dask scheduler answers at {address}.") from error

    def __call__(self, work: Callable[[Path], Result], journals: Sequence[Path]) -> Iterator[Result]:
        """As :class:`~kvledger.audit.replay.parallel.Run` has it."""
        futures = self._client.map(work, list(journals), pure=False)
        try:
            for future in futures:
                yield future.result()
        except KilledWorker as error:
            raise LedgerError(f"Workers died over and over on one journal: {error}.") from error
        finally:
            self._client.cancel(futures)

    def close(self) -> None:
        """Leave the cluster."""
        self._client.close()
