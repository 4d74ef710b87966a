"""The follower of a folder of journals.

It finds journals, audits each engine from where it stopped, and gives the audits to pages and exporters.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

from ... import __version__
from ...audit.bounded_tables import keep_newest
from ...audit.checks.registry import Violation
from ...audit.errors import LedgerError
from ...audit.journal.catalogue import Catalogue, find_journals, holds_journal, look_into
from ...audit.journal.format import is_live, segments
from ...audit.journal.host_folders import HostJournal
from ...audit.journal.reader import Batch, Position, Reader
from ...audit.replay import checkpoint, serialize
from ...audit.replay.checkpoint import Checkpoint, FoldedJournal, JournalState, beginning
from ...audit.replay.followed_audit import FollowedAudit, folded, settled
from ...audit.replay.parallel import WORTH_BYTES, Processes, cores, size_bytes
from ...audit.replay.recorded_events import FORGET_SECONDS
from ...audit.replay.request_traces import pair
from ..metrics import values
from ..metrics.values import EngineAudits, Health, engine_label, free_label

# --- audits lock ---------------------------------------------------------------------------------------
#
# The lock under which threads look at the audits, without waiting for the posting of any one journal.
#
# The follower's thread posts a batch under the lock of that journal alone. A thread that looks, such as one
# that answers ``/metrics``, takes the lock over all journals: the journals then stay the same, and each of
# them stands still as soon as its batch is posted. A journal that is not ready in time is left out of that
# look.


PATIENCE_SECONDS = 2.0
"""How long a look waits for all batches that are being posted. A batch takes milliseconds."""


class AuditsLock:
    """A context manager; one thread holds it at a time. Not reentrant."""

    def __init__(self, journals: Callable[[], Iterable[FollowedJournal]]) -> None:
        self.busy: set[str] = set()
        """The journals that were not ready in time, while the lock is held; empty otherwise."""
        self._journals = journals
        """Returns the journals that are followed; called with the guard held."""
        self._guard = threading.Lock()
        """Held by the thread that holds this lock."""
        self._held: list[FollowedJournal] = []
        """The journals whose own locks are held."""

    def __enter__(self) -> None:
        self._guard.acquire()
        until = time.monotonic() + PATIENCE_SECONDS
        for journal in self._journals():
            if journal.lock.acquire(timeout=max(0.0, until - time.monotonic())):
                self._held.append(journal)
            else:
                self.busy.add(journal.name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        held, self._held, self.busy = self._held, [], set()
        for journal in held:
            journal.lock.release()
        self._guard.release()


# --- journal finder ------------------------------------------------------------------------------------
#
# Which journals a follower reads: one journal, or all in a folder and in those of hosts, also later ones.


Notify = Callable[[str], None]
"""Called with one sentence for each problem."""


LOOK_SECONDS = 5.0
"""How often a folder that held no journal is looked at again: it may become that of a host."""


class JournalFinder(Protocol):
    """Names the journals to follow; a journal's name is its key in a checkpoint."""

    def names(self, followed: Iterable[str], notify: Notify) -> Iterable[str]:
        """List what may be a journal now; the ``followed`` ones if the listing fails."""

    def path(self, name: str) -> Path:
        """Return where the journal of this name is."""

    def is_journal(self, name: str, notify: Notify) -> bool:
        """Check that there is a journal under this name."""


class FolderFinder:
    """The journals in a folder and in the folders of hosts below it, or one journal by its own path.

    A journal in a host's folder has the name ``HOST/JOURNAL``. Raises :class:`LedgerError` if there is no
    ``root``, or if ``root`` is a file that is no journal.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._single = not root.is_dir() or holds_journal(root)
        """Whether ``root`` is one journal."""
        self._hosts: set[str] = set()
        self._look_at: dict[str, float] = {}
        """Folders that held no journal, and the monotonic time at which they are looked at again."""
        if self._single:
            find_journals([root])  # raises with the reason

    def names(self, followed: Iterable[str], notify: Notify) -> Iterator[str]:
        """The entries of the folder and of hosts' folders, without hidden ones and workers' journals.

        ``.`` for a single journal.
        """
        followed = list(followed)
        try:
            if self._single:
                if self._root.exists():
                    yield "."
                return
            names = _names(self._root)
        except OSError as error:
            # A folder that can't be listed for a while has not lost its journals.
            yield from followed
            notify(f"{self._root} can't be listed: {error.strerror}.")
            return
        hosts = {name.partition("/")[0] for name in followed if "/" in name}
        known = {name for name in followed if "/" not in name}
        for name in names:
            yield name
            if name in hosts or (name not in known and self._is_host(name, notify)):
                yield from self._names_of_host(name, followed, notify)

    def _is_host(self, name: str, notify: Notify) -> bool:
        """Whether a folder in which no journal is followed yet is that of a host."""
        now = time.monotonic()
        if name in self._hosts:
            return True
        if self._look_at.get(name, 0.0) > now:
            return False
        self._look_at[name] = now + LOOK_SECONDS
        folder = self._root / name
        try:
            if not folder.is_dir() or holds_journal(folder) or not any(look_into(folder)):
                return False
        except (LedgerError, OSError) as error:
            notify(str(error))
            return False
        self._hosts.add(name)
        return True

    def _names_of_host(self, host: str, followed: Iterable[str], notify: Notify) -> Iterator[str]:
        try:
            for name in _names(self._root / host):
                yield f"{host}/{name}"
        except OSError as error:
            yield from (name for name in followed if name.startswith(f"{host}/"))
            notify(f"{self._root / host} can't be listed: {error.strerror}.")

    def path(self, name: str) -> Path:
        """The journal's folder."""
        host = name.rpartition("/")[0]
        path = self._root if self._single else self._root / name
        return HostJournal.of(path, host) if host else path

    def is_journal(self, name: str, notify: Notify) -> bool:
        """Whether the entry is a folder with segments."""
        if self._single:
            return True
        path = self.path(name)
        try:
            return path.is_dir() and holds_journal(path)
        except (LedgerError, OSError) as error:
            notify(str(error))
            return False


