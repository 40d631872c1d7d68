"""`gpuaas host benchmark`: measure machines, compare captures, judge a tuning profile."""

from __future__ import annotations

import re
import string
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from reconciler.benchmark import compare as comparisons
from reconciler.benchmark import document
from reconciler.benchmark.capture import capture as measure
from reconciler.benchmark.compare import cell_text, percent
from reconciler.benchmark.harness.main import PROBES
from reconciler.benchmark.harness.probe import Request
from reconciler.benchmark.target import Target, guest_place, guest_target, jump
from reconciler.cli import output
from reconciler.cli.options import with_options
from reconciler.cli.session import client
from reconciler.model.errors import Problem
from reconciler.runs.ssh import SshAccess

app = typer.Typer(
    no_args_is_help=True,
    help="Measure bare metal and VMs, compare captures, judge a tuning profile.",
)

Files = Annotated[list[Path], typer.Argument(help="Captures; the first is the reference.")]

# Takes seconds instead of minutes; comparable only with other quick captures.
_FULL = Request(label="", kind="auto")
_QUICK = replace(_FULL, repetitions=3, cpu_steps=500_000, memory_bytes=16 << 20, seconds=2)

_TUNING = re.compile(r"[a-z0-9][a-z0-9_.+-]{0,63}")


@dataclass(frozen=True)
class ConnectionOptions:
    """Options for the connection to the machine; the fields are those of `Target`."""

    host: Annotated[str, typer.Option(help="The machine's address; default: this machine.")] = ""
    user: Annotated[str, typer.Option(help="SSH user.")] = ""
    port: Annotated[int, typer.Option(min=0, max=65535, help="SSH port.")] = 0
    key: Annotated[
        Path | None, typer.Option("--ssh-key", help="File with a private key for SSH.")
    ] = None
    config: Annotated[Path | None, typer.Option("--ssh-config", help="File for ssh -F.")] = None
    known_hosts: Annotated[
        Path | None, typer.Option(help="File of trusted host keys; default: your own.")
    ] = None
    sudo: Annotated[bool, typer.Option("--sudo", help="Measure as root.")] = False


@app.command()
@with_options(ConnectionOptions)
def capture(
    *,
    label: Annotated[str, typer.Option(help="Name of this capture.")],
    file: Annotated[Path, typer.Option("--output", help="The JSON file to write.")],
    kind: Annotated[
        Literal["auto", "host", "vm"],
        typer.Option(help="Bare metal or VM; auto reads it from the machine's CPU."),
    ] = "auto",
    tuning: Annotated[str, typer.Option(help="off, or the active profiles: a+b.")] = "off",
    vcpus: Annotated[
        int, typer.Option(min=0, help="Refuse a machine with another number of CPUs.")
    ] = 0,
    node_id: Annotated[
        str,
        typer.Option(
            help="The host's node, to use its certified key and the reconciler's identity."
        ),
    ] = "",
    via: Annotated[
        str, typer.Option(help="Jump host, user@host:port; with --node-id it is the node.")
    ] = "",
    allocation: Annotated[
        str, typer.Option(help="A slice VM, through its host, with the host key from its console.")
    ] = "",
    fio_target: Annotated[
        str, typer.Option(help="An approved disk or file; it is only read.")
    ] = "",
    rdma_peer: Annotated[
        str, typer.Option(help="Machine that runs `ib_write_bw` as the server.")
    ] = "",
    rdma_device: Annotated[str, typer.Option(help="For example mlx5_0.")] = "",
    vllm_model: Annotated[
        str, typer.Option(help="A model that is already on the machine.")
    ] = Request.vllm_model,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, for a trial.")] = False,
    **connection: Any,
) -> None:
    """Measure a machine. Nothing is installed, written or left there."""
    if not 1 <= len(label) <= 100 or not label.isprintable():
        raise _refused("label_invalid", "1 to 100 printable characters", repr(label), "--label")
    if not _TUNING.fullmatch(tuning):
        raise _refused("tuning_invalid", "off, or profile names joined by +", tuning, "--tuning")
    base = Target(**connection)
    if allocation and (base.host or via or node_id):
        raise _refused(
            "way_ambiguous", "--allocation alone", "another address beside it", "--allocation"
        )
    if (node_id or via) and not base.host:
        raise _refused("host_missing", "the machine's address", "none", "--host")
    size = _QUICK if quick else _FULL
    request = replace(
        size,
        label=label,
        kind=kind,
        tuning=tuning,
        vcpus=vcpus,
        fio_target=fio_target,
        rdma_peer=rdma_peer,
        rdma_device=rdma_device,
        vllm_model=vllm_model,
    )
    with tempfile.TemporaryDirectory(prefix="gpuaas-benchmark-") as folder:
        if allocation:
            target = _guest(allocation, base, Path(folder))
        else:
            target = _routed(base, via, node_id)
        result = measure(target, request, output.line)
    document.save(result, file)
    for probe in result["probes"]:
        reason = probe["reason"] or {}
        text = f"{reason.get('code', '')} {reason.get('found', '')}".strip()
        output.line(f"{probe['probe']:<8}{probe['status']:<12}{text[:200]}".rstrip())
    output.line(f"written: {file}")


