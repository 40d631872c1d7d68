"""States, rules and decisions. Pure: no input, no output."""
