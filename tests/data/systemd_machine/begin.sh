#!/bin/sh
# A control group of our own, and in it process 1 of a machine that only this test sees.
# $1 name of the group, $2 empty folder for what the machine changes, the rest as boot.sh has it.
set -eu
group=$1
shift
for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/systemd /sys/fs/cgroup/unified; do
  [ -e "$hierarchy/cgroup.procs" ] || continue
  mkdir -p "$hierarchy/$group"
  echo $$ > "$hierarchy/$group/cgroup.procs"
done
exec unshare --mount --pid --fork --kill-child --cgroup --uts --ipc --net "$(dirname "$0")/boot.sh" "$@"
