#!/bin/sh
# Every target condition of a slice host, a line each: over SSH with --host, otherwise of this machine.
# --host --user --api-base --api-token-file --node-id --intent --maas-tag --remediate; all words: --help.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
PATH="$root/.venv/bin:$PATH" exec gpuaas host parity "$@"
