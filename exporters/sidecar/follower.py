"""Follows every engine's journal under a folder, and resumes after a restart. ``serve`` and ``tail`` use it.

One thread reads; other threads take ``lock`` before they look at the audits. Rules of this file:

- A journal's figures are exported once the journal has been read to its end: a counter that starts low
  and climbs would look like traffic.
- The checkpoint holds the position in every journal. It is replaced periodically, at the end, and where a
  segment begins, so that a restart reads at most one segment again.
- State that was known before and is gone now is counted in ``health.lost``. No figure is invented for it.
- A journal that can't be read does not stop the others. It is tried again, unless kvledger itself failed.
- When an engine has ended, its sums stay under the engine's name for a while (``ended_engines.py``).
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from ... import __version__
from ...audit.checks.registry import Violation
from ...audit.errors import LedgerError
from ...audit.journal.format import is_live
from ...audit.journal.reader import Batch, Position, Reader
from ...audit.replay import checkpoint, serialize
from ...audit.replay.checkpoint import Checkpoint, FoldedJournal, JournalState
from ...audit.replay.followed_audit import FollowedAudit
from ...audit.replay.prompt_pairs import pair
from ...audit.replay.recorded_events import FORGET_SECONDS
from ..metrics import values
from ..metrics.labels import engine_label, free_label
from ..metrics.values import EngineAudits, Health
from .audits_lock import AuditsLock
from .ended_engines import EndedEngines
from .followed_journal import FollowedJournal, OnBatch, end_of, first_segment
from .journal_finder import FolderFinder, JournalFinder, Notify

POLL_SECONDS = 0.5
"""How often journals are read, and the folder is searched for new journals."""

TURN_SECONDS = 2.0
"""The longest time that one journal is read before others have their turn. Else an engine that writes faster
than it is read would keep the others from being read until rotation removes what they wrote."""

SAVE_SECONDS = 30.0
"""How often the checkpoint is replaced while something is read."""

LEAST_SAVE_SECONDS = 5.0
"""The least time between two checkpoints, however fast segments are read."""

HEARTBEAT_SECONDS = 60.0
"""If the reading thread finishes nothing for this long, it is stuck."""

LOOK_SECONDS = 5.0
"""How often journals that have ended are looked at: an end may be revoked."""

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
        self._finder = finder or FolderFinder(path)
        self._fold = fold
        """Whether ended engines of one name share an audit, and leave after a while."""
        self._out_of_reach: dict[str, JournalState] = {}
        """What the checkpoint has of journals whose folders can't be read since the start."""
        self._refused: dict[str, str] = {}
        """Why what may be a journal can't be told to be one, by its name."""
        self._look_at = 0.0
        """The monotonic time at which ended journals are looked at next."""
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
        for folded in list(self.ended.folded.values()):
            path = self._finder.path(folded.name)
            if _lives(path) and end_of(path)[0] > folded.segment:
                self._follow_again(folded, path)
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
