"""Launches as tenants request them, and allocations as tenants see them."""

from __future__ import annotations

import base64
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from sqlalchemy import Connection

from reconciler.api import allocations
from reconciler.api.models import Body
from reconciler.db import schema, settings
from reconciler.db.engine import reading, transaction
from reconciler.lifecycle import placement, slices
from reconciler.model.errors import Problem
from reconciler.model.scheduler.snapshot import Want
from reconciler.model.states import TaskState
from reconciler.profiles import hardware_profile, profile_offers, ready_minimum_s
from reconciler.records import queue
from tests.unit.reconciler.api.refusals import refused
from tests.unit.reconciler.api.stack import ACT, IMAGE, KEY, NODE, Stack, bundle
from tests.unit.reconciler.trust.test_keygen import COMPRESSED

PATH = "projects/demo/allocations"
PROFILES = Path(__file__).resolve().parents[4] / "profiles"
BODY = {
    "capacity_shape": "gpu_slice",
    "gpu_count": 1,
    "username": "tenant",
    "ssh_keys": [KEY],
    "hostname": "slice-1",
    "image": "ubuntu",
}


def launch(stack: Stack, key: str = "k", *, by: str = "member", **changes: Any) -> Any:
    headers = {"Idempotency-Key": key}
    return stack.client(by).post(PATH, json=BODY | changes, headers=headers)


def activate(stack: Stack, allocation_id: str) -> None:
    task = stack.lease()
    connection = {"host": "gate.example", "port": 2200, "username": "tenant", "node": NODE}
    with transaction(stack.engine) as conn:
        slices.provision_started(conn, allocation_id, ACT)
        slices.provision_succeeded(conn, allocation_id, ACT, connection=connection)
        queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ACT)


@pytest.mark.covers("CTRL-4")
def test_launch_claims_and_queues(selling: Stack) -> None:
    answer = launch(selling, by="admin", parameters={"ready_deadline_s": 20})
    assert answer.status_code == 201, answer.text
    mine = answer.json()
    assert (mine["state"], mine["connection"]) == ("requested", None)
    seen = selling.client("admin").get(f"admin/allocations/{mine['id']}").json()
    assert (seen["capacity_shape"], seen["node_id"]) == ("gpu_slice", NODE)
    assert seen["parameters"] == {"ready_deadline_s": 20}
    assert [claim["state"] for claim in seen["claims"]] == ["reserved"]
    assert [task["kind"] for task in seen["tasks"]] == ["slice.vm_provision"]
    assert seen["timeline"]


