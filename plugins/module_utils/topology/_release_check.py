"""Release verifier for MAAS: whether the disks of slots read as zeros. It only reads.

MAAS runs it in its own environment when a machine is released, and shows the result. It reads the
same places as a wipe proof (`_proof.samples`) on every NVMe disk except those of the operating
system, whose models are known or in the settings.

Exit codes: 0 every disk reads as zeros, 1 a disk does not or cannot be read, 2 wrong settings.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.core._report_line import report_line
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _content, _disk, _proof
from ansible_collections.gpuaas.slice.plugins.module_utils.topology import _nvme_disks

MARKER = "GPUAAS_SLICE_RELEASE"
CLEAN, LEFT, WRONG_CALL = 0, 1, 2
_MODELS, _COUNT = "GPUAAS_SLICE_NVME_EXCLUDE", "GPUAAS_SLICE_GPU_EXPECTED"

SETTINGS = f"""\
settings, from the environment. Those of the file's own hardware profile count where none is set:
  {_MODELS}   models of disks that are never a slot's, by commas
  {_COUNT}   disks that there must be at least, one for each GPU (any number)
"""

Row = dict[str, str]


def main(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run for `words` (without the program's name); the exit code."""
    parser = argparse.ArgumentParser(
        prog="gpuaas-slice-release",
        description="Do the disks of slots read as zeros? Reads only.",
        epilog=SETTINGS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", default="/", help="file tree of the machine (%(default)s)")
    _host.ROOT = Path(parser.parse_args(words).root)
    least = environment.get(_COUNT) or "0"
    if not re.fullmatch(r"[0-9]{1,3}", least):
        sys.stderr.write(f"{_COUNT}: expected a number, got {least!r}\n")
        return WRONG_CALL
    models = [name.strip() for name in environment.get(_MODELS, "").split(",") if name.strip()]
    try:
        rows = list(check(models))
    except (OSError, Refusal) as unknown:
        rows = [{"status": "FAIL", "detail": f"disks unknown: {unknown}"}]
    judged = [row for row in rows if row["status"] != "SKIP"]
    if len(judged) < max(1, int(least)):
        # A disk that does not answer may hold a tenant's bytes.
        expected = f"at least {max(1, int(least))} disks of slots"
        rows.append({"status": "FAIL", "expected": expected, "found": str(len(judged))})
    failures = sum(row["status"] == "FAIL" for row in rows)
    for row in rows:
        sys.stdout.write(report_line(MARKER, **row) + "\n")
    counts = {"disks": str(len(judged)), "failures": str(failures)}
    status = "FAIL" if failures else "PASS"
    sys.stdout.write(report_line(f"{MARKER}_SUMMARY", status=status, **counts) + "\n")
    return LEFT if failures else CLEAN


def check(exclude: Sequence[str]) -> Iterator[Row]:
    """The verdict on each NVMe namespace of the machine."""
    for entry in _nvme_disks.disks(exclude):
        blockers = {blocker["code"]: blocker["detail"] for blocker in entry["blockers"]}
        name = str(entry["identity"] or entry["kernel_name"])
        row = {"disk": name, "serial": str(entry["serial"]), "model": str(entry["model"])}
        if "excluded_model" in blockers:
            yield {"status": "SKIP", **row, "detail": "no disk of a slot"}
        elif not entry["identity"]:
            yield {"status": "FAIL", **row, "detail": "; ".join(blockers.values())}
        else:
            yield {**_verdict(str(entry["kernel_name"]), name), **row}


def _verdict(kernel_name: str, identity: str) -> Row:
    try:
        disk = _disk.resolve(f"/dev/{kernel_name}")
        _disk.require(disk, identifier=identity)
        with _content.opened(disk) as descriptor:
            places = _proof.samples(disk.size_bytes, (), os.urandom(16))
            left = _proof.residue(descriptor, places)
    except (OSError, Refusal) as broken:
        return {"status": "FAIL", "detail": f"not readable: {broken}"}
    if left:
        return {"status": "FAIL", "detail": f"bytes at {', '.join(map(str, left[:4]))}"}
    read = sum(length for _offset, length in places)
    return {"status": "PASS", "detail": f"{read} bytes read, all zero"}
