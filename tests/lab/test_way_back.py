"""Way back of a slice host to an ordinary machine, by one call and without remains (HOST-15)."""

from __future__ import annotations

import pytest

from lab.demo.stage import Stage
from reconciler.model.errors import Problem
from tests.lab import traces
from tests.lab.conftest import Chapter

pytestmark = pytest.mark.covers("HOST-15")


def test_nothing_of_slice_mode_remains(stage: Stage, story: Chapter) -> None:
    """The playbook's comparison passes, and commands on the host confirm it."""
    story.needs("prepared")
    body = {"to": "baremetal", "allow_reboot": True, "reason": "sold whole"}
    result = stage.task(stage.path("/conversion"), body)
    assert result["rebooted"]
    assert result["remnants"] == 0
    assert result["compared"]
    assert all(row["ok"] for row in result["compared"]), result["compared"]
    assert stage.api().get(stage.path())["mode"] == "baremetal"
    assert "intel_iommu" not in stage.on_host("cat", "/proc/cmdline")
    left = stage.on_host(
        "sh",
        "-c",
        "'ip -o link; iptables -t nat -S; ls /sys/bus/pci/drivers/vfio-pci;"
        " systemctl list-unit-files --no-legend; ls /etc/dnsmasq.d /etc/gpuaas' 2>&1",
    )
    for trace in ("ovsbr0", "10.100.0", "0000:23:", "gpuaas-slice", "slice-mode"):
        assert trace not in left, f"{trace} in {left}"
    slots = stage.api().get(stage.path("/resource-slots"))["items"]
    assert {slot["status"] for slot in slots} == {"disabled"}
    story.done["way_back"] = result


def test_the_machine_is_as_it_was_deployed(stage: Stage, story: Chapter) -> None:
    """Compare every file, unit and device, independently of the way back's own records."""
    story.needs("deployed", "way_back")
    left = traces.differences(story.done["deployed"], traces.look(stage))
    assert not left, "\n".join(left)
    # The files that may differ must not contain any word of the project either.
    menu = stage.on_host("cat", "/boot/grub/grub.cfg")
    for word in ("intel_iommu", "iommu=pt", "vfio"):
        assert word not in menu, word


def test_a_second_way_back_changes_nothing(stage: Stage, story: Chapter) -> None:
    """A second request is refused with its own code, because the machine is bare metal already."""
    story.needs("prepared")
    with pytest.raises(Problem) as refused:
        stage.api().post(stage.path("/conversion"), {"to": "baremetal"})
    assert refused.value.code == "transition_refused"
    story.done["baremetal"] = True
