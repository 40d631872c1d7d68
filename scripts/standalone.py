"""Single-file programs for machines that have nothing of ours, from the collection's own code.

`python -m scripts.standalone` writes every file of SCRIPTS; with `--check` it only says which are
not what the code gives, and a test compares byte for byte. With `--apply-bios PATH` it writes one
more of them, there: MAAS's script as it changes the BIOS. So there is no second implementation:
a script is a shell head, the sources of the module_utils that its entry function needs (found by
their imports), and an importer for them. It is plain text, because somebody reviews what runs as
root. Standard library only, here and there, and of Python 3.10, which Ubuntu 22.04 has: MAAS
commissions with it.

To add a script, add a Script: where it lies, the entry `_util:function` (called with the arguments
and the environment, returns the exit code), what its head says, files that it carries, and settings
that it has by itself.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import runpy
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from reconciler.trust import preflight

ROOT = Path(__file__).resolve().parent.parent
UTILS = ROOT / "plugins" / "module_utils"
# Read from its file: the collection need not be importable where this runs.
_CLOSURE = runpy.run_path(str(UTILS / "core" / "_source_closure.py"))
PACKAGE: str = _CLOSURE["PACKAGE"]
COMMAND = "python -m scripts.standalone"

_END = "GPUAAS_STANDALONE_END"


class NotStandalone(Exception):
    """A source that cannot go into a single file, and why."""


@dataclass(frozen=True)
class Script:
    """One generated file.

    path: below the repository's root. entry: `_util:function`. about: what the head says, one
    sentence or more. marker: the line that is printed where no fitting Python is found, with
    `status=FAIL`. metadata: comment block that a runner such as MAAS reads, or "". data: files of
    the repository that the entry reads through `__loader__.get_data(name)`, by name; YAML becomes
    JSON, since a host need not have a parser for it. settings: of the environment, in parts,
    each for where nobody sets any of that part.
    """

    path: str
    entry: str
    about: str
    marker: str
    metadata: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    settings: Sequence[Mapping[str, str]] = ()


def hardware(profile: Mapping[str, Any]) -> str:
    """The machines that a MAAS script is for, by their GPUs: MAAS runs it on no other."""
    found = [f"pci:{one}" for one in profile["gpu"]["ids"]]
    return found[0] if len(found) == 1 else f"[{', '.join(found)}]"


_PROFILES = {file.stem: f"profiles/{file.name}" for file in sorted(ROOT.glob("profiles/*.yml"))}
# The profile of the machines that MAAS commissions. MAAS passes a script none of our settings, so
# what the profile says is in the script: without it seven GPUs of eight are as good as eight.
_COMMISSIONED = yaml.safe_load((ROOT / "profiles/xe9680l-h200.yml").read_text(encoding="utf-8"))


def _commissioning(**told: str) -> str:
    """Metadata of a script that MAAS runs while it commissions one of those machines."""
    rows = {
        **told,
        "script_type": "commissioning",
        "for_hardware": hardware(_COMMISSIONED),
        "timeout": "02:00:00",
        "may_reboot": "true",
    }
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
    metadata=_commissioning(
        name="50-gpuaas-slice-firmware-preflight",
        title="GPU slice firmware preflight",
        description="BIOS settings, KVM, IOMMU, GPUs, fabric cards, NVMe disks;"
        " reads only by default",
        tags="gpuaas",
    ),
    settings=preflight.parts(_COMMISSIONED),
)

# Not among SCRIPTS: it power-cycles, so there is none before somebody asks for one. MAAS runs it by
# a tag of its own only, and `noauto` keeps MAAS from choosing it by itself.
APPLYING = replace(
    FIRMWARE,
    path="55-gpuaas-slice-firmware-apply.sh",
    about="Changes the BIOS of this machine to what GPU slices need, and power-cycles it.\n"
    "The same program as 50-gpuaas-slice-firmware-preflight, told GPUAAS_SLICE_APPLY_BIOS=1.",
    metadata=_commissioning(
        name="55-gpuaas-slice-firmware-apply",
        title="GPU slice firmware, changes the BIOS",
        description="Stages the BIOS settings of GPU slices, power-cycles, follows the job",
        tags="gpuaas-apply-bios,noauto",
    ),
    settings=({"GPUAAS_SLICE_APPLY_BIOS": "1"}, *FIRMWARE.settings),
)

SCRIPTS = (
    FIRMWARE,
    Script(
        path="scripts/ops/gpuaas_slice_host_deploy_bootstrap.sh",
        entry="boot._deploy_bootstrap:main",
        about="Make a slice host of this deployed machine: packages, boot configuration, libvirt,\n"
        "fabric, network. Reboots only with GPUAAS_SLICE_REBOOT_IF_REQUIRED=1; see --help.",
        marker="GPUAAS_SLICE_BOOTSTRAP",
        data=_PROFILES,
    ),
    Script(
        path="scripts/ops/gpuaas_slice_host_net_baseline.sh",
        entry="boot._deploy_bootstrap:network",
        about="Repair the network baseline of this slice host: bridge, NAT, forwarding, dnsmasq,\n"
        "and the service that does the same at every boot.",
        marker="GPUAAS_SLICE_BOOTSTRAP",
        data=_PROFILES,
    ),
)

_HEAD = """\
#!/bin/sh
{metadata}#
{about}
#
# Generated by `{command}` from plugins/module_utils/: change that, not this.
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

