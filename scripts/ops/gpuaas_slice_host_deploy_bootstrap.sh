#!/bin/sh
# Make a slice host of this deployed machine: packages, boot configuration, libvirt, fabric, network. Settings: --help.
# From a checkout: builds build/scripts/ops/gpuaas_slice_host_deploy_bootstrap.sh and runs it. That file
# needs nothing but Python 3.10, and is what goes to other machines.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
(cd "$root" && PATH="$root/.venv/bin:$PATH" python3 -m scripts.standalone)
exec sh "$root/build/scripts/ops/gpuaas_slice_host_deploy_bootstrap.sh" "$@"
