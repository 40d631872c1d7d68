"""Comparison and synchronisation with a stand-in NetBox."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from reconciler.db import journal, leader
from reconciler.db import settings as site
from reconciler.db.engine import reading, transaction
from reconciler.db.leader import Deposed
from reconciler.db.schema import Slot, allocations, claims, nodes, slots
from reconciler.inventory import netbox as client
from reconciler.inventory import sync, writer
from reconciler.records import nodes as node_records
from reconciler.settings import Settings
from tests.standin.netbox import ADDRESSES, DEVICES, INTERFACES, JOURNAL, MACHINES, MACS, VRFS
from tests.standin.service import Manager
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.inventory.conftest import (
    BAREMETAL,
    PREFIX,
    PROFILES,
    SLICE,
    Pass,
    device,
    tags,
)

pytestmark = pytest.mark.covers("ECO-2")
MACHINE_TYPE = "virtualization.virtualmachine"


# Objects of a sync for the network of the first slice of a node.
NETWORK = {
    **{"VRFs created": 1, "interface objects created": 1, "mac objects created": 1},
    **{"address objects created": 1, "references set": 2},
}


def methods(netbox: Pass) -> list[str]:
    return [request.split()[0] for request in netbox.record["requests"]]


def codes(result: sync.NetboxReading) -> list[str]:
    return sorted(finding.code for finding in result.findings)


def test_a_comparison_only_reads_and_names_each_difference(netbox: Pass) -> None:
    with transaction(netbox.site.engine) as conn:
        netbox.site.allocate(conn)
        node_records.create(conn, ADMIN, id="n2", address="10.0.0.2", profile="lab")
    netbox.begin(
        device("n1", "10.0.0.9", BAREMETAL), device("gpu9", "10.0.0.99"), prefixes=[PREFIX]
    )
    result = netbox()
    assert set(methods(netbox)) == {"GET"}
    assert result.complete
    assert codes(result) == [
        *("netbox_address_differs", "netbox_intent_differs", "netbox_machine_missing"),
        *("netbox_missing", "netbox_new_device", "netbox_outdated"),
    ]
    row = next(row for row in result.findings if row.code == "netbox_address_differs")
    assert (row.subject, row.expected[:8], row.found) == ("node n1", "10.0.0.9", "10.0.2.15")
    # A device that was renamed is still that of its node.
    netbox.begin(device("rack-7", custom_fields={"gpuaas_node_id": "n1"}))
    renamed = netbox()
    assert codes(renamed) == [
        *("netbox_intent_differs", "netbox_machine_missing", "netbox_missing", "netbox_outdated")
    ]
    row = next(row for row in renamed.findings if row.code == "netbox_intent_differs")
    assert (row.expected, row.found) == ("name rack-7, as in NetBox", "n1")


def test_after_a_sync_a_second_comparison_is_empty(netbox: Pass) -> None:
    with transaction(netbox.site.engine) as conn:
        key = netbox.site.allocate(conn)
    netbox.begin(device("n1"), device("gpu9", "10.0.0.99", BAREMETAL))
    result = netbox(apply=True)
    done = {"nodes added": 1, "devices written": 2, "virtual machines created": 1}
    assert result.done == {**done, **NETWORK}
    assert (codes(result), codes(netbox())) == ([], [])
    (first, second) = netbox.objects(DEVICES)
    shown = first["custom_fields"]
    assert (shown["gpuaas_state"], shown["gpuaas_slots_total"]) == ("ready", 2)
    assert [slot["status"] for slot in shown["gpuaas_slots"]] == ["reserved", "available"]
    # NetBox shows no addresses of devices.
    assert "pci" not in str(shown) and "nvme" not in str(shown)
    (machine,) = netbox.objects(MACHINES)
    assert (machine["status"], machine["device"]) == ("planned", first["id"])
    assert machine["name"] == f"gpuaas-slice-{key.replace('-', '')}"
    with reading(netbox.site.engine) as conn:
        added = node_records.get(conn, "gpu9")
    assert (added.state, added.mode, added.address) == ("enrolling", "baremetal", "10.0.0.99")
    assert second["custom_fields"]["gpuaas_state"] == "enrolling"


def test_changes_of_state_are_written_with_a_journal_entry(netbox: Pass) -> None:
    netbox(apply=True)
    with transaction(netbox.site.engine) as conn:
        slot = conn.execute(sa.select(slots.c.id)).scalars().first()
        journal.advance(conn, Slot, slot, "block", ADMIN.because("a probe failed"))
    assert netbox(apply=True).done == {"devices written": 1, "journal entries": 1}
    (row,) = netbox.objects(DEVICES)
    assert [tag["slug"] for tag in row["tags"]] == [SLICE, "gpuaas-blocked"]
    (entry,) = netbox.objects(JOURNAL)
    assert (entry["kind"], entry["assigned_object_id"]) == ("warning", row["id"])
    assert "slots_blocked: 0 -> 1" in entry["comments"]
    with transaction(netbox.site.engine) as conn:
        conn.execute(sa.update(slots).values(status="disabled"))
    netbox(apply=True)
    (row,) = netbox.objects(DEVICES)
    assert [tag["slug"] for tag in row["tags"]] == [SLICE]


@pytest.mark.parametrize(
    "faults",
    [
        {"lost": {f"POST {JOURNAL}": 1}},
        {"lost": {f"PATCH {DEVICES}": 1}},
        {"status": {"POST": 200}},
        {"status": {"POST": 504}},
        {"forbidden": [f"POST {JOURNAL}"]},
    ],
    ids=["lost entry", "lost device", "page", "not done", "forbidden"],
)
def test_no_journal_entry_is_lost_or_written_twice(netbox: Pass, faults: dict[str, Any]) -> None:
    def change(state: str) -> None:
        with transaction(netbox.site.engine) as conn:
            conn.execute(sa.update(nodes).values(state=state))

    netbox(apply=True)
    written = netbox.objects(DEVICES)
    change("maintenance")
    netbox.begin(*written, **faults)
    result = netbox(apply=True)
    silent = "forbidden" not in faults
    assert (result.complete, codes(result)) == (
        *(not silent, ["netbox_outdated"] if silent else ["netbox_forbidden"]),
    )
    # The device changes again before the entry can be written.
    change("draining")
    rows = {JOURNAL: netbox.objects(JOURNAL)}
    netbox.begin(*netbox.objects(DEVICES), network=rows)
    assert netbox(apply=True).complete
    comments = [row["comments"].partition(": ")[2] for row in netbox.objects(JOURNAL)]
    first, second = "state: ready -> maintenance. test", "state: maintenance -> draining. test"
    assert comments == [first, second]
    assert netbox(apply=True).done == {}


def test_a_journal_entry_has_the_values_that_were_read_last(netbox: Pass) -> None:
    netbox(apply=True)
    (row,) = netbox.objects(DEVICES)
    with transaction(netbox.site.engine) as conn:
        conn.execute(sa.update(nodes).values(state="maintenance"))
    # A person hands the values over meanwhile, and has changed a value.
    edit = {"custom_fields": {"gpuaas_state": "sold", "gpuaas_written": None}}
    netbox.begin(row, edits={"n1": [edit]})
    assert netbox(apply=True).done == {"devices written": 1, "journal entries": 1}
    (entry,) = netbox.objects(JOURNAL)
    assert "state: sold -> maintenance" in entry["comments"]


def test_a_slice_is_followed_to_its_release(netbox: Pass) -> None:
    with transaction(netbox.site.engine) as conn:
        key = netbox.site.allocate(conn)
    foreign = {"name": "mine", "tags": tags("other"), "device": 1}
    words = {"gpuaas_allocation_id": "\x00\ud800"}
    strange = {"name": "x", "tags": tags("gpuaas-managed"), "device": 1, "custom_fields": words}
    odd = {
        "name": "y",
        "tags": tags("gpuaas-managed"),
        "custom_fields": {"gpuaas_allocation_id": [1]},
    }
    netbox.begin(device("n1"), machines=[foreign, strange, odd])
    netbox(apply=True)
    for state, status in (("active", "active"), ("releasing", "decommissioning")):
        with transaction(netbox.site.engine) as conn:
            change = sa.update(allocations).where(allocations.c.id == key)
            conn.execute(change.values(state=state))
        netbox(apply=True)
        assert netbox.objects(MACHINES)[-1]["status"] == status
    with transaction(netbox.site.engine) as conn:
        conn.execute(change.values(state="released"))
    unknown = ["netbox_machine_unknown"] * 2
    assert codes(netbox()) == [*unknown, "netbox_stale_machine"]
    result = netbox(apply=True)
    assert result.done == {"virtual machines deleted": 1}
    # Virtual machines without our tag, or without an allocation of ours, are not deleted.
    assert [row["name"] for row in netbox.objects(MACHINES)] == ["mine", "x", "y"]
    assert codes(result) == unknown


def test_a_slice_follows_its_device_to_another_cluster_or_site(netbox: Pass) -> None:
    """NetBox takes no change of a virtual machine that has another cluster or site than its
    device.
    """
    with transaction(netbox.site.engine) as conn:
        netbox.site.allocate(conn)
    netbox(apply=True)
    kinds = (VRFS, INTERFACES, MACS, ADDRESSES)
    for cluster, state, number in (
        *((7, "active", 1), (None, "active", 1), (8, "releasing", 1)),
        *((8, "releasing", 2), (None, "active", 3)),
    ):
        with transaction(netbox.site.engine) as conn:
            conn.execute(sa.update(allocations).values(state=state))
        (host,), (machine,) = netbox.objects(DEVICES), netbox.objects(MACHINES)
        network = {kind: netbox.objects(kind) for kind in kinds}
        status, before = machine["status"], machine["cluster"]
        host["cluster"], host["site"]["id"] = cluster and {"id": cluster}, number
        netbox.begin(host, machines=[machine], network=network)
        (finding,) = netbox().findings
        assert ("cluster" in finding.expected, "status" in finding.expected) == (
            *(before != cluster, status != {"releasing": "decommissioning"}.get(state, state)),
        )
        result = netbox(apply=True)
        assert (codes(result), result.done) == ([], {"virtual machines changed": 1})
        (machine,) = netbox.objects(MACHINES)
        assert (machine["cluster"], machine["site"]) == (cluster, number)


def test_the_network_of_a_slice_is_created_kept_and_ends_with_it(netbox: Pass) -> None:
    with transaction(netbox.site.engine) as conn:
        key = netbox.site.allocate(conn)
        claim = conn.execute(sa.select(claims).where(claims.c.allocation_id == key)).one()
    result = netbox(apply=True)
    (machine,), (interface,) = netbox.objects(MACHINES), netbox.objects(INTERFACES)
    ((vrf,), (mac,), (address,)) = (netbox.objects(path) for path in (VRFS, MACS, ADDRESSES))
    assert (vrf["name"], vrf["enforce_unique"]) == ("gpuaas-n1", True)
    assert (interface["virtual_machine"], interface["vrf"]) == (machine["id"], vrf["id"])
    assert (mac["mac_address"].lower(), mac["assigned_object_id"]) == (
        *(claim.management_mac, interface["id"]),
    )
    assert (address["address"], address["vrf"]) == (f"{claim.private_ip}/32", vrf["id"])
    assert interface["primary_mac_address"] == mac["id"]
    assert machine["primary_ip4"] == address["id"]
    with transaction(netbox.site.engine) as conn:
        conn.execute(sa.update(allocations).values(state="released"))
    assert netbox(apply=True).done == {"virtual machines deleted": 1}
    left = [netbox.objects(path) for path in (MACHINES, INTERFACES, MACS, ADDRESSES)]
    assert (left, result.findings) == ([[]] * 4, [])


def test_a_failed_slice_gives_its_addresses_back_with_its_slot(netbox: Pass) -> None:
    with transaction(netbox.site.engine) as conn:
        netbox.site.allocate(conn)
    netbox(apply=True)
    with transaction(netbox.site.engine) as conn:
        conn.execute(sa.update(allocations).values(state="failed"))
    # Until its slot is clean, nothing else has its addresses.
    assert netbox(apply=True).done == {"virtual machines changed": 1}
    with transaction(netbox.site.engine) as conn:
        conn.execute(sa.update(claims).values(state="failed"))
    assert codes(netbox()) == ["netbox_stale_network"]
    result = netbox(apply=True)
    assert (codes(result), result.done) == ([], {"interface objects deleted": 1})
    assert [netbox.objects(path) for path in (INTERFACES, MACS, ADDRESSES)] == [[], [], []]
    (machine,) = netbox.objects(MACHINES)
    assert (machine["status"], machine["primary_ip4"]) == ("failed", None)
    assert codes(netbox()) == []
    with transaction(netbox.site.engine) as conn:
        conn.execute(sa.update(nodes).values(state="retired"))
    left = next(row for row in netbox(apply=True).findings if row.code == "netbox_vrf_left")
    assert (left.subject, len(netbox.objects(VRFS))) == ("VRF gpuaas-n1", 1)


def test_a_foreign_network_stays_and_what_is_missing_is_completed(netbox: Pass) -> None:
    with transaction(netbox.site.engine) as conn:
        netbox.site.allocate(conn)
    netbox(apply=True)
    record = netbox.record["objects"]
    names = {"vrfs": VRFS, "interfaces": INTERFACES, "macs": MACS, "addresses": ADDRESSES}
    kept = {name: list(record[path].values()) for name, path in names.items()}
    kept["machines"] = list(record[MACHINES].values())

    def begin(**changes: dict[str, Any]) -> sync.NetboxReading:
        """Change the objects in NetBox, then run a sync."""
        rows = {name: [{**row, **changes.get(name, {})} for row in kept[name]] for name in kept}
        network = {path: rows[name] for name, path in names.items()}
        netbox.begin(device("n1"), machines=rows["machines"], network=network)
        return netbox(apply=True)

    for changes in (
        {"macs": {"mac_address": "02:00:00:00:00:99"}},
        {"addresses": {"address": "10.9.9.9/24"}},
        {"addresses": {"vrf": None}},
        {"machines": {"primary_ip4": 77}},
        {"interfaces": {"primary_mac_address": 77}},
    ):
        result = begin(**changes)
        assert codes(result) == ["netbox_network_differs"], changes
        assert result.done == {"devices written": 1}, changes
    # After an answer that was lost, the next sync goes on where the last sync ended.
    kept["addresses"] = []
    result = begin(machines={"primary_ip4": None}, interfaces={"primary_mac_address": None})
    done = {"devices written": 1, "address objects created": 1, "references set": 2}
    assert (codes(result), result.done) == ([], done)
    # Of a token of an earlier version: everything else is written.
    netbox.begin(device("n1"), forbidden=[f"GET {VRFS}"])
    result = netbox(apply=True)
    assert (result.complete, codes(result)) == (True, ["netbox_forbidden"])
    assert result.done == {"devices written": 1, "virtual machines created": 1}
    netbox.begin(device("n1"), forbidden=[f"POST {MACS}"])
    result = netbox(apply=True)
    assert (result.complete, codes(result)) == (True, ["netbox_forbidden"])
    assert len(netbox.objects(INTERFACES)) == 1


def test_asset_tag_and_bmc_are_read_and_a_bmc_is_of_one_machine(netbox: Pass) -> None:
    bmc = {"address": "10.0.9.7/24"}

    def kept(node_id: str = "n1") -> dict[str, Any] | None:
        with reading(netbox.site.engine) as conn:
            return node_records.get(conn, node_id).netbox

    netbox.begin(device("n1", asset_tag="A-17", oob_ip=bmc))
    netbox()
    assert kept() == {"device_id": 1, "asset_tag": "A-17", "bmc_address": "10.0.9.7"}
    netbox.begin(device("n1", oob_ip=bmc), device("gpu9", "10.0.0.99", oob_ip=bmc))
    assert codes(netbox(apply=True)) == ["netbox_bmc_twice"] * 2
    assert kept() is None
    netbox.begin(device("n1", oob_ip={"address": "10.0.2.15/24"}))
    assert codes(netbox(apply=True)) == ["netbox_bmc_twice"]
    netbox.begin(device("n1", oob_ip={"address": "127.0.0.1/8"}))
    assert (codes(netbox(apply=True)), kept()) == (
        [],
        {"device_id": 1, "asset_tag": "", "bmc_address": ""},
    )


def test_the_service_of_another_site_does_not_overwrite_ours(netbox: Pass) -> None:
    """A copy for tests, whose operator has added a node of the same name."""

    def begin(authority: str) -> None:
        with transaction(netbox.site.engine) as conn:
            site.store(conn, site.AUTHORITIES, {"host_ca": authority})

    with transaction(netbox.site.engine) as conn:
        netbox.site.allocate(conn)
    # Objects that an earlier version wrote stay ours.
    assert netbox(apply=True).complete
    begin("ssh-ed25519 AAAA1")
    assert netbox(apply=True).done == {"devices written": 1, "virtual machines changed": 1}
    begin("ssh-ed25519 AAAA2")
    written = netbox.objects(DEVICES), netbox.objects(MACHINES)
    with transaction(netbox.site.engine) as conn:
        conn.execute(sa.update(nodes).values(state="maintenance"))
        conn.execute(sa.update(allocations).values(state="released"))
    result = netbox(apply=True)
    assert (codes(result), result.done) == (["netbox_foreign_edit"] * 2, {})
    assert (netbox.objects(DEVICES), netbox.objects(MACHINES)) == written
    # Ours goes on.
    begin("ssh-ed25519 AAAA1")
    result = netbox(apply=True)
    done = {"devices written": 1, "journal entries": 1, "virtual machines deleted": 1}
    assert (result.findings, result.done) == ([], done)


def test_a_restored_copy_beside_its_original_is_named_and_writes_nothing(netbox: Pass) -> None:
    def change(state: str, written: object = None) -> None:
        with transaction(netbox.site.engine) as conn:
            conn.execute(sa.update(nodes).values(state=state))
            if written is not None:
                site.store(conn, writer.WRITTEN, written)

    def written() -> object:
        with reading(netbox.site.engine) as conn:
            return site.read(conn, writer.WRITTEN)

    with transaction(netbox.site.engine) as conn:
        netbox.site.allocate(conn)
    netbox(apply=True)
    backup, (before,) = written(), netbox.objects(DEVICES)
    change("maintenance")
    assert netbox(apply=True).done["devices written"] == 1
    original, (row,) = written(), netbox.objects(DEVICES)
    # The copy has the records of the backup, and goes on from there.
    change("draining", backup)
    netbox.begin(row)
    for apply in (False, True):
        result = netbox(apply=apply)
        (finding,) = [row for row in result.findings if row.code == "netbox_other_service"]
        assert (finding.subject, set(methods(netbox))) == ("device n1", {"GET"})
        assert ((result.error or {}).get("code") == "netbox_other_service") is apply
    # The original does not notice.
    change("draining", original)
    netbox.begin(row)
    assert netbox(apply=True).done["devices written"] == 1
    # Both at once: values that the other has written meanwhile stay.
    change("draining", backup)
    netbox.begin(before, edits={"n1": [{"custom_fields": row["custom_fields"]}]})
    assert codes(netbox(apply=True)) == ["netbox_foreign_edit"]
    assert netbox.objects(DEVICES)[0]["custom_fields"]["gpuaas_state"] == "maintenance"
    # A person has ended the other service.
    row["custom_fields"]["gpuaas_written"] = None
    netbox.begin(row)
    assert netbox(apply=True).done["devices written"] == 1


def test_a_foreign_edit_between_reading_and_writing_is_never_overwritten(netbox: Pass) -> None:
    netbox(apply=True)
    with transaction(netbox.site.engine) as conn:
        conn.execute(sa.update(nodes).values(state="maintenance"))
    written = netbox.objects(DEVICES)[0]
    # A person writes a comment: the object is read again, and both changes stay.
    netbox.begin(written, edits={"n1": [{"comments": "rack moved"}]})
    assert netbox(apply=True).done["devices written"] == 1
    (row,) = netbox.objects(DEVICES)
    assert (row["comments"], row["custom_fields"]["gpuaas_state"]) == ("rack moved", "maintenance")
    assert methods(netbox).count("PATCH") == 2

    # A person writes a value of ours: it stays, and is reported.
    edit = {"custom_fields": {"gpuaas_state": "mine"}}
    netbox.begin(written, edits={"n1": [edit]})
    result = netbox(apply=True)
    assert (codes(result), result.done) == (["netbox_foreign_edit"], {})
    assert netbox.objects(DEVICES)[0]["custom_fields"]["gpuaas_state"] == "mine"
    # So do later passes, until a person hands the values over.
    result = netbox(apply=True)
    (finding,) = result.findings
    assert "'mine'" in finding.found and "gpuaas_written" in finding.remedy
    row = netbox.objects(DEVICES)[0]
    row["custom_fields"]["gpuaas_written"] = None
    netbox.begin(row)
    assert netbox(apply=True).done["devices written"] == 1

    # An object that never rests is left alone. (The device is as at first, without a fingerprint.)
    written["custom_fields"]["gpuaas_written"] = None
    netbox.begin(written, edits={"n1": [{"comments": str(n)} for n in range(9)]})
    assert codes(netbox(apply=True)) == ["netbox_busy"]
    # A tag that is taken away meanwhile ends our right to write.
    netbox.begin(written, edits={"n1": [{"tags": []}]})
    assert codes(netbox(apply=True)) == ["netbox_foreign_edit"]
    assert netbox.objects(DEVICES)[0]["custom_fields"]["gpuaas_state"] == "ready"


BOUND = {"assigned_object_type": "virtualization.vminterface", "assigned_object_id": 1}
PEOPLES: list[tuple[str, dict[str, Any]]] = [
    (MACHINES, {"comments": "legal hold"}),
    (MACHINES, {"tags": tags("gpuaas-managed", "hold")}),
    (MACHINES, {"custom_fields": {"owner": "ann"}}),
    (INTERFACES, {"description": "uplink"}),
    (INTERFACES, {"enabled": False}),
    (MACS, {"comments": "legal hold"}),
    (MACS, {"mac_address": "02:00:00:00:00:99"}),
    (ADDRESSES, {"dns_name": "a.example"}),
    (ADDRESSES, {"status": "reserved"}),
    (ADDRESSES, {"address": "10.9.9.9/24"}),
]
ADDED: list[tuple[str, dict[str, Any]]] = [
    (INTERFACES, {"name": "eth9", "virtual_machine": 1}),
    (JOURNAL, {"assigned_object_type": MACHINE_TYPE, "assigned_object_id": 1, "comments": "hold"}),
    (MACS, {"mac_address": "02:00:00:00:00:98", **BOUND}),
    (ADDRESSES, {"address": "10.9.9.8/24", **BOUND}),
]


@pytest.mark.parametrize("state", ["released", "failed"])
def test_what_people_gave_to_a_slice_is_never_deleted_with_it(netbox: Pass, state: str) -> None:
    with transaction(netbox.site.engine) as conn:
        netbox.site.allocate(conn)
    netbox(apply=True)
    with transaction(netbox.site.engine) as conn:
        conn.execute(sa.update(allocations).values(state=state))
    if state == "failed":
        netbox(apply=True)
    with transaction(netbox.site.engine) as conn:
        conn.execute(sa.update(claims).values(state=state))
    record = netbox.record["objects"]
    kinds = (MACHINES, VRFS, INTERFACES, MACS, ADDRESSES)
    rows = {kind: list(record[kind].values()) for kind in kinds}
    hosts = list(record[DEVICES].values())
    whole = state == "released"
    name = rows[MACHINES if whole else INTERFACES][0]["name"]

    def play(network: dict[str, list[dict[str, Any]]], **faults: Any) -> sync.NetboxReading:
        network = {**rows, **network}
        netbox.begin(*hosts, machines=network.pop(MACHINES), network=network, **faults)
        return netbox(apply=True)

    def is_kept(result: sync.NetboxReading) -> bool:
        objects = all(netbox.objects(kind) for kind in kinds)
        return objects and codes(result) == ["netbox_foreign_edit"] and not result.done

    # Without anything of people it goes.
    gone = "virtual machines" if whole else "interface objects"
    assert play({}).done == {f"{gone} deleted": 1}
    for kind, change in PEOPLES:
        if whole or kind != MACHINES:
            row = {**rows[kind][0], **change}
            row["custom_fields"] = {**rows[kind][0]["custom_fields"], **row["custom_fields"]}
            assert is_kept(play({kind: [row]})), change
    for kind, new in ADDED:
        if whole or kind in (MACS, ADDRESSES):
            # Before the pass, and between its lists and the deletion.
            assert is_kept(play({kind: [*rows.get(kind, []), new]})), new
            assert is_kept(play({}, added={name: [[kind, new]]})), new
    # In the last moment: it is not read again and deleted after all.
    assert is_kept(play({}, edits={name: [{"description": "legal hold"}]}))
    assert is_kept(play({}, edits={name: [{}]}))
    if whole:
        assert is_kept(play({}, forbidden=[f"GET {JOURNAL}"]))


@pytest.mark.parametrize(
    ("devices", "faults", "expected"),
    [
        ([device("n1", "10.0.2.15", SLICE, BAREMETAL)], {}, ["netbox_tags_contradict"]),
        ([device("n1", "10.0.2.15", "other")], {}, ["netbox_tag_missing"]),
        (
            [device("n1", serial="A1"), device("gpu9", "10.0.0.99", serial="A1")],
            {},
            ["netbox_serial_twice", "netbox_serial_twice"],
        ),
        ([device("n1"), device("n1", "10.0.0.7")], {}, ["netbox_device_twice"]),
        # New machines: NetBox has a name once in each site, and an address once in each VRF.
        (
            [device("gpu9", "10.0.0.98"), device("gpu9", "10.0.0.99")],
            {},
            ["netbox_missing", *["netbox_new_twice"] * 2],
        ),
        (
            [device("gpu8", "10.0.0.99"), device("gpu9", "10.0.0.99", local_context_data=None)],
            {},
            ["netbox_missing", "netbox_new_twice", "netbox_profile_unknown"],
        ),
        (
            [device("gpu9", "192.0.2.1")],
            {"prefixes": [PREFIX]},
            ["netbox_address_outside", "netbox_missing"],
        ),
        ([device("gpu9", "10.0.2.15")], {}, ["netbox_address_taken", "netbox_missing"]),
        # Written by another service.
        (
            [device("gpu9", "10.0.0.9", custom_fields={"gpuaas_node_id": "gpu9"})],
            {},
            ["netbox_missing", "netbox_node_unknown"],
        ),
        ([device("gpu9", "fe80::1%x")], {}, ["netbox_address_missing", "netbox_missing"]),
        ([device("gpu9", "127.0.0.1")], {}, ["netbox_address_missing", "netbox_missing"]),
        (
            [device("Rack 1; rm", "10.0.0.9", local_context_data={"gpuaas": ["x"]})],
            {},
            ["netbox_missing", "netbox_name_invalid", "netbox_profile_unknown"],
        ),
        ([device(None, "10.0.0.9")], {}, ["netbox_missing", "netbox_name_invalid"]),
        (
            [device("gpu9", "10.0.0.9", site={"id": 1, "slug": "-" * 90})],
            {},
            ["netbox_missing", "netbox_site_invalid"],
        ),
        ([device("n1")], {"fields": ["gpuaas_state"]}, ["netbox_field_missing"]),
    ],
)
def test_contradictions_are_named_and_nothing_is_done_about_them(
    netbox: Pass, devices: list[dict[str, Any]], faults: dict[str, Any], expected: list[str]
) -> None:
    netbox.begin(*devices, **faults)
    result = netbox(apply=True)
    assert result.complete
    assert codes(result) == expected
    assert all(row.found and row.remedy for row in result.findings)
    assert (result.done, set(methods(netbox))) == ({}, {"GET"})
    with reading(netbox.site.engine) as conn:
        assert [node.id for node in node_records.every(conn)] == ["n1"]


def test_a_node_with_an_address_outside_the_networks_of_its_site_is_named_and_shown(
    netbox: Pass,
) -> None:
    netbox.begin(device("n1"), prefixes=[{**PREFIX, "prefix": "192.0.2.0/24"}])
    result = netbox(apply=True)
    assert (codes(result), result.done) == (["netbox_address_outside"], {"devices written": 1})
    # The network of a room of another site says nothing about this site.
    room = {"prefix": "192.0.2.0/24", "scope_type": "dcim.location", "scope_id": 1, "_site": 2}
    there = {"site": {"id": 2, "slug": "fra1"}}
    for address, expected in (("192.0.2.9", "new_device"), ("10.0.2.16", "address_outside")):
        netbox.begin(device("n1"), device("gpu9", address, **there), prefixes=[room])
        assert [(row.code, row.subject) for row in netbox().findings if row.action != "write"] == [
            (f"netbox_{expected}", "device gpu9")
        ]


@pytest.mark.parametrize(
    ("serials", "devices", "expected"),
    [
        ({"n1": "S7"}, [device("n1", serial="S1")], ["serial_differs"]),
        ({"n1": "S7", "n2": "s7"}, [device("n1", serial="S7")], ["missing", *["serial_twice"] * 2]),
        # The machine of n1 under another name.
        ({"n1": "S7"}, [device("gpu9", "10.0.0.9", serial="S7")], ["missing", "serial_taken"]),
        ({"n1": "S7"}, [device("n1", serial="s7 ")], []),
        ({"n1": "Unknown"}, [device("n1", serial="S1")], []),
        ({"n1": "S7"}, [device("n1", serial="0")], []),
    ],
)
def test_a_device_with_another_serial_number_than_the_host_is_not_written_to(
    netbox: Pass, serials: dict[str, str], devices: list[dict[str, Any]], expected: list[str]
) -> None:
    with transaction(netbox.site.engine) as conn:
        for node_id, serial in serials.items():
            if node_id != "n1":
                node_records.create(conn, ADMIN, id=node_id, address="10.0.2.17")
            node_records.update(conn, node_id, hardware={"serial": serial})
    netbox.begin(*devices)
    result = netbox(apply=True)
    assert codes(result) == [f"netbox_{name}" for name in expected]
    assert set(methods(netbox)) == ({"GET"} if expected else {"GET", "PATCH"})


def test_a_host_with_the_serial_number_of_another_stops_only_itself(netbox: Pass) -> None:
    """NetBox itself knows both machines, and a third machine that is no node yet."""
    third = device("n3", "10.0.2.18", serial="S3")
    devices = [device("n1", serial="S1"), device("n2", "10.0.2.17", serial="S2")]
    with transaction(netbox.site.engine) as conn:
        node_records.create(conn, ADMIN, id="n2", address="10.0.2.17")
        for node_id in ("n1", "n2"):
            node_records.update(conn, node_id, hardware={"serial": "S1"})
    netbox.begin(*devices)
    result = netbox(apply=True)
    assert (codes(result), result.done) == (["netbox_serial_twice"], {"devices written": 1})
    assert result.findings[0].subject == "node n2"
    with transaction(netbox.site.engine) as conn:
        node_records.update(conn, "n2", hardware={"serial": "S3"})
    netbox.begin(*devices, third)
    assert "netbox_serial_taken" not in codes(netbox())
    # MAAS knows the number of its own machine, where NetBox has none.
    bound = {"system_id": "abc123", "identity": {"serial": "S2"}}
    with transaction(netbox.site.engine) as conn:
        node_records.update(conn, "n2", maas=bound)
    netbox.begin(devices[0], device("n2", "10.0.2.17"), third)
    assert "netbox_serial_taken" not in codes(netbox())


@pytest.mark.parametrize(
    ("machine", "device_serial", "first", "blocked"),
    [
        # MAAS or NetBox knows the machine of n1 by the number; n2 came with another number.
        ("S1", "", "S2", ["n2"]),
        ("", "S1", "S2", ["n2"]),
        ("", "", "S2", ["n1", "n2"]),
        ("S1", "", "S1", ["n1", "n2"]),
        # MAAS and NetBox contradict each other.
        ("S1", "S9", "S2", ["n1", "n2"]),
    ],
)
def test_a_device_is_written_while_another_host_takes_its_serial_number(
    netbox: Pass, machine: str, device_serial: str, first: str, blocked: list[str]
) -> None:
    bound = {"system_id": "abc123", "identity": {"serial": machine}} if machine else None
    with transaction(netbox.site.engine) as conn:
        node_records.create(conn, ADMIN, id="n2", address="10.0.2.17")
        node_records.update(conn, "n1", hardware={"serial": "S1"}, maas=bound)
        taken = {"serial": "S1"} | ({"first_serial": first} if first != "S1" else {})
        node_records.update(conn, "n2", hardware=taken)
    netbox.begin(device("n1", serial=device_serial), device("n2", "10.0.2.17"))
    result = netbox(apply=True)
    named = [row.subject for row in result.findings if row.code == "netbox_serial_twice"]
    assert named == [f"node {id}" for id in blocked]
    assert result.done == ({"devices written": 1} if blocked == ["n2"] else {})


@pytest.mark.parametrize(
    ("faults", "code"),
    [
        ({"body": "<!DOCTYPE html><title>Log in</title>"}, "netbox_silent"),
        ({"body": '{"results": 7}'}, "netbox_silent"),
        ({"body": '{"results": [{"id": "x"}]}'}, "netbox_silent"),
        ({"body": "[" * 100_000}, "netbox_silent"),
        ({"status": {"GET": 503}}, "netbox_silent"),
        ({"status": {"GET": 302}}, "netbox_refused"),
        ({"status": {"GET": 429}}, "netbox_silent"),
        ({"version": "4.5"}, "netbox_too_old"),
        ({"version": ""}, "netbox_too_old"),
        ({"token": "0123456789abcdef"}, ""),
        ({"forbidden": [f"GET {DEVICES}"]}, "netbox_forbidden"),
        # Not the whole answer, in the whole time.
        ({"drip_s": 0.2}, "netbox_silent"),
    ],
)
def test_an_answer_that_is_none_ends_the_pass_by_name(
    netbox: Pass, faults: dict[str, Any], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "drip_s" in faults:
        monkeypatch.setattr(client.Client, "DEADLINE_S", 1.0)
    netbox.begin(device("n1"), **faults)
    result = netbox(apply=True)
    assert (result.error or {}).get("code", "") == code
    assert result.complete is (not code)
    assert "PATCH" not in methods(netbox) or not code
    with reading(netbox.site.engine) as conn:
        assert (sync.READINGS.latest(conn) or {})["error"] == result.error


def test_text_that_a_database_cannot_store_ends_no_pass(
    on_either: Site, process: Manager, tmp_path: Path
) -> None:
    settings = Settings(state_dir=tmp_path, profiles_dir=PROFILES, **process.settings)
    netbox = Pass(on_either, process, settings)
    other = device("n2", "10.0.0.2", custom_fields={"gpuaas_written": "\0"})
    netbox.begin(device("n1", asset_tag="A\0"), other)
    result = netbox(apply=True)
    assert (result.error, result.complete, result.done["devices written"]) == (None, True, 1)
    with reading(on_either.engine) as conn:
        kept = node_records.get(conn, "n1").netbox or {}
        assert kept["asset_tag"] == "A\ufffd"
        assert "\0" not in site.read(conn, writer.WRITTEN)["2"]


def test_an_object_without_a_usable_version_is_not_written(
    netbox: Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is outside of the calendar, or its ETag cannot be sent back."""
    answers: list[Any] = []

    class Recorded(client.Client):
        def _request(self, method: str, path: str, **arguments: Any) -> tuple[Any, httpx.Headers]:
            answer, headers = super()._request(method, path, **arguments)
            if method == "GET" and path == "/dcim/devices/1/":
                headers = httpx.Headers([(b"ETag", b'W/"\xe9"')])
            if method == "GET" and isinstance(answer, dict):
                for row in answer.get("results", [answer]):
                    if row.get("name") == "n1":
                        row["last_updated"] = "9999-12-31T23:59:59-12:00"
                        answers.append(row)
            return answer, headers

    monkeypatch.setattr(sync, "Client", Recorded)
    netbox.begin(device("n1"), device("gpu9", "10.0.0.99"))
    result = netbox(apply=True)
    assert (result.error, result.complete) == (None, True)
    assert codes(result) == ["netbox_busy"]
    assert result.done == {"nodes added": 1, "devices written": 1}
    assert len(answers) > 1, "it was read again"


