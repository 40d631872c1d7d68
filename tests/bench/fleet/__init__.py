"""Benchmarks over a fleet of made-up nodes: no host, no run, only records."""
