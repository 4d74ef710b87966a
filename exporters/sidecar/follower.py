"""Follows every engine's journal under a folder, and keeps its place over restarts.

One thread reads; whoever shows the books takes ``lock``. Rules of this file:

- A book is shown when its journal has first been read to its end: a counter that starts low and
  climbs would look like traffic.
- The checkpoint holds every journal's own place. It is replaced at times, at the end, and where a
  segment begins, so that a restart reads at most one segment again.
- What was known and is not there any more is counted in ``health.lost``; the ledger does the rest,
  for it never takes a missing event for one that did not happen.
- A journal that can't be read stops itself alone. It is tried again, unless the defect is ours.
- An engine that ended and whose journal was removed stays in the sums of its name.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from ... import __version__
from ...audit.errors import LedgerError
from ...audit.journal.folder import Reader, find_journals, holds_journal, is_workers
from ...audit.replay import checkpoint, serialize
from ...audit.replay.checkpoint import Checkpoint, JournalState
from ...audit.replay.engine_audit import EngineAudit
from ..metrics.values import EngineAudits, Health
from .followed_journal import Followed

POLL_SECONDS = 0.5
"""How often journals are asked for more, and the folder for new journals."""

SAVE_SECONDS = 30.0
"""How often the checkpoint is replaced while something is read."""

LEAST_SAVE_SECONDS = 5.0
"""The least time between two checkpoints, however fast segments are read."""

RETRY_SECONDS = 30.0
"""How often a journal that can't be read is tried again."""

PAST_NAMES = 256
"""Engines whose journals are gone and whose sums are kept, by name; the longest gone is forgotten first."""

Tell = Callable[[str], None]
"""Told what went wrong, a sentence each."""


