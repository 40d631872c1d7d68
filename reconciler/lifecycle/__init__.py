"""The stories of hosts, slots and allocations, each in the order in which things happen."""
