"""`gpuaas host`: work on one host by hand, over SSH or on the host itself, without the service."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from reconciler.cli import benchmark, byhand, nodes, output, session
from reconciler.model import hardware
from reconciler.model.errors import Problem
from reconciler.runs.ssh import Reach

app = typer.Typer(
    no_args_is_help=True,
    help="Work on one host by hand, without the service: over SSH, or here without --host.",
)
app.add_typer(benchmark.app, name="benchmark")

Host = Annotated[str, typer.Option("--host", help="The host's address; default: this machine.")]
User = Annotated[str, typer.Option("--user", help="User of SSH: root, or a user with sudo.")]
Port = Annotated[int, typer.Option("--port", help="Port of SSH.")]
Key = Annotated[Path | None, typer.Option("--ssh-key", help="File with a private key for SSH.")]
Config = Annotated[Path | None, typer.Option("--ssh-config", help="File for ssh -F.")]
Profile = Annotated[
    str,
    typer.Option(
        "--profile",
        envvar="GPUAAS_SLICE_PROFILE",
        help=f"Hardware profile; default: from the API, or {byhand.DEFAULT_PROFILE}.",
    ),
]
ApiBase = Annotated[str, typer.Option("--api-base", help="The reconciler that has evidence.")]
ApiToken = Annotated[Path | None, typer.Option("--api-token-file", help="An admin's token.")]
NodeId = Annotated[str, typer.Option("--node-id", help="The host's node in the reconciler.")]
Slots = Annotated[Path | None, typer.Option("--slots", help="Approved bundles, without the API.")]
MaasTags = Annotated[list[str] | None, typer.Option("--maas-tag", help=nodes.MAAS_TAG_HELP)]
FabricInterface = Annotated[
    str, typer.Option("--fabric-interface", help="The host's interface on the InfiniBand fabric.")
]
FabricAddress = Annotated[
    str, typer.Option("--fabric-address", help="Its address there, with prefix length.")
]
Reboot = Annotated[bool, typer.Option("--allow-reboot", help="Allow a reboot of the host.")]
SSH_USER, SSH_PORT = "root", 22

_PRINTABLE = re.compile(r"[ -~]*")


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
    intent: Annotated[
        Literal["slice", "baremetal"], typer.Option(help="The host's purpose.")
    ] = "slice",
    maas_tag: MaasTags = None,
    fabric_interface: FabricInterface = "",
    fabric_address: FabricAddress = "",
    remediate: Annotated[
        bool, typer.Option("--remediate", help="Repair failures, then check again.")
    ] = False,
    allow_reboot: Reboot = False,
) -> None:
    """Check the host: one line per check; exit 0 only when no check has failed."""
    here = session.of(context)
    evidence = byhand.evidence(byhand.Api(api_base or here.url, api_token_file, node_id))
    tags = nodes.maas_tags(maas_tag)
    work = byhand.work(
        "parity",
        "node.parity",
        profile or evidence.profile,
        evidence.fabric | _fabric(fabric_interface, fabric_address),
        slice_slots=byhand.read_slots(slots) or evidence.slots,
        slice_intent=intent,
        slice_api_topology=evidence.topology,
        **hardware.maas_tags(evidence.maas_tags if tags is None else tags),
        slice_remediate=remediate,
        slice_allow_reboot=allow_reboot,
    )
    result = byhand.play(work, Reach(host, user, port, ssh_key, ssh_config, node_id))
    report = result["parity"]
    lines = parity_lines(report)
    if here.output == "json":
        output.document(report)
    else:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    _print_repairs(result)
    if parity_failures(report):
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
    """Discover the host's devices and show the candidates for slots."""
    work = byhand.work("discover", "slice.topology_discover", profile)
    result = byhand.play(work, Reach(host, user, port, ssh_key, ssh_config))
    nodes.show_candidates(session.of(context), result["discovery"])


@app.command()
def transition(
    context: typer.Context,
    *,
    devices: Annotated[
        list[str], typer.Option("--devices", help="Paths, separated by commas; may be repeated.")
    ],
    host: Host = "",
    user: User = SSH_USER,
    port: Port = SSH_PORT,
    ssh_key: Key = None,
    ssh_config: Config = None,
    profile: Profile = "",
    apply: Annotated[bool, typer.Option("--apply", help="Erase the disks.")] = False,
    approved: Annotated[
        Path | None, typer.Option(help="JSON file: the approved output of a plan.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask; needs --approved for every disk.")
    ] = False,
) -> None:
    """Erase disks for slices. Without --apply: a plan with the identities of the disks."""
    here = session.of(context)
    paths = [path for word in devices for path in word.split(",") if path]
    if apply:
        _refuse_kernel_names(paths)
    if apply and yes and not approved:
        _refuse_unapproved(paths)
    reach, kind = Reach(host, user, port, ssh_key, ssh_config), "node.storage_transition"
    approvals = _read_approvals(approved) if approved else {}
    if apply and approved:
        _refuse_missing(approved, [path for path in paths if not approvals.get(path)])
    variables = {"slice_devices": paths, "slice_apply": False, "slice_expected": approvals}
    plan = byhand.work("transition_storage", kind, profile, **variables)
    disks = byhand.play(plan, reach)["devices"]
    if not apply:
        if here.output == "json":
            output.document(disks)
            return
        columns = ("nvme_device", "kernel_name", "serial", "size_bytes", "mounts", "filesystems")
        output.rows(here, disks, *columns)
        output.line("a plan; nothing was changed. To act: --apply with the paths of nvme_device")
        return
    # Without --approved, the plan becomes the approval when a person reads it and agrees.
    expected = approvals if approved else {disk["nvme_device"]: disk["approval"] for disk in disks}
    if not yes:
        for path, disk in expected.items():
            output.line(nodes.approval_line(path, disk))
        typer.confirm("Everything on these disks is lost. Go on?", abort=True, err=True)
    variables = {"slice_devices": paths, "slice_apply": True, "slice_expected": expected}
    result = byhand.play(byhand.work("transition_storage", kind, profile, **variables), reach)
    if here.output == "json":
        output.document(result)
        return
    output.rows(here, result["devices"], "nvme_device", "serial", "proof.method", "proof.verified")
    output.line(f"manifest: {result['manifest']}")


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
    fabric = _fabric(fabric_interface, fabric_address)
    work = byhand.work(
        "bootstrap", "node.bootstrap", profile, fabric, slice_allow_reboot=allow_reboot
    )
    result = byhand.play(work, Reach(host, user, port, ssh_key, ssh_config))
    output.record(session.of(context), result)


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
    """Prepare a slice host for VMs: stop GPU services, check libvirt, repair the network."""
    work = byhand.work("prepare_runtime", "node.bootstrap", profile)
    result = byhand.play(work, Reach(host, user, port, ssh_key, ssh_config))
    output.record(session.of(context), result)