_IMPORTER = '''\
import importlib.abc
import importlib.machinery
import linecache
import os
import sys
import traceback

PACKAGE = "{package}"


class Sources(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports what this file carries; everything else comes from the standard library."""

    def find_spec(self, name, path=None, target=None):
        names = (f"{{PACKAGE}}.{{source}}" for source in SOURCES)
        inside = any(source.startswith(f"{{name}}.") for source in names)
        if not inside and name.removeprefix(PACKAGE + ".") not in SOURCES:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=name, is_package=inside)

    def get_source(self, name):
        return SOURCES.get(name.removeprefix(PACKAGE + "."), "")

    def exec_module(self, module):
        name = module.__name__
        text = self.get_source(name)
        # A traceback then shows the line and not only its number.
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        exec(compile(text, name, "exec"), module.__dict__)

    def get_data(self, name):
        return DATA[name].encode()


sys.meta_path.insert(0, Sources())
# The interpreter's own hook looks for lines in files only.
sys.excepthook = traceback.print_exception

from {package}.{util} import {function}

sys.exit({function}(sys.argv[1:], os.environ))
'''


def build(script: Script) -> str:
    """The text of the file. Raises NotStandalone."""
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
        *_table("SOURCES", sources),
        *_table("DATA", data),
        _IMPORTER.format(package=PACKAGE, util=util, function=function),
        _TAIL.format(end=_END, marker=script.marker),
    ]
    return "".join(parts)


def closure(util: str) -> dict[str, str]:
    """The module utils that `util` needs, itself included: source text by name."""
    texts: dict[str, str] = _CLOSURE["closure"](util, _source)
    return dict(sorted(texts.items()))


def stale(root: Path = ROOT) -> list[str]:
    """The scripts below `root` that are not what the code gives."""
    return [one.path for one in SCRIPTS if _present(root / one.path) != build(one)]


def write() -> None:
    for script in SCRIPTS:
        _put(script, ROOT / script.path)


def _put(script: Script, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(build(script), encoding="utf-8")
    target.chmod(0o755)


def _refuse_foreign(name: str, text: str) -> None:
    """Everything but module utils must be standard library."""
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
    """Shell that sets one part, all or none: half of two repositories is no repository."""
    said = {name: value for name, value in settings.items() if value}
    if not said:
        return ""
    given = "".join(f"${{{name}+x}}" for name in settings)
    rows = [f"  export {name}={shlex.quote(value)}" for name, value in said.items()]
    return "\n".join([f'if [ -z "{given}" ]; then', *rows, "fi", ""])


def _source(name: str) -> str:
    return (UTILS / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")


def _carried(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yml":
        return json.dumps(yaml.safe_load(text), indent=1) + "\n"
    return text


def _table(name: str, texts: Mapping[str, str]) -> Iterator[str]:
    """A dictionary of texts, as they are: reviewed here as well as where they come from."""
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


def _present(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Write the single-file programs.")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--check", action="store_true", help="write nothing, name what is stale")
    one.add_argument(
        "--apply-bios",
        metavar="PATH",
        type=Path,
        help=f"write only MAAS's script that changes the BIOS ({APPLYING.path})",
    )
    options = parser.parse_args(words)
    if options.apply_bios:
        _put(APPLYING, options.apply_bios)
        return 0
    if not options.check:
        write()
        return 0
    left = stale()
    sys.stdout.write("".join(f"stale: {path}\n" for path in left))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
