"""Work on a node: its states, tasks on its host, discovery and parity reports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field, StringConstraints
from sqlalchemy import Connection
from typing_extensions import TypeAliasType

from reconciler.api.http import Guard, IfMatch
from reconciler.api.models import (
    Answer,
    Body,
    Document,
    Id,
    Moment,
    Reasoned,
    Record,
    RequiredReason,
    StrictFlag,
    Text,
)
from reconciler.api.nodes import Node
from reconciler.api.security import Admin, Context
from reconciler.api.tasks import Task
from reconciler.db import schema
from reconciler.db.rows import Page
from reconciler.lifecycle import baremetal, drift, firmware, gate, host, maintenance, slots
from reconciler.model import firmware as firmware_model
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.model.states import NodeMode, TaskKind
from reconciler.records import images, nodes, queue, reports

_PREFIX = "/admin/nodes/{node_id}"
state_router = APIRouter(prefix=_PREFIX, tags=["node state"])
router = APIRouter(prefix=_PREFIX, tags=["node work"])
baremetal_router = APIRouter(prefix=_PREFIX, tags=["bare metal"])
topology_router = APIRouter(prefix=_PREFIX, tags=["topology"])

# Hosts report these values and get them back as variables, so template braces and control
# characters are excluded.
MountPoint = Annotated[str, StringConstraints(max_length=4096, pattern=r"^/[^{}\x00-\x1f\x7f]*$")]
Filesystem = Annotated[str, StringConstraints(max_length=32, pattern=r"^[A-Za-z0-9_]+$")]
Signature = Annotated[
    str, StringConstraints(max_length=96, pattern=r"^[A-Za-z0-9_]+@[0-9]+(#[0-9a-f]+)?$")
]
AllocationId = Annotated[
    str, StringConstraints(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
]
# Failed job of the BMC that a person has examined.
BiosJob = Annotated[str, StringConstraints(max_length=24, pattern=r"^[JR]ID_[0-9]{6,20}$")]
PlanDigest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
Device = Annotated[str, StringConstraints(max_length=200, pattern=r"^/dev/[A-Za-z0-9/._:+-]+$")]


class StateReason(Body):
    """The reason is required: it explains later why the node is out of use."""

    reason: RequiredReason


class Bootstrap(Reasoned):
    """Preparing a host may need one reboot. plan_only: report what would change, and change
    nothing. expected_plan: digest of a reported plan; a host with another plan is left alone.
    """

    allow_reboot: StrictFlag = False
    plan_only: StrictFlag = False
    expected_plan: PlanDigest | None = None


class Conversion(Reasoned):
    """The mode to convert the machine to. Both directions need a reboot."""

    to: Literal["slice", "baremetal"]
    allow_reboot: StrictFlag = False


class Reboot(StateReason):
    """Every allocation on the node, which confirms that their tenants know of the restart."""

    allocations: Annotated[list[AllocationId], Field(default_factory=list, max_length=64)]


class FirmwareChange(Reasoned):
    """Without `apply` a plan. With it, `digest` is that of the latest plan."""

    apply: StrictFlag = False
    digest: Annotated[str, StringConstraints(pattern=r"^(sha256:[0-9a-f]{64})?$")] = ""
    acknowledged_jobs: Annotated[list[BiosJob], Field(default_factory=list, max_length=64)]


class DiskIdentity(Body):
    """The disk to take over, as the operator has seen it. The approval covers nothing else.

    Without `signatures` only mounts and types are compared. A dry run reports all of it as
    `approval`.
    """

    serial: Text
    eui: Text
    mounts: Annotated[list[MountPoint], Field(default_factory=list, max_length=256)]
    filesystems: Annotated[list[Filesystem], Field(default_factory=list, max_length=256)]
    signatures: Annotated[list[Signature], Field(default_factory=list, max_length=1024)]


class StorageTransition(Reasoned):
    """Without `apply` a dry run. With it every device needs its expected identity."""

    devices: Annotated[list[Device], Field(min_length=1, max_length=64)]
    apply: StrictFlag = False
    expected: Annotated[dict[Device, DiskIdentity], Field(default_factory=dict)]


class ImageCache(Reasoned):
    """The image to copy to the host before a tenant needs it."""

    image_id: Text


class Cleaning(Reasoned):
    """With `without_dead_disks`, disks that are missing in the latest discovery are given up."""

    without_dead_disks: StrictFlag = False


ReportText = Annotated[str, StringConstraints(max_length=firmware_model.LONGEST)]
ReportSection = TypeAliasType(
    "ReportSection",
    Annotated[dict[ReportText, ReportText], Field(max_length=firmware_model.MOST_ENTRIES)],
)


class BmcReport(Reasoned):
    """Output of `scripts/ops/redfish_firmware_inventory.py`; a section is there or unreadable."""

    sections: dict[Literal["redfish_firmware", "redfish_users", "redfish_boot"], ReportSection]
    unreadable: ReportSection = Field(default_factory=dict)


class _Report(Answer):
    id: int
    node_id: str
    task_id: str | None
    boot_id: str
    install_id: str
    document: Document
    observed_at: Moment | None
    created_at: Moment
    task: Task | None


class Discovery(_Report):
    """What a host has: its candidate topology, and the latest task that looks."""

    reboot_required: bool


class Parity(_Report):
    """Whether a host meets its requirements, and the latest task that checks."""

    intent: str
    failures: int
    warnings: int


class NoReport(Answer):
    """No report yet; `task` is the latest task for one."""

    document: None
    task: Task | None


class LatestDrift(Answer):
    """`task`: the latest finished comparison of host and records; null before the first. `failed`:
    the latest one of all, if it has ended later without success; else null.
    """

    task: Task | None
    failed: Task | None


LatestDiscovery = TypeAliasType("LatestDiscovery", Discovery | NoReport)
LatestParity = TypeAliasType("LatestParity", Parity | NoReport)
Report = TypeVar("Report", Discovery, Parity)


# -- Node states --------------------------------------------------------------------------------


@state_router.post("/drain", response_model=Node)
def drain(node_id: Id, body: StateReason, context: Admin, guard: IfMatch) -> JSONResponse:
    """Sell nothing new on the node. Existing allocations stay until they are released."""
    return _move(context, node_id, body, guard, maintenance.drain)


@state_router.post("/maintain", response_model=Node)
def maintain(node_id: Id, body: StateReason, context: Admin, guard: IfMatch) -> JSONResponse:
    """Take the node out of use. Refused while a tenant is on it."""
    return _move(context, node_id, body, guard, host.maintain)


@state_router.post("/resume", response_model=Node)
def resume(node_id: Id, body: StateReason, context: Admin, guard: IfMatch) -> JSONResponse:
    """Take the node back into use. Slots whose gate is open are sold again."""

    def back(conn: Connection, node: str, act: Act) -> None:
        maintenance.resume(conn, node, act)
        gate.open_gate(conn, node, act)

    return _move(context, node_id, body, guard, back)


@state_router.post("/retire", response_model=Node)
def retire(node_id: Id, body: StateReason, context: Admin, guard: IfMatch) -> JSONResponse:
    """Retire the node for good. Allowed in maintenance, or when the node never enrolled."""
    return _move(context, node_id, body, guard, host.retire)


def _move(
    context: Context, node_id: str, body: Body, guard: Guard, transition: Callable[..., object]
) -> JSONResponse:
    def work(conn: Connection, act: Act) -> Node:
        guard.check(conn, "node", node_id)
        transition(conn, node_id, act=act)
        return Node.of(nodes.get(conn, node_id))

    return context.write(work, body=body)


# -- Tasks that change a host -------------------------------------------------------------------


@router.post("/bootstrap", status_code=202, response_model=Task)
def bootstrap(node_id: Id, context: Admin, body: Bootstrap | None = None) -> JSONResponse:
    """Make the machine a slice host. It is rebooted only while no tenant is on it."""
    body = body or Bootstrap()

    def parameters(conn: Connection, _act: Act) -> Record:
        if body.allow_reboot:
            nodes.refuse_in_use(conn, node_id, nodes.AT_WORK)
        return body.model_dump(exclude={"reason"}, exclude_defaults=True) | {
            "allow_reboot": body.allow_reboot
        }

    kind = TaskKind.NODE_BOOTSTRAP
    return _queue(context, node_id, kind, body, parameters, slice_host=True)


@router.post("/conversion", status_code=202, response_model=Task)
def convert(node_id: Id, body: Conversion, context: Admin, guard: IfMatch) -> JSONResponse:
    """Convert the node to a slice host or to bare metal. Its slots go off sale first; refused while
    one is in use.

    On the way to `slice`, binding, discovery and parity of the approved slots follow by themselves.
    The result of each task names the next as `next_task_id`, until the slots are proven.
    """
    target = NodeMode(body.to)

    def parameters(conn: Connection, act: Act) -> Record:
        guard.check(conn, "node", node_id)
        host.convert(conn, node_id, target, act)
        if target is NodeMode.SLICE:
            return {"allow_reboot": body.allow_reboot, **queue.then(host.TO_SLICE)}
        return {
            "allow_reboot": body.allow_reboot,
            "written_off": slots.written_off_holds(conn, node_id),
        }

    kind = TaskKind.NODE_BOOTSTRAP if target is NodeMode.SLICE else TaskKind.NODE_CONVERT
    # The conversion has its own entry in the audit log.
    return _queue(context, node_id, kind, body, parameters, audited=False)


@router.post("/storage-transition", status_code=202, response_model=Task)
def transition(node_id: Id, body: StorageTransition, context: Admin) -> JSONResponse:
    """Take disks of the host over for slots. All data on them is lost; each gets a proof."""
    unnamed = sorted(set(body.devices) - set(body.expected))
    if body.apply and unnamed:
        raise Problem(
            "expected_identity_missing",
            422,
            expected="serial and EUI of every disk that is to be wiped",
            found=f"none for {', '.join(unnamed)}",
            remedy="do the dry run first, check the identities that it reports, and send them",
        )
    parameters = body.model_dump(mode="json", exclude={"reason", "expected"})
    # An empty list of signatures approves less than a missing list, so only sent fields are kept.
    parameters["expected"] = {
        name: disk.model_dump(mode="json", exclude_unset=True)
        for name, disk in body.expected.items()
    }
    kind = TaskKind.NODE_STORAGE_TRANSITION
    return _queue(context, node_id, kind, body, lambda _conn, _act: parameters, slice_host=True)


@router.post("/bind-topology", status_code=202, response_model=Task)
def bind(node_id: Id, context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """Bind the devices of the approved slots to vfio-pci."""
    return _queue(context, node_id, TaskKind.NODE_BIND_TOPOLOGY, body, slice_host=True)


@router.post("/image-cache", status_code=202, response_model=Task)
def cache_image(node_id: Id, body: ImageCache, context: Admin) -> JSONResponse:
    """Copy an image into the host's cache."""

    def parameters(conn: Connection, _act: Act) -> Record:
        return {"image_id": images.get(conn, body.image_id).id}

    return _queue(context, node_id, TaskKind.NODE_IMAGE_CACHE, body, parameters, slice_host=True)


