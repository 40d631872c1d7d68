"""Every page of the console, for each role, without scripts."""

from __future__ import annotations

import hashlib
import html
import json
import logging
import re
import shlex
import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
import sqlalchemy as sa
import yaml
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.routing import Mount

from reconciler.api import contract
from reconciler.api.catalog import AnswerCache
from reconciler.console import guard, operators, pages
from reconciler.console.app import OPERATORS, SHARED
from reconciler.console.pages import HERE, HTMX, SSE, UNSHOWN
from reconciler.db import journal, leader
from reconciler.db.engine import reading, transaction
from reconciler.db.schema import (
    AppInstance,
    allocations,
    api_tokens,
    console_sessions,
    nodes,
    pool_workers,
    service_processes,
    slots,
    ssh_keys,
)
from reconciler.inventory import maas_sync, readings, sync
from reconciler.inventory.compare import Finding
from reconciler.lifecycle import host, slices
from reconciler.model.jobs import Outcome
from reconciler.model.states import NodeMode, TaskKind, TaskState
from reconciler.pools import control
from reconciler.records import images as image_records
from reconciler.records import leasing, queue, ssh_sessions
from reconciler.records import nodes as node_records
from reconciler.records import projects as project_records
from reconciler.records.ssh_keys import fingerprint
from reconciler.service.process import adopt
from reconciler.settings import PROJECT
from reconciler.trust import ca
from tests.unit.reconciler import wipes
from tests.unit.reconciler.api.stack import ACT, FREE, IMAGE, KEY, NODE, Stack, bundle, discovery
from tests.unit.reconciler.api.test_baremetal import BODY as METAL
from tests.unit.reconciler.api.test_baremetal import let_in
from tests.unit.reconciler.api.test_canaries import (
    ERROR,
    Watch,
    canaries,
    deploy,
    fail,
    member_operations,
)
from tests.unit.reconciler.api.test_ingress import ADDRESS, with_addresses
from tests.unit.reconciler.api.test_jobs import bury, enqueue, play, with_model
from tests.unit.reconciler.api.test_launches import PATH, activate, launch, with_profile
from tests.unit.reconciler.api.test_usage import priced
from tests.unit.reconciler.benchmark.sshd import new_key
from tests.unit.reconciler.conftest import Site
from tests.unit.reconciler.console.browser import SAME, Browser, Page, SentForm
from tests.unit.reconciler.console.samples import busy_pools, dead_letter
from tests.unit.reconciler.lifecycle.test_recovery_cases import Story
from tests.unit.reconciler.pools.test_pools import start

pytestmark = pytest.mark.covers("CTRL-13")

Browse = Callable[[str], Browser]
# Operations that no page offers, with the reason.
NOT_OFFERED = {
    "PUT /admin/nodes/{}/bmc-firmware": "its body is the output of a program",
    "POST /nodes/{}/enrol": "hosts call it",
    "POST /projects/{}/jobs": "programs send jobs, and `gpuaas jobs`",
    "POST /jobs": "as above",
    "POST /jobs/{}/cancel": "as above",
    "POST /projects/{}/jobs/batch": "as above",
    "PATCH /admin/projects/{}/quota": "the form replaces all limits",
    "PATCH /admin/settings/default-quota": "as above",
    "POST /nodes/{}/userdata": "machines that MAAS installs call it",
    "POST /pools/{}/token": "`gpuaas pools token`, whose output is a file of the worker's machine",
    **dict.fromkeys(
        (f"POST /worker/{act}" for act in ("register", "turn", "renew", "due", "leave")),
        "workers call it",
    ),
    "POST /admin/nodes/{}/maas-deploy": "`gpuaas maas deploy`, which asks",
    "POST /admin/nodes/{}/maas-release": "`gpuaas maas release`, which asks",
    "POST /admin/nodes/{}/maas-unbind": "`gpuaas maas unbind`",
}


def names(selling: Stack) -> dict[str, str]:
    """An existing object for every name in the address of a page."""
    admin = selling.client("admin")
    return {
        "project": "demo",
        "node": NODE,
        "allocation": launch(selling).json()["id"],
        "slot": admin.get(f"admin/nodes/{NODE}/resource-slots").json()["items"][0]["id"],
        "task": admin.get("admin/tasks").json()["items"][0]["id"],
        "correlation": "some-request",
        "session": "some-session",
        "pool": busy_pools(selling),
        "job": dead_letter(selling),
        "app": empty_app(selling),
    }


def empty_app(selling: Stack) -> str:
    """An application without machines."""
    values = {"slug": "slurm-reference", "managed_key": KEY, "status": "deploying"}
    values |= dict.fromkeys(("status_reason", "requested_by", "correlation_id"), "test")
    with transaction(selling.engine) as conn:
        made = journal.create(conn, AppInstance, ACT, project_id="demo", name="empty", **values)
    return made.id


def address(pattern: str, ids: dict[str, str]) -> str:
    return "/console" + re.sub(r"\{(\w+)\}", lambda part: ids[part[1]], pattern)


def test_every_link_of_every_page_leads_somewhere(selling: Stack, browse: Browse) -> None:
    ids = names(selling)
    activate(selling, ids["allocation"])
    for who, patterns in (("admin", (*SHARED, *OPERATORS)), ("member", tuple(SHARED))):
        browser = browse(who)
        waiting = [address(pattern, ids) for pattern in patterns]
        seen: set[str] = set()
        while waiting:
            path = waiting.pop()
            if path in seen or path.startswith("#"):
                continue
            seen.add(path)
            answer = browser.get(path)
            assert answer.status_code in (200, 303), (who, path, answer.text)
            page = Page(answer.text)
            assert answer.status_code == 303 or page.links, path
            base = urlsplit(path).path
            waiting += [base + link if link[:1] == "?" else link for link in page.links]
        assert len(seen) >= len(patterns)


@pytest.mark.parametrize("part", ["%2e", "%2e%2e"])
def test_a_text_that_is_no_id_leads_to_no_page(browse: Browse, part: str) -> None:
    for page in ("projects/demo/jobs", "projects/demo/allocations", "projects"):
        answer = browse("member").client.get(f"/console/{page}/{part}")
        assert (answer.status_code, "page_not_found" in answer.text) == (404, True), page


@pytest.mark.parametrize(
    "page",
    [
        *("projects?cursor", "projects/demo?state", "projects/demo/ssh?sessions"),
        *(
            "projects/demo/launch?capacity_shape=gpu_slice&step=region&gpu_count",
            "projects/demo/usage?from",
        ),
    ],
)
def test_a_parameter_of_any_length_is_refused(browse: Browse, page: str) -> None:
    """The call of the API may need three characters for each character of the page's address."""
    answer = browse("member").get(f"/console/{page}={'/' * 30_000}")
    assert (answer.status_code, "request_invalid" in answer.text) == (422, True), answer.text


def test_pages_of_operators_do_not_exist_for_others(selling: Stack, browse: Browse) -> None:
    ids = names(selling)
    member = browse("member")
    for pattern in OPERATORS:
        for call in (member.get, member.client.post):
            headers = {"Sec-Fetch-Site": "same-origin"}
            answer = call(address(pattern, ids), headers=headers)
            assert answer.status_code == 404, pattern
    stranger = browse("stranger")
    for path in ("", "/launch", "/usage", f"/allocations/{ids['allocation']}"):
        assert stranger.get(f"/console/projects/demo{path}").status_code == 404


def test_a_member_cannot_make_the_call_of_an_operator(selling: Stack, browse: Browse) -> None:
    page = "/console/projects/demo"
    member = browse("member")
    form = {"_call": f"POST /admin/nodes/{NODE}/drain", "reason": "mine"}
    answer = member.client.post(page, data=form, headers={"Sec-Fetch-Site": "same-origin"})
    assert answer.status_code == 403
    assert "role_required" in answer.text
    wrong = ("GET /admin/nodes", "POST //evil.example/x", "POST admin", "PUT /../console", "")
    for call in (*wrong, "POST /%00\x00", "POST /a b", "POST /\n"):
        sent = member.client.post(
            page, data={"_call": call}, headers={"Sec-Fetch-Site": "same-origin"}
        )
        assert sent.status_code in (404, 405, 422), call
    with transaction(selling.engine) as conn:
        assert conn.execute(sa.select(nodes.c.state)).scalar() != "draining"


def test_no_page_of_a_member_tells_of_a_host(
    selling: Stack, browse: Browse, console: FastAPI
) -> None:
    console.state.settings = selling.settings.model_copy(update={"member_address": "gate.example"})
    adopt(selling.settings, selling.engine)
    planted = canaries(selling)
    ids = names(selling)
    fail(selling, ids["allocation"])
    whole = whole_machine(selling)
    member = browse("member")
    texts = []

    def shown(path: str, **params: str) -> str:
        answer = member.get(path, params=params or None)
        assert answer.status_code == 200, path
        texts.append(answer.text)
        return path

    def refused(path: str, form: SentForm, **typed: str) -> str:
        answer = member.send(path, form, **typed)
        assert 400 <= answer.status_code < 500, (path, form.call)
        texts.append(answer.text)
        return answer.text

    paths = [shown(address(pattern, ids)) for pattern in SHARED if pattern != "/"]
    page = "/console/projects/demo/launch"
    for step in ("shape", "region", "image", "access", "review"):
        shown(page, **{**CHOSEN, "gpu_count": "8", "step": step})
    review = launch_review(selling, gpu_count="8")
    launched = member.open(review).form("POST /projects/demo/allocations")
    assert "no_capacity" in refused(page, launched)
    second = launch(selling, "second", terminal=True).json()["id"]
    activate(selling, second)
    with transaction(selling.engine) as conn:
        connection = {"username": "tenant", "host_keys": [KEY], "node": NODE}
        change = sa.update(allocations).where(allocations.c.id == second)
        conn.execute(change.values(connection=connection))
    selling.ingress_rule(second)
    deploy(selling, Watch(selling), second)
    rows = selling.client("member").get("projects/demo/app-instances").json()["items"]
    (app,) = [row["id"] for row in rows if row["name"] == "s"]
    application = shown(f"/console/projects/demo/apps/{app}")
    assert ERROR["code"] in texts[-1] and ">up</td>" in texts[-1], "its members and its work"
    metal = shown(f"/console/projects/demo/allocations/{whole}")
    assert "203.0.113.9" in texts[-1], "what its tenant is told"
    machine = shown(f"/console/projects/demo/allocations/{second}")
    terminal = shown(f"{machine}/terminal")
    ticket = member.open(terminal).form(f"POST /projects/demo/allocations/{second}/terminal")
    texts.append(member.send(terminal, ticket).text)
    assert "data-ticket" in texts[-1]
    assert "works without scripts" not in texts[-1]
    assert ERROR["code"] in " ".join(texts)
    forms = {
        form.call: (path, form)
        for path in (*paths, metal, application, machine, terminal)
        for form in member.open(path).forms
        if form.call
    }
    assert len(forms) > 10
    for path, form in forms.values():
        # Something that no record has, or a field that no body has.
        call = form.call.replace(ids["job"], "none")
        call = f"{call}0" if call.startswith("DELETE") else call
        refused(path, form, _call=call, _generation="1", unknown__text="x")
    for text in texts:
        leaked = {canary for canary in planted if canary in text.lower()}
        assert leaked == set()
        posts = [form for form in Page(text).forms if form.method == "post"]
        assert {form.action for form in posts} <= {"", "/console/logout"}
        calls = {form.call for form in posts if not form.action}
        assert {call for call in calls if not of_members(call)} == set()


def of_members(call: str) -> bool:
    """Whether the contract lets members make the call of a form."""
    verb, _, path = call.partition(" ")
    return any(
        verb.lower() == permitted and pattern.fullmatch(f"{prefix}{path}")
        for _, permitted, pattern in member_operations()
        for prefix in ("/api/v1", "")
    )