def parity_lines(report: Mapping[str, Any]) -> list[str]:
    """One line per check and the summary, as the host printed them.

    Problem `report_inconsistent` when lines and checks disagree. A host can lie about itself; but
    it cannot print control characters, or lines that claim more than its checks.
    """
    checks, lines = report["checks"], report.get("lines")
    patterns = [_check_line(check) for check in checks]
    summary = rf"GPUAAS_SLICE_PARITY_SUMMARY .*\bfailures={parity_failures(report)}\b.*"
    patterns.append(re.compile(summary))
    consistent = (
        isinstance(lines, list)
        and len(lines) == len(patterns)
        and all(
            isinstance(line, str) and _PRINTABLE.fullmatch(line) and pattern.fullmatch(line)
            for pattern, line in zip(patterns, lines, strict=True)
        )
    )
    if not consistent or not isinstance(lines, list):
        raise Problem(
            "report_inconsistent",
            422,
            expected="one printable line for each check, and a summary that counts them",
            found="lines that differ from the checks",
            remedy="do not trust the host's report; examine the host",
        )
    return lines


def parity_failures(report: Mapping[str, Any]) -> int:
    """The number of failed checks, counted from the checks themselves."""
    return sum(check["status"] == "FAIL" for check in report["checks"])


def approvals_by_path(document: Any) -> dict[str, Any]:
    """Approvals by by-id path, from a file of approvals or from a plan."""
    if isinstance(document, list):
        disks = [disk for disk in document if isinstance(disk, dict) and disk.get("approval")]
        return {str(disk["nvme_device"]): disk["approval"] for disk in disks}
    return dict(document) if isinstance(document, dict) else {}


def _check_line(check: Mapping[str, Any]) -> re.Pattern[str]:
    head = f"GPUAAS_SLICE_PARITY status={check['status']} check={check['check']} detail="
    # Values are shell words: a plain blank ends a value, and `=` inside of it is quoted.
    word = r"(?:[^ =\\]|\\.)*"
    return re.compile(rf"{re.escape(head)}{word}(?: remediation={word})?")


def _fabric(interface: str, address: str) -> dict[str, Any]:
    """Fabric fields from the options; omitted fields come from the record or the profile."""
    fields = {"fabric_interface": interface, "fabric_address": address}
    return {name: value for name, value in fields.items() if value}


def _print_repairs(result: dict[str, Any]) -> None:
    for role in result.get("repaired") or []:
        output.line(f"repaired: {role}")
    for failed in result.get("unrepaired") or []:
        output.line(f"not repaired: {failed['role']} ({failed['code']})")


def _refuse_kernel_names(paths: list[str]) -> None:
    unstable = [path for path in paths if not path.startswith("/dev/disk/by-id/nvme-eui.")]
    if unstable:
        raise Problem(
            "kernel_name_not_allowed",
            422,
            expected="paths like /dev/disk/by-id/nvme-eui.*, which name a disk and not a position",
            found=", ".join(unstable),
            remedy="run it without --apply, which shows the identities, and apply with these",
        )


def _refuse_unapproved(paths: list[str]) -> None:
    # A plan made just before the wipe needs a person who reads it; --yes skips that person.
    raise Problem(
        "approval_missing",
        422,
        expected="--approved with the plan of every disk, because --yes asks no person",
        found=f"--yes and no approval of {', '.join(paths)}",
        remedy="run it without --apply, have the plan approved, and pass it with --approved;"
        " or leave --yes out and answer",
    )


def _refuse_missing(file: Path, paths: list[str]) -> None:
    if paths:
        raise Problem(
            "approval_missing",
            422,
            expected=f"{file} with an approval of every disk, by the path given with --devices",
            found=f"none of {', '.join(paths)}",
            remedy="save a plan with --output json, have it approved, and pass that file",
        )


def _read_approvals(file: Path) -> dict[str, Any]:
    document = byhand.read_json(
        file,
        "approval_unreadable",
        "JSON: the plan with `--output json`, or its approvals by by-id path",
        "save the output of the plan once it is approved",
    )
    return approvals_by_path(document)
