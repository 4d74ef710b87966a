"""The journal: encoded events on disk. Nothing here knows what an event means.

This file exports nothing. Import from the file that has what you need:

- ``catalogue.py``: what each entry of a folder is; find and list journals, bound their disk space
- ``host_folders.py``: read a whole journal, follow one as it grows, the folders of several hosts
- ``reader.py``: ``Reader``, ``Batch``, ``Position``, ``Damage``
- ``writer.py``: ``JournalWriter`` and its ``Limits``
- ``recorder.py``: ``Recorder``, the queue and the thread between the hooks and the writer
- ``format.py``: the bytes of a segment; ``docs/journal.md`` describes them in prose
"""
