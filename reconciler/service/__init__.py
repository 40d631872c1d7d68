"""Processes of the service: API, worker, loops of the leader, logs and metrics."""
