#!/bin/sh
# Runtime preparation of a slice host, without packages or a reboot: GPU services stopped, libvirt's
# directory open to QEMU, network repaired and free of stale reservations; all options: --help.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
PATH="$root/.venv/bin:$PATH" exec gpuaas host prepare "$@"
