"""The ledger of blocks: the holders, hashes and last operations of every block."""
