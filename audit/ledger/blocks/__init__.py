"""The ledger of blocks: who holds which, how often, what each is hashed for, and what befell it last."""
