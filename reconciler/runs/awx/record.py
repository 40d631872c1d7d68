"""What we know of a run's job, kept in the run's folder over any crash."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from reconciler.runs.paths import RunPaths, read_json, write_json


@dataclass
class Record:
    """One job, asked for or not yet.

    after: the newest job that AWX had before ours was asked for: ours has a higher id. posted: a
    request was sent whose end we may not know. job: its id, 0 as long as that is not known.
    timed_out: it was told to end because of its deadline.
    """

    template: int
    name: str
    after: int
    requested_at: float
    posted: bool = False
    job: int = 0
    timed_out: bool = False

    def save(self, paths: RunPaths) -> None:
        write_json(paths.root / "awx.json", asdict(self))


def load(paths: RunPaths) -> Record | None:
    document: dict[str, Any] | None = read_json(paths.root / "awx.json")
    return Record(**document) if document else None
