"""Firmware preflight program for MAAS commissioning: a line per finding on stdout.

It only reads, unless GPUAAS_SLICE_APPLY_BIOS=1. With it, the program stages the differences,
creates the BIOS job with its power cycle, and follows the job. The power cycle ends the program.
When it runs again after the restart, it finds the job in the controller's queue and follows it to
its end.

Exit codes: 0 no check failed, 1 a check failed or a change was refused, 2 wrong settings.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.boot import (
    _apt,
    _apt_source,
    _host_packages,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _host,
    _pci,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware import (
    _bios,
    _firmware_preflight,
    _racadm_bios,
)

DONE, FAILED, WRONG_CALL = 0, 1, 2

SETTINGS = """\
settings, from the environment. MAAS gives none: what this file has by itself from its hardware
profile counts where a setting is not there at all; one that is there, if only empty, sets it aside:
  GPUAAS_SLICE_APPLY_BIOS          1 changes the BIOS and power-cycles, unless a virtual machine
                                   runs or anything is leased here; 0 (default) only reads
  GPUAAS_SLICE_BIOS_ATTRIBUTES     wanted settings instead of the three default ones,
                                   GROUP.NAME=VALUE separated by commas
  GPUAAS_SLICE_BIOS_DEADLINE       seconds for job and power cycle (3600)
  GPUAAS_SLICE_BIOS_INTERVAL       seconds between two looks at the job (15)
  GPUAAS_SLICE_BIOS_ACKNOWLEDGED   ids of failed jobs that stand in the way no more, by commas
  GPUAAS_SLICE_RACADM              name or path of RACADM (racadm)
  GPUAAS_SLICE_RACADM_TIMEOUT      seconds for one answer of RACADM (120)
  GPUAAS_SLICE_GPU_IDS             vendor:device of GPUs, by commas (10de:2335)
  GPUAAS_SLICE_GPU_EXPECTED        how many there must be (any number)
  GPUAAS_SLICE_FABRIC_IDS          vendor:device of fabric cards, by commas (15b3:a2dc)
  GPUAAS_SLICE_FABRIC_LINK         infiniband or ethernet: what of them is the fabric; needed with
                                   FABRIC_IDS, and either sets both aside (infiniband)
  GPUAAS_SLICE_NVME_EXCLUDE        models of disks that are never a slot's, by commas
  GPUAAS_SLICE_NOT_APPLICABLE      checks that do not apply to this machine, by commas
to install RACADM where it is missing; the first four or none. Setting any of these, if only to
nothing, sets aside all that this file has by itself from its hardware profile:
  GPUAAS_SLICE_RACADM_REPOSITORY   the signed repository
  GPUAAS_SLICE_RACADM_SUITE        its suite
  GPUAAS_SLICE_RACADM_KEY_URL      where its key is
  GPUAAS_SLICE_RACADM_FINGERPRINT  the key's whole fingerprint, known from elsewhere
  GPUAAS_SLICE_RACADM_COMPONENTS   the suite's components, by commas (main)
  GPUAAS_SLICE_RACADM_PACKAGES     packages, by commas (srvadmin-idracadm8)
"""

_INSTALL = {
    "uri": "GPUAAS_SLICE_RACADM_REPOSITORY",
    "suite": "GPUAAS_SLICE_RACADM_SUITE",
    "key_url": "GPUAAS_SLICE_RACADM_KEY_URL",
    "fingerprint": "GPUAAS_SLICE_RACADM_FINGERPRINT",
}
# Repeated here, so that the machine's own apt settings cannot weaken it.
_SIGNED_ONLY = (
    "APT::Get::AllowUnauthenticated=false",
    "Acquire::AllowInsecureRepositories=false",
    "Acquire::AllowDowngradeToInsecureRepositories=false",
    "APT::Update::Error-Mode=any",
)
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9.+-]+")


class WrongSetting(ValueError):
    """An unknown value of a setting, for which the program assumes no other."""


def main(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run for `words` (without the program's name); the exit code."""
    options = _options(words)
    try:
        settings = _Settings(environment)
    except WrongSetting as wrong:
        sys.stderr.write(f"{wrong}\n")
        return WRONG_CALL
    _host.ROOT = Path(options.root)
    code = DONE
    if settings.reads_bios:
        code = _install(settings)
        if settings.applies and code == DONE:
            code = _apply(settings)
    report = _firmware_preflight.report(settings.request)
    for row in report["lines"]:
        _say(row)
    return FAILED if report["failures"] else code


