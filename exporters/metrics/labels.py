"""The label ``engine`` of metrics: the model and a number. A restarted engine continues its series."""

from __future__ import annotations

from collections.abc import Collection

from ...audit.journal.host_folders import place_suffix
from ...audit.replay.followed_audit import FollowedAudit


def engine_label(engine_audit: FollowedAudit) -> str:
    """The label that the follower gave this engine, or else the one that the engine asks for."""
    return engine_audit.series or free_label(engine_audit, ())


def free_label(engine_audit: FollowedAudit, taken: Collection[str]) -> str:
    """``model / engine N``, ``on NAME`` if ``KVLEDGER_NAME`` was set, and ``in HOST`` in a host's folder.

    N is the engine's data-parallel rank, or the lowest number whose label is not ``taken``: servers of one
    model on one host all have rank 0.
    """
    model, suffix = engine_audit.model, ""
    if engine_audit.engine is not None:
        settings = engine_audit.engine.configuration
        model = model or engine_audit.engine.engine
        named = settings.get("instance") if settings.get("instance_given") else None
        suffix = f" on {named}" if named is not None else ""
        suffix += place_suffix(engine_audit.path, named)
    labels = (f"{model} / engine {number}{suffix}" for number in (engine_audit.rank, *range(len(taken) + 1)))
    return next(label for label in labels if label not in taken)
