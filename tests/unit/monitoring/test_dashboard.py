"""The dashboard: each expression is PromQL, and each metric is in a scrape of a running service.

Labels, too, by which dashboard and alerts select or group.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from reconciler.model.pools import PoolState
from reconciler.model.states import HealthState, NodeState, SlotState
from tests.bench.fleet.service import free_port
from tests.unit.monitoring.test_alerts import PROMTOOL, ROOT, promtool, rules
from tests.unit.reconciler.api.conftest import databases, selling
from tests.unit.reconciler.api.stack import Stack
from tests.unit.reconciler.console.full_site import full_site
from tests.unit.reconciler.service.service import serving, until

DASHBOARD = ROOT / "monitoring" / "grafana" / "gpuaas.json"
METRIC = re.compile(r"\b(?:gpuaas|gpu_orchestrator|process)_[a-z0-9_]+")
SELECTOR = re.compile(rf"({METRIC.pattern})(?:{{(.*?)}})?")
# A scrape shows only states in use.
STATES: dict[str, dict[str, type[StrEnum]]] = {
    "gpuaas_slots": {"status": SlotState, "health_state": HealthState},
    "gpuaas_nodes": {"state": NodeState},
    "gpu_orchestrator_worker_pools": {"state": PoolState},
}

__all__ = ["databases", "selling"]

pytestmark = pytest.mark.covers("ORCH-6")


# Metrics of a site that uses NetBox or MAAS.
LATER = {f"gpuaas_{name}_{what}" for name in ("netbox", "maas") for what in ("complete", "seconds")}


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


@pytest.mark.skipif(not PROMTOOL.exists(), reason="scripts/setup --tests installs promtool")
def test_each_expression_is_valid(tmp_path: Path) -> None:
    # promtool reads expressions of rules. Grafana fills in the interval.
    records = [
        {"record": f"panel:{number}", "expr": text.replace("$__rate_interval", "5m")}
        for number, text in enumerate(expressions())
    ]
    file = tmp_path / "dashboard.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": records}]}))
    assert f"{len(records)} rules found" in promtool("check", "rules", str(file))


def test_each_metric_is_in_a_scrape(tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    with serving(tmp_path, GPUAAS_OPERATOR_LISTEN=listen) as service:
        service.start()
        until(service.ready)
        scrape = httpx.get(f"http://{listen}/metrics", trust_env=False, timeout=60).text
    # Families that have no value yet are named by their comment, counters with their suffix.
    names = set(re.findall(r"^(?:# TYPE )?([a-z_]+)", scrape, re.MULTILINE))
    alerts = [str(rule["expr"]) for rule in rules().values()]
    used = {name for text in (*expressions(), *alerts) for name in METRIC.findall(text)}
    assert len(used) > 25
    assert used - names == LATER


def test_each_expression_selects_and_groups_by_labels_of_a_scrape(
    selling: Stack, tmp_path: Path
) -> None:
    full_site(selling, tmp_path)
    scrape = selling.client("admin", base="/").get("metrics").text
    samples: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(scrape):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample.labels)
    panels = json.loads(DASHBOARD.read_text())["panels"]
    targets: list[dict[str, Any]] = [
        target for panel in panels for target in panel.get("targets", ())
    ]
    assert len(targets) > 30
    targets += rules().values()
    without = set()
    for target in targets:
        text = target["expr"]
        grouped = set(re.findall(r"\w+", " ".join(re.findall(r"\bby \((.*?)\)", text))))
        for name, given in SELECTOR.findall(text):
            selected = dict(re.findall(r'(\w+)="(.*?)"', given))
            assert len(selected) == given.count("="), text
            shown = samples.get(name, [])
            if not shown:
                without.add(name)
            for labels in shown:
                assert not (grouped | set(selected)) - set(labels), (text, labels)
            for label, value in selected.items():
                states = STATES.get(name, {}).get(label, ())
                assert value in {*(labels[label] for labels in shown), *states}, text
        # Prometheus adds the instance.
        legend = set(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))
        assert legend <= (grouped or {"instance"}), target
    # Redis has its own test, and so have NetBox, MAAS and the first certificate's end.
    exceptions = {"gpu_orchestrator_stream_length", "gpuaas_host_certificate_seconds"}
    assert without == exceptions | LATER


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert max(x for x, _ in cells) < 24 and not cells & taken, panel["title"]
        taken |= cells