def test_refused_and_unanswered_writes(netbox: Pass) -> None:
    with transaction(netbox.site.engine) as conn:
        netbox.site.allocate(conn)
    # Of a single object: a finding, and the others are written.
    netbox.begin(device("n1"), invalid=["n1"])
    result = netbox(apply=True)
    assert (codes(result), result.complete) == (["netbox_refused"], True)
    assert result.done == {"virtual machines created": 1, **NETWORK}
    # Of the token: the end of the pass, after one request.
    netbox.begin(device("n1"), forbidden=[f"PATCH {DEVICES}"])
    result = netbox(apply=True)
    assert (result.error or {})["code"] == "netbox_forbidden"
    assert methods(netbox).count("PATCH") == 1
    assert "netbox_outdated" in codes(result)
    # An answer without the effect.
    netbox.begin(device("n1"), deaf=["PATCH"])
    assert "netbox_not_taken" in codes(netbox(apply=True))


def test_an_object_that_netbox_cannot_write_keeps_no_other_from_being_written(netbox: Pass) -> None:
    others = [device(f"d{n}", f"10.2.0.{n}") for n in range(3)]
    netbox.begin(device("n1"), *others)
    assert netbox(apply=True).complete
    with transaction(netbox.site.engine) as conn:
        conn.execute(sa.update(nodes).values(state="maintenance"))
    netbox.begin(*netbox.objects(DEVICES), broken=["n1"])
    result = netbox(apply=True)
    assert (result.complete, (result.error or {})["code"]) == (False, "netbox_silent")
    assert f"PATCH {DEVICES}1/" in (result.error or {})["expected"]
    assert (result.done["devices written"], result.done["journal entries"]) == (3, 3)
    states = {row["name"]: row["custom_fields"]["gpuaas_state"] for row in netbox.objects(DEVICES)}
    assert states == {"n1": "ready", **dict.fromkeys(("d0", "d1", "d2"), "maintenance")}
    # Several in a row mean NetBox itself.
    with transaction(netbox.site.engine) as conn:
        conn.execute(sa.update(nodes).values(state="draining"))
    names = ["n1", "d0", "d1", "d2"]
    netbox.begin(*netbox.objects(DEVICES), broken=names, network=journal_of(netbox))
    assert netbox(apply=True).error
    # The test of lists, the list, and objects.
    assert methods(netbox).count("PATCH") == 2 + writer._MOST_SILENCES
    netbox.begin(*netbox.objects(DEVICES), network=journal_of(netbox))
    assert netbox(apply=True).done == {"devices written": 4, "journal entries": 4}
    assert netbox(apply=True).done == {}