def _names(folder: Path) -> list[str]:
    """What may be a journal, or the folder of a host."""
    return [path.name for path in Catalogue(folder).engines_or_hosts]


# --- ended engines -------------------------------------------------------------------------------------
#
# Engines that have ended: their sums by label, and when a label leaves the metrics.
#
# Engines restart, and their journals stay. Neither a scrape nor a restart of the sidecar may depend on how
# many engines ever ran:
#
# - The engine of a name that ended last keeps its own audit, with all its findings. The engines before it are
#   folded into one audit: their sums, and one finding per invariant. Of a folded journal the sidecar keeps
#   only what identifies it, so that it is not read again.
# - A name leaves as a whole when its last engine ended long ago, or when too many names have ended. Then its
#   series end; no counter falls. A name with an engine that is still followed stays.


MOST_GONE = 1024
"""How many removed journals are remembered."""


class Leaving(msgspec.Struct, frozen=True):
    """A name that leaves: the journal of its last engine ("" if it was removed), and if it leaves early."""

    name: str
    journal: str
    early: bool


class EndedEngines:
    """The ended engines of a follower. Times are Unix seconds."""

    def __init__(self) -> None:
        self.sums: dict[str, FollowedAudit] = {}
        """The folded engines of each name, in one audit."""
        self.latest: dict[str, str] = {}
        """The journal of the engine of each name that ended last, unless it was removed."""
        self.ended_at: dict[str, float] = {}
        """When the last engine of each name ended, the longest ago first."""
        self.folded: dict[str, FoldedJournal] = {}
        """The journals that were folded and still exist, by their names."""
        self.gone: dict[str, FoldedJournal] = {}
        """Journals of ended engines that were removed, the longest ago first. One that is there again, as
        after its volume was unmounted, is in the sums and is not read."""

    def add(self, engine: str, journal: str, now: float) -> str:
        """Note that an engine ended; returns the journal of the engine before it, which is to be folded."""
        earlier = self.latest.pop(engine, "")
        self.latest[engine] = journal
        self._touch(engine, now)
        return earlier

    def fold(self, engine_audit: FollowedAudit, now: float) -> None:
        """Add the sums of an ended engine to those of the earlier engines of its name."""
        name = engine_label(engine_audit)
        self.sums[name] = folded(name, engine_audit, self.sums.pop(name, None))
        if name not in self.ended_at:
            self._touch(name, now)

    def removed(self, engine: str, journal: str, now: float) -> None:
        """Note that the journal of an ended engine was removed."""
        if self.latest.get(engine) == journal:
            del self.latest[engine]
        self._touch(engine, now)

    def revoked(self, engine: str, journal: str) -> None:
        """Note that the engine of a journal goes on."""
        if self.latest.get(engine) == journal:
            del self.latest[engine]

    def left(self, journal: FoldedJournal) -> None:
        """Note that the journal of an ended engine is not there any more."""
        self.gone.pop(journal.name, None)
        self.gone[journal.name] = journal
        keep_newest(self.gone, MOST_GONE)

    def came_back(self, name: str, path: Path) -> bool:
        """Whether this is a journal that was gone; it is a folded one then."""
        known = self.gone.pop(name, None)
        if known is None or not known.beginning or beginning(path, known.segment) != known.beginning:
            return False
        self.folded[name] = known
        return True

    def leaving(self, followed: Collection[str], most: int, before: float) -> list[Leaving]:
        """The names that leave now, and forget them: those that ended ``before``, and all but ``most``.

        ``followed`` are the names of the engines that have not ended.
        """
        ended = [name for name in self.ended_at if name not in followed]
        too_many = max(0, len(ended) - most)
        left = []
        for place, name in enumerate(ended):
            late = self.ended_at[name] < before
            if late or place < too_many:
                left.append(Leaving(name, self.latest.pop(name, ""), not late))
                self.sums.pop(name, None)
                del self.ended_at[name]
        return left

    def sort(self) -> None:
        """Order the names by the time at which their last engines ended."""
        self.ended_at = dict(sorted(self.ended_at.items(), key=lambda item: item[1]))

    def _touch(self, engine: str, now: float) -> None:
        self.ended_at.pop(engine, None)
        self.ended_at[engine] = now


# --- followed journal ----------------------------------------------------------------------------------
#
# One journal that is being followed: its audit, its reader, and its part of a checkpoint.
#
# Which journals there are, and what happens when one fails, is said by :class:`Follower`.


OnBatch = Callable[["FollowedJournal", Batch, list[Violation]], None]
"""Called after each batch has been audited, with the findings that are new."""


