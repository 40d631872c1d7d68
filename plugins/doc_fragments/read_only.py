"""Attributes of modules that only read."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options: {}
requirements:
  - Debian 12, Ubuntu 24.04 or newer with Python 3.11 on the host
  - root on the host, except for modules that only talk to a BMC
attributes:
  check_mode:
    description: The module only reads.
    support: full
  diff_mode:
    description: Nothing changes, so there is no difference to show.
    support: none
"""
