#!/bin/sh
# Read back the disks of slots on this machine; reads only. Settings: --help.
# From a checkout: builds build/scripts/maas/release/60-gpuaas-slice-disks.sh and runs it. That file
# needs nothing but Python 3.10; it is the file for MAAS.
set -eu
root=$(cd "$(dirname "$0")/../../.." && pwd)
(cd "$root" && PATH="$root/.venv/bin:$PATH" python3 -m scripts.standalone)
exec sh "$root/build/scripts/maas/release/60-gpuaas-slice-disks.sh" "$@"
