"""BIOS settings compared with the desired settings: differences, pending values, jobs.

Pure functions. A setting has the running machine's value (current) and the value after the next job
(pending). The management controller shows a pending value immediately after the request, so it
proves nothing. A setting is in force when its current value is right and no BIOS job is open.

The vocabulary is RACADM's. Other interfaces to the controller fill the same `State`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core._change import Plan, Step
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

# Requirements of slices: VT-x or AMD-V, threads for the slices' vCPUs, and virtual functions.
REQUIRED = {
    "ProcSettings.ProcVirtualization": "Enabled",
    "ProcSettings.LogicalProc": "Enabled",
    "IntegratedDevices.SriovGlobalEnable": "Enabled",
}
# The same without RACADM's groups, which Redfish does not have.
BARE = {name.partition(".")[2]: value for name, value in REQUIRED.items()}
TARGET = "BIOS.Setup.1-1"

# Options of the reading modules and of the changing modules; the doc fragment `bios` describes
# them.
LOOKING: dict[str, Any] = {"attributes": {"type": "dict", "default": BARE}}
ARGUMENTS: dict[str, Any] = {
    **LOOKING,
    "state": {"type": "str", "choices": ["planned", "present"], "default": "planned"},
    "deadline": {"type": "int", "default": 3600},
    "interval": {"type": "float", "default": 15},
    "acknowledged_jobs": {"type": "list", "elements": "str", "default": []},
}

_JOB_ID = re.compile(r"\b[JR]ID_[0-9]{6,20}\b")


class Phase(Enum):
    """Phase of a job. An unknown status counts as OPEN, because it does not prove an end."""

    OPEN = "open"
    DONE = "done"
    FAILED = "failed"


_ENDED = {
    "completed": Phase.DONE,
    "reboot completed": Phase.DONE,
    "completed with errors": Phase.FAILED,
    "failed": Phase.FAILED,
    "reboot failed": Phase.FAILED,
}


@dataclass(frozen=True)
class Attribute:
    """A BIOS setting. pending: its value after the next job, None when nothing is staged."""

    name: str
    current: str
    pending: str | None = None
    read_only: bool = False

    @property
    def coming(self) -> str:
        """The value after the next job."""
        return self.current if self.pending is None else self.pending


@dataclass(frozen=True)
class Job:
    """An entry of the controller's queue. percent: as reported, or ""."""

    id: str
    name: str
    status: str
    message: str = ""
    percent: str = ""

    @property
    def phase(self) -> Phase:
        return _ENDED.get(self.status.strip().lower(), Phase.OPEN)

    @property
    def is_reboot(self) -> bool:
        return self.id.startswith("RID_")

    @property
    def is_bios(self) -> bool:
        return TARGET in self.name

    @property
    def number(self) -> int:
        """Job number, which grows with time."""
        return int(self.id.partition("_")[2])

    def document(self) -> dict[str, str]:
        fields = {"status": self.status, "message": self.message, "percent": self.percent}
        return {"id": self.id, "name": self.name, **fields}


@dataclass(frozen=True)
class State:
    """attributes: every setting of the groups that were read, by `Group.Name`.

    in_use: reasons against a power cycle, if the reader can see them.
    """

    attributes: Mapping[str, Attribute]
    jobs: tuple[Job, ...] = ()
    in_use: tuple[Refusal, ...] = ()

    def open_jobs(self) -> list[Job]:
        return [job for job in self.jobs if job.phase is Phase.OPEN]


@dataclass(frozen=True)
class Wish:
    """The requested settings.

    attributes: value by `Group.Name`. power_cycle: whether the machine may be power-cycled. wait:
    whether to follow an open BIOS job to its end. acknowledged: ids of failed jobs that a person
    has checked.
    """

    attributes: Mapping[str, str]
    power_cycle: bool = False
    wait: bool = True
    acknowledged: frozenset[str] = frozenset()


