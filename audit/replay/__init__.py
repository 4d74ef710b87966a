"""Replay journals: find them, audit one or several, follow live ones, save and restore an audit.

- ``engine_audit.py``: the audit of one engine's journal, whole or live
- ``journals.py``: whole journals, several in one audit, one request's statement
- ``find.py``: journals by path or pattern, a request by what a user typed
- ``windows.py``, ``parallel.py``, ``worker_journals.py``: time windows, processes, workers' journals
- ``metrics_state.py``: what metrics need beyond totals
- ``serialize.py``, ``checkpoint.py``: an audit as plain data, and the file that holds it
"""