def test_an_object_that_netbox_cannot_create_keeps_no_change_back(netbox: Pass) -> None:
    with transaction(netbox.site.engine) as conn:
        first = netbox.site.allocate(conn)
    assert netbox(apply=True).complete
    with transaction(netbox.site.engine) as conn:
        second = netbox.site.allocate(conn)
        change = sa.update(allocations).where(allocations.c.id == first)
        conn.execute(change.values(state="active"))
    (row,), kinds = netbox.objects(MACHINES), (VRFS, INTERFACES, MACS, ADDRESSES)
    network = {kind: netbox.objects(kind) for kind in kinds}
    broken = [f"gpuaas-slice-{second.replace('-', '')}"]
    netbox.begin(*netbox.objects(DEVICES), machines=[row], network=network, broken=broken)
    assert (netbox(apply=True).error or {})["code"] == "netbox_silent"
    assert [row["status"] for row in netbox.objects(MACHINES)] == ["active"]


def test_an_object_that_netbox_cannot_create_keeps_no_other_back(netbox: Pass) -> None:
    with transaction(netbox.site.engine) as conn:
        keys = [netbox.site.allocate(conn) for _ in range(2)]
    names = [f"gpuaas-slice-{key.replace('-', '')}" for key in keys]
    for broken in names:
        netbox.begin(device("n1"), broken=[broken])
        result = netbox(apply=True)
        assert (result.error or {})["code"] == "netbox_silent"
        assert {row.subject for row in result.findings if row.code == "netbox_silent"} == {broken}
        assert [row["name"] for row in netbox.objects(MACHINES)] == [
            n for n in names if n != broken
        ]
        assert len(netbox.objects(ADDRESSES)) == 1
    # An error after the effect makes nothing twice.
    netbox.begin(device("n1"), lost={f"POST {MACHINES}": 1}, lost_status=500)
    result = netbox(apply=True)
    assert (result.complete, codes(result)) == (True, [])
    assert sorted(row["name"] for row in netbox.objects(MACHINES)) == sorted(names)


