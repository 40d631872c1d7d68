"""Builder of single-file programs from the collection's code, for machines without the collection.

`python -m scripts.standalone` (`make scripts`) builds into `build/scripts/` every program that is
missing or older than its sources; a release's wheel gets the same files from `hatch_build.py`. With
`--apply-bios PATH` it also builds, at that path, the MAAS script that changes the BIOS.

A program is a shell head, the importer of `reconciler/carrier.py`, and the sources of the
module_utils that its entry imports, directly or not. So there is no second implementation. It is
plain text, because people review a program that runs as root. It needs the standard library of
Python 3.10, which Ubuntu 22.04 has: MAAS commissions with it.

To add a program, add a Script to SCRIPTS.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import runpy
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from reconciler import carrier
from reconciler.trust import preflight

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
UTILS = ROOT / "plugins" / "module_utils"
# Loaded from its file, because the collection need not be importable where this runs.
_CLOSURE = runpy.run_path(str(UTILS / "core" / "_source_closure.py"))
PACKAGE: str = _CLOSURE["PACKAGE"]
COMMAND = "python -m scripts.standalone"
# The order of bootstrap.
BOOTSTRAP = "playbooks/bootstrap.yml"

_END = "GPUAAS_STANDALONE_END"


class NotStandalone(Exception):
    """A source that cannot go into a single file, with the reason."""


@dataclass(frozen=True)
class Script:
    """A single-file program.

    path: below `build/`. entry: `package._util:function`, called with the arguments and the
    environment; it returns the exit code. about: description in the head, a sentence or more.
    marker: the line that is printed where no suitable Python exists, with `status=FAIL`. metadata:
    comment block that a runner such as MAAS reads, or "". data: files of the repository that the
    entry reads through `__loader__.get_data(name)`, by name; YAML becomes JSON, because a host may
    lack a YAML parser. settings: defaults for the environment, in parts; a part applies only where
    none of its settings is set.
    """

    path: str
    entry: str
    about: str
    marker: str
    metadata: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    settings: Sequence[Mapping[str, str]] = ()


def hardware(profile: Mapping[str, Any]) -> str:
    """Return the machines that a MAAS script is for, by their GPUs. MAAS skips all others."""
    ids = [f"pci:{id_}" for id_ in profile["gpu"]["ids"]]
    return ids[0] if len(ids) == 1 else f"[{', '.join(ids)}]"


_PROFILES = sorted(f"profiles/{file.name}" for file in ROOT.glob("profiles/*.yml"))
# The profile of the machines that MAAS commissions. MAAS passes none of our settings to a script,
# so the script contains the profile's values: without them, seven GPUs of eight would pass.
_COMMISSIONED = yaml.safe_load((ROOT / "profiles/xe9680l-h200.yml").read_text(encoding="utf-8"))


def _metadata(kind: str, **fields: str) -> str:
    """Return the metadata of a script that MAAS runs on such a machine."""
    rows = {**fields, "script_type": kind}
    rows |= {"for_hardware": hardware(_COMMISSIONED), "timeout": "02:00:00"}
    if kind == "commissioning":
        rows["may_reboot"] = "true"
    return "\n".join(
        [
            "# --- Start MAAS 1.0 script metadata ---",
            *(f"# {name}: {value}" for name, value in rows.items()),
            "# --- End MAAS 1.0 script metadata ---",
            "",
        ]
    )


FIRMWARE = Script(
    path="scripts/maas/commissioning/50-gpuaas-slice-firmware-preflight.sh",
    entry="firmware._preflight_command:main",
    about="Is the firmware of this machine fit for GPU slices? Reads only by default;\n"
    "--help names the settings, among them the one that changes the BIOS.",
    marker="GPUAAS_SLICE_FIRMWARE_SUMMARY",
    metadata=_metadata(
        "commissioning",
        name="50-gpuaas-slice-firmware-preflight",
        title="GPU slice firmware preflight",
        description="BIOS settings, KVM, IOMMU, GPUs, fabric cards, NVMe disks;"
        " reads only by default",
        tags="gpuaas",
    ),
    settings=preflight.parts(_COMMISSIONED),
)

# Not among SCRIPTS: this script power-cycles, so it is built only on request. MAAS runs it only by
# its separate tag, and `noauto` keeps MAAS from choosing it by itself.
APPLYING = replace(
    FIRMWARE,
    path="55-gpuaas-slice-firmware-apply.sh",
    about="Changes the BIOS of this machine to what GPU slices need, and power-cycles it.\n"
    "The same program as 50-gpuaas-slice-firmware-preflight, told GPUAAS_SLICE_APPLY_BIOS=1.",
    metadata=_metadata(
        "commissioning",
        name="55-gpuaas-slice-firmware-apply",
        title="GPU slice firmware, changes the BIOS",
        description="Stages the BIOS settings of GPU slices, power-cycles, follows the job",
        tags="gpuaas-apply-bios,noauto",
    ),
    settings=({"GPUAAS_SLICE_APPLY_BIOS": "1"}, *FIRMWARE.settings),
)

RELEASE = Script(
    path="scripts/maas/release/60-gpuaas-slice-disks.sh",
    entry="topology._release_check:main",
    about="Do the disks of slots read as zeros, now that the machine leaves this service?\n"
    "Reads only; --help names the settings.",
    marker="GPUAAS_SLICE_RELEASE_SUMMARY",
    metadata=_metadata(
        "release",
        name="60-gpuaas-slice-disks",
        title="GPU slice disks, read back",
        description="Reads back both ends and 64 places of each slot's disk; reads only",
        tags="gpuaas,noauto",
    ),
    settings=tuple(
        {
            name: value
            for name, value in part.items()
            if name in ("GPUAAS_SLICE_NVME_EXCLUDE", "GPUAAS_SLICE_GPU_EXPECTED")
        }
        for part in preflight.parts(_COMMISSIONED)
    ),
)

SCRIPTS = (
    FIRMWARE,
    RELEASE,
    Script(
        path="scripts/ops/gpuaas_slice_host_deploy_bootstrap.sh",
        entry="boot._deploy_bootstrap:main",
        about="Make a slice host of this deployed machine: packages, boot configuration, libvirt,\n"
        "fabric, network. Reboots only with GPUAAS_SLICE_REBOOT_IF_REQUIRED=1; see --help.\n"
        "With `network` as its first word it repairs the network baseline alone.",
        marker="GPUAAS_SLICE_BOOTSTRAP",
        data={path: path for path in (BOOTSTRAP, *_PROFILES)},
    ),
)

_HEAD = """\
#!/bin/sh
{metadata}#
{about}
#
# Built by `{command}` from plugins/module_utils/: change that, not this.
set -eu
{settings}for python in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    exec "$python" -B -I /dev/fd/3 "$@" 3<<'{end}'
"""

_TAIL = """\
{end}
  fi
