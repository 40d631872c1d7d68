"""Bootstrap of a deployed machine without Ansible, for cloud-init or an operator's shell.

The order is read from the playbook bootstrap, which the program carries. Each part is one line on
standard output. A failed step ends it, because later steps build on earlier steps. A reboot comes
last, and only if it is needed and allowed; the boot services then restore runtime settings. Nothing
is done on a machine that a tenant has as a whole, and a machine in use is not rebooted.

Exit codes: 0 done, 1 a step failed, 2 wrong settings, 3 done as far as possible without a reboot.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.boot import (
    _gpu_services,
    _host_idle,
    _host_packages,
    _host_tuning,
    _kernel_arguments,
    _libvirt_host,
    _module_cache,
    _slice_mode,
    _telemetry_service,
    _tuning_opt_in,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.core._report_line import report_line
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import _ipoib_address, _sriov_vfs
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _api_names,
    _baseline_files,
    _ovs_nat,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import _tenancy

DONE, FAILED, WRONG_CALL, REBOOT_NEEDED = 0, 1, 2, 3
DEFAULT_PROFILE = "xe9680l-h200"
NETWORK = "network"
PLAYBOOK = "playbooks/bootstrap.yml"

SETTINGS = """\
`network` as the first word repairs the network baseline alone; see `network --help`.
settings, from the environment:
  GPUAAS_SLICE_PROFILE             hardware profile (xe9680l-h200)
  GPUAAS_SLICE_REBOOT_IF_REQUIRED  1 reboots when needed and no tenant would be disconnected;
                                   0 (default) only reports the need
  GPUAAS_SLICE_FABRIC_INTERFACE    values of this machine that the profile does not have:
  GPUAAS_SLICE_FABRIC_ADDRESS      interface, address with prefix length and
  GPUAAS_SLICE_FABRIC_ROUTE        subnet of the InfiniBand fabric
  GPUAAS_SLICE_TUNING              tuned profiles beside those of the hardware profile, with commas:
                                   hugepages-1g, network-buffers. Kept on the host, in
                                   /etc/gpuaas/tuning.json. It replaces the earlier setting. Unset
                                   changes nothing, and none takes all back
  GPUAAS_SLICE_API_NAMES           name=address,... of the control plane where DNS does not know it
exit codes: 0 done, 1 a step failed, 2 wrong settings, 3 a reboot is needed and not allowed
"""

NETWORK_SETTINGS = f"""\
settings, from the environment:
  GPUAAS_SLICE_PROFILE             hardware profile ({DEFAULT_PROFILE}), for its network
The other settings of gpuaas_slice_host_deploy_bootstrap.sh are refused here, since nothing here
would come of them.
exit codes: 0 done, 1 a step failed, 2 wrong settings
"""

_FABRIC_SETTINGS = {
    "interface": "GPUAAS_SLICE_FABRIC_INTERFACE",
    "site_address": "GPUAAS_SLICE_FABRIC_ADDRESS",
    "route": "GPUAAS_SLICE_FABRIC_ROUTE",
}
_REBOOT = "GPUAAS_SLICE_REBOOT_IF_REQUIRED"
# Settings that the network-only bootstrap does not use.
_WHOLE_ONLY = (
    _REBOOT,
    *_FABRIC_SETTINGS.values(),
    _tuning_opt_in.SETTING,
    "GPUAAS_SLICE_API_NAMES",
)
# Characters of a part's steps that a plan shows; its digest covers all of them.
_SHOWN = 4096
_NETWORK = _change.Subject(_ovs_nat.observe, _ovs_nat.plan, _ovs_nat.apply, _ovs_nat.facts)


@dataclass(frozen=True)
class Part:
    """A step: its name, a subject and the subject's parameters."""

    name: str
    subject: _change.Subject
    params: Mapping[str, Any]


