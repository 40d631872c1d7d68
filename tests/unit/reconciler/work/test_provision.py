"""The shape of a slice's machine, worked out from the profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reconciler.lifecycle import guest_terminal
from reconciler.model.errors import Problem
from reconciler.model.hardware import Offer
from reconciler.profiles import hardware_profile
from reconciler.work.kinds import slices as slice_kinds

PROFILES = Path(__file__).parents[4] / "profiles"


@pytest.mark.covers("HOST-7")
@pytest.mark.parametrize("limit", [None, {"rate_kbps": 2_000_000, "burst_kb": 100_000}])
def test_a_limit_of_the_profile_goes_to_the_machine(limit: dict[str, int] | None) -> None:
    profile: dict[str, Any] = hardware_profile(PROFILES, "lab")
    shape = {name: value for name, value in profile["vm"].items() if name != "mgmt_qos"}
    wanted = {"mgmt_qos": limit} if limit else {}
    machine = slice_kinds.machine_shape({**profile, "vm": {**shape, **wanted}}, 2)
    assert machine["mgmt_attachment"] == "tap"
    assert machine["nested"] is False
    assert machine["vcpus"] == 2 * profile["vm"]["vcpus_per_gpu"]
    assert machine["host_cpus"] == 0
    # Not a limit for each GPU: a slice has one management interface, however many it has.
    assert machine.get("mgmt_qos") == limit


@pytest.mark.parametrize(("nvswitches", "files"), [(False, 0), (True, 1)])
def test_a_guest_of_a_board_with_nvswitches_leaves_nvlink_alone(
    nvswitches: bool, files: int
) -> None:
    allocation = {"id": "a", "username": "tenant", "ssh_keys": [], "hostname": "slice"}
    seed = slice_kinds.seed_documents(allocation, "52:54:00:00:00:01", nvswitches=nvswitches)
    written = [file["content"] for file in seed["user_data"]["write_files"]]
    assert written.count("options nvidia NVreg_NvLinkDisable=1\n") == files


@pytest.mark.covers("P8")
def test_the_seed_lets_terminals_in_for_one_user_and_one_allocation() -> None:
    allocation = {"id": "a", "username": "tenant", "ssh_keys": [], "hostname": "slice"}
    files = guest_terminal.files("a", allocation["username"], "ssh-ed25519 AAAA", "10.100.0.1/24")
    seed = slice_kinds.seed_documents(allocation, "52:54:00:00:00:01", further=files)
    written = {each["path"]: each["content"] for each in seed["user_data"]["write_files"]}
    settings = written["/etc/ssh/sshd_config.d/60-gpuaas-terminal.conf"].split("\n", 1)
    assert settings[0] == "Match User tenant"
    principals = settings[1].partition("AuthorizedPrincipalsFile ")[2].strip()
    assert written[principals] == 'restrict,pty,from="10.100.0.1" terminal:a\n'
    assert "ssh-ed25519 AAAA\n" in written.values()
    plain = slice_kinds.seed_documents(allocation, "52:54:00:00:00:01")
    assert len(plain["user_data"]["write_files"]) == len(written) - 3


def test_what_a_profile_sells_of_a_board_with_nvswitches() -> None:
    offer = Offer.of(hardware_profile(PROFILES, "xe9680l-h200"))
    assert (offer.nvlink, offer.spans_numa) == ("unsupported", False)
    refusals = [offer.refusal(gpus) for gpus in (1, 2, 3)]
    assert [refusal and refusal.code for refusal in refusals] == [None, *["nvlink_unsupported"] * 2]
    isolated = replace(offer, nvlink="isolated")
    refusals = [isolated.refusal(gpus) for gpus in (1, 2, 3)]
    assert [refusal and refusal.code for refusal in refusals] == [None, None, "gpu_count_not_sold"]


def test_partitions_are_refused_by_name_until_they_are_built(tmp_path: Path) -> None:
    profile = (PROFILES / "xe9680l-h200.yml").read_text()
    text = profile.replace("nvlink: unsupported", "nvlink: partitions")
    (tmp_path / "xe9680l-h200.yml").write_text(text)
    with pytest.raises(Problem) as refused:
        hardware_profile(tmp_path, "xe9680l-h200")
    assert refused.value.code == "nvlink_partitions_unsupported"
    assert refused.value.expected == "gpu.nvlink unsupported or isolated"
