"""`gpuaas nodes onboard`: a machine from its enrolment to slots on sale, resumed where it stopped.

Each step is decided by the records, so a second call goes on where the first stopped. A step that
destroys or takes something has a plan with a digest, which covers all that the step acts on.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from reconciler.cli import nodes, output, slots, tasks
from reconciler.cli.options import Reason, confirm
from reconciler.cli.session import client
from reconciler.durable import write_text
from reconciler.model.errors import Problem

Record = dict[str, Any]

# Blockers of a candidate, and of a slot, that the takeover of its disk ends.
_LIFTED = frozenset({"mounted", "mounted_child", "unexpected_filesystem", "partitions_present"})
_UNPROVEN = frozenset({"proof_missing", "proof_outdated", "proof_stale"})
_ENROL_S = 900
_PAUSE_S = 2.0


def onboard(
    node: nodes.Node,
    reason: Reason,
    *,
    yes_to: Annotated[
        list[str] | None,
        typer.Option(help="Digest of a plan that may be carried out without a question."),
    ] = None,
    allow_reboot: Annotated[bool, typer.Option(help="Allow restarts of the host.")] = False,
    left_out: Annotated[
        bool, typer.Option(help="Go on to candidates that are no slot, beside slots on sale.")
    ] = False,
    userdata: Annotated[
        Path | None,
        typer.Option(help="Write the enrolment script here, and wait until it has run."),
    ] = None,
) -> None:
    """Bring an added machine on sale as a slice host: enrol, bootstrap, discover, erase disks,
    approve, bind, prove. Asks before each step that destroys or takes something.
    """
    walk = _Walk(node, reason, yes_to or [], allow_reboot)
    walk.enrol(userdata)
    walk.bootstrap()
    if left_out or not walk.proven():
        walk.discover()
        walk.take_disks()
        walk.approve()
        walk.bind()
    if not walk.proven():
        # Both count only when they are newer than the approval.
        walk.discover()
        walk.prove()
    walk.sell()


@dataclass(frozen=True)
class _Walk:
    """yes_to: digests of the plans that need no question."""

    node: str
    reason: str
    yes_to: Sequence[str]
    allow_reboot: bool

    @property
    def path(self) -> str:
        return f"/admin/nodes/{self.node}"

    def enrol(self, userdata: Path | None) -> None:
        """Wait for the enrolment; refuse a node that is not on its way to a slice host."""
        row = client().get(self.path)
        if row["state"] == "enrolling" and userdata:
            answer = client().post(f"{self.path}/enrollment-token")
            # The script holds a token. A new file replaces a link, or a file that others may read.
            write_text(userdata, answer["userdata"])
            output.line(f"run {userdata} on the machine as root; good until {answer['expires_at']}")
            ends = time.monotonic() + _ENROL_S
            while row["state"] == "enrolling" and time.monotonic() < ends:
                time.sleep(_PAUSE_S)
                row = client().get(self.path)
        if row["state"] == "enrolling":
            raise self._problem(
                "node_not_enrolled",
                "a machine that has enrolled",
                "none yet",
                "with --userdata FILE",
            )
        for field, allowed, verb in (
            ("mode", ("slice", "converting_to_slice"), f"convert {self.node} slice"),
            ("state", ("bootstrapping", "ready"), f"show {self.node}"),
        ):
            if row[field] not in allowed:
                raise Problem(
                    f"node_{field}_mismatch",
                    expected=f"{field} {' or '.join(allowed)}",
                    found=f"{row[field]}: {row[f'{field}_reason'] or 'no reason'}",
                    remedy=f"see `gpuaas nodes {verb}`",
                )

    def bootstrap(self) -> None:
        row = client().get(self.path)
        if _is_prepared(row):
            return
        path, why = f"{self.path}/bootstrap", {"reason": self.reason}
        plan = (tasks.queue(path, {**why, "plan_only": True}, wait=True) or {})["result"]
        digest = plan["plan_digest"]
        shown = {"address": row["address"], "allow_reboot": self.allow_reboot, "plan": digest}
        if _is_prepared(client().get(self.path)):
            # A bootstrap of an earlier call, which was interrupted, has ended before the plan.
            return
        self._ask("bootstrap", shown, self._bootstrap_lines(row["address"], plan))
        body = {**why, "allow_reboot": self.allow_reboot, "expected_plan": digest}
        tasks.queue(path, body, wait=True)

    def _bootstrap_lines(self, address: str, plan: Record) -> list[str]:
        kernel = plan["kernel"]
        lines = [f"to be made a slice host: {address}"]
        for row in plan["plan"]:
            later = f"not to be foretold yet: {row['open']}" if row["open"] else ""
            shown = "; ".join(filter(None, (row["steps"], later)))
            lines.append(f"  {row['part']}: {shown or 'nothing to do'}")
        lines.append(f"  kernel arguments now: {' '.join(kernel['running'])}")
        lines.append(f"  kernel arguments to be had: {' '.join(kernel['arguments'])}")
        judged = not any(row["open"] for row in plan["plan"] if row["part"] == "kernel")
        restart = "not needed" if judged else "not to be foretold yet"
        restart = "needed" if kernel["reboot_reasons"] else restart
        allowed = "" if self.allow_reboot else "; none without --allow-reboot"
        return [*lines, f"  restart {restart}{allowed}"]

    def discover(self) -> None:
        report = self._report("slice-topology/discovery")
        if not output.is_json():
            nodes.show_candidates(report)

    def prove(self) -> None:
        """Run parity; exits with an error when a check failed."""
        report = self._report("parity")
        if not output.is_json():
            nodes.show_checks(report)
        nodes.require_passed(report)

    def _report(self, kind: str) -> Record:
        """A new report of the host. Of JSON the command prints one document, the slots."""
        tasks.queue(f"{self.path}/{kind}", wait=True)
        document: Record = client().get(f"{self.path}/{kind}")["document"]
        return document

    def take_disks(self) -> None:
        """Erase the disks of candidates, and of slots off sale, that have no proof of it yet."""
        slots = self._slots()
        done = self._taken() | {slot["nvme_device"] for slot in slots}
        rows = [row for row in self._candidates() if _codes(row) <= _LIFTED]
        devices = [row["bundle"]["nvme_device"] for row in rows]
        devices = [device for device in devices if device and device not in done]
        devices += [slot["nvme_device"] for slot in slots if self._unproven(slot)]
        if not devices:
            return
        path, body = f"{self.path}/storage-transition", {"devices": devices, "reason": self.reason}
        dry = tasks.queue(path, body, wait=True)
        expected = {row["nvme_device"]: row["approval"] for row in (dry or {})["result"]["devices"]}
        lines = [nodes.approval_line(device, expected[device]) for device in expected]
        self._ask("storage_transition", {"expected": expected}, lines)
        tasks.queue(path, {**body, "apply": True, "expected": expected}, wait=True)
        self.discover()

    def approve(self) -> None:
        """Approve the candidates without blockers that are no slot yet."""
        rows = self._left()
        self._name(row for row in rows if row["blockers"])
        bundles = [row["bundle"] for row in rows if not row["blockers"]]
        if bundles:
            lines = [
                f"to be a slot: {bundle['slot_index']}  GPU {bundle['gpu_pci_address']}"
                f"  disk {bundle['nvme_device']}, taken from the host's own drivers"
                for bundle in bundles
            ]
            self._ask("approve", {"slots": bundles}, lines)
            body = {"slots": bundles, "reason": self.reason}
            client().post(f"{self.path}/resource-slots", body)
        elif not self._slots():
            how = "once the blockers of those left out are mended"
            raise self._problem("candidate_not_found", "a candidate without blockers", "none", how)

    def bind(self) -> None:
        """Bind the slots' devices, unless that was done since the last approval and bootstrap."""
        bound = max((task["created_at"] for task in self._tasks("node.bind_topology")), default="")
        approved = max(slot["approved_at"] for slot in self._slots())
        if bound < max(approved, self._bootstrapped_at()):
            tasks.queue(f"{self.path}/bind-topology", {"reason": self.reason}, wait=True)

    def proven(self) -> bool:
        """Whether there are slots, and none is off sale."""
        rows = self._slots()
        return bool(rows) and all(slot["status"] != "disabled" for slot in rows)

    def sell(self) -> None:
        """Switch the node's scheduling on, and show its slots."""
        if not client().get(self.path)["slice_scheduling"]:
            body = {"enabled": True, "reason": self.reason}
            client().put(f"{self.path}/scheduling", body)
        slots.list_slots(self.node)
        if left := self._left():
            self._name(left)
            output.line(f"`gpuaas nodes onboard {self.node} --left-out` goes on to these")
        if not self.proven():
            output.line(f"not all on sale: `gpuaas slots show {self.node} SLOT` shows what is open")
            raise typer.Exit(1)
        if not client().get("/admin/settings/slice-scheduling")["enabled"]:
            output.line("the site sells no slices: `gpuaas scheduling on --reason WHY`")

    def _ask(self, step: str, document: Record, lines: list[str]) -> None:
        """Show the plan and wait for a word; Problem `plan_unapproved` for another digest."""
        row = client().get(self.path)
        covered = {"step": step, "node": self.node, "install_id": row["install_id"], **document}
        text = json.dumps(covered, sort_keys=True)
        digest = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
        for line in lines:
            # Texts of a host cannot begin a line, and so cannot pass for the plan's digest.
            output.line(line.replace("\n", "\N{REPLACEMENT CHARACTER}"))
        output.line(f"plan {digest}")
        if digest in self.yes_to:
            return
        if self.yes_to:
            raise self._problem(
                "plan_unapproved",
                f"the digest of the plan above, {digest}",
                ", ".join(self.yes_to),
                f"with --yes-to {digest}",
            )
        confirm("Go on?", instead=f"--yes-to {digest}")

    def _candidates(self) -> list[Record]:
        latest = client().get(f"{self.path}/slice-topology/discovery")
        candidates: list[Record] = (latest["document"] or {}).get("candidates", [])
        return candidates

    def _name(self, left: Iterable[Record]) -> None:
        for row in left:
            codes = ", ".join(sorted(_codes(row))) or "no blocker"
            output.line(f"left out: slot {row['slot_index']}, {codes}")

    def _left(self) -> list[Record]:
        """Candidates of the latest discovery that are no slot."""
        indexes = {slot["slot_index"] for slot in self._slots()}
        return [row for row in self._candidates() if row["slot_index"] not in indexes]

    def _slots(self) -> list[Record]:
        return [s for s in client().items(f"{self.path}/resource-slots") if not s["retired_at"]]

    def _taken(self) -> set[str]:
        """Disks that were erased for slots since the host was last made a slice host."""
        since = self._bootstrapped_at()
        return {
            device["nvme_device"]
            for task in self._tasks("node.storage_transition")
            if task["created_at"] >= since
            for device in task["result"].get("devices", [])
            if device.get("proof")
        }

    def _unproven(self, slot: Record) -> bool:
        """Whether the slot is off sale for want of a proof of this installation for its disk."""
        if slot["status"] != "disabled":
            return False
        gate = client().get(f"{self.path}/resource-slots/{slot['id']}")["gate"]
        return not _UNPROVEN.isdisjoint(row["code"] for row in gate)

    def _bootstrapped_at(self) -> str:
        """When the last bootstrap that succeeded was asked for; "" for never."""
        tasks = self._tasks("node.bootstrap")
        made = (task["created_at"] for task in tasks if not task["parameters"].get("plan_only"))
        return max(made, default="")

    def _tasks(self, kind: str) -> list[Record]:
        query = {"node_id": self.node, "kind": kind, "state": "succeeded"}
        return list(client().items("/admin/tasks", **query))

    def _problem(self, code: str, expected: str, found: str, how: str) -> Problem:
        command = f"`gpuaas nodes onboard {self.node}` goes on from here {how}".rstrip()
        return Problem(code, expected=expected, found=found, remedy=command)


def _is_prepared(node: Record) -> bool:
    return bool((node["state"], node["mode"]) == ("ready", "slice"))


def _codes(row: Record) -> set[str]:
    return {blocker["code"] for blocker in row["blockers"]}
