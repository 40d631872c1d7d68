"""The program `gpuaas`: its shared options, and the commands of each noun."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, get_args

import typer

from reconciler.cli import (
    allocations,
    apps,
    drill,
    failures,
    host,
    images,
    ingress,
    jobs,
    maas,
    netbox,
    nodes,
    onboard,
    output,
    pools,
    projects,
    recovery,
    service,
    session,
    site,
    slots,
    ssh,
    tasks,
    tokens,
)
from reconciler.cli.session import Output, Session

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Sell each GPU of a bare-metal server as a virtual machine.",
)
nodes.app.command()(onboard.onboard)
# Nouns are named as their modules.
for noun in (
    *(nodes, host, slots, images, projects, apps, ingress, jobs, pools),
    *(drill, netbox, maas, tasks),
):
    app.add_typer(noun.app, name=noun.__name__.rpartition(".")[2])
for module in (service, tokens, allocations, ssh, recovery, site):
    app.add_typer(module.commands)

# Options with a value, in the next word or after "=".
SHARED = ("--api", "--token-file", "--output")
# Values of -o. Behind `ssh`, -o belongs to ssh or to the command that runs there.
FORMATS = get_args(Output)

# These commands get all later words: `lab` is a program of its own, and a capture's --output is a
# file.
HANDED_ON = (["lab"], ["host", "benchmark", "capture"])


def _print_version(requested: bool) -> None:
    """Print the version. Needs no service and no settings."""
    if requested:
        from importlib.metadata import version

        sys.stdout.write(f"gpuaas {version('gpuaas-slice')}\n")
        raise typer.Exit


@app.callback()
def shared(
    api: Annotated[
        str,
        typer.Option(
            envvar="GPUAAS_API",
            show_default=False,
            help="Address of the reconciler; default: from this machine's settings.",
        ),
    ] = "",
    token_file: Annotated[
        Path | None, typer.Option(envvar="GPUAAS_TOKEN_FILE", help="A file with an API token.")
    ] = None,
    output_format: Annotated[
        Output, typer.Option("--output", "-o", help="For people (table) or for programs (json).")
    ] = "table",
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options of every command; they may stand anywhere on the command line."""
    session.begin(Session(api, token_file, output_format))


@app.command(
    "lab",
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def lab(context: typer.Context) -> None:
    """Run a virtual slice host on this machine; see `gpuaas lab --help`."""
    # Deferred: it loads the libraries that build images.
    from lab.cli import app as lab_app

    lab_app(args=context.args, prog_name="gpuaas lab")


def hoist(words: Sequence[str]) -> list[str]:
    """Move the shared options to the front. Words after HANDED_ON or `--` stay in place."""
    front: list[str] = []
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word == "-o" and queue and queue[0] in FORMATS and rest[:1] != ["ssh"]:
            front += ["--output", queue.pop(0)]
        elif word in SHARED and queue:
            front += [word, queue.pop(0)]
        elif word.partition("=")[0] in SHARED:
            front.append(word)
        elif word == "--" or [*rest, word] in HANDED_ON:
            rest += [word, *queue]
            break
        else:
            rest.append(word)
    return front + rest


def main(words: Sequence[str] | None = None) -> None:
    """Run the program; exit 1 for a refusal, 2 for a wrong command line."""
    line = hoist(sys.argv[1:] if words is None else words)
    try:
        app(args=line, prog_name="gpuaas")
    except Exception as failure:
        problem = failures.as_problem(failure)
        if problem is None:
            raise
        as_json = "--output=json" in line or ("--output", "json") in itertools.pairwise(line)
        output.failure(problem, as_json=as_json)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