def main(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """The whole bootstrap, or with NETWORK as the first word the network baseline alone.

    Profiles are the JSON that the single-file program carries.
    """
    if words[:1] == [NETWORK]:
        return network(words[1:], environment)
    return _run(words, environment, "Make a slice host of this deployed machine.")


def network(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """The network baseline alone: repaired now, and by its service at every boot."""
    return _run(words, environment, "Repair the network baseline of this slice host.", NETWORK)


def _run(words: Sequence[str], environment: Mapping[str, str], about: str, only: str = "") -> int:
    # The program runs from a file descriptor, whose name would not help the reader.
    parser = argparse.ArgumentParser(
        prog=" ".join(["sh <this file>", *([only] if only else [])]),
        description=about,
        epilog=NETWORK_SETTINGS if only else SETTINGS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="say what would be done")
    check = parser.parse_args(words).check
    try:
        if only:
            _refuse_unused(environment)
        profile = _profile(environment, only)
        may_reboot = _switch(environment, _REBOOT)
    except Refusal as refusal:
        _say("settings", "FAIL", str(refusal))
        return WRONG_CALL
    if os.geteuid() != 0 and not check:
        _say("settings", "FAIL", "must be run as root")
        return WRONG_CALL
    failed = not _free()
    if failed and not check:
        return FAILED
    for part in parts(profile):
        if only not in ("", part.name):
            continue
        failed = not _done(part, check=check) or failed
        # A forecast names all problems, not only the first.
        if failed and not check:
            break
    if failed:
        return FAILED
    return DONE if check or only else _reboot(profile, may_reboot=may_reboot)


def parts(profile: Mapping[str, Any]) -> Iterator[Part]:
    """The parts of a slice host of this profile, in the order of the playbook bootstrap."""
    for name in _order(json.loads(_carried(PLAYBOOK))):
        yield from _PARTS[name](profile)


def forecast(profile: Mapping[str, Any]) -> dict[str, Any]:
    """Steps of each part on this host as it is, with a digest over their contents.

    A part that cannot be planned yet, for example before its packages are installed, has the code
    of the reason instead, and the digest covers its parameters. boot: the kernel's arguments, and
    why a restart will be needed.
    """
    chosen = _tuning_opt_in.names(profile.get("tuning", []), profile.get("opted_in"))
    resolved = {**profile, "tuning": chosen}
    boot: dict[str, Any] = {"identity": _host.identity()}
    rows, covered = [], []
    for part in itertools.chain.from_iterable(make(resolved) for make in _PARTS.values()):
        steps, code = [], ""
        try:
            outcome = _change.drive(part.subject, part.params, check_mode=True)
            steps = [step.document() for step in outcome.plan.steps]
            code = outcome.failure.code if outcome.failure else ""
            boot |= outcome.facts if part.name == "kernel" else {}
        except Refusal as refusal:
            code = refusal.code
        except (OSError, ValueError, LookupError) as problem:
            code = type(problem).__name__
        names = ", ".join(f"{step['name']}({step['subject']})" for step in steps)
        rows.append({"part": part.name, "steps": names[:_SHOWN], "open": code})
        covered.append([part.name, part.params, steps, code])
    text = json.dumps([covered, boot.get("reboot_reasons")], sort_keys=True, default=str)
    digest = f"sha256:{hashlib.sha256(text.encode(errors='replace')).hexdigest()}"
    return {"plan": rows, "digest": digest, "boot": boot}


def _order(plays: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The roles that the playbook includes and the modules that it runs, in order."""
    for task in itertools.chain(*(outer.get("block", []) for outer in plays[0]["tasks"])):
        if "ansible.builtin.include_role" in task:
            yield str(task["ansible.builtin.include_role"]["name"])
        else:
            yield from (key for key in task if key.startswith("gpuaas.slice."))


def _packages(profile: Mapping[str, Any]) -> Iterator[Part]:
    packages = [*_host_packages.REQUIRED, *profile.get("packages", [])]
    optional = profile.get("optional_packages", [])
    yield Part("packages", _host_packages.SUBJECT, {"packages": packages, "optional": optional})


def _module_code(_profile: Mapping[str, Any]) -> Iterator[Part]:
    yield Part("module_cache", _module_cache.SUBJECT, {})


def _names(profile: Mapping[str, Any]) -> Iterator[Part]:
    if profile.get("api_names"):
        yield Part("api_names", _api_names.SUBJECT, {"names": profile["api_names"]})


def _tuning(profile: Mapping[str, Any]) -> Iterator[Part]:
    yield Part("tuning", _host_tuning.SUBJECT, _tuned(profile))


def _boot(profile: Mapping[str, Any]) -> Iterator[Part]:
    services = {"services": profile["gpu_services"]}
    yield Part("gpu_services", _gpu_services.SUBJECT, services)
    yield Part("kernel", _kernel_arguments.SUBJECT, _kernel(profile))


def _libvirt(_profile: Mapping[str, Any]) -> Iterator[Part]:
    yield Part("libvirt", _libvirt_host.SUBJECT, {"directory": "/var/lib/libvirt"})


def _fabric(profile: Mapping[str, Any]) -> Iterator[Part]:
    fabric = profile["fabric"]
    if fabric["pf_ids"]:
        cards = {"pfs": [], "pf_ids": fabric["pf_ids"], "macs": {}, "link": fabric.get("link")}
        cards |= {"count": fabric["vfs_per_pf"], "idle_vlan": fabric.get("vlans", [0])[0]}
        yield Part("fabric", _sriov_vfs.SUBJECT, cards)
    if fabric["ipoib"] and fabric["site_address"]:
        common = {"interface": fabric.get("interface", ""), "route": fabric["route"]}
        yield Part("ipoib", _ipoib_address.SUBJECT, {**common, "address": fabric["site_address"]})


def _baseline(profile: Mapping[str, Any]) -> Iterator[Part]:
    yield Part(NETWORK, _NETWORK, _baseline_files.settings(profile["network"]))


def _telemetry(_profile: Mapping[str, Any]) -> Iterator[Part]:
    yield Part("telemetry", _telemetry_service.SUBJECT, {})


def _mode(profile: Mapping[str, Any]) -> Iterator[Part]:
    yield Part("slice_mode", _slice_mode.SUBJECT, {"profile": profile["name"]})


# By the name of the role or module in the playbook, in its order.
_PARTS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Part]]] = {
    # `_run` itself checks for tenants, before any part.
    "gpuaas.slice.host_idle": lambda _profile: iter(()),
    "gpuaas.slice.bootstrap_plan": lambda _profile: iter(()),
    "gpuaas.slice.module_cache": _module_code,
    "gpuaas.slice.slice_packages": _packages,
    "gpuaas.slice.api_names": _names,
    "gpuaas.slice.host_tuning": _tuning,
    "gpuaas.slice.boot_configuration": _boot,
    "gpuaas.slice.libvirt_host": _libvirt,
    "gpuaas.slice.fabric_functions": _fabric,
    "gpuaas.slice.slice_network": _baseline,
    "gpuaas.slice.slice_telemetry": _telemetry,
    "gpuaas.slice.slice_mode": _mode,
}


def _tuned(profile: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "profiles": profile.get("tuning", []),
        "opted_in": profile.get("opted_in"),
        "hugepages_1g": profile.get("hugepages_1g"),
    }


def _kernel(profile: Mapping[str, Any], *, in_effect: bool = False) -> dict[str, Any]:
    return {
        "arguments": profile["kernel_arguments"],
        "tuning": profile.get("tuning", []),
        # Not the host's record: `tuning` contains the opt-ins already, and a forecast has not yet
        # rewritten the record.
        "opted_in": [],
        "hugepages_1g": profile.get("hugepages_1g"),
        "state": "present",
        "in_effect": in_effect,
    }


def _free() -> bool:
    """Check for a tenant of the whole machine. This comes first, because even package installation
    restarts services.
    """
    try:
        for taken in _tenancy.refusals():
            raise taken
    except Refusal as refusal:
        _say("tenants", "FAIL", str(refusal))
        return False
    return True


def _done(part: Part, *, check: bool) -> bool:
    """Run a part and report its result."""
    try:
        outcome = _change.drive(part.subject, part.params, check_mode=check)
    except (Refusal, OSError, ValueError, LookupError) as problem:
        _say(part.name, "FAIL", str(problem) or type(problem).__name__)
        return False
    if outcome.failure is not None:
        _say(part.name, "FAIL", str(outcome.failure))
        return False
    # An optional step may have failed; a warning below reports it.
    shown_steps = outcome.plan.steps if check else outcome.steps_done
    steps = [f"{step.name}({step.subject})" for step in shown_steps]
    status = "PASS" if not steps else "PLANNED" if check else "CHANGED"
    without = outcome.facts.get("unavailable", [])
    # A missing optional package does not stop the bootstrap, but it is reported.
    left = f"; without {', '.join(without)}, which apt does not have" if without else ""
    _say(part.name, status, f"{', '.join(steps) or 'nothing to do'}{left}")
    for doubt in outcome.doubts:
        _say(part.name, "WARN", str(doubt))
    return True


def _reboot(profile: Mapping[str, Any], *, may_reboot: bool) -> int:
    """Verify that this boot has the configured settings, or reboot into them."""
    reasons = _kernel_arguments.reboot_reasons(
        _kernel(profile), _kernel_arguments.observe(_kernel(profile))
    )
    if not reasons:
        proof = Part("in_effect", _kernel_arguments.SUBJECT, _kernel(profile, in_effect=True))
        return DONE if _done(proof, check=True) else FAILED
    if not may_reboot:
        allow = "GPUAAS_SLICE_REBOOT_IF_REQUIRED=1 allows it"
        _say("reboot", "WARN", f"{'; '.join(reasons)}; {allow}")
        return REBOOT_NEEDED
    for refusal in _host_idle.refusals():
        _say("reboot", "FAIL", str(refusal))
        return FAILED
    _say("reboot", "CHANGED", "; ".join(reasons))
    try:
        # An asynchronous job, so that cloud-init, the possible caller, can finish first.
        _command.run(["systemctl", "--no-block", "reboot"])
    except Refusal as refusal:
        _say("reboot", "FAIL", str(refusal))
        return FAILED
    return DONE


def _profile(environment: Mapping[str, str], only: str = "") -> dict[str, Any]:
    name = environment.get("GPUAAS_SLICE_PROFILE") or DEFAULT_PROFILE
    try:
        profile: dict[str, Any] = json.loads(_carried(f"profiles/{name}.yml"))
    except LookupError as unknown:
        raise Refusal(
            "profile_unknown",
            expected="a hardware profile that this file carries",
            found=name,
            remedy="set GPUAAS_SLICE_PROFILE to the name of one; see the end of this file",
        ) from unknown
    if only:
        return profile
    for key, variable in _FABRIC_SETTINGS.items():
        if environment.get(variable):
            profile["fabric"][key] = environment[variable]
    profile["opted_in"] = _tuning_opt_in.setting(environment.get(_tuning_opt_in.SETTING, ""))
    # All opted-in profiles are merged here, because a forecast writes no record that a later part
    # could read.
    profile["tuning"] = _tuning_opt_in.names(profile.get("tuning", []), profile["opted_in"])
    pairs = [pair for pair in environment.get("GPUAAS_SLICE_API_NAMES", "").split(",") if pair]
    profile["api_names"] = dict(pair.partition("=")[::2] for pair in pairs)
    return profile


def _refuse_unused(environment: Mapping[str, str]) -> None:
    """Refuse settings without effect, because they would look as if they were in force."""
    unused = [name for name in _WHOLE_ONLY if environment.get(name)]
    if environment.get(_REBOOT) == "0":
        # 0 forbids a reboot, and the network alone never reboots.
        unused.remove(_REBOOT)
    if unused:
        raise Refusal(
            "setting_unused",
            expected="GPUAAS_SLICE_PROFILE as the only setting of the network alone",
            found=", ".join(unused),
            remedy="nothing was done; leave it out, or run gpuaas_slice_host_deploy_bootstrap.sh,"
            " which uses it",
        )


def _carried(name: str) -> str:
    """A file that the single-file program carries. Raises LookupError."""
    return str(globals()["__loader__"].get_data(name).decode())


def _switch(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "0")
    if value not in ("", "0", "1"):
        raise Refusal(
            "setting_invalid",
            expected=f"{name} to be 0 or 1",
            found=value,
            remedy="nothing was done; correct the setting",
        )
    return value == "1"


def _say(step: str, status: str, detail: str) -> None:
    line = report_line("GPUAAS_SLICE_BOOTSTRAP", status=status, step=step, detail=detail)
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
