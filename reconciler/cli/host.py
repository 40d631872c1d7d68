"""`gpuaas host`: work on one host by hand, over SSH or on the host itself, without the service."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from reconciler.cli import benchmark, nodes, output, session
from reconciler.cli.options import read_json, with_options
from reconciler.model import hardware
from reconciler.model.bundle import BUNDLE_FIELDS
from reconciler.model.errors import Problem
from reconciler.runs.ssh import Reach

Record = dict[str, Any]

app = typer.Typer(
    no_args_is_help=True,
    help="Work on one host by hand, without the service: over SSH, or here without --host.",
)
app.add_typer(benchmark.app, name="benchmark")

# The hardware class of this product; --profile or the node's record names another.
DEFAULT_PROFILE = "xe9680l-h200"

Profile = Annotated[
    str,
    typer.Option(
        "--profile",
        envvar="GPUAAS_SLICE_PROFILE",
        help=f"Hardware profile; default: from the API, or {DEFAULT_PROFILE}.",
    ),
]
FabricInterface = Annotated[
    str, typer.Option(help="The host's interface on the InfiniBand fabric.")
]
FabricAddress = Annotated[str, typer.Option(help="Its address there, with prefix length.")]
Reboot = Annotated[bool, typer.Option("--allow-reboot", help="Allow a reboot of the host.")]

_PRINTABLE = re.compile(r"[ -~]*")
_CODE = re.compile(r"[a-z][a-z0-9_]{0,63}")


@dataclass(frozen=True)
class SshOptions:
    """Options for the connection to the host; the fields are those of `Reach`."""

    host: Annotated[str, typer.Option(help="The host's address; default: this machine.")] = ""
    user: Annotated[str, typer.Option(help="SSH user: root, or a user with sudo.")] = "root"
    port: Annotated[int, typer.Option(help="SSH port.")] = 22
    key: Annotated[
        Path | None, typer.Option("--ssh-key", help="File with a private key for SSH.")
    ] = None
    config: Annotated[Path | None, typer.Option("--ssh-config", help="File for ssh -F.")] = None


@dataclass(frozen=True)
class Evidence:
    """The reconciler's records of the host. topology {}: the reconciler was not queried.

    fabric: the host's fields on the fabric, from its node's record. maas_tags: from the record.
    """

    profile: str = ""
    slots: list[Record] = field(default_factory=list)
    topology: Record = field(default_factory=dict)
    fabric: Record = field(default_factory=dict)
    maas_tags: list[str] | None = None


@app.command()
@with_options(SshOptions)
def parity(
    *,
    profile: Profile = "",
    api_base: Annotated[str, typer.Option(help="The reconciler that has evidence.")] = "",
    api_token_file: Annotated[Path | None, typer.Option(help="An admin's token.")] = None,
    node_id: Annotated[str, typer.Option(help="The host's node in the reconciler.")] = "",
    slots: Annotated[Path | None, typer.Option(help="Approved bundles, without the API.")] = None,
    intent: Annotated[
        Literal["slice", "baremetal"], typer.Option(help="The host's purpose.")
    ] = "slice",
    maas_tag: Annotated[list[str] | None, typer.Option(help=nodes.MAAS_TAG_HELP)] = None,
    fabric_interface: FabricInterface = "",
    fabric_address: FabricAddress = "",
    remediate: Annotated[
        bool, typer.Option("--remediate", help="Repair failures, then check again.")
    ] = False,
    allow_reboot: Reboot = False,
    **ssh: Any,
) -> None:
    """Check the host: one line per check; exit 0 only when no check has failed."""
    evidence = Evidence()
    if api_token_file is not None and node_id:
        api = session.Session(api_base or session.current().api).url
        evidence = _evidence(api, api_token_file, node_id)
    tags = nodes.maas_tags(maas_tag)
    result = _play(
        ssh | {"node_id": node_id},
        "parity",
        "node.parity",
        profile or evidence.profile,
        evidence.fabric | _fabric(fabric_interface, fabric_address),
        slice_slots=_read_slots(slots) or evidence.slots,
        slice_intent=intent,
        slice_api_topology=evidence.topology,
        **hardware.maas_tags(evidence.maas_tags if tags is None else tags),
        slice_remediate=remediate,
        slice_allow_reboot=allow_reboot,
    )
    report = result["parity"]
    lines = parity_lines(report)
    if not output.in_json(report):
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    for role in result.get("repaired") or []:
        output.line(f"repaired: {role}")
    for failed in result.get("unrepaired") or []:
        output.line(f"not repaired: {failed['role']} ({failed['code']})")
    if parity_failures(report):
        raise typer.Exit(1)


@app.command()
@with_options(SshOptions)
def discover(profile: Profile = "", **ssh: Any) -> None:
    """Discover the host's devices and show the candidates for slots."""
    result = _play(ssh, "discover", "slice.topology_discover", profile)
    nodes.show_candidates(result["discovery"])