@pytest.mark.covers("CTRL-5")
def test_room_that_is_there_a_moment_later_is_given(
    selling: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the search for a reason of refusal finds a free place, the launch gets it."""
    look, blind = placement.likely, iter([True, True])

    def looked(*given: Any, **options: Any) -> Any:
        view = look(*given, **options)
        return type(view)(()) if next(blind, False) else view

    monkeypatch.setattr(placement, "likely", looked)
    assert launch(selling).status_code == 201


@pytest.mark.covers("CTRL-5")
def test_a_refusal_is_explained_while_others_write(
    selling: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes as long as the fleet is large: with the launch's transaction it would lock all."""
    judge = placement.judge

    def judged(conn: Connection, want: Want) -> Any:
        with transaction(selling.engine) as other:
            settings.set_site_scheduling(other, True, ACT)
        return judge(conn, want)

    monkeypatch.setattr(placement, "judge", judged)
    assert launch(selling, gpu_count=3).json()["code"] == "no_capacity"


@pytest.mark.covers("CTRL-5")
def test_nothing_is_sold_while_switched_off(selling: Stack) -> None:
    admin = selling.client("admin")
    admin.put("admin/settings/slice-scheduling", json={"enabled": False})
    answer = launch(selling)
    assert (answer.status_code, answer.json()["code"]) == (409, "scheduling_off")
    assert NODE not in answer.text


def test_release(selling: Stack) -> None:
    mine = launch(selling).json()
    member, at = selling.client("member"), f"{PATH}/{mine['id']}"
    activate(selling, mine["id"])
    assert member.post(f"{at}/release").json()["state"] == "releasing"
    again = member.post(f"{at}/release")
    assert (again.status_code, again.json()["code"]) == (409, "allocation_not_releasable")
    seen = selling.client("admin").get(f"admin/allocations/{mine['id']}").json()
    assert "slice.vm_release" in [task["kind"] for task in seen["tasks"]]


def test_power(selling: Stack) -> None:
    mine = launch(selling).json()
    member, at = selling.client("member"), f"{PATH}/{mine['id']}/power"
    early = member.post(at, json={"action": "stop"})
    assert (early.status_code, early.json()["code"]) == (409, "allocation_not_active")
    activate(selling, mine["id"])
    assert member.post(at, json={"action": "destroy"}).status_code == 422
    assert selling.client("stranger").post(at, json={"action": "stop"}).status_code == 404
    read = member.get(f"{PATH}/{mine['id']}").headers["ETag"]
    answer = member.post(at, json={"action": "stop"})
    assert (answer.status_code, answer.json()["power_action"]) == (202, "stop")
    assert answer.json()["stopped"] and NODE not in answer.text
    stale = member.post(at, json={"action": "stop"}, headers={"If-Match": read})
    assert stale.json()["code"] == "precondition_failed", "it was read before the stop"
    busy = member.post(at, json={"action": "reset"})
    assert (busy.status_code, busy.json()["code"]) == (409, "allocation_busy")


@pytest.mark.covers("CTRL-10")
def test_other_tenants_are_not_there(selling: Stack) -> None:
    mine = launch(selling).json()
    stranger = selling.client("stranger")
    for path in (
        f"projects/demo/allocations/{mine['id']}",
        f"projects/other/allocations/{mine['id']}",
    ):
        assert stranger.get(path).status_code == 404
        assert stranger.post(f"{path}/release").status_code == 404
    assert stranger.get("projects/other/allocations").json()["items"] == []


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"image": "none"}, "image_not_found"),
        ({"image_id": "x"}, "request_invalid"),
        ({"capacity_shape": "baremetal"}, "request_invalid"),
        ({"capacity_shape": "baremetal", "gpu_count": None}, "request_invalid"),
        ({"capacity_shape": "baremetal", "gpu_count": None, "image": None}, "no_capacity"),
        ({"capacity_shape": "gpu_partition"}, "request_invalid"),
        ({"gpu_count": 0}, "request_invalid"),
        ({"username": "root"}, "request_invalid"),
        ({"username": "adm"}, "request_invalid"),
        ({"username": "systemd-journal"}, "request_invalid"),
        ({"username": "gpuaas"}, "request_invalid"),
        ({"username": "a b"}, "request_invalid"),
        ({"gpu_count": True}, "request_invalid"),
        ({"gpu_count": "1"}, "request_invalid"),
        ({"gpu_count": 1.0}, "request_invalid"),
        ({"hostname": "-x"}, "request_invalid"),
        ({"hostname": "12h"}, "request_invalid"),
        ({"hostname": "10"}, "request_invalid"),
        ({"hostname": "infinite"}, "request_invalid"),
        ({"hostname": "ignore"}, "request_invalid"),
        ({"hostname": "slice-1\n"}, "request_invalid"),
        ({"hostname": "\u0661\u0662h"}, "request_invalid"),
        ({"hostname": "a\n- reboot"}, "request_invalid"),
        ({"ssh_keys": []}, "request_invalid"),
        ({"ssh_keys": [f'command="id" {KEY}']}, "request_invalid"),
        ({"ssh_keys": [KEY.replace("ssh-ed25519", "ssh-rsa")]}, "request_invalid"),
        ({"ssh_keys": ["ssh-ed25519 ****"]}, "request_invalid"),
        ({"ssh_keys": ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5"]}, "request_invalid"),
        ({"ssh_keys": [f"{KEY.split()[0]} {KEY.split()[1]}AAAA"]}, "request_invalid"),
        ({"ssh_keys": [f"{KEY}\n{KEY}"]}, "request_invalid"),
        ({"ssh_keys": [COMPRESSED]}, "request_invalid"),
        ({"node_id": NODE}, "request_invalid"),
        ({"parameters": {"ready_deadline_s": 0}}, "request_invalid"),
        ({"parameters": {"ready_deadline_s": True}}, "request_invalid"),
        ({"parameters": {"ready_deadline_s": 1}}, "ready_deadline_too_short"),
        ({"parameters": {"ready_deadline_s": 1799}}, "ready_deadline_too_short"),
        (
            {"sku": "lab-edu-slice", "parameters": {"ready_deadline_s": 1499}},
            "ready_deadline_too_short",
        ),
    ],
)
def test_bad_wishes(selling: Stack, wrong: dict[str, Any], code: str) -> None:
    assert refused(selling, lambda: launch(selling, **wrong))["code"] == code


