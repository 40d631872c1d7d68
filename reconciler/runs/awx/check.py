"""Is there a job template that does what this run is, and the host that it is for? Before anything.

AWX leaves out in silence what a template does not ask for at launch. A limit left out would mean
every host, so nothing is launched from a template that is not as it must be.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from reconciler.runs.awx.access import AwxAccess
from reconciler.runs.awx.client import Client
from reconciler.runs.errors import RunError
from reconciler.runs.spec import RunSpec

# What a template must be. Without allow_simultaneous all nodes would wait for one another; tags and
# slices would carry out a part of the playbook, or several times.
REQUIRED: dict[str, Any] = {
    "job_type": "run",
    "ask_variables_on_launch": True,
    "ask_limit_on_launch": True,
    "ask_timeout_on_launch": True,
    "allow_simultaneous": True,
    "survey_enabled": False,
    "job_tags": "",
    "skip_tags": "",
    "job_slice_count": 1,
}
# As a limit these are no host.
_GROUPS = frozenset({"all", "ungrouped"})


def template(client: Client, access: AwxAccess, spec: RunSpec) -> dict[str, Any]:
    """The job template of the run's playbook; RunError where it would not do exactly that."""
    found = standing(client, access, spec.playbook)
    _host(client, found["inventory"], spec.node.node_id)
    return found


def standing(client: Client, access: AwxAccess, playbook: str) -> dict[str, Any]:
    """The playbook's job template, whatever host it is for; RunError where it is not as it must."""
    name = f"{access.templates}{playbook}"
    found = list(client.every("/job_templates/", name=name))
    if len(found) != 1:
        raise _refuse(
            "awx_template_missing" if not found else "awx_template_ambiguous",
            f"one job template {name} that the token's user may see",
            f"{len(found)} of that name",
        )
    wrong = _wrong(found[0], playbook)
    if wrong:
        raise _refuse("awx_template_wrong", f"{name} as in awx/job_templates.yml", wrong)
    may = found[0].get("summary_fields", {}).get("user_capabilities", {})
    if may.get("start") is False:
        raise _refuse("awx_forbidden", f"the right to launch {name}", "none for the token's user")
    document: dict[str, Any] = found[0]
    return document


def _wrong(document: dict[str, Any], playbook: str) -> str:
    differ = [
        f"{field} is {document.get(field)!r} and not {value!r}"
        for field, value in REQUIRED.items()
        if document.get(field) != value
    ]
    if PurePosixPath(str(document.get("playbook"))).name != f"{playbook}.yml":
        differ.append(f"playbook is {document.get('playbook')!r}")
    if not isinstance(document.get("inventory"), int):
        differ.append("it has no inventory")
    return "; ".join(differ)


def _host(client: Client, inventory: int, node_id: str) -> None:
    hosts = list(client.every(f"/inventories/{inventory}/hosts/", name=node_id))
    if [host.get("enabled") for host in hosts] != [True]:
        found = "a disabled one" if hosts else "none"
        raise _refuse("awx_host_missing", f"a host {node_id} in the template's inventory", found)
    groups = list(client.every(f"/inventories/{inventory}/groups/", name=node_id))
    if groups or node_id in _GROUPS:
        raise _refuse("awx_host_ambiguous", f"{node_id} to mean one host", "a group of that name")


def _refuse(code: str, expected: str, found: str) -> RunError:
    remedy = "set AWX up as docs/awx.md says; nothing was started"
    return RunError(code, expected=expected, found=found, remedy=remedy)
