"""The demo: a small real engine, its workload, and the defects that can be injected."""
