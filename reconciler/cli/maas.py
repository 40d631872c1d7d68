"""`gpuaas maas`: comparison with MAAS, installation of machines, and their return."""

from __future__ import annotations

from typing import Annotated

import typer

from reconciler.cli import output, tasks
from reconciler.cli.netbox import request_reading, show_reading
from reconciler.cli.nodes import Node
from reconciler.cli.options import Reason, Yes, confirm
from reconciler.cli.session import client

app = typer.Typer(no_args_is_help=True, help="MAAS, which installs the site's machines.")
Wait = Annotated[bool, typer.Option(help="Follow the task to its end, 10 to 40 minutes.")]


@app.command()
def diff(reason: Reason = "") -> None:
    """Compare the machines of MAAS with the records, and list the differences."""
    show_reading(request_reading("maas", "diff", reason), "machines")


@app.command()
def sync(reason: Reason = "") -> None:
    """Add new machines as nodes, and upload the scripts that MAAS runs; list what is left."""
    show_reading(request_reading("maas", "sync", reason), "machines")


@app.command()
def show() -> None:
    """Show the last comparison."""
    show_reading(client().get("/admin/maas"), "machines")


@app.command()
def deploy(
    node: Node,
    *,
    series: Annotated[str, typer.Option(help="Operating system, such as noble.")] = "",
    reason: Reason = "",
    yes: Yes = False,
    wait: Wait = False,
) -> None:
    """Install the node's machine anew by MAAS and enrol it. What is on its system disk is lost."""
    _confirm(node, "is installed anew", yes)
    body = {"series": series, "reason": reason}
    tasks.run(f"/admin/nodes/{node}/maas-deploy", body, wait=wait)


@app.command()
def release(node: Node, *, reason: Reason = "", yes: Yes = False, wait: Wait = False) -> None:
    """Return the node's machine to MAAS, where anybody may get it."""
    _confirm(node, "is returned to MAAS", yes)
    tasks.run(f"/admin/nodes/{node}/maas-release", {"reason": reason}, wait=wait)


@app.command()
def unbind(node: Node, reason: Reason = "") -> None:
    """Forget which machine of MAAS the node is; it is found again by name and address."""
    output.record(client().post(f"/admin/nodes/{node}/maas-unbind", {"reason": reason}))


def _confirm(node: str, what: str, yes: bool) -> None:
    machine = client().get(f"/admin/nodes/{node}")["maas_system_id"] or "none in MAAS"
    output.line(f"machine {machine} of node {node} {what}")
    if not yes:
        confirm("Its installation is lost. Go on?")