def whole_machine(stack: Stack) -> str:
    """An active whole machine of the member, on a node with texts that no tenant is told."""
    add_metal(stack)
    prepare_metal(stack)
    texts = ("address", "name", "machine_id", "host_key", "state_reason")
    with transaction(stack.engine) as conn:
        planted = {name: f"canary-{name}-of-metal" for name in texts}
        conn.execute(sa.update(nodes).where(nodes.c.id == "metal").values(planted))
    headers = {"Idempotency-Key": "whole"}
    made = stack.client("member").post(PATH, json=METAL, headers=headers)
    assert made.status_code == 201, made.text
    let_in(stack, made.json()["id"])
    return str(made.json()["id"])


def option(text: str, value: str) -> str:
    """The choice of the launch wizard with this value, up to the end of its label."""
    (attributes,) = re.findall(
        rf'<label class="option[^>]*><input [^>]*value="{re.escape(value)}".*?</label>', text, re.S
    )
    return str(attributes)


CHOSEN = {
    "capacity_shape": "gpu_slice",
    "gpu_count": "1",
    "sku": "lab-edu-slice",
    "hostname": "first",
    "username": "ubuntu",
    "ssh_keys": KEY,
}


@pytest.mark.parametrize("profile", ["lab", "xe9680l-h200"])
def test_launch_to_release_without_scripts(
    selling: Stack, browse: Browse, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AnswerCache, "FRESH_S", 0.0)
    with transaction(selling.engine) as conn:
        conn.execute(sa.update(nodes).values(profile=profile))
    sku = {"lab": "lab-edu-slice", "xe9680l-h200": "h200-sxm-slice"}[profile]
    member = browse("member")
    page = "/console/projects/demo/launch"
    shape = member.get(page).text
    assert "disabled" not in option(shape, f"{sku}*1")
    if profile == "lab":
        # Four do not fit: the choice is there, disabled, with its reason.
        assert "required disabled" in option(shape, f"{sku}*4")
        assert "2 free, too few" in option(shape, f"{sku}*4")
    else:
        # NVSwitches join the board's GPUs, so that nothing else of it is for sale.
        assert f"{sku}*2" not in shape
        assert "24 vCPU, 64 GiB of memory" in option(shape, f"{sku}*1")
    image = re.search(
        r'name="image_id" value="([^"]+)"',
        member.get(page, params={"offer": f"{sku}*1", "step": "image"}).text,
    )
    assert image
    values = CHOSEN | {"image_id": image[1], "sku": sku}
    answer = member.get(page, params={**values, "step": "review"})
    with transaction(selling.engine) as conn:
        (size,) = conn.execute(sa.select(slots.c.nvme_size_bytes).distinct()).scalars()
    disk = f"the NVMe disk of its GPU, whole, {pages.size(size)}; the image needs 1 B"
    for fact in (disk, "a private one of the slice"):
        assert fact in answer.text
    with transaction(selling.engine) as conn:
        change = sa.update(slots).where(slots.c.slot_index == 1)
        conn.execute(change.values(nvme_size_bytes=2 * size))
    several = f"{pages.size(size)} to {pages.size(2 * size)}"
    for step in ("shape", "review"):
        text = member.get(page, params={**values, "step": step}).text
        assert f"{several}{', by the slot that it gets' if step == 'review' else ''}" in text
    form = Page(answer.text).form("POST /projects/demo/allocations")
    # A text that is no cloud-config is refused, and shown again for a correction.
    typed = "runcmd: [<date>]"
    again = member.send(page, form, user_data=typed)
    assert again.status_code == 422
    assert "user_data_invalid" in again.text
    assert f">{html.escape(typed)}</textarea>" in again.text
    form = Page(again.text).form("POST /projects/demo/allocations")
    launched = member.send(page, form, user_data=f"#cloud-config\r\n{typed}\r\n")
    assert launched.status_code == 303
    mine = launched.headers["Location"]
    assert mine.startswith("/console/projects/demo/allocations/")
    with transaction(selling.engine) as conn:
        (task,) = queue.every(conn, kind=TaskKind.SLICE_VM_PROVISION)
    assert task.parameters["tenant_data"] == {"runcmd": ["<date>"]}
    # A second click, or a reload, finds the first machine.
    once_more = member.send(page, form, user_data=f"#cloud-config\r\n{typed}\r\n")
    assert once_more.headers["Location"] == mine
    allocation_id = mine.rsplit("/", 1)[1]
    waits = member.get(mine).text
    assert "Waits" in waits and "the service starts it as soon as a worker is free" in waits
    activate(selling, allocation_id)
    assert "gate.example" in member.get(mine).text
    path = f"POST /projects/demo/allocations/{allocation_id}"
    forms = [form for form in member.open(mine).forms if form.call == f"{path}/power"]
    assert [form.button for form in forms] == ["Stop", "Restart", "Reset"]
    assert member.send(mine, forms[1]).status_code == 303
    shown = member.open(mine)
    assert not [form for form in shown.forms if form.call == f"{path}/power"]
    stale = shown.form(f"{path}/release")
    # The page that was open before the restart decided on another state of the machine.
    refused = member.send(mine, stale, _generation="1")
    assert refused.status_code == 412
    assert "precondition failed" in refused.text.lower()
    assert member.send(mine, stale).headers["Location"] == mine
    state = selling.client("member").get(f"{PATH}/{allocation_id}").json()["state"]
    assert state in ("releasing", "released")


def test_registered_keys_are_chosen_at_a_launch(
    selling: Stack, browse: Browse, tmp_path: Path
) -> None:
    """Those that open the gateway now, beside keys that are pasted."""
    names_ = ("mine", "other", "revoked", "expired", "ended", "pasted")
    keys = {name: new_key(tmp_path / name) for name in names_}
    api, path = selling.client("member"), "projects/demo/ssh-keys"
    program = api.post("tokens", json={"name": "program", "project_id": "demo"}).json()
    selling.secrets["program"] = program["token"]
    for name in names_[:-1]:
        who = selling.client("program" if name == "ended" else "member")
        assert who.post(path, json={"public_key": keys[name]}).status_code == 201
    assert api.post(f"{path}/revoke", json={"public_key": keys["revoked"]}).status_code == 200
    assert api.delete(f"tokens/{program['id']}").status_code == 200
    with transaction(selling.engine) as conn:
        expired = sa.update(ssh_keys).where(ssh_keys.c.public_key == keys["expired"])
        conn.execute(expired.values(expires_at=1.0))
    valid = {row["public_key"]: row["valid"] for row in api.get(path).json()["items"]}
    assert valid == {keys[name]: name in ("mine", "other") for name in names_[:-1]}
    member, page = browse("member"), "/console/projects/demo/launch"
    image = api.get("images").json()["items"][0]["id"]
    typed = {name: value for name, value in CHOSEN.items() if name != "ssh_keys"}
    typed |= {"image_id": image}

    def step(name: str, *given: str) -> str:
        # As a browser sends the boxes and the text below them.
        return member.get(page, params={**typed, "ssh_keys": list(given), "step": name}).text

    def offered(text: str) -> dict[str, bool]:
        shown = re.findall(r'<input type="checkbox" name="ssh_keys" value="([^"]*)"([^>]*)>', text)
        return {html.unescape(key): "checked" in rest for key, rest in shown}

    assert offered(step("access")) == {keys["mine"]: False, keys["other"]: False}
    assert "Choose a key or paste one" in step("review", "")
    boxes = (keys["mine"], keys["other"])
    text = step("review", *boxes, f"{keys['pasted']} admin's\n{keys['mine']} laptop")
    listed = re.search(r"SSH keys that open it</h3>(.*?)</ul>", text, re.S)[1]  # type: ignore[index]
    lines = [html.unescape(re.sub("<[^>]+>", "", line)) for line in listed.split("</li>")[:-1]]
    kinds = ["registered by member", "registered by member", "not registered in this project"]
    assert [line.partition(":")[0].split("#")[0] for line in lines] == kinds
    for name, line in zip(("mine", "other", "pasted"), lines, strict=True):
        assert f"ssh-ed25519 {fingerprint(keys[name])}" in line
    assert lines[2].endswith(", comment admin's")
    review = Page(text)
    launched = member.send(page, review.form("POST /projects/demo/allocations"))
    mine = api.get(f"{PATH}/{launched.headers['Location'].rpartition('/')[2]}").json()
    assert mine["ssh_keys"] == [*boxes, f"{keys['pasted']} admin's"]
    # Back from the review.
    again = step("access", f"{keys['mine']}\n{keys['pasted']}")
    assert offered(again) == {keys["mine"]: True, keys["other"]: False}
    assert re.findall(r"<textarea[^>]*>(.*?)</textarea>", again, re.S) == [keys["pasted"]]
    listed = member.get("/console/projects/demo/ssh").text
    assert (listed.count("<td>ended</td>"), listed.count("<td>revoked</td>")) == (2, 1)


def test_a_link_of_others_begins_at_the_keys(selling: Stack, browse: Browse) -> None:
    """Where its keys are seen, also when the visitor has to log in before."""
    member, review = browse("member"), launch_review(selling)
    for headers, step in (
        ({"Sec-Fetch-Site": "cross-site"}, "Network and SSH"),
        ({"Sec-Fetch-Site": "same-site"}, "Network and SSH"),
        (SAME | {"Referer": "http://localhost/console/login?next=x"}, "Network and SSH"),
        (SAME | {"Referer": "http://localhost/console/projects/demo/launch"}, "Review"),
        ({}, "Review"),
    ):
        text = member.get(review, headers=headers).text
        assert f'<h2 id="step">{step}</h2>' in text, headers
        assert KEY in text


def test_a_request_that_does_not_fit_shows_the_nearest_that_does(
    selling: Stack, browse: Browse
) -> None:
    with transaction(selling.engine) as conn:
        conn.execute(sa.update(nodes).values(region="north"))
    params = {"offer": "lab-edu-slice*4", "step": "region"}
    text = browse("member").get("/console/projects/demo/launch", params=params).text
    assert text.count("Nearest that fits: 2 GPUs.") == 1, "anywhere"
    assert text.count("Nearest that fits: 2 GPUs in north.") == 1


def test_what_the_quota_leaves_is_shown_and_more_is_disabled(
    selling: Stack, browse: Browse
) -> None:
    member, page = browse("member"), "/console/projects/demo/launch"
    assert "left in the project's quota" not in member.get(page).text, "without a limit"
    admin = selling.client("admin")
    admin.put("admin/projects/demo/quota", json={"gpus": 1, "machines": 3})
    shape = member.get(page).text
    assert '<button class="primary">Continue' in shape
    assert "1 of 1 GPUs, 3 of 3 machines left in the project's quota." in shape
    assert "disabled" not in option(shape, "lab-edu-slice*1")
    # Two are free, so only the quota is against them.
    assert "required disabled" in option(shape, "lab-edu-slice*2")
    assert "1 GPU is left in the project's quota." in option(shape, "lab-edu-slice*2")
    assert "1 GPU is left in the project's quota." in option(shape, "lab*all")
    launch(selling)
    admin.put("admin/projects/demo/quota", json={"machines": 1})
    shape = member.get(page).text
    assert "0 of 1 machines left in the project's quota." in shape
    assert "required disabled" in option(shape, "lab-edu-slice*1")
    assert "No machine is left in the project's quota." in option(shape, "lab-edu-slice*1")
    assert "Nothing can be launched now" in shape
    assert '<button class="primary" disabled>Continue' in shape


def add_metal(stack: Stack) -> None:
    """A whole machine of which nothing is known yet."""
    fields = {"address": "192.0.2.9", "profile": "lab", "region": "north"}
    with transaction(stack.engine) as conn:
        node_records.create(conn, ACT, id="metal", mode=NodeMode.BAREMETAL, **fields)


