"""Journals replayed by the workers of a Dask cluster. Needs the fleet extra, there and here.

Each journal is one task. If a worker dies, another worker repeats its task. Results come back in the order of
the journals, so the figures equal those of a single process.
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

    The workers read the paths, so the paths must exist there. Raises :class:`LedgerError` where no scheduler
    answers.
    """

    def __init__(self, address: str, timeout_seconds: float = CONNECT_SECONDS) -> None:
        try:
            # A client with an address that it can't parse is left half made and warns at exit.
            resolve_address(coerce_to_address(address))
            self._client = Client(address, timeout=timeout_seconds, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            raise LedgerError(f"No Dask scheduler answers at {address}.") from error

    def __call__(self, work: Callable[[Path], Result], journals: Sequence[Path]) -> Iterator[Result]:
        """Yield the result of ``work`` for each journal, in their order."""
        futures = self._client.map(work, list(journals), pure=False)
        try:
            for future in futures:
                yield future.result()
        except KilledWorker as error:
            raise LedgerError(f"Workers died repeatedly on one journal: {error}.") from error
        finally:
            self._client.cancel(futures)

    def close(self) -> None:
        """Leave the cluster."""
        self._client.close()
