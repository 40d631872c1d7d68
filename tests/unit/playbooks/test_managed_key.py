"""The real playbook of the managed key, played by Ansible on a copy of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract import test_variables
from tests.deployed_machine import NEEDS_ROOT
from tests.unit.playbooks.played import play_states, result

pytestmark = [pytest.mark.covers("APP-4"), NEEDS_ROOT]

MANAGED = test_variables.OWN["managed_key"]["slice_managed_key"]
KEY, ENDS = MANAGED["public_key"], MANAGED["expires_at"]

STORY = """
key() {
  ansible-playbook -i localhost, -c local playbooks/managed_key.yml -e "@$1" \
    -e ansible_python_interpreter=/usr/bin/python3 2>&1
}
mount -t tmpfs none /home
rm -f /etc/gpuaas/slice-mode.json
echo 'alice:x:59000:59000::/home/alice:/bin/bash' >> /etc/passwd
mkdir -p /home/alice/.ssh /var/lib/gpuaas/ledger
echo 'ssh-rsa AAAA alice' > /home/alice/.ssh/authorized_keys
chmod 700 /home/alice/.ssh
chown -R 59000:59000 /home/alice
cat > /var/lib/gpuaas/ledger/machine.json <<'end'
{"slot_id": "machine", "fence": 3, "allocation_id": "0f8fad5b-d9cb-469f-a165-70867728950e"}
end
keys=/home/alice/.ssh/authorized_keys
key "$1"
echo ---; cat $keys; stat -c '%u %g %a' $keys
echo ---; key "$1"
echo ---; mv $keys /home/alice/mine; ln -s /etc/shadow $keys; md5sum < /etc/shadow
key "$1"
echo ---; md5sum < /etc/shadow; rm $keys; mv /home/alice/mine $keys
key "$2"
echo ---; cat $keys
"""


def variables(state: str) -> dict[str, Any]:
    """As the reconciler gives them."""
    given = test_variables.variables("managed_key")
    given["slice_managed_key"]["state"] = state
    return given


def test_the_key_comes_stays_and_goes(tmp_path: Path) -> None:
    first, there, again, trap, gone, left = play_states(STORY, tmp_path, variables)
    assert result(first)["evidence"] == {"managed_key": {"present": True, "expires_at": ENDS}}
    mine, managed, owner = there.splitlines()
    assert (mine, owner) == ("ssh-rsa AAAA alice", "59000 59000 644")
    assert managed.startswith("restrict,expiry-time=") and KEY in managed
    assert managed.endswith(f" gpuaas-managed:{MANAGED['instance_id']}")
    assert result(again)["ok"] and "changed=0" in again
    refused = result(trap)
    assert (refused["ok"], refused["error"]["code"]) == (False, "home_unsafe")
    assert trap.split()[0] == gone.split()[0], "what the link leads to is as it was"
    assert result(gone)["evidence"] == {"managed_key": {"present": False, "expires_at": 0}}
    assert left == "ssh-rsa AAAA alice\n"