class FollowedJournal:
    """One journal, read batch by batch into an :class:`FollowedAudit`."""

    def __init__(self, name: str, engine_audit: FollowedAudit, reader: Reader) -> None:
        self.name = name
        """The journal's name under the folder that is followed."""
        self.engine_audit = engine_audit
        """The audit of every event read so far."""
        engine_audit.compare_events()
        self.reader = reader
        """Reads the journal's segments and remembers its position in them."""
        self.lock = threading.Lock()
        """Held while a batch of this journal is posted, and by every thread that looks at the audit."""
        self.shown = False
        """Whether the journal has been read to its end once, so that its figures may be exported."""
        self.lived = False
        """Whether its engine ran when the journal was last read to its end."""
        self.settled_segment = -1
        """The oldest segment when the audit of the ended engine was settled; -1: it can go on as it is."""
        self.before: FollowedAudit | None = None
        """What is exported while a journal whose audit was settled is read again."""
        self.ended = False
        """Whether the engine is gone and everything it wrote has been read."""
        self.problem = ""
        """Why the journal can't be read now; empty if it can."""
        self.broken = False
        """Whether kvledger itself failed on this journal; it is not tried again."""
        self.retry_at = 0.0
        """The monotonic time before which a journal with a problem is not tried again."""
        self.ended_at = 0.0
        """The monotonic time at which the journal had ended."""
        self.end_of_files = (0, 0)
        """The number of the newest segment, and its bytes, when the journal had ended."""
        self.batches = 0
        """How many batches were read."""
        self.unread_since = math.inf
        """The monotonic time since which the journal grows and nothing of it is read; infinity: it is."""
        self._looked: tuple[int, tuple[int, int]] | None = None
        """The batches read and the end of the files at the last :meth:`look`; None before the first."""
        self.damage = 0
        """How often the reader found something missing or damaged."""
        self.behind = False
        """Whether the last reading stopped before the journal's present end."""
        self.saved: JournalState | None = None
        """What the last checkpoint holds of this journal."""
        self._saved_compared = self._compared()

    @property
    def exported(self) -> FollowedAudit:
        """The audit whose figures are exported."""
        return self.before or self.engine_audit

    def _compared(self) -> tuple[int, int]:
        """The versions of what was compared with other journals: KV events, and prompts of two engines."""
        audit = self.engine_audit
        return audit.live_events.comparison.version, audit.metrics.shared.changes

    def state(self) -> JournalState | None:
        """Return what a checkpoint stores; a broken journal keeps the state it had before it broke."""
        if self.broken or self.before is not None:
            return self.saved
        position, last = self.reader.resumable, self.saved
        compared = self._compared()
        now = position, self.ended, self.settled_segment, compared
        if last is not None:
            saved = last.position, last.ended, last.settled_segment, self._saved_compared
            if saved == now:
                return last
        self._saved_compared = compared
        same_segment = last is not None and last.position.segment == position.segment
        beginning = last.beginning if last is not None and same_segment else b""
        self.saved = JournalState(
            self.name,
            position,
            beginning or checkpoint.beginning(self.engine_audit.path, position.segment),
            self.ended,
            self.reader.stopped,
            self.damage,
            msgspec.Raw(serialize.capture(self.engine_audit)),
            self.settled_segment,
        )
        return self.saved

    def read(
        self,
        on_batch: OnBatch,
        save_soon: Callable[[], None],
        stop: threading.Event | None,
        seconds: float = math.inf,
    ) -> None:
        """Audit what has been written by now, a batch at a time, until ``stop`` is set or time is over.

        ``save_soon`` is called between two batches where a checkpoint saves most work after a restart.
        Raises :class:`~kvledger.audit.errors.LedgerError` or OSError if the journal can't be read.
        """
        until = time.monotonic() + seconds
        self.behind = False
        for batch, violations in self.engine_audit.batches(self.reader, self.lock):
            self.batches += 1
            on_batch(self, batch, violations)
            if batch.begins_segment:
                save_soon()
            if stop and stop.is_set():
                return
            if time.monotonic() > until:
                self.behind = True
                break
        self.damage += len(self.reader.damage)
        self.reader.damage.clear()
        if self.behind:
            return
        if self.reader.ended:
            self.end()
            save_soon()
        self.lived = not self.ended
        self.shown, self.before = True, None

    def end(self) -> None:
        """Close the open requests: the journal gets no more events."""
        with self.lock:
            self.engine_audit.end(stopped=self.reader.stopped)
        self.ended, self.ended_at = True, time.monotonic()
        self.end_of_files = end_of(self.engine_audit.path)

    def look(self) -> None:
        """See whether the journal has grown and nothing of it is read. By no clock but this process's."""
        before, now = self._looked, (self.batches, end_of(self.engine_audit.path))
        self._looked = now
        if before is None or now[0] != before[0]:
            self.unread_since = math.inf
        elif now[1] > before[1] and math.isinf(self.unread_since):
            self.unread_since = time.monotonic()

    def settle(self) -> None:
        """Keep only the sums of an engine that has ended. A journal that is revived is read again then.

        The caller holds the lock over all journals.
        """
        self.engine_audit = settled(self.engine_audit)
        self.settled_segment = first_segment(self.engine_audit.path)

    def take_up(self, data: bytes) -> None:
        """Take what :func:`read_settled` found, as if it had been read here."""
        state, path = msgspec.msgpack.decode(data, type=JournalState), self.engine_audit.path
        self.reader.close()
        self.engine_audit = serialize.restore(bytes(state.engine_audit), FollowedAudit(path))
        self.engine_audit.compare_events()
        self.reader = Reader(path, start=state.position)
        self.reader.ended, self.reader.stopped = True, state.stopped
        self.damage, self.settled_segment = state.damage, state.settled_segment
        self.ended, self.shown, self.ended_at = True, True, time.monotonic()
        self.end_of_files = end_of(path)

    def revive(self) -> None:
        """Go on with a journal that seemed to have ended: its engine lives, or wrote more."""
        self.ended = self.reader.ended = False

    def read_again(self, engine_audit: FollowedAudit) -> None:
        """Read the journal from its beginning into a new audit; what is exported stays until it is read."""
        self.before = self.engine_audit
        engine_audit.series = self.before.series
        self.reader.close()
        self.engine_audit, self.reader = engine_audit, Reader(engine_audit.path)
        engine_audit.compare_events()
        self.ended, self.settled_segment = False, -1


