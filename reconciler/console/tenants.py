"""Pages of tenants: projects, the launch wizard, an allocation, applications, the catalogue."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import RedirectResponse, Response

from reconciler.api.app import PREFIX
from reconciler.console import charts, forms, guard
from reconciler.console.stream import Part
from reconciler.console.visit import Document, Refused, Visit
from reconciler.model import cloud_config
from reconciler.model.jobs import JobStatus
from reconciler.model.states import AppSlug, AppStatus
from reconciler.records import ssh_keys

# Steps of the wizard with the fields that each of them asks for.
STEPS = ("shape", "region", "image", "access", "review")
_FIELDS = (
    *("capacity_shape", "gpu_count:int", "sku", "region", "image_id", "hostname", "username"),
    *("terminal:json", "worker_pool"),
)
_KEYS = "ssh_keys:lines"
# Registered keys that the wizard offers, of those that were registered or revoked last.
_OFFERED = 1000


async def start(visit: Visit) -> Response:
    """Operators begin with the fleet, members with their project."""
    if visit.admin:
        return RedirectResponse("/console/fleet", 303)
    projects = (await visit.get("/projects"))["items"]
    target = f"/console/projects/{projects[0]['id']}" if len(projects) == 1 else "/console/projects"
    return RedirectResponse(target, 303)


async def list_projects(visit: Visit) -> Response:
    """The visitor's projects; operators can add one."""
    projects = await visit.get("/projects", limit=100, **visit.query("cursor"))
    defaults: Document = {}
    if visit.admin:
        defaults = (await visit.get("/admin/settings/default-quota"))["limits"]
    return visit.page("projects.html", projects=projects, defaults=defaults)


async def project(visit: Visit) -> Response:
    """Allocations of a project, its quota, and for operators its limits and tokens."""
    name = visit.named("project")
    query = visit.query("cursor", "state")
    allocations = await visit.get(f"/projects/{name}/allocations", limit=50, **query)
    quota = await visit.get(f"/projects/{name}/quota")
    # An id that the service has made says nothing to people.
    projects = (await visit.get("/projects", limit=1000))["items"]
    names = {row["id"]: row["name"] for row in projects}
    tokens: Document = {"items": [], "next": None}
    if visit.admin:
        tokens = await visit.get("/admin/tokens", limit=50, project_id=name)
    return visit.page(
        "project.html",
        project=quota["project_id"],
        title=names.get(quota["project_id"], quota["project_id"]),
        allocations=allocations,
        quota=quota,
        tokens=tokens,
        state=query["state"],
    )


async def jobs(visit: Visit) -> Response:
    """Queue, models, pools, newest jobs and dead letters of a project's inference jobs."""
    project = visit.named("project")
    base = f"/projects/{project}"
    path = f"{base}/jobs"
    return visit.page(
        "jobs.html",
        project=project,
        charts=[charts.of_queue(await visit.get(f"{path}/depth"))],
        models=(await visit.get(f"{path}/models"))["models"],
        pools=(await visit.get(f"{base}/pools", live=True, limit=100))["items"],
        newest=(await visit.get(path, limit=20))["items"],
        dead=await visit.get(path, status="dead_letter", limit=50, **visit.query("cursor")),
    )


async def job(visit: Visit) -> Response:
    """One inference job: its status, attempts, last error, input and result."""
    path = f"/projects/{visit.named('project')}/jobs/{visit.named('job')}"
    document = await visit.get(path)
    return visit.page(
        "job.html",
        job=document,
        meaning_=JobStatus(document["status"]).meaning,
        # The input does not change, so a refresh goes without it.
        whole="HX-Target" not in visit.request.headers,
    )


async def apps(visit: Visit) -> Response:
    """Applications of a project, and the form that deploys one on machines that no other uses."""
    name = visit.named("project")
    path = f"/projects/{name}/app-instances"
    return visit.page(
        "apps.html",
        project=name,
        instances=await visit.get(path, limit=20, **visit.query("cursor")),
        machines=(await visit.get(f"{path}/machines", limit=1000))["items"],
        slugs=[(slug.value, slug.value) for slug in AppSlug],
    )


async def app(visit: Visit) -> Response:
    """One application: what it waits for, its members, the work on them, and its end."""
    path = f"/projects/{visit.named('project')}/app-instances/{visit.named('app')}"
    instance = await visit.get(path)
    members = await visit.get(f"{path}/members", limit=100)
    operations = await visit.get(f"{path}/member-operations", limit=20)
    return visit.page(
        "app.html",
        app=instance,
        meaning_=AppStatus(instance["status"]).meaning,
        members=members["items"],
        machines={row["id"]: row["adapter_detail"]["hostname"] for row in members["items"]},
        operations=operations["items"],
        path=path,
    )


async def read_allocation(visit: Visit) -> Part:
    """The part of an allocation's page that a stream sends: state, connection, timeline."""
    path = _path(visit)
    detail = await visit.get(path)
    # Everything that the part shows: a stream sends it without the rest of the page.
    values = {
        "allocation": detail,
        "timeline": await visit.get(f"{path}/timeline"),
        "slice": detail["capacity_shape"] == "gpu_slice",
        "page": f"/console/projects/{detail['project_id']}/allocations/{detail['id']}",
    }
    return Part("allocation.html", values, ended=detail["state"] in ("released", "failed"))


