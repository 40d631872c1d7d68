"""What AWX is asked to launch: the run's variables, one host, one deadline.

Where the host answers comes from our records and not from AWX's inventory, which may be older: an
extra variable goes before every other. The same for how far SSH is trusted.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

import yaml

from reconciler.runs import ssh
from reconciler.runs.spec import NodeAccess, RunSpec


def document(spec: RunSpec) -> dict[str, Any]:
    """The body of the launch. AWX itself marks these variables as no templates."""
    return {
        "limit": spec.node.node_id,
        "timeout": spec.deadline_s,
        # The playbooks' own pattern, so that a limit that got lost does not mean every host.
        "extra_vars": {
            **spec.variables,
            "slice_hosts": spec.node.node_id,
            # As runs of this machine say it by their environment, which a job has no part in.
            "ansible_target_log_info": spec.log_tag,
            **_connection(spec.node),
        },
    }


def run_id(job: dict[str, Any]) -> str:
    """Which run a job of AWX belongs to; "" for none of ours."""
    text = job.get("extra_vars")
    try:
        variables = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        variables = _yaml(str(text))
    run = variables.get("slice_run") if isinstance(variables, dict) else None
    found = run.get("id") if isinstance(run, dict) else None
    return found if isinstance(found, str) else ""


def _yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        return None


def _connection(node: NodeAccess) -> dict[str, Any]:
    # The execution environment holds the CA of our hosts' keys; the credential of AWX, our key.
    # Which keys of this host the CA vouches for in vain, it cannot know.
    words = ssh.words(
        {
            **ssh.trust(node.node_id),
            "UserKnownHostsFile": "/dev/null",
            **ssh.refusing(node.revoked),
        }
    )
    sharing = ["-o", "ControlMaster=auto", "-o", "ControlPersist=60s"]
    return {
        "ansible_host": node.address,
        "ansible_port": node.port,
        "ansible_user": node.user,
        "ansible_python_interpreter": node.python,
        "ansible_host_key_checking": True,
        "ansible_ssh_args": shlex.join([*words, *sharing]),
        # See runs/ssh.py: a retry would send the module once more while the first is at work.
        "ansible_ssh_retries": 0,
        "ansible_ssh_timeout": 90,
        "ansible_pipelining": True,
    }