def job_ids(text: str) -> list[str]:
    """The distinct job ids in an answer, in order."""
    return list(dict.fromkeys(_JOB_ID.findall(text)))


def plan(wish: Wish, state: State) -> Plan:
    """Stage missing values, commit them with a job and a power cycle, or finish that job."""
    blockers = _unusable(wish, state)
    present = {name: state.attributes[name] for name in wish.attributes if name in state.attributes}
    differing = {n: a for n, a in present.items() if a.current != wish.attributes[n]}
    unstaged = {n: a for n, a in present.items() if a.coming != wish.attributes[n]}
    running = [job for job in state.open_jobs() if job.is_bios]
    if not (differing or unstaged or running):
        return Plan(blockers=tuple(blockers))
    if running:
        blockers += _unlike(unstaged, running) or _stuck(state, running)
        ids = ", ".join(job.id for job in state.open_jobs())
        step = Step("finish_job", TARGET, before={"open": ids}, after={"open": ""})
        return Plan(steps=(step,) if wish.wait else (), blockers=tuple(blockers))
    blockers += _not_now(wish, state, differing)
    steps = [
        Step(
            "stage_attribute",
            name,
            before={"current": attribute.current, "pending": attribute.pending},
            after={"current": attribute.current, "pending": wish.attributes[name]},
        )
        for name, attribute in unstaged.items()
    ]
    if differing:
        before = {name: attribute.current for name, attribute in differing.items()}
        after = {name: wish.attributes[name] for name in differing}
        steps.append(Step("commit_job", TARGET, before=before, after=after))
    return Plan(steps=tuple(steps), blockers=tuple(blockers))


