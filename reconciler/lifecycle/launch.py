"""Launch and release of allocations: placement, claims and the queued work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cache
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, journal, locks, rows
from reconciler.db.journal import advance
from reconciler.db.rows import batch_insert
from reconciler.db.schema import Allocation, Image, Pool, Slot, Task, nodes
from reconciler.db.schema import images as image_table
from reconciler.lifecycle import baremetal, gate, guest_pool, ingress, placement, quota
from reconciler.lifecycle.slices import advance_together, move_claims, run_on_slots
from reconciler.model.act import Act
from reconciler.model.discovery import gpu_count
from reconciler.model.errors import Problem, not_found
from reconciler.model.gate import fails_elsewhere
from reconciler.model.hardware import (
    NVLINK_PARTITIONS,
    Offer,
    tenant_disks,
    want,
)
from reconciler.model.proof import NOTHING_DONE
from reconciler.model.recovery import finishing_command
from reconciler.model.scheduler.snapshot import Want
from reconciler.model.states import AllocationState, CapacityShape, ProofKind, TaskKind, TaskState
from reconciler.records import allocations as allocation_records
from reconciler.records import proofs, queue
from reconciler.records.claims import claim_node, claim_slot, held_slots, of_allocation

_OF_NODE = ("id", "address", "boot_id", "profile", "region", "pool")
# Built once: each launch executes it.
_NODE = sa.select(*(nodes.c[name] for name in _OF_NODE)).where(nodes.c.id == sa.bindparam("node"))


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A tenant's request, checked for its form by the API.

    A slice names its image by id, or by name with an optional version. catalogue: the SKU of each
    hardware profile, by profile name. A requested SKU must be in the catalogue. prices: of a GPU
    hour by shape and SKU, in a currency. offers: what slices each hardware profile sells.
    user_data: the tenant's own cloud-config, parsed. worker_pool: id or name of the project's pool
    whose workers the machine runs. api: addresses of the API for them.
    """

    project_id: str
    gpu_count: int
    username: str
    ssh_keys: Sequence[str]
    hostname: str
    image_id: str = ""
    image: str = ""
    image_version: str = ""
    capacity_shape: str = CapacityShape.GPU_SLICE.value
    region: str = ""
    pool: str = ""
    sku: str = ""
    runtime_profile: str = ""
    node_id: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    catalogue: Mapping[str, str] = field(default_factory=dict)
    prices: Mapping[tuple[str, str], Decimal] = field(default_factory=dict)
    currency: str = ""
    offers: Mapping[str, Offer] = field(default_factory=dict)
    user_data: Mapping[str, Any] = field(default_factory=dict)
    worker_pool: str = ""
    api: Sequence[str] = ()

    @property
    def profiles(self) -> tuple[str, ...]:
        """The hardware profiles sold as the requested SKU. () means any profile."""
        if not (self.sku and self.catalogue):
            return ()
        profiles = tuple(name for name, sku in self.catalogue.items() if sku == self.sku)
        if not profiles:
            raise Problem(
                "sku_unknown",
                422,
                expected=", ".join(sorted({sku for sku in self.catalogue.values() if sku})),
                found=self.sku,
                remedy="choose one of these SKUs, or leave `sku` out",
            )
        return profiles

    def want(self, image: Image | None = None) -> Want:
        """The request for the scheduler. image: that of a slice."""
        return want(
            self.offers,
            self.gpu_count,
            image=(f"{image.name} {image.version}", image.runtime) if image else None,
            region=self.region,
            pool=self.pool,
            node_id=self.node_id,
            profiles=self.profiles,
        )