def test_a_journal_that_netbox_cannot_write_keeps_nothing_else_back(netbox: Pass) -> None:
    fleet(netbox, 7)
    netbox(apply=True)
    with transaction(netbox.site.engine) as conn:
        netbox.site.allocate(conn)
        conn.execute(sa.update(nodes).values(state="maintenance"))
    for _ in range(2):
        netbox.begin(*netbox.objects(DEVICES), broken=[f"POST {JOURNAL}"])
        result = netbox(apply=True)
        assert (result.error or {})["code"] == "netbox_silent"
        assert result.done["virtual machines created"] == 1
    netbox.begin(*netbox.objects(DEVICES))
    assert netbox(apply=True).done["journal entries"] == 8
    # It was looked whether NetBox has them.
    looks = [row for row in netbox.record["requests"] if row.startswith(f"GET {JOURNAL}")]
    assert len(looks) == 1


def journal_of(netbox: Pass) -> dict[str, list[dict[str, Any]]]:
    return {JOURNAL: netbox.objects(JOURNAL)}


def test_an_answer_about_another_object_is_none(netbox: Pass) -> None:
    """A cache before NetBox answers a read, after which this object would be written."""
    other = device("gpu7", "127.0.0.1")
    edit = [{"serial": "new"}]
    netbox.begin(device("n1"), other, edits={"n1": edit}, others={f"{DEVICES}1/": 2})
    assert (netbox(apply=True).error or {})["code"] == "netbox_silent"
    assert not any(netbox.objects(DEVICES)[1]["custom_fields"].values())
    # Objects that NetBox creates are those that were asked for.
    with transaction(netbox.site.engine) as conn:
        netbox.site.allocate(conn)
        netbox.site.allocate(conn)
    netbox.begin(device("n1"), backwards=True)
    result = netbox(apply=True)
    assert "other objects" in (result.error or {})["found"]
    assert netbox.objects(INTERFACES) == []