@router.post("/reboot", status_code=202, response_model=Task)
def reboot(node_id: Id, body: Reboot, context: Admin, guard: IfMatch) -> JSONResponse:
    """Restart the host. The node is drained, its slices are shut down, and discovery and parity
    follow; a pass takes the node back into use and starts the slices again.

    Refused with `reboot_unconfirmed` unless `allocations` are those on the node.
    """
    request = partial(maintenance.request_reboot, allocations=body.allocations)
    return _maintain(context, node_id, body, guard, request)


@router.post("/firmware", status_code=202, response_model=Task)
def change_firmware(
    node_id: Id, context: Admin, guard: IfMatch, body: FirmwareChange | None = None
) -> JSONResponse:
    """Plan, or apply, the BIOS settings that slices need. A plan changes no setting; its task's
    result has `digest`, which approves it.

    Applying it power-cycles the machine and follows the BMC's job; refused while anything is on the
    node. Discovery and parity follow, and a pass takes a drained node back into use, unless the job
    may still be open.
    """
    body = body or FirmwareChange(acknowledged_jobs=[])
    if not body.apply:
        return _queue(context, node_id, TaskKind.NODE_FIRMWARE, body)
    request = partial(
        maintenance.request_firmware, digest=body.digest, acknowledged_jobs=body.acknowledged_jobs
    )
    return _maintain(context, node_id, body, guard, request)


