"""One traffic: what is read of a journal to drive a real scheduler again, and what drives it."""