@pytest.mark.parametrize("number", [1, 2])
def test_a_journal_entry_goes_to_no_device_of_a_netbox_that_was_built_anew(
    netbox: Pass, number: int
) -> None:
    netbox(apply=True)
    (row,) = netbox.objects(DEVICES)
    with transaction(netbox.site.engine) as conn:
        conn.execute(sa.update(nodes).values(state="maintenance"))
    netbox.begin(row, status={"POST": 504})
    assert netbox(apply=True).error
    (row,) = netbox.objects(DEVICES)
    # The number of the device belongs to another device, or to none.
    stranger = device("stranger", "10.9.9.9", "theirs")
    netbox.begin({**row, "id": 3}, {**stranger, "id": number})
    assert netbox(apply=True).complete
    with transaction(netbox.site.engine) as conn:
        conn.execute(sa.update(nodes).values(state="draining"))
    result = netbox(apply=True)
    assert (codes(result), result.done["journal entries"]) == ([], 1)
    assert [row["assigned_object_id"] for row in netbox.objects(JOURNAL)] == [3]


def test_a_journal_entry_without_a_reason_is_written_once(netbox: Pass) -> None:
    netbox(apply=True)
    rows = netbox.objects(DEVICES)
    with transaction(netbox.site.engine) as conn:
        conn.execute(sa.update(nodes).values(state="maintenance", state_reason=""))
    netbox.begin(*rows, lost={f"POST {JOURNAL}": 1})
    assert netbox(apply=True).error
    assert netbox(apply=True).complete
    assert len(netbox.objects(JOURNAL)) == 1


