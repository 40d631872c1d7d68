"""The launch request of a run: check of its job template, request body, record of its job.

The host's address comes from our records and not from AWX's inventory, which may be older: an
extra variable overrides every other. The same holds for each variable that a playbook, a role or
the connection reads, so a person who may change the inventory decides nothing of a run.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from reconciler.model.cloud_config import YAML_ERRORS
from reconciler.runs import contract, ssh
from reconciler.runs.awx.client import AwxAccess, Client, results
from reconciler.runs.paths import RunPaths, read_json, write_json
from reconciler.runs.scrub import scrub
from reconciler.runs.spec import PYTHON, NodeAccess, RunError, RunSpec
from reconciler.shipped import COLLECTION, COLLECTIONS

# Required fields of a template. Without allow_simultaneous, nodes would wait for each other. Tags,
# slices and another first task would carry out a part of the playbook, or several copies.
REQUIRED: dict[str, Any] = {
    "job_type": "run",
    "ask_variables_on_launch": True,
    "ask_limit_on_launch": True,
    "ask_timeout_on_launch": True,
    "allow_simultaneous": True,
    "survey_enabled": False,
    "job_tags": "",
    "skip_tags": "",
    "start_at_task": "",
    "job_slice_count": 1,
}
# Texts of AWX for a template without variables of its own.
_NO_VARIABLES = ("", "---", "{}")
# What Ansible takes for a template; the header may declare marks of its own.
_TEMPLATE_MARKS = ("{{", "{%", "{#", "#jinja2:")
# Variables of the connection, with Ansible's own values. A job would get them from AWX's inventory,
# which could so name programs of the execution environment and of the host, or another machine.
# Ansible also expands each of them as a template, and a template can run any program beside the
# job's SSH key. Of an option with several names the last that is set wins, so each has its value
# here. Passwords of sudo are left to the credential, and refused in the inventory (_SECRETS).
_PINNED: dict[str, Any] = {
    **dict.fromkeys(
        (
            *("ansible_ssh_common_args", "ansible_ssh_extra_args", "ansible_scp_extra_args"),
            *("ansible_sftp_extra_args", "ansible_ssh_pkcs11_provider", "ansible_sshpass_prompt"),
            *("ansible_password", "ansible_ssh_pass", "ansible_ssh_password"),
            *("ansible_private_key", "ansible_ssh_private_key", "ansible_private_key_file"),
            *("ansible_ssh_private_key_file", "ansible_private_key_passphrase"),
            *("ansible_ssh_private_key_passphrase", "ansible_control_path", "ansible_sudo_chdir"),
            "ansible_common_remote_group",
        ),
        "",
    ),
    "ansible_connection": "ssh",
    "ansible_ssh_executable": PYTHON,
    "ansible_sftp_executable": "sftp",
    "ansible_scp_executable": "scp",
    "ansible_ssh_transfer_method": "piped",
    "ansible_sftp_batch_mode": True,
    "ansible_ssh_password_mechanism": "ssh_askpass",
    "ansible_ssh_use_tty": True,
    "ansible_ssh_verbosity": 0,
    "ansible_control_path_dir": "~/.ansible/cp",
    "ansible_host_key_checking": True,
    "ansible_ssh_host_key_checking": True,
    "ansible_pipelining": True,
    "ansible_ssh_pipelining": True,
    # See runs/ssh.py: a retry would send the module again while the first copy still works.
    "ansible_ssh_retries": 0,
    "ansible_timeout": 90,
    "ansible_ssh_timeout": 90,
    "ansible_python_interpreter": PYTHON,
    "ansible_module_compression": "ZIP_DEFLATED",
    "ansible_shell_type": "sh",
    "ansible_shell_executable": "/bin/sh",
    "ansible_remote_tmp": "~/.ansible/tmp",
    "ansible_async_dir": "~/.ansible_async",
    "ansible_system_tmpdirs": ["/var/tmp", "/tmp"],  # noqa: S108
    "ansible_admin_users": ["root", "toor"],
    "ansible_shell_allow_world_readable_temp": False,
    "ansible_become_method": "sudo",
    **dict.fromkeys(("ansible_become_user", "ansible_sudo_user"), "root"),
    **dict.fromkeys(("ansible_become_exe", "ansible_sudo_exe"), "sudo"),
    **dict.fromkeys(("ansible_become_flags", "ansible_sudo_flags"), "-H -S -n"),
    # The log of a host names each run.
    "ansible_no_target_syslog": False,
    "ansible_python_module_rlimit_nofile": 0,
    # Null counts as unset. Debuggers of Ansible's own run in each module; the others are of other
    # kinds of connections, but are expanded for each task.
    **dict.fromkeys(
        (
            *("_ansible_ansiballz_debugpy_config", "_ansible_ansiballz_pydevd_config"),
            *("_ansible_ansiballz_coverage_config", "ansible_network_os"),
            *("ansible_connection_user", "ansible_docker_extra_args"),
        ),
    ),
}
# A launch cannot set these: that of the Machine credential would be lost.
_SECRETS = frozenset({"ansible_become_pass", "ansible_become_password", "ansible_sudo_pass"})
# What playbooks take for variables that a run leaves out. A job would get them from AWX's
# inventory, if that has any, for example that a disk is not to be wiped, or another program.
_ABSENT: dict[str, Any] = {
    "slice_allow_reboot": False,
    "slice_api_names": {},
    "slice_api_topology": {},
    "slice_approved_plan": "",
    "slice_bios_acknowledged_jobs": [],
    "slice_expected": {},
    "slice_expected_plan": "",
    "slice_maas_tags": None,
    "slice_parity_strict": False,
    "slice_plan_only": False,
    "slice_racadm": {},
    "slice_racadm_program": "",
    "slice_remediate": False,
    "slice_restore_fstab": False,
    "slice_workers": {},
    "slice_written_off": [],
}
# Parameters of roles that no playbook sets. By hand, an inventory may.
_OF_ROLES = {
    "bios_settings": ("bios_settings_attributes", "bios_settings_down_after"),
    "libvirt_host": ("libvirt_host_directory",),
    "slice_packages": ("slice_packages_required",),
}
# A job runs in AWX's checkout of the project, which is this repository. Without this program an
# endless answer would fill the memory of the job's container, or forge events of the job.
_BOUNDED_SSH = "reconciler/runs/bounded_ssh.py"
# As a limit these do not name a single host.
_GROUPS = frozenset({"all", "ungrouped"})


@dataclass
class JobRecord:
    """The job of a run, stored in the run's folder so that it survives a crash.

    after: the newest job in AWX before our request; our job has a higher id. posted: a request
    was sent whose result may be unknown. job: its id, 0 while unknown. timed_out: the job was
    canceled because of its deadline. problem: why this process canceled the job; empty if it did
    not.
    """

    template: int
    name: str
    after: int
    requested_at: float
    posted: bool = False
    job: int = 0
    timed_out: bool = False
    problem: str = ""

    def save(self, paths: RunPaths) -> None:
        write_json(paths.root / "awx.json", asdict(self))

    @classmethod
    def load(cls, paths: RunPaths) -> JobRecord | None:
        document = read_json(paths.root / "awx.json")
        return cls(**document) if document else None


def prepare(access: AwxAccess, spec: RunSpec, paths: RunPaths) -> dict[str, Any]:
    """Check the template, write request and record; returns the entry of the run's manifest.

    RunError: nothing was started. LauncherAway: nothing was started, and a later try may succeed.
    """
    request = body(spec)
    with Client(access) as client, readable(client):
        template = find_template(list_templates(client, access), access, spec.playbook)
        check_project(client.get, access, template)
        _check_jinja(client, request["extra_vars"])
        _check_host(client, template["inventory"], spec.node.node_id)
        newest = results(client.get("/jobs/", order_by="-id", page_size=1))
        after, number = int(newest[0]["id"]) if newest else 0, int(template["id"])
    paths.env.mkdir(mode=0o700, exist_ok=True)
    write_json(paths.env / "request.json", request)
    JobRecord(number, template["name"], after, time.time()).save(paths)
    return access.document()


@contextmanager
def readable(client: Client) -> Iterator[None]:
    """No reliable answer, if the objects of an answer have another form than those of AWX."""
    try:
        yield
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as broken:
        text = f"objects in another form: {type(broken).__name__} {broken}"
        raise client.silent("requests about templates and jobs", scrub(text)) from broken


def list_templates(client: Client, access: AwxAccess) -> list[dict[str, Any]]:
    """The job templates of the run contract that the token's user may see."""
    query = {"name__startswith": access.templates} if access.templates else {}
    names = {f"{access.templates}{playbook}" for playbook in contract.PLAYBOOKS}
    return [item for item in client.every("/job_templates/", **query) if item.get("name") in names]