done
echo '{marker} status=FAIL detail=Python\\ 3.10\\ or\\ newer\\ is\\ missing'
exit 2
"""

_CALL = """\
import os

PACKAGE = "{package}."
install({{PACKAGE + name: text for name, text in SOURCES.items()}}, DATA)
run(PACKAGE + "{entry}", sys.argv[1:], os.environ)
"""


def build(script: Script) -> str:
    """Return the text of the program. Raises NotStandalone."""
    util, _, function = script.entry.partition(":")
    sources = closure(util)
    for name, text in sources.items():
        _refuse_foreign(name, text)
    if not any(
        isinstance(node, ast.FunctionDef) and node.name == function
        for node in ast.parse(sources[util]).body
    ):
        raise NotStandalone(f"{util} has no function {function}")
    data = {name: _carried(ROOT / path) for name, path in script.data.items()}
    about = "\n".join(f"# {row}" for row in script.about.splitlines())
    parts = [
        _HEAD.format(
            metadata=script.metadata,
            about=about,
            command=COMMAND,
            settings="".join(map(_settings, script.settings)),
            end=_END,
        ),
        Path(carrier.__file__).read_text(encoding="utf-8"),
        "\n",
        *_table("SOURCES", sources),
        *_table("DATA", data),
        _CALL.format(package=PACKAGE, entry=script.entry),
        _TAIL.format(end=_END, marker=script.marker),
    ]
    return "".join(parts)


def closure(util: str) -> dict[str, str]:
    """Return the module utils that `util` needs, including itself: source text by name."""
    texts: dict[str, str] = _CLOSURE["closure"](util, _source)
    return dict(sorted(texts.items()))


def write(folder: Path = BUILD) -> list[Path]:
    """Build every program below `folder` that is missing or out of date; return all paths."""
    newest = max(file.stat().st_mtime for file in _inputs())
    targets = [folder / script.path for script in SCRIPTS]
    for script, target in zip(SCRIPTS, targets, strict=True):
        if not target.is_file() or target.stat().st_mtime < newest:
            _put(script, target)
    return targets


def _inputs() -> Iterator[Path]:
    """Return every file that a program may contain."""
    yield from UTILS.rglob("*.py")
    yield from ROOT.glob("profiles/*.yml")
    yield ROOT / BOOTSTRAP
    yield from (Path(str(module.__file__)) for module in (carrier, preflight))
    yield Path(__file__)


def _put(script: Script, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # A partial program must never be visible, because another process may build or run it
    # meanwhile.
    part = target.with_name(f".{target.name}.{os.getpid()}")
    part.write_text(build(script), encoding="utf-8")
    part.chmod(0o755)
    part.replace(target)


@cache
def _refuse_foreign(name: str, text: str) -> None:
    """Refuse any import that is neither a module util nor standard library."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            continue
        for module in modules:
            if f"{module}.".startswith(f"{PACKAGE}."):
                continue
            if module.partition(".")[0] not in sys.stdlib_module_names:
                raise NotStandalone(f"{name} imports {module}, which is not standard library")


