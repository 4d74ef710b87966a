"""Score cards of KV connectors: the real vLLM scheduler, driven without a model, a GPU or weights.

`scorecard` drives a connector through the `situations` and judges each. `driver` steps the scheduler,
`host` and `release` build and call what a vLLM release has, `runner` answers steps in place of a model,
and `worker` runs the connector's worker side over a KV cache of checksums. Importing this package does
not import vLLM. Scenarios for tests and the release matrix are in `tests/scenarios`, not here.
"""
