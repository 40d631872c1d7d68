"""Playbook runs: checked input, a process that outlives the reconciler, a result document.

Only `process` imports ansible_runner.
"""
