"""`gpuaas netbox`: differences between NetBox and the records, and their synchronisation."""

from __future__ import annotations

import time

import typer

from reconciler.cli import output
from reconciler.cli.options import Reason
from reconciler.cli.session import client
from reconciler.model.errors import Problem

app = typer.Typer(
    no_args_is_help=True, help="NetBox, whose tagged devices are the site's machines."
)
# A pass ends within four minutes. A pass that has begun already may come before it.
_WAIT_S = 600.0


@app.command()
def diff(reason: Reason = "") -> None:
    """Compare NetBox with the records, and list the differences with their reasons."""
    show_reading(request_reading("netbox", "diff", reason), "devices")


@app.command()
def sync(reason: Reason = "") -> None:
    """Add new devices as nodes and write slots and state into NetBox; list what is left."""
    show_reading(request_reading("netbox", "sync", reason), "devices")


@app.command()
def show() -> None:
    """Show the last comparison."""
    show_reading(client().get("/admin/netbox"), "devices")


def request_reading(service: str, verb: str, reason: str) -> output.Record:
    """Ask for a comparison with a service, and wait for its reading."""
    number = client().post(f"/admin/{service}/{verb}", {"reason": reason})["request_number"]
    ends = time.monotonic() + _WAIT_S
    while True:
        try:
            reading: output.Record = client().get(f"/admin/{service}")
            if reading["request_number"] >= number:
                return reading
        except Problem as problem:
            if problem.code != f"{service}_reading_not_found":
                raise
        if time.monotonic() > ends:
            raise Problem(
                f"{service}_timeout",
                504,
                expected=f"a comparison within {_WAIT_S:.0f} s",
                found="none yet",
                remedy="check that a process leads (`gpuaas doctor`), then"
                f" `gpuaas {service} show`",
            )
        time.sleep(0.5)


def show_reading(reading: output.Record, objects: str) -> None:
    """Print a reading. objects: the key of its number of foreign objects."""
    if not output.in_json(reading):
        output.rows(reading["findings"], "code", "subject", "expected", "found", "remedy")
        done = ", ".join(f"{count} {what}" for what, count in reading["done"].items())
        counts = f"{reading['nodes']} nodes, {reading[objects]} {objects}"
        total = sum(reading["counts"].values())
        output.line(f"{counts}: {total} differences; {done or 'nothing'} written")
    if reading["error"]:
        raise Problem(**reading["error"])
