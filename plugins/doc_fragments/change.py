"""Attributes and notes of the modules that change a host."""

from __future__ import annotations


class ModuleDocFragment:
    """Attributes shared by the modules that run on the driver `_change`."""

    DOCUMENTATION = r"""
options: {}
requirements:
  - Debian 12, Ubuntu 24.04 or newer with Python 3.11 on the host
  - root on the host, except for modules that only talk to a BMC
attributes:
  check_mode:
    description: Returns the plan without acting on it.
    support: full
  diff_mode:
    description: The diff is built from the same plan that is applied.
    support: full
  idempotent:
    description: A second run with the same arguments plans nothing.
    support: full
notes:
  - Observes, plans, applies and observes again; a change that the second observation does not
    confirm fails with C(verify_failed).
  - A refusal is returned as C(error) with the keys C(code), C(expected), C(found) and C(remedy),
    and changes nothing.
  - Beside the values below returns C(plan), a list of steps with C(name), C(subject), C(before),
    C(after) and C(destroys); C(done), the names of the steps that were carried out; and
    C(evidence), the findings of each step, by its name.
"""
