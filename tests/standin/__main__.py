"""All stand-ins of the site's services, with some content, until interrupted: `make standins`.

They change by themselves. An installation by MAAS takes a while, and the first of gpu2 fails.
Another user edits the device gpu1 just before its first change. A job of AWX waits, runs, and ends.
It prints how a service of this checkout uses them. Nothing outside of FOLDER is changed.

    python -m tests.standin FOLDER [SECONDS]         a step of a change takes so long
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from reconciler.inventory.expected import DEVICE_FIELDS
from reconciler.settings import PREFIX
from tests.standin import controller, maas, netbox, ufm
from tests.standin.service import standing

ADDRESSES = ("192.0.2.10", "192.0.2.11")
TAG = "gpuaas-profile-slice-vm"


def begin(stack: ExitStack, folder: Path, pace_s: float) -> dict[str, str]:
    """Start them; return the settings of a service that uses them."""
    managers = {}
    for name, token in (("netbox", netbox.TOKEN), ("maas", maas.TOKEN), ("ufm", ufm.TOKEN)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        managers[name] = stack.enter_context(standing(folder / name, name, token))
    managers["netbox"].begin(
        devices=[_device(f"gpu{number}", at) for number, at in enumerate(ADDRESSES, 1)],
        prefixes=[{"prefix": "192.0.2.0/24", "scope_type": "dcim.site", "scope_id": 1}],
        fields=list(DEVICE_FIELDS),
        edits={"gpu1": [{"comments": "Moved to rack 7"}]},
    )
    managers["maas"].begin(
        machines=[_machine(f"gpu{number}", number, at) for number, at in enumerate(ADDRESSES, 1)],
        takes_s=2 * pace_s,
        fails=["abc2"],
    )
    managers["ufm"].begin()
    (folder / "awx").mkdir(exist_ok=True)
    awx = stack.enter_context(controller.standing(folder / "awx"))
    awx.begin(pace_s=pace_s, hosts=["gpu1", "gpu2"])
    settings: dict[str, Any] = {"awx_url": awx.url, "awx_token_file": awx.token_file}
    settings |= {"awx_ca_file": awx.ca_file, "state_dir": folder / "state"}
    for manager in managers.values():
        settings |= manager.settings
    return {f"{PREFIX}{name}".upper(): str(value) for name, value in sorted(settings.items())}


def _device(name: str, address: str) -> dict[str, Any]:
    return {
        "name": name,
        "primary_ip4": {"address": f"{address}/24"},
        "tags": [{"name": TAG, "slug": TAG}],
        "local_context_data": {"gpuaas": {"hardware_profile": "xe9680l-h200"}},
    }


def _machine(name: str, number: int, address: str) -> dict[str, Any]:
    return {
        **{"system_id": f"abc{number}", "hostname": name, "status": 6, "owner": maas.USER},
        **{"serial": f"S{number}", "hardware_uuid": f"U-{number}", "tag_names": [TAG]},
        **{"macs": [f"52:54:00:00:00:0{number}"], "ip_addresses": [address]},
    }


def main() -> None:
    folder, pace_s = Path(sys.argv[1]).resolve(), float((*sys.argv, "5")[2])
    # Ended by a signal, it ends its processes, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        settings = begin(stack, folder, pace_s)
        file = folder / "gpuaas.env"
        file.touch(mode=0o600)
        file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        print(file.read_text())
        print(f"In another shell:  export GPUAAS_CONFIG_FILE={os.path.relpath(file)}")
        print("                   .venv/bin/gpuaas serve --login")
        print(
            "Then `gpuaas netbox diff` or `gpuaas doctor` talk to them. Ctrl-C ends them.",
            flush=True,
        )
        try:
            signal.pause()
        except KeyboardInterrupt:
            print("ended")


if __name__ == "__main__":
    main()
