"""The journal: segments of encoded events on disk, their writer, reader, recorder and retention."""
