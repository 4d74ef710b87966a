"""The catalogue of known faults: what released engines do wrong, one file of ``data/`` each.

Here: the files, what may stand in them, and which releases have a fault. Not here: how a fault is driven
(``tests/scenarios``, ``tests/repro``), and what a figure means in a release (``release_semantics.py``).
"""
