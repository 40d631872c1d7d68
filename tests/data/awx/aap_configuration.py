"""Input of infra.aap_configuration: python tests/data/awx/aap_configuration.py GIT-FOLDER COMMIT

GIT-FOLDER: a clone of redhat-cop/infra.aap_configuration. Prints aap-configuration-3.0.0.json: for
each variable the role that reads it, whether the role `dispatch` plays that role, and the fields of
its objects that the role's tasks name. A role passes no other field on, and says nothing about it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

import yaml

ROLES = (
    *("credential_types", "credentials", "execution_environments", "instance_groups"),
    "notification_templates",
    *("projects", "inventories", "inventory_sources", "job_templates", "workflow_job_templates"),
    *("schedules", "teams", "roles"),
)
FOLDER, COMMIT = sys.argv[1:]


def git(*words: str) -> str:
    command = ["git", "--git-dir", FOLDER, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def show(path: str) -> str:
    return git("show", f"{COMMIT}:{path}")


def tasks(role: str) -> str:
    paths = git("ls-tree", "--name-only", COMMIT, f"roles/{role}/tasks/").split()
    return "\n".join(show(path) for path in paths)


def fields(text: str, loop_var: str) -> list[str]:
    return sorted(set(re.findall(rf"\b{loop_var}(?:\.0)?\.([a-z]\w*)", text)))


def main() -> None:
    defaults = yaml.safe_load(show("roles/dispatch/defaults/main.yml"))
    lists = [rows for rows in defaults.values() if isinstance(rows, list)]
    dispatched = {row["var"] for rows in lists for row in rows}
    variables = {}
    for role in (f"controller_{name}" for name in ROLES):
        text = tasks(role)
        # The first task of a role loops over its variable.
        first = yaml.safe_load(show(f"roles/{role}/tasks/main.yml"))[0]
        variable = re.findall(r"\b(?:controller|aap)_\w+", first["loop"])[-1]
        names = fields(text, first["loop_control"]["loop_var"])
        row = {"role": role, "dispatched": variable in dispatched, "fields": names}
        if role == "controller_workflow_job_templates":
            row["nodes"] = fields(text, "__workflow_loop_node_item")
        variables[variable] = row
    version = yaml.safe_load(show("galaxy.yml"))["version"]
    source = f"redhat-cop/infra.aap_configuration, commit {COMMIT} (GPL-3.0-or-later); names only"
    print(f'{{\n "source": "{source}",\n "version": "{version}",\n "variables": {{')
    rows = (f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in variables.items())
    print(",\n".join(rows) + "\n }\n}")


if __name__ == "__main__":
    main()
