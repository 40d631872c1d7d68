"""Benchmark of bare metal and VMs: capture, comparison, and the gate for tuning profiles."""
