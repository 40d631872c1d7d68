"""Alert rules, played by promtool: each fires for what it is for, and not for a little less.

Each part of each rule is needed: without it, the rule's own cases fail.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
ALERTS = ROOT / "monitoring" / "alerts"
PROMTOOL = Path(sys.executable).with_name("promtool")

pytestmark = [
    pytest.mark.covers("ORCH-6"),
    pytest.mark.skipif(not PROMTOOL.exists(), reason="scripts/setup --tests installs promtool"),
]

ORCHESTRATOR = "gpu_orchestrator"
# For each alert: the time of the verdict, samples a minute apart that fire it, and some that do
# not. `A+BxN`: N further samples, each higher by B. What fires does not yet do so a minute before
# the rule's `for` is over.
Samples = dict[str, str]
CASES: dict[str, tuple[str, *tuple[Samples, ...]]] = {
    "JobsPending": (
        "6m",
        *(
            {
                f"{ORCHESTRATOR}_pending_jobs": pending,
                f"{ORCHESTRATOR}_delayed_jobs": "10x6",
                f'{ORCHESTRATOR}_mode{{mode="normal"}}': normal,
                f'{ORCHESTRATOR}_mode{{mode="drain"}}': drain,
            }
            for pending, normal, drain in (
                ("111x6", "1x6", "0x6"),
                ("111x3 110x3", "1x6", "0x6"),
                ("111x6", "0x6", "1x6"),
            )
        ),
    ),
    "JobsWithoutWorker": (
        "11m",
        {
            f"{ORCHESTRATOR}_pending_jobs": "4x11",
            f"{ORCHESTRATOR}_delayed_jobs": "3x11",
            f"{ORCHESTRATOR}_running_jobs": "0x11",
            f'{ORCHESTRATOR}_mode{{mode="normal"}}': "1x11",
        },
        *(
            {
                f"{ORCHESTRATOR}_pending_jobs": "4x11",
                f"{ORCHESTRATOR}_delayed_jobs": delayed,
                f"{ORCHESTRATOR}_running_jobs": running,
                f'{ORCHESTRATOR}_mode{{mode="normal"}}': normal,
                f'{ORCHESTRATOR}_mode{{mode="drain"}}': drain,
            }
            for delayed, running, normal, drain in (
                ("3x11", "0x11", "0x11", "1x11"),
                ("3x11", "1x11", "1x11", "0x11"),
                ("4x11", "0x11", "1x11", "0x11"),
            )
        ),
    ),
    "JobsUnserved": (
        "11m",
        *(
            {
                f"{ORCHESTRATOR}_unserved_jobs": unserved,
                f'{ORCHESTRATOR}_mode{{mode="normal"}}': normal,
                f'{ORCHESTRATOR}_mode{{mode="drain"}}': drain,
            }
            for unserved, normal, drain in (
                ("1x11", "1x11", "0x11"),
                ("1x11", "0x11", "1x11"),
                ("0x11", "1x11", "0x11"),
            )
        ),
    ),
    "ReclaimerErrors": (
        "10m",
        {f"{ORCHESTRATOR}_reclaimer_errors_total": "5x8 6x3"},
        {f"{ORCHESTRATOR}_reclaimer_errors_total": "5x11"},
    ),
    "JobsReclaimed": (
        "15m",
        {f"{ORCHESTRATOR}_reclaimed_total": "0+1x15"},
        {f"{ORCHESTRATOR}_reclaimed_total": "0+0.5x15"},
    ),
    "DeadLettersGrow": (
        "15m",
        {f"{ORCHESTRATOR}_dlq_length": "3+1x15"},
        {f"{ORCHESTRATOR}_dlq_length": "900+0.2x15"},
    ),
    "JobRetries": (
        "10m",
        {f"{ORCHESTRATOR}_job_retries_total": "0+3x10"},
        {f"{ORCHESTRATOR}_job_retries_total": "0+1x10"},
    ),
    "HintsGrow": (
        "10m",
        {f"{ORCHESTRATOR}_stream_length": "0+200x10"},
        {f"{ORCHESTRATOR}_stream_length": "5000+10x10"},
    ),
    "PoolEvictions": (
        "15m",
        {f"{ORCHESTRATOR}_worker_pool_evictions_total": "2x10 3x5"},
        {f"{ORCHESTRATOR}_worker_pool_evictions_total": "2x15"},
    ),
    "PoolFailed": (
        "1m",
        {f'{ORCHESTRATOR}_worker_pools{{state="failed"}}': "1x1"},
        {
            f'{ORCHESTRATOR}_worker_pools{{state="failed"}}': "0x1",
            f'{ORCHESTRATOR}_worker_pools{{state="running"}}': "1x1",
        },
    ),
    "LeasesSaturated": (
        "16m",
        {f"{ORCHESTRATOR}_leases": "8x16", f"{ORCHESTRATOR}_devices": "8x16"},
        {f"{ORCHESTRATOR}_leases": "7x16", f"{ORCHESTRATOR}_devices": "8x16"},
        # A site without GPUs.
        {f"{ORCHESTRATOR}_leases": "0x16", f"{ORCHESTRATOR}_devices": "0x16"},
    ),
    "PoolMemoryHigh": (
        "6m",
        {f'{ORCHESTRATOR}_nvml_mem_util_pct{{pool="a",gpu="g"}}': "86x6"},
        {f'{ORCHESTRATOR}_nvml_mem_util_pct{{pool="a",gpu="g"}}': "85x6"},
    ),
    "PoolMemoryCritical": (
        "2m",
        {f'{ORCHESTRATOR}_nvml_mem_util_pct{{pool="a",gpu="g"}}': "91x2"},
        {f'{ORCHESTRATOR}_nvml_mem_util_pct{{pool="a",gpu="g"}}': "90x2"},
    ),
    "MaintenanceLong": (
        "1m",
        {
            f'{ORCHESTRATOR}_mode{{mode="normal"}}': "0x2",
            f'{ORCHESTRATOR}_mode{{mode="drained"}}': "1x2",
            f"{ORCHESTRATOR}_mode_seconds": "7200+60x2",
        },
        {
            f'{ORCHESTRATOR}_mode{{mode="normal"}}': "1x2",
            f"{ORCHESTRATOR}_mode_seconds": "7200+60x2",
        },
        {
            f'{ORCHESTRATOR}_mode{{mode="normal"}}': "0x2",
            f"{ORCHESTRATOR}_mode_seconds": "7140+60x2",
        },
    ),
    "NoMetrics": ("6m", {"up": "1x6"}, {"gpuaas_leader": "1x6"}),
    "NoLeader": ("2m", {"gpuaas_leader": "0x2"}, {"gpuaas_leader": "0 1x2"}),
    "LeaderChanges": (
        "30m",
        {"gpuaas_leader_epoch": "1+0.2x30"},
        {"gpuaas_leader_epoch": "90x15 92x16"},
    ),
    "NoWorker": (
        "3m",
        {
            'gpuaas_service_processes{role="worker"}': "0x3",
            'gpuaas_service_processes{role="api"}': "1x3",
        },
        {'gpuaas_service_processes{role="worker"}': "1x3"},
    ),
    "TasksWait": (
        "6m",
        {"gpuaas_task_wait_seconds": "601+60x6"},
        {"gpuaas_task_wait_seconds": "600x6"},
    ),
    "TasksOverdue": ("6m", {"gpuaas_tasks_overdue": "1x6"}, {"gpuaas_tasks_overdue": "1x4 0x2"}),
    "SlotsBlocked": (
        "31m",
        {'gpuaas_slots{status="cleanup_blocked",health_state="unknown"}': "1x31"},
        {
            'gpuaas_slots{status="cleanup_blocked",health_state="unknown"}': "0x6 1x25",
            'gpuaas_slots{status="cleanup",health_state="unknown"}': "1x31",
        },
    ),
    "SlotsFailed": (
        "16m",
        {'gpuaas_slots{status="disabled",health_state="failed"}': "1x16"},
        {'gpuaas_slots{status="disabled",health_state="degraded"}': "1x16"},
    ),
    "NothingToSell": (
        "61m",
        {'gpuaas_slots{status="active",health_state="healthy"}': "8x61"},
        {
            'gpuaas_slots{status="active",health_state="healthy"}': "7x61",
            'gpuaas_slots{status="available",health_state="healthy"}': "1x61",
        },
        # A site without slots.
        {"up": "1x61"},
    ),
    "HostUnreachable": (
        "11m",
        {'gpuaas_nodes{state="unreachable",mode="slice"}': "1x11"},
        {'gpuaas_nodes{state="ready",mode="slice"}': "9x11"},
    ),
    "HostDrifted": (
        "16m",
        {'gpuaas_drift_differences{severity="failed"}': "1x16"},
        {'gpuaas_drift_differences{severity="degraded"}': "1x16"},
    ),
    "DriftUnchecked": (
        "11m",
        {"gpuaas_drift_seconds": "1801+60x11"},
        {"gpuaas_drift_seconds": "1800x11"},
    ),
    "HostRepairsItself": (
        "60m",
        {"gpuaas_drift_repairs": "4+0.3x60"},
        {"gpuaas_drift_repairs": "400+0.1x60"},
    ),
    "GuestPacketsRefused": (
        "21m",
        {'gpuaas_refused_packets{kind="packet_rate"}': "0+72000x21"},
        {'gpuaas_refused_packets{kind="packet_rate"}': "0+50000x21"},
    ),
    "HostCertificateEnds": (
        "11m",
        {"gpuaas_host_certificate_seconds": "1209599-60x11"},
        {"gpuaas_host_certificate_seconds": "1296000-60x11"},
    ),
    **{
        alert: (
            "15m",
            {f"gpuaas_{name}_complete": "0x15", f"gpuaas_{name}_seconds": "40x15"},
            # The last of a site that has switched it off.
            {f"gpuaas_{name}_complete": "0x15", f"gpuaas_{name}_seconds": "3300+60x15"},
            {f"gpuaas_{name}_complete": "1x15", f"gpuaas_{name}_seconds": "40x15"},
        )
        for alert, name in (("NetBoxNotCompared", "netbox"), ("MaasNotCompared", "maas"))
    },
    "HostCertificateExpired": (
        "1m",
        {'gpuaas_host_certificates{validity="expired"}': "1x1"},
        {
            'gpuaas_host_certificates{validity="expired"}': "0x1",
            'gpuaas_host_certificates{validity="valid"}': "8x1",
        },
    ),
}


@cache
def rules() -> dict[str, dict[str, Any]]:
    files = [yaml.safe_load(file.read_text()) for file in sorted(ALERTS.glob("*.yml"))]
    return {
        rule["alert"]: rule for file in files for group in file["groups"] for rule in group["rules"]
    }


def promtool(*words: str) -> str:
    done = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    defined = rules()
    assert set(defined) == set(CASES)
    files = [str(file) for file in ALERTS.glob("*.yml")]
    promtool("check", "rules", *files)
    tests = [test for rule in defined.values() for test in _tests(rule)]
    cases = tmp_path / "cases.yml"
    cases.write_text(yaml.safe_dump({"rule_files": files, "tests": tests}))
    promtool("test", "rules", str(cases))


def test_no_condition_time_or_label_of_a_rule_can_go_unnoticed(tmp_path: Path) -> None:
    lessened = [(part, less) for rule in rules().values() for part, less in _lessened(rule)]
    assert len(lessened) > 40
    written = {}
    for number, (part, rule) in enumerate(lessened):
        file = tmp_path / f"{number}.yml"
        file.write_text(yaml.safe_dump({"groups": [{"name": "less", "rules": [rule]}]}))
        cases = {"rule_files": [str(file)], "tests": _tests(rule)}
        written[file] = tmp_path / f"{number}-cases.yml", f"{rule['alert']} without {part}"
        written[file][0].write_text(yaml.safe_dump(cases))
    promtool("check", "rules", *map(str, written))
    with ThreadPoolExecutor(4) as threads:
        passed = list(threads.map(lambda each: _pass(each[0]), written.values()))
    names = [name for _, name in written.values()]
    unnoticed = [name for name, good in zip(names, passed, strict=True) if good]
    assert not unnoticed, unnoticed


def _pass(cases: Path) -> bool:
    done = subprocess.run([PROMTOOL, "test", "rules", cases], capture_output=True, check=False)
    return done.returncode == 0


def _lessened(rule: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A rule without one of its conditions, without its time, or without the labels of a metric."""
    text = rule["expr"]
    conditions = text.split(" and ")
    for at, condition in enumerate(conditions) if len(conditions) > 1 else ():
        yield condition, rule | {"expr": " and ".join(conditions[:at] + conditions[at + 1 :])}
    for labels in re.finditer(r"\{.*?\}", text):
        yield labels[0], rule | {"expr": text[: labels.start()] + text[labels.end() :]}
    if "for" in rule:
        yield "for", {name: value for name, value in rule.items() if name != "for"}