def prepare_metal(stack: Stack) -> None:
    """It is enrolled and discovered, and free."""
    document = discovery()
    identity = document["identity"] | {"machine_id": "0" * 32}
    with transaction(stack.engine) as conn:
        host.enrolled(conn, "metal", ACT, **identity)
        host.bootstrapped(conn, "metal", ACT, identity=identity)
        host.record_discovery(conn, "metal", document | {"identity": identity}, ACT)
        metal = sa.update(nodes).where(nodes.c.id == "metal")
        conn.execute(metal.values(tenant_address="203.0.113.9"))


def test_a_whole_machine_that_is_not_free_is_disabled(selling: Stack, browse: Browse) -> None:
    member, page = browse("member"), "/console/projects/demo/launch"
    shape = member.get(page).text
    assert "required disabled" in option(shape, "lab*all")
    assert "The site has none yet" in option(shape, "lab*all")
    add_metal(selling)
    shape = member.get(page).text
    assert "required disabled" in option(shape, "lab*all")
    assert "0 free in north" in option(shape, "lab*all")
    prepare_metal(selling)
    shape = member.get(page).text
    assert "1 free in north" in option(shape, "lab*all")
    assert "disabled" not in option(shape, "lab*all")
    with transaction(selling.engine) as conn:
        conn.execute(sa.update(nodes).where(nodes.c.id == NODE).values(region="north"))
    region = member.get(page, params={"offer": "lab*all", "step": "region"}).text
    assert "disabled" not in option(region, "north")
    assert "1 such machine is free" in option(region, "north")


def test_a_whole_machine_is_launched_and_released(selling: Stack, browse: Browse) -> None:
    def capacity() -> list[str]:
        """On sale, in use, not on sale, and all, as an operator sees it."""
        text = browse("admin").get("/console/fleet").text
        (row,) = re.findall(r"<tr><td>north</td><td>lab</td>(.*?)</tr>", text)
        return re.findall(r">(\d+)</td>", row)

    add_metal(selling)
    assert capacity() == ["0", "0", "1", "1"]
    prepare_metal(selling)
    assert capacity() == ["1", "0", "0", "1"]
    member, page = browse("member"), "/console/projects/demo/launch"
    typed = {name: CHOSEN[name] for name in ("hostname", "username", "ssh_keys")}
    review = member.get(page, params={"offer": "lab*all", **typed, "step": "review"}).text
    launched = member.send(page, Page(review).form("POST /projects/demo/allocations"))
    mine = launched.headers["Location"]
    id = mine.rpartition("/")[2]
    assert "Waits" in member.get(mine).text
    let_in(selling, id)
    assert capacity() == ["0", "1", "0", "1"]
    assert "203.0.113.9" in member.get(mine).text
    form = member.open(mine).form(f"POST /projects/demo/allocations/{id}/release")
    assert member.send(mine, form).headers["Location"] == mine
    (task,) = selling.client("admin").get("admin/tasks?state=queued").json()["items"]
    assert (task["kind"], task["allocation_id"]) == ("baremetal.release", id)
    assert member.get(mine).status_code == 200


def test_a_region_to_come_is_disabled_with_its_reason(
    selling: Stack, browse: Browse, console: FastAPI
) -> None:
    settings = selling.settings.model_copy(update={"planned_regions": "south=Lyon, west"})
    selling.settings = console.state.settings = settings
    with transaction(selling.engine) as conn:
        conn.execute(sa.update(nodes).values(region="north"))
    for offer in ("lab-edu-slice*1", "lab*all"):
        params = {"offer": offer, "step": "region"}
        text = browse("member").get("/console/projects/demo/launch", params=params).text
        for name in ("south", "west"):
            assert " disabled>" in option(text, name)
            assert "this region is to come" in option(text, name)
        assert "<strong>Lyon (south)</strong>" in option(text, "south")
        north = option(text, "north")
        if offer == "lab*all":
            assert " disabled>" in north and "No such machine is free" in north
        else:
            assert "disabled" not in north and "2 GPUs free" in north


def test_what_is_free_is_unknown_while_the_visitor_asks_elsewhere(
    selling: Stack, browse: Browse, console: FastAPI
) -> None:
    """In another tab of the same person, for example. The launch itself judges anew."""
    member, page = browse("member"), "/console/projects/demo/launch"
    with reading(selling.engine) as conn:
        busy = set(conn.execute(sa.select(api_tokens.c.id)).scalars())
    console.state.availability._busy |= busy
    shape = member.get(page)
    assert (shape.status_code, "unknown at present" in shape.text) == (200, True)
    assert "required disabled" not in shape.text
    assert "unknown at present" in member.get("/console/catalog").text
    region = member.get(page, params={"offer": "lab-edu-slice*2", "step": "region"})
    assert region.status_code == 200
    console.state.availability._busy -= busy
    assert "2 free" in member.get(page).text


@pytest.mark.parametrize("name", ["gpuaas.example", "gpuaas.example:8443"])
def test_the_documented_proxy_passes_the_name_on_that_the_browser_used(name: str) -> None:
    """With its port: a form is of the same origin when both headers have the same name."""
    example = (PROJECT / "docs" / "operations.md").read_text(encoding="utf-8")
    (variable,) = re.findall(r"proxy_set_header Host (\S+);", example)
    # As nginx documents both.
    host = {"$http_host": name, "$host": name.partition(":")[0]}[variable]
    headers = {"Origin": f"https://{name}", "Host": host}
    guard.require_same_origin("POST", Headers(headers), "http")


def test_cost_is_shown_where_the_site_has_prices(
    selling: Stack, browse: Browse, console: FastAPI, tmp_path: Path
) -> None:
    activate(selling, launch(selling).json()["id"])
    member, page = browse("member"), "/console/projects/demo/usage"
    assert "Cost" not in member.get(page).text
    settings = priced(selling, tmp_path, "2.49", machine_gpu_hour_price="1.99")
    selling.settings = console.state.settings = settings
    activate(selling, launch(selling, "priced").json()["id"])
    shown = member.get(page).text
    assert shown.count("2.49 EUR") == 2, "sums and machines"
    assert "at present" not in shown
    offers = member.get("/console/catalog").text
    assert "2.49 EUR an hour" in offers
    assert "1.99 EUR for a GPU and hour" in offers
    wizard = "/console/projects/demo/launch"
    shapes = member.get(wizard).text
    assert "2.49 EUR for a GPU" in shapes
    assert "1.99 EUR for a GPU" in shapes
    step = {"hostname": "it", "username": "tenant", "ssh_keys": KEY, "step": "review"}
    review = member.get(wizard, params={"offer": "lab*all", **step}).text
    assert "whole machine, lab" in review
    assert "1.99 EUR for a GPU" in review
    assert "2.49 EUR" not in review
    add_metal(selling)
    prepare_metal(selling)
    launched = member.send(wizard, Page(review).form("POST /projects/demo/allocations"))
    let_in(selling, launched.headers["Location"].rpartition("/")[2])
    shown = member.get(page).text
    for part in shown[shown.index('id="sums"') :].split('id="each"'):
        cells = [
            re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall("<tr>.*?</tr>", part)
        ]
        prices = {(row[1], row[-2]) for row in cells if row}
        assert prices == {("lab-edu-slice", ""), ("lab-edu-slice", "2.49 EUR"), ("lab", "1.99 EUR")}


def test_the_last_day_of_a_period_counts(selling: Stack, browse: Browse) -> None:
    activate(selling, launch(selling).json()["id"])
    today = datetime.now(UTC).date().isoformat()
    member, page = browse("member"), "/console/projects/demo/usage"
    shown = member.get(page, params={"from": today, "to": today})
    assert "Nothing was used" not in shown.text and "Each machine" in shown.text
    assert member.get(page, params={"to": "tomorrow"}).status_code == 422
    # The last day that there is has none after it.
    assert member.get(page, params={"to": "9999-12-31"}).status_code == 200


def test_lists_of_projects_and_images_go_on(selling: Stack, browse: Browse) -> None:
    admin = browse("admin")
    with transaction(selling.engine) as conn:
        for number in range(101):
            project_records.create(conn, f"project-{number:03}", ACT, id=f"id-{number:03}")
            image_records.register(conn, ACT, **IMAGE | {"version": f"v-{number:03}"})
    for page, last in (("/console/projects", "project-100"), ("/console/images", "v-100")):
        shown = admin.get(page)
        assert last not in shown.text
        (more,) = [link for link in Page(shown.text).links if link.startswith("?cursor=")]
        assert last in admin.get(page + more).text
    shown = admin.get("/console/projects/id-007")
    assert "<h1>project-007</h1>" in shown.text and "id-007" in shown.text


def test_an_image_that_an_offer_cannot_take_is_disabled_with_its_reason(
    selling: Stack, browse: Browse, console: FastAPI, tmp_path: Path
) -> None:
    """Before, it was refused after the last step."""
    vm = yaml.safe_load((selling.settings.profiles_dir / "lab.yml").read_text())["vm"]
    vm["guest_runtime"] |= {"driver": "570-server", "rdma": True}
    settings = priced(selling, tmp_path, "1.00", vm=vm)
    selling.settings = console.state.settings = settings
    with transaction(selling.engine) as conn:
        fits = IMAGE | {"version": "fits", "runtime": ["driver-570-server", "rdma"]}
        image_records.register(conn, ACT, **fits)
        image_records.register(conn, ACT, **fits | {"version": "vast", "size_bytes": 1 << 52})
        ids = {image.version: image.id for image in image_records.every(conn)}
    member, page = browse("member"), "/console/projects/demo/launch"
    step = member.get(page, params={"offer": "lab-edu-slice*1", "step": "image"}).text
    lacks = "whose record lacks driver-570-server, rdma"
    assert lacks in step and "It is larger than the disks" in step
    closed = {name: "disabled" in option(step, id) for name, id in ids.items()}
    assert closed == {"1": True, "fits": False, "vast": True}
    assert "must contain driver-570-server, rdma" in member.get("/console/catalog").text


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_images_on_offer_are_those_that_the_launch_takes(
    selling: Stack, browse: Browse, console: FastAPI, tmp_path: Path, gpus: int
) -> None:
    """An image without NVLink serves one GPU of a board with partitions, and not several."""
    first, other = (bundle(index)["gpu_pci_address"] for index in (1, 3))
    board = {"nvlink": "partitions", "fabric_manager": {"address": "192.0.2.9"}}
    board |= {"module_ids": {first: 1, other: 3}, "nvlink_sets": [[1, 3]], "expected": 2}
    selling.settings = with_profile(selling, tmp_path, gpu=board).settings
    console.state.settings = selling.settings
    (tmp_path / "zz-other.yml").unlink()
    with transaction(selling.engine) as conn:
        alone = IMAGE | {"version": "alone", "runtime": ["nvlink-disabled"]}
        image_records.register(conn, ACT, **alone)
        ids = {image.version: image.id for image in image_records.every(conn)}
    page = "/console/projects/demo/launch"
    offer = {"offer": f"lab-edu-slice*{gpus}", "step": "image"}
    step = browse("member").get(page, params=offer).text
    open_ = {name for name, id in ids.items() if "required disabled" not in option(step, id)}
    assert open_ == ({"1", "alone"} if gpus == 1 else {"1"})
    answers = {
        name: launch(selling, name, gpu_count=gpus, image_version=name)
        for name in sorted(ids, reverse=True)
    }
    assert {name for name, answer in answers.items() if answer.status_code == 201} == open_


def test_a_machine_shows_its_own_sessions(selling: Stack, browse: Browse) -> None:
    mine, other = (launch(selling, key).json()["id"] for key in ("a", "b"))
    with transaction(selling.engine) as conn:
        for number, allocation in enumerate((mine, other)):
            names = {"project_id": "demo", "owner": "x", "fingerprint": "x", "way": "jump"}
            address = f"198.51.100.{number + 1}"
            ssh_sessions.open_session(conn, ACT, allocation_id=allocation, address=address, **names)
    member = browse("member")
    page = member.get(f"/console/projects/demo/allocations/{mine}").text
    assert ("198.51.100.1" in page, "198.51.100.2" in page) == (True, False)
    with transaction(selling.engine) as conn:
        for number in range(50):
            address = f"203.0.113.{number}"
            ssh_sessions.open_session(conn, ACT, allocation_id=mine, address=address, **names)
    of_project = "/console/projects/demo/ssh"
    shown = [member.get(of_project).text]
    (older,) = [link for link in Page(shown[0]).links if link.startswith("?sessions=")]
    shown.append(member.get(of_project + older).text)
    rows = [re.findall(r">(198\.51\.100\.\d+|203\.0\.113\.\d+)</td>", text) for text in shown]
    assert [len(each) for each in rows] == [50, 2] and len({*rows[0], *rows[1]}) == 52


