"""`gpuaas pools`: worker pools, by the API or on the database itself."""

from __future__ import annotations

import getpass
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reconciler.cli import output
from reconciler.cli.options import Reason
from reconciler.cli.projects import project_id
from reconciler.cli.session import client
from reconciler.model.errors import Problem
from reconciler.model.pools import APART, LIVE_POOLS, PoolState

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from reconciler.db.schema import Pool
    from reconciler.model.act import Act
    from reconciler.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Pools of workers that run inference jobs.")
COLUMNS = ("id", "name", "state", "models", "replicas", "memory_bytes", "memory_mib", "devices")
PROJECT_COLUMNS = ("id", "name", "target", "state", "models", "workers", "replicas", "jobs")
_LOOK_S = 0.2

Direct = Annotated[
    bool, typer.Option("--direct", help="Use the service's database and this machine, not the API.")
]
PoolKey = Annotated[str, typer.Argument(help="Id of a pool, or the name of a living pool.")]
Wait = Annotated[bool, typer.Option(help="Wait until none of its processes is left.")]


@app.command("list")
def list_pools(
    *,
    every: Annotated[bool, typer.Option("--all", help="Also pools that have ended.")] = False,
    project: Annotated[
        str, typer.Option(help="Only pools of this project, as its members see them.")
    ] = "",
    direct: Direct = False,
) -> None:
    """List pools, the largest first: memory of all their workers in use, and the limit of each."""
    live = None if every else True
    if project:
        path = f"/projects/{project}/pools"
        of_project = _list_of(project, live) if direct else client().items(path, live=live)
        output.rows(of_project, *PROJECT_COLUMNS, "allocation_id")
        return
    pools = _list(live) if direct else list(client().items("/pools", live=live))
    pools.sort(key=lambda pool: pool["memory_bytes"], reverse=True)
    output.rows(pools, *COLUMNS)


@app.command()
def show(pool: PoolKey) -> None:
    """Show a pool with its workers, and the memory of its GPUs."""
    output.record(client().get(f"/pools/{pool}"))


@app.command()
def hosts(*, direct: Direct = False) -> None:
    """List machines that can run pools, with their models, devices and memory."""
    machines = _read_hosts() if direct else client().get("/pools/hosts")["hosts"]
    columns = ("id", "name", "isolation", "models", "devices", "memory_bytes", "memory_used_bytes")
    output.rows(machines, *columns, "seen_at")


@app.command()
def leases() -> None:
    """List devices that pools have."""
    output.rows(client().items("/leases"), "device", "host_id", "pool_id", "since")


@app.command()
def start(
    name: Annotated[str, typer.Argument(help="Name of the pool.")],
    *,
    model: Annotated[list[str], typer.Option(help="A model of the host; may be repeated.")],
    replicas: Annotated[int, typer.Option(min=1, max=64, help="Workers.")] = 1,
    memory: Annotated[int, typer.Option(min=256, help="MiB of each worker at most.")] = 2048,
    kill_on_oom: Annotated[
        bool, typer.Option("--kill-on-oom", help="End it when memory runs out, largest first.")
    ] = False,
    device: Annotated[
        list[str] | None, typer.Option(help="Id of a GPU of the host; may be repeated.")
    ] = None,
    drain: Annotated[int, typer.Option(min=0, help="Seconds for jobs to end at a stop.")] = 600,
    grace: Annotated[int, typer.Option(min=1, help="Seconds from SIGTERM to SIGKILL.")] = 30,
    host: Annotated[str, typer.Option(help="Id or name. Default: the one with most memory.")] = "",
    project: Annotated[
        str, typer.Option(help="Run the jobs of this project only; its id or name.")
    ] = "",
    target: Annotated[
        str,
        typer.Option(
            help="host: a machine of the service; allocation: the slice of `launch --worker-pool`;"
            " remote: workers started elsewhere."
        ),
    ] = "host",
    direct: Direct = False,
    reason: Reason = "",
    wait: Annotated[bool, typer.Option(help="Wait until its workers have loaded.")] = False,
) -> None:
    """Start a pool of workers: on a machine of the service, in a slice, or elsewhere.

    With --wait, it exits 1 if the pool ends before its workers have loaded.
    """
    body = {
        "name": name,
        "models": model,
        "replicas": replicas,
        "memory_mib": memory,
        "kill_on_oom": kill_on_oom,
        "devices": device or [],
        "drain_s": drain,
        "grace_s": grace,
        "host": host,
        # Without the API, its name is looked up in the database.
        "project_id": (project if direct else project_id(project)) or None,
        "target": target,
    }
    pool = _start(body, reason) if direct else client().post("/pools", {**body, "reason": reason})
    while wait and pool["state"] in ("requested", "starting"):
        time.sleep(_LOOK_S)
        pool = _read(pool["id"]) if direct else client().get(f"/pools/{pool['id']}")
    output.record(pool)
    if wait and pool["state"] != PoolState.RUNNING:
        raise typer.Exit(1)


