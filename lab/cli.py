"""Commands of `gpuaas lab`: build, start, enter and stop a virtual slice host."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from lab import (
    guest_image,
    host_image,
    machine,
    packages,
    qemu,
    saved,
    slice_image,
    state,
    userdata,
)
from lab.command import LabError
from lab.distro import host_distro, this_distro
from lab.paths import REPOSITORY, lab_folder

app = typer.Typer(no_args_is_help=True, help="A virtual slice host on this machine.")
say = Console(stderr=True, highlight=False)

IMAGES = REPOSITORY / "build" / "images"
# That of the shipped H200 profile; in Ubuntu's component restricted.
DRIVER = "580-server-open"


@contextmanager
def _print_errors() -> Iterator[None]:
    try:
        yield
    except LabError as error:
        say.print(f"[red]error[/red] {error}", soft_wrap=True)
        raise typer.Exit(1) from error


@app.command()
def build() -> None:
    """Build QEMU and the images, or take them from the cache."""
    with _print_errors(), ThreadPoolExecutor(1) as beside:
        packages.ensure()
        distro = this_distro()
        image = beside.submit(guest_image.ensure, distro)
        facts: dict[str, object] = {
            "qemu": qemu.ensure(distro).version,
            "host_image": str(host_image.ensure(host_distro())),
            "guest_image": asdict(image.result()),
        }
        print(json.dumps(facts, indent=1))


@app.command("image")
def build_image(
    recipe: Literal["base", "gpu"],
    *,
    folder: Annotated[Path, typer.Option(help="Where the image is left.")] = IMAGES,
    driver: Annotated[str, typer.Option(help="NVIDIA's driver of a gpu image.")] = DRIVER,
    cuda: Annotated[str, typer.Option(help="CUDA toolkit of a gpu image, such as 12-8.")] = "",
    nvlink: Annotated[
        bool, typer.Option(help="For GPUs that no NVSwitch connects; else NVLink is disabled.")
    ] = False,
    worker: Annotated[
        bool, typer.Option("--worker", help="With the program that runs inference jobs.")
    ] = False,
    apt_source: Annotated[
        list[str] | None,
        typer.Option(help="A further source: deb [signed-by=FILE] URL SUITE COMPONENT."),
    ] = None,
) -> None:
    """Build an image for slices of a site, and print how to register it."""
    with _print_errors():
        packages.ensure()
        runtime = slice_image.Runtime(driver, cuda, rdma=True, nvlink=nvlink)
        runtime = runtime if recipe == "gpu" else slice_image.Runtime()
        sources = apt_source or []
        made = slice_image.build(
            *(recipe, this_distro(), runtime, folder.absolute(), sources), worker=worker
        )
        print(json.dumps(asdict(made), indent=1))


@app.command()
def up(
    fresh: Annotated[bool, typer.Option(help="Forget all disks of this lab first.")] = False,
) -> None:
    """Start the lab host and wait until it answers."""
    with _print_errors():
        lab = machine.up(fresh=fresh)
        say.print(f"lab host up: [bold]gpuaas lab ssh[/bold] (port {lab.ssh_port}, {lab.accel})")


@app.command()
def down() -> None:
    """Shut the lab host down; its disks stay."""
    with _print_errors():
        say.print("lab host down" if machine.down() else "no lab host was up")


@app.command()
def status() -> None:
    """Print lab.json and whether the host is up."""
    with _print_errors():
        lab = state.load()
        if lab is None:
            print(json.dumps({"folder": str(lab_folder()), "up": False}))
        else:
            print(json.dumps({**asdict(lab), "up": lab.alive()}, indent=1))


@app.command(context_settings={"ignore_unknown_options": True})
def ssh(command: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Open a shell on the lab host as root, or run a command (after --)."""
    with _print_errors():
        lab = state.running()
        tty = command is None and sys.stdin.isatty()
        argv = state.ssh_command(lab, command, tty=tty)
        sys.exit(subprocess.run(argv, check=False).returncode)


@app.command("userdata")
def deliver(script: Path, timeout: float = 600) -> None:
    """Run a script on the host over the trusted channel and exit with its exit code."""
    with _print_errors():
        answer = userdata.deliver(
            Path(state.running().userdata), script.read_text(), timeout=timeout
        )
        sys.stdout.write(answer.output)
        sys.exit(answer.exit_code)


@app.command("power-cut")
def power_cut(
    restart: Annotated[bool, typer.Option(help="Power comes back at once.")] = False,
) -> None:
    """Cut the power: nothing is shut down or flushed."""
    with _print_errors():
        machine.power_cut(restart=restart)


@app.command("reset-disks")
def reset_disks() -> None:
    """Recreate the data disks as new (the lab must be down)."""
    with _print_errors():
        machine.reset_disks()


@app.command()
def save(
    name: str,
    replace: Annotated[bool, typer.Option(help="Replace a saved host of this name.")] = False,
) -> None:
    """Save a copy of the lab host's disks. A running host is paused for some seconds."""
    with _print_errors():
        kept = saved.save(name, replace=replace)
        say.print(f"saved {name}: {saved.size_bytes(kept) / 2**20:.0f} MiB in {kept.folder}")


@app.command()
def load(name: str) -> None:
    """Replace the lab host's disks by a saved copy (the lab must be down); `up` boots it."""
    with _print_errors():
        kept = saved.load(name)
        say.print(f"loaded {name} of {kept.saved_at}: boot it with [bold]gpuaas lab up[/bold]")


@app.command("saved")
def list_saved() -> None:
    """Print the saved lab hosts as JSON."""
    with _print_errors():
        facts = [
            {
                "name": kept.name,
                "saved_at": kept.saved_at,
                "image": kept.image.name,
                "mib": saved.size_bytes(kept) >> 20,
            }
            for kept in saved.entries()
        ]
        print(json.dumps(facts, indent=1))


@app.command()
def delete(name: str) -> None:
    """Delete a saved lab host; the lab itself stays as it is."""
    with _print_errors():
        saved.delete(name)
        say.print(f"deleted {name}")