def _tests(rule: dict[str, Any]) -> list[dict[str, Any]]:
    """The cases of an alert, as promtool reads them."""
    name = rule["alert"]
    at, firing, *quiet = CASES[name]
    labels = {**rule["labels"], **_kept_labels(rule, firing)}
    alert = {"exp_labels": labels, "exp_annotations": rule["annotations"]}
    # That of the file, for a rule without its own.
    lasts = int(rules()[name].get("for", "0m").replace("1h", "60m").rstrip("m"))
    pending = [(f"{lasts - 1}m", [])] if lasts else []
    verdicts = [[*pending, (at, [alert])], *([(at, [])] for _ in quiet)]
    return [
        {
            "interval": "1m",
            # Two API processes show the same values.
            "input_series": [
                {"series": _of_instance(metric, instance), "values": values}
                for metric, values in series.items()
                for instance in ("a", "b")
            ],
            "alert_rule_test": [
                {"eval_time": time, "alertname": name, "exp_alerts": expected}
                for time, expected in of_series
            ],
        }
        for series, of_series in zip((firing, *quiet), verdicts, strict=True)
    ]


def test_actions_name_pages_that_exist() -> None:
    for name, rule in rules().items():
        for word in rule["annotations"]["action"].split():
            if word.startswith("docs/"):
                assert (ROOT / word.strip("().,")).is_file(), name


def _of_instance(metric: str, instance: str) -> str:
    name, _, labels = metric.rstrip("}").partition("{")
    return f'{name}{{instance="{instance}"{"," + labels if labels else ""}}}'


def _kept_labels(rule: dict[str, Any], firing: Samples) -> dict[str, str]:
    """Labels that the expression keeps, of the only series that has them."""
    if not rule["expr"].startswith("max by"):
        return {}
    (series,) = firing
    return dict(re.findall(r'(\w+)="(\w+)"', series))
