"""Plan of the bootstrap by the real playbook, on a copy of this machine, and its confirmation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from tests.deployed_machine import NEEDS_ROOT, ROOT, play
from tests.unit.playbooks.played import result

pytestmark = [pytest.mark.covers("CTRL-15", "HOST-4"), NEEDS_ROOT]

STORY = """
everything() { find /etc /usr/local /boot -type f ! -path '/etc/*-' -exec md5sum {} + | sort; }
play() {
  ansible-playbook -i localhost, -c local "playbooks/$@" \
    -e "slice_profile_file=$profile" -e ansible_python_interpreter=/usr/bin/python3 2>&1
}
profile=$1
everything > /run/machine-before
play convert_to_slice.yml -e slice_plan_only=true \
  -e '{"slice_slots": [{"slot_id": "slot-1"}]}' > /run/machine-plan
cat /run/machine-plan
digest=$(grep -o 'sha256:[0-9a-f]*' /run/machine-plan | head -n 1)
everything | diff /run/machine-before -
echo "softdep other pre: vfio" > /etc/modprobe.d/gpuaas-vfio.conf
everything > /run/machine-before
echo ---; play bootstrap.yml -e "slice_expected_plan=$digest"
everything | diff /run/machine-before -
rm /etc/modprobe.d/gpuaas-vfio.conf
echo ---; play bootstrap.yml -e "slice_expected_plan=$digest"
"""


def test_a_confirmed_plan_is_carried_out_on_the_host_that_it_was_made_for(tmp_path: Path) -> None:
    lab = yaml.safe_load((ROOT / "profiles" / "lab.yml").read_text())
    lab["fabric"]["pf_ids"] = []
    profile = tmp_path / "lab.yml"
    profile.write_text(yaml.safe_dump(lab))
    environment = {
        "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}",
        "ANSIBLE_COLLECTIONS_PATH": f"{ROOT}/build/collections",
        "ANSIBLE_PIPELINING": "1",
        "ANSIBLE_SHOW_CUSTOM_STATS": "1",
        "LC_ALL": "C.UTF-8",
    }
    done = play(STORY, tmp_path / "scratch", str(profile), environment=environment, limit_s=300)
    assert done.stderr == ""
    planned, other, confirmed = done.stdout.split("---\n")

    plan = result(planned)
    assert plan["ok"] and planned.rstrip().endswith("}")
    steps = {row["part"]: row["steps"] for row in plan["evidence"]["plan"]}
    assert list(steps)[:3] == ["module_cache", "packages", "tuning"]
    assert "write_file(/etc/modprobe.d/gpuaas-vfio.conf)" in steps["kernel"]
    assert "write_file(/etc/gpuaas/slice-mode.json)" in steps["slice_mode"]
    kernel = plan["evidence"]["kernel"]
    assert kernel["running"] == Path("/proc/cmdline").read_text().split()
    assert set(lab["kernel_arguments"]) & set(kernel["arguments"])
    assert kernel["reboot_reasons"]

    refused = result(other)
    assert (refused["ok"], refused["error"]["code"]) == (False, "plan_changed")
    assert other.rstrip().endswith("}")

    # The restart that it would need is not allowed here.
    applied = result(confirmed)
    assert applied["error"]["code"] == "reboot_required"
    assert applied["evidence"]["plan_digest"] == plan["evidence"]["plan_digest"]
