"""Commands on the service's own machine: `serve`, `worker`, `migrate`, `backup`, `restore`,
`doctor` and `check`.

The imports are deferred: the database, the web server and Ansible's runner take seconds to load.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reconciler.cli import failures, output
from reconciler.model.errors import Problem

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from reconciler.settings import Settings

log = logging.getLogger("gpuaas")

commands = typer.Typer()

# Time that open requests have after the signal to stop.
GRACE_S = 10
_LOGIN_S = 12 * 3600


@commands.command()
@failures.logged()
def serve(
    api_only: Annotated[
        bool, typer.Option("--api-only", help="Leave tasks and loops to `gpuaas worker`.")
    ] = False,
    login: Annotated[
        bool,
        typer.Option("--login", help="Print the console's address and a token of 12 hours."),
    ] = False,
) -> None:
    """Run the API, its workers and the loops until interrupted. Runs on hosts outlive it."""
    import uvicorn

    from reconciler import logs
    from reconciler.api.app import create_app
    from reconciler.api.health import create_operator_app
    from reconciler.console.app import mount
    from reconciler.console.session import of_socket
    from reconciler.gateway import web
    from reconciler.service import connections, listeners, process
    from reconciler.settings import Settings

    class Server(uvicorn.Server):
        words: Sequence[str] = ()

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            # Last, and no lines of the log, which others may read: they have a token.
            for text in self.words:
                output.line(text)

    settings = Settings()
    logs.configure(settings)
    with listeners.api_sockets(settings) as sockets, in_use(settings):
        engine, revision = open_migrated(settings)
        process.adopt(settings, engine)
        process.adopt_issuer(settings, engine)
        app = web.mount(mount(create_app(settings, engine), examine=_examine), of_socket)
        operators = create_operator_app(settings, engine)
        # /readyz of this process answers for the whole site.
        app.state.needed = operators.state.needed = process.NEEDED
        # The program's own objects stay. Looking through them at each collection, a request with
        # very many small lists took seven times as long to read.
        gc.collect()
        gc.freeze()
        config = uvicorn.Config(
            app,
            http=connections.limited(),
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
            # Frames of terminals. A compressed frame could be much larger than it seems.
            ws_max_size=web.FRAME,
            ws_per_message_deflate=False,
        )
        server = Server(config)
        # uvicorn stops at a signal and then raises it again. Without this handler the process would
        # end there, and its tasks would wait until their leases expire.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: sys.exit(0))
        try:
            with (
                listeners.serve_operators(settings, operators),
                process.running(settings, engine, api=True, work=not api_only),
            ):
                urls = [f"http://{listeners.host_port(item.getsockname()[:2])}" for item in sockets]
                public = settings.public_url.rstrip("/")
                others = f", for others at {public}" if public not in ("", *urls) else ""
                log.info("database at %s, API on %s%s", revision, " and ".join(urls), others)
                console = f"console on {public or urls[0]}/console"
                if login:
                    server.words = [console, f"log in with {_login(engine)}"]
                else:
                    log.info(console)
                # Its sockets take connections already.
                process.announce()
                server.run(sockets)
        finally:
            engine.dispose()


@commands.command()
@failures.logged()
def worker() -> None:
    """Run tasks without an API. Several workers may run, on one machine or more."""
    # Loads no web framework, because a site may run many workers.
    from reconciler import logs
    from reconciler.service import process
    from reconciler.settings import Settings

    settings = Settings()
    logs.configure(settings)
    if not settings.workers:
        raise Problem(
            "workers_missing",
            400,
            expected="GPUAAS_WORKERS of at least 1 for a worker",
            found="0",
            remedy="set it, or run `gpuaas serve --api-only` here",
        )
    with in_use(settings):
        engine, revision = open_migrated(settings)
        process.adopt(settings, engine)
        stopping = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopping.set())
        try:
            with process.running(settings, engine, api=False, work=True):
                log.info("database at %s, %d tasks at a time", revision, settings.workers)
                process.announce()
                stopping.wait()
        finally:
            engine.dispose()


@commands.command()
@failures.logged()
def gateway() -> None:
    """Run the SSH gateway for tenants. Several may run, each with keys of `gateway-trust`."""
    import asyncio

    from reconciler import logs
    from reconciler.backup import refuse_unfinished_restore
    from reconciler.db.engine import open_existing, reading
    from reconciler.gateway import role, server
    from reconciler.service import process
    from reconciler.settings import Settings

    settings = Settings()
    logs.configure(settings)
    refuse_unfinished_restore(settings)
    with open_existing(settings) as engine:
        with reading(engine) as conn:
            role.require_least(conn)
        require_current(engine)
        trust = process.adopt_gateway(settings, engine)
        with in_use(settings), process.running(settings, engine, gateway=True):
            asyncio.run(server.serve(settings, engine, trust, process.announce))


@commands.command("gateway-trust")
def gateway_trust(
    folder: Annotated[Path, typer.Argument(help="A new folder; it will contain a private key.")],
) -> None:
    """Write the keys for a gateway on another machine. Copy them to `gateway` in its state folder.

    On a host they open the relay account only, which leads to live slices.
    """
    from reconciler.settings import Settings
    from reconciler.trust.ca import Trust, export_gateway

    trust = Trust(Settings().state_dir.resolve() / "trust")
    if not trust.gateway_authority.exists():
        raise Problem(
            "gateway_trust_missing",
            expected=f"the gateway's authority, {trust.gateway_authority}",
            found="no such file",
            remedy="run it on the machine of the service that started first with this version",
        )
    if folder.exists() and any(folder.iterdir()):
        raise Problem(
            "gateway_folder_exists",
            expected="a new folder",
            found=f"files in {folder}",
            remedy="name another folder, because this one becomes the gateway's as a whole",
        )
    export_gateway(trust, folder)
    output.line(f"copy {folder} to the gateway's machine, as `gateway` in its state folder")


@commands.command("gateway-replace")
def gateway_replace(
    reason: Annotated[str, typer.Option(help="Why; it is kept in the audit log.")],
) -> None:
    """Replace the authority of the gateways, for example after a theft. Queues a comparison of
    every host, which then refuses the old authority and ends all sessions through it.
    """
    from reconciler.db.engine import open_existing
    from reconciler.model.act import Act, require_reason
    from reconciler.service import process
    from reconciler.settings import Settings

    settings, act = Settings(), Act("local-operator", reason)
    require_reason(act, "say what has happened")
    _require_own(settings)
    with open_existing(settings) as engine:
        require_current(engine)
        count = process.replace_gateway(settings, engine, act)
    output.line(
        f"{count} hosts take the new authority with the comparisons that are queued now; restart"
        " the service on its other machines, and run `gpuaas gateway-trust FOLDER` for each gateway"
        " on another machine"
    )


@commands.command("gateway-role")
def gateway_role(
    connections: Annotated[
        int, typer.Option(min=17, help="Of all gateways together; each needs up to 17.")
    ] = 51,
) -> None:
    """Print SQL that makes the gateways' role in PostgreSQL, or brings it up to date.

    An administrator of the server runs it, after each upgrade too: gpuaas gateway-role | psql
    DATABASE. Then `\\password gpuaas_gateway` in psql sets the role's password.
    """
    from reconciler.db.engine import open_existing, reading
    from reconciler.gateway import role
    from reconciler.settings import Settings

    with open_existing(Settings()) as engine:
        require_current(engine)
        with reading(engine) as conn:
            text = role.sql(conn, connections)
        user = engine.url.set(username=role.NAME, password="PASSWORD")  # noqa: S106
    sys.stdout.write(text)
    address = user.render_as_string(hide_password=False)
    output.line(f"-- of each gateway: GPUAAS_DATABASE_URL={address}")


@commands.command()
@failures.logged()
def migrate() -> None:
    """Bring the database to this version's schema."""
    engine, revision = open_migrated()
    engine.dispose()
    output.line(f"database at {revision}")


