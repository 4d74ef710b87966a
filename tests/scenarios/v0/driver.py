"""The driver of the v0 scheduler, which is part of the package."""

from kvledger.audit.traffic.driver_v0 import Attach, V0Driver, V0Setup, start, tokens

__all__ = ["Attach", "V0Driver", "V0Setup", "start", "tokens"]
