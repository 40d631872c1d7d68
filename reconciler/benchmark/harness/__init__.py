"""What runs on the measured machine: standard library only, Python 3.8 or newer, no files written.

`reconciler.benchmark.bundle` sends these modules as one text over standard input, so the same
measurement runs on bare metal and in a VM, whatever is installed there.
"""
