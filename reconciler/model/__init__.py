"""Domain model: states, rules and decisions, as pure functions without I/O."""
