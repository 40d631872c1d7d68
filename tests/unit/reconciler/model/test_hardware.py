"""Hardware of a node: its own values override those of the shared profile."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from reconciler.model import hardware
from reconciler.model.errors import Problem
from reconciler.profiles import hardware_profile, profile_offers

PROFILES = Path(__file__).parents[4] / "profiles"
PROFILE: dict[str, Any] = {
    "name": "h200",
    "fabric": {"ipoib": True, "site_address": "", "route": "10.20.0.0/16"},
    "vm": {"mgmt_attachment": "tap"},
}


@pytest.mark.covers("HOST-7")
def test_the_nodes_address_goes_over_the_profile_and_the_route_stays_the_sites() -> None:
    before = copy.deepcopy(PROFILE)
    node = {"fabric_interface": "ibp65s0", "fabric_address": "10.20.0.7/16"}
    assert hardware.node_profile(PROFILE, node)["fabric"] == {
        "ipoib": True,
        "interface": "ibp65s0",
        "site_address": "10.20.0.7/16",
        "route": "10.20.0.0/16",
    }
    # All nodes share the profile object.
    assert before == PROFILE
    assert hardware.node_profile(PROFILE, {"fabric_interface": "", "fabric_address": ""}) == PROFILE


@pytest.mark.covers("HOST-7")
def test_an_attachment_that_no_host_can_do_is_refused_by_name(tmp_path: Path) -> None:
    profile = yaml.safe_load((PROFILES / "lab.yml").read_text())
    profile["vm"]["mgmt_attachment"] = "vf_representor"
    (tmp_path / "bf3.yml").write_text(yaml.safe_dump(profile))
    for _again in range(2):
        with pytest.raises(Problem) as refused:
            hardware_profile(tmp_path, "bf3")
        assert refused.value.code == "mgmt_attachment_unsupported"
        assert refused.value.found == "vf_representor in the hardware profile bf3"
    del profile["vm"]["mgmt_attachment"]
    hardware.check(profile, "bf3")


@pytest.mark.covers("HOST-7")
@pytest.mark.parametrize("section", ["gpu", "fabric", "nvme", "network", "vm", "deadlines"])
def test_a_profile_without_a_section_is_not_used(tmp_path: Path, section: str) -> None:
    """A task that reads the section would fail in the middle of its work."""
    profile = yaml.safe_load((PROFILES / "lab.yml").read_text())
    del profile[section]
    for name, wrong in {"none": {}, "empty": {section: None}, "list": {section: ["x"]}}.items():
        (tmp_path / f"{name}.yml").write_text(yaml.safe_dump(profile | wrong))
        with pytest.raises(Problem, match="profile_unknown") as refused:
            hardware_profile(tmp_path, name)
        assert refused.value.found == f"no section {section}"


@pytest.mark.covers("HOST-7")
def test_a_folder_of_profiles_that_cannot_be_read_is_not_empty(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    assert profile_offers(folder) == {}
    folder.symlink_to("profiles")
    with pytest.raises(OSError, match="symbolic links"):
        profile_offers(folder)


def test_a_profile_that_a_node_takes_up_says_what_its_fabric_speaks(tmp_path: Path) -> None:
    """An older profile without it is read all the same: its nodes are still to be given back."""
    profile = yaml.safe_load((PROFILES / "lab.yml").read_text())
    hardware.check_new(profile, "lab")
    del profile["fabric"]["link"]
    (tmp_path / "old.yml").write_text(yaml.safe_dump(profile))
    read = hardware_profile(tmp_path, "old")
    with pytest.raises(Problem, match="fabric_link_missing") as refused:
        hardware.check_new(read, "old")
    assert "old" in refused.value.found
    hardware.check_new({"fabric": profile["fabric"] | {"pf_ids": []}}, "none")


@pytest.mark.covers("SLICE-3")
@pytest.mark.parametrize(
    ("runtime", "taken"),
    [
        ({"source": "cloud_init", "driver": "580-server-open"}, False),
        ({"source": "cloud_init", "rdma": True, "probes": {}}, False),
        ({"source": "cloud_init", "driver": "edu", "probes": {"gpu_compute": 60}}, True),
        ({"source": "cloud_init", "tuning": True}, True),
        ({"source": "baked", "driver": "580-server-open"}, True),
    ],
)
def test_a_runtime_that_guests_install_is_proven(runtime: dict[str, Any], taken: bool) -> None:
    profile = {"vm": {"guest_runtime": runtime}}
    if taken:
        hardware.check_new(profile, "lab")
        return
    with pytest.raises(Problem, match="runtime_unproven") as refused:
        hardware.check_new(profile, "lab")
    assert "name the probes" in refused.value.remedy


@pytest.mark.covers("ECO-3")
@pytest.mark.parametrize(
    "text",
    [
        *(None, 7, "", "  ", "Unknown", "0", "00000000", "....", "To Be Filled By O.E.M.", "N/A"),
        *("Default  string", "System Serial Number", "not specified", "XXXXXXX", "123456789"),
    ],
)
def test_a_serial_number_that_nobody_has_set_is_unknown(text: object) -> None:
    assert hardware.serial_number(text) == ""


@pytest.mark.covers("ECO-3")
def test_serial_numbers_are_compared_without_case_and_spaces() -> None:
    assert hardware.serial_number(" 7xk2p43 ") == hardware.serial_number("7XK2P43") == "7XK2P43"
