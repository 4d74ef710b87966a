"""The interpreters that have a release of vLLM: those given, the one that runs here, those of a checkout."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import LedgerError
from ..release_semantics import release as parsed
from ..repro.bisect import built, given, vllm_of
from ..text import printable
from .processes import same_release


class Environments:
    """The interpreter of each release."""

    def __init__(self, pythons: Sequence[str]) -> None:
        self._given = given(pythons)
        """Releases by ``--python``."""
        self._here = ""
        """The release that this interpreter has; "" until it was asked."""

    def command(self, release: str) -> Sequence[str]:
        """What stands in front of the options of the interpreter. "": the release that runs here.

        Raises LedgerError.
        """
        if not release:
            if self.here == "none":
                raise LedgerError("there is no vLLM here: name a release, and its interpreter with --python")
            return (sys.executable,)
        for each in self._given:
            if same_release(each.release.partition(" ")[0], release):
                return each.command
        if same_release(self.here, release):
            return (sys.executable,)
        plain = release.partition("+")[0]
        if not parsed(plain):
            raise LedgerError(f"{printable(release)!r} is no release of vLLM, such as 0.24.0")
        try:
            [environment] = built(Path(), plain)
        except (LedgerError, ValueError):
            raise LedgerError(
                f"there is no environment with vLLM {plain}: give the interpreter of one with "
                f"--python {plain}=INTERPRETER"
            ) from None
        return environment.command

    @property
    def here(self) -> str:
        """The release that this interpreter has, or "none"."""
        if not self._here:
            try:
                self._here = vllm_of(sys.executable)
            except LedgerError:
                self._here = "none"
        return self._here

    def between(self, first: str, last: str) -> list[str]:
        """The releases between two others of which there is an environment, in the order from the one to the
        other."""
        low, high = sorted((parsed(first), parsed(last)))
        names = [each.release.partition(" ")[0] for each in self._given]
        names += [] if self.here == "none" else [self.here]
        with contextlib.suppress(LedgerError):  # not in a checkout, or none is built
            names += [each.release for each in built(Path(), f"{_text(low)}..{_text(high)}")]
        found = {parsed(name): name for name in reversed(names) if low < parsed(name) < high}
        return [found[number] for number in sorted(found, reverse=parsed(first) > parsed(last))]


def _text(number: tuple[int, ...]) -> str:
    return ".".join(map(str, number))
