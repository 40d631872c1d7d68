"""Tasks that MAAS carries out: the installation of a machine, and its return to MAAS.

Each lease does a step: it reads the machine, makes at most one request, and gives the task back
until the next look. The step before a request is recorded, so a restart goes on. A request without
an answer has an unknown effect, which the next reads show; only then it is repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from ipaddress import ip_address
from typing import Any, Literal

from sqlalchemy import Connection, Engine

from reconciler.db import clock, locks, rows
from reconciler.db.engine import reading, transaction
from reconciler.db.schema import Node, Task
from reconciler.inventory.maas import (
    FORBIDDEN,
    Client,
    Machine,
    Status,
    had_no_effect,
    maas_access,
)
from reconciler.inventory.maas_sync import MAAS_SCRIPTS, shipped_digest
from reconciler.inventory.machines import (
    OTHER_SERIAL,
    UNSURE,
    UNSURE_LOCK,
    differing,
    is_ours,
    lock_comment,
    other_address,
    other_serial,
)
from reconciler.inventory.patches import purpose_of
from reconciler.lifecycle import host, installation
from reconciler.lifecycle.task_failures import act_of
from reconciler.model.errors import Refusal
from reconciler.model.states import NodeMode, TaskKind, TaskState
from reconciler.model.storable import storable_parts, storable_text
from reconciler.records import nodes, queue, tokens
from reconciler.runs.spec import LauncherAway, RunError
from reconciler.settings import Settings
from reconciler.trust import enrolment
from reconciler.work.handler import canceled

log = logging.getLogger("gpuaas.maas")
# Time between two looks at a machine. Time for the effect of a request that was not answered: MAAS
# goes on after the proxy before it gave up. Requests of a kind at most.
POLL_S, REPEAT_S, MOST = 15.0, 180.0, 3
# After so long without an effect a release is not repeated: it may have had one, and another client
# of the same user in MAAS may have installed the machine since, which takes some minutes.
UNSEEN_S = 600.0
# MAAS gives up a deployment after 40 minutes, and a machine with 4 TiB of memory boots for 20.
_LONGEST_S = 3 * 3600.0
_FAILED = (Status.FAILED_DEPLOYMENT, Status.FAILED_RELEASING, Status.FAILED_DISK_ERASING)
Verb = Literal["wait", "done", "unlock", "release", "deploy"]


@dataclass(frozen=True)
class Progress:
    """Progress of the task. phase: the last request. answered: whether MAAS has accepted it."""

    task: str = ""
    phase: str = ""
    asked_at: float = 0.0
    requests: int = 0
    answered: bool = False
    began_at: float = 0.0

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Progress:
        names = [field.name for field in fields(cls) if field.name in document]
        return cls(**{name: document[name] for name in names})


def attend(engine: Engine, settings: Settings, task: Task) -> None:
    """Do a step of a leased task."""
    act = act_of(task)
    try:
        _step(engine, settings, task)
    except LauncherAway as silent:
        parts = storable_parts(silent)
        with transaction(engine) as conn:
            reason = storable_text(str(silent))
            progress = Progress.of(queue.get(conn, task.id).progress)
            # The time of a task runs also where MAAS has never answered.
            began_at = progress.began_at or clock.read(conn)
            progress = replace(progress, task=reason, began_at=began_at)
            queue.progress(conn, task.id, task.lease_token, asdict(progress))
            queue.wait_for_host(conn, task.id, task.lease_token, reason, act=act, error=parts)
    except Refusal as refusal:
        if refusal.code == "stale_lease":
            raise
        error = storable_parts(refusal)
        state = TaskState.CANCELED if refusal.code == "canceled" else TaskState.FAILED
        with transaction(engine) as conn:
            tokens.end_tickets(conn, task.node_id)
            why = act.because(refusal.code)
            queue.finish(conn, task.id, task.lease_token, state, why, error=error)


def _step(engine: Engine, settings: Settings, task: Task) -> None:
    with reading(engine) as conn:
        node, row, now = nodes.get(conn, task.node_id), queue.get(conn, task.id), clock.read(conn)
    progress = Progress.of(row.progress)
    if row.cancel_requested:
        raise canceled("a task that is still wanted", "its cancellation; look at MAAS")
    if not progress.phase:
        # It locks the node's slots, which PostgreSQL refuses in a reading transaction.
        with transaction(engine) as conn:
            installation.require_free(conn, node, TaskKind(task.kind))
    if progress.began_at and now - progress.began_at > _LONGEST_S:
        raise _late(task, progress)
    system_id = str((node.maas or {}).get("system_id"))
    with Client(maas_access(settings)) as maas:
        user = maas.user().username
        machine = maas.machine(system_id)
        if not machine.locked and (node.maas or {}).get("locked"):
            # The answer of an unlock was lost. A lock from now on is a person's.
            with transaction(engine) as conn:
                _remember(conn, task, locked=False)

        def ours() -> bool:
            shown = maas.has_lock(system_id, comment=lock_comment(node.id))
            return is_ours((node.maas or {}).get("locked"), shown)

        verb, text = _decide(TaskKind(task.kind), node, machine, user, progress, now, ours)
        progress = replace(progress, task=text, began_at=progress.began_at or now)
        if verb == "done":
            _finish(engine, task, machine, progress)
        elif verb == "wait":
            _give_back(engine, task, progress, row.progress)
        else:
            released = progress.phase == "release" and progress.answered
            erased = verb == "deploy" and released and settings.maas_erase_disks
            progress = _asking(progress, verb, now)
            script = _release_script(maas, task) if verb == "release" else ""
            userdata = _begin(engine, settings, task, machine, progress, erased=erased)
            try:
                erase = settings.maas_erase_disks and _may_be_erased(task, node, machine)
                _ask(maas, task, machine, verb, userdata, script, erase=erase)
            except RunError as refusal:
                with transaction(engine) as conn:
                    if verb == "unlock" and refusal.code == FORBIDDEN:
                        _remember(conn, task, locked=True)
                    if verb == "release" and had_no_effect(refusal):
                        _remember(conn, task, returned=_is_returned(node))
                raise
            _give_back(engine, task, replace(progress, answered=True), asdict(progress))


def _decide(
    kind: TaskKind,
    node: Node,
    machine: Machine,
    user: str,
    progress: Progress,
    now: float,
    has_our_lock: Callable[[], bool],
) -> tuple[Verb, str]:
    """The next request, and the progress to show; RunError if a person must decide.

    has_our_lock: whether the machine's lock is ours.
    """
    status, shows = machine.status, f"{machine.system_id}: {machine.status_name}"
    _require_machine(node, machine)
    if status == Status.READY and kind == TaskKind.NODE_RELEASE:
        return "done", shows
    if status != Status.READY and machine.owner != user:
        owner = f"machine {machine.system_id} of {machine.owner or 'nobody'}, {shows}"
        raise _refused("foreign_owner", node, owner, f"let {user} have it, or choose another")
    if progress.phase == "deploy" and status in (Status.DEPLOYING, Status.DEPLOYED):
        if status == Status.DEPLOYED and installation.is_installed(node):
            return "done", shows
        if machine.ip_addresses and (addresses := other_address(node, machine)):
            # Its ticket is not accepted from there.
            text = f"{shows} with the address {addresses} and not {node.address}"
            remedy = "give it a static address in MAAS, or change the node's, then ask again"
            raise _refused("address_differs", node, text, remedy)
        return "wait", shows if status == Status.DEPLOYING else f"{shows}; waits for its enrolment"
    if status in (Status.RELEASING, Status.DISK_ERASING) and progress.phase != "deploy":
        return "wait", shows
    verb = _request(kind, node, machine, progress)
    unseen = verb == "release" and now - progress.asked_at > UNSEEN_S
    unlocking = machine.locked and progress.phase == "unlock"
    spent = progress.requests >= MOST
    undone = verb == progress.phase and (progress.answered or spent or unseen)
    # A lock after an unlock with an answer is a person's, as is said below.
    if undone or (unlocking and spent and not progress.answered):
        remedy = "read the machine's events in MAAS, then ask again"
        raise _refused("undone", node, f"{shows} after {progress.phase}", remedy)
    if (verb == progress.phase or unlocking) and now - progress.asked_at < REPEAT_S:
        return "wait", f"{shows}; the effect of {progress.phase} is not known yet"
    remembered = (node.maas or {}).get("locked")
    if machine.locked and remembered and not has_our_lock():
        raise _refused("locked", node, f"{shows}, {UNSURE_LOCK[1]}", UNSURE_LOCK[2])
    if machine.locked and not remembered:
        raise _refused("locked", node, f"{shows}, locked by a person", "unlock it in MAAS")
    if purpose_of(machine) != NodeMode(node.mode).purpose:
        tags = ", ".join(machine.tag_names) or "none"
        raise _refused("tags", node, f"tags {tags}", "set the tag of the node's mode in MAAS")
    return ("unlock" if machine.locked else verb), shows


def _request(kind: TaskKind, node: Node, machine: Machine, progress: Progress) -> Verb:
    """The request that a machine in this status needs."""
    status = machine.status
    if kind == TaskKind.NODE_DEPLOY and status in (Status.READY, Status.ALLOCATED):
        return "deploy"
    failed = status in _FAILED and progress.phase in ("", "unlock")
    if failed or status in (Status.DEPLOYED, Status.ALLOCATED):
        returned = _is_returned(node) and not progress.phase
        if status == Status.DEPLOYED and (not node.machine_id or returned):
            remedy = "enrol it (`gpuaas nodes userdata`), or release it in MAAS by hand"
            lack = "has not enrolled since its release" if returned else "never enrolled here"
            raise _refused("occupied", node, f"an installation that {lack}", remedy)
        return "release"
    text = f"{machine.system_id}: {machine.status_name}. {machine.status_message}"
    remedy = "repair the machine in MAAS, then ask again"
    raise _refused("failed" if status in _FAILED else "state", node, text, remedy)


def _is_returned(node: Node) -> bool:
    """Whether another client may have had the machine with the same user, since its release."""
    return bool((node.maas or {}).get("returned")) and not installation.is_installed(node)


def _may_be_erased(task: Task, node: Node, machine: Machine) -> bool:
    """Whether only a tenant's data can be on the disks. Where no tenant was root, or another client
    has begun to install the machine since its release, there may be other data.
    """
    others = machine.status == Status.FAILED_DEPLOYMENT and _is_returned(node)
    return task.kind == TaskKind.NODE_DEPLOY and installation.had_tenant(node) and not others


def _asking(progress: Progress, verb: Verb, now: float) -> Progress:
    requests = progress.requests + 1 if progress.phase == verb else 1
    return replace(progress, phase=verb, asked_at=now, requests=requests, answered=False)


def _begin(
    engine: Engine,
    settings: Settings,
    task: Task,
    machine: Machine,
    progress: Progress,
    *,
    erased: bool,
) -> str:
    """Record the request that follows, under the lock of the node; returns its userdata.

    erased: whether MAAS has erased the disks since the last tenant.
    """
    act = act_of(task).because(f"{progress.phase} of machine {machine.system_id} in MAAS")
    with transaction(engine) as conn, locks.node(conn, task.node_id) as node:
        _require_machine(node, machine)
        installation.begin(conn, node, TaskKind(task.kind), act)
        queue.progress(conn, task.id, task.lease_token, asdict(progress))
        # Before the request, because the task may end in any way after it: MAAS has the machine
        # from its release until it has accepted a deployment of ours.
        remembered: dict[str, Any] = {"returned": progress.phase != "unlock" or _is_returned(node)}
        if progress.phase == "unlock":
            remembered["locked"] = UNSURE
        if erased:
            remembered["tenant"] = False
        nodes.update(conn, node.id, maas={**(node.maas or {}), **remembered})
        if progress.phase != "deploy":
            return ""
        secret = tokens.issue_ticket(conn, node.id, machine.system_id, _sources(node, machine), act)
        return enrolment.site_userdata(settings, node.id, secret, user=node.ssh_user, ticket=True)


def _sources(node: Node, machine: Machine) -> list[str]:
    """Addresses from which the machine may fetch its token."""
    addresses = []
    for text in {node.address, *machine.ip_addresses}:
        try:
            addresses.append(str(ip_address(text)))
        except ValueError:
            continue
    if not addresses:
        remedy = f"set an IP address (`gpuaas nodes change {node.id} --address ADDRESS`)"
        raise _refused("address_unknown", node, "no address of the machine", remedy)
    return sorted(addresses)


def _require_machine(node: Node, machine: Machine) -> None:
    """Refuse a machine that is not bound to the node, or is not that of its host."""
    bound = str((node.maas or {}).get("system_id"))
    changed = bound if bound != machine.system_id else differing(node, machine)
    if changed:
        raise _refused("identity_changed", node, changed, "find out which machine this is in MAAS")
    if other := other_serial(node, machine):
        raise _refused("serial_differs", node, f"serial number {other}", OTHER_SERIAL)


def _release_script(maas: Client, task: Task) -> str:
    """Name of our script that MAAS runs at a release; "" where it has none, which a comparison
    names, because MAAS refuses a release with a script that it does not have.
    """
    file = MAAS_SCRIPTS["release"]
    uploaded = maas.script_digest(file.stem) if task.kind == TaskKind.NODE_RELEASE else ""
    if not uploaded:
        return ""
    try:
        shipped = shipped_digest("release")
    except OSError as missing:
        shipped = type(missing).__name__
    if uploaded != shipped:
        raise RunError(
            "maas_script",
            expected=f"the release script of this version in MAAS (SHA-256 {shipped}), or none",
            found=f"SHA-256 {uploaded}",
            remedy="upload it (`gpuaas maas sync`), or delete it in MAAS",
        )
    return file.stem


def _ask(
    maas: Client,
    task: Task,
    machine: Machine,
    verb: Verb,
    userdata: str,
    script: str,
    *,
    erase: bool,
) -> None:
    comment = f"gpuaas.slice, task {task.id}"
    if verb == "deploy":
        series = str(task.parameters.get("series") or "")
        maas.deploy(machine.system_id, userdata=userdata, series=series, comment=comment)
    elif verb == "release":
        maas.release(machine.system_id, comment=comment, script=script, erase=erase)
    else:
        maas.unlock(machine.system_id, comment=comment)
    log.info("MAAS accepted %s of %s for node %s", verb, machine.system_id, task.node_id)


def _give_back(engine: Engine, task: Task, progress: Progress, recorded: Mapping[str, Any]) -> None:
    with transaction(engine) as conn:
        if asdict(progress) != dict(recorded):
            queue.progress(conn, task.id, task.lease_token, asdict(progress))
            if progress.phase == "deploy" and progress.answered:
                # What is installed from now on is ours, also if it never enrols.
                _remember(conn, task, returned=False)
        if progress.phase == "unlock" and progress.answered:
            _remember(conn, task, locked=False)
        act = act_of(task).because(progress.task)
        queue.wait_for_host(conn, task.id, task.lease_token, progress.task, act=act, seconds=POLL_S)


def _finish(engine: Engine, task: Task, machine: Machine, progress: Progress) -> None:
    act = act_of(task).because(f"machine {machine.system_id} in MAAS: {machine.status_name}")
    with transaction(engine) as conn:
        result = {"system_id": machine.system_id, "status": machine.status_name}
        queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, act, result=result)
        tokens.end_tickets(conn, task.node_id)
        node = rows.get(conn, Node, task.node_id, lock=True)
        if not progress.phase:
            # Another client has returned it.
            installation.begin(conn, node, TaskKind(task.kind), act)
        _remember(conn, task, locked=False, returned=task.kind == TaskKind.NODE_RELEASE)
        if task.kind == TaskKind.NODE_DEPLOY and node.mode == NodeMode.BAREMETAL:
            # Its discovery completes the preparation of a bare-metal machine.
            host.reverify(conn, node, act)


def _remember(conn: Connection, task: Task, **values: Any) -> None:
    with locks.node(conn, task.node_id) as node:
        nodes.update(conn, node.id, maas={**(node.maas or {}), **values})


def _refused(code: str, node: Node, found: str, remedy: str) -> RunError:
    expected = f"the machine of node {node.id}, ready for the next step"
    return RunError(f"maas_{code}", expected=expected, found=found[:300], remedy=remedy)


def _late(task: Task, progress: Progress) -> RunError:
    return RunError(
        "maas_late",
        expected=f"the end of {task.kind} within {_LONGEST_S / 3600:.0f} hours",
        found=progress.task[:300],
        remedy="look at the machine in MAAS; enrol it by hand (`gpuaas nodes userdata`), or ask"
        " again",
    )
