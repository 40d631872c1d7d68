"""Attributes of modules that only read."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options: {}
attributes:
  check_mode:
    description: The module only reads.
    support: full
  diff_mode:
    description: Nothing changes, so there is no difference to show.
    support: none
"""
