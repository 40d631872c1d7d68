"""Report of a demonstration: its steps with their results, seconds and evidence."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.demo.interruption import Interrupted

Evidence = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A step as it stands in build/demo.json; seconds are wall time."""

    name: str
    ok: bool
    seconds: float
    evidence: Evidence


class Report:
    """Steps played so far. After a failed step no further step runs."""

    def __init__(self, path: Path, console: Console) -> None:
        self._path = path
        self._console = console
        self.steps: list[Step] = []

    @property
    def ok(self) -> bool:
        return bool(self.steps) and all(step.ok for step in self.steps)

    def run(self, name: str, title: str, work: Callable[[], Evidence]) -> bool:
        """Run `work` as step `name`. Return False if this step or an earlier step failed."""
        if self.steps and not self.ok:
            return False
        self._console.print(f"[bold cyan]==>[/] [bold]{name}[/] {title}")
        began = time.monotonic()
        try:
            evidence, ok = work(), True
        except Exception as error:
            evidence, ok = {"error": f"{type(error).__name__}: {error}"}, False
        except Interrupted:
            seconds = round(time.monotonic() - began, 1)
            self.steps.append(Step(name, False, seconds, {"error": "interrupted"}))
            self.save()
            raise
        seconds = round(time.monotonic() - began, 1)
        self.steps.append(Step(name, ok, seconds, evidence))
        mark = "[green]ok[/]" if ok else "[red]failed[/]"
        self._console.print(f"    {mark} in {seconds} s", highlight=False)
        if not ok:
            self._console.print(f"    {evidence['error']}", style="red", soft_wrap=True)
        self.save()
        return ok

    def say(self, line: str) -> None:
        """Print a line below the steps."""
        self._console.print(line, style="red", highlight=False, soft_wrap=True)

    def save(self) -> None:
        document = {"steps": [asdict(step) for step in self.steps], "ok": self.ok}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(document, indent=1, default=str) + "\n")

    def table(self, summary: Callable[[Step], str]) -> Table:
        table = Table(title="What happened")
        table.add_column("step")
        table.add_column("result")
        table.add_column("seconds", justify="right")
        table.add_column("evidence")
        for step in self.steps:
            mark = "[green]ok[/]" if step.ok else "[red]failed[/]"
            table.add_row(step.name, mark, f"{step.seconds:.1f}", summary(step))
        return table
