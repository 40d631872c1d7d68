"""NVMe disks with hostile names on a running host: a local NVMe target, reached over loopback.

The kernel treats them like any other NVMe disk, and the test chooses serial and model.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from lab.demo.stage import Stage

_PORT = "4420"
_TARGET = "/sys/kernel/config/nvmet"
_FOLDER = "/var/tmp/gpuaas-strangers"
_HOST = "5e000000-0000-4000-8000-00000000f00d"


@dataclass(frozen=True)
class Stranger:
    """A disk with hostile names, in printable ASCII as NVMe requires.

    serial: at most 20 characters; model: at most 40."""

    number: int
    serial: str
    model: str

    @property
    def nguid(self) -> str:
        return f"5e0000000000f00d{self.number:016x}"

    @property
    def by_id(self) -> str:
        return f"/dev/disk/by-id/nvme-eui.{self.nguid}"

    @property
    def subsystem(self) -> str:
        return f"nqn.2024-01.lab.gpuaas:stranger{self.number}"


@contextlib.contextmanager
def present(stage: Stage, strangers: tuple[Stranger, ...]) -> Iterator[None]:
    """Attach these disks, 16 MiB each, to the host; afterwards remove them and their target."""
    coming = [_COMING, *(_one(stranger) for stranger in strangers)]
    going = [*(_gone(stranger) for stranger in strangers), _GOING]
    try:
        stage.on_host("sh", "-s", stdin="\n".join(coming))
        yield
    finally:
        stage.on_host("sh", "-s", stdin="\n".join(going))


_COMING = f"""set -e
modprobe nvmet-tcp
modprobe nvme-tcp
mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config
mkdir -p {_FOLDER} {_TARGET}/ports/{_PORT}
cd {_TARGET}/ports/{_PORT}
echo tcp > addr_trtype
echo ipv4 > addr_adrfam
echo 127.0.0.1 > addr_traddr
echo {_PORT} > addr_trsvcid"""

_GOING = f"""rmdir {_TARGET}/ports/{_PORT}
rm -rf {_FOLDER}
modprobe -r nvmet-tcp nvme-tcp 2> /dev/null
udevadm settle
true"""


def _one(stranger: Stranger) -> str:
    name, file = stranger.subsystem, f"{_FOLDER}/{stranger.number}"
    # Without a UUID the kernel, and so udev, identifies the disk by its NGUID, as it does a real
    # disk.
    return f"""truncate -s 16M {file}
mkdir {_TARGET}/subsystems/{name}
cd {_TARGET}/subsystems/{name}
echo 1 > attr_allow_any_host
printf %s {shlex.quote(stranger.serial)} > attr_serial
printf %s {shlex.quote(stranger.model)} > attr_model
mkdir namespaces/1
echo {file} > namespaces/1/device_path
echo 00000000-0000-0000-0000-000000000000 > namespaces/1/device_uuid
echo {stranger.nguid} > namespaces/1/device_nguid
echo 1 > namespaces/1/enable
ln -s {_TARGET}/subsystems/{name} {_TARGET}/ports/{_PORT}/subsystems/{name}
nvme connect -t tcp -a 127.0.0.1 -s {_PORT} -n {name} -k 120 \
  -q nqn.2014-08.org.nvmexpress:uuid:{_HOST} -I {_HOST}
for _ in $(seq 120); do [ -b {stranger.by_id} ] && break; sleep 0.5; done
[ -b {stranger.by_id} ] || {{ ls -l /dev/disk/by-id >&2; dmesg | tail >&2; exit 1; }}"""


def _gone(stranger: Stranger) -> str:
    name = stranger.subsystem
    return f"""nvme disconnect -n {name}
rm -f {_TARGET}/ports/{_PORT}/subsystems/{name}
if cd {_TARGET}/subsystems/{name}; then
  echo 0 > namespaces/1/enable
  rmdir namespaces/1
  cd /
  rmdir {_TARGET}/subsystems/{name}
fi"""