def test_a_release_is_offered_only_when_the_service_would(selling: Stack, browse: Browse) -> None:
    mine = launch(selling).json()["id"]
    member, page = browse("member"), f"/console/projects/demo/allocations/{mine}"
    call = f"POST /projects/demo/allocations/{mine}/release"

    def offered_now() -> bool:
        refused = selling.client("member").post(f"{PATH}/{mine}/release").status_code == 409
        assert refused is member.open(page).form(call).disabled
        return not refused

    with transaction(selling.engine) as conn:
        slices.provision_started(conn, mine, ACT)
    assert not offered_now()
    with transaction(selling.engine) as conn:
        slices.provision_succeeded(conn, mine, ACT, connection={"username": "tenant"})
    assert not member.open(page).form(call).disabled
    assert selling.client("member").post(f"{PATH}/{mine}/release").status_code == 200
    assert not offered_now()


def test_a_port_is_opened_and_removed_on_the_page(
    selling: Stack, browse: Browse, console: FastAPI
) -> None:
    console.state.settings = with_addresses(selling).settings
    mine = launch(selling).json()["id"]
    activate(selling, mine)
    member, page = browse("member"), f"/console/projects/demo/allocations/{mine}"
    call = f"POST /projects/demo/allocations/{mine}/ingress"
    until = datetime.now(UTC) + timedelta(hours=1)
    typed = {
        "public_address": ADDRESS,
        "public_port__int": "443",
        "guest_port__int": "8443",
        # As browsers send a field of the kind datetime-local.
        "expires_at__utc": until.strftime("%Y-%m-%dT%H:%M"),
        "sources__words": "198.51.100.0/24, 203.0.113.7/32",
    }
    form = member.open(page).form(call)
    refused = member.send(page, form, **typed | {"public_port__int": "many"})
    assert refused.status_code == 422 and "body.public_port" in refused.text
    assert member.send(page, form, _key="another", **typed).headers["Location"] == page
    (rule,) = selling.client("member").get(f"{PATH}/{mine}/ingress").json()["items"]
    assert rule["sources"] == ["198.51.100.0/24", "203.0.113.7/32"]
    assert datetime.fromisoformat(rule["expires_at"]) == until.replace(second=0, microsecond=0)
    shown = member.get(page).text
    assert f"{ADDRESS}:443" in shown and "198.51.100.0/24, 203.0.113.7/32" in shown
    remove = f"DELETE /projects/demo/allocations/{mine}/ingress/{rule['id']}"
    assert member.send(page, Page(shown).form(remove)).headers["Location"] == page
    assert not [form for form in member.open(page).forms if form.call == remove]
    (rule,) = selling.client("member").get(f"{PATH}/{mine}/ingress").json()["items"]
    assert rule["state"] in ("removing", "removed")


def test_the_command_of_the_review_makes_the_same_call(selling: Stack, browse: Browse) -> None:
    member = browse("member")
    quoted = f"{KEY.rpartition(' ')[0]} it's"
    review = launch_review(selling, hostname="it", terminal="true", ssh_keys=quoted)
    text = member.get(review).text
    form = Page(text).form("POST /projects/demo/allocations")
    shown = re.search(r"curl -X POST .*?(?=</pre>)", text, re.S)
    assert shown
    words = shlex.split(html.unescape(shown[0]))
    body = json.loads(words[words.index("-d") + 1])
    assert (body["gpu_count"], body["ssh_keys"]) == (1, [quoted])
    headers = {"Idempotency-Key": "command", "Content-Type": "application/json"}
    assert {f"{name}: " for name in headers} < {word[: word.find(" ") + 1] for word in words}
    program = selling.client("member", base="/")
    by_command = program.post(urlsplit(words[3]).path, content=json.dumps(body), headers=headers)
    assert by_command.status_code == 201, by_command.text
    by_form = member.send(review, form).headers["Location"].rpartition("/")[2]
    with reading(selling.engine) as conn:
        stored = [
            conn.execute(sa.select(allocations).where(allocations.c.id == id)).mappings().one()
            for id in (by_command.json()["id"], by_form)
        ]
    assert {name for name in stored[0] if stored[0][name] != stored[1][name]} <= {
        *("id", "correlation_id", "created_at", "state_since", "deadline_at")
    }


def test_a_refusal_keeps_what_was_typed(selling: Stack, browse: Browse) -> None:
    admin = browse("admin")
    form = admin.open("/console/nodes/new").form("POST /admin/nodes")
    typed = {"id": "second", "address": "not an address!", "reason": "<b>bold</b>"}
    answer = admin.send("/console/nodes/new", form, **typed)
    assert answer.status_code == 422
    assert "body.address" in answer.text
    assert "not an address!" in answer.text
    assert "&lt;b&gt;bold&lt;/b&gt;" in answer.text
    assert "<b>bold</b>" not in answer.text
    typed["address"] = "192.0.2.8"
    added = admin.send("/console/nodes/new", Page(answer.text).form("POST /admin/nodes"), **typed)
    assert added.headers["Location"] == "/console/nodes/second"


def test_what_was_typed_comes_back_with_its_marks_and_is_shown_without(
    selling: Stack, browse: Browse
) -> None:
    """A person who corrects another field would send a text that was never typed."""
    admin, typed = browse("admin"), "rack 7 \u202e<&\u2066 \u05d0"
    form = admin.open("/console/nodes/new").form("POST /admin/nodes")
    answer = admin.send("/console/nodes/new", form, id="second", address="!", reason=typed)
    assert answer.status_code == 422
    again = Page(answer.text).form("POST /admin/nodes")
    assert ("reason", typed) in again.fields
    assert "\u202e" not in answer.text and "\u2066" not in answer.text
    refused = admin.send("/console/nodes/new", again, address="192.0.2.8")
    assert refused.status_code == 422 and "body.reason" in refused.text
    # The steps of a launch hand on the typed text, too.
    member = browse("member")
    keys = f"{KEY} {typed}"
    page = member.client.get("/console/projects/demo/launch", params={"ssh_keys": keys})
    assert any(typed in value for name, value in Page(page.text).forms[-1].fields), page.text
    assert "\u202e" not in page.text


def test_an_empty_limit_of_the_site_is_none(selling: Stack, browse: Browse) -> None:
    admin, call = browse("admin"), "PUT /admin/settings/default-quota"
    form = admin.open("/console/projects").form(call)
    kept = {
        "launches_per_hour__limit": "7",
        "open_requests__limit": "",
        "failures_per_hour__limit": "",
    }
    assert admin.send("/console/projects", form, **kept).status_code == 303
    answer = selling.client("admin").get("admin/settings/default-quota").json()
    assert answer["limits"] == {"launches_per_hour": 7}


def test_a_refusal_keeps_what_was_ticked(selling: Stack, browse: Browse) -> None:
    """Otherwise a person who corrects a field resets the switches that they had set before."""
    admin, call = browse("admin"), "PUT /admin/settings/recovery-policy"
    form = admin.open("/console/health").form(call)
    assert ("enabled:bool", "on") not in form.fields
    ticked = {"enabled__bool": "on", "per_node__int": "1000"}
    answer = admin.send("/console/health", form, **ticked)
    assert answer.status_code == 422
    again = Page(answer.text).form(call)
    assert admin.send("/console/health", again, per_node__int="2").status_code == 303
    assert selling.client("admin").get("admin/settings/recovery-policy").json()["enabled"] is True
    # And nothing is ticked that a person has not ticked.
    off = {"enabled__bool": "false", "per_node__int": "1000"}
    form = admin.open("/console/health").form(call)
    answer = admin.send("/console/health", form, **off)
    assert ("enabled:bool", "on") not in Page(answer.text).form(call).fields


@pytest.mark.parametrize("back", ["https://evil.example", "//evil.example", "/console/../evil"])
def test_a_form_leads_to_no_other_site(selling: Stack, browse: Browse, back: str) -> None:
    admin, page = browse("admin"), "/console/projects"
    form = admin.open(page).form("POST /admin/projects")
    assert admin.send(page, form, name="new", _back=back).headers["Location"] == page


@pytest.mark.parametrize(
    "fields",
    [
        {"_call": "POST /projects/demo/ssh-keys", "_key": "é"},
        {"_call": "POST /projects/demo/ssh-keys", "_generation": "é"},
        {"_call": f"POST /{'a' * 70_000}"},
        {"_call": "POST /../../console/logout"},
        {"_call": "POST /projects/../../../console/static/console.css"},
    ],
)
def test_a_form_that_no_page_has_is_refused(browse: Browse, fields: dict[str, str]) -> None:
    headers = {"Sec-Fetch-Site": "same-origin"}
    answer = browse("member").client.post("/console/projects/demo", data=fields, headers=headers)
    assert answer.status_code == 422
    assert "request_invalid" in answer.text


def test_a_secret_is_shown_once(selling: Stack, browse: Browse) -> None:
    admin = browse("admin")
    form = admin.open("/console/tokens").form("POST /admin/tokens")
    typed = {"name": "bob", "role": "project-member", "project_id": "demo"}
    made = admin.send("/console/tokens", form, **typed)
    secret = re.search(r"gpuaas_[\w-]{43}", made.text)
    assert secret
    assert browse("").log_in(secret[0]).status_code == 303
    again = admin.send("/console/tokens", form, **typed)
    assert "secret_shown_once" in again.text
    assert secret[0] not in again.text
    assert secret[0] not in admin.get("/console/tokens").text


def test_tokens_and_sessions_of_one_member_hide_no_others(selling: Stack, browse: Browse) -> None:
    """A member can make and revoke tokens, and log in, until a page is full of them."""
    admin = browse("admin")
    with transaction(selling.engine) as conn:
        for table in (api_tokens, console_sessions):
            change = sa.update(table).values(created_at=table.c.created_at - 60)
            conn.execute(change)
        row = conn.execute(sa.select(api_tokens).where(api_tokens.c.name == "member")).one()
        made = [{"id": f"mine-{number}", "hash": f"mine-{number}"} for number in range(1001)]
        late = {"created_at": row.created_at + 60, "name": "mine"}
        conn.execute(sa.insert(api_tokens), [row._asdict() | late | each for each in made])
        session = conn.execute(sa.select(console_sessions)).first()
        late = {"created_at": session.created_at + 60, "token_id": "mine-0"}
        conn.execute(
            sa.insert(console_sessions), [session._asdict() | late | each for each in made]
        )
        ids = dict(conn.execute(sa.select(api_tokens.c.name, api_tokens.c.id)).all())
    expected = {f"DELETE /admin/tokens/{ids[who]}" for who in ("admin", "stranger")}
    expected.add(f"admin:admin#{ids['admin']}")
    path, calls = "/console/tokens", set()
    while path and not expected <= calls:
        page = admin.open(path)
        calls |= {dict(form.fields).get("actor", form.call) for form in page.forms}
        path = next((f"/console/tokens{link}" for link in page.links if link[:1] == "?"), "")
    assert expected <= calls
    (link,) = {each for each in admin.open("/console/projects/other").links if "tokens" in each} - {
        "/console/tokens"
    }
    assert "Revoke stranger" in {form.button for form in admin.open(link).forms}