def _settings(settings: Mapping[str, str]) -> str:
    """Return shell code that sets all of a part or none: half of a repository is unusable."""
    values = {name: value for name, value in settings.items() if value}
    if not values:
        return ""
    given = "".join(f"${{{name}+x}}" for name in settings)
    rows = [f"  export {name}={shlex.quote(value)}" for name, value in values.items()]
    return "\n".join([f'if [ -z "{given}" ]; then', *rows, "fi", ""])


def _source(name: str) -> str:
    return (UTILS / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")


def _carried(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yml":
        return json.dumps(yaml.safe_load(text), indent=1) + "\n"
    return text


def _table(name: str, texts: Mapping[str, str]) -> Iterator[str]:
    """Write a dictionary of texts unchanged, so that reviewers can compare them."""
    yield f"{name} = {{}}\n"
    for key, text in sorted(texts.items()):
        digest = hashlib.sha256(text.encode()).hexdigest()
        yield f'\n# sha256 {digest}\n{name}["{key}"] = {_literal(key, text)}\n'
    yield "\n"


def _literal(key: str, text: str) -> str:
    if "'''" in text or not text.endswith("\n"):
        raise NotStandalone(f"{key} holds ''' or does not end with a line break")
    if any(row == _END for row in text.splitlines()):
        raise NotStandalone(f"{key} holds the line {_END}")
    return f"r'''{text}'''"


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Build the single-file programs.")
    parser.add_argument(
        "--apply-bios",
        metavar="PATH",
        type=Path,
        help=f"build only MAAS's script that changes the BIOS ({APPLYING.path})",
    )
    options = parser.parse_args(words)
    if options.apply_bios:
        _put(APPLYING, options.apply_bios)
    else:
        write()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
