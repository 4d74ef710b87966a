"""``kvledger serve``: the follower, its pages, and the comparison with the metrics of the engine."""
