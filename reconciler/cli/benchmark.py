"""`gpuaas host benchmark`: measure machines, compare captures, judge a tuning profile."""

from __future__ import annotations

import dataclasses
import re
import string
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from reconciler.benchmark import document, guest
from reconciler.benchmark import gate as judge
from reconciler.benchmark.capture import capture as measure
from reconciler.benchmark.compare import compare as differences
from reconciler.benchmark.harness.request import Request
from reconciler.benchmark.target import Target, jump
from reconciler.benchmark.text import cell, percent
from reconciler.cli import session, show
from reconciler.model.errors import Problem
from reconciler.runs.ssh import SshAccess

app = typer.Typer(
    no_args_is_help=True, help="Measure bare metal and VMs alike; compare; judge a tuning profile."
)

Files = Annotated[list[Path], typer.Argument(help="Captures; the first is the baseline.")]

# For trying it out: seconds instead of minutes, and comparable only with its own kind.
_FULL = Request(label="", kind="auto")
_QUICK = dataclasses.replace(
    _FULL, repetitions=3, cpu_steps=500_000, memory_bytes=16 << 20, seconds=2
)

_TUNING = re.compile(r"[a-z0-9][a-z0-9_.+-]{0,63}")


@app.command()
def capture(
    context: typer.Context,
    *,
    label: Annotated[str, typer.Option(help="What people call this capture.")],
    output: Annotated[Path, typer.Option(help="The JSON file to write.")],
    kind: Annotated[
        Literal["auto", "host", "vm"],
        typer.Option(help="Bare metal or VM; auto asks the machine's CPU."),
    ] = "auto",
    tuning: Annotated[str, typer.Option(help="off, or the profiles that are on: a+b.")] = "off",
    vcpus: Annotated[int, typer.Option(min=0, help="Refuse when it has another number.")] = 0,
    host: Annotated[str, typer.Option(help="Its address; this machine unless given.")] = "",
    user: Annotated[str, typer.Option(help="Of SSH.")] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of SSH.")] = 0,
    ssh_key: Annotated[Path | None, typer.Option(help="A private key.")] = None,
    ssh_config: Annotated[Path | None, typer.Option(help="For ssh -F.")] = None,
    known_hosts: Annotated[
        Path | None, typer.Option(help="Trusted keys; yours unless given.")
    ] = None,
    node_id: Annotated[
        str, typer.Option(help="The host's node: certified key, the reconciler's own identity.")
    ] = "",
    via: Annotated[
        str, typer.Option(help="user@host:port to go through; with --node-id it is the node.")
    ] = "",
    allocation: Annotated[
        str, typer.Option(help="A slice VM, through its host, by the key on its console.")
    ] = "",
    sudo: Annotated[bool, typer.Option("--sudo", help="Measure as root.")] = False,
    fio_target: Annotated[str, typer.Option(help="An approved disk or file; only read.")] = "",
    rdma_peer: Annotated[str, typer.Option(help="Runs `ib_write_bw` as the server.")] = "",
    rdma_device: Annotated[str, typer.Option(help="For example mlx5_0.")] = "",
    vllm_model: Annotated[str, typer.Option(help="Already there.")] = Request.vllm_model,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, to try it out.")] = False,
) -> None:
    """Measure one machine. Nothing is installed, written or left there."""
    if not 1 <= len(label) <= 100 or not label.isprintable():
        raise _refused("label_invalid", "1 to 100 printable characters", repr(label), "--label")
    if not _TUNING.fullmatch(tuning):
        raise _refused("tuning_invalid", "off, or profile names joined by +", tuning, "--tuning")
    if allocation and (host or via or node_id):
        raise _refused(
            "way_ambiguous", "--allocation alone", "another way beside it", "--allocation"
        )
    if (node_id or via) and not host:
        raise _refused("host_missing", "the machine's address", "none", "--host")
    size = _QUICK if quick else _FULL
    asked = dataclasses.replace(
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
    own = Target(
        host=host,
        user=user,
        port=port,
        key=ssh_key,
        config=ssh_config,
        known_hosts=known_hosts,
        sudo=sudo,
    )
    with tempfile.TemporaryDirectory(prefix="gpuaas-benchmark-") as folder:
        if allocation:
            target = _guest(session.of(context), allocation, own, Path(folder))
        else:
            target = _routed(own, via, node_id)
        found = measure(target, asked, show.line)
    document.save(found, output)
    for probe in found["probes"]:
        reason = probe["reason"] or {}
        told = f"{reason.get('code', '')} {reason.get('found', '')}".strip()
        show.line(f"{probe['probe']:<8}{probe['status']:<12}{told[:200]}".rstrip())
    show.line(f"written: {output}")


@app.command()
def compare(
    context: typer.Context,
    files: Files,
    *,
    svg: Annotated[Path | None, typer.Option(help="Also as a picture.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also as a page.")] = None,
) -> None:
    """What differs from the first capture, in percent."""
    here = session.of(context)
    if len(files) < 2:
        raise _refused("captures_few", "two captures or more", str(len(files)), "the files")
    found = differences([document.load(file) for file in files])
    if svg or html:
        from reconciler.benchmark import chart, page  # the charting library takes a while to load

        if svg:
            document.write(svg, chart.svg(found))
        if html:
            document.write(html, page.html(found))
    if here.output == "json":
        show.document(found)
        return
    names = _names(len(files))
    legend = [{"": name} | each for name, each in zip(names, found["captures"], strict=True)]
    show.rows(here, legend, "", "label", "kind", "tuning", "vcpus", "hostname")
    show.rows(here, [_line(names, row) for row in found["rows"]], *_columns(names, found))
    for note in found["notes"]:
        show.line(f"note: {note}")


@app.command()
def gate(
    context: typer.Context,
    files: Files,
    *,
    without: Annotated[
        list[str] | None, typer.Option(help="A probe that need not have figures; repeatable.")
    ] = None,
    vcpus: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Captures with so many CPUs must be there; repeatable."),
    ] = None,
) -> None:
    """May a tuning profile become the default? Exit 0 only when one passes and none fails."""
    here, waived = session.of(context), without or []
    if unknown := sorted(set(waived) - set(judge.PROBES)):
        raise _refused("probe_unknown", ", ".join(judge.PROBES), ", ".join(unknown), "--without")
    found = judge.gate([document.load(file) for file in files], waived, vcpus or [])
    if here.output == "json":
        show.document(found)
    else:
        rows = [
            cell | {"tuning": each["tuning"]} | {way: ", ".join(cell[way]) for way in _WAYS}
            for each in found
            for cell in each["cells"]
        ]
        show.rows(here, rows, "tuning", "kind", "vcpus", "verdict", *_WAYS)
    for each in found:
        show.line(f"{each['tuning']}: {'passes' if each['passes'] else 'does not pass'}")
    if not found or not all(each["passes"] for each in found):
        raise typer.Exit(1)