async def allocation(visit: Visit) -> Response:
    """One allocation: connection, timeline, telemetry, power, ingress rules, release."""
    path = _path(visit)
    part = await read_allocation(visit)
    detail = part.values["allocation"]
    sessions = await visit.get(
        f"/projects/{visit.named('project')}/ssh-sessions", allocation_id=detail["id"], limit=20
    )
    rules: Document = {"items": []}
    telemetry = None
    wish = visit.request.query_params.get("minutes", "")
    minutes = int(wish) if wish in map(str, charts.PERIODS) else charts.PERIODS[0]
    if detail["capacity_shape"] == "gpu_slice":
        rules = await visit.get(f"{path}/ingress")
        if detail["activated_at"]:
            telemetry = await visit.get(f"{path}/telemetry", minutes=minutes)
    return visit.page(
        part.template,
        **part.values,
        ended=part.ended,
        project=detail["project_id"],
        rules=rules["items"],
        sessions=sessions["items"],
        path=path,
        telemetry=telemetry,
        charts=charts.of_slice(telemetry, minutes) if telemetry else [],
        periods=charts.PERIODS,
        minutes=minutes,
    )


async def terminal(visit: Visit) -> Response:
    """A terminal of a slice in the page, opened by a ticket that the page's form gets."""
    project = f"/projects/{visit.named('project')}"
    path = _path(visit)
    detail = await visit.get(path)
    answer = visit.page(
        "terminal.html",
        project=detail["project_id"],
        allocation=detail,
        path=path,
        recording=await visit.get(f"{project}/terminal-recording"),
    )
    answer.headers["Content-Security-Policy"] = guard.TERMINAL_POLICY
    return answer


def _path(visit: Visit) -> str:
    return f"/projects/{visit.named('project')}/allocations/{visit.named('allocation')}"


async def ssh(visit: Visit) -> Response:
    """Keys that open the project's machines through the gateway, and sessions through it."""
    project = visit.named("project")
    path = f"/projects/{project}"
    older = visit.query("cursor", "sessions")
    return visit.page(
        "ssh.html",
        project=project,
        keys=await visit.get(f"{path}/ssh-keys", limit=50, cursor=older["cursor"]),
        sessions=await visit.get(f"{path}/ssh-sessions", limit=50, cursor=older["sessions"]),
        recording=await visit.get(f"{path}/terminal-recording"),
    )


async def catalog(visit: Visit) -> Response:
    """Offers with what is free of each, and the images."""
    offers = await visit.get("/catalog")
    free = await _free(visit, offers)
    images = (await visit.get("/images", limit=1000))["items"]
    machines = await _unless_busy(visit, "/catalog/machines")
    return visit.page("catalog.html", catalog=offers, free=free, machines=machines, images=images)


async def launch(visit: Visit) -> Response:
    """The wizard. Its state is in the address, so that back and reload are harmless."""
    project = visit.named("project")
    values = _chosen(visit)
    catalog = await visit.get("/catalog")
    of_shape = [sku for sku in catalog["skus"] if sku["capacity_shape"] == values["capacity_shape"]]
    sku = next((sku for sku in of_shape if sku["name"] == values["sku"]), None)
    step = _step(visit, values)
    sold = sku and values["gpu_count"] in map(str, sku["gpu_counts"])
    size = {"sku": values["sku"], "gpus": values["gpu_count"]} if sold else {}
    images = (await visit.get("/images", limit=1000, **size))["items"]
    free: dict[str, Document | None] = {}
    machines: Document | None = None
    if step == "shape":
        machines = await _unless_busy(visit, "/catalog/machines")
        free = await _free(visit, catalog)
    elif step == "region" and values["capacity_shape"] == "baremetal":
        machines = await _unless_busy(visit, "/catalog/machines")
    elif step == "region":
        for name in ("", *(region["name"] for region in catalog["regions"])):
            gpus = values["gpu_count"] or 1
            free[name] = await _availability(visit, gpus, values["sku"], name)
    keys: dict[str, Document] = {}
    if step in ("access", "review"):
        registered = await visit.get(f"/projects/{project}/ssh-keys", limit=_OFFERED)
        keys = {key["public_key"]: key for key in registered["items"] if key["valid"]}
    given = _by_key([values["ssh_keys"]])
    pasted = given.keys() - keys.keys()
    body = _body(values)
    quota = await visit.get(f"/projects/{project}/quota")
    return visit.page(
        "launch.html",
        project=project,
        quota=quota,
        left=_left(quota),
        step=step,
        steps=STEPS,
        values=values,
        catalog=catalog,
        images=images,
        image=next((image for image in images if image["id"] == values["image_id"]), None),
        sku=sku,
        free=free,
        machines=machines,
        keys=keys,
        given=given,
        fingerprints={key: _fingerprint(key) for key in given} if step == "review" else {},
        pasted="\n".join(line for key, line in given.items() if key in pasted),
        without_key=visit.query("step")["step"] == "review" and not given,
        fields=[(name, values[name.partition(":")[0]]) for name in (*_FIELDS, _KEYS)],
        curl=_curl(visit, project, body),
        cloud_config_keys=cloud_config.KEYS,
    )


