"""States, transitions and rules: no input, no output."""
