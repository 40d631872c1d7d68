"""What the modules of BIOS settings have in common, however they reach the firmware."""

from __future__ import annotations


class ModuleDocFragment:
    """The specs are `_bios.LOOKING` and `_bios.ARGUMENTS`; ansible-test compares."""

    # Whoever changes settings.
    DOCUMENTATION = r"""
options:
  state:
    description: With V(planned) nothing is changed and RV(differences) says what would be.
    type: str
    choices: [planned, present]
    default: planned
  deadline:
    description: Seconds in which the job, and the power cycle it needs, must end.
    type: int
    default: 3600
  interval:
    description: Seconds between two looks at a job.
    type: float
    default: 15
  acknowledged_jobs:
    description: Ids of failed jobs that do not stand in the way of another one.
    type: list
    elements: str
    default: []
"""

    # Whoever looks at settings.
    WANTED = r"""
options:
  attributes:
    description:
      - Wanted values by name. RACADM knows a setting by C(GROUP.NAME), as
        C(racadm get BIOS.GROUP) lists it, and the three default settings also without their group;
        Redfish by the name in the BIOS's attribute registry.
    type: dict
    default:
      ProcVirtualization: Enabled
      LogicalProc: Enabled
      SriovGlobalEnable: Enabled
"""
