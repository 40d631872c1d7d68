"""Starts workers as copies of this process, in which everything is loaded: in no time."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import reconciler.db.migrations
import reconciler.pools.api_queue
import reconciler.pools.child
import reconciler.pools.hints
import reconciler.pools.worker
from reconciler.cli.main import main

LOADED = (reconciler.db.migrations, reconciler.pools.child, reconciler.pools.worker)

if __name__ == "__main__":
    # A worker that is told to end looks for a job to the end of that time.
    vars(reconciler.pools.api_queue)["_WAIT_S"] = 1
    # A busy machine keeps Redis from answering for longer.
    vars(reconciler.pools.hints).update(_TIMEOUT_S=20.0, _LIMIT_S=30.0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        words, environment, log = json.loads(line)
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
        os.environ.update(environment)
        skew, clock = float(environment.get("SKEW_S", 0)), time.time
        time.time = lambda skew=skew, clock=clock: clock() + skew
        main(words)
        sys.exit()