def read_settled(path: Path) -> bytes:
    """The state of a journal whose engine has ended, with its sums alone; b"" if that can't be had.

    For a process of its own, which gives way to an engine on the same cores. Why a journal can't be read is
    said by the follower, which tries the same.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, AHEAD_NICE)
    journal = FollowedJournal("", FollowedAudit(path), Reader(path))
    try:
        journal.read(ignore, ignore, None)
        if not journal.ended or journal.engine_audit.live_events.engine_began:
            return b""  # recorded KV events are compared with those of other engines
        journal.settle()
        return msgspec.msgpack.encode(journal.state())
    except Exception:
        return b""
    finally:
        journal.reader.close()
        del journal
        gc.collect()  # the next journal needs the memory of this one, and a worker collects rarely


def first_segment(journal: Path) -> int:
    """The number of the oldest segment of a journal; 0 if that can't be found out."""
    try:
        return min(segments(journal), default=0) if journal.is_dir() else 1
    except OSError:
        return 0


def end_of(journal: Path) -> tuple[int, int]:
    """The number of the newest segment of a journal, and its bytes; zeros if that can't be found out."""
    try:
        if not journal.is_dir():
            return 1, journal.stat().st_size
        number, path = max(segments(journal).items(), default=(0, journal))
        return number, path.lstat().st_size if number else 0
    except OSError:
        return 0, 0


# --- follower ------------------------------------------------------------------------------------------
#
# Follows every engine's journal under a folder, and resumes after a restart (``serve``, ``audit follow``).
#
# One thread reads; other threads take ``lock`` before they look at the audits. Rules of this file:
#
# - A journal's figures are exported once the journal has been read to its end: a counter that starts low
#   and climbs would look like traffic.
# - The checkpoint holds the position in every journal. It is replaced periodically, at the end, and where a
#   segment begins, so that a restart reads at most one segment again.
# - State that was known before and is gone now is counted in ``health.lost``. No figure is invented for it.
# - A journal that can't be read does not stop the others. It is tried again, unless kvledger itself failed.
# - When an engine has ended, its sums stay under the engine's name for a while.


POLL_SECONDS = 0.5
"""How often journals are read, and the folder is searched for new journals."""

TURN_SECONDS = 2.0
"""The longest time that one journal is read before others have their turn. Else an engine that writes faster
than it is read would keep the others from being read until rotation removes what they wrote."""

AHEAD_PROCESSES = 4
"""At most so many processes read journals of ended engines at a first start. Each takes some 70 MiB."""

AHEAD_BYTES = 8 << 20
"""Larger journals are read here: nobody waits for one long, and a stop comes between two batches."""

AHEAD_WORTH_BYTES = WORTH_BYTES
"""Below this total size no process is started."""

AHEAD_NICE = 10
"""How much these processes give way to others."""

SAVE_SECONDS = 30.0
"""How often the checkpoint is replaced while something is read."""

LEAST_SAVE_SECONDS = 5.0
"""The least time between two checkpoints, however fast segments are read."""

HEARTBEAT_SECONDS = 60.0
"""If the reading thread finishes nothing for this long, it is stuck."""

UNREAD_SECONDS = 60.0
"""If a live engine writes for so long and nothing of it is read, its figures stand still."""

RETRY_SECONDS = 30.0
"""How often a journal that can't be read is tried again."""

SETTLE_SECONDS = 60.0
"""How long the audit of an engine that was seen to run can go on after its end, in case the end is revoked.

One whose KV events are compared is needed for :data:`FORGET_SECONDS`.
"""

PAST_NAMES = 32
"""How many names of ended engines keep their figures; the name that ended first leaves first."""

PAST_SECONDS = 24 * 3600.0
"""How long the figures of a name stay after its last engine has ended."""


def _lives(journal: Path) -> bool:
    try:
        return journal.is_dir() and is_live(journal)
    except (LedgerError, OSError):
        return False


def ignore(*_: object) -> None:
    """Do nothing: the default callback."""