@app.command()
def compare(
    files: Files,
    *,
    svg: Annotated[Path | None, typer.Option(help="Also write a chart.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write an HTML page.")] = None,
) -> None:
    """Compare captures with the first one, in percent."""
    if len(files) < 2:
        raise _refused("captures_few", "two captures or more", str(len(files)), "the files")
    comparison = comparisons.compare([document.load(file) for file in files])
    if svg or html:
        from reconciler.benchmark import chart  # the charting library takes a while to load

        if svg:
            document.write(svg, chart.svg(comparison))
        if html:
            document.write(html, chart.html(comparison))
    if output.in_json(comparison):
        return
    names = _names(len(files))
    legend = [{"": name} | row for name, row in zip(names, comparison["captures"], strict=True)]
    output.rows(legend, "", "label", "kind", "tuning", "vcpus", "hostname")
    figures = [_line(names, row) for row in comparison["rows"]]
    prototype = ["prototype"] if any(line["prototype"] for line in figures) else []
    output.rows(figures, "metric", "unit", *names, *prototype)
    for note in comparison["notes"]:
        output.line(f"note: {note}")


@app.command()
def gate(
    files: Files,
    *,
    without: Annotated[
        list[str] | None, typer.Option(help="A probe that may lack figures; may be repeated.")
    ] = None,
    vcpus: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Require captures with this number of CPUs; may be repeated."),
    ] = None,
) -> None:
    """Judge whether a tuning profile may become the default; exit 0 only if all of them pass."""
    waived = without or []
    if unknown := sorted(set(waived) - set(PROBES)):
        raise _refused("probe_unknown", ", ".join(PROBES), ", ".join(unknown), "--without")
    verdicts = comparisons.gate([document.load(file) for file in files], waived, vcpus or [])
    if not output.in_json(verdicts):
        rows = [
            cell | {"tuning": verdict["tuning"]} | {way: ", ".join(cell[way]) for way in _WAYS}
            for verdict in verdicts
            for cell in verdict["cells"]
        ]
        output.rows(rows, "tuning", "kind", "vcpus", "verdict", *_WAYS)
    for verdict in verdicts:
        output.line(f"{verdict['tuning']}: {'passes' if verdict['passes'] else 'does not pass'}")
    if not verdicts or not all(verdict["passes"] for verdict in verdicts):
        raise typer.Exit(1)


_WAYS = ("better", "worse", "open")


def _names(count: int) -> list[str]:
    """Column names A, B, C…, because labels may be long or equal."""
    letters = string.ascii_uppercase
    return [letters[index] if index < len(letters) else f"Z{index}" for index in range(count)]


def _line(names: list[str], row: dict[str, Any]) -> dict[str, str]:
    reference = row["reference_percent"]
    cells = {name: cell_text(value) for name, value in zip(names, row["cells"], strict=True)}
    prototype = "" if reference is None else percent(reference)
    # A dot in a column name means a path, so metric names are values.
    return {"metric": row["metric"], "unit": row["unit"], **cells, "prototype": prototype}


def _routed(base: Target, via: str, node_id: str) -> Target:
    """The target, with the node's certified key for the machine that --node-id names."""
    if via:
        hop = replace(jump(via), config=base.config, known_hosts=base.known_hosts)
        return replace(base, via=_certified(hop, node_id))
    return _certified(base, node_id)


def _certified(target: Target, node_id: str) -> Target:
    if not node_id:
        return target
    return replace(target, user=target.user or "root", access=_access(), alias=node_id)


def _guest(allocation_id: str, base: Target, folder: Path) -> Target:
    """A tenant's machine, from the reconciler's records of it and of its host."""
    allocation = client().get(f"/admin/allocations/{allocation_id}")
    node_id, _address = guest_place(allocation)
    node = client().get(f"/admin/nodes/{node_id}")
    return guest_target(allocation, node, base, access=_access(), folder=folder)


def _access() -> SshAccess:
    """The reconciler's SSH identity on this machine, as used by its runs."""
    from reconciler.settings import Settings
    from reconciler.trust import ca

    trust = ca.open_trust(Settings().state_dir)
    identity = ca.operator_identity(trust, valid_s=3 * 3600)
    return SshAccess(
        key=identity.key, certificate=identity.certificate, known_hosts=identity.known_hosts
    )


def _refused(code: str, expected: str, found: str, option: str) -> Problem:
    return Problem(code, 400, expected=expected, found=found, remedy=f"correct {option}")
