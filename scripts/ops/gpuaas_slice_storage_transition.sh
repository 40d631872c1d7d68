#!/bin/sh
# Takeover of host-storage disks for slices. --devices A,B shows the plan with the disks' identities;
# --apply needs these identities (/dev/disk/by-id/nvme-eui.*) and an approval; all options: --help.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
PATH="$root/.venv/bin:$PATH" exec gpuaas host transition "$@"
