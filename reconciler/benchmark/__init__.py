"""Benchmark captures: one harness for bare metal and VM, comparison, and the gate for tuning."""
