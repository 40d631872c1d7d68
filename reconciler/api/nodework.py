"""Work that changes a node's host, asked for by an admin: each route queues one task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field, StringConstraints
from sqlalchemy import Connection

from reconciler.api import queueing
from reconciler.api.context import Context
from reconciler.api.guards import IfMatch
from reconciler.api.models import Body, Id, Reasoned, Text
from reconciler.api.security import Admin
from reconciler.lifecycle import host, slots
from reconciler.model.errors import Problem
from reconciler.model.states import NodeMode, TaskKind
from reconciler.records import images, nodes
from reconciler.work import chaining as story

router = APIRouter(prefix="/admin/nodes/{node_id}", tags=["node work"])

# A host says what these are, and they go back to hosts as variables: no braces, nothing unseen.
MountPoint = Annotated[str, StringConstraints(max_length=4096, pattern=r"^/[^{}\x00-\x1f\x7f]*$")]
Written = Annotated[str, StringConstraints(max_length=32, pattern=r"^[A-Za-z0-9_]+$")]
Sign = Annotated[
    str, StringConstraints(max_length=96, pattern=r"^[A-Za-z0-9_]+@[0-9]+(#[0-9a-f]+)?$")
]
Device = Annotated[str, StringConstraints(max_length=200, pattern=r"^/dev/[A-Za-z0-9/._:+-]+$")]


class Bootstrap(Reasoned):
    """Preparing a host may need one reboot."""

    allow_reboot: Annotated[bool, Field(strict=True)] = False


class Conversion(Reasoned):
    """What the machine is to become; both ways need a reboot."""

    to: Literal["slice", "baremetal"]
    allow_reboot: Annotated[bool, Field(strict=True)] = False


class DiskIdentity(Body):
    """What the operator has seen of the disk that is to be taken over; more is not approved.

    Without `signatures` mounts and types alone bind. A dry run shows all of it as `approval`.
    """

    serial: Text
    eui: Text
    mounts: Annotated[list[MountPoint], Field(default_factory=list, max_length=256)]
    filesystems: Annotated[list[Written], Field(default_factory=list, max_length=256)]
    signatures: Annotated[list[Sign], Field(default_factory=list, max_length=1024)]


class StorageTransition(Reasoned):
    """Without `apply` a dry run; with it every device needs its expected identity."""

    devices: Annotated[list[Device], Field(min_length=1, max_length=64)]
    apply: Annotated[bool, Field(strict=True)] = False
    expected: Annotated[dict[Device, DiskIdentity], Field(default_factory=dict)]


class ImageCache(Reasoned):
    """An image that the host should hold before a tenant waits for it."""

    image_id: Text


@router.post("/bootstrap", status_code=202)
def bootstrap(node_id: Id, context: Admin, body: Bootstrap | None = None) -> JSONResponse:
    """Make the machine a slice host; with a reboot only while nobody is on it."""
    body = body or Bootstrap()

    def parameters(conn: Connection) -> dict[str, Any]:
        if body.allow_reboot:
            nodes.refuse_in_use(conn, node_id, nodes.AT_WORK)
        return {"allow_reboot": body.allow_reboot}

    return _for_slice_host(context, node_id, TaskKind.NODE_BOOTSTRAP, body, parameters)


@router.post("/conversion", status_code=202)
def convert(node_id: Id, body: Conversion, context: Admin, guard: IfMatch) -> JSONResponse:
    """Slice host or bare metal: slots go off sale first; refused while one is in use.

    On the way to `slice` binding, discovery and parity of the approved slots follow by themselves:
    the result of each task names the next as `next_task_id`, until the slots are proven.
    """
    target = NodeMode(body.to)
    act = context.act(body.reason)

    def parameters(conn: Connection) -> dict[str, Any]:
        guard.check(conn, "node", node_id)
        host.convert(conn, node_id, target, act)
        back = target is NodeMode.BAREMETAL
        given_up = {"written_off": slots.written_off_holds(conn, node_id)} if back else {}
        return {"allow_reboot": body.allow_reboot, **given_up, **following}

    following = story.then(story.TO_SLICE) if target is NodeMode.SLICE else {}
    kind = TaskKind.NODE_BOOTSTRAP if target is NodeMode.SLICE else TaskKind.NODE_CONVERT
    return queueing.for_node(context, node_id, kind, body, parameters)


@router.post("/storage-transition", status_code=202)
def transition(node_id: Id, body: StorageTransition, context: Admin) -> JSONResponse:
    """Take host disks over for slots: they lose what is on them, and get a proof."""
    unnamed = sorted(set(body.devices) - set(body.expected))
    if body.apply and unnamed:
        raise Problem(
            "expected_identity_missing",
            422,
            expected="serial and EUI of every disk that is to be wiped",
            found=f"none for {', '.join(unnamed)}",
            remedy="do the dry run first, look at the identities it shows, and send them along",
        )
    parameters = body.model_dump(mode="json", exclude={"reason", "expected"})
    # No signatures and signatures that were left out are two approvals.
    parameters["expected"] = {
        name: disk.model_dump(mode="json", exclude_unset=True)
        for name, disk in body.expected.items()
    }
    return _for_slice_host(
        context, node_id, TaskKind.NODE_STORAGE_TRANSITION, body, lambda _conn: parameters
    )


@router.post("/bind-topology", status_code=202)
def bind(node_id: Id, context: Admin, body: Reasoned | None = None) -> JSONResponse:
    """Bind the devices of the approved slots to vfio-pci."""
    return _for_slice_host(context, node_id, TaskKind.NODE_BIND_TOPOLOGY, body or Reasoned())


@router.post("/image-cache", status_code=202)
def cache_image(node_id: Id, body: ImageCache, context: Admin) -> JSONResponse:
    """Bring an image into the host's cache."""

    def parameters(conn: Connection) -> dict[str, Any]:
        return {"image_id": images.get(conn, body.image_id)["id"]}

    return queueing.for_node(context, node_id, TaskKind.NODE_IMAGE_CACHE, body, parameters)


def _for_slice_host(
    context: Context,
    node_id: str,
    kind: TaskKind,
    body: Reasoned,
    parameters: Callable[[Connection], dict[str, Any]] = lambda _conn: {},
) -> JSONResponse:
    """Queue work that makes a slice host: never by accident on a bare-metal node."""

    def checked(conn: Connection) -> dict[str, Any]:
        host.require_slice_mode(conn, node_id)
        return parameters(conn)

    return queueing.for_node(context, node_id, kind, body, checked)
