"""Playbook runs: what goes in, a process that outlives the reconciler, what comes out.

The only importer of ansible_runner.
"""