def test_a_member_makes_a_token_for_a_program(selling: Stack, browse: Browse) -> None:
    member, page = browse("member"), "/console/account"
    assert page in member.open("/console/projects").links
    made = member.send(page, member.open(page).form("POST /tokens"), name="ci")
    secret = re.search(r"gpuaas_[\w-]{43}", made.text)
    assert secret
    assert secret[0] not in member.get(page).text
    program = browse("")
    assert program.log_in(secret[0]).status_code == 303
    revoke = [form for form in member.open(page).forms if form.button == "Revoke ci"]
    assert member.send(page, revoke[0]).headers["Location"] == page
    assert program.get(page).status_code == 303, "to the login page"
    assert [form.button for form in member.open(page).forms if "tokens/" in form.call] == [
        "Revoke member"
    ]


def test_approval_names_every_reason_against_a_candidate(selling: Stack, browse: Browse) -> None:
    text = browse("admin").get(f"/console/nodes/{NODE}/discovery").text
    document = selling.client("admin").get(f"admin/nodes/{NODE}/slice-topology/discovery").json()
    against = [row["blockers"] for row in document["document"]["candidates"]]
    assert any(against)
    for blockers in against:
        for blocker in blockers:
            assert blocker["code"].replace("_", " ") in text
    assert text.count('class="state good">approved') == 2


def test_no_text_of_a_host_is_shown_as_another(selling: Stack, browse: Browse) -> None:
    document = discovery()
    document["nvme"][0]["model"] = "1.6 TB \u202eBT 6.1\u2066\x1b\x9b\x00"
    with transaction(selling.engine) as conn:
        host.record_discovery(conn, NODE, document, ACT)
    text = browse("admin").get(f"/console/nodes/{NODE}/discovery").text
    assert f"1.6 TB {UNSHOWN}BT 6.1{UNSHOWN * 4}" in text


def test_a_chosen_candidate_is_approved_by_the_form(selling: Stack, browse: Browse) -> None:
    api = selling.client("admin")
    slots = f"admin/nodes/{NODE}/resource-slots"
    (slot, *_) = api.get(slots).json()["items"]
    for action in ("disable", "withdraw"):
        api.post(f"{slots}/{slot['id']}/{action}", json={"reason": "again"})
    # The host was recorded before its card had functions; they are there now.
    document = discovery()
    document["candidates"][slot["slot_index"]]["blockers"] = []
    with transaction(selling.engine) as conn:
        host.record_discovery(conn, NODE, document, ACT)
    admin, page = browse("admin"), f"/console/nodes/{NODE}/discovery"
    text = admin.get(page).text
    assert text.count('class="state good">approved') == 1
    (candidate,) = re.findall(r'name="slots:jsons" value="([^"]+)">', text)
    form = Page(text).form(f"POST /{slots}")
    assert not form.disabled
    none = admin.send(page, form, reason="new")
    assert none.status_code == 422 and "body.slots" in none.text
    typed = {"slots__jsons": [html.unescape(candidate)], "reason": "new", "_key": "another"}
    assert admin.send(page, form, **typed).headers["Location"] == f"/console/nodes/{NODE}"
    shown = admin.open(page).form(f"POST /{slots}")
    assert shown.disabled, "nothing is left to approve"
    assert [row["slot_index"] for row in api.get(slots).json()["items"]] == list(FREE)


def test_recovery_is_one_page_and_one_button(selling: Stack, browse: Browse) -> None:
    ids = names(selling)
    fail(selling, ids["allocation"])
    admin = browse("admin")
    assert "(1 blocked) Fleet" in admin.get("/console/fleet").text
    page = f"/console/allocations/{ids['allocation']}/recovery"
    form = admin.open(page).form(f"POST /admin/allocations/{ids['allocation']}/recover")
    refused = admin.send(page, form, reason="")
    assert refused.status_code == 422 and "reason_required" in refused.text
    running = launch(selling, "running").json()["id"]
    activate(selling, running)
    other = admin.get(f"/console/allocations/{running}/recovery").text
    assert Page(other).form(f"POST /admin/allocations/{running}/recover").disabled
    assert "An active allocation: its tenant may be using it" in other
    story = Story(Site(selling.engine), ids["allocation"])

    def shown() -> tuple[list[str], str]:
        """The state of each step of the runbook, and its evidence."""
        text = admin.get(page).text
        steps = re.findall(r"<li[^>]*><strong>\d\. .*?</li>", text, re.S)
        (current,) = [*re.findall('aria-current="step"><strong>(\\d)', text), ""][:1]
        states = [re.findall('class="state [a-z]+">([a-z ]+)<', step)[0] for step in steps]
        assert states.index("running") + 1 == int(current) if current else "running" not in states
        return states, html.unescape("".join(steps))

    ahead = ["to come"] * 5
    assert shown()[0] == ahead
    sent = admin.send(page, form, reason="the guest never answered", _key="another")
    assert sent.headers["Location"] == page
    states, text = shown()
    assert states == ["done", *ahead[1:]]
    assert f'"code": "{ERROR["code"]}"' in text and '"status": "cleanup_blocked"' in text
    assert Page(admin.get(page).text).form(form.call).disabled
    story.play()
    assert shown()[0] == ["done", "running", *ahead[2:]]
    story.answer(absent=False)
    story.play()
    states, text = shown()
    assert states == ["done", "done", "running", *ahead[3:]]
    assert '"absent": false' in text and '"absent": true' not in text
    story.wipe()
    story.play()
    assert shown()[0] == ["done", "done", "done", "running", "to come"]
    story.answer()
    story.play()
    states, text = shown()
    assert states == ["done"] * 5
    (proof,) = story.case().proof_ids
    assert '"absent": true' in text and f'"id": "{proof}"' in text


def test_a_recovery_without_leftovers_that_fails_shows_where(
    selling: Stack, browse: Browse
) -> None:
    stuck = launch(selling).json()["id"]
    fail(selling, stuck)
    story = Story(Site(selling.engine), stuck)
    story.open()
    story.play()
    story.answer()
    story.play()
    story.wipe(fails=True)
    story.play()
    text = browse("admin").get(f"/console/allocations/{stuck}/recovery").text
    book = text[text.index('class="timeline runbook"') :]
    states = re.findall('</strong> <span class="state [a-z]+">([a-z ]+)<', book)
    assert states == ["done", "done", "failed", "not needed", "failed"]
    assert "slots_not_recovered" in text and "nvme_wipe" in html.unescape(book)


@pytest.mark.parametrize(
    ("failed_in", "recorded", "states"),
    [
        ("opened", (), ["done", "failed", "not reached", "not reached", "not reached"]),
        ("verifying", (), ["done", "failed", "not reached", "not reached", "not reached"]),
        (
            "verifying",
            ("runtime_absence", "disk_evidence"),
            ["done", "done", "failed", "not reached", "not reached"],
        ),
        (
            "confirming",
            ("runtime_absence", "force_cleanup", "repair"),
            ["done", "done", "done", "failed", "not reached"],
        ),
        (
            "confirming",
            ("runtime_absence", "repair", "runtime_absence_after", "inventory_after"),
            ["done", "done", "done", "done", "failed"],
        ),
    ],
)
def test_a_recovery_failed_in_the_step_that_did_not_come_to_its_end(
    failed_in: str, recorded: tuple[str, ...], states: list[str]
) -> None:
    names = ("allocation", "inventory", *recorded)
    case = {"state": "failed", "failed_in": failed_in, "steps": [{"step": name} for name in names]}
    assert [step.state for step in operators.recovery_steps(case)] == states


def test_the_fleet_begins_with_what_is_blocked_and_says_what_waits(
    selling: Stack, browse: Browse
) -> None:
    with transaction(selling.engine) as conn:
        conn.execute(sa.update(nodes).where(nodes.c.id == NODE).values(region="north"))
    fail(selling, launch(selling).json()["id"])
    api = selling.client("admin")
    parity = f"admin/nodes/{NODE}/parity"
    api.post(parity)
    task = selling.lease()
    # The second of a node waits for the first.
    api.post(parity)
    rows = api.get(f"admin/nodes/{NODE}/resource-slots").json()["items"]
    (slot,) = [row for row in rows if row["status"] == "cleanup_blocked"]
    text = browse("admin").get("/console/fleet").text
    parts = [text.index(f'id="{name}"') for name in ("blocked", "nodes", "waits", "capacity")]
    assert parts == sorted(parts)
    assert f"slots/{slot['id']}" in text[parts[0] : parts[1]]
    (row,) = re.findall(r"<tr><td>north</td><td>lab-edu-slice</td>(.*?)</tr>", text)
    assert re.findall(r">(\d+)</td>", row) == ["1", "0", "1", "0", "2"]
    (queued,) = api.get("admin/tasks", params={"state": "queued"}).json()["items"]
    assert queued["waits_for"]["detail"]
    assert html.escape(queued["waits_for"]["detail"], quote=True) in text[parts[2] : parts[3]]
    assert "<dt>tasks waiting</dt><dd>1</dd>" in text
    with transaction(selling.engine) as conn:
        because = "no route to the host"
        queue.wait_for_host(conn, task.id, task.lease_token, because, act=ACT)
    text = browse("admin").get("/console/fleet").text
    assert "<dt>tasks running</dt><dd>0</dd>" in text
    assert "<dt>tasks waiting</dt><dd>2</dd>" in text
    work = text[text.index('id="waits"') : text.index('id="capacity"')]
    assert f"/console/tasks/{task.id}" in work and because in work


def test_the_fleet_is_narrowed_by_region_and_state(selling: Stack, browse: Browse) -> None:
    add_metal(selling)
    with transaction(selling.engine) as conn:
        conn.execute(sa.update(nodes).where(nodes.c.id == NODE).values(region="south"))
    admin, page = browse("admin"), "/console/fleet"

    def choices(query: str) -> dict[str, str]:
        text = admin.get(page + query).text
        part = text[text.index('id="nodes"') : text.index('<ul class="fleet">')]
        links = re.findall(r'<a href="([^"]*)"[^>]*>([^<]*)</a>', part)
        return {html.unescape(label): html.unescape(link) for link, label in links}

    def listed(query: str) -> set[str]:
        return {NODE, "metal"} & {
            link.rpartition("/")[2] for link in admin.open(page + query).links
        }

    every = {"all states": "?", "retired": "?state=retired", "all regions": "?"}
    assert choices("") == every | {
        "ready 1": "?state=ready",
        "enrolling 1": "?state=enrolling",
        "south 1": "?region=south",
        "north 1": "?region=north",
    }
    north = choices("?region=north")
    assert {north[name] for name in ("all states", "south 1")} == {"?region=north", "?region=south"}
    assert "ready 1" not in north and north["enrolling 1"] == "?state=enrolling&region=north"
    assert choices("?state=ready")["north 1"] == "?state=ready&region=north"
    queries = ("", "?region=north", "?region=south", "?state=ready", "?state=ready&region=north")
    assert [len(listed(query)) for query in queries] == [2, 1, 1, 1, 0]
    assert listed(north["enrolling 1"]) == {"metal"}


def test_the_fleet_says_that_more_nodes_are_blocked(
    selling: Stack, browse: Browse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "_PAGE", 1)
    fail(selling, launch(selling).json()["id"])
    more = "those of more follow once these are recovered"
    assert more not in browse("admin").get("/console/fleet").text
    other_node = {"id": "second", "name": "second", "machine_id": "", "host_key": ""}
    other_slot = {
        "id": "of-second",
        "node_id": "second",
        "nvme_identity": "eui.2",
        "management_mac": "02:00:00:00:00:02",
    }
    with transaction(selling.engine) as conn:
        (node,) = conn.execute(sa.select(nodes)).mappings()
        blocked = sa.select(slots).where(slots.c.status == "cleanup_blocked")
        (slot,) = conn.execute(blocked).mappings()
        conn.execute(sa.insert(nodes), {**node, **other_node})
        conn.execute(sa.insert(slots), {**slot, **other_slot})
    assert more in browse("admin").get("/console/fleet").text


DRIFT = {"severity": "failed", "code": "domain_unknown", "found": "gpuaas-slice-<1>"}


