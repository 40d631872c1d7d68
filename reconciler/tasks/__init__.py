"""What happens next to nodes, slots and allocations: one file per kind of task, one worker."""
