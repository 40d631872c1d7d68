#!/bin/sh
# Soak test of jobs with faults, on a database and workers of its own: a CSV line per second, and a picture.
# --seconds --rate --workers --database --faults --output; all options: --help.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
exec .venv/bin/python -m tests.bench.soak "$@"