def test_a_key_has_one_spelling(selling: Stack) -> None:
    """The gateway compares keys by text, so a revocation would miss another spelling of a key."""
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    line = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    # Bits that base64 leaves over.
    stem, last = line.rstrip("=")[:-1], line.rstrip("=")[-1]
    alphabet = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
    other = f"{stem}{alphabet[alphabet.index(last) + 1]}{line[len(line.rstrip('=')) :]}"
    assert other != line and base64.b64decode(other.split()[1]) == base64.b64decode(line.split()[1])
    made = launch(selling, ssh_keys=[f"{other} laptop"]).json()
    assert made["ssh_keys"] == [f"{line} laptop"]


def test_a_member_may_ask_for_the_minimum_of_the_profile(selling: Stack, tmp_path: Path) -> None:
    enough = {"sku": "lab-edu-slice", "parameters": {"ready_deadline_s": 1500}}
    assert launch(selling, **enough).status_code == 201
    lab = (PROFILES / "lab.yml").read_text()
    (tmp_path / "lab.yml").write_text(lab.replace("ready: 1500", "ready: 1500, ready_minimum: 120"))
    (tmp_path / "broken.yml").write_text("deadlines: 5")
    assert ready_minimum_s(tmp_path) == ready_minimum_s(tmp_path, "lab-edu-slice") == 120


def test_an_image_larger_than_the_disk_is_refused_before_a_claim(selling: Stack) -> None:
    """The host refuses it too, but two of its refusals take the slot off sale."""
    with transaction(selling.engine) as conn:
        conn.execute(sa.update(schema.images).values(size_bytes=1 << 52))
    problem = refused(selling, lambda: launch(selling))
    assert (problem["status"], problem["code"]) == (409, "disk_too_small")


def with_profile(stack: Stack, folder: Path, **sections: dict[str, Any]) -> Stack:
    """The same site after an edit of the lab's profile. Another profile sells any number."""
    for name, changes in (("lab", sections), ("zz-other", {})):
        document = yaml.safe_load((PROFILES / "lab.yml").read_text())
        for section, values in changes.items():
            document[section] |= values
        (folder / f"{name}.yml").write_text(yaml.safe_dump(document | {"name": name}))
    settings = stack.settings.model_copy(update={"profiles_dir": folder})
    return Stack(settings, stack.engine, stack.secrets)


@pytest.mark.covers("CTRL-5")
@pytest.mark.parametrize(
    ("sections", "code", "named"),
    [
        ({"gpu": {"nvswitch_ids": ["10de:22a3"]}}, "nvlink_unsupported", "NVSwitches"),
        ({"gpu": {"nvlink": "unsupported"}}, "nvlink_unsupported", "NVSwitches"),
        ({"gpu": {"counts": [1, 4]}}, "gpu_count_not_sold", "1, 4 GPUs"),
        ({"vm": {"span_numa": False}}, "numa_node_exceeded", "one NUMA node"),
    ],
)
def test_a_number_of_gpus_that_no_node_can_give_is_refused_by_name(
    selling: Stack, tmp_path: Path, sections: dict[str, Any], code: str, named: str
) -> None:
    """The two free slots are on different NUMA nodes, and may be one slice by the lab's profile."""
    stack = with_profile(selling, tmp_path, **sections)
    problem = refused(stack, lambda: launch(stack, gpu_count=2))
    assert (problem["status"], problem["code"]) == (422, code)
    assert named in problem["expected"]
    assert launch(stack, key="one").status_code == 201


@pytest.mark.covers("CTRL-5", "I2")
def test_two_gpus_are_one_claim_of_two_slots_and_one_run(selling: Stack, tmp_path: Path) -> None:
    isolated = {"nvswitch_ids": ["10de:22a3"], "nvlink": "isolated", "counts": [1, 2]}
    stack = with_profile(selling, tmp_path, gpu=isolated)
    mine = launch(stack, gpu_count=2)
    assert mine.status_code == 201, mine.text
    shown = stack.client("admin").get(f"admin/allocations/{mine.json()['id']}").json()
    assert [claim["position"] for claim in shown["claims"]] == [0, 1]
    assert len({claim["slot_id"] for claim in shown["claims"]}) == 2
    (task,) = shown["tasks"]
    with reading(stack.engine) as conn:
        row = queue.get(conn, task["id"])
    assert [slot["slot_id"] for slot in row.parameters["slots"]] == [
        claim["slot_id"] for claim in shown["claims"]
    ]
    assert launch(stack, key="third").json()["code"] == "no_capacity"


def bodies_of_requests() -> Iterator[type[Body]]:
    left = [Body]
    while left:
        left += (kinds := left.pop().__subclasses__())
        yield from (kind for kind in kinds if kind.__module__.startswith("reconciler."))