class Follower:
    """Follows every journal at or under ``path``, including journals that appear later.

    ``folder`` keeps the checkpoint; None keeps none. ``finder`` replaces the search in ``path``. Without
    ``fold`` every ended engine keeps its own audit. Raises :class:`LedgerError` if there is no ``path``, if
    it is a file that is no journal, or if another follower uses ``folder``.
    """

    def __init__(
        self,
        path: Path,
        folder: Path | None = None,
        notify: Notify = ignore,
        *,
        finder: JournalFinder | None = None,
        fold: bool = True,
    ) -> None:
        self.lock = AuditsLock(lambda: self.journals.values())
        """Held by every thread that looks at audits, and by the reading thread where it adds or drops one.
        A batch is posted under the lock of its journal alone."""
        self.heartbeat = time.monotonic()
        """When the reading thread last finished a batch, a journal or a search, by the monotonic clock."""
        self.ready = threading.Event()
        """Set once everything that was written before the start has been read."""
        self.health = Health()
        """The follower's own figures: checkpoints, losses, problems."""
        self.journals: dict[str, FollowedJournal] = {}
        """The journals that exist now, by name, except those that were folded."""
        self.ended = EndedEngines()
        """The sums of ended engines, by engine name."""
        self.on_opened: list[Callable[[FollowedAudit], None]] = []
        """Functions called with the audit of each new journal before its first event is read."""
        self.on_batch: OnBatch = ignore
        """Called after each batch has been audited."""
        self.path = path
        """Where the journals are."""
        self._finder = finder or FolderFinder(path)
        self._fold = fold
        """Whether ended engines of one name share an audit, and leave after a while."""
        self._out_of_reach: dict[str, JournalState] = {}
        """What the checkpoint has of journals whose folders can't be read since the start."""
        self._refused: dict[str, str] = {}
        """Why what may be a journal can't be told to be one, by its name."""
        self._look_at = 0.0
        """The monotonic time at which ended journals are looked at next."""
        self._ahead: frozenset[str] = frozenset()
        """The journals that other processes read."""
        self._read_ahead: Iterator[tuple[str, bytes]] = iter(())
        """What these processes have read of each, in the order in which journals have their turns."""
        self._to_fold: list[str] = []
        """The ended journals that are folded at the end of the present round."""
        self._folder = folder
        """Where the checkpoint is kept; None: nowhere."""
        self._notify = notify
        """Called with one sentence for each problem."""
        self._notified: set[str] = set()
        """Sentences that are sent only once."""
        self._lock_file = -1
        """The descriptor that keeps other followers out of ``folder``; -1: none."""
        self._save_at = time.monotonic() + SAVE_SECONDS
        """The monotonic time at which the next checkpoint is due."""
        self._saved_at = 0.0
        """The monotonic time of the last checkpoint."""
        if folder is not None:
            self._lock_file = checkpoint.take(folder)
            self._resume(folder)

    @property
    def past(self) -> dict[str, FollowedAudit]:
        """The sums of ended engines, by engine name. The caller holds ``lock``."""
        return self.ended.sums

    @property
    def audits(self) -> EngineAudits:
        """What may be exported: folded engines first, then the others by the name of their journal.

        The caller holds ``lock``, here and while it looks at the audits.
        """
        busy = self.lock.busy
        shown = sorted(
            (one.name, one.exported) for one in self.journals.values() if one.shown and one.name not in busy
        )
        self.health.unreadable = len(self.problems)
        return EngineAudits([*self.past.values(), *(engine_audit for _, engine_audit in shown)], self.health)

    @property
    def paths(self) -> dict[str, Path]:
        """Where each journal is, by its name; folded ones too. The caller holds ``lock``."""
        return {name: self._finder.path(name) for name in [*self.journals, *self.ended.folded]}

    @property
    def problems(self) -> list[str]:
        """Which journals can't be read now, and why. The caller holds ``lock``."""
        problems = [f"{one.name}: {one.problem}" for one in self.journals.values() if one.problem]
        problems += [f"{name}: its folder can't be read" for name in self._out_of_reach]
        problems += [f"{name}: {sentence}" for name, sentence in self._refused.items()]
        return problems + [f"{name}: a batch of it is still being posted" for name in sorted(self.lock.busy)]

    @property
    def stuck_seconds(self) -> float:
        """For how long the reading thread has finished nothing; 0.0 while it works as it should."""
        seconds = time.monotonic() - self.heartbeat
        return seconds if seconds > HEARTBEAT_SECONDS else 0.0

    # --- the loop -----------------------------------------------------------------------------------

    def catch_up(self, stop: threading.Event | None = None) -> None:
        """Read everything written by now; repeat while a round takes so long that much is added."""
        began = time.monotonic()
        self._find()
        with self._reading_ahead():
            self.poll(stop)
        for _ in range(9):
            round_began = time.monotonic()
            self.poll(stop)
            if time.monotonic() - round_began < 2 * POLL_SECONDS or (stop and stop.is_set()):
                break
        self.health.caught_up_seconds = time.monotonic() - began
        self.save()
        if not (stop and stop.is_set()):
            self.ready.set()

    @contextlib.contextmanager
    def _reading_ahead(self) -> Iterator[None]:
        """Let processes of their own read journals of ended engines, one journal a process.

        Each is taken up when its turn comes, because labels of engines depend on the order. Not where a
        callback is called with each event or batch.
        """
        unread = []
        if self._fold and not self.on_opened and self.on_batch is ignore:
            unread = [
                one
                for one in self.journals.values()
                if one.saved is None
                and size_bytes(one.engine_audit.path) <= AHEAD_BYTES
                and not _lives(one.engine_audit.path)
            ]
        paths = [one.engine_audit.path for one in unread]
        sizes, processes = [size_bytes(path) for path in paths], min(AHEAD_PROCESSES, cores(), len(paths))
        if processes < 2 or sum(sizes) < AHEAD_WORTH_BYTES:
            yield
            return
        read = Processes(processes).each(read_settled, paths, sizes)
        names = [one.name for one in unread]
        self._ahead, self._read_ahead = frozenset(names), zip(names, read, strict=False)
        try:
            yield
        finally:
            self._ahead, self._read_ahead = frozenset(), iter(())
            read.close()

    def follow(self, stop: threading.Event) -> None:
        """Read what is written until ``stop`` is set, then save."""
        while not stop.wait(0 if self._behind else POLL_SECONDS):
            self.poll(stop, TURN_SECONDS)
            if time.monotonic() >= self._save_at:
                self.save()
        self.save()

    def poll(self, stop: threading.Event | None = None, seconds: float = math.inf) -> None:
        """Find new and removed journals, and read each one to its present end or for these ``seconds``."""
        self.heartbeat = time.monotonic()
        self._find()
        for name in list(self.journals):  # one that is folded meanwhile leaves the memory at once
            if stop and stop.is_set():
                return
            journal = self.journals.get(name)
            if journal is None or journal.ended or journal.broken:
                continue
            if time.monotonic() >= journal.retry_at:
                self._read(journal, stop, seconds)
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            self._revoke_ends()
        if not self._behind:
            self._route()
        if self._fold:
            self._fold_ended()

    @property
    def _behind(self) -> bool:
        """Whether a journal was not read to its present end, because it was the turn of others."""
        return any(journal.behind for journal in self.journals.values())

    def _route(self) -> None:
        """Compare what engines say of one prompt; every journal was read to its end."""
        now = time.time()
        audits = [
            *self.past.values(),
            *(one.engine_audit for one in self.journals.values() if not one.broken),
        ]
        if any(each.metrics.shared.waiting for each in audits):
            with self.lock:
                pair(audits, now)
        together = [one.engine_audit.live_events for one in self.journals.values() if not one.broken]
        for journal in self.journals.values():
            if not journal.broken:
                audit = journal.engine_audit
                with journal.lock:
                    read_to = audit.auditor.ledger.read_to
                    audit.live_events.route(together, read_to, now, audit.metrics.kv_events)
        for one in together:
            one.forget(now)

    def close(self) -> None:
        """Close every file."""
        for journal in self.journals.values():
            journal.reader.close()
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1

    # --- one journal ----------------------------------------------------------------------------------

    def _read(
        self, journal: FollowedJournal, stop: threading.Event | None, seconds: float = math.inf
    ) -> None:
        try:
            if not self._take_up_ahead(journal):
                journal.read(self._posted, self._save_soon, stop, seconds)
            if journal.problem:
                journal.problem = ""
                self._notify(f"{journal.name} is followed again.")
        except (LedgerError, OSError) as error:
            journal.behind = False
            journal.retry_at = time.monotonic() + RETRY_SECONDS
            self._set_problem(journal, str(error))
        except Exception as error:
            journal.broken, journal.behind = True, False
            self._set_problem(journal, f"kvledger itself failed ({type(error).__name__}: {error})")
        if journal.ended:
            self._note_ended(journal, time.time())
            if self._fold:
                self._fold_earlier(compared=False)
                self._settle(journal)
        self.heartbeat = time.monotonic()

    def _take_up_ahead(self, journal: FollowedJournal) -> bool:
        """Take up what another process has read of a journal, if one has."""
        if journal.name not in self._ahead:
            return False
        data = b""
        with contextlib.suppress(LedgerError):  # a process was killed: the others have no more, either
            # One whose folder went meanwhile has no turn: what was read of it is passed over.
            data = next((data for name, data in self._read_ahead if name == journal.name), b"")
        if data:
            with self.lock:
                journal.take_up(data)
                journal.engine_audit.series = self._label(journal)
        return bool(data)

    def _posted(self, journal: FollowedJournal, batch: Batch, violations: list[Violation]) -> None:
        self.heartbeat = time.monotonic()
        if not journal.engine_audit.series and journal.engine_audit.engine is not None:
            journal.engine_audit.series = self._label(journal)
        self.on_batch(journal, batch, violations)

    def _label(self, journal: FollowedJournal) -> str:
        """The label of an engine's metrics: that of the engine before it, unless that one still runs."""
        others = [one.engine_audit for one in self.journals.values() if one is not journal and not one.ended]
        taken = {one.series for one in others if one.series and values.state(one) == "live"}
        return free_label(journal.engine_audit, taken)

    def _save_soon(self) -> None:
        """A segment began, or a journal ended and may be removed from now on: save before long."""
        self._save_at = min(self._save_at, self._saved_at + LEAST_SAVE_SECONDS)
        if time.monotonic() >= self._save_at:
            self.save()

    def _set_problem(self, journal: FollowedJournal, sentence: str) -> None:
        if sentence != journal.problem:
            journal.problem = sentence
            self.health.problems += 1
            self._notify(f"{journal.name} is not followed: {sentence}")

    def _notify_once(self, sentence: str) -> None:
        if sentence not in self._notified:
            self._notified.add(sentence)
            self.health.problems += 1
            self._notify(sentence)

    # --- which journals there are ---------------------------------------------------------------------

    def _find(self) -> None:
        known = [*self.journals, *self.ended.folded, *self._out_of_reach]
        names = set(self._finder.names(known, self._notify_once))
        for state in [*self._out_of_reach.values()]:
            with self.lock:
                if self._restored(state):
                    del self._out_of_reach[state.name]
        new = {}
        followed = {*self.journals, *self.ended.folded, *self._out_of_reach}
        self._refused = {}
        for name in sorted(names - followed):
            path = self._finder.path(name)
            if self._is_journal(name) and not self.ended.came_back(name, path):
                engine_audit = self._opened(path)
                new[name] = FollowedJournal(name, engine_audit, Reader(engine_audit.path))
        if new:
            with self.lock:
                self.journals.update(new)
        for name in self.journals.keys() - names:
            self._retire(name)
        for name in self.ended.folded.keys() - names:
            self.ended.left(self.ended.folded.pop(name))

    def _opened(self, path: Path) -> FollowedAudit:
        engine_audit = FollowedAudit(path)
        for callback in self.on_opened:
            callback(engine_audit)
        return engine_audit

    def _is_journal(self, name: str) -> bool:
        said: list[str] = []
        found = self._finder.is_journal(name, said.append)
        for sentence in said:
            self._refused[name] = sentence
            self._notify_once(sentence)
        return found

    def _retire(self, name: str) -> None:
        """The journal's folder is gone: keep the sums, and nothing else."""
        journal = self.journals[name]
        if not journal.ended and not journal.broken:
            self._read(journal, None)  # segments that were open can still be read
        if not journal.ended and not journal.broken:
            journal.end()
        with self.lock:
            journal.reader.close()
            del self.journals[name]
            self._note_gone(journal.saved)
            self.ended.removed(engine_label(journal.engine_audit), name, time.time())
            self.ended.fold(journal.engine_audit, time.time())

    def _note_gone(self, saved: JournalState | None) -> None:
        """Remember a removed journal if its engine had ended and all of it was read."""
        if saved is not None and saved.ended and saved.beginning:
            self.ended.left(FoldedJournal(saved.name, saved.position.segment, saved.beginning))

    # --- ends that were none ----------------------------------------------------------------------------

    def _revoke_ends(self) -> None:
        """Go on with journals whose engines live, or that grew; count live ones that stand still."""
        for journal in list(self.journals.values()):
            path = journal.engine_audit.path
            if journal.ended and not journal.broken and (_lives(path) or end_of(path) > journal.end_of_files):
                self._revive(journal)
        for ended in list(self.ended.folded.values()):
            path = self._finder.path(ended.name)
            if _lives(path) and end_of(path)[0] > ended.segment:
                self._follow_again(ended, path)
        unread = sum(map(self._stands_still, self.journals.values()))
        unread += sum(_lives(self._finder.path(name)) for name in self.ended.folded)
        self.health.unread = unread

    def _revive(self, journal: FollowedJournal) -> None:
        path = journal.engine_audit.path
        with self.lock:
            self.ended.revoked(engine_label(journal.engine_audit), journal.name)
        if journal.name in self._to_fold:
            self._to_fold.remove(journal.name)
        if journal.settled_segment < 0:
            journal.revive()
        elif journal.settled_segment == first_segment(path):
            engine_audit = self._opened(path)
            with self.lock:
                journal.read_again(engine_audit)
        else:  # rotation has removed a part of what the sums have
            with self.lock:
                self.ended.fold(self._drop(journal.name), time.time())
            self._follow_again(self.ended.folded[journal.name], path)
            return
        self._notify_once(f"{journal.name} seemed to have ended and goes on.")
        self._read(journal, None, TURN_SECONDS)

    def _follow_again(self, folded: FoldedJournal, path: Path) -> None:
        """Follow a folded journal from its next segment: its sums have what came before."""
        engine_audit = self._opened(path)
        start = Position(segment=folded.segment + 1, event=-1)
        with self.lock:
            del self.ended.folded[folded.name]
            self.journals[folded.name] = FollowedJournal(folded.name, engine_audit, Reader(path, start=start))
        self._notify_once(f"{folded.name} seemed to have ended and goes on.")
        self._read(self.journals[folded.name], None, TURN_SECONDS)

    def _stands_still(self, journal: FollowedJournal) -> bool:
        """Whether a live engine writes and nothing of it is read."""
        journal.look()
        still = time.monotonic() - journal.unread_since > UNREAD_SECONDS
        return still and _lives(journal.engine_audit.path)

    # --- engines that have ended ----------------------------------------------------------------------

    def _note_ended(self, journal: FollowedJournal, now: float) -> None:
        """An engine has ended: the engine of its name that ended before it is to be folded."""
        earlier = self.ended.add(engine_label(journal.engine_audit), journal.name, now)
        if earlier:
            self._to_fold.append(earlier)

    def _settle(self, journal: FollowedJournal) -> None:
        """Drop the open state of an ended engine when nobody needs it any more."""
        if journal.settled_segment < 0 and not journal.broken:
            compared = journal.engine_audit.live_events.engine_began
            needed = FORGET_SECONDS if compared else SETTLE_SECONDS if journal.lived else 0.0
            if time.monotonic() - journal.ended_at >= needed:
                with self.lock:
                    journal.settle()

    def _fold_earlier(self, *, compared: bool) -> None:
        """Fold the engines that ended before the last of their name; ``compared``: also those with KV events,
        which are needed until requests have been routed.
        """
        if not self._to_fold:
            return
        with self.lock:
            for name in list(self._to_fold):
                journal = self.journals.get(name)
                if journal is None or compared or not journal.engine_audit.live_events.engine_began:
                    self._to_fold.remove(name)
                    if journal is not None:
                        self.ended.fold(self._drop(name), time.time())

    def _fold_ended(self) -> None:
        """Fold engines that have ended, and drop names that ended long ago or are too many."""
        followed = {engine_label(one.engine_audit) for one in self.journals.values() if not one.ended}
        self._fold_earlier(compared=True)
        for journal in self.journals.values():
            if journal.ended:
                self._settle(journal)
        with self.lock:
            for left in self.ended.leaving(followed, PAST_NAMES, time.time() - PAST_SECONDS):
                if left.journal in self.journals:
                    self._drop(left.journal)
                if left.early:
                    self._count_loss("engine forgotten")

    def _drop(self, name: str) -> FollowedAudit:
        """Follow an ended journal no longer, and remember that it was read; returns its audit."""
        journal = self.journals.pop(name)
        journal.reader.close()
        segment = journal.reader.resumable.segment
        beginning = checkpoint.beginning(journal.engine_audit.path, segment)
        self.ended.folded[name] = FoldedJournal(name, segment, beginning)
        return journal.engine_audit

    def _count_loss(self, reason: str) -> None:
        self.health.lost[reason] = self.health.lost.get(reason, 0) + 1

    # --- the checkpoint -------------------------------------------------------------------------------

    def save(self) -> None:
        """Replace the checkpoint. If it can't be written, the failure is counted and the old one stays."""
        self._saved_at = time.monotonic()
        self._save_at = self._saved_at + SAVE_SECONDS
        if self._folder is None:
            return
        now = time.time()
        try:
            self.health.save_bytes = checkpoint.save(self._folder, self._state(now))
        except OSError as error:
            self.health.save_failures += 1
            self._notify_once(f"{self._folder} can't be written: {error.strerror}.")
            return
        except Exception as error:
            self.health.save_failures += 1
            self._notify_once(
                f"No checkpoint is kept: kvledger itself failed ({type(error).__name__}: {error})."
            )
            return
        self.health.saved_at = now
        for journal in self.journals.values():
            journal.engine_audit.checkpoint_seconds = now
        self.health.save_seconds = time.monotonic() - self._saved_at

    def _state(self, now: float) -> Checkpoint:
        journals = [state for one in self.journals.values() if (state := one.state()) is not None]
        journals += self._out_of_reach.values()
        ended = self.ended
        past = [msgspec.Raw(serialize.capture(engine_audit)) for engine_audit in ended.sums.values()]
        folded = list(ended.folded.values())
        return Checkpoint(
            __version__, now, journals, past, self.health.lost, folded, ended.ended_at, [*ended.gone.values()]
        )

    def _resume(self, folder: Path) -> None:
        """Restore what the checkpoint holds, as far as its journals still exist."""
        try:
            loaded = checkpoint.load(folder)
        except LedgerError as error:
            other = isinstance(error, serialize.OtherLayout)
            self._count_loss("checkpoint of another version" if other else "checkpoint damaged")
            self._notify(f"{error} Every journal is read again from its oldest segment.")
            return
        if loaded is None:
            return
        self.health.lost = loaded.lost
        self.health.saved_at = loaded.at
        self.ended.ended_at = loaded.ended
        self.ended.gone = {one.name: one for one in loaded.gone}
        for raw in loaded.past:
            self._restore(raw, Path(), self._keep_sums)
        for one in loaded.folded:
            self._resume_folded(one)
        for state in loaded.journals:
            if not self._restored(state):
                self._out_of_reach[state.name] = state
                self._notify(f"{self._finder.path(state.name)} can't be read; it is tried again.")
        self.ended.sort()

    def _restored(self, state: JournalState) -> bool:
        """Go on with a journal of the checkpoint, unless nobody can say whether it is there."""
        path = self._finder.path(state.name)
        try:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.stat()
        except OSError:
            return False
        self._restore(state.engine_audit, path, partial(self._resume_journal, state))
        return True

    def _restore(self, data: msgspec.Raw, path: Path, use: Callable[[FollowedAudit], None]) -> None:
        try:
            use(serialize.restore(bytes(data), FollowedAudit(path)))
        except LedgerError as error:
            self._count_loss("checkpoint damaged")
            self._notify(f"{error} {path.name} is read again from its oldest segment.")

    def _keep_sums(self, engine_audit: FollowedAudit) -> None:
        self.ended.fold(engine_audit, self.health.saved_at)

    def _resume_folded(self, folded: FoldedJournal) -> None:
        beginning = checkpoint.beginning(self._finder.path(folded.name), folded.segment)
        if beginning and beginning != folded.beginning:
            self._count_loss("journal replaced")
        else:  # _find forgets it if it was removed
            self.ended.folded[folded.name] = folded

    def _resume_journal(self, state: JournalState, engine_audit: FollowedAudit) -> None:
        if not engine_audit.path.exists():
            if not state.ended:
                engine_audit.end(stopped=state.stopped)
            self._note_gone(state)
            self._keep_sums(engine_audit)
            return
        beginning = checkpoint.beginning(engine_audit.path, state.position.segment)
        if state.beginning and beginning != state.beginning:
            self._count_loss("journal replaced" if beginning else "segment removed")
            if beginning:  # another journal under the same name: _find adds it as a new one
                engine_audit.end(stopped=state.stopped)
                self._keep_sums(engine_audit)
                return
        engine_audit.checkpoint_seconds = self.health.saved_at
        journal = FollowedJournal(state.name, engine_audit, Reader(engine_audit.path, start=state.position))
        journal.reader.ended = journal.ended = state.ended
        journal.reader.stopped = state.stopped
        journal.shown = state.ended
        journal.end_of_files = end_of(engine_audit.path)
        journal.damage = state.damage
        journal.settled_segment = state.settled_segment
        journal.saved = state
        self.journals[state.name] = journal
        if state.ended:
            ended_at = self.ended.ended_at.get(engine_label(engine_audit), self.health.saved_at)
            self._note_ended(journal, ended_at)