def test_names_in_other_scripts_fit_in_a_query(netbox: Pass) -> None:
    with transaction(netbox.site.engine) as conn:
        for number in range(40):
            name = f"{number:02}" + "\N{CJK UNIFIED IDEOGRAPH-6A5F}" * 40
            node_records.create(conn, ADMIN, id=f"x{number}", name=name, address="10.0.0.2")
    result = netbox()
    assert (result.complete, result.counts["netbox_missing"]) == (True, 40)


@pytest.mark.parametrize(
    ("where", "name", "most", "found"),
    [
        (client.Client, "TOTAL", 5000, "more than 5000 bytes"),
        (client.Client, "LARGEST", 600, "more than 600 bytes"),
        (client, "_MOST", 50, "more than 50 objects"),
    ],
)
def test_a_pass_holds_no_more_than_a_site_of_the_largest_size_has(
    netbox: Pass, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, most: int, found: str
) -> None:
    monkeypatch.setattr(where, name, most)
    netbox.begin(*(device(f"d{n}", f"10.2.0.{n}") for n in range(90)), page=3)
    result = netbox(apply=True)
    error = result.error or {}
    assert (error["code"], found in error["found"]) == ("netbox_too_large", True), error
    assert not result.complete and "PATCH" not in methods(netbox)


