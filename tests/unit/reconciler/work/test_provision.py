"""The shape of a slice's machine, worked out from the profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from reconciler.db.engine import transaction
from reconciler.lifecycle import guest_terminal, launch, task_failures
from reconciler.model import hardware
from reconciler.model.errors import Problem
from reconciler.model.hardware import Offer
from reconciler.profiles import hardware_profile
from reconciler.records import nodes, queue
from reconciler.runs import contract
from reconciler.settings import Settings
from reconciler.work.kinds import slices as slice_kinds
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.work.conftest import READINESS, Attend, Runs, attend_next, statuses

PROFILES = Path(__file__).parents[4] / "profiles"


@pytest.mark.covers("HOST-7")
@pytest.mark.parametrize("limit", [None, {"rate_kbps": 2_000_000, "burst_kb": 100_000}])
def test_a_limit_of_the_profile_goes_to_the_machine(limit: dict[str, int] | None) -> None:
    profile: dict[str, Any] = hardware_profile(PROFILES, "lab")
    shape = {name: value for name, value in profile["vm"].items() if name != "mgmt_qos"}
    qos = {"mgmt_qos": limit} if limit else {}
    machine = slice_kinds.machine_shape({**profile, "vm": {**shape, **qos}}, 2)
    assert machine["mgmt_attachment"] == "tap"
    assert machine["nested"] is False
    assert machine["vcpus"] == 2 * profile["vm"]["vcpus_per_gpu"]
    assert machine["host_cpus"] == 0
    # Not a limit for each GPU: a slice has a single management interface, however many GPUs it has.
    assert machine.get("mgmt_qos") == limit


@pytest.mark.parametrize("without", [False, True])
def test_a_guest_leaves_nvlink_alone_by_a_file(without: bool) -> None:
    allocation = {"id": "a", "username": "tenant", "ssh_keys": [], "hostname": "slice"}
    seed = slice_kinds.seed_documents(allocation, "52:54:00:00:00:01", without_nvlink=without)
    written = [file["content"] for file in seed["user_data"]["write_files"]]
    assert written.count("options nvidia NVreg_NvLinkDisable=1\n") == without


@pytest.mark.parametrize(
    ("nvlink", "alone"),
    [("", False), ("unsupported", True), ("isolated", True), ("partitions", False)],
)
def test_guests_of_which_boards_leave_nvlink_alone(nvlink: str, alone: bool) -> None:
    runtime = {"source": "baked", "driver": "580-server-open"}
    profile = {"gpu": {"nvlink": nvlink}, "vm": {"guest_runtime": runtime}}
    assert hardware.leaves_nvlink_alone(profile) is alone
    assert ("nvlink-disabled" in hardware.baked_runtime(profile)) is alone


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
    for nvlink in ("isolated", "partitions"):
        several = replace(offer, nvlink=nvlink)
        codes = [refusal and refusal.code for refusal in map(several.refusal, (1, 2, 3))]
        assert codes == [None, None, "gpu_count_not_sold"]


MANAGER = {"address": "192.0.2.9"}


def with_partitions(folder: Path, name: str = "xe9680l-h200", **gpu: Any) -> dict[str, Any]:
    """A profile of this name whose slices use NVLink, written into the folder."""
    profile: dict[str, Any] = yaml.safe_load((PROFILES / f"{name}.yml").read_text())
    sets = {"module_ids": {"0000:43:00.0": 1, "0000:44:00.0": 3}, "nvlink_sets": [[1, 3]]}
    profile["gpu"] |= {"nvlink": "partitions", "fabric_manager": MANAGER, **sets, **gpu}
    (folder / f"{name}.yml").write_text(yaml.safe_dump(profile))
    return hardware_profile(folder, name)


@pytest.mark.parametrize("key", ["fabric_manager", "module_ids", "nvlink_sets"])
def test_partitions_need_a_fabric_manager_and_the_modules_of_the_board(
    tmp_path: Path, key: str
) -> None:
    with pytest.raises(Problem) as refused:
        with_partitions(tmp_path, **{key: None})
    assert refused.value.code == "nvlink_partitions_incomplete"
    assert refused.value.found == f"no gpu.{key} in the hardware profile xe9680l-h200"


@pytest.mark.parametrize(
    ("manager", "safe"),
    [
        ({"address": "192.0.2.9"}, True),
        ({"address": "127.0.0.1"}, True),
        ({"socket": "/run/fabric-manager.sock"}, True),
        ({"address": "8.8.8.8"}, False),
    ],
)
def test_guests_must_not_reach_the_fabric_manager(
    tmp_path: Path, manager: dict[str, str], safe: bool
) -> None:
    if safe:
        assert with_partitions(tmp_path, fabric_manager=manager)["gpu"]["fabric_manager"] == manager
        return
    with pytest.raises(Problem) as refused:
        with_partitions(tmp_path, fabric_manager=manager)
    assert refused.value.code == "fabric_manager_exposed"


def test_the_partition_of_a_slice_is_that_of_its_gpus(tmp_path: Path) -> None:
    profile = with_partitions(tmp_path)
    slots = [{"gpu_pci_address": address} for address in ("0000:44:00.0", "0000:43:00.0")]
    partition = {"nvlink_partition": {"modules": [1, 3], "address": "192.0.2.9"}}
    assert hardware.nvlink_partition(profile, slots) == partition
    lab = hardware_profile(PROFILES, "lab")
    assert hardware.nvlink_partition(lab, slots) == {}
    with pytest.raises(Problem, match="gpu_module_unknown"):
        hardware.nvlink_partition(profile, [*slots, {"gpu_pci_address": "0000:99:00.0"}])


def test_a_launch_gives_its_host_the_partition(sold: Site, runs: Runs, tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    folder.mkdir()
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="lab")
        sold.allocate(conn)
        (task,) = queue.every(conn)
    (slot,) = task.parameters["slots"]
    with_partitions(folder, "lab", module_ids={slot["gpu_pci_address"]: 5}, nvlink_sets=[[5, 7]])
    runs.ends(evidence={"readiness": READINESS, "plan": {}, "image": {}})
    settings = Settings(state_dir=tmp_path, poll_s=0.01, profiles_dir=folder)
    assert attend_next(sold.engine, settings).state == "succeeded"
    (spec,) = runs.launched
    partition = {"modules": [5], "address": "192.0.2.9"}
    assert spec.variables["slice_vm"]["nvlink_partition"] == partition
    files = spec.variables["slice_seed"]["user_data"]["write_files"]
    assert [file["path"] for file in files if "nvlink" in file["path"]] == []
    contract.check_vars("provision_slice", spec.variables)


def test_a_run_for_which_the_profile_lacks_a_value_fails_by_name(
    sold: Site, runs: Runs, tmp_path: Path
) -> None:
    """A worker that left the task would come back to it for an hour."""
    (tmp_path / "profiles").mkdir()
    profile = yaml.safe_load((PROFILES / "lab.yml").read_text())
    del profile["deadlines"]["ready"]
    (tmp_path / "profiles" / "lab.yml").write_text(yaml.safe_dump(profile))
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="lab")
        sold.allocate(conn)
    settings = Settings(state_dir=tmp_path, profiles_dir=tmp_path / "profiles")
    ended = attend_next(sold.engine, settings)
    assert (ended.state, ended.error["code"]) == ("failed", "variables_invalid")
    assert ended.error["found"] == "KeyError: 'ready'"
    assert runs.launched == []
    assert statuses(sold) == ["available", "available"]


@pytest.mark.covers("P13")
@pytest.mark.parametrize("end", ["succeeded", "failed", "lost", "canceled", "withdrawn"])
def test_the_record_of_a_launch_keeps_no_cloud_config_of_its_tenant(
    sold: Site, runs: Runs, attend: Attend, end: str
) -> None:
    """It may hold passwords. Records of tasks are kept for ever."""
    with transaction(sold.engine) as conn:
        request = replace(sold.launch(1), user_data={"runcmd": ["canary"]})
        key = launch.allocate(conn, request, ADMIN).id
        (task,) = queue.every(conn)
        if end == "withdrawn":
            launch.release(conn, key, ADMIN)
        elif end == "canceled":
            task_failures.cancel(conn, task.id, ADMIN)
    if end in ("succeeded", "failed", "lost"):
        evidence = {"readiness": READINESS, "plan": {}, "image": {}}
        status = "successful" if end == "succeeded" else end
        error = {"code": "planted", "expected": "a", "found": "b", "remedy": "c"}
        runs.ends(status, evidence=evidence, error={} if end == "succeeded" else error)
        assert attend().state == end
        (spec,) = runs.launched
        assert spec.variables["slice_seed"]["tenant_data"] == {"runcmd": ["canary"]}
    with transaction(sold.engine) as conn:
        ended = queue.get(conn, task.id)
    assert "tenant_data" not in ended.parameters
    assert ended.parameters["slots"] == task.parameters["slots"]