@app.command()
@with_options(SshOptions)
def transition(
    *,
    devices: Annotated[
        list[str], typer.Option(help="Paths, separated by commas; may be repeated.")
    ],
    profile: Profile = "",
    apply: Annotated[bool, typer.Option("--apply", help="Erase the disks.")] = False,
    approved: Annotated[
        Path | None, typer.Option(help="JSON file: the approved output of a plan.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask; needs --approved for every disk.")
    ] = False,
    **ssh: Any,
) -> None:
    """Erase disks for slices. Without --apply: a plan with the identities of the disks."""
    paths = [path for word in devices for path in word.split(",") if path]
    approvals = _read_approvals(approved) if approved else {}
    if apply:
        _refuse_kernel_names(paths)
        _refuse_unapproved(paths, approved, approvals, yes=yes)

    def play(expected: Record, *, erase: bool) -> Record:
        variables = {"slice_devices": paths, "slice_apply": erase, "slice_expected": expected}
        return _play(ssh, "transition_storage", "node.storage_transition", profile, **variables)

    disks = play(approvals, erase=False)["devices"]
    if not apply:
        if output.in_json(disks):
            return
        columns = ("nvme_device", "kernel_name", "serial", "size_bytes", "mounts", "filesystems")
        output.rows(disks, *columns)
        output.line("a plan; nothing was changed. To act: --apply with the paths of nvme_device")
        return
    # Without --approved, the plan becomes the approval when a person reads it and agrees.
    expected = approvals if approved else {disk["nvme_device"]: disk["approval"] for disk in disks}
    if not yes:
        nodes.show_approvals(expected, ask=True, instead="--approved FILE --yes")
    result = play(expected, erase=True)
    if output.in_json(result):
        return
    output.rows(result["devices"], "nvme_device", "serial", "proof.method", "proof.verified")
    output.line(f"manifest: {result['manifest']}")


@app.command()
@with_options(SshOptions)
def bootstrap(
    *,
    profile: Profile = "",
    fabric_interface: FabricInterface = "",
    fabric_address: FabricAddress = "",
    allow_reboot: Reboot = False,
    **ssh: Any,
) -> None:
    """Make the machine a slice host."""
    fabric = _fabric(fabric_interface, fabric_address)
    variables = {"slice_allow_reboot": allow_reboot}
    output.record(_play(ssh, "bootstrap", "node.bootstrap", profile, fabric, **variables))


@app.command()
@with_options(SshOptions)
def prepare(profile: Profile = "", **ssh: Any) -> None:
    """Prepare a slice host for VMs: stop GPU services, check libvirt, repair the network."""
    output.record(_play(ssh, "prepare_runtime", "node.bootstrap", profile))


