"""Scheduler: placement of allocations, as pure functions over a snapshot."""
