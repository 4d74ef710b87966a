"""What an engine said of itself when it started, read for reports and labels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..events import EngineStarted
from ..journal.host_folders import journal_name

if TYPE_CHECKING:
    from ..release_semantics import Meaning


class Described:
    """Has an engine's description. Until the engine was seen to start, nothing is known."""

    path: Path

    @property
    def engine(self) -> EngineStarted | None:
        """How the engine described itself when it started."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The engine's name in findings and labels."""
        return journal_name(self.path)

    @property
    def began_seconds(self) -> float | None:
        """Unix time from which the journal's times count; None if no engine was seen to start."""
        return None if self.engine is None else self.engine.began_seconds

    @property
    def created(self) -> float:
        """Unix time since which the sums count: the engine's start, or that of the oldest segment left."""
        return self.engine.wall_seconds if self.engine else 0.0

    @property
    def connector(self) -> str:
        """The engine's connector; "none" if it has none."""
        return str((self.engine and self.engine.configuration.get("connector")) or "none")

    @property
    def rank(self) -> int:
        """The engine's data-parallel rank, which vLLM's own metrics have as ``engine``."""
        settings = self.engine.configuration if self.engine else {}
        index = settings.get("engine_index", settings.get("data_parallel_rank", 0))
        return index if isinstance(index, int) else 0

    @property
    def model(self) -> str:
        """The model that the engine serves; "" if the engine did not report it."""
        return str(self.engine.configuration.get("model", "")) if self.engine else ""

    @property
    def kv_role(self) -> str:
        """vLLM's ``kv_role`` of the engine; "" without a connector, or if the engine did not report it."""
        return str(self.engine.configuration.get("kv_role") or "") if self.engine else ""

    @property
    def random_suffixes(self) -> bool:
        """Whether the engine's release appends random digits to ids; of an unknown engine, yes."""
        from ..client_ids import has_random_suffix
        from ..release_semantics import release

        return self.engine is None or has_random_suffix(release(self.engine.version))

    @property
    def meanings(self) -> dict[str, str]:
        """For each figure that the engine reports, a sentence on what this release means by it."""
        return {figure: row.says for figure, row in self._meanings().items()}

    @property
    def meaning_words(self) -> dict[str, str]:
        """Like :attr:`meanings`, with one word a figure, for programs."""
        return {figure: row.word for figure, row in self._meanings().items()}

    def _meanings(self) -> dict[str, Meaning]:
        from ..release_semantics import meanings

        if self.engine is None:
            return {}
        return meanings(self.engine.version, v0=self.engine.adapter.startswith("v0"))