def allocate(conn: sa.Connection, launch: Launch, act: Act) -> Allocation:
    """Place, claim and record the allocation and queue its work, atomically (I3)."""
    if launch.capacity_shape == CapacityShape.BAREMETAL:
        return _whole_machine(conn, launch, act)
    _check(launch)
    pool = _worker_pool(conn, launch)
    recent = quota.admit(conn, launch.project_id, launch.gpu_count)
    # Hardware profiles of the same SKU may need different images.
    image = _image(conn, launch)
    node_id, chosen = _reserve(conn, launch, launch.want(image), recent)
    # The slots are locked and available, so the node's boot id is the boot that opened their gate
    # (I16).
    node = dict(conn.execute(_NODE, {"node": node_id}).mappings().one())
    _require_room(image, chosen[0])
    offer = launch.offers.get(node["profile"], Offer())
    kit = (guest_pool.KIT,) if pool else ()
    named = f"{image.name} {image.version}"
    if unfit := offer.image_problem(named, image.runtime, launch.gpu_count, further=kit):
        raise unfit
    if launch.gpu_count > 1 and offer.nvlink == NVLINK_PARTITIONS:
        _require_joined(chosen, offer)
    if pool:
        guest_pool.require_memory(pool, offer.memory_mib * launch.gpu_count)
        guest_pool.require_reach(offer, launch.api, node["address"])
    with batch_insert(conn):
        allocation = _record(conn, launch, act, node, gpu_count=launch.gpu_count, image_id=image.id)
        slot_act = act.because(act.reason or "allocated", {"allocation_id": allocation.id})
        held = [
            claim_slot(conn, allocation.id, slot, position, slot_act)
            for position, slot in enumerate(chosen)
        ]
        item = run_on_slots(
            allocation,
            TaskKind.SLICE_VM_PROVISION,
            held,
            allocation={
                "id": allocation.id,
                "username": launch.username,
                "ssh_keys": list(launch.ssh_keys),
                "hostname": launch.hostname,
            },
            image={name: value for name, value in vars(image).items() if name != "created_at"},
            runtime_profile=launch.runtime_profile,
            parameters=dict(launch.parameters),
            boot_id=node["boot_id"],
            **({"tenant_data": dict(launch.user_data)} if launch.user_data else {}),
        )
        task = queue.add(conn, item, act)
    if pool:
        guest_pool.attach(conn, pool, allocation, act, image_digest=image.digest)
    # Equal to the result of a fresh `get`, without another read.
    return replace(allocation, claims=tuple(held), task_ids=(task.id,))


def _reserve(
    conn: sa.Connection, launch: Launch, want: Want, recent: Sequence[Allocation]
) -> tuple[str, list[Slot]]:
    """A node and its locked slots. A pool's workers get no host on which they cannot work yet. A
    host on which one of the project's recent launches failed comes last: the cause may be there
    still.
    """
    unready = guest_pool.unready(conn, launch.offers, launch.api) if launch.worker_pool else ()
    failed = {
        row.node_id
        for row in recent
        if row.state == AllocationState.FAILED and not fails_elsewhere(row.error.get("code", ""))
    }
    if failed:
        with suppress(placement.NoRoom):
            return placement.reserve(conn, want, without={*unready, *failed})
    try:
        return placement.reserve(conn, want, without=unready)
    except placement.NoRoom:
        if not unready:
            raise
    node_id, _slots = placement.reserve(conn, want)
    raise guest_pool.networks_not_applied(node_id)


def _whole_machine(conn: sa.Connection, launch: Launch, act: Act) -> Allocation:
    """Allocate a whole machine, with every unused disk that was taken over."""
    pool = _worker_pool(conn, launch)
    quota.admit(conn, launch.project_id, 0)
    node, discovery = baremetal.reserve(conn, launch.want())
    document = discovery.document
    gpus = gpu_count(document)
    quota.admit(conn, launch.project_id, gpus)
    if pool:
        guest_pool.require_memory(pool, document["host"]["memory_mib"])
    allocation = _record(conn, launch, act, vars(node), gpu_count=gpus)
    claim_act = act.because(act.reason or "allocated", {"allocation_id": allocation.id})
    disks = tenant_disks(document, proofs.taken_over(conn, node))
    claim_node(conn, allocation.id, node.id, claim_act, disks=disks)
    baremetal.queue_provision(conn, allocation, node.boot_id, act)
    if pool:
        guest_pool.attach(conn, pool, allocation, act)
    return allocation_records.get(conn, allocation.id)


