#!/bin/sh
# Measure one machine, bare metal or VM, with the same harness: over SSH with --host, otherwise this one.
# --host --user --ssh-key --label --output --fio-target --rdma-peer --rdma-device; all words: --help.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
PATH="$root/.venv/bin:$PATH" exec gpuaas host benchmark capture "$@"