def find_template(
    listed: Sequence[dict[str, Any]], access: AwxAccess, playbook: str
) -> dict[str, Any]:
    """The playbook's job template; RunError when it is missing or its fields are wrong.

    AWX silently drops fields that a template does not ask for at launch. A dropped limit would
    mean every host, so only a template with the required fields is launched.
    """
    name = f"{access.templates}{playbook}"
    templates = [template for template in listed if template["name"] == name]
    if len(templates) != 1:
        raise _refuse(
            "awx_template_missing" if not templates else "awx_template_ambiguous",
            f"one job template {name} that the token's user may see",
            f"{len(templates)} of that name",
        )
    template = templates[0]
    wrong = "; ".join(
        [*_wrong_fields(template, playbook), *_wrong_objects(template, listed, access)]
    )
    if wrong:
        raise _refuse("awx_template_wrong", f"{name} as in awx/job_templates.yml", wrong)
    capabilities = template.get("summary_fields", {}).get("user_capabilities", {})
    if capabilities.get("start") is False:
        raise _refuse("awx_forbidden", f"the right to launch {name}", "none for the token's user")
    return template


def check_project(
    read: Callable[[str], dict[str, Any]], access: AwxAccess, template: dict[str, Any]
) -> None:
    """RunError when the template's project has another repository than in our settings, because it
    may be changed behind the same number and name. read: asks AWX for the object at a path.
    """
    expected = {"scm_url": access.project_url, "scm_branch": access.project_branch}
    expected = {name: value for name, value in expected.items() if value}
    if not expected:
        return
    # It can fetch any other reference, such as a proposal, under the name of the branch.
    expected["scm_refspec"] = ""
    project = read(f"/projects/{template['project']}/")
    actual = {name: project.get(name) for name in expected}
    if actual != expected:
        text = f"project {project.get('name')} with {_listed(expected)}"
        raise _refuse("awx_project_differs", text, _listed(actual))


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in values.items())


