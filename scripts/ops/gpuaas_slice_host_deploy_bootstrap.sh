#!/bin/sh
# Bootstrap of this deployed machine as a slice host: packages, boot configuration, libvirt, fabric, network. Settings: --help.
# From a checkout: builds build/scripts/ops/gpuaas_slice_host_deploy_bootstrap.sh and runs it. That file
# needs nothing but Python 3.10; it is the file for other machines.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
(cd "$root" && PATH="$root/.venv/bin:$PATH" python3 -m scripts.standalone)
exec sh "$root/build/scripts/ops/gpuaas_slice_host_deploy_bootstrap.sh" "$@"
