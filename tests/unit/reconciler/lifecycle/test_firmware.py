"""A machine whose firmware a tenant could change: as before, or accepted, or not sold."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from reconciler.db.engine import transaction
from reconciler.db.schema import Node
from reconciler.lifecycle import baremetal, firmware, gate, host, launch
from reconciler.model.act import Act
from reconciler.model.states import NodeMode, TaskState
from reconciler.records import nodes
from tests.unit.reconciler.conftest import Site, code
from tests.unit.reconciler.whole_machines import Machines

pytestmark = pytest.mark.covers("CTRL-15")

CHANGED = {"BootOrder": "0000,0001", "SecureBoot": "00"}


@pytest.fixture
def machines(site: Site) -> Machines:
    made = Machines(site)
    made.machine()
    return made


def node(conn: sa.Connection) -> Node:
    return nodes.get(conn, "m1")


def tenancy(machines: Machines, conn: sa.Connection) -> None:
    key = machines.active(conn)
    launch.release(conn, key, machines.act)
    assert machines.released(conn, key)


def names(conn: sa.Connection) -> list[tuple[str, str]]:
    return [(row["section"], row["name"]) for row in node(conn).firmware_differences]


def actions(conn: sa.Connection) -> list[str]:
    query = sa.text("SELECT action FROM audit_log WHERE action LIKE '%firmware%' ORDER BY id")
    return list(conn.execute(query).scalars())


def test_unchanged_firmware_is_compared_and_sold(machines: Machines) -> None:
    with transaction(machines.engine) as conn:
        key = machines.active(conn)
        assert node(conn).firmware_before is not None
        launch.release(conn, key, machines.act)
        assert machines.released(conn, key)
        # The tenant's own installation answers that nothing changed.
        machines.discover(conn, "m1", 1)
        assert node(conn).firmware_before is not None
        assert machines.reasons(conn) == {"m1": "reinstall_required"}
        machines.reinstall(conn)
        assert node(conn).firmware_before is None
        assert actions(conn) == ["node.firmware.unchanged"]
        assert machines.reasons(conn) == {"m1": ""}


def test_a_machine_waits_for_the_comparison(machines: Machines) -> None:
    with transaction(machines.engine) as conn:
        tenancy(machines, conn)
        fresh = {"machine_id": "fresh", "host_key": "ssh-ed25519 fresh"}
        host.enrolled(conn, "m1", machines.act, **fresh)
        identity = machines.site.document(1)["identity"] | fresh
        host.bootstrapped(conn, "m1", machines.act, identity=identity)
        assert machines.reasons(conn) == {"m1": "firmware_unverified"}
        assert code(firmware.accept, conn, "m1", machines.act) == "no_firmware_difference"
        # A late report of the old installation is no answer.
        late = machines.site.document(1)
        host.record_discovery(conn, "m1", late, machines.act, observed_at=1.0)
        assert node(conn).firmware_before is not None


def test_differences_are_named_until_they_are_mended(machines: Machines) -> None:
    with transaction(machines.engine) as conn:
        tenancy(machines, conn)
        machines.firmware = {"uefi": CHANGED, "bios": None}
        machines.reinstall(conn)
        assert machines.reasons(conn) == {"m1": "firmware_changed"}
        assert names(conn)[0] == ("bios", "")
        assert ("uefi", "BootOrder") in names(conn)
        before = node(conn).generation
        machines.discover(conn, "m1", 1)
        assert actions(conn) == ["node.firmware.changed"]
        assert node(conn).generation == before
        machines.firmware = {"bios": None}
        machines.discover(conn, "m1", 1)
        assert names(conn) == [("bios", "")]
        machines.firmware = {}
        machines.discover(conn, "m1", 1)
        assert (node(conn).firmware_before, names(conn)) == (None, [])
        assert machines.reasons(conn) == {"m1": ""}


def test_a_person_accepts_them_with_a_reason(machines: Machines) -> None:
    with transaction(machines.engine) as conn:
        tenancy(machines, conn)
        # Before the new installation nothing is known that could be accepted.
        assert code(firmware.accept, conn, "m1", machines.act) == "reinstall_required"
        machines.firmware = {"uefi": CHANGED}
        machines.reinstall(conn)
        assert code(firmware.accept, conn, "m1", Act("admin:bob")) == "reason_required"
        firmware.accept(conn, "m1", machines.act)
        assert code(firmware.accept, conn, "m1", machines.act) == "no_firmware_difference"
        assert actions(conn)[-1] == "admin.node.firmware.accepted"
        # The next tenancy is compared with the accepted state.
        tenancy(machines, conn)
        machines.reinstall(conn)
        assert names(conn) == []


def test_the_record_goes_with_the_machine_to_another_node(machines: Machines) -> None:
    """The node is retired after its tenant, and the machine registered again."""
    machines.serials = dict.fromkeys(("m1", "m2", "m3"), "ABC1234")
    with transaction(machines.engine) as conn:
        machines.discover(conn, "m1", 1)
        tenancy(machines, conn)
        for event in (host.drain, host.maintain, host.retire):
            event(conn, "m1", machines.act)
        machines.firmware = {"uefi": CHANGED}
        # A hostile host that reports the serial number first does not take the record away.
        for id in ("m2", "m3"):
            fields = {"id": id, "tenant_address": f"203.0.113.{id[1:]}"}
            nodes.create(conn, machines.act, mode=NodeMode.BAREMETAL, **fields)
            machines.reinstall(conn, id)
            assert machines.reasons(conn)[id] == "firmware_changed"
            firmware.accept(conn, id, machines.act)
            # Compared once: a state that a person has accepted is not asked for again.
            machines.discover(conn, id, 1)
            assert machines.reasons(conn)[id] == ""


def test_a_slice_host_sells_no_slot_meanwhile(site: Site) -> None:
    site.node("n1", (0,), 4)
    with transaction(site.engine) as conn:
        before = site.document(4)["firmware"] | {"sections": {"bios": {"bios_version": "0"}}}
        nodes.update(conn, "n1", firmware_before=before)
        assert "firmware_unverified" in _blockers(conn)
        host.record_discovery(conn, "n1", site.document(4), site.act)
        assert "firmware_changed" in _blockers(conn)
        (slot,) = site.statuses(conn)
        assert slot == "disabled"
        firmware.accept(conn, "n1", site.act)
        # Put on sale again by the acceptance itself.
        assert site.statuses(conn) == ["available"]


def test_a_provision_that_never_let_its_tenant_in_leaves_nothing_to_compare(
    machines: Machines,
) -> None:
    with transaction(machines.engine) as conn:
        allocation = machines.launch(conn)
        machines.begin(conn, allocation)
        assert node(conn).firmware_before is not None
        step = "Look whether the account can be made"
        error = {"code": "account_taken", "found": "daemon"}
        baremetal.provision_failed(
            conn, allocation.id, machines.act, step=step, error=error, untouched=True
        )
        assert node(conn).firmware_before is None
        assert node(conn).mode == NodeMode.BAREMETAL


BMC = {
    "sections": {
        "redfish_firmware": {"BIOS": "2.5.4"},
        "redfish_users": {"user 2": "root Administrator enabled"},
        "redfish_boot": {"BootOrder": "Boot0003"},
    },
    "unreadable": {},
}
PLANTED = {
    **BMC,
    "sections": BMC["sections"] | {"redfish_users": {"user 4": "svc Administrator enabled"}},
}


def test_the_bmc_is_believed_while_the_host_is_not(machines: Machines) -> None:
    act = machines.act
    with transaction(machines.engine) as conn:
        firmware.record_bmc(conn, "m1", BMC, act)
        tenancy(machines, conn)
        assert node(conn).firmware_bmc is None
        firmware.record_bmc(conn, "m1", PLANTED, act)
        assert names(conn) == [("redfish_users", "user 2"), ("redfish_users", "user 4")]
        firmware.record_bmc(conn, "m1", BMC, act)
        assert names(conn) == []
        # The same is asked for after the new installation: the old installation ran until then.
        machines.reinstall(conn)
        assert names(conn) == [(name, "") for name in BMC["sections"]]
        assert machines.reasons(conn) == {"m1": "firmware_changed"}
        firmware.record_bmc(conn, "m1", PLANTED, act)
        assert ("redfish_users", "user 4") in names(conn)
        firmware.record_bmc(conn, "m1", BMC, act)
        assert (names(conn), node(conn).firmware_before) == ([], None)
        assert machines.reasons(conn) == {"m1": ""}


def test_a_launch_that_let_no_tenant_in_keeps_the_report_of_the_bmc(machines: Machines) -> None:
    """A member makes it fail by a user name that the host has."""
    with transaction(machines.engine) as conn:
        firmware.record_bmc(conn, "m1", BMC, machines.act)
        allocation = machines.launch(conn)
        task = machines.begin(conn, allocation)
        step = "Look whether the account can be made"
        error = {"code": "account_taken", "found": "daemon"}
        baremetal.provision_failed(
            conn, allocation.id, machines.act, step=step, error=error, untouched=True
        )
        machines.end(conn, task, TaskState.FAILED)
        assert (node(conn).firmware_bmc, node(conn).firmware_before) == (BMC, None)
        machines.discover(conn, "m1", 1)
        tenancy(machines, conn)
        machines.reinstall(conn)
        assert names(conn) == [(name, "") for name in BMC["sections"]]
        assert machines.reasons(conn) == {"m1": "firmware_changed"}


def test_a_clean_up_of_a_new_installation_keeps_the_report_of_the_bmc(machines: Machines) -> None:
    act = machines.act
    with transaction(machines.engine) as conn:
        firmware.record_bmc(conn, "m1", BMC, act)
        key = machines.active(conn)
        launch.release(conn, key, act)
        task = machines.releasing(conn, key)
        failed = {"fence": task.parameters["fence"], "step": "Wipe", "error": {"code": "x"}}
        assert baremetal.release_failed(conn, key, act, **failed)
        machines.end(conn, task, TaskState.FAILED)
        machines.reinstall(conn)
        firmware.record_bmc(conn, "m1", BMC, act)
        assert node(conn).firmware_before is None
        baremetal.clean(conn, "m1", act)
        assert machines.released(conn, key)
        machines.discover(conn, "m1", 1)
        tenancy(machines, conn)
        machines.reinstall(conn)
        assert machines.reasons(conn) == {"m1": "firmware_changed"}


def test_differences_of_the_old_installation_are_not_accepted_for_the_new_one(
    machines: Machines,
) -> None:
    act = machines.act
    with transaction(machines.engine) as conn:
        firmware.record_bmc(conn, "m1", BMC, act)
        tenancy(machines, conn)
        firmware.record_bmc(conn, "m1", PLANTED, act)
        assert names(conn) == [("redfish_users", "user 2"), ("redfish_users", "user 4")]
        host.enrolled(conn, "m1", act, machine_id="fresh", host_key="ssh-ed25519 fresh")
        assert code(firmware.accept, conn, "m1", act) == "no_firmware_difference"
        assert node(conn).firmware_before is not None


def test_a_report_of_the_bmc_during_a_tenancy_counts_for_nothing(machines: Machines) -> None:
    with transaction(machines.engine) as conn:
        firmware.record_bmc(conn, "m1", BMC, machines.act)
        key = machines.active(conn)
        firmware.record_bmc(conn, "m1", BMC, machines.act)
        launch.release(conn, key, machines.act)
        assert machines.released(conn, key)
        machines.reinstall(conn)
        assert names(conn) == [(name, "") for name in BMC["sections"]]


def _blockers(conn: sa.Connection) -> list[str]:
    (slot,) = gate.approved(conn, "n1")
    return [row.code for row in gate.gate(conn, slot)]
