"""Recorded traffic on a real scheduler, in simulated time: `kvledger simulate`."""