def lax_numbers(schema: Any) -> list[Any]:
    """Numbers and flags in a core schema that take `true` or a text for a number."""
    if isinstance(schema, list | tuple):
        return [lax for part in schema for lax in lax_numbers(part)]
    if not isinstance(schema, dict):
        return []
    lax = schema.get("type") in ("int", "float", "bool") and not schema.get("strict")
    return [schema] * lax + lax_numbers(list(schema.values()))


def test_no_number_of_a_body_is_read_from_something_else() -> None:
    bodies = set(bodies_of_requests())
    assert {"NewAllocation", "NewNode", "NewToken"} <= {body.__name__ for body in bodies}
    assert [body for body in bodies if lax_numbers(body.__pydantic_core_schema__)] == []


@pytest.mark.covers("CTRL-14")
def test_only_what_is_sold_can_be_named(selling: Stack) -> None:
    problem = refused(selling, lambda: launch(selling, sku="free-of-charge"))
    assert (problem["status"], problem["code"]) == (422, "sku_unknown")
    assert "lab-edu-slice" in problem["expected"] and "/" not in problem["expected"]
    assert launch(selling, key="other").status_code == 201


def test_a_profile_that_is_broken_or_sells_nothing_is_in_nobodys_way(tmp_path: Path) -> None:
    lab = (PROFILES / "lab.yml").read_text()
    (tmp_path / "good.yml").write_text(lab)
    (tmp_path / "unsold.yml").write_text(lab.replace("sku: lab-edu-slice", ""))
    (tmp_path / "broken.yml").write_text("vm: {")
    (tmp_path / "empty.yml").write_text("")
    skus = {name: offer.sku for name, offer in profile_offers(tmp_path).items()}
    assert skus == {"good": "lab-edu-slice", "unsold": ""}
    # Edited while the service runs: the next launch knows.
    (tmp_path / "good.yml").write_text(lab.replace("lab-edu-slice", "lab-edu-slice-2"))
    (tmp_path / "unsold.yml").unlink()
    assert profile_offers(tmp_path)["good"].sku == "lab-edu-slice-2"
    assert hardware_profile(tmp_path, "good")["sku"] == "lab-edu-slice-2"
    assert "unsold" not in profile_offers(tmp_path)
    (tmp_path / "odd.yml").write_text("vm: [1]")
    for name in ("broken", "empty", "odd"):
        with pytest.raises(Problem, match="profile_unknown"):
            hardware_profile(tmp_path, name)


def test_a_runtime_profile_is_refused_by_name(selling: Stack) -> None:
    answer = refused(selling, lambda: launch(selling, runtime_profile="tuned"))
    assert (answer["status"], answer["code"]) == (422, "field_without_effect")
    assert "runtime_profile" in answer["found"]
    assert launch(selling, runtime_profile="").status_code == 201


@pytest.mark.covers("SLICE-3")
def test_own_user_data_goes_to_the_run_and_into_no_answer(selling: Stack) -> None:
    text = "#cloud-config\nruncmd: [[touch, /canary]]\n"
    mine = launch(selling, user_data=text)
    assert mine.status_code == 201, mine.text
    task = selling.lease()
    assert task.parameters["tenant_data"] == {"runcmd": [["touch", "/canary"]]}
    admin = selling.client("admin")
    seen = admin.get(f"admin/allocations/{mine.json()['id']}").text
    for path in ("admin/tasks", f"admin/tasks/{task.id}", "admin/audit", "admin/timeline"):
        seen += admin.get(path).text
    assert task.id in seen
    assert "canary" not in seen


@pytest.mark.parametrize(
    ("user_data", "code"),
    [
        ("#!/bin/sh\n", "user_data_invalid"),
        ("#cloud-config\nusers: []\n", "user_data_invalid"),
        ("#cloud-config\n" + "#" * 16_384, "user_data_too_large"),
    ],
)
def test_user_data_that_could_break_ours_claims_nothing(
    selling: Stack, user_data: str, code: str
) -> None:
    answer = refused(selling, lambda: launch(selling, user_data=user_data))
    assert (answer["status"], answer["code"]) == (422, code)


def test_a_whole_machine_takes_no_user_data(selling: Stack) -> None:
    body = {name: BODY[name] for name in ("username", "ssh_keys", "hostname")}
    body |= {"capacity_shape": "baremetal", "user_data": "#cloud-config\n{}"}
    headers = {"Idempotency-Key": "k"}
    member = selling.client("member")
    answer = refused(selling, lambda: member.post(PATH, json=body, headers=headers))
    assert (answer["status"], answer["code"]) == (422, "field_without_effect")


