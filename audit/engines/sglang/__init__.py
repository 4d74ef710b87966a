"""SGLang's schedulers: which of them kvledger observes, and how its plugin reaches them.

Nothing here imports SGLang before an engine of SGLang runs.
"""
