"""Playbook runs: checked input, a process that outlives the reconciler, one result document.

Only `process` imports ansible_runner.
"""
