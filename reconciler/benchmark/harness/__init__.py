"""Benchmark harness that runs on the measured machine and writes no files.

It uses the standard library only and runs on Python 3.8 or newer. `reconciler.benchmark.capture`
sends the modules as a single text over standard input, so bare metal and VMs run the same code
with any software installed.
"""
