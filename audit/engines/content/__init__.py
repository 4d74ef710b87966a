"""Level ``content``: fingerprints of the KV itself, in the worker process."""