def _worker_pool(conn: sa.Connection, launch: Launch) -> Pool | None:
    if not launch.worker_pool:
        return None
    return guest_pool.admit(conn, launch.worker_pool, launch.project_id)


def _record(
    conn: sa.Connection,
    launch: Launch,
    act: Act,
    node: Mapping[str, Any],
    *,
    gpu_count: int,
    image_id: str | None = None,
) -> Allocation:
    sku = launch.catalogue.get(node["profile"], launch.sku)
    allocation = journal.create(
        conn,
        Allocation,
        act,
        project_id=launch.project_id,
        node_id=node["id"],
        capacity_shape=launch.capacity_shape,
        # Billing uses these values, so they come from the node and not from the request. The price
        # is that of the launch, even if the price changes before the machine is active.
        sku=sku,
        price=str(launch.prices.get((launch.capacity_shape, sku), "")),
        currency=launch.currency,
        region=node["region"],
        pool=node["pool"],
        gpu_count=gpu_count,
        name=launch.hostname,
        hostname=launch.hostname,
        username=launch.username,
        ssh_keys=list(launch.ssh_keys),
        image_id=image_id,
        runtime_profile=launch.runtime_profile,
        parameters=dict(launch.parameters),
        state=AllocationState.REQUESTED,
        state_reason=act.reason,
        requested_by=act.actor,
        owner=act.owner,
        correlation_id=act.correlation_id,
    )
    names = ("capacity_shape", "gpu_count", "node_id")
    detail = {name: getattr(allocation, name) for name in names}
    journal.audit_of(conn, act, "allocation.created", allocation, detail)
    return allocation


def release(conn: sa.Connection, id: str, act: Act) -> Allocation:
    """Release an allocation for its tenant. It ends at once if its work never started."""
    allocation = rows.get(conn, Allocation, id, lock=True)
    state = allocation.state
    queued = queue.open_of_allocation(conn, id)
    unstarted = all(task.started_at is None for task in queued)
    if state == AllocationState.ACTIVE:
        for task in queued:
            if task.kind == TaskKind.SLICE_VM_POWER:
                queue.cancel(conn, task.id, act.because("its allocation is released"))
        ended: dict[str, Any] = {"power_action": "", "error": {}}
        advance_together(conn, id, "release", act, columns=ended)
        guest_pool.detach(conn, id, act)
        if allocation.capacity_shape == CapacityShape.BAREMETAL:
            baremetal.queue_release(conn, allocation, act)
        else:
            ingress.end_all(conn, id, act)
            held = of_allocation(conn, id)
            item = run_on_slots(allocation, TaskKind.SLICE_VM_RELEASE, held)
            queue.enqueue(conn, item, act)
    elif state == AllocationState.REQUESTED and unstarted:
        _withdraw(conn, id, queued, act)
    else:
        raise Problem(
            "allocation_not_releasable",
            expected="an allocation that is active, or requested and not begun",
            found=str(state),
            remedy=_instead_of_release(allocation),
        )
    journal.audit_of(conn, act, "allocation.released", allocation)
    return allocation_records.get(conn, id)


def _instead_of_release(allocation: Allocation) -> str:
    """Remedy for an allocation that cannot be released in its present state."""
    state, whole = allocation.state, allocation.capacity_shape == CapacityShape.BAREMETAL
    command = finishing_command(allocation.id, allocation.capacity_shape)
    recover = f"an operator, `{command}`"
    if state == AllocationState.RELEASED:
        return "nothing: it is given back already"
    if state == AllocationState.FAILED:
        left = (
            "A machine that it left unclean takes" if whole else "Slots that it left blocked take"
        )
        return f"nothing: it has ended; launch again. {left} {recover}"
    if state == AllocationState.RELEASING and allocation.error:
        return f"its clean-up has failed and takes {recover}"
    if state == AllocationState.RELEASING:
        return "wait: it is being given back, until its disks are proven clean"
    wait = "wait until it is active, and ask again; a launch that is stuck"
    return f"{wait} ends at its deadline" if whole else f"{wait} takes {recover}"