def test_a_node_shows_its_failed_check_drift_and_firmware(selling: Stack, browse: Browse) -> None:
    check = {"status": "FAIL", "check": "iommu", "detail": "off <b>", "remediation": "turn it on"}
    passed = {"status": "PASS", "check": "bridge", "detail": "is there", "remediation": "none"}
    report = {"failures": 1, "warnings": 0, **wipes.proven(discovery()), "checks": [passed, check]}
    row = {"section": "bios", "name": "SriovGlobal", "change": "changed"}
    differences = [row | {"before": "Enabled", "after": "Disabled"}]
    selling.client("admin").post(f"admin/nodes/{NODE}/drift")
    task = selling.lease()
    assert task.kind == "slice.drift_reconcile"
    admin, page = browse("admin"), f"/console/nodes/{NODE}"
    assert "Not compared yet." in admin.get(page).text
    with transaction(selling.engine) as conn:
        line = {"event": "failed", "task": "Compare <it>", "code": "host_odd", "seconds": 1.5}
        queue.progress(conn, task.id, task.lease_token, line)
        result = {"differences": [DRIFT], "skipped": [], "unknown": {}}
        queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ACT, result=result)
        host.record_parity(conn, NODE, report, ACT)
        values = {"firmware_differences": differences}
        conn.execute(sa.update(nodes).where(nodes.c.id == NODE).values(**values))
    parity = admin.get(f"{page}/parity").text
    assert "1 failure, 0 warnings of 2 checks" in parity
    assert parity.index("off &lt;b&gt;") < parity.index("is there"), "what failed comes first"
    assert "turn it on" in parity and ">none<" not in parity
    text = admin.get(page).text
    (shown,) = re.findall(r"<tr>(.*?domain_unknown.*?)</tr>", text)
    assert "failed" in shown and "gpuaas-slice-&lt;1&gt;" in shown
    assert "<dt>bios SriovGlobal</dt><dd>changed: Enabled → Disabled</dd>" in text
    assert "The latest comparison" not in text
    selling.client("admin").post(f"admin/nodes/{NODE}/drift")
    text = admin.get(page).text
    assert "domain_unknown" in text and "The latest comparison" in text
    for place in (f"{page}/timeline", f"/console/tasks/{task.id}"):
        text = admin.get(place).text
        (ended,) = re.findall(r'Compare &lt;it&gt;</strong> <span class="soft">(.*?)</span>', text)
        assert ended == "failed: host_odd in 1.5 s", place


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({}, "The host holds what the records say."),
        ({"unknown": {"domains": "virsh <hangs>"}}, "<dt>domains</dt><dd>virsh &lt;hangs&gt;</dd>"),
        ({"skipped": ["a-slot"]}, "under way: 1 of its slots"),
        ({"skipped": ["a-slot"], "differences": [DRIFT]}, "domain_unknown"),
    ],
)
def test_a_node_says_that_its_host_is_as_recorded_only_when_all_was_compared(
    selling: Stack, browse: Browse, changed: dict[str, Any], sentence: str
) -> None:
    """Runs that failed afterwards, or met the node outside slice mode, are no comparisons."""
    page, clean = f"/console/nodes/{NODE}", "The host holds what the records say."
    whole: dict[str, Any] = {"differences": [], "skipped": [], "unknown": {}}
    outside = whole | {"skipped": [NODE]}

    def compare(result: dict[str, Any], state: TaskState = TaskState.SUCCEEDED) -> None:
        selling.client("admin").post(f"admin/nodes/{NODE}/drift")
        task = selling.lease()
        with transaction(selling.engine) as conn:
            error = dict.fromkeys(("code", "expected", "found", "remedy"), "odd")
            ended = {"error": error} if state == TaskState.FAILED else {"result": result}
            queue.finish(conn, task.id, task.lease_token, state, ACT, **ended)

    admin = browse("admin")
    compare(outside)
    assert "Not compared yet." in admin.get(page).text
    compare(whole | changed)
    for _ in range(11):
        compare({}, TaskState.FAILED)
    compare(outside)
    text = admin.get(page).text
    assert sentence in text and "The latest comparison" in text
    assert (clean in text) == (not changed)


def test_output_elsewhere_names_its_machine(selling: Stack, browse: Browse) -> None:
    selling.client("admin").post(f"admin/nodes/{NODE}/parity")
    with transaction(selling.engine) as conn:
        (task,) = leasing.lease(conn, "control-2:7")
    text = browse("admin").get(f"/console/tasks/{task.id}").text
    assert "None on this machine. The task runs on control-2.</p>" in text


def test_a_node_is_converted_both_ways(selling: Stack, browse: Browse) -> None:
    add_metal(selling)
    prepare_metal(selling)
    admin = browse("admin")
    for node, to, button, kind in (
        (NODE, "baremetal", "Convert to bare metal", "node.convert"),
        ("metal", "slice", "Convert to a slice host", "node.bootstrap"),
    ):
        page = f"/console/nodes/{node}"
        form = admin.open(page).form(f"POST /admin/nodes/{node}/conversion")
        assert (dict(form.fields)["to"], form.button) == (to, button)
        answer = admin.send(page, form, reason="another use")
        assert answer.headers["Location"].startswith("/console/tasks/")
        text = admin.get(answer.headers["Location"]).text
        assert f"<h1>{kind}</h1>" in text and f'href="{page}"' in text
        with reading(selling.engine) as conn:
            mode = conn.execute(sa.select(nodes.c.mode).where(nodes.c.id == node)).scalar()
        assert mode == f"converting_to_{to}"


def test_what_a_form_changed_is_in_the_audit_and_in_its_trace(
    selling: Stack, browse: Browse
) -> None:
    admin = browse("admin")
    image = {
        "name": "rocky",
        "version": "9",
        "digest": f"sha256:{'1' * 64}",
        "size_bytes__int": "1024",
        "url": "https://images.example/rocky.raw",
        "runtime__words": "rdma, worker-kit",
        "reason": "asked for by demo",
    }
    limits = {"gpus__limit": "8", "machines__limit": "", "reason": "they pay"}
    forms = (
        ("/console/images", "POST /admin/images", image),
        ("/console/projects/demo", "PUT /admin/projects/demo/quota", limits),
    )
    for page, call, typed in forms:
        form = admin.open(page).form(call)
        assert admin.send(page, form, **typed).headers["Location"] == page
    shown = admin.get("/console/images").text
    assert "rocky 9" in shown and "rdma, worker-kit" in shown and "1 KiB" in shown
    assert "0 used of 8" in admin.get("/console/projects/demo").text
    assert selling.client("admin").get("projects/demo/quota").json()["own"] == {"gpus": 8}
    audit = admin.get("/console/audit").text
    for action, reason in (
        ("admin.image.registered", "asked for by demo"),
        ("admin.project.quota", "they pay"),
    ):
        (row,) = [row for row in audit.split("<tr>") if reason in row]
        assert f"<code>{action}</code>" in row
        (link,) = Page(row).links
        trace = admin.get(link).text
        assert action in trace and reason in trace


def offers(browser: Browser, path: str) -> dict[str, bool]:
    """Whether each action of a page can be sent now, by the last part of its call."""
    forms = browser.open(path).forms
    return {form.call.rsplit("/", 1)[1]: not form.disabled for form in forms if form.call}


def test_an_allocation_is_ended_by_force_only_when_the_service_would(
    selling: Stack, browse: Browse
) -> None:
    mine = launch(selling).json()["id"]
    activate(selling, mine)
    admin, page = browse("admin"), f"/console/allocations/{mine}"
    assert offers(admin, page) == {
        "verify-absent": True,
        "force-release": False,
        "force-cleanup": False,
    }
    text = admin.get(page).text
    assert "An active allocation: its tenant may be using it" in text
    assert "Node ready: release it" in text
    with transaction(selling.engine) as conn:
        conn.execute(sa.update(nodes).values(state="unreachable"))
    assert offers(admin, page)["force-release"]
    form = admin.open(page).form(f"POST /admin/allocations/{mine}/force-release")
    assert admin.send(page, form, reason="the host is gone").headers["Location"] == page
    assert not any(offers(admin, page)[name] for name in ("force-release", "force-cleanup"))
    assert "It is released: there is no use to end." in admin.get(page).text
    with transaction(selling.engine) as conn:
        conn.execute(sa.update(nodes).values(state="ready"))
    stuck = launch(selling, "stuck").json()["id"]
    fail(selling, stuck)
    page = f"/console/allocations/{stuck}"
    assert offers(admin, page)["force-cleanup"]
    form = admin.open(page).form(f"POST /admin/allocations/{stuck}/force-cleanup")
    assert admin.send(page, form, reason="seen").headers["Location"] == page


def test_a_slot_offers_what_its_state_allows(selling: Stack, browse: Browse) -> None:
    admin = browse("admin")
    rows = selling.client("admin").get(f"admin/nodes/{NODE}/resource-slots").json()["items"]
    slots = [row["id"] for row in rows]
    page = f"/console/nodes/{NODE}/slots/{slots[0]}"
    call = f"POST /admin/nodes/{NODE}/resource-slots/{slots[0]}"
    on_sale = {"enable": False, "disable": True, "withdraw": False, "remove-orphan": False}
    assert offers(admin, page) == on_sale
    text = admin.get(page).text
    assert "It is on sale." in text and "take it off first" in text
    admin.send(page, admin.open(page).form(f"{call}/disable"))
    assert offers(admin, page) == dict.fromkeys(on_sale, True) | {"disable": False}
    assert "It is off sale." in admin.get(page).text
    admin.send(page, admin.open(page).form(f"{call}/enable"))
    assert offers(admin, page) == on_sale
    launch(selling)
    pages = [f"/console/nodes/{NODE}/slots/{slot}" for slot in slots]
    (taken,) = [path for path in pages if "It is in use" in admin.get(path).text]
    assert offers(admin, taken) == on_sale
    (page,) = {*pages} - {taken}
    call = f"POST /admin/nodes/{NODE}/resource-slots/{page.rsplit('/', 1)[1]}"
    admin.send(page, admin.open(page).form(f"{call}/disable"))
    admin.send(page, admin.open(page).form(f"{call}/withdraw"), reason="sold")
    assert not any(offers(admin, page).values())
    assert "The slot has ended." in admin.get(page).text


def test_every_mutating_operation_is_on_a_page(selling: Stack, browse: Browse) -> None:
    """Or in the list of those that are not, with a reason."""
    ids = names(selling)
    admin = browse("admin")
    with transaction(selling.engine) as conn:
        fields = {"address": "192.0.2.9", "profile": "lab"}
        node_records.create(conn, ACT, id="metal", mode=NodeMode.BAREMETAL, **fields)
        leader.campaign(conn, leader.LOOPS, "p1", 3600)
    selling.ingress_rule(ids["allocation"])
    calls = offered(admin, [f"/console/tasks/{ids['task']}"], ids)
    stuck = launch(selling, "stuck").json()["id"]
    fail(selling, stuck)
    pages = [address(pattern, ids) for pattern in (*SHARED, *OPERATORS)]
    every = selling.client("admin").get(f"admin/nodes/{NODE}/resource-slots").json()["items"]
    pages += [f"/console/nodes/{NODE}/slots/{slot['id']}" for slot in every]
    pages += ["/console/nodes/metal", launch_review(selling)]
    activate(selling, ids["allocation"])
    calls |= offered(admin, pages, ids)
    for state in ("draining", "maintenance"):
        with transaction(selling.engine) as conn:
            conn.execute(sa.update(nodes).where(nodes.c.id == "metal").values(state=state))
        calls |= offered(admin, ["/console/nodes/metal"], ids | {"node": "metal"})
    operations = {
        f"{verb.upper()} {re.sub(r'{action}', 'ACTION', path.removeprefix('/api/v1'))}"
        for path, verbs in contract.contract()["paths"].items()
        for verb in verbs
        if verb != "get"
    }
    expected: set[str] = set()
    for operation in operations:
        for action in ("enable", "disable", "withdraw"):
            expected.add(re.sub(r"{\w+}", "{}", operation.replace("ACTION", action)))
    assert expected - calls == set(NOT_OFFERED)