_WAYS = ("better", "worse", "open")


def _names(count: int) -> list[str]:
    """A, B, C…: labels may be long, alike or foreign."""
    letters = string.ascii_uppercase
    return [letters[index] if index < len(letters) else f"Z{index}" for index in range(count)]


def _columns(names: list[str], found: dict[str, Any]) -> list[str]:
    referenced = any(row["reference_percent"] is not None for row in found["rows"])
    return ["metric", "unit", *names, *(["prototype"] if referenced else [])]


def _line(names: list[str], row: dict[str, Any]) -> dict[str, str]:
    reference = row["reference_percent"]
    cells = {name: cell(each) for name, each in zip(names, row["cells"], strict=True)}
    told = "" if reference is None else percent(reference)
    # A column's name is read as a path, a metric's name is a value.
    return {"metric": row["metric"], "unit": row["unit"], **cells, "prototype": told}


def _routed(own: Target, via: str, node_id: str) -> Target:
    """The target, with the node's certified key for the machine that --node-id is said of."""
    if via:
        hop = dataclasses.replace(jump(via), config=own.config, known_hosts=own.known_hosts)
        return dataclasses.replace(own, via=_certified(hop, node_id))
    return _certified(own, node_id)


def _certified(target: Target, node_id: str) -> Target:
    if not node_id:
        return target
    return dataclasses.replace(target, user=target.user or "root", access=_access(), alias=node_id)


def _guest(here: session.Session, allocation_id: str, own: Target, folder: Path) -> Target:
    """A tenant's machine, with what the reconciler knows of it and of its host."""
    allocation = here.client.get(f"/admin/allocations/{allocation_id}")
    node_id, _address = guest.place(allocation)
    node = here.client.get(f"/admin/nodes/{node_id}")
    return guest.target(allocation, node, own, access=_access(), folder=folder)


def _access() -> SshAccess:
    """The reconciler's identity on this machine, as its runs use it."""
    from reconciler.settings import Settings
    from reconciler.trust import ca

    trust = ca.open_trust(Settings().state_dir)
    own = ca.operator_identity(trust, valid_s=3 * 3600)
    return SshAccess(key=own.key, certificate=own.certificate, known_hosts=own.known_hosts)


def _refused(code: str, expected: str, found: str, word: str) -> Problem:
    return Problem(code, 400, expected=expected, found=found, remedy=f"correct {word}")