class _Settings:
    """The environment, read strictly. Raises WrongSetting."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.applies = self._switch("GPUAAS_SLICE_APPLY_BIOS")
        self.bios: dict[str, Any] = {
            "attributes": self._attributes(),
            "state": "present" if self.applies else "planned",
            "power_cycle": self.applies,
            "wait": True,
            "deadline": self._number("GPUAAS_SLICE_BIOS_DEADLINE", 3600),
            "interval": self._number("GPUAAS_SLICE_BIOS_INTERVAL", 15),
            "timeout": self._number("GPUAAS_SLICE_RACADM_TIMEOUT", 120),
            "acknowledged_jobs": self._list("GPUAAS_SLICE_BIOS_ACKNOWLEDGED", ()),
            "program": environment.get("GPUAAS_SLICE_RACADM") or "racadm",
        }
        self.packages = self._list("GPUAAS_SLICE_RACADM_PACKAGES", ("srvadmin-idracadm8",))
        if not all(map(_PACKAGE.fullmatch, self.packages)):
            raise WrongSetting(f"GPUAAS_SLICE_RACADM_PACKAGES: expected names, got {self.packages}")
        self.install = self._repository()
        not_applicable = self._list("GPUAAS_SLICE_NOT_APPLICABLE", ())
        self.reads_bios = "bios_settings" not in not_applicable
        if self.applies and not self.reads_bios:
            raise WrongSetting("GPUAAS_SLICE_APPLY_BIOS=1, but bios_settings is not applicable")
        self.request = _firmware_preflight.Request(
            bios=self.bios,
            gpu_ids=self._list("GPUAAS_SLICE_GPU_IDS", _firmware_preflight.GPU_IDS),
            fabric_ids=self._list("GPUAAS_SLICE_FABRIC_IDS", _firmware_preflight.FABRIC_IDS),
            fabric_link=self._link(),
            expected_gpus=int(self._number("GPUAAS_SLICE_GPU_EXPECTED", 0)),
            exclude_models=self._list("GPUAAS_SLICE_NVME_EXCLUDE", ()),
            not_applicable=not_applicable,
        )

    def _switch(self, name: str) -> bool:
        value = self._environment.get(name, "")
        if value not in ("", "0", "1"):
            raise WrongSetting(f"{name}: expected 1 or 0, got {value!r}")
        return value == "1"

    def _link(self) -> str:
        # Vendors use the same id for both link types. A machine with its own ids must also name the
        # link.
        ids = self._environment.get("GPUAAS_SLICE_FABRIC_IDS")
        value = self._environment.get("GPUAAS_SLICE_FABRIC_LINK")
        value = value or ("" if ids else _firmware_preflight.FABRIC_LINK)
        if value not in _pci.LINKS:
            name = "GPUAAS_SLICE_FABRIC_LINK"
            raise WrongSetting(f"{name}: expected {' or '.join(_pci.LINKS)}, got {value!r}")
        return value

    def _number(self, name: str, default: float) -> float:
        value = self._environment.get(name) or str(default)
        if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,3})?", value):
            raise WrongSetting(f"{name}: expected a number, got {value!r}")
        return float(value)

    def _list(self, name: str, default: Sequence[str]) -> list[str]:
        value = self._environment.get(name)
        return [word.strip() for word in value.split(",")] if value else list(default)

    def _attributes(self) -> dict[str, str]:
        pairs = self._list("GPUAAS_SLICE_BIOS_ATTRIBUTES", ())
        if not pairs:
            return dict(_bios.REQUIRED)
        return {name: value for name, _sep, value in (pair.partition("=") for pair in pairs)}

    def _repository(self) -> dict[str, Any]:
        given = {key: self._environment.get(name, "") for key, name in _INSTALL.items()}
        if any(given.values()) and not all(given.values()):
            lacking = ", ".join(_INSTALL[key] for key, value in given.items() if not value)
            raise WrongSetting(f"RACADM is installed with all of its settings or none: {lacking}")
        if not any(given.values()):
            return {}
        components = self._list("GPUAAS_SLICE_RACADM_COMPONENTS", ("main",))
        machine = {"components": components, "architectures": ["amd64"]}
        return {"name": "dell-openmanage", **given, **machine}


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpuaas-slice-firmware-preflight",
        description="Is the firmware of this machine fit for GPU slices? Reads only by default.",
        epilog=SETTINGS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--root", default="/", help="look at the file tree of a recorded machine (%(default)s)"
    )
    return parser.parse_args(words)


def _install(settings: _Settings) -> int:
    """Install RACADM from its signed repository, if it is missing and the repository is known."""
    program = _racadm_bios.program(settings.bios["program"])
    if not settings.install or _there(program):
        return DONE
    subject = _change.Subject(
        _apt_source.observe, _apt_source.plan, _apt_source.apply, _apt_source.facts
    )
    # Enrolment sets a strict umask. With it, apt's own user could read neither the source nor the
    # lists.
    before = os.umask(0o022)
    try:
        outcome = _change.drive(subject, settings.install, check_mode=False)
        if outcome.failure is not None:
            raise outcome.failure
        _apt.run("update", settings=_SIGNED_ONLY)
        _host_packages.install(settings.packages, settings=_SIGNED_ONLY)
    except Refusal as refusal:
        return _refused("RACADM_INSTALL", refusal)
    finally:
        os.umask(before)
    _say(_firmware_preflight.line("RACADM_INSTALL", status="PASS", packages=settings.packages))
    return DONE


def _there(program: str) -> bool:
    try:
        _command.run([program, "help"], ok=range(256))
    except Refusal as refusal:
        return refusal.code != "command_missing"
    return True


def _apply(settings: _Settings) -> int:
    def report(job: _bios.Job) -> None:
        _say(_firmware_preflight.job_line(job.document()))

    def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
        _say(_firmware_preflight.line("BIOS_STEP", step=step.name, subject=step.subject))
        return _racadm_bios.apply(params, step, report)

    subject = _change.Subject(_racadm_bios.observe, _racadm_bios.plan, apply, _racadm_bios.facts)
    try:
        outcome = _change.drive(subject, settings.bios, check_mode=False)
    except Refusal as refusal:
        return _refused("BIOS_APPLY", refusal)
    if outcome.failure is not None:
        return _refused("BIOS_APPLY", outcome.failure)
    _say(_firmware_preflight.line("BIOS_APPLY", status="PASS", changed=outcome.changed))
    return DONE


def _refused(name: str, refusal: Refusal) -> int:
    _say(_firmware_preflight.line(name, status="FAIL", **refusal.document()))
    return FAILED


def _say(row: str) -> None:
    # Flushed immediately, because the requested power cycle may end the program at any moment.
    sys.stdout.write(f"{row}\n")
    sys.stdout.flush()