REASON = {"reason": "test"}
HOST = "/console/nodes/lab-host"
# Page, label of the button, typed values, and the kind of the task that it queues.
HARMLESS: list[tuple[str, str, dict[str, str], str]] = [
    (HOST, "Bootstrap", {}, "node.bootstrap"),
    (HOST, "Discover", {}, "slice.topology_discover"),
    (HOST, "Bind the devices", {}, "node.bind_topology"),
    (HOST, "Measure parity", {}, "node.parity"),
    (HOST, "Compare now", {}, "slice.drift_reconcile"),
    (HOST, "Reboot the host", {"allocations__list": "MINE", **REASON}, "node.reboot"),
    (HOST, "Firmware settings", {}, "node.firmware"),
    (HOST, "Renew the certificate", {}, "node.enrol"),
    (HOST, "Cache an image", {"image_id": "IMAGE"}, "node.image_cache"),
    (HOST, "Enrolment token", {}, ""),
    (HOST, "Drain", REASON, ""),
    (f"{HOST}/discovery", "Discover now", {}, "slice.topology_discover"),
    (f"{HOST}/discovery", "Dry run", {}, "node.storage_transition"),
    (f"{HOST}/parity", "Measure now", {}, "node.parity"),
    ("/console/allocations/MINE", "Ask the host what is left", {}, "slice.absence_verify"),
    *(
        ("/console/projects/demo/allocations/MINE", label, {}, "slice.vm_power")
        for label in ("Stop", "Restart", "Reset")
    ),
]


@pytest.mark.parametrize(("page", "label", "typed", "kind"), HARMLESS)
def test_a_harmless_form_does_what_it_says(
    selling: Stack, browse: Browse, page: str, label: str, typed: dict[str, str], kind: str
) -> None:
    mine, admin, api = launch(selling).json()["id"], browse("admin"), selling.client("admin")
    activate(selling, mine)
    if kind == "node.enrol":
        signed = ca.certify_host(ca.open_trust(selling.settings.state_dir), KEY, NODE)
        with transaction(selling.engine) as conn:
            host.record_certificate(conn, NODE, ACT, certificate=signed, public_key=KEY)
    page = page.replace("MINE", mine)
    image = api.get("images").json()["items"][0]["id"]
    typed = {
        name: {"IMAGE": image, "MINE": mine}.get(value, value) for name, value in typed.items()
    }
    before = {task["id"] for task in api.get("admin/tasks").json()["items"]}
    form = next(form for form in admin.open(page).forms if form.button == label)
    answer = admin.send(page, form, **typed)
    if label == "Enrolment token":
        assert (answer.status_code, "shown once" in answer.text) == (200, True)
        return
    assert answer.status_code == 303, answer.text
    tasks = [task for task in api.get("admin/tasks").json()["items"] if task["id"] not in before]
    assert [task["kind"] for task in tasks] == [kind] * bool(kind)
    there = dict(form.fields)["_back"].replace("{id}", tasks[0]["id"] if tasks else "")
    assert answer.headers["Location"] == there
    shown = admin.open(there)
    if there.startswith("/console/tasks/"):
        cancel = shown.form(f"POST /admin/tasks/{tasks[0]['id']}/cancel")
        assert admin.send(there, cancel, **REASON).headers["Location"] == there
        assert not [each for each in admin.open(there).forms if each.button == "Cancel"]
    if label == "Drain":
        resume = next(each for each in shown.forms if each.button == "Resume")
        assert admin.send(page, resume, **REASON).headers["Location"] == page
        assert api.get(f"admin/nodes/{NODE}").json()["state"] == "ready"


def launch_review(selling: Stack, **other: str) -> str:
    image = selling.client("member").get("images").json()["items"][0]["id"]
    values = CHOSEN | {"image_id": image, "step": "review"} | other
    return f"/console/projects/demo/launch?{urlencode(values)}"


def offered(browser: Browser, pages: list[str], ids: dict[str, str]) -> set[str]:
    """The calls of all forms of the pages, with {} for each identifier."""
    calls = set()
    plain = set(ids.values()) | {"metal"}
    for path in pages:
        for form in Page(browser.get(path).text).forms:
            if form.call:
                parts = form.call.split("/")
                generic = ["{}" if _named(part, plain) else part for part in parts]
                calls.add("/".join(generic))
    return calls


def _named(part: str, ids: set[str]) -> bool:
    return part in ids or bool(re.fullmatch(r"[0-9a-f]{8}-[0-9a-f-]{27}", part))


# npm pack htmx.org@4.0.1 (htmx.min.js, ext/hx-sse.min.js), @xterm/xterm@6.0.0,
# @xterm/addon-fit@0.11.0; sha256 of their files.
VENDORED = {
    HTMX: "a0abb04f2f45a1f89d1d4844023245537e5e6014c87b144553e0607b4cc32130",
    SSE: "18ef2761356ec1fe0bb6d92612315b37517a7c1e9856b661c5ae81fef239d103",
    "xterm-6.0.0.js": "14903579ff54664cd72f8e8699e6961a6272c21863ec1c3b118cdc8af5d4a972",
    "xterm-6.0.0.css": "854a7c0fb70e8b1a083c16797ab827299fb18744f5ad34f227b48337e33293c6",
    "xterm-addon-fit-0.11.0.js": "ba3ea256ce0620a0992a197d6c9baea64823fc93d8da07a9e366ca9943c18527",
}


def test_vendored_files_are_the_published_ones() -> None:
    static = HERE / "static"
    for name, digest in VENDORED.items():
        assert hashlib.sha256((static / name).read_bytes()).hexdigest() == digest
    scripts = {file.name for file in static.iterdir() if file.suffix in (".js", ".css")}
    assert scripts == {*VENDORED, "console.css", "replay.js", "terminal.js"}
    assert "Permission is hereby granted" in (static / "xterm-LICENSE.txt").read_text()


def test_pages_load_nothing_from_elsewhere(browse: Browse) -> None:
    text = browse("admin").get("/console/fleet").text
    sources = re.findall(r'(?:src|href)="([^"]+)"', text)
    assert sources
    assert all(source.startswith(("/console/", "#", "?")) for source in sources)
    style = (HERE / "static" / "console.css").read_text()
    assert "url(" not in style
    assert "@import" not in style
    assert 'style="' not in text
    assert "<script>" not in text


def test_the_health_page_shows_every_machine_that_reports(selling: Stack, browse: Browse) -> None:
    with transaction(selling.engine) as conn:
        for host, role in (("control-1", "loops"), ("control-2", "worker"), ("gate-1", "gateway")):
            leader.record_process(conn, host, [role], host=host, pid=7, version="1")
        leader.campaign(conn, leader.LOOPS, "control-1", 3600)
        old = sa.update(service_processes).where(service_processes.c.host == "gate-1")
        conn.execute(old.values(seen_at=service_processes.c.seen_at - 2 * leader.STALE_S))
    text = browse("admin").get("/console/health").text
    (lead,) = re.findall(r'<h2 id="leader">.*?</section>', text, re.S)
    assert "control-1, 7" in lead
    machines = text[: text.index(lead)]
    rows = [row for row in machines.split("<tr>") if "control-" in row or "gate-1" in row]
    assert [("lost" in row) for row in rows] == [False, False, True]
    assert "worker" in rows[1]
    assert f"answers here, {socket.gethostname()}, as" in text


