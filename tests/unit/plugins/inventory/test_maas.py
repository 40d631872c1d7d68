"""The inventory of MAAS, against the stand-in for MAAS and against hostile answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.standin.maas import TOKEN
from tests.standin.service import standing
from tests.unit.plugins.inventory.inventories import (
    ROOT,
    answering,
    deployed,
    hosts,
    inventory,
    machine,
    source,
)

pytestmark = pytest.mark.covers("ECO-1", "ECO-3")


def test_deployed_machines_with_the_tag_and_an_address_of_the_site(tmp_path: Path) -> None:
    machines = [
        machine("gpu1"),
        machine("gpu2", status=4, ip_addresses=[]),
        machine("gpu3", tag_names=["virtual"]),
        machine("gpu4", ip_addresses=["172.16.0.5"]),
    ]
    options = {
        "tags": ["gpuaas-slice"],
        "networks": ["10.20.0.0/16"],
        "keyed_groups": [{"prefix": "zone", "key": "maas_zone"}],
        "compose": {"ansible_user": "'ubuntu'"},
    }
    with standing(tmp_path, "maas", TOKEN) as maas:
        maas.begin(machines=machines)
        site = {
            "GPUAAS_MAAS_URL": f"https://127.0.0.1:{maas.port}",
            "GPUAAS_MAAS_TOKEN_FILE": str(maas.token_file),
            "GPUAAS_MAAS_CA_FILE": str(maas.ca_file),
        }
        done = inventory(
            source(tmp_path, "maas", token_file=str(maas.token_file), **options), **site
        )
        record = maas.record()
    listed = hosts(done)
    assert set(listed) == {"gpu1"}
    assert listed["gpu1"]["ansible_host"] == "10.20.0.4"
    assert listed["gpu1"]["ansible_user"] == "ubuntu"
    assert '"zone_rack_1"' in done.stdout
    assert "gpu4 is left out" in done.stderr
    assert record["violations"] == []
    assert [request["fields"] for request in record["requests"]] == [{}]


def test_awx_reads_machines_by_its_credential_and_the_variables_of_its_source(
    tmp_path: Path,
) -> None:
    """AWX renders the injectors of a type, and adds the variables to the environment."""
    document = yaml.safe_load((ROOT / "awx/controller.yml").read_text().replace("!unsafe ", ""))
    types = {item["name"]: item for item in document["controller_credential_types"]}
    injectors = types["gpuaas MAAS"]["injectors"]
    templates = ImmutableSandboxedEnvironment()
    machines = [
        machine("gpu1"),
        machine("gpu2", tag_names=["gpuaas-slice"]),
        machine("gpu3", ip_addresses=["172.16.0.5"]),
    ]
    with standing(tmp_path, "maas", TOKEN) as maas:
        maas.begin(machines=machines)
        values = {
            "url": f"https://127.0.0.1:{maas.port}",
            "key": TOKEN,
            "ca": maas.ca_file.read_text(),
        }
        files = {}
        for name, text in injectors["file"].items():
            path = tmp_path / name
            path.write_text(templates.from_string(text).render(values))
            files[name.removeprefix("template.")] = str(path)
        site = {
            name: templates.from_string(text).render(values, tower={"filename": files})
            for name, text in injectors["env"].items()
        }
        chosen = {
            "GPUAAS_MAAS_TAGS": "gpuaas-slice, virtual",
            "GPUAAS_MAAS_NETWORKS": "10.20.0.0/16",
        }
        done = inventory(ROOT / "inventory/maas.yml", **site, **chosen)
        every = inventory(ROOT / "inventory/maas.yml", **site)
    assert {name: row["ansible_host"] for name, row in hosts(done).items()} == {"gpu1": "10.20.0.4"}
    assert {"tag_gpuaas_slice", "zone_rack_1", "pool_default"} <= set(json.loads(done.stdout))
    assert set(hosts(every)) == {"gpu1", "gpu2", "gpu3"}


def test_a_hostile_answer_gives_no_host(tmp_path: Path) -> None:
    refused = {
        "twice": ([deployed("gpu1"), deployed("gpu1")], "maas_name_ambiguous"),
        "name": ([deployed("gpu1"), deployed("-oProxyCommand", system_id="a1")], "maas_invalid"),
        "number": (
            [deployed("gpu1"), deployed("127.0.0.1", system_id="a1")],
            "maas_name_ambiguous",
        ),
        "address": ([deployed("gpu1", ip_addresses=["::.::1"])], "maas_invalid"),
        "zone": ([deployed("gpu1", zone="rack")], "maas_invalid"),
        "object": ({"machines": []}, "maas_invalid"),
    }
    options = {"networks": ["10.20.0.0/16"]}
    with answering() as service:
        service.answers = {case: answer for case, (answer, _) in refused.items()}
        done = inventory(
            *(source(tmp_path, "maas", case, url=service.url(case), **options) for case in refused)
        )
    assert hosts(done) == {}
    for case, (_, code) in refused.items():
        lines = [line for line in done.stderr.splitlines() if f"{case}.maas.yml: " in line]
        assert any(f"{code}: expected" in line for line in lines), (case, done.stderr)


def test_a_machine_changes_no_connection_of_a_host_of_another_source(tmp_path: Path) -> None:
    """Ansible reaches such a host by its name, without a variable."""
    others = tmp_path / "hosts.yml"
    others.write_text("all: {hosts: {gpu1: }}\n")
    with answering() as service:
        service.answers = {"site": [deployed("gpu1"), deployed("gpu2")]}
        ours = source(tmp_path, "maas", "site", url=service.url("site"), networks=["10.20.0.0/16"])
        listed = hosts(inventory(others, ours))
    assert ["ansible_host" in listed[name] for name in ("gpu1", "gpu2")] == [False, True]
    assert listed["gpu1"]["maas_hostname"] == "gpu1"
