"""Turns a finding in a journal into a small workload that drives the released scheduler into it again.

`cut` reads the finding and the events around it, `rebuild` makes workloads from them, `drive` runs one
under observation, `workers` does so in other processes, and `shrink` removes what the finding does not
need. `checks` chooses the figure of the engine that is wrong, and `probes` reads such figures.
`reproduction` does all of this for the command line. Importing this package does not import vLLM.
"""