def test_the_machine_is_examined_when_an_operator_asks(
    console: FastAPI, browse: Browse, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, page = browse("admin"), "/console/health"
    assert "Check this machine" not in admin.get(page).text
    mounted: Any = next(
        route.app
        for route in console.routes
        if isinstance(route, Mount) and route.path == "/console"
    )
    good = {"status": "ok", "check": "clock", "found": "equal", "expected": "", "remedy": ""}
    bad = {"status": "fail", "check": "disk_space", "found": "<b>1 MiB</b>", "expected": "more"}
    calls = []

    def examine() -> list[dict[str, str]]:
        calls.append(1)
        return [good, {**bad, "remedy": "delete runs"}]

    monkeypatch.setitem(mounted.state._state, "examine", examine)
    assert "Check this machine" in admin.get(page).text
    assert not calls
    text = admin.get(f"{page}?examine=yes").text
    assert text.index("&lt;b&gt;1 MiB") < text.index("equal")
    assert browse("member").get(f"{page}?examine=yes").status_code == 404
    with operators._EXAMINING:
        assert admin.get(f"{page}?examine=yes").status_code == 429
    assert len(calls) == 1


def test_dead_letters_have_their_reasons_and_a_sample_is_queued_again(
    selling: Stack, browse: Browse
) -> None:
    with_model(selling)
    dead = bury(selling, found="<b>hostile</b>", detail="secret of the operators")
    enqueue(selling)
    member = browse("member")
    path = "/console/projects/demo/jobs"
    text = member.get(path).text
    assert "&lt;b&gt;hostile" in text and "function_failed" in text
    assert "secret of the operators" not in text
    assert f"{path}/{dead}" in Page(text).links
    # One of the two jobs has ended.
    assert "Jobs that have not ended. 1, 0 to 1" in text
    form = Page(text).form("POST /projects/demo/jobs/dlq/reprocess")
    assert ("sample:int", "5") in form.fields
    assert member.send(path, form).status_code == 303
    text = member.get(path).text
    assert "function_failed" not in text
    assert "Jobs that have not ended. 2, 0 to 2" in text
    bury(selling)
    start(selling.engine, "own", target="remote", project_id="demo")
    text = member.get(path).text
    assert "function_failed" in text and "<td>m</td><td>now</td>" in text
    assert "<td>own</td>" in text and "0 of 1" in text
    forms = [form for form in Page(text).forms if form.call == "POST /projects/demo/jobs/cancel"]
    assert len(forms) == 2
    for form in forms:
        assert member.send(path, form).status_code == 303
    text = member.get(path).text
    assert "No job has failed for good." in text
    assert "Jobs that have not ended. 0, " in text


def test_a_job_is_shown_with_its_input_and_how_it_ended(selling: Stack, browse: Browse) -> None:
    with_model(selling)
    dead = bury(selling, found="<b>hostile</b>", detail="secret of the operators")
    done = enqueue(selling, input={"of": "<i>mine</i>"})
    play(selling, Outcome(result={"answer": 42}))
    page = "/console/projects/demo/jobs"
    member = browse("member")
    assert f"{page}/{done}" in Page(member.get(page).text).links
    text = member.get(f"{page}/{done}").text
    assert "&lt;i&gt;mine" in text and "&#34;answer&#34;: 42" in text and "Last error" not in text
    for who, detail in (("member", False), ("admin", True)):
        text = browse(who).get(f"{page}/{dead}").text
        assert "dead letter</span>" in text and "1 of 3" in text and "0 times" in text
        assert "function_failed" in text and "&lt;b&gt;hostile" in text
        assert ("secret of the operators" in text) is detail
    assert browse("stranger").get(f"{page}/{done}").status_code == 404
    for id in (dead, enqueue(selling)):
        call = f"POST /projects/demo/jobs/{id}/cancel"
        form = member.open(f"{page}/{id}").form(call)
        assert member.send(f"{page}/{id}", form).status_code == 303
        text = member.get(f"{page}/{id}").text
        assert "canceled</span>" in text and call not in text
    assert f"POST /projects/demo/jobs/{done}/cancel" not in member.get(f"{page}/{done}").text


@pytest.mark.covers("ORCH-1", "ORCH-6")
def test_nesting_makes_no_page_long(selling: Stack, browse: Browse) -> None:
    """The printed part of a document is bounded, including its indentation."""
    with_model(selling)
    nested = json.loads("[" * 97 + ",".join(["[]"] * 15_000) + "]" * 97)
    page = f"/console/projects/demo/jobs/{enqueue(selling, input={'x': nested})}"
    member = browse("member")
    whole = member.get(page).text
    assert len(whole) < 100_000 and "The API has the rest." in whole
    # The refreshed part has no input.
    refreshed = member.get(page, headers={"HX-Request": "true", "HX-Target": "div#job"}).text
    assert 'id="input"' not in refreshed and 'id="record"' in refreshed
    play(selling, Outcome(result={"y": nested}))
    assert 100_000 < len(member.get(page).text) < 200_000
    review = launch_review(selling, terminal="[" * 97 + "[]," * 6000 + "0" + "]" * 97)
    assert len(member.get(review).text) < 20_000


def test_pools_are_shown_by_memory_with_jobs_and_thresholds(selling: Stack, browse: Browse) -> None:
    hot = busy_pools(selling)
    start(selling.engine, "far", memory_mib=2048, target="remote", project_id="demo")
    admin = browse("admin")
    text = admin.get("/console/pools").text
    rows = [row for row in text.split("<tr>") if "Memory of pool" in row]
    names = [re.search(r">(\w+)</a>", row)[1] for row in rows]  # type: ignore[index]
    marks = [re.findall(r"above \d+ %", row) for row in rows]
    flying = [re.findall(r'"number">(\d+)</td>', row) for row in rows]
    assert names == ["big", "warm", "hot"]
    (far,) = [row for row in text.split("<tr>") if ">far</a>" in row]
    assert "not measured" in far and ">remote<" in far
    (link,) = [link for link in Page(far).links if "/pools/" in link]
    assert "no limit" in admin.get(link).text
    # Of its memory, and of that of its GPU.
    assert marks == [[], ["above 85 %"], ["above 90 %", "above 85 %"]]
    assert "70 GiB of 80 GiB" in rows[2] and "no GPU" in rows[0]
    (machine,) = [row for row in text.split("<tr>") if "Memory of control" in row]
    assert "GPU-0" in machine and "70 GiB of 80 GiB" in machine and "above 85 %" in machine
    assert flying == [["0"], ["0"], ["2"]]
    assert "480 MiB of 512 MiB" in rows[2]
    # The queue of all projects; the dead letter has ended.
    assert "Jobs that have not ended. 3, 0 to 3" in text
    (demo,) = [row for row in text.split("<tr>") if "/projects/demo/jobs" in row]
    assert re.findall(r"(\d+)</td>", demo) == ["1", "2", "1"]
    # A refresh every few seconds does not count all jobs.
    refresh = {"HX-Request": "true", "HX-Target": "div#living"}
    assert "Queue of all projects" not in admin.get("/console/pools", headers=refresh).text
    shown = admin.get(f"/console/pools/{hot}").text
    assert "94 %" in shown and "above 90 %" in shown and ">0.0.9+0050</td>" in shown
    assert "70 GiB of 80 GiB" in shown and "above 85 %" in shown
    history = shown[shown.index("History") :]
    assert history.index("create, by") < history.index("begin, by") < history.index("ready, by")


@pytest.mark.covers("ORCH-1")
def test_a_pool_is_started_stopped_and_evicted_on_its_page(selling: Stack, browse: Browse) -> None:
    hot = busy_pools(selling)
    admin = browse("admin")
    page = admin.open("/console/pools")
    typed = {"name": "new", "models__words": "none", "memory_mib__int": "512"}
    refused = admin.send("/console/pools", page.form("POST /pools"), **typed)
    assert refused.status_code == 422
    assert "model_unknown" in refused.text and 'value="new"' in refused.text
    again = Page(refused.text).form("POST /pools")
    made = admin.send("/console/pools", again, **typed | {"models__words": "m, digits"})
    path = made.headers["Location"]
    id = path.removeprefix("/console/pools/")
    assert "digits, m" in admin.get(path).text
    stop = admin.open(path).form(f"POST /pools/{id}/stop")
    assert admin.send(path, stop, reason="enough").headers["Location"] == path
    text = admin.get(path).text
    assert "It has ended." in text and "enough" in text
    assert not [form for form in Page(text).forms if id in form.call]
    assert path in admin.open("/console/pools").links, "among those that have ended"

    apart = {"name": "apart", "models__words": "m", "target": "allocation", "project_id": "demo"}
    form = admin.open("/console/pools").form("POST /pools")
    path = admin.send("/console/pools", form, **apart).headers["Location"]
    assert "the launch that names it" in admin.get(path).text

    path = f"/console/pools/{hot}"
    admin.send(path, admin.open(path).form(f"POST /pools/{hot}/stop"), reason="enough")
    page = admin.open(path)
    assert [form.call for form in page.forms if hot in form.call] == [f"POST /pools/{hot}/evict"]
    admin.send(path, page.form(f"POST /pools/{hot}/evict"), reason="it hangs")
    text = admin.get(path).text
    assert "stopping" in text and "it hangs" in text and "It ends already." in text

    page = admin.open("/console/pools")
    admin.send("/console/pools", page.form("POST /pools/stop-all"), reason="night")
    rest = selling.client("admin", base="/").get("pools", params={"live": True}).json()["items"]
    assert {pool["state"] for pool in rest} == {"draining", "stopping"}


@pytest.mark.covers("ORCH-5")
def test_the_site_is_drained_and_admits_jobs_again(selling: Stack, browse: Browse) -> None:
    busy_pools(selling)
    admin, page, call = browse("admin"), "/console/maintenance", "POST /control/maintenance"
    banners = ("/console/fleet", "/console/health", "/console/pools")
    assert not [path for path in banners if "no inference job is admitted" in admin.get(path).text]
    form = admin.open(page).form(call)
    assert ("mode", "drain") in form.fields
    admin.send(page, form, reason="<b>upgrade</b>", drain_deadline_s__int="0")
    for path in banners:
        text = admin.get(path).text
        assert "The site drains" in text and "2 jobs still run" in text
        assert "&lt;b&gt;upgrade" in text
    text = admin.get(page).text
    forms = [dict(form.fields)["mode"] for form in Page(text).forms if form.call == call]
    assert forms == ["normal", "drain"]
    assert "/console/projects/demo/jobs" in Page(text).links, "whose jobs run"
    jobs = browse("member")
    letters = "/console/projects/demo/jobs"
    sample = jobs.open(letters).form("POST /projects/demo/jobs/dlq/reprocess")
    assert jobs.send(letters, sample).status_code == 503
    with transaction(selling.engine) as conn:
        control.follow(conn)  # cancels running jobs
        conn.execute(sa.update(pool_workers).values(ended_at=1.0))
        control.follow(conn)
    shown = admin.get(page).text
    assert "drained" in shown and "The service and its workers are alive." in shown
    assert "No node drains" in shown and "The sale of slices is on" in shown
    with transaction(selling.engine) as conn:
        out = sa.update(nodes).where(nodes.c.id == NODE)
        conn.execute(out.values(state="maintenance", state_reason="<i>memory"))
    out_of_use = admin.get(page).text
    assert f"/console/nodes/{NODE}" in Page(out_of_use).links and "&lt;i&gt;memory" in out_of_use
    assert admin.send(page, Page(shown).form(call)).headers["Location"] == page
    assert "no inference job is admitted" not in admin.get("/console/fleet").text
    assert jobs.send(letters, sample, _key="another").status_code == 303


@pytest.mark.covers("ORCH-5")
def test_an_application_is_deployed_and_stopped_on_its_pages(
    selling: Stack, browse: Browse
) -> None:
    page = "/console/projects/demo/apps"
    member, call = browse("member"), "POST /projects/demo/app-instances"
    assert call not in {form.call for form in member.open(page).forms}, "there is no machine"
    first, second = (launch(selling, key, hostname=key).json()["id"] for key in ("one", "two"))
    assert member.open(page).form(call).disabled, "nothing is active"
    activate(selling, first)
    text = member.get(page).text
    assert f'<option value="{second}" disabled>two, {second[:8]}: requested: wait until' in text
    assert f'value="{second}" disabled> <span>two' in text and "Requested: wait until" in text
    assert f'value="{first}" disabled' not in text and not Page(text).form(call).disabled
    activate(selling, second)
    typed = {
        "name": "slurm",
        "slug": "slurm-reference",
        "controller_allocation_id": first,
        "worker_allocation_ids__list": second,
    }
    form = member.open(page).form(call)
    refused = member.send(page, form, managed_key="none", **typed)
    assert refused.status_code == 422 and f'value="{second}" checked' in refused.text
    made = member.send(page, form, _key="another", managed_key=KEY, **typed)
    mine = made.headers["Location"]
    shown = member.get(mine).text
    assert "member_failed" in shown and "guest_unreachable_by_design" in shown
    assert all(f"/console/projects/demo/allocations/{id}" in shown for id in (first, second))
    assert member.open(page).form(call).disabled, "both are used"
    assert member.get(page).text.count("A member of the application slurm: stop") == 2
    path = f"/projects/demo/app-instances/{mine.rpartition('/')[2]}"
    for act, state in (("bootstrap-ssh/reconcile", "deploying"), ("stop", "stopped")):
        form = member.open(mine).form(f"POST {path}/{act}")
        assert member.send(mine, form).headers["Location"] == mine
        assert f">{state}<" in member.get(mine).text
    assert f"POST {path}/stop" not in {form.call for form in member.open(mine).forms}
    assert browse("stranger").get(mine).status_code == 404


def test_differences_with_inventories_have_their_reasons(selling: Stack, browse: Browse) -> None:
    launch(selling)
    admin, page = browse("admin"), "/console/inventory"
    assert admin.get(page).text.count("Not compared yet.") == 2
    refused = admin.send(page, admin.open(page).form("POST /admin/netbox/diff"), reason="try")
    assert refused.status_code == 409 and "netbox_not_configured" in refused.text
    with transaction(selling.engine) as conn:
        conn.execute(sa.update(nodes).where(nodes.c.id == NODE).values(maas={"system_id": "abc4"}))
    rows = {
        sync.READINGS: [(f"node {NODE}", "eu <1>"), ("device o", "eu 2"), ("node o", "eu 3")],
        maas_sync.READINGS: [("machine h (abc4)", "other 4"), ("machine h (abc5)", "other 5")],
    }
    for service, pairs in rows.items():
        findings = [
            Finding("intent_differs", subject, "region us", found, "correct the site")
            for subject, found in pairs
        ]
        reading = sync.NetboxReading if service is sync.READINGS else readings.Reading
        service.keep(selling.engine, reading(1.0, complete=True), findings, logging.getLogger())
    text, at_node = admin.get(page).text, admin.get(f"/console/nodes/{NODE}").text
    for shown in ("eu &lt;1&gt;", "eu 2", "eu 3", "other 4", "other 5"):
        assert f"{shown}</td>" in text
        assert (f"{shown}</td>" in at_node) == (shown[-1] == "4" or "1" in shown)
    assert "region us" in at_node and "correct the site" in at_node
    failed = readings.Reading(2.0, error={**ERROR, "code": "maas_silent"})
    maas_sync.READINGS.keep(selling.engine, failed, [], logging.getLogger())
    assert "maas_silent" in admin.get(page).text
    assert "did not come to its end" in admin.get(f"/console/nodes/{NODE}").text


def test_the_term_of_the_leader_is_released(selling: Stack, browse: Browse) -> None:
    admin, page, call = browse("admin"), "/console/maintenance", "POST /control/leader/release"
    assert "there is no term to release" in admin.get(page).text
    with transaction(selling.engine) as conn:
        leader.record_process(conn, "p1", ["loops"], host="control-1", pid=7, version="1")
        leader.campaign(conn, leader.LOOPS, "p1", 3600)
    shown = admin.get(page).text
    assert "control-1, 7" in shown
    admin.send(page, Page(shown).form(call), reason="it hangs")
    assert not selling.client("admin", base="/").get("status/leader").json()["live"]
    assert "there is no term to release" in admin.get(page).text