@commands.command()
def backup(
    file: Annotated[Path, typer.Argument(help="A new file; it will contain private keys.")],
) -> None:
    """Save database, SSH authorities and settings in one file. The service may keep running."""
    from reconciler.backup import archive
    from reconciler.settings import Settings

    # As an exception, because the parts of an unfinished backup hold private keys.
    ends = (signal.SIGTERM, signal.SIGHUP)
    former = {number: signal.signal(number, lambda got, _: sys.exit(128 + got)) for number in ends}
    try:
        output.record(archive.write(Settings(), file))
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@commands.command()
def restore(
    file: Annotated[Path, typer.Argument(help="A file of `gpuaas backup`.")],
) -> None:
    """Restore a backup into an empty state folder, with the service stopped.

    Running and waiting tasks are ended, not repeated. Nothing is on sale until its host is proven
    again. Tokens and host keys that were revoked after the backup are valid again: the answer lists
    them with the steps to take.
    """
    try:
        file.open("rb").close()
    except OSError as error:
        raise Problem(
            "backup_unreadable",
            404 if isinstance(error, FileNotFoundError) else 422,
            expected=f"a file that `gpuaas backup` made, at {file}",
            found=error.strerror or type(error).__name__,
            remedy="correct the path, or let this user read the file; nothing was restored",
        ) from error
    from reconciler.backup import restore
    from reconciler.settings import Settings

    settings = Settings()
    _require_own(settings)
    output.record(restore.restore(settings, file))


@commands.command()
def doctor(
    allocation: Annotated[
        str, typer.Option(help="Try the way from the gateway to this slice, not to any.")
    ] = "",
) -> None:
    """Check settings, folders, keys, programs, database and processes; exit 1 on a failure.

    Changes nothing. Run it as the service's user, with the service's settings.
    """
    findings = _examine(allocation)
    failed = sum(finding["status"] == "fail" for finding in findings)
    warnings = sum(finding["status"] == "warn" for finding in findings)
    if not output.in_json({"failures": failed, "warnings": warnings, "findings": findings}):
        output.rows(findings, "status", "check", "found", "expected", "remedy")
        output.line(f"{len(findings)} findings, {failed} failures, {warnings} warnings")
    if failed:
        raise typer.Exit(1)


