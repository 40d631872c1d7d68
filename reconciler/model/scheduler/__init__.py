"""Who gets what: pure functions over a snapshot."""
