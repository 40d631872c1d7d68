#!/bin/sh
# Benchmark of a machine, bare metal or VM, with the same harness: over SSH with --host, otherwise this machine.
# --host --user --ssh-key --label --output --fio-target --rdma-peer --rdma-device; all options: --help.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
PATH="$root/.venv/bin:$PATH" exec gpuaas host benchmark capture "$@"