@commands.command()
def check() -> None:
    """Check every invariant of the database; exit 1 with a line for each violation.

    Reads only. The service may run meanwhile, but need not.
    """
    from reconciler.backup import refuse_unfinished_restore
    from reconciler.db.engine import open_existing, reading
    from reconciler.lifecycle import invariants
    from reconciler.pools import counts
    from reconciler.settings import Settings

    settings = Settings()
    refuse_unfinished_restore(settings)
    with open_existing(settings) as engine:
        revision = require_current(engine)
        with reading(engine) as conn:
            violations = invariants.check(conn)
            for id, lack in counts.missing(conn).items():
                text = f"counts of its jobs lack {lack}"
                violations.append(invariants.Violation("ORCH-2", f"project {id}", text))
    output.rows([vars(row) for row in violations], "invariant", "subject", "found")
    count = len(invariants.CHECKS) + 1
    output.line(f"database at {revision}: {count} checks, {len(violations)} violations")
    if violations:
        raise typer.Exit(1)


def _examine(allocation_id: str = "") -> list[dict[str, str]]:
    # Loaded when an operator asks for it.
    from reconciler.doctor.examine import examine

    return examine(allocation_id)


def open_migrated(settings: Settings | None = None) -> tuple[Engine, str]:
    """The configured database, migrated to the newest revision, and that revision."""
    from reconciler.db.migrations import migrate as migrate_schema
    from reconciler.settings import Settings

    engine = _open(settings or Settings())
    return engine, migrate_schema(engine)


def open_unmigrated() -> Engine:
    """The configured database; created if missing, but never migrated.

    A migration has no way back, so only `gpuaas migrate` and the service migrate, after a backup.
    Problem `schema_outdated`.
    """
    from reconciler.db.migrations import current, head
    from reconciler.db.migrations import migrate as migrate_schema
    from reconciler.settings import Settings

    engine = _open(Settings())
    revision = current(engine)
    if revision is None:
        migrate_schema(engine)
    elif revision != head():
        engine.dispose()
        raise _outdated(revision)
    return engine


@contextmanager
def in_use(settings: Settings) -> Iterator[None]:
    """Use the state folder for the life of this process, which keeps restores out."""
    from reconciler.backup import in_use as holding

    _prepare(settings)
    with holding(settings):
        yield


def _open(settings: Settings) -> Engine:
    from reconciler.db.engine import open_engine

    _prepare(settings)
    try:
        if settings.sqlite_file is not None:
            # SQLite's other files inherit the mode of this file.
            settings.sqlite_file.touch(mode=0o600)
    except OSError as failure:
        raise _unusable(settings, failure.strerror or str(failure)) from failure
    return open_engine(settings.database)


def _prepare(settings: Settings) -> None:
    """The state folder, created if missing; Problem `state_dir_unusable`."""
    from reconciler.backup import refuse_unfinished_restore

    folder = settings.state_dir
    try:
        refuse_unfinished_restore(settings)
        # Run folders, keys and the database are for the service's user only.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as failure:
        raise _unusable(settings, failure.strerror or str(failure)) from failure
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise _unusable(settings, "this user may not write there")
    _require_own(settings)


def _require_own(settings: Settings) -> None:
    """Refuse to write, as root, files that the service's user could not read."""
    if settings.state_dir.exists() and settings.state_dir.stat().st_uid != os.geteuid():
        raise _unusable(settings, "another user's, who could not read the new files")


def require_current(engine: Engine) -> str:
    """The revision of a database with this version's schema; Problem `schema_outdated`."""
    from reconciler.db.migrations import current, head

    revision = current(engine)
    if revision != head():
        raise _outdated(revision)
    return revision


def _outdated(revision: str | None) -> Problem:
    """The refusal of a database with another version's schema."""
    from reconciler.db.migrations import head

    return Problem(
        "schema_outdated",
        expected=f"the schema of this version, {head()}",
        found=f"revision {revision or 'none'}",
        remedy="take a backup with the version that runs, then `gpuaas migrate`; if a newer"
        " version runs, use its `gpuaas`",
    )


def _unusable(settings: Settings, found: str) -> Problem:
    return Problem(
        "state_dir_unusable",
        403,
        expected=f"{settings.state_dir}, GPUAAS_STATE_DIR, as a folder of this user's own",
        found=found,
        remedy="run it as the service's user (`runuser -u gpuaas -- gpuaas …`), or set another"
        " folder",
    )


def _login(engine: Engine) -> str:
    """A token of an operator for a day's work with the console."""
    from reconciler.db.engine import transaction
    from reconciler.model.act import Act
    from reconciler.model.states import Role
    from reconciler.records import tokens

    act = Act("admin:console", "gpuaas serve --login", role=Role.PLATFORM_ADMIN)
    with transaction(engine) as conn:
        return tokens.issue(conn, act, role=Role.PLATFORM_ADMIN, name="console", ttl_s=_LOGIN_S)[1]
