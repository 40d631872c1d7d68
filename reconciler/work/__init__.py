"""Execution of tasks: leases, runs of playbooks, and settlement of outcomes."""