def _maintain(
    context: Context, node_id: str, body: Body, guard: Guard, request: Callable[..., schema.Task]
) -> JSONResponse:
    def work(conn: Connection, act: Act) -> Task:
        guard.check(conn, "node", node_id)
        return Task.of(request(conn, node_id, act))

    return context.write(work, body=body, status=202)


def _queue(
    context: Context,
    node_id: str,
    kind: TaskKind,
    body: Body | None,
    parameters: Callable[[Connection, Act], Record] = lambda _conn, _act: {},
    *,
    slice_host: bool = False,
    audited: bool = True,
) -> JSONResponse:
    """202 with a new task whose subject is the node; refused until its host has enrolled.

    slice_host: refused on a bare-metal node as well.
    """

    def work(conn: Connection, act: Act) -> Task:
        nodes.require_enrolled(conn, node_id)
        if slice_host:
            host.require_slice_mode(conn, node_id)
        item = queue.Enqueue(
            kind=kind, node_id=node_id, parameters=parameters(conn, act), audited=audited
        )
        return Task.of(queue.enqueue(conn, item, act))

    return context.write(work, body=body, status=202)


# -- Whole machines after their tenants ---------------------------------------------------------


@baremetal_router.post("/clean-machine", status_code=202, response_model=Task)
def clean_machine(node_id: Id, context: Admin, body: Cleaning | None = None) -> JSONResponse:
    """Remove what the last tenant left, wipe its disks and prove it. Answers with the task."""
    body = body or Cleaning()
    clean = partial(baremetal.clean, without_dead_disks=body.without_dead_disks)
    return context.write(
        lambda conn, act: Task.of(clean(conn, node_id, act)), body=body, status=202
    )


