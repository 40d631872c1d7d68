"""Alert rules, played by promtool: each fires in its case, and not just below its threshold.

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

# For each alert: the time of the verdict, samples that fire it, and some that do not.
CASES = yaml.safe_load(Path(__file__).with_name("alert_cases.yml").read_text())


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
    """A rule without a condition, without its time, or without the labels of a metric, in turn."""
    text = rule["expr"]
    for word in ("and", "or"):
        # Not `or vector(...)`, which is the default of a metric and no condition.
        conditions = re.split(rf" {word} (?!vector\()", text)
        for at, condition in enumerate(conditions) if len(conditions) > 1 else ():
            yield (
                condition,
                rule | {"expr": f" {word} ".join(conditions[:at] + conditions[at + 1 :])},
            )
    for labels in re.finditer(r"\{.*?\}", text):
        yield labels[0], rule | {"expr": text[: labels.start()] + text[labels.end() :]}
    if "for" in rule:
        yield "for", {name: value for name, value in rule.items() if name != "for"}


def _tests(rule: dict[str, Any]) -> list[dict[str, Any]]:
    """The cases of an alert, as promtool reads them."""
    name = rule["alert"]
    at, firing, quiet = (CASES[name][part] for part in ("at", "fires", "quiet"))
    firing = firing if isinstance(firing, list) else [firing]
    labels = {**rule["labels"], **_kept_labels(rule, firing[0])}
    alert = {"exp_labels": labels, "exp_annotations": rule["annotations"]}
    # A mutant without a time of its own is judged by the file's time.
    lasts = int(rules()[name].get("for", "0m").replace("1h", "60m").rstrip("m"))
    pending = [(f"{lasts - 1}m", [])] if lasts else []
    verdicts = [*([*pending, (at, [alert])] for _ in firing), *([(at, [])] for _ in quiet)]
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
        for series, of_series in zip((*firing, *quiet), verdicts, strict=True)
    ]


def test_actions_name_pages_that_exist() -> None:
    for name, rule in rules().items():
        for word in rule["annotations"]["action"].split():
            if word.startswith("docs/"):
                assert (ROOT / word.strip("().,")).is_file(), name


def _of_instance(metric: str, instance: str) -> str:
    name, _, labels = metric.rstrip("}").partition("{")
    return f'{name}{{instance="{instance}"{"," + labels if labels else ""}}}'


def _kept_labels(rule: dict[str, Any], firing: dict[str, str]) -> dict[str, str]:
    """Labels that the expression keeps, of the only series that has them."""
    if not rule["expr"].startswith("max by"):
        return {}
    (series,) = firing
    return dict(re.findall(r'(\w+)="(\w+)"', series))
