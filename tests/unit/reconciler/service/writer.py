"""A process that writes whenever it leads: `python -m ….writer <database> <fenced|free>`.

Between the look at its term and the write it takes its time, as a loop does that reads and
decides. Stopped there and resumed after its term has gone, it goes on to write.
"""

from __future__ import annotations

import sys
import time

from sqlalchemy import exc

from reconciler.db import journal
from reconciler.db.engine import open_engine, transaction
from reconciler.db.leader import Deposed, led_by
from reconciler.service.process import Heartbeat

SHORT_TERM_S = 0.25


def main(url: str, manner: str) -> None:
    engine = open_engine(url)
    heartbeat = Heartbeat(engine, lambda: ["loops"], term_s=SHORT_TERM_S)
    heartbeat.start()
    while True:
        term = heartbeat.term()
        time.sleep(0.015)
        if term is None:
            continue
        try:
            with transaction(led_by(engine, term) if manner == "fenced" else engine) as conn:
                journal.emit(conn, "written", "epoch", str(term.epoch), payload={})
        except (Deposed, exc.DBAPIError):
            continue


if __name__ == "__main__":
    main(*sys.argv[1:])
