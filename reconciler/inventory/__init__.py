"""NetBox: its tagged devices are intent; slots and state are written back into them."""
