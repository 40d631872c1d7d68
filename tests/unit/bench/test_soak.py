"""The soak test of jobs, for some seconds and with faults that need no lease to run out."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path

import pytest

from tests.bench.soak import begin, percentile, schedule

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.covers("ORCH-7")


@pytest.mark.long
def test_a_short_soak_loses_no_job_and_leaves_a_line_per_second_and_a_picture(
    tmp_path: Path,
) -> None:
    command = [ROOT / "scripts" / "perf" / "orchestrator_soak.sh", "--output", tmp_path]
    load = ["--seconds", "8", "--rate", "10", "--workers", "1"]
    faults = ["--faults", "1:flush,2:poison,4:drain"]
    done = subprocess.run(
        [*command, *load, *faults], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dead_letter 20" in done.stdout
    with (tmp_path / "soak.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["second"] for row in rows] == [str(second) for second in range(len(rows))]
    assert len(rows) >= 8
    assert [row["fault"] for row in rows if row["fault"]] == ["flush", "poison", "drain"]
    counted = {name: sum(int(row[name]) for row in rows) for name in ("offered", "done")}
    assert counted["offered"] == counted["done"] + 20 > 30
    assert f"done {counted['done']}," in done.stdout
    assert max(float(row["p99_ms"] or 0) for row in rows) > 0
    assert float(rows[0]["memory_mib"]) > 20
    assert (tmp_path / "soak.svg").read_bytes().rstrip().endswith(b"</svg>")


def test_percentiles_and_the_schedule() -> None:
    values = [float(number) for number in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (50.0, 99.0)
    assert (percentile([7.0], 0.99), percentile([], 0.5)) == (7.0, "")
    assert schedule("0.5:kill,7:flush", 60) == {30: "kill", 7: "flush"}
    for unplayed in ("1:flood", "7:kill,7:flush", "60:kill", "-1:kill", "kill"):
        with pytest.raises(ValueError, match=r"found|float"):
            schedule(unplayed, 60)


def test_an_error_of_a_thread_is_kept() -> None:
    errors: list[str] = []
    begin(errors, int, "none").join()
    assert len(errors) == 1 and "int none: ValueError" in errors[0]