@app.command()
def token(
    pool: PoolKey,
    *,
    ttl: Annotated[int, typer.Option(min=60, help="Seconds that it is valid.")] = 86_400,
    reason: Reason = "",
) -> None:
    """Print a new token of a remote pool, for `jobs worker --pool-token`. The previous one ends."""
    issued = client().post(f"/pools/{pool}/token", {"ttl_s": ttl, "reason": reason})
    if not output.in_json(issued):
        typer.echo(issued["token"])


@app.command()
def stop(
    pool: Annotated[str, typer.Argument(help="Id of a pool, or the name of a living pool.")] = "",
    *,
    every: Annotated[bool, typer.Option("--all", help="All pools.")] = False,
    direct: Direct = False,
    reason: Reason = "",
    wait: Wait = False,
) -> None:
    """Let a pool finish the jobs that it holds, then end it."""
    if bool(pool) is every:
        raise Problem(
            "request_invalid",
            422,
            expected="a pool or --all",
            found="both" if pool else "neither",
            remedy="name one of them",
        )
    if direct:
        from reconciler.pools import pools

        stopped = _directly(
            lambda conn, act: [pools.stop(conn, pool, act)] if pool else pools.stop_all(conn, act),
            reason,
        )
    elif every:
        stopped = _followed(client().post("/pools/stop-all", {"reason": reason})["items"], wait)
    else:
        stopped = _followed([client().post(f"/pools/{pool}/stop", {"reason": reason})], wait)
    _print(stopped)


@app.command()
def evict(
    pool: PoolKey,
    *,
    host_lost: Annotated[
        bool,
        typer.Option(
            "--host-lost",
            help="Its host is lost: end the pool without proof. Needs a reason.",
        ),
    ] = False,
    direct: Direct = False,
    reason: Reason = "",
    wait: Wait = False,
) -> None:
    """End a pool at once: SIGTERM, then SIGKILL. Jobs that it holds go to other workers."""
    if direct:
        from reconciler.pools import pools

        evict = pools.evict_lost if host_lost else pools.evict
        evicted = _directly(lambda conn, act: [evict(conn, pool, act)], reason)
    else:
        body = {"reason": reason, "host_lost": host_lost}
        evicted = _followed([client().post(f"/pools/{pool}/evict", body)], wait)
    _print(evicted)


def _print(pools: list[dict[str, Any]]) -> None:
    if len(pools) == 1:
        output.record(pools[0])
    else:
        output.rows(pools, *COLUMNS)


def _followed(pools: list[dict[str, Any]], wait: bool) -> list[dict[str, Any]]:
    """The pools, when asked for once they have ended."""
    while wait and any(pool["state"] in LIVE_POOLS for pool in pools):
        time.sleep(_LOOK_S)
        pools = [client().get(f"/pools/{pool['id']}") for pool in pools]
    return pools


def _read(id: str) -> dict[str, Any]:
    from reconciler.pools import pools

    with _database() as (_settings, engine):
        return _answers(engine, lambda conn: [pools.get(conn, id)])[0]


def _list(live: bool | None) -> list[dict[str, Any]]:
    from reconciler.pools import pools

    with _database() as (_settings, engine):
        return _answers(engine, lambda conn: pools.every(conn, live=live))


def _list_of(project: str, live: bool | None) -> list[dict[str, Any]]:
    """Pools of a project, by its id or name."""
    from reconciler.api.pools import ProjectPool
    from reconciler.db import rows
    from reconciler.db.engine import reading
    from reconciler.db.schema import Project
    from reconciler.pools import pools
    from reconciler.records import projects

    with _database() as (_settings, engine), reading(engine) as conn:
        id = rows.get(conn, Project, projects.id_of(conn, project)).id
        of_project = pools.every(conn, live=live, project_id=id)
        return [pool.model_dump(mode="json") for pool in ProjectPool.of_pools(conn, of_project)]


def _read_hosts() -> list[dict[str, Any]]:
    from reconciler.api.pools import PoolHost
    from reconciler.db.engine import reading
    from reconciler.pools import pools

    with _database() as (_settings, engine), reading(engine) as conn:
        return [PoolHost.of(host).model_dump(mode="json") for host in pools.hosts(conn)]


