"""Lifecycle of hosts, slots and allocations: their transitions and the work that follows."""