@baremetal_router.post("/accept-drift", response_model=Node)
def accept_drift(node_id: Id, body: Reasoned, context: Admin, guard: IfMatch) -> JSONResponse:
    """Let the machine be sold with the differences that its last tenant left."""
    return _move(context, node_id, body, guard, baremetal.accept_drift)


@baremetal_router.put("/bmc-firmware", response_model=Node)
def record_bmc(node_id: Id, body: BmcReport, context: Admin, guard: IfMatch) -> JSONResponse:
    """Record firmware versions, users and boot settings as the machine's BMC reports them.

    The BMC answers whatever runs on the machine. A report from before a tenant is compared with one
    from after the new installation; between the two, its differences are named at once.
    """
    report = body.model_dump(exclude={"reason"})
    record = partial(firmware.record_bmc, report=report)
    return _move(context, node_id, body, guard, record)


@baremetal_router.post("/accept-firmware", response_model=Node)
def accept_firmware(node_id: Id, body: Reasoned, context: Admin, guard: IfMatch) -> JSONResponse:
    """Let the machine be sold with firmware that differs from before its last tenant."""
    return _move(context, node_id, body, guard, firmware.accept)


# -- Reports of hosts ---------------------------------------------------------------------------


@topology_router.post("/slice-topology/discovery", status_code=202, response_model=Task)
def discover(node_id: Id, context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """Queue a discovery of the host. Nothing becomes schedulable by it."""
    return _queue(context, node_id, TaskKind.SLICE_TOPOLOGY_DISCOVER, body)


@topology_router.get("/slice-topology/discovery", response_model=LatestDiscovery)
def discovery(node_id: Id, context: Admin) -> Discovery | NoReport:
    """The latest candidate topology (`document`, null before the first) and the latest task for
    one.
    """

    def read(conn: Connection) -> Discovery | NoReport:
        nodes.get(conn, node_id)
        row = reports.latest_discovery(conn, node_id)
        task = _latest_task(conn, node_id, TaskKind.SLICE_TOPOLOGY_DISCOVER)
        return _report(Discovery, row, task)

    return context.read(read)


@topology_router.post("/parity", status_code=202, response_model=Task)
def measure(node_id: Id, context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """Check whether the host meets the requirements of its mode. On a slice host a pass opens the
    gate of its slots.
    """
    return _queue(context, node_id, TaskKind.NODE_PARITY, body)


@topology_router.get("/parity", response_model=LatestParity)
def parity(node_id: Id, context: Admin) -> Parity | NoReport:
    """The latest report (`document`, null before the first) and the latest task for one.

    Only reports on the requirements of the node's present mode count.
    """

    def read(conn: Connection) -> Parity | NoReport:
        mode = NodeMode(nodes.get(conn, node_id).mode)
        row = reports.latest_parity(conn, node_id, mode.purpose)
        return _report(Parity, row, _latest_task(conn, node_id, TaskKind.NODE_PARITY))

    return context.read(read)


@topology_router.post("/drift", status_code=202, response_model=Task)
def compare(node_id: Id, context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """Compare the slices that the host holds with the records, now.

    The task's result names every difference. An idle slot of which the host still holds something
    goes off sale. The host's own baseline is repaired; nothing of a tenant is changed.
    """
    return _queue(context, node_id, TaskKind.SLICE_DRIFT_RECONCILE, body, slice_host=True)


@topology_router.get("/drift", response_model=LatestDrift)
def latest_drift(node_id: Id, context: Admin) -> LatestDrift:
    """The latest finished comparison. Its result has the `differences`, the parts of the host that
    are `unknown` with the reasons, and the slots and allocations `skipped` because work on them was
    under way. `repairs` are those of the host's own upkeep since its boot, with times. While
    `failed` is not null, the host may hold something else by now.
    """

    def read(conn: Connection) -> LatestDrift:
        nodes.get(conn, node_id)
        failed = drift.latest_failure(conn, node_id)
        return LatestDrift.of({"task": drift.latest(conn, node_id), "failed": failed})

    return context.read(read)


def _latest_task(conn: Connection, node_id: str, kind: TaskKind) -> schema.Task | None:
    tasks = queue.every(conn, node_id=node_id, kind=kind, page=Page(1))
    return tasks[0] if tasks else None


def _report(
    kind: type[Report], row: schema.Discovery | schema.Parity | None, task: schema.Task | None
) -> Report | NoReport:
    if row is None:
        return NoReport.of({"document": None, "task": task})
    return kind.of(row, task=task)
