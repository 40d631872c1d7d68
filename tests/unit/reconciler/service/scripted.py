"""`gpuaas` in new processes with scripted hosts: `python -m ….scripted` reads the commands to start
from its input. The id of the process comes back.

Each is a copy of this process, in which everything is loaded already: a start is a matter of
milliseconds, so that a test can afford many. Runs are processes of their own that outlive the
service, as real ones do; their acts are in the file `hosts` of the folder SCRIPTED_FOLDER, a line
per start.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import uvicorn
from alembic import command as _alembic
from sqlalchemy import create_engine

from reconciler.api import app as application
from reconciler.cli.main import main as gpuaas
from reconciler.db import idempotency
from reconciler.pools import api_queue, child, hints, leases
from reconciler.pools import worker as pool_worker
from reconciler.runs import launch
from reconciler.runs.paths import RunPaths, run_directory
from reconciler.runs.spec import RunSpec
from reconciler.settings import Settings
from reconciler.work import worker

# Modules that a worker of a pool loads when it starts.
LOADED = (child, pool_worker)
# Only with modules that every interpreter has loaded: it starts in no time.
HOST = """
import json, os, sys, time
root, log = sys.argv[1:3]
if os.fork():
    sys.exit()
def put(name, text):
    with open(f"{root}/.{name}", "w") as file:
        file.write(text)
    os.rename(f"{root}/.{name}", f"{root}/{name}")
with open(log, "a") as file:
    file.write(os.path.basename(root) + "\\n")
put("process.json", '{"pid": %d, "started_at": "scripted"}' % os.getpid())
time.sleep(0.03)
with open(f"{root}/answer") as file:
    put("outcome.json", file.read())
"""


def _spawn(paths: RunPaths, descriptor: int) -> None:
    hosts = Path(os.environ["SCRIPTED_FOLDER"]) / "hosts"
    argv = [sys.executable, "-I", "-S", "-c", HOST, str(paths.root), str(hosts)]
    subprocess.run(argv, pass_fds=(descriptor,), start_new_session=True, check=True)


def _launch(site: launch.Site, spec: RunSpec) -> Path:
    """The real launch, after the scripted outcome is prepared."""
    folder = run_directory(site.state_dir, spec.run_id)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    answer = folder / "answer"
    if not answer.exists():
        fresh = folder / f".answer.{os.getpid()}"
        fresh.write_text(json.dumps(_outcome(spec)))
        fresh.replace(answer)
    return launch.launch(site, spec)


def _outcome(spec: RunSpec) -> dict[str, Any]:
    result = {"schema": 1, "playbook": spec.playbook, "ok": True, "step": "", "error": {}}
    return {
        "run_id": spec.run_id,
        "status": "successful",
        "rc": 0,
        "result": {**result, "evidence": _evidence(spec)},
        "problem": "",
        "started_at": "scripted",
        "finished_at": "scripted",
        "unreachable": False,
    }


def _evidence(spec: RunSpec) -> dict[str, Any]:
    if spec.playbook == "provision_slice":
        return {"readiness": {"lease_state": "bound"}, "plan": {}, "image": {}}
    proofs = {
        slot["slot_id"]: {
            "disk": f"eui.{slot['nvme_eui']}",
            "serial": slot["nvme_serial"],
            "size_bytes": slot["nvme_size_bytes"],
            "method": "user_data_erase",
            "verified": True,
            "gpu": {"address": slot["gpu_pci_address"], "verified": True},
        }
        for slot in spec.variables["slice_slots"]
    }
    return {"proofs": proofs, "absence": {"absent": True}}


def _run(
    words: list[str], environment: dict[str, str], log: str, output: str, status: str
) -> NoReturn:
    """Be the program. Its exit status goes to the file `status`."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate((os.devnull, output, log)):
        os.dup2(os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), number)
    skew, clock = float(environment.get("SKEW_S", 0)), time.time
    time.time = lambda: clock() + skew
    # How long a worker elsewhere waits for another token.
    if patience := environment.get("PATIENCE_S"):
        vars(api_queue)["_PATIENCE_S"] = float(patience)
    code: object = 1
    try:
        gpuaas(words)
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        Path(status).write_text(f"{code}")
    sys.exit()


def main() -> None:
    app = application.create_app(Settings(), create_engine("sqlite://"))

    def prepared(settings: Settings, engine: Any) -> Any:
        app.state.settings, app.state.engine = settings, engine
        return app

    application.create_app = prepared
    # How long a killed caller keeps its key: the usual time is too long for these tests.
    idempotency.IN_FLIGHT_S = 1
    # How often workers elsewhere renew their leases, and hear of the end of their pool.
    leases.BEAT_S = 1.0
    # A worker that is told to end looks for a job to the end of that time.
    vars(api_queue)["_WAIT_S"] = 1
    # A busy machine keeps Redis from answering for longer.
    vars(hints).update(_TIMEOUT_S=20.0, _LIMIT_S=30.0)
    vars(worker)["launch"] = _launch
    launch._spawn = _spawn
    # Modules that a service loads at its first request.
    uvicorn.Config(app, log_config=None).load()
    assert _alembic
    gc.freeze()
    # Ended processes are reaped by the kernel, because no parent waits for them here.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _run(**json.loads(line))
        print(child, flush=True)


if __name__ == "__main__":
    main()
