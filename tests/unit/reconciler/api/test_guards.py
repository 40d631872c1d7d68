"""If-Match: an update that was decided on an old picture is refused and changes nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.unit.reconciler.api.refusals import refused
from tests.unit.reconciler.api.world import NODE, World

pytestmark = pytest.mark.covers("CTRL-1")
PATH = f"admin/nodes/{NODE}"
SLOTS = f"{PATH}/resource-slots"


def test_a_node_changes_only_as_it_was_read(new: World) -> None:
    admin = new.client("admin")
    tag = admin.get(PATH).headers["ETag"]
    changed = admin.patch(PATH, json={"region": "eu"}, headers={"If-Match": tag})
    assert changed.status_code == 200
    assert changed.headers["ETag"] != tag
    stale = refused(
        new, lambda: admin.patch(PATH, json={"region": "us"}, headers={"If-Match": tag})
    )
    assert (stale["status"], stale["code"]) == (412, "precondition_failed")
    assert f'"{stale["generation"]}"' == changed.headers["ETag"]
    now = {"If-Match": f'"0", {changed.headers["ETag"]}'}
    assert admin.patch(PATH, json={"region": "us"}, headers=now).status_code == 200
    assert admin.patch(PATH, json={"region": "eu"}, headers={"If-Match": "*"}).status_code == 200
    assert admin.patch(PATH, json={"region": "us"}).status_code == 200


@pytest.mark.parametrize("given", ["", "3", '"x"', '""', '"-1"', '"99999999999999999999"'])
def test_what_is_no_tag_matches_nothing(new: World, given: str) -> None:
    admin = new.client("admin")
    answer = admin.patch(PATH, json={"region": "eu"}, headers={"If-Match": given})
    assert (answer.status_code, answer.json()["code"]) == (412, "precondition_failed")


def test_a_weak_tag_matches_nothing(new: World) -> None:
    admin = new.client("admin")
    weak = "W/" + admin.get(PATH).headers["ETag"]
    answer = admin.patch(PATH, json={"region": "eu"}, headers={"If-Match": weak})
    assert answer.status_code == 412


@pytest.mark.parametrize("act", ["disable", "enable", "withdraw", "repair"])
def test_acts_on_slots_are_guarded(selling: World, act: str) -> None:
    admin = selling.client("admin")
    slot = admin.get(SLOTS).json()["items"][0]["id"]
    tag = admin.get(f"{SLOTS}/{slot}").headers["ETag"]
    disabled = admin.post(f"{SLOTS}/{slot}/disable", headers={"If-Match": tag})
    assert disabled.status_code == 200
    assert disabled.headers["ETag"] == admin.get(f"{SLOTS}/{slot}").headers["ETag"]
    ask: dict[str, Any] = {"headers": {"If-Match": tag}}
    stale = refused(selling, lambda: admin.post(f"{SLOTS}/{slot}/{act}", **ask))
    assert stale["code"] == "precondition_failed"


@pytest.mark.parametrize(
    ("verb", "path", "body"),
    [
        ("PUT", "scheduling", {"enabled": False}),
        ("POST", "conversion", {"to": "baremetal"}),
        ("POST", "drain", {"reason": "test"}),
    ],
)
def test_acts_on_nodes_are_guarded(
    selling: World, verb: str, path: str, body: dict[str, Any]
) -> None:
    admin = selling.client("admin")
    stale = refused(
        selling,
        lambda: admin.request(verb, f"{PATH}/{path}", json=body, headers={"If-Match": '"0"'}),
    )
    assert stale["code"] == "precondition_failed"


def test_of_two_at_once_one_wins(new: World) -> None:
    tag = new.client("admin").get(PATH).headers["ETag"]

    def change(region: str) -> int:
        headers = {"If-Match": tag}
        return new.client("admin").patch(PATH, json={"region": region}, headers=headers).status_code

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(change, "abcd")) == [200, 412, 412, 412]


def test_a_repetition_is_answered_although_the_record_went_on(new: World) -> None:
    admin = new.client("admin")
    headers = {"If-Match": admin.get(PATH).headers["ETag"], "Idempotency-Key": "k1"}
    first = admin.patch(PATH, json={"region": "eu"}, headers=headers)
    again = admin.patch(PATH, json={"region": "eu"}, headers=headers)
    assert (first.status_code, again.status_code) == (200, 200)
    assert again.headers["Idempotency-Replayed"] == "true"
    assert again.headers["ETag"] == first.headers["ETag"]
