"""`gpuaas host`: work on one host by hand, over SSH or on the host itself, without the service."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from reconciler.cli import approvals, benchmark, handwork, maastags, parityreport, session, show
from reconciler.model import hardware
from reconciler.model.errors import Problem
from reconciler.runs.reach import Reach

app = typer.Typer(
    no_args_is_help=True,
    help="One host by hand, without the service: over SSH, or here when --host is not given.",
)
app.add_typer(benchmark.app, name="benchmark")

Host = Annotated[str, typer.Option("--host", help="Its address; this machine unless given.")]
User = Annotated[str, typer.Option("--user", help="Of SSH; root, or one that may use sudo.")]
Port = Annotated[int, typer.Option("--port", help="Of SSH.")]
Key = Annotated[Path | None, typer.Option("--ssh-key", help="A private key.")]
Config = Annotated[Path | None, typer.Option("--ssh-config", help="For ssh -F.")]
Profile = Annotated[
    str,
    typer.Option(
        "--profile",
        envvar="GPUAAS_SLICE_PROFILE",
        help=f"Hardware profile; the node's own by the API, or {handwork.DEFAULT_PROFILE}.",
    ),
]
ApiBase = Annotated[str, typer.Option("--api-base", help="The reconciler, for its evidence.")]
ApiToken = Annotated[Path | None, typer.Option("--api-token-file", help="An admin's token.")]
NodeId = Annotated[str, typer.Option("--node-id", help="The host's node in the reconciler.")]
Slots = Annotated[Path | None, typer.Option("--slots", help="Approved bundles, without the API.")]
FabricInterface = Annotated[
    str, typer.Option("--fabric-interface", help="Its interface on the InfiniBand fabric.")
]
FabricAddress = Annotated[
    str, typer.Option("--fabric-address", help="Its address there, with prefix length.")
]
Reboot = Annotated[bool, typer.Option("--allow-reboot", help="It may reboot the host.")]
SSH_USER, SSH_PORT = "root", 22


@app.command()
def parity(
    context: typer.Context,
    *,
    host: Host = "",
    user: User = SSH_USER,
    port: Port = SSH_PORT,
    ssh_key: Key = None,
    ssh_config: Config = None,
    profile: Profile = "",
    api_base: ApiBase = "",
    api_token_file: ApiToken = None,
    node_id: NodeId = "",
    slots: Slots = None,
    intent: Annotated[Literal["slice", "baremetal"], typer.Option(help="Its purpose.")] = "slice",
    maas_tag: maastags.Tags = None,
    fabric_interface: FabricInterface = "",
    fabric_address: FabricAddress = "",
    remediate: Annotated[bool, typer.Option("--remediate", help="Repair, check again.")] = False,
    allow_reboot: Reboot = False,
) -> None:
    """Check every target condition: a line each, exit 0 only when none has failed."""
    here = session.of(context)
    known = handwork.ask(handwork.Api(api_base or here.url, api_token_file, node_id))
    said = maastags.said(maas_tag)
    work = handwork.work(
        "parity",
        "node.parity",
        profile or known.profile,
        known.own | _own(fabric_interface, fabric_address),
        slice_slots=handwork.slots_of(slots) or known.slots,
        slice_intent=intent,
        slice_api_topology=known.topology,
        **hardware.maas_tags(known.maas_tags if said is None else said),
        slice_remediate=remediate,
        slice_allow_reboot=allow_reboot,
    )
    evidence = handwork.play(work, Reach(host, user, port, ssh_key, ssh_config, node_id))
    report = evidence["parity"]
    lines = parityreport.lines(report)
    if here.output == "json":
        show.document(report)
    else:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    _tell_repairs(evidence)
    if parityreport.failures(report):
        raise typer.Exit(1)


@app.command()
def discover(
    context: typer.Context,
    *,
    host: Host = "",
    user: User = SSH_USER,
    port: Port = SSH_PORT,
    ssh_key: Key = None,
    ssh_config: Config = None,
    profile: Profile = "",
) -> None:
    """Look at the host and show what slots it could give."""
    work = handwork.work("discover", "slice.topology_discover", profile)
    found = handwork.play(work, Reach(host, user, port, ssh_key, ssh_config))["discovery"]
    here = session.of(context)
    if here.output == "json":
        show.document(found)
        return
    bundle = ("gpu_pci_address", "nvme_device", "private_ip", "fabric_vf_pci_address", "numa_node")
    codes = [", ".join(row["code"] for row in one["blockers"]) for one in found["candidates"]]
    rows = [one | {"codes": said} for one, said in zip(found["candidates"], codes, strict=True)]
    show.rows(here, rows, "slot_index", *(f"bundle.{name}" for name in bundle), "codes")
    summary = found["candidate_summary"]
    show.line(f"node blockers: {', '.join(summary['blockers']) or 'none'}")


@app.command()
def transition(
    context: typer.Context,
    *,
    devices: Annotated[
        list[str], typer.Option("--devices", help="Paths, with commas between; may be repeated.")
    ],
    host: Host = "",
    user: User = SSH_USER,
    port: Port = SSH_PORT,
    ssh_key: Key = None,
    ssh_config: Config = None,
    profile: Profile = "",
    apply: Annotated[bool, typer.Option("--apply", help="Wipe them.")] = False,
    approved: Annotated[
        Path | None, typer.Option(help="JSON: what a plan showed, as it was approved.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask; only with what --approved names.")
    ] = False,
) -> None:
    """Take disks for slices: a plan with their identities, and with --apply the wipe itself."""
    here, paths = (
        session.of(context),
        [path for word in devices for path in word.split(",") if path],
    )
    if apply:
        _refuse_kernel_names(paths)
    if apply and yes and not approved:
        _refuse_unseen(paths)
    reach, kind = Reach(host, user, port, ssh_key, ssh_config), "node.storage_transition"
    given = _approved(approved) if approved else {}
    if apply and approved:
        _refuse_unnamed(approved, [path for path in paths if not given.get(path)])
    asked = {"slice_devices": paths, "slice_apply": False, "slice_expected": given}
    plan = handwork.work("transition_storage", kind, profile, **asked)
    disks = handwork.play(plan, reach)["devices"]
    columns = ("nvme_device", "kernel_name", "serial", "size_bytes", "mounts", "filesystems")
    if not apply:
        if here.output == "json":
            show.document(disks)
            return
        show.rows(here, disks, *columns)
        show.line("a plan; nothing was changed. To act: --apply with the paths of nvme_device")
        return
    # What the plan shows is an approval only where a person reads it and says yes.
    expected = given if approved else {disk["nvme_device"]: disk["approval"] for disk in disks}
    if not yes:
        for path, disk in expected.items():
            show.line(approvals.line(path, disk))
        typer.confirm("Everything on these disks is lost. Go on?", abort=True, err=True)
    asked = {"slice_devices": paths, "slice_apply": True, "slice_expected": expected}
    done = handwork.play(handwork.work("transition_storage", kind, profile, **asked), reach)
    if here.output == "json":
        show.document(done)
        return
    show.rows(here, done["devices"], "nvme_device", "serial", "proof.method", "proof.verified")
    show.line(f"manifest: {done['manifest']}")


@app.command()
def bootstrap(
    context: typer.Context,
    *,
    host: Host = "",
    user: User = SSH_USER,
    port: Port = SSH_PORT,
    ssh_key: Key = None,
    ssh_config: Config = None,
    profile: Profile = "",
    fabric_interface: FabricInterface = "",
    fabric_address: FabricAddress = "",
    allow_reboot: Reboot = False,
) -> None:
    """Make the machine a slice host."""
    own = _own(fabric_interface, fabric_address)
    work = handwork.work(
        "bootstrap", "node.bootstrap", profile, own, slice_allow_reboot=allow_reboot
    )
    found = handwork.play(work, Reach(host, user, port, ssh_key, ssh_config))
    show.record(session.of(context), found)


@app.command()
def prepare(
    context: typer.Context,
    *,
    host: Host = "",
    user: User = SSH_USER,
    port: Port = SSH_PORT,
    ssh_key: Key = None,
    ssh_config: Config = None,
    profile: Profile = "",
) -> None:
    """Ready a slice host for VMs: GPU services quiet, libvirt reachable, network repaired."""
    work = handwork.work("prepare_runtime", "node.bootstrap", profile)
    found = handwork.play(work, Reach(host, user, port, ssh_key, ssh_config))
    show.record(session.of(context), found)


def _own(fabric_interface: str, fabric_address: str) -> dict[str, Any]:
    """What the caller says of this host; what he leaves out is the record's or the profile's."""
    given = {"fabric_interface": fabric_interface, "fabric_address": fabric_address}
    return {name: value for name, value in given.items() if value}


def _tell_repairs(evidence: dict[str, Any]) -> None:
    for role in evidence.get("repaired") or []:
        show.line(f"repaired: {role}")
    for failed in evidence.get("unrepaired") or []:
        show.line(f"not repaired: {failed['role']} ({failed['code']})")


def _refuse_kernel_names(paths: list[str]) -> None:
    moving = [path for path in paths if not path.startswith("/dev/disk/by-id/nvme-eui.")]
    if moving:
        raise Problem(
            "kernel_name_not_allowed",
            422,
            expected="paths like /dev/disk/by-id/nvme-eui.*, which name a disk and not a position",
            found=", ".join(moving),
            remedy="run it without --apply, which shows the identities, and apply with these",
        )


def _refuse_unseen(paths: list[str]) -> None:
    # What the plan shows a moment before the wipe is approved by whoever reads it, or by nobody.
    raise Problem(
        "approval_missing",
        422,
        expected="--approved with what a plan showed of every disk, where nobody is asked",
        found=f"--yes and no approval of {', '.join(paths)}",
        remedy="run it without --apply, have what it shows approved, and pass that with --approved;"
        " or leave --yes out and answer",
    )


def _refuse_unnamed(file: Path, paths: list[str]) -> None:
    if paths:
        raise Problem(
            "approval_missing",
            422,
            expected=f"{file} with an approval of every disk, by the path given with --devices",
            found=f"none of {', '.join(paths)}",
            remedy="save what a plan shows with --output json, have it approved, and pass that",
        )


def _approved(file: Path) -> dict[str, Any]:
    found = handwork.read_json(
        file,
        "approval_unreadable",
        "JSON: the plan with `--output json`, or its approvals by by-id path",
        "save what the plan showed, once it is approved",
    )
    return approvals.by_path(found)
