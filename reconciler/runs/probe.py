"""Does a host answer as the node that it is? One SSH connection that does nothing there."""

from __future__ import annotations

import subprocess

from reconciler.runs import ssh
from reconciler.runs.spec import NodeAccess

# A host that is there answers within a second, an emulated one within a few.
_CONNECT_S = 15
_LIMIT_S = 60


def said(access: ssh.SshAccess, node: NodeAccess) -> str:
    """ "" when the host answers under its certified key and lets us in; else SSH's last words."""
    words = [*ssh.options(access, node.node_id), "-o", f"ConnectTimeout={_CONNECT_S}"]
    to = ["-p", str(node.port), "-l", node.user, "--", node.address, "true"]
    try:
        done = subprocess.run(
            ["ssh", "-T", "-n", *words, *to],
            capture_output=True,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end of the connection within {_LIMIT_S} s"
    if done.returncode == 0:
        return ""
    text = " ".join(done.stderr.decode("utf-8", "replace").split())
    return text[-500:] or f"exit status {done.returncode}"
