"""The ledger: accounts of KV tokens, posted from events, and the ledger of blocks."""
