"""All mutants."""

from __future__ import annotations

from . import of_blocks, of_connectors, of_fixes, of_requests
from .mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *of_requests.MUTANTS,
    *of_blocks.MUTANTS,
    *of_connectors.MUTANTS,
    *of_fixes.MUTANTS,
)
