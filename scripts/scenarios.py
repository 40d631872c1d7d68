"""Tables of the README: when each molecule scenario and each ansible-core was last played.

    python -m scripts.scenarios [--write | --play SCENARIO]

A run that succeeds adds its row to a file in build. With `--write` the rows go into the README;
without, the tables are only printed. `make test` plays the scenario of the day among those that
took less than DAILY_S; `make test-long` plays all.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
README = ROOT / "README.md"
# Longer scenarios are for `make test-long`. The README's times were measured beside other work.
DAILY_S = 200
# The whole bootstrap, which test_upkeep.py plays in each session.
EVERY_DAY = "slice_host"


@dataclass(frozen=True)
class Table:
    """A table of the README, between marks of its name. rows: names in the first column."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]

    @property
    def _file(self) -> Path:
        return BUILD / f"{self.name}.json"

    @property
    def _head(self) -> str:
        return f"| {' | '.join(self.columns)} |\n{'|---' * len(self.columns)}|\n"

    def recorded(self) -> dict[str, list[str]]:
        """Rows of the runs on this machine."""
        return json.loads(self._file.read_text()) if self._file.exists() else {}

    def record(self, row: str, cell: str) -> None:
        """Add a run that succeeded just now. cell: the last column."""
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
        day = datetime.datetime.now(datetime.UTC).date().isoformat()
        self._file.parent.mkdir(exist_ok=True)
        self._file.write_text(json.dumps({**self.recorded(), row: [day, commit, cell]}, indent=1))

    def played(self, text: str) -> dict[str, list[str]]:
        """Day, commit and last column by row, from the README's text."""
        table = self.parts(text)[1].removeprefix(self._head)
        cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]
        return {name: rest for name, *rest in cells if all(rest)}

    def render(self, text: str, rows: dict[str, list[str]]) -> str:
        """The README's text with these rows; those without a run have empty cells."""
        before, _table, after = self.parts(text)
        lines = [f"| {' | '.join([row, *rows.get(row, ['', '', ''])])} |\n" for row in self.rows]
        return f"{before}{self._head}{''.join(lines)}{after}"

    def parts(self, text: str) -> tuple[str, str, str]:
        mark, end = f"<!-- {self.name} -->\n", f"<!-- /{self.name} -->\n"
        before, _, rest = text.partition(mark)
        table, _, after = rest.partition(end)
        return before + mark, table, end + after


SCENARIOS = Table(
    "scenarios",
    ("scenario", "last played", "commit", "seconds"),
    tuple(sorted(file.parent.name for file in ROOT.glob("molecule/*/molecule.yml"))),
)
# Releases of ansible-core, from tests/collection/releases.txt.
RELEASES = Table(
    "releases",
    ("ansible-core", "last played", "commit", "Python"),
    tuple(
        line.split()[0].partition("==")[2]
        for line in (ROOT / "tests/collection/releases.txt").read_text().splitlines()
    ),
)


def of_the_day(text: str, day: datetime.date) -> str:
    """The scenario that `make test` plays on that day; "" while none is known to be short."""
    played = SCENARIOS.played(text).items()
    short = sorted(n for n, row in played if n != EVERY_DAY and int(row[2]) < DAILY_S)
    return short[day.toordinal() % len(short)] if short else ""


def main(words: list[str]) -> int:
    if words[:1] == ["--play"]:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "molecule", "test", "-s", words[1]], check=False
        )
        if done.returncode == 0:
            SCENARIOS.record(words[1], str(round(time.monotonic() - began)))
        return done.returncode
    text = README.read_text(encoding="utf-8")
    for table in (SCENARIOS, RELEASES):
        text = table.render(text, {**table.played(text), **table.recorded()})
        sys.stdout.write(table.parts(text)[1])
    if "--write" in words:
        README.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
