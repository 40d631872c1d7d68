"""`gpuaas jobs`: inference jobs of a project, and the workers that run them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reconciler.cli import failures, output
from reconciler.cli.allocations import Project
from reconciler.cli.options import Reason, read_json
from reconciler.cli.session import client, current, secret
from reconciler.model.errors import Problem
from reconciler.model.jobs import ENDED, JobStatus

if TYPE_CHECKING:
    from reconciler.pools.queue import JobQueue
    from reconciler.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Inference jobs, and workers that run them.")
COLUMNS = ("id", "model", "status", "attempts", "lost", "enqueued_at", "updated_at")
JobId = Annotated[str, typer.Argument(help="The job's id.")]
Model = Annotated[str, typer.Option(help="Only jobs of a model.")]


@app.command()
def submit(
    model: Annotated[str, typer.Argument(help="Name of a model that a worker serves.")],
    file: Annotated[Path, typer.Argument(help="JSON input, or a list of inputs.")],
    *,
    project: Project,
    priority: Annotated[int, typer.Option(min=0, max=9, help="0 is served first.")] = 5,
    delay: Annotated[int, typer.Option(min=0, help="Seconds before it is due.")] = 0,
    attempts: Annotated[int, typer.Option(min=1, max=10, help="Attempts at most.")] = 3,
    timeout: Annotated[int, typer.Option(min=1, max=3600, help="Seconds of one attempt.")] = 60,
    wait: Annotated[bool, typer.Option(help="Wait for the results.")] = False,
) -> None:
    """Queue a job, or all jobs of a list of at most 100 inputs.

    With --wait, it exits 1 if a job ends without a result.
    """
    content = read_json(
        *(file, "input_unreadable", "a JSON object, or a list of them"), "correct the file"
    )
    options = {
        "model": model,
        "priority": priority,
        "delay_s": delay,
        "max_attempts": attempts,
        "timeout_s": timeout,
    }
    if isinstance(content, list):
        body = {"jobs": [{**options, "input": item} for item in content]}
        queued = client().post(f"{_path(project)}/batch", body)
        ids = queued["ids"]
    else:
        queued = client().post(_path(project), {**options, "input": content})
        ids = [queued["id"]]
    if not wait:
        output.record(queued)
        return
    # Before the wait, whatever ends it.
    output.line(f"queued {' '.join(ids)}")
    with output.waiting("the work", f"gpuaas jobs list --project {project}"):
        ended = [_ended(project, id) for id in ids]
    if isinstance(content, list):
        output.rows(ended, *COLUMNS, "result")
    else:
        output.record(ended[0])
    if any(job["status"] != JobStatus.DONE for job in ended):
        raise typer.Exit(1)


def _ended(project: str, id: str) -> dict[str, Any]:
    """The job, once it has ended."""
    while True:
        job: dict[str, Any] = client().get(f"{_path(project)}/{id}")
        if job["status"] in ENDED:
            return job
        time.sleep(0.2)


@app.command("list")
def list_jobs(
    project: Project,
    status: Annotated[str, typer.Option(help="Only jobs of a status, such as dead_letter.")] = "",
    model: Model = "",
) -> None:
    """List jobs, the newest first."""
    output.rows(client().items(_path(project), status=status, model=model), *COLUMNS)


@app.command()
def models(project: Project) -> None:
    """List the models that jobs of a project may call."""
    served = client().get(f"{_path(project)}/models")["models"]
    output.rows(served, "name", "serving", "due")


@app.command()
def queue() -> None:
    """List the projects with jobs and their number by status. For operators."""
    projects = client().get("/admin/jobs/queue")["projects"].items()
    numbers = [{"project_id": id, **number} for id, number in projects]
    output.rows(numbers, "project_id", *(status.value for status in JobStatus))


@app.command()
def show(job: JobId, project: Project) -> None:
    """Show a job with its input and its result."""
    output.record(client().get(f"{_path(project)}/{job}"))


@app.command()
def cancel(
    project: Project,
    job: Annotated[str, typer.Argument(help="The job's id; not with --all and --model.")] = "",
    *,
    every: Annotated[bool, typer.Option("--all", help="All jobs that have not ended.")] = False,
    model: Model = "",
    dead: Annotated[
        bool, typer.Option("--dead", help="Dead letters, and not jobs that have not ended.")
    ] = False,
    reason: Reason = "",
) -> None:
    """Cancel a job or many that have not ended, or give up dead letters."""
    if bool(job) is (every or bool(model)) or (every and model) or (job and dead):
        raise Problem(
            "request_invalid",
            422,
            expected="a job, --all or --model, and --dead with one of the latter",
            found="several of them, or none",
            remedy="name one of them",
        )
    if job:
        output.record(client().post(f"{_path(project)}/{job}/cancel"))
        return
    body = {"model": model or None, "all": every, "dead_letters": dead, "reason": reason}
    total = 0
    while canceled := client().post(f"{_path(project)}/cancel", body)["canceled"]:
        total += canceled
    output.record({"canceled": total})


@app.command()
def reprocess(
    *,
    project: Project,
    sample: Annotated[int, typer.Option(min=0, help="Number of jobs, oldest first; 0: all.")] = 5,
    force: Annotated[bool, typer.Option(help="Also if the last sample has not succeeded.")] = False,
    model: Model = "",
) -> None:
    """Queue dead letters again: first a sample, then all."""
    body = {"sample": sample or None, "all": not sample, "force": force, "model": model or None}
    output.record(client().post(f"{_path(project)}/dlq/reprocess", body))


@app.command()
@failures.logged()
def worker(
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=TARGET",
            help="A model: FILE.onnx, or MODULE:FUNCTION in Python; may be repeated."
            " @sha256:DIGEST behind it: that file and no other."
            " Default: the shipped model of digits.",
        ),
    ] = None,
    memory: Annotated[int, typer.Option(min=64, help="MiB that calls may use.")] = 2048,
    drain: Annotated[float, typer.Option(min=0, help="Seconds to finish a job in.")] = 30,
    pool_token: Annotated[
        Path | None,
        typer.Option(help="A file with the token of a remote pool: use the API, not the database."),
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            exists=True,
            help="A folder of NAME.onnx, and NAME.py with a function `run`, for --model NAME.",
        ),
    ] = None,
) -> None:
    """Run jobs on this machine until SIGTERM, which lets the present job finish.

    Needs the service's database, not its API; with --pool-token, the API (--api) and no database.
    Several may run.
    """
    from reconciler import logs
    from reconciler.pools import processes
    from reconciler.pools.child import Runner, parse
    from reconciler.pools.worker import Worker
    from reconciler.settings import Settings

    words = model or []
    if models is not None:
        targets = processes.models(models.absolute())
        words = [word if "=" in word else f"{word}={targets.get(word, '')}" for word in words]
    served = parse(words, models)
    settings = Settings()
    logs.configure(settings)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    with _queue(settings, sorted(served), stopping, pool_token) as queue:
        Worker(queue, Runner(served, memory, models), stopping, drain_s=drain).run()


@contextmanager
def _queue(
    settings: Settings, models: list[str], stopping: threading.Event, pool_token: Path | None
) -> Iterator[JobQueue]:
    """The queue in the database, or behind the API with the token of a pool."""
    if pool_token is not None:
        from reconciler.pools.api_queue import ApiQueue

        remedy = "save what `gpuaas pools token POOL` prints there"
        yield ApiQueue(current().url, partial(secret, pool_token, remedy), models, stopping)
        return
    from reconciler.cli.service import in_use, open_unmigrated
    from reconciler.pools import hints
    from reconciler.pools.processes import MARK
    from reconciler.pools.queue import DatabaseQueue

    with in_use(settings):
        engine = open_unmigrated()
        try:
            yield DatabaseQueue(
                *(engine, models),
                hints=hints.of(settings.redis_url),
                pool_worker=os.environ.get(MARK, "").rpartition("/")[2],
                poll_s=settings.poll_s,
            )
        finally:
            engine.dispose()


def _path(project: str) -> str:
    return f"/projects/{project}/jobs"