class Follower:
    """Follows every journal at or under ``path``, those to come included.

    ``folder`` keeps the checkpoint; None keeps none. Raises :class:`LedgerError` if there is no
    ``path``, if it is a file that is no journal, or if another follower has ``folder``. ``opened`` is
    told of every book that begins.
    """

    def __init__(self, path: Path, folder: Path | None = None, tell: Tell = lambda _: None) -> None:
        self.lock = threading.Lock()
        self.ready = threading.Event()
        self.health = Health()
        self.journals: dict[str, Followed] = {}
        self.past: dict[str, EngineAudit] = {}
        self.opened: Callable[[EngineAudit], None] = lambda _: None
        self._path = path
        self._folder = folder
        self._tell = tell
        self._single = not path.is_dir() or holds_journal(path)
        if self._single:
            find_journals([path])  # it says what is wrong with it
        self._told: set[str] = set()
        self._held = -1
        self._due_at = time.monotonic() + SAVE_SECONDS
        self._saved_at = 0.0
        if folder is not None:
            self._held = checkpoint.take(folder)
            self._resume(folder)

    @property
    def books(self) -> EngineAudits:
        """What may be shown: engines that are gone, then the others by the name of their journal.

        To be asked, and looked at, by whoever holds ``lock``.
        """
        shown = sorted((one.name, one.book) for one in self.journals.values() if one.shown)
        self.health.unreadable = len(self.troubles)
        return EngineAudits([*self.past.values(), *(book for _, book in shown)], self.health)

    # --- the loop -----------------------------------------------------------------------------------

    def catch_up(self, stop: threading.Event | None = None) -> None:
        """Read all that is there by now; again where that took so long that much has come."""
        began = time.monotonic()
        for _ in range(10):
            round_began = time.monotonic()
            self.poll(stop)
            if time.monotonic() - round_began < 2 * POLL_SECONDS or (stop and stop.is_set()):
                break
        self.health.caught_up_seconds = time.monotonic() - began
        self.save()
        if not (stop and stop.is_set()):
            self.ready.set()

    def follow(self, stop: threading.Event) -> None:
        """Read what comes, until told to stop; then save."""
        while not stop.wait(POLL_SECONDS):
            self.poll(stop)
            if time.monotonic() >= self._due_at:
                self.save()
        self.save()

    def poll(self, stop: threading.Event | None = None) -> None:
        """Look for journals that come and go, and read each to its end of now."""
        self._find()
        for one in list(self.journals.values()):
            if stop and stop.is_set():
                return
            if not one.ended and not one.broken and time.monotonic() >= one.retry_at:
                self._read(one, stop)

    @property
    def troubles(self) -> list[str]:
        """Which journals can't be read now, and why. To be asked by whoever holds ``lock``."""
        return [f"{one.name}: {one.trouble}" for one in self.journals.values() if one.trouble]

    def close(self) -> None:
        """Let go of every file."""
        for one in self.journals.values():
            one.reader.close()
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    # --- one journal ----------------------------------------------------------------------------------

    def _read(self, one: Followed, stop: threading.Event | None) -> None:
        try:
            one.read(self.lock, self._soon, stop)
            one.trouble = ""
        except (LedgerError, OSError) as error:
            one.retry_at = time.monotonic() + RETRY_SECONDS
            self._trouble(one, str(error))
        except Exception as error:
            one.broken = True
            self._trouble(one, f"kvledger itself failed ({type(error).__name__}: {error})")

    def _soon(self) -> None:
        """A segment was begun, or a journal ended and may be removed from now on: save before long."""
        self._due_at = min(self._due_at, self._saved_at + LEAST_SAVE_SECONDS)
        if time.monotonic() >= self._due_at:
            self.save()

    def _trouble(self, one: Followed, sentence: str) -> None:
        if sentence != one.trouble:
            one.trouble = sentence
            self.health.troubles += 1
            self._tell(f"{one.name} is not followed: {sentence}")

    # --- which journals there are ---------------------------------------------------------------------

    def _find(self) -> None:
        there = set(self._listed())
        for name in there - self.journals.keys():
            if self._is_journal(name):
                book = EngineAudit(self._place(name))
                self.opened(book)
                with self.lock:
                    self.journals[name] = Followed(name, book, Reader(book.path))
        for name in self.journals.keys() - there:
            self._retire(name)

    def _listed(self) -> Iterator[str]:
        try:
            if self._single:
                if self._path.exists():
                    yield "."
                return
            with os.scandir(self._path) as entries:
                for entry in entries:
                    if not (entry.name.startswith(".") or is_workers(Path(entry.name))):
                        yield entry.name
        except OSError as error:
            # A folder that can't be listed for a while has not lost its journals.
            yield from self.journals
            self._once(f"{self._path} can't be listed: {error.strerror}.")

    def _place(self, name: str) -> Path:
        return self._path if self._single else self._path / name

    def _is_journal(self, name: str) -> bool:
        if self._single:
            return True
        place = self._place(name)
        try:
            return place.is_dir() and holds_journal(place)
        except (LedgerError, OSError) as error:
            self._once(str(error))
            return False

    def _once(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self.health.troubles += 1
            self._tell(sentence)

    def _retire(self, name: str) -> None:
        """Its folder is gone: keep its sums, and nothing else."""
        one = self.journals[name]
        if not one.ended and not one.broken:
            self._read(one, None)  # what was open is still there to be read
        if not one.ended and not one.broken:
            one.end(self.lock)
        with self.lock:
            one.reader.close()
            del self.journals[name]
            self._take_over(one.book)

    def _take_over(self, book: EngineAudit) -> None:
        past = self.past.pop(book.name, None) or EngineAudit(Path(book.name))
        past.auditor.engine = book.name
        past.absorb(book)
        self.past[book.name] = past
        while len(self.past) > PAST_NAMES:
            del self.past[next(iter(self.past))]
            self._lose("engine forgotten")

    def _lose(self, reason: str) -> None:
        self.health.lost[reason] = self.health.lost.get(reason, 0) + 1

    # --- the checkpoint -------------------------------------------------------------------------------

    def save(self) -> None:
        """Replace the checkpoint. One that can't be written is counted and said; the old one stays."""
        self._saved_at = time.monotonic()
        self._due_at = self._saved_at + SAVE_SECONDS
        if self._folder is None:
            return
        journals = [known for one in self.journals.values() if (known := one.state()) is not None]
        past = [msgspec.Raw(serialize.capture(book)) for book in self.past.values()]
        now = time.time()
        whole = Checkpoint(__version__, now, journals, past, self.health.lost)
        try:
            self.health.save_bytes = checkpoint.save(self._folder, whole)
        except OSError as error:
            self.health.save_failures += 1
            self._once(f"{self._folder} can't be written: {error.strerror}.")
            return
        self.health.saved_at = now
        for one in self.journals.values():
            one.book.checkpoint_seconds = now
        self.health.save_seconds = time.monotonic() - self._saved_at

    def _resume(self, folder: Path) -> None:
        """Go on from the checkpoint, as far as it and the journals are there."""
        try:
            found = checkpoint.load(folder)
        except LedgerError as error:
            other = isinstance(error, serialize.OtherLayout)
            self._lose("checkpoint of another version" if other else "checkpoint damaged")
            self._tell(f"{error} Every journal is read from its beginning, as far as it is there.")
            return
        if found is None:
            return
        self.health.lost = found.lost
        self.health.saved_at = found.at
        for raw in found.past:
            self._restored(raw, Path(), self._take_over)
        for known in found.journals:
            self._restored(known.book, self._place(known.name), partial(self._go_on, known))

    def _restored(self, data: msgspec.Raw, path: Path, use: Callable[[EngineAudit], None]) -> None:
        try:
            use(serialize.restore(bytes(data), path))
        except LedgerError as error:
            self._lose("checkpoint damaged")
            self._tell(f"{error} {path.name} is read from its beginning, as far as it is there.")

    def _go_on(self, known: JournalState, book: EngineAudit) -> None:
        if not book.path.exists():
            if not known.ended:
                book.end(stopped=known.stopped)
            self._take_over(book)
            return
        there = checkpoint.beginning(book.path, known.position.segment)
        if known.beginning and there != known.beginning:
            self._lose("journal replaced" if there else "segment removed")
            if there:  # another journal of this name: it is found as a new one
                book.end(stopped=known.stopped)
                self._take_over(book)
                return
        book.checkpoint_seconds = self.health.saved_at
        one = Followed(known.name, book, Reader(book.path, start=known.position))
        one.reader.ended = one.ended = known.ended
        one.reader.stopped = known.stopped
        one.shown = known.ended
        one.damage = known.damage
        one.saved = known
        self.journals[known.name] = one
