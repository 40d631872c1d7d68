"""The soak test of jobs, for some seconds and with leases that a fault ends at once."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.bench.soak import begin, percentile, schedule, unexplained

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.covers("ORCH-7")


def test_a_soak_with_workers_killed_and_stopped_and_redis_away(tmp_path: Path) -> None:
    command = [ROOT / "scripts" / "perf" / "orchestrator_soak.sh", "--output", tmp_path, "--short"]
    # More than both workers do, so that each holds jobs when it is killed or stopped.
    load = ["--seconds", "5", "--rate", "20", "--work", "0.12", "--workers", "2"]
    faults = {1: "kill", 2: "stop"} | ({3: "redis"} if shutil.which("redis-server") else {})
    words = ",".join(f"{second}:{name}" for second, name in faults.items())
    done = subprocess.run(
        [*command, *load, "--faults", words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("passed: offered ")
    with (tmp_path / "soak.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {n: row["fault"] for n, row in enumerate(rows) if row["fault"]} == faults
    assert int(rows[-1]["reclaims"]) >= 2, "jobs of the killed and of the stopped worker"


def test_only_poisoned_jobs_may_fail() -> None:
    ended = {"offered": 9, "refused": 5, "pending": 0, "running": 0, "canceled": 0}
    assert unexplained({**ended, "done": 7, "dead_letter": 2}, poisoned=2) == []
    for wrong in (
        {"done": 0, "dead_letter": 9},
        {"done": 6, "dead_letter": 3},
        {"done": 8, "dead_letter": 1},
        {"done": 6, "dead_letter": 2},
        {"done": 6, "dead_letter": 2, "canceled": 1},
        {"done": 6, "dead_letter": 2, "pending": 1},
    ):
        assert unexplained({**ended, **wrong}, poisoned=2), wrong


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


def test_the_workflow_of_ones_own_runners_plays_it_and_keeps_its_results() -> None:
    file = ROOT / ".github" / "workflows" / "perf-orchestrator-soak.yml"
    workflow = yaml.safe_load(file.read_text())
    inputs = workflow["on"]["workflow_dispatch"]["inputs"]
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    for command in commands:
        program = ROOT / command.split()[0]
        assert program.name == "python" or program.is_file(), command
    (soak,) = (command for command in commands if "soak" in command.split()[0])
    options = re.findall(r'"--(\w+)"', (ROOT / "tests" / "bench" / "soak.py").read_text())
    given = dict(re.findall(r'--(\w+) "?([$\w/]+)', soak))
    assert given.keys() <= set(options) and given.keys() == {*inputs, "output"}
    assert {given[name].removeprefix("$") for name in inputs} <= job["env"].keys()
    (kept,) = (step["with"] for step in job["steps"] if "upload" in step.get("uses", ""))
    assert kept["path"] == given["output"]


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
