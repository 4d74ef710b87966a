"""Block pools at level ``blocks``: which blocks are allocated, cached and freed, and for whom."""