@pytest.mark.covers("SLICE-3")
def test_an_image_without_the_runtime_of_the_profile_is_refused(
    selling: Stack, tmp_path: Path
) -> None:
    text = (PROFILES / "lab.yml").read_text()
    plain = "guest_runtime: { source: baked, driver: edu,"
    assert plain in text
    baked = "guest_runtime: { source: baked, driver: 570-server, cuda: 12-8, rdma: true,"
    (tmp_path / "lab.yml").write_text(text.replace(plain, baked))
    selling.settings = selling.settings.model_copy(update={"profiles_dir": tmp_path})
    answer = refused(selling, lambda: launch(selling))
    assert (answer["status"], answer["code"]) == (409, "image_runtime_missing")
    assert answer["expected"] == "an image that contains driver-570-server, cuda-12-8, rdma"
    assert "lacks driver-570-server, cuda-12-8, rdma" in answer["found"]
    runtime = ["rdma", "cuda-12-8", "driver-570-server", "more"]
    image = IMAGE | {"version": "2", "runtime": runtime}
    registered = selling.client("admin").post("admin/images", json=image)
    assert registered.json()["runtime"] == sorted(runtime)
    assert launch(selling, image_version="2").status_code == 201


@pytest.mark.covers("SLICE-3")
def test_gpus_that_are_to_use_nvlink_get_no_image_without_it(
    selling: Stack, tmp_path: Path
) -> None:
    """Its driver would start CUDA without NVLink, which the tenant pays for."""
    gpu, other = (bundle(index)["gpu_pci_address"] for index in (1, 3))
    joined = {"nvlink": "partitions", "fabric_manager": {"address": "192.0.2.9"}}
    joined |= {"module_ids": {gpu: 1, other: 3, "0000:99:00.0": 4}, "nvlink_sets": [[1, 3]]}
    stack = with_profile(selling, tmp_path, gpu=joined)
    image = IMAGE | {"version": "2", "runtime": ["nvlink-disabled"]}
    stack.client("admin").post("admin/images", json=image)
    answer = refused(stack, lambda: launch(stack, gpu_count=2, image_version="2"))
    assert (answer["status"], answer["code"]) == (409, "image_runtime_missing")
    assert answer["expected"] == "an image whose driver uses NVLink"
    assert "nvlink-disabled" in answer["found"]
    # The slots were approved before the profile joined any GPUs, so they are placed without it.
    stale = with_profile(selling, tmp_path, gpu=joined | {"nvlink_sets": [[1, 4]]})
    answer = refused(stale, lambda: launch(stale, gpu_count=2, image_version="1"))
    assert (answer["status"], answer["code"]) == (409, "nvlink_unsupported")
    assert gpu not in str(answer)
    stack = with_profile(selling, tmp_path, gpu=joined)
    assert launch(stack, gpu_count=2, image_version="1").status_code == 201


def test_a_member_sees_how_long_it_takes(selling: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since when its step lasts, and how long earlier launches took, if that says anything."""
    first = launch(selling, "a").json()["id"]
    member = selling.client("member")
    task = selling.lease()
    with transaction(selling.engine) as conn:
        slices.provision_started(conn, first, ACT)
        queue.started(conn, task.id, task.lease_token, run_id="r", run_directory="/none")
        for step in ("clone", "boot", "boot"):
            queue.progress(conn, task.id, task.lease_token, {"step": step})
        at = sa.case({1: 10.0, 2: 20.0}, value=schema.task_events.c.id, else_=30.0)
        conn.execute(sa.update(schema.task_events).values(at=at))
    timeline = member.get(f"projects/demo/allocations/{first}/timeline").json()
    assert (timeline["step"], timeline["step_since"]) == ("boot", "1970-01-01T00:00:20+00:00")
    assert timeline["earlier"] is None
    with transaction(selling.engine) as conn:
        slices.provision_succeeded(conn, first, ACT, connection={})
        queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ACT)
        times = {"created_at": 1e6, "activated_at": 1e6 + 90}
        conn.execute(sa.update(schema.allocations).values(**times))
    mine = launch(selling, "b").json()["id"]
    path = f"projects/demo/allocations/{mine}/timeline"
    assert member.get(path).json()["earlier"] is None
    monkeypatch.setattr(allocations, "_TELLING", 1)
    expected = {"launches": 1, "half_within_s": 90, "nine_of_ten_within_s": 90}
    assert member.get(path).json()["earlier"] == expected
    times_of_ten = allocations.LaunchTimes.of_times([float(number) for number in range(1, 11)])
    assert times_of_ten is not None
    assert (times_of_ten.half_within_s, times_of_ten.nine_of_ten_within_s) == (5, 9)
