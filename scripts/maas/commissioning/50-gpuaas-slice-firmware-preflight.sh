#!/bin/sh
# Firmware preflight of this machine; read-only by default. Settings: --help.
# From a checkout: builds build/scripts/maas/commissioning/50-gpuaas-slice-firmware-preflight.sh and runs it. That file
# needs nothing but Python 3.10; it is the file for other machines and for MAAS.
set -eu
root=$(cd "$(dirname "$0")/../../.." && pwd)
(cd "$root" && PATH="$root/.venv/bin:$PATH" python3 -m scripts.standalone)
exec sh "$root/build/scripts/maas/commissioning/50-gpuaas-slice-firmware-preflight.sh" "$@"