def _start(body: dict[str, Any], reason: str) -> dict[str, Any]:
    """Record a pool. The service on its host starts it."""
    from pydantic import ValidationError

    from reconciler.api import problems
    from reconciler.api.pools import NewPool
    from reconciler.db.engine import reading, retrying
    from reconciler.pools import pools
    from reconciler.records import projects

    try:
        wish = pools.NewPool(**NewPool(**body).model_dump(exclude={"reason"}))
    except ValidationError as error:
        raise problems.invalid(error.errors()) from None
    with _database() as (settings, engine):
        if wish.project_id:
            with reading(engine) as conn:
                wish = replace(wish, project_id=projects.id_of(conn, wish.project_id))
        most = settings.gpu_pool_max_total
        start = partial(pools.start, wish=wish, act=_act(reason), most=most)
        pool = retrying(engine, start)
        return _answers(engine, lambda _conn: [pool])[0]


def _act(reason: str) -> Act:
    from reconciler.model.act import Act

    # Who can open the database may do everything that the API may.
    return Act(f"direct:{getpass.getuser()}", reason)


def _directly(work: Callable[[Connection, Act], list[Pool]], reason: str) -> list[dict[str, Any]]:
    """Do the work on the database and wait for its end. Pools of this machine are ended by this
    command itself if no service runs here, and at their deadline in any case; those of others by
    theirs. The end of pools whose workers use the API is recorded here, once these hold no jobs.
    """
    from reconciler.db import rows
    from reconciler.db.engine import reading, retrying
    from reconciler.db.schema import Pool
    from reconciler.pools import remote
    from reconciler.pools.supervisor import Supervisor

    act = _act(reason)
    with _database() as (settings, engine):
        ids = [pool.id for pool in retrying(engine, lambda conn: work(conn, act))]
        supervisor = Supervisor(settings, engine, only=frozenset(ids))

        def current(conn: Connection) -> list[Pool]:
            return [rows.get(conn, Pool, id) for id in ids]

        def living() -> list[Pool]:
            with reading(engine) as conn:
                return [pool for pool in current(conn) if pool.state in LIVE_POOLS]

        shown: set[tuple[str, str]] = set()
        while True:
            with supervisor.lock() as lock:
                if lock is not None:
                    supervisor.tend()
            _expire(engine, ids, act)
            left = living()
            here = [pool for pool in left if pool.host_id == supervisor.host_id]
            if not here:
                break
            _show_awaited(engine, here, shown)
            time.sleep(_LOOK_S)
        if any(pool.host_id in APART for pool in left):
            retrying(engine, remote.tend)
            left = living()
        for pool in left:
            rest = f"ended by the service on its host {pool.host_id}"
            if pool.host_id in APART:
                rest = f"{pool.state}: its workers may end their jobs; `evict` ends its token now"
            output.line(f"pool {pool.name} is {rest}")
        return _answers(engine, current)


def _expire(engine: Engine, ids: list[str], act: Act) -> None:
    """End pools that are past their deadline, as the leader does. None may live."""
    from reconciler.db import journal
    from reconciler.db.engine import reading, retrying
    from reconciler.pools import pools

    with reading(engine) as conn:
        late = [item for item in journal.overdue(conn) if item.event and item.id in ids]
    for item in late:
        late_act = act.because(f"still {item.state} past its deadline")
        retrying(engine, partial(pools.expire, overdue=item, act=late_act))


def _show_awaited(engine: Engine, pools: list[Pool], shown: set[tuple[str, str]]) -> None:
    """Say what pools of this machine wait for before they end, once in each state."""
    new = [pool for pool in pools if (pool.id, pool.state) not in shown]
    shown |= {(pool.id, pool.state) for pool in new}
    for pool in _answers(engine, lambda _conn: new) if new else ():
        rest = f"SIGKILL follows SIGTERM in {pool['grace_s']} s"
        if pool["state"] == PoolState.DRAINING:
            rest = f"until {pool['deadline_at']} at the latest; jobs that it runs: {pool['jobs']}"
        output.line(f"pool {pool['name']} is {pool['state']}: {rest}")


def _answers(engine: Engine, read: Callable[[Connection], list[Pool]]) -> list[dict[str, Any]]:
    """Pools as the API answers them."""
    from reconciler.api.pools import Pool as Answer
    from reconciler.db.engine import reading

    with reading(engine) as conn:
        return [pool.model_dump(mode="json") for pool in Answer.of_pools(conn, read(conn))]


@contextmanager
def _database() -> Iterator[tuple[Settings, Engine]]:
    """The service's database. Problem `schema_outdated` if it is of another version."""
    from reconciler.cli.service import require_current
    from reconciler.db.engine import open_existing
    from reconciler.settings import Settings

    settings = Settings()
    with open_existing(settings) as engine:
        require_current(engine)
        yield settings, engine
