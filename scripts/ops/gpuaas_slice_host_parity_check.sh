#!/bin/sh
# Parity check of a slice host, a line per condition: over SSH with --host, otherwise of this machine.
# --host --user --api-base --api-token-file --node-id --intent --maas-tag --remediate; all options: --help.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
PATH="$root/.venv/bin:$PATH" exec gpuaas host parity "$@"