def parity_lines(report: Mapping[str, Any]) -> list[str]:
    """A line per check and the summary, as the host printed them.

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


def _refuse_unapproved(
    paths: list[str], file: Path | None, approvals: Record, *, yes: bool
) -> None:
    missing = [path for path in paths if not approvals.get(path)]
    if file and missing:
        raise Problem(
            "approval_missing",
            422,
            expected=f"{file} with an approval of every disk, by the path given with --devices",
            found=f"none of {', '.join(missing)}",
            remedy="save a plan with --output json, have it approved, and pass that file",
        )
    if yes and not file:
        # A plan made just before the wipe needs a person who reads it; --yes skips that person.
        raise Problem(
            "approval_missing",
            422,
            expected="--approved with the plan of every disk, because --yes asks no person",
            found=f"--yes and no approval of {', '.join(paths)}",
            remedy="run it without --apply, have the plan approved, and pass it with --approved;"
            " or leave --yes out and answer",
        )


def _read_approvals(file: Path) -> Record:
    document = read_json(
        file,
        "approval_unreadable",
        "JSON: the plan with `--output json`, or its approvals by by-id path",
        "save the output of the plan once it is approved",
    )
    return approvals_by_path(document)


def _evidence(api: str, token_file: Path, node_id: str) -> Evidence:
    """The node's profile, approved slots and latest discovery.

    If the evidence cannot be read, parity reports a failed check with the reason, not a warning.
    Otherwise a wrong token would look like no token.
    """
    # The HTTP library takes longer to import than most commands to run.
    from reconciler.client import Client

    node = f"/admin/nodes/{node_id}"
    try:
        token = session.secret(token_file, "name the file with --api-token-file")
        client = Client(api, token)
        slots = list(client.items(f"{node}/resource-slots"))
        document = client.get(f"{node}/slice-topology/discovery")["document"]
        record = client.get(node)
        return Evidence(
            str(record["profile"]),
            [_bundle(slot) for slot in slots],
            _topology(document),
            {name: record[name] for name in hardware.NODE_FIELDS},
            record["maas_tags"],
        )
    except (Problem, ValueError, LookupError, TypeError) as failure:
        code = failure.code if isinstance(failure, Problem) else "api_answer_unreadable"
        output.line(f"no evidence from the API: {failure}")
        reasons = [code] if _CODE.fullmatch(code) else ["api_refused"]
        return Evidence(topology={"source": "api", "completed": False, "blockers": reasons})


def _topology(discovery: Mapping[str, Any] | None) -> Record:
    if discovery is None:
        return {"source": "api", "completed": False, "blockers": []}
    return {
        "source": "api",
        "completed": True,
        "boot_id": str(discovery["identity"]["boot_id"]),
        "blockers": list(discovery["candidate_summary"]["blockers"]),
    }


def _read_slots(file: Path | None) -> list[Record]:
    """Approved bundles from a file, for a host whose reconciler cannot be reached."""
    if file is None:
        return []
    remedy = "save `gpuaas slots list NODE --output json`"
    document = read_json(file, "slots_unreadable", "a JSON list of slot bundles", remedy)
    rows = document if isinstance(document, list) else []
    return [_bundle(row) for row in rows if isinstance(row, Mapping)]


def _bundle(slot: Mapping[str, Any]) -> Record:
    bundle = {name: slot[name] for name in BUNDLE_FIELDS if name in slot}
    return {"slot_id": slot.get("slot_id") or slot.get("id"), **bundle}


def _play(
    ssh: Mapping[str, Any],
    playbook: str,
    kind: str,
    profile: str,
    fabric: Record | None = None,
    /,
    **variables: Any,
) -> Record:
    """Play the playbook and return its evidence; progress goes to standard error.

    The run gets the complete hardware profile, overridden by the host's own fabric fields.
    """
    # The run contract takes long to load, which --help should not.
    from reconciler.profiles import hardware_profile
    from reconciler.runs import byhand
    from reconciler.settings import Settings

    settings = Settings()
    shared = hardware_profile(settings.profiles_dir, profile or DEFAULT_PROFILE)
    resolved = hardware.node_profile(shared, fabric or {})
    work = byhand.Work(playbook, kind, {"slice_profile": resolved, **variables})
    path = settings.collections_path
    return byhand.play(work, Reach(**ssh), path, lambda name: output.line(f"  {name}"))
