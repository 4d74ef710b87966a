"""The real vLLM scheduler, driven without a model, a GPU or weights.

`driver` moves the scheduler, `connector` scripts what an external cache answers, `scenarios` are the
ready-made workloads. Nothing here knows how kvledger observes: tests, benchmarks and the release
matrix attach their observers from outside. Importing this package does not import vLLM.
"""
