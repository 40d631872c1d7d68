#!/bin/sh
# Ready a slice host for its machines, without packages or a reboot: GPU services quiet, libvirt's
# directory open to QEMU, network repaired and free of stale reservations; all words: --help.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
PATH="$root/.venv/bin:$PATH" exec gpuaas host prepare "$@"