def test_a_site_of_1000_hosts_is_read_at_once() -> None:
    """16 slices each, with 4.2 KB for machine, interface and two addresses, and 2 KB for a host."""
    assert 1000 * (16 * 4200 + 2000) < client.Client.TOTAL < 100 << 20
    assert client._MOST > 1000 * 16
    assert 500 * 8 * 2000 < client.Client.LARGEST < 10 << 20


def test_a_process_that_leads_no_more_stops_writing(
    netbox: Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deposed(_engine: object) -> Any:
        raise Deposed("not_leader", expected="", found="", remedy="")

    monkeypatch.setattr(leader, "require_of", deposed)
    with pytest.raises(Deposed):
        netbox(apply=True)
    assert "PATCH" not in methods(netbox)


def test_a_pass_without_time_is_continued(netbox: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each request takes a second of 27, of which the last 15 are kept for an answer.
    monkeypatch.setattr(client.Client, "left_s", property(lambda self: 27.0 - self.requests))
    with transaction(netbox.site.engine) as conn:
        netbox.site.allocate(conn)
        netbox.site.allocate(conn)
        sync.ask(conn, netbox.settings, ADMIN, apply=True)
    passes: list[dict[str, Any]] = []
    while not passes or not passes[-1]["complete"]:
        sync.tend(netbox.site.engine, netbox.settings)
        with reading(netbox.site.engine) as conn:
            passes.append(sync.READINGS.get(conn))
        assert passes[-1]["error"] is None and passes[-1]["done"], "each pass goes on"
    assert len(passes) > 1 and passes[0]["counts"]["netbox_unfinished"] == 1
    assert sum(row["done"].get("references set", 0) for row in passes) == 4
    assert (passes[-1]["findings"], codes(netbox())) == ([], [])


def test_objects_are_written_together_and_a_foreign_edit_is_kept(netbox: Pass) -> None:
    fleet(netbox, 7)
    netbox(apply=True)
    with transaction(netbox.site.engine) as conn:
        conn.execute(sa.update(nodes).values(state="maintenance"))
    first = netbox.objects(DEVICES)

    def states() -> list[str]:
        return [row["custom_fields"]["gpuaas_state"] for row in netbox.objects(DEVICES)]

    # One request asks whether NetBox compares the ETags of a list, one writes the list.
    netbox.begin(*first)
    assert netbox(apply=True).done["devices written"] == 8
    assert (methods(netbox).count("PATCH"), set(states())) == (2, {"maintenance"})

    # After a foreign change the list is not written, then each device by itself.
    for edit in ({"comments": "moved"}, {"custom_fields": {"gpuaas_state": "mine"}}):
        netbox.begin(*first, edits={"h003": [{}, edit]})
        result = netbox(apply=True)
        foreign = "comments" not in edit
        assert codes(result) == ["netbox_foreign_edit"] * foreign
        assert result.done["devices written"] == 8 - foreign
        row = next(row for row in netbox.objects(DEVICES) if row["name"] == "h003")
        for name, value in edit.items():
            assert row[name] == ({**row[name], **value} if isinstance(value, dict) else value)
        assert states().count("maintenance") == 8 - foreign

    # A device that NetBox refuses does not keep back the others.
    netbox.begin(*first, invalid=["h003"])
    result = netbox(apply=True)
    assert (codes(result), result.done["devices written"]) == (["netbox_refused"], 7)
    # Nor are lists written to a NetBox that does not compare their ETags.
    netbox.begin(
        *first, blind=True, edits={"h003": [{}, {"custom_fields": {"gpuaas_state": "mine"}}]}
    )
    assert codes(netbox(apply=True)) == ["netbox_foreign_edit"]
    assert states().count("mine") == 1
    # Of an answer that is lost, the next pass sees the effect.
    netbox.begin(*first, lost={f"PATCH {DEVICES}": 2})
    assert (netbox(apply=True).error or {})["code"] == "netbox_silent"
    netbox(apply=True)
    assert (codes(netbox()), set(states())) == ([], {"maintenance"})


@pytest.mark.long
def test_3000_slices_take_a_bounded_number_of_requests(
    netbox: Pass, record_property: Callable[[str, object], None]
) -> None:
    fleet(netbox, 375, slices=True)

    def measured(name: str) -> sync.NetboxReading:
        began, used = time.monotonic(), time.process_time()
        result = netbox(apply=True)
        seconds = (time.monotonic() - began, time.process_time() - used)
        record_property(name, (result.requests, *(round(value, 1) for value in seconds)))
        return result

    passes: list[sync.NetboxReading] = []
    while not passes or not passes[-1].complete:
        passes.append(measured(f"pass {len(passes) + 1}: requests, seconds, of them processor"))
        assert passes[-1].error is None and passes[-1].done
    for kind, count in (("virtual machines created", 3001), ("references set", 6002)):
        assert sum(row.done.get(kind, 0) for row in passes) == count
    # Lists of 50: the devices, four kinds of objects of each slice, two references, VRFs of nodes.
    lists = 8 + 6 * 61 + 8
    # Of each pass: pages of 500 of machines, interfaces, addresses and MAC addresses, and the rest.
    # Work that a pass has no time for is begun anew, so that its lists may be cut differently.
    assert sum(row.requests for row in passes) <= lists + (4 * 7 + 8 + 6) * len(passes)
    at_rest = measured("at rest")
    assert (at_rest.findings, at_rest.done) == ([], {})
    assert at_rest.requests <= 4 * 7 + 8


def fleet(netbox: Pass, count: int, *, slices: bool = False) -> None:
    """Nodes with eight slots each and their devices. slices: each slot has an active slice."""
    if slices:
        with transaction(netbox.site.engine) as conn:
            key = netbox.site.active(conn)
    with transaction(netbox.site.engine) as conn:
        node = conn.execute(sa.select(nodes)).mappings().one()
        slot = conn.execute(sa.select(slots)).mappings().first()
        assert slot is not None
        names = [f"h{n:03d}" for n in range(count)]
        conn.execute(
            sa.insert(nodes),
            [{**node, "id": name, "name": name, "address": f"10.1.{n // 256}.{n % 256}"}
             for n, name in enumerate(names)],
        )  # fmt: skip
        free = {"status": "disabled", "available_proof_id": None, "last_proof_id": None}
        conn.execute(
            sa.insert(slots),
            [{**slot, **free, "id": f"{name}-{i}", "node_id": name, "slot_index": i,
              "gpu_pci_address": str(i), "fabric_vf_pci_address": str(i), "private_ip": str(i),
              "nvme_identity": f"{name}{i}", "management_mac": f"{name}{i}"}
             for name in names for i in range(8)],
        )  # fmt: skip
        if slices:
            of_node = [(name, i, f"{n:06d}{i:02d}-0000-4000-8000-000000000000")
                       for n, name in enumerate(names) for i in range(8)]  # fmt: skip
            # n below counts the slices.
            allocation = row_of(conn, allocations, allocations.c.id == key)
            claim = row_of(conn, claims, claims.c.allocation_id == key)
            conn.execute(
                sa.insert(allocations),
                [{**allocation, "id": id, "node_id": name} for name, _, id in of_node],
            )  # fmt: skip
            conn.execute(
                sa.insert(claims),
                [{**claim, "id": f"claim-{id}", "allocation_id": id, "node_id": name,
                  "slot_id": f"{name}-{i}", "private_ip": f"10.100.0.{i + 2}",
                  "gpu_pci_address": str(i), "fabric_vf_pci_address": str(i),
                  "nvme_identity": f"{name}{i}",
                  "management_mac": f"52:54:00:{n // 2048:02x}:{n // 8 % 256:02x}:{i:02x}"}
                 for n, (name, i, id) in enumerate(of_node)],
            )  # fmt: skip
    netbox.begin(
        *(device(name, f"10.1.{n // 256}.{n % 256}") for n, name in enumerate(names)),
        device("n1"),
        unchecked=slices,
    )


def row_of(conn: sa.Connection, table: Any, where: Any) -> dict[str, Any]:
    columns = [column for column in table.c if column.computed is None]
    return dict(conn.execute(sa.select(*columns).where(where)).mappings().one())


def test_3000_slots_take_a_bounded_number_of_requests(netbox: Pass) -> None:
    count = 375
    fleet(netbox, count)
    passes = [netbox(apply=True)]
    while not passes[-1].complete:
        passes.append(netbox(apply=True))
        assert passes[-1].error is None and passes[-1].done
    # Devices in lists of 50, and one request about lists and four that read in each pass.
    assert sum(row.done["devices written"] for row in passes) == count + 1
    assert sum(row.requests for row in passes) == 8 + 5 * len(passes)
    compared = netbox()
    assert (compared.requests, compared.findings) == (4, [])


def test_pages_are_read_to_their_end(netbox: Pass) -> None:
    netbox.begin(*(device(f"d{n}", f"10.2.0.{n}") for n in range(7)), device("n1"), page=3)
    result = netbox()
    assert (result.devices, result.requests) == (8, 3 + 1 + 1 + 1)
