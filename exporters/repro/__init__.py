"""The files that `kvledger repro` writes: the standalone test, and the bug report around it."""
