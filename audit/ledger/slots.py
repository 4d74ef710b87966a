"""The account of a token pool that has a slot for each token: each slot is used for one thing.

The engine counts its slots by what they are used for, at a census. It may be between two changes of these
counts then, so a difference counts once two accounts in a row have the same one.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from .. import events as ev
from .entries import SlotsKept, SlotsMissing

KEPT_SECONDS = 10
"""Protected slots are kept by nobody if no request is open for so long. A copy to the host ends sooner."""

MOST_NAMED = 8
"""At most so many changes before a difference are named."""

NEVER = -1


class SlotAccount(msgspec.Struct):
    """What the last censuses said of the pool's slots. Times are microseconds since the engine started."""

    known: bool = False
    """Whether any census had slots; else nothing is noted."""
    missing: int = 0
    """The difference that was reported last."""
    doubted: SlotsMissing | None = None
    """A difference that one account has."""
    done: list[tuple[int, str]] = []
    """The last changes of what slots are used for, each with the step before it."""
    rests_since: int = NEVER
    """Since when no request is open and slots are protected."""

    def note(self, step: int, what: str) -> None:
        """Note a change of what slots are used for, after a step."""
        if self.known:
            self.done = [*self.done[1 - MOST_NAMED :], (step, what)]

    def forget(self) -> None:
        """Events were lost: nobody knows what was done."""
        self.doubted, self.done, self.rests_since = None, [], NEVER

    def look(self, event: ev.Census, *, rests: bool) -> Iterator[SlotsMissing | SlotsKept]:
        """Take a census; ``rests``: no request is open. Yields what is wrong, once."""
        if event.slots < 0:
            return
        self.known = True
        yield from self._balance(event)
        protected, held = event.protected_slots, event.held_slots
        if not rests or not protected or held or event.paused_sessions:
            self.rests_since = NEVER
        elif self.rests_since == NEVER:
            self.rests_since = event.at
        elif (seconds := (event.at - self.rests_since) // 1_000_000) >= KEPT_SECONDS:
            yield SlotsKept(protected, seconds)

    def _balance(self, event: ev.Census) -> Iterator[SlotsMissing]:
        uses = (
            event.free_slots,
            event.evictable_slots,
            event.protected_slots,
            event.held_slots,
            event.uncached_slots,
        )
        missing = event.slots - sum(uses)
        doubted, self.doubted = self.doubted, None
        if missing == self.missing:
            return
        lasts = doubted is not None and doubted.missing == missing
        if doubted is not None and lasts:
            yield doubted
        if lasts or not missing:
            self.missing = missing
            return
        done = ", ".join(what for step, what in self.done if step >= event.slots_before)
        self.doubted = SlotsMissing(missing, [*uses, event.slots], event.slots_before, event.step, done)
