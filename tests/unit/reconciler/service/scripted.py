"""The real service with scripted hosts: `python -m ….scripted`, told what to start on its input.

`serve`, `api` (`serve --api-only`) and `worker` on a line start one; its process id comes back.
Each is a copy of this process, in which everything is loaded already: a start is a matter of
milliseconds, so that a test can afford many. Runs are processes of their own that outlive the
service, as real ones do; what they do stands in the file `hosts` of the folder SCRIPTED_FOLDER, one
line per beginning.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import uvicorn
from sqlalchemy import create_engine

from reconciler.api import app as application
from reconciler.cli.service import run_server, run_worker
from reconciler.db import idempotency, migrations
from reconciler.pools import leases
from reconciler.runs import launch
from reconciler.runs.paths import RunPaths, run_directory
from reconciler.runs.spec import RunSpec
from reconciler.settings import Settings
from reconciler.work import worker

# Without anything but what every interpreter has loaded: it starts in no time.
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
    """The real one, after the host was told what it will say."""
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


def main() -> None:
    settings = Settings()
    app = application.create_app(settings, create_engine("sqlite://"))

    def prepared(own: Settings, engine: Any) -> Any:
        app.state.settings, app.state.engine = own, engine
        return app

    application.create_app = prepared
    # As long as a caller that was killed keeps its key: nobody here wants to wait for that.
    idempotency.IN_FLIGHT_S = 1
    # How often workers elsewhere renew what they hold, and hear of the end of their pool.
    leases.BEAT_S = 1.0
    vars(worker)["launch"] = _launch
    launch._spawn = _spawn
    # What a service loads when it is first asked.
    uvicorn.Config(app, log_config=None).load()
    migrations.head()
    gc.freeze()
    # Whoever has ended is gone; nobody waits for it here.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        what, _, state_dir = line.strip().partition(" ")
        child = os.fork()
        if not child:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if state_dir:
                os.environ["GPUAAS_STATE_DIR"] = state_dir
            if what in {"serve", "api"}:
                run_server(api_only=what == "api")
            else:
                run_worker()
            os._exit(0)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
