"""Options that the modules of BIOS settings share."""

from __future__ import annotations


class ModuleDocFragment:
    """The specs are `_bios.LOOKING` and `_bios.ARGUMENTS`; ansible-test compares."""

    # Options of modules that change settings.
    DOCUMENTATION = r"""
options:
  state:
    description: V(planned) changes nothing; RV(differences) lists the changes that V(present) would
      make.
    type: str
    choices: [planned, present]
    default: planned
  deadline:
    description: Seconds in which the job, and the power cycle it needs, must end.
    type: int
    default: 3600
  interval:
    description: Seconds between two readings of a job.
    type: float
    default: 15
  acknowledged_jobs:
    description: Ids of failed jobs that do not stand in the way of another one.
    type: list
    elements: str
    default: []
"""

    # Options of modules that read settings.
    VALUES = r"""
options:
  attributes:
    description:
      - Requested values by name. RACADM knows a setting by C(GROUP.NAME), as
        C(racadm get BIOS.GROUP) lists it, and the three default settings also without their group;
        Redfish by the name in the BIOS's attribute registry.
    type: dict
    default:
      ProcVirtualization: Enabled
      LogicalProc: Enabled
      SriovGlobalEnable: Enabled
"""