def jinja_setting(client: Client) -> str:
    """Where AWX expands templates in variables, "" when the token's user may not read that;
    RunError when it does so everywhere, because variables hold text of hosts and tenants.
    """
    try:
        setting = client.get("/settings/jobs/").get("ALLOW_JINJA_IN_EXTRA_VARS")
    except RunError as refusal:
        if refusal.code != "awx_forbidden":
            raise
        return ""
    if setting not in ("template", "never"):
        expected = "the setting ALLOW_JINJA_IN_EXTRA_VARS to be template or never"
        raise _refuse("awx_jinja_allowed", expected, repr(setting))
    return str(setting)


def body(spec: RunSpec) -> dict[str, Any]:
    """The body of the launch request. AWX itself marks these variables as no templates."""
    return {
        "limit": spec.node.node_id,
        "timeout": spec.deadline_s,
        # The playbooks' own host pattern, so that a dropped limit does not mean every host.
        "extra_vars": {
            **_ABSENT,
            **_role_defaults(),
            **spec.variables,
            "slice_hosts": spec.node.node_id,
            # Runs on this machine set it in their environment, which a job does not inherit.
            "ansible_target_log_info": spec.log_tag,
            **_connection(spec.node),
        },
    }


def run_id(job: dict[str, Any]) -> str:
    """The run that a job of AWX belongs to; "" for a job that is not ours."""
    run = _variables(job.get("extra_vars")).get("slice_run")
    identity = run.get("id") if isinstance(run, dict) else None
    return identity if isinstance(identity, str) else ""


def _variables(text: object) -> dict[str, Any]:
    """Variables of an object of AWX, which stores no text but mappings as JSON or YAML."""
    try:
        variables = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        variables = _yaml(str(text))
    return variables if isinstance(variables, dict) else {}


def _yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except YAML_ERRORS:
        return None


def _connection(node: NodeAccess) -> dict[str, Any]:
    # The execution environment holds the CA of host keys, the credential of AWX our client key.
    # Revoked host keys are in neither, so the launch passes them.
    words = ssh.arguments(
        {**ssh.trust(node.node_id), "UserKnownHostsFile": "/dev/null", **ssh.refusing(node.revoked)}
    )
    sharing = ssh.sharing("/tmp/gpuaas-ssh-%C")  # noqa: S108
    return {
        **_PINNED,
        **dict.fromkeys(("ansible_user", "ansible_ssh_user"), node.user),
        **dict.fromkeys(("ansible_host", "ansible_ssh_host"), node.address),
        **dict.fromkeys(("ansible_port", "ansible_ssh_port"), node.port),
        "ansible_become": node.user != "root",
        "ansible_ssh_args": ssh.bounded([*words, *sharing], program=_BOUNDED_SSH),
    }


@functools.cache
def _role_defaults() -> dict[str, Any]:
    values: dict[str, Any] = {}
    for role, names in _OF_ROLES.items():
        path = COLLECTIONS / COLLECTION / "roles" / role / "defaults" / "main.yml"
        defaults = yaml.safe_load(path.read_text())
        values |= {name: defaults[name] for name in names}
    return values