def digest(steps: Iterable[Step]) -> str:
    """Digest by which a person approves these steps (the reconciler's `firmware.approvable`)."""
    documents = [step.document() for step in steps]
    text = json.dumps(documents, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def unapproved(approved: str, steps: Sequence[Step]) -> list[Refusal]:
    """The refusal of steps other than the approved steps; [] without steps or an approval."""
    present = digest(steps)
    if not steps or approved in ("", present):
        return []
    return [
        Refusal(
            "plan_changed",
            expected=f"the approved plan {approved}",
            found=f"the plan {present}",
            remedy="plan again, read the differences, then approve the new digest",
        )
    ]


def settled(wish: Wish, state: State) -> bool:
    """Whether every requested value is current and stays so, and no BIOS job is open."""
    return not any(job.is_bios for job in state.open_jobs()) and all(
        name in state.attributes
        and state.attributes[name].current == value
        and state.attributes[name].coming == value
        for name, value in wish.attributes.items()
    )


def unstaged(wish: Wish, state: State) -> list[str]:
    """Settings that a job created now would leave unchanged."""
    return [
        f"{name} would be {state.attributes[name].coming}"
        for name, value in wish.attributes.items()
        if state.attributes[name].coming != value
    ]


def failed(jobs: Iterable[Job]) -> Refusal:
    """The refusal for failed jobs."""
    shown = "; ".join(f"{job.id} {job.status}: {job.message or 'no message'}" for job in jobs)
    return Refusal(
        "bios_job_failed",
        expected="the BIOS job and its power cycle to complete",
        found=shown,
        remedy="read the message and the controller's log; then name the job as acknowledged, or"
        " delete it from the controller's job queue, and ask again",
    )


def queued(jobs: Iterable[Job]) -> Refusal:
    """The refusal for open jobs that block a change."""
    return Refusal(
        "job_in_queue",
        expected="no open job that our power cycle would start or that holds the BIOS settings",
        found=", ".join(f"{job.id} ({job.name}, {job.status})" for job in jobs),
        remedy="let it end or delete it from the controller's job queue, then ask again",
    )


def document(wish: Wish, state: State) -> dict[str, Any]:
    """The module's result: requested settings, jobs, and whether all settings are current."""
    return {
        "settled": settled(wish, state),
        "attributes": [
            _comparison(name, value, state.attributes.get(name))
            for name, value in wish.attributes.items()
        ],
        "jobs": [job.document() for job in state.jobs if job.is_bios or job.is_reboot],
    }


def _comparison(name: str, value: str, attribute: Attribute | None) -> dict[str, Any]:
    if attribute is None:
        return {"name": name, "wanted": value, "current": "", "pending": None, "status": "unknown"}
    if attribute.current == value:
        status = "right" if attribute.coming == value else "would_be_lost"
    else:
        status = "pending" if attribute.coming == value else "wrong"
    seen = {"current": attribute.current, "pending": attribute.pending, "status": status}
    return {"name": name, "wanted": value, **seen}


def _unusable(wish: Wish, state: State) -> list[Refusal]:
    blockers = []
    for name, value in wish.attributes.items():
        attribute = state.attributes.get(name)
        if attribute is None:
            group = name.partition(".")[0]
            siblings = ", ".join(sorted(n for n in state.attributes if n.startswith(f"{group}.")))
            blockers.append(
                Refusal(
                    "attribute_unknown",
                    expected=f"the BIOS setting {name}",
                    found=f"this BIOS has {siblings or 'no setting'} there",
                    remedy="name the setting as this BIOS does, as GROUP.NAME",
                )
            )
        elif attribute.read_only and attribute.coming != value:
            blockers.append(
                Refusal(
                    "attribute_read_only",
                    expected=f"{name} to be changeable to {value}",
                    found=f"read-only, {attribute.current}",
                    remedy="change the setting that it depends on, in the machine's setup",
                )
            )
    return blockers


def _unlike(unstaged: Mapping[str, Attribute], running: list[Job]) -> list[Refusal]:
    """An open job with other values locks the settings until it ends."""
    return [queued(running)] if unstaged else []


def _stuck(state: State, running: list[Job]) -> list[Refusal]:
    """A job that waits for a failed power cycle never ends by itself."""
    if any(job.phase is Phase.OPEN for job in state.jobs if job.is_reboot):
        return []
    oldest = min(job.number for job in running)
    lost = [
        job
        for job in state.jobs
        if job.is_reboot and job.phase is Phase.FAILED and job.number > oldest
    ]
    return [failed(lost)] if lost else []


def _not_now(wish: Wish, state: State, differing: Mapping[str, Attribute]) -> list[Refusal]:
    if not differing:
        return []
    # The machine's users matter only with permission for a power cycle; without it, the missing
    # permission is reported below.
    blockers = [*state.in_use] if wish.power_cycle else []
    blockers += [queued(state.open_jobs())] if state.open_jobs() else []
    bad = _last_failure(state)
    if bad is not None and bad.id not in wish.acknowledged:
        blockers.append(failed([bad]))
    strangers = [
        f"{name}: {attribute.current} to become {attribute.pending}"
        for name, attribute in state.attributes.items()
        if name not in wish.attributes and attribute.coming != attribute.current
    ]
    if strangers:
        blockers.append(
            Refusal(
                "foreign_pending_values",
                expected="no staged change beside the requested ones: one job commits them all",
                found="; ".join(strangers),
                remedy="commit them with a job of their own, or clear the pending BIOS values, then"
                " ask again",
            )
        )
    if not wish.power_cycle:
        blockers.append(
            Refusal(
                "power_cycle_not_allowed",
                expected="leave to power-cycle the machine, without which nothing takes effect",
                found=", ".join(
                    f"{name} is {attribute.current}" for name, attribute in differing.items()
                ),
                remedy="ask again with the power cycle allowed, when nothing runs on the machine",
            )
        )
    return blockers


def _last_failure(state: State) -> Job | None:
    """The newest BIOS job if it failed. The queue keeps it over reboots and reinstalls."""
    ended = [job for job in state.jobs if job.is_bios and job.phase is not Phase.OPEN]
    newest = max(ended, key=lambda job: job.number, default=None)
    return newest if newest is not None and newest.phase is Phase.FAILED else None