def _check(launch: Launch) -> None:
    if launch.capacity_shape != CapacityShape.GPU_SLICE:
        raise Problem(
            "shape_not_schedulable",
            422,
            expected=", ".join(CapacityShape),
            found=launch.capacity_shape,
            remedy="ask for a shape that this site sells",
        )
    if launch.gpu_count < 1:
        raise Problem(
            "gpu_count_invalid",
            422,
            expected="at least one GPU",
            found=str(launch.gpu_count),
            remedy="ask for one GPU or more",
        )


def _require_room(image: Image, boot_slot: Slot) -> None:
    """Problem `disk_too_small` for an image that is larger than the disk of the first slot.

    The host refuses it too, but it would count as a failure of the slot, which two of them disable.
    """
    if image.size_bytes > boot_slot.nvme_size_bytes:
        raise Problem(
            "disk_too_small",
            expected=f"a disk of at least {image.size_bytes} bytes for the image {image.name}",
            found=f"{boot_slot.nvme_size_bytes} bytes in the slot that is free",
            remedy="choose a smaller image, or another SKU",
        )


def _require_joined(chosen: Sequence[Slot], offer: Offer) -> None:
    """Problem `nvlink_unsupported` for slots that no partition joins: the host would refuse them
    after the clone. Slots keep the partitions by which they are placed from their approval.
    """
    if frozenset(slot.gpu_pci_address for slot in chosen) not in offer.joined:
        raise Problem(
            "nvlink_unsupported",
            expected=f"{len(chosen)} GPUs that a partition of the hardware profile joins",
            found="slots that were approved under other partitions",
            remedy="ask for one GPU; an operator withdraws the node's slots and approves them anew",
        )


def _image(conn: sa.Connection, launch: Launch) -> Image:
    """The requested image, the newest of several with its name; Problem `image_not_found`."""
    named = {"id": launch.image_id} if launch.image_id else {"name": launch.image}
    if launch.image_version and not launch.image_id:
        named["version"] = launch.image_version
    row = conn.execute(_newest_image(tuple(named)), named).mappings().first()
    if row is None:
        raise not_found(
            "image", launch.image_id or f"{launch.image} {launch.image_version}".strip()
        )
    return Image(**row)


@cache
def _newest_image(names: tuple[str, ...]) -> sa.Select[Any]:
    """Query for the newest image with values of these columns."""
    columns = image_table.c
    query = sa.select(image_table).where(*(columns[name] == sa.bindparam(name) for name in names))
    return query.order_by(columns.created_at.desc()).limit(1)


def _withdraw(conn: sa.Connection, id: str, queued: Sequence[Task], act: Act) -> None:
    with locks.allocation(conn, id):
        for task in queued:
            queue.forget_tenant_data(conn, task)
            ended = queue.cancel(conn, task.id, act)
            # A worker may have started the task since `queued` was read.
            if ended.state != TaskState.CANCELED or ended.started_at is not None:
                raise Problem(
                    "generation_conflict",
                    expected=f"task {task.id} not begun",
                    found=f"{ended.state}, begun meanwhile",
                    remedy="read the allocation again and decide anew",
                )
        evidence = {
            "allocation_id": id,
            "never_started": [task.id for task in queued],
            "state": TaskState.CANCELED.value,
            **NOTHING_DONE,
        }
        slot_act = act.because("withdrawn before any run began", evidence)
        # End the claims first: the schema refuses to sell a slot under a live claim (I4).
        move_claims(conn, id, "finish", slot_act)
        for slot in held_slots(conn, id):
            proof = proofs.record(conn, slot, ProofKind.UNTOUCHED, evidence, allocation_id=id)
            gate.give_back(conn, slot, proof, slot_act)
        guest_pool.detach(conn, id, slot_act)
        advance(conn, Allocation, id, "withdraw", slot_act, columns={"ended_at": clock.now()})
