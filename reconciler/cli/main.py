"""`gpuaas`: the options that all commands share, and one file per noun."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from reconciler.cli import (
    allocation,
    allocations,
    apps,
    audit,
    backup,
    capacity,
    check,
    doctor,
    failures,
    host,
    images,
    login,
    nodes,
    policy,
    projects,
    recovery,
    service,
    show,
    slots,
    tasks,
    tokens,
    usage,
)
from reconciler.cli.session import Output, Session

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Sell each GPU of a bare-metal server as a virtual machine.",
)
app.add_typer(nodes.app, name="nodes")
app.add_typer(host.app, name="host")
app.add_typer(slots.app, name="slots")
app.add_typer(images.app, name="images")
app.add_typer(projects.app, name="projects")
app.add_typer(apps.app, name="apps")
app.add_typer(allocation.app, name="allocation")
app.add_typer(tasks.app, name="tasks")
app.add_typer(tokens.app, name="token")
service.mount(app)
login.mount(app)
allocations.mount(app)
recovery.mount(app)
audit.mount(app)
capacity.mount(app)
policy.mount(app)
usage.mount(app)
check.mount(app)
doctor.mount(app)
backup.mount(app)

# Their values follow in the next word, or after "=".
SHARED = ("--api", "--token-file", "--output")

# After these all words are theirs: `lab` has its own program, a capture's --output is a file.
HANDED_ON = (["lab"], ["host", "benchmark", "capture"])


def _tell_version(asked: bool) -> None:
    """Before anything that needs a service, or even settings."""
    if asked:
        from importlib.metadata import version

        sys.stdout.write(f"gpuaas {version('gpuaas-slice')}\n")
        raise typer.Exit


@app.callback()
def shared(
    context: typer.Context,
    api: Annotated[
        str,
        typer.Option(
            envvar="GPUAAS_API",
            show_default=False,
            help="The reconciler; unless given, where this machine's settings have it listen.",
        ),
    ] = "",
    token_file: Annotated[
        Path | None,
        typer.Option(envvar="GPUAAS_TOKEN_FILE", help="A file with an API token."),
    ] = None,
    output: Annotated[Output, typer.Option(help="For people or for programs.")] = "table",
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Print it and end."),
    ] = False,
) -> None:
    """The options of every command; they may stand anywhere on the line."""
    context.obj = Session(api, token_file, output)


@app.command(
    "lab",
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def lab(context: typer.Context) -> None:
    """A virtual slice host on this machine; `gpuaas lab --help` lists its commands."""
    # Not loaded for other commands: it brings what building images needs.
    from lab.cli import app as lab_app

    lab_app(args=context.args, prog_name="gpuaas lab")


def hoist(words: Sequence[str]) -> list[str]:
    """The shared options first, wherever they stood; after HANDED_ON or `--` all is left alone."""
    front: list[str] = []
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word in SHARED and queue:
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
    """The program; exit 1 for a refusal, 2 for a wrong command line."""
    line = hoist(sys.argv[1:] if words is None else words)
    try:
        app(args=line, prog_name="gpuaas")
    except Exception as failure:
        problem = failures.told(failure)
        if problem is None:
            raise
        as_json = "--output=json" in line or ("--output", "json") in itertools.pairwise(line)
        show.failure(Session(output="json" if as_json else "table"), problem)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