def _chosen(visit: Visit) -> dict[str, str]:
    """What was chosen so far: from the address, or from the form that was refused."""
    query = visit.request.query_params
    sent = visit.form.values if visit.form else {}
    values = {}
    for field in _FIELDS:
        name = field.partition(":")[0]
        values[name] = sent[field][-1] if field in sent else query.get(name, "")
    # The address may hold any document there, which the page would print.
    values["terminal"] = "true" if values["terminal"] == "true" else ""
    # Boxes of registered keys, and the text with others.
    lines = sent.get(_KEYS) or query.getlist("ssh_keys")
    values["ssh_keys"] = "\n".join(_by_key(lines).values())
    # One choice decides shape, SKU and number of GPUs.
    shape, _, count = query.get("offer", "").rpartition("*")
    if shape and count == "all":
        values |= dict.fromkeys(("gpu_count", "image_id", "terminal"), "")
        values |= {"capacity_shape": "baremetal", "sku": shape}
    elif count.isdigit():
        values |= {"capacity_shape": "gpu_slice", "sku": shape, "gpu_count": count}
    return values


def _by_key(texts: Sequence[str]) -> dict[str, str]:
    """Lines by type and base64 of their keys. A registered key may have been pasted, too."""
    keys: dict[str, str] = {}
    for line in "\n".join(texts).splitlines():
        if line.strip():
            keys.setdefault(" ".join(line.split()[:2]), line.strip())
    return keys


def _fingerprint(key: str) -> str:
    """The fingerprint of a key; "" of a text that the API will refuse."""
    try:
        return ssh_keys.fingerprint(key)
    except (IndexError, ValueError):
        return ""


def _step(visit: Visit, values: dict[str, str]) -> str:
    """The requested step, or an earlier step that is not complete."""
    if visit.form:
        return "review"
    wish = visit.request.query_params.get("step", "shape")
    last = STEPS.index(wish) if wish in STEPS else 0
    if _is_of_others(visit):
        last = min(last, STEPS.index("access"))
    slice_ = values["capacity_shape"] == "gpu_slice"
    complete = {
        "shape": bool(values["capacity_shape"]),
        "region": True,
        "image": bool(values["image_id"]) or not slice_,
        "access": all(values[name] for name in ("hostname", "username", "ssh_keys")),
    }
    return next((step for step in STEPS[:last] if not complete[step]), STEPS[last])


def _is_of_others(visit: Visit) -> bool:
    """Whether somebody else may have made the address, and chosen the keys in it: the link of
    another page, also before the visitor has logged in.
    """
    headers = visit.request.headers
    came_from = urlsplit(headers.get("Referer", "")).path
    return guard.of_another_page(headers) or came_from == "/console/login"


def _left(quota: Document) -> dict[str, int]:
    """What the project may still hold, by the name of each limit that it has."""
    limits, used = quota["limits"], quota["used"]
    return {
        name: max(0, limits[name] - used[name]) for name in ("gpus", "machines") if name in limits
    }


async def _free(visit: Visit, catalog: Document) -> dict[str, Document | None]:
    """How much is free of the slices of each SKU."""
    skus = [sku for sku in catalog["skus"] if sku["capacity_shape"] == "gpu_slice"]
    return {sku["name"]: await _availability(visit, 1, sku["name"]) for sku in skus}


async def _availability(
    visit: Visit, gpus: str | int, sku: str, region: str = ""
) -> Document | None:
    """How much is free of slices."""
    path = "/catalog/availability"
    return await _unless_busy(visit, path, gpus=gpus, sku=sku, region=region)


async def _unless_busy(visit: Visit, path: str, **parameters: Any) -> Document | None:
    """What is free; None while the API judges another question of the visitor."""
    try:
        return await visit.get(path, **parameters)
    except Refused as refused:
        if refused.status != 429:
            raise
        return None


def _body(values: dict[str, str]) -> dict[str, Any]:
    """The body that the form of the last step sends."""
    return forms.body({name: [values[name.partition(":")[0]]] for name in (*_FIELDS, _KEYS)})


def _curl(visit: Visit, project: str, body: dict[str, Any]) -> str:
    """The same launch as a command. A single quote in it ends and begins the shell's quoting."""
    base = str(visit.request.base_url).rstrip("/").removesuffix("/console")
    document = json.dumps(body, indent=2).replace("'", "'\\''")
    return (
        f"curl -X POST {base}{PREFIX}/projects/{project}/allocations \\\n"
        '  -H "Authorization: Bearer $GPUAAS_TOKEN" \\\n'
        "  -H \"Idempotency-Key: $(uuidgen)\" -H 'Content-Type: application/json' \\\n"
        f"  -d '{document}'"
    )