def _wrong_fields(template: dict[str, Any], playbook: str) -> Iterator[str]:
    for field, value in {**REQUIRED, "playbook": f"playbooks/{playbook}.yml"}.items():
        if template.get(field) != value:
            yield f"{field} is {template.get(field)!r} and not {value!r}"
    if str(template.get("extra_vars") or "").strip() not in _NO_VARIABLES:
        yield "it has variables of its own, which a run gets too"
    if template.get("scm_branch"):
        yield f"it has a branch of its own, {template['scm_branch']!r}"
    if not isinstance(template.get("inventory"), int):
        yield "it has no inventory"


def _wrong_objects(
    template: dict[str, Any], listed: Sequence[dict[str, Any]], access: AwxAccess
) -> Iterator[str]:
    """Compare with the settings, else with the other templates, which share these objects. Where
    these disagree, nobody knows which are right: a majority proves nothing.
    """
    for what, name in (
        ("project", access.project),
        ("execution_environment", access.execution_environment),
        ("credentials", access.credential),
    ):
        mine = _object(template, what)
        rivals = [row for row in listed if not name or _name(row, what) == name]
        if not mine:
            yield f"it has no {what}"
        elif name and _name(template, what) != name:
            yield f"{what} is {mine} and not {name}, as in our settings"
        elif len(sides := {_object(row, what): row["name"] for row in reversed(rivals)}) > 1:
            texts = (f"{side or 'none'} in {where}" for side, where in sorted(sides.items()))
            yield f"{what} is {', and '.join(texts)}"
    image = template.get("summary_fields", {}).get("execution_environment", {}).get("image")
    if access.image and image != access.image:
        yield f"image is {image} and not {access.image}, as in our settings"
    kinds = [item.get("kind") for item in _credentials(template)]
    if kinds != ["ssh"]:
        yield f"its credentials are of the kinds {kinds}, and not one Machine credential"


def _object(template: dict[str, Any], what: str) -> str:
    if what == "credentials":
        return ", ".join(
            sorted(f"{item.get('name')} ({item.get('id')})" for item in _credentials(template))
        )
    number = template.get(what)
    name = template.get("summary_fields", {}).get(what, {}).get("name")
    return f"{name} ({number})" if isinstance(number, int) else ""


def _name(template: dict[str, Any], what: str) -> str:
    if what == "credentials":
        return ", ".join(str(item.get("name")) for item in _credentials(template))
    return str(template.get("summary_fields", {}).get(what, {}).get("name", ""))


def _credentials(template: dict[str, Any]) -> list[dict[str, Any]]:
    return list(template.get("summary_fields", {}).get("credentials") or [])


def _check_jinja(client: Client, variables: dict[str, Any]) -> None:
    """Without the right to read the setting, no text that could be a template is launched."""
    text = json.dumps(variables)
    if jinja_setting(client) or not any(mark in text for mark in _TEMPLATE_MARKS):
        return
    raise RunError(
        "awx_jinja_unknown",
        expected="variables without templates, or the right to read ALLOW_JINJA_IN_EXTRA_VARS",
        found=f"one of {' '.join(_TEMPLATE_MARKS)} in the variables, and HTTP 403 for the setting",
        remedy="find the text in the records of the node or allocation, or make the token's user a"
        " system auditor in AWX; nothing was started",
    )


def _check_host(client: Client, inventory: int, node_id: str) -> None:
    hosts = list(client.every(f"/inventories/{inventory}/hosts/", name=node_id))
    if [host.get("enabled") for host in hosts] != [True]:
        state = "a disabled host" if hosts else "none"
        raise _refuse("awx_host_missing", f"a host {node_id} in the template's inventory", state)
    groups = list(client.every(f"/inventories/{inventory}/groups/", name=node_id))
    if groups or node_id in _GROUPS:
        raise _refuse("awx_host_ambiguous", f"{node_id} to mean one host", "a group of that name")
    (host,) = hosts
    _check_secrets(client, inventory, host)


def _check_secrets(client: Client, inventory: int, host: dict[str, Any]) -> None:
    """RunError when the inventory has a password of sudo for the host. A template in its place
    would be expanded beside the job's SSH key.
    """
    places = [host, *client.every(f"/hosts/{host['id']}/all_groups/")]
    for place in (*places, client.get(f"/inventories/{inventory}/")):
        if names := _SECRETS & _variables(place.get("variables")).keys():
            raise _refuse(
                "awx_inventory_password",
                "the password of sudo in the Machine credential alone",
                f"{', '.join(sorted(names))} in the variables of {place.get('name')}",
            )


def _refuse(code: str, expected: str, found: str) -> RunError:
    remedy = "set AWX up as docs/awx.md says; nothing was started"
    return RunError(code, expected=expected, found=found, remedy=remedy)
