"""Playbooks against the run contract: their variables and their results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _module_cache

from reconciler.lifecycle import host
from reconciler.model.states import TaskKind
from reconciler.runs import contract
from reconciler.work import kinds
from tests.playbooks import FOLDER, text

RESULT = contract.schema("result")
SPECS = yaml.safe_load((FOLDER / "vars" / "argument_specs.yml").read_text())["argument_specs"]
# Variables that the reconciler always sends and that a run by hand may leave out.
BY_HAND = {"slice_run", "slice_profile", "slice_apply"}


def tasks(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, list):
        for item in node:
            yield from tasks(item)
    elif isinstance(node, dict):
        yield node
        for key in ("tasks", "pre_tasks", "post_tasks", "block", "rescue", "always"):
            yield from tasks(node.get(key))


def results(playbook: str) -> list[dict[str, Any]]:
    """Return the variables of each result that the playbook gives."""
    plays = yaml.safe_load((FOLDER / f"{playbook}.yml").read_text())
    return [
        task["vars"]
        for task in tasks(plays)
        if "tasks/result.yml" in str(task.get("ansible.builtin.include_tasks"))
    ]


def promised(playbook: str) -> set[str]:
    """Return the evidence that the reconciler reads when this playbook succeeds."""
    for rule in RESULT["allOf"]:
        if rule["if"]["properties"].get("playbook") == {"const": playbook}:
            return set(rule["then"]["properties"]["evidence"]["required"])
    return set()


def imported(path: Path) -> list[str]:
    """Return the imported playbooks; [] for a playbook with its own plays, which is a run."""
    plays = yaml.safe_load(path.read_text())
    names = [str(play.get("ansible.builtin.import_playbook", "")) for play in plays]
    return [name.removesuffix(".yml") for name in names] if all(names) else []


def test_each_schema_has_its_playbook_and_the_reverse() -> None:
    runs = {path.stem for path in FOLDER.glob("*.yml") if not imported(path)}
    assert runs == set(contract.PLAYBOOKS)


@pytest.mark.covers("HOST-15")
def test_the_way_forth_by_hand_is_what_the_one_call_chains() -> None:
    chain = (TaskKind.NODE_BOOTSTRAP, *host.TO_SLICE)
    played = imported(FOLDER / "convert_to_slice.yml")
    assert played == [kinds.HANDLERS[kind].playbook for kind in chain]


@pytest.mark.parametrize("playbook", contract.PLAYBOOKS)
def test_a_playbook_says_how_it_ended_either_way(playbook: str) -> None:
    outcomes = results(playbook)
    assert {result["result_playbook"] for result in outcomes} == {playbook}
    assert {str(result["result_ok"]) for result in outcomes} >= {"True", "False"}


@pytest.mark.parametrize("playbook", contract.PLAYBOOKS)
def test_success_comes_with_the_evidence_that_is_read(playbook: str) -> None:
    for result in results(playbook):
        evidence = result["result_evidence"]
        if result["result_ok"] is True and isinstance(evidence, dict):
            assert promised(playbook) <= set(evidence)


@pytest.mark.parametrize("playbook", contract.PLAYBOOKS)
def test_evidence_holds_only_what_the_contract_names(playbook: str) -> None:
    """With any other name, every result of the playbook would violate the contract."""
    (names,) = [
        set(rule["then"]["properties"]["evidence"]["propertyNames"]["enum"])
        for rule in RESULT["allOf"]
        if rule["if"]["properties"] == {"playbook": {"const": playbook}}
        and "maxBytes" in rule["then"]["properties"]["evidence"]
    ]
    play = yaml.safe_load((FOLDER / f"{playbook}.yml").read_text())[0]
    used = set()
    for result in results(playbook):
        evidence = result["result_evidence"]
        if isinstance(evidence, str):
            evidence = play["vars"][evidence.strip("{ }")]
        used |= set(evidence)
    assert used == names


@pytest.mark.parametrize("playbook", contract.PLAYBOOKS)
def test_a_playbook_uses_what_it_is_given(playbook: str) -> None:
    given = set(contract.schema(playbook)["required"]) - {"slice_run", "slice_profile"}
    assert {name for name in given if not re.search(rf"\b{name}\b", text(playbook))} == set()


@pytest.mark.parametrize("playbook", contract.PLAYBOOKS)
def test_every_play_gives_its_modules_the_node_and_the_host_s_compiled_code(playbook: str) -> None:
    for play in yaml.safe_load((FOLDER / f"{playbook}.yml").read_text()):
        if "hosts" in play:
            node = "{{ (slice_run | default({})).node_id | default('') }}"
            # A tenant who is root has these machines, which never have the cache.
            alone = ("provision_baremetal", "release_baremetal")
            cached = {} if playbook in alone else {"PYTHONPATH": _module_cache.LIBRARY}
            assert play["environment"] == {"GPUAAS_RUN_NODE": node, **cached}


def test_playbooks_that_call_modules_have_an_argument_specification() -> None:
    plays = {
        name: yaml.safe_load((FOLDER / f"{name}.yml").read_text())[0] for name in contract.PLAYBOOKS
    }
    assert set(SPECS) == {name for name, play in plays.items() if "vars_files" in play}
    assert {name for name, play in plays.items() if "slice_profile" in play.get("vars", {})} == {
        *(set(plays) - set(SPECS))
    }
    for name in SPECS:
        check = plays[name]["tasks"][0]["ansible.builtin.validate_argument_spec"]
        assert check == {"argument_spec": f"{{{{ argument_specs.{name}.options }}}}"}


@pytest.mark.parametrize("playbook", SPECS)
def test_an_argument_specification_names_the_variables_of_the_contract(playbook: str) -> None:
    schema, options = contract.schema(playbook), SPECS[playbook]["options"]
    required = {name for name, option in options.items() if option.get("required")}
    assert set(options) == set(schema["properties"])
    assert required <= set(schema["required"])
    assert set(schema["required"]) - required <= BY_HAND
    content = text(playbook)
    optional = {name for name in set(options) - required if re.search(rf"\b{name}\b", content)}
    assert {name for name in optional if f"{name} | default(" not in content} == set()


@pytest.mark.covers("I10", "SLICE-6", "SLICE-9")
def test_a_release_shuts_everybody_out_before_the_machine_stops_and_wipes_last() -> None:
    """Public ingress and the gateway's way end first: the address soon belongs to another guest."""
    plays = yaml.safe_load((FOLDER / "release_slice.yml").read_text())
    modules = [
        name.removeprefix("gpuaas.slice.")
        for task in tasks(plays)
        for name in task
        if name.startswith("gpuaas.slice.slice_") or name.endswith(("nvme_wipe", "gpu_reset"))
    ]
    order = ["slice_lease", "slice_relay", "slice_ingress", "slice_vm", "nvme_wipe", "gpu_reset"]
    assert modules[: len(order)] == order
