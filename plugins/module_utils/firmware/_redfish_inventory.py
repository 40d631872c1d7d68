"""Program redfish_firmware_inventory.py: firmware, users and boot settings of a machine by its BMC.

The BMC does not depend on the machine's operating system, so its answers count even after a tenant
was root there. Exit codes: 0 printed, 1 refused, 2 wrong command line or environment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware import (
    _redfish_attributes,
    _redfish_session,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware._redfish_connection import Trust

Section = dict[str, str]
Documents = Iterator[dict[str, Any]]

_ENVIRONMENT = ("IDRAC_HOST", "IDRAC_USER", "IDRAC_PASSWORD")
# Entries of a section, and characters of a name or value.
MOST, LONGEST = 256, 300
# An iDRAC also lists versions that were installed before, and those that it could install.
_NOT_INSTALLED = ("Previous-", "Available-")
_BOOT = (
    *("BootSourceOverrideEnabled", "BootSourceOverrideTarget", "BootSourceOverrideMode"),
    *("UefiTargetBootSourceOverride", "StopBootOnFault"),
)
_SECURE_BOOT = ("SecureBootEnable", "SecureBootMode", "SecureBootCurrentBoot")
_PROVIDERS = ("LDAP", "ActiveDirectory")


def read(client: _redfish_session.Client, *, system: str = "") -> dict[str, dict[str, Any]]:
    """sections: values by section and name. unreadable: reasons by section."""
    readers: dict[str, Callable[[], Section]] = {
        "redfish_firmware": lambda: _firmware(client),
        "redfish_users": lambda: _users(client),
        "redfish_boot": lambda: _boot(client, system),
    }
    sections: dict[str, Section] = {}
    unreadable: dict[str, str] = {}
    for name, reader in readers.items():
        try:
            section = sorted(reader().items())
        except Refusal as refusal:
            if refusal.code in ("bmc_login_refused", "tls_untrusted", "trust_invalid"):
                raise
            unreadable[name] = _cut(f"{refusal.code}: {refusal.found}")
            continue
        sections[name] = {_cut(key): _cut(text) for key, text in section[:MOST]}
        if len(section) > MOST:
            unreadable[name] = f"{len(section) - MOST} more entries"
    return {"sections": sections, "unreadable": unreadable}


def _firmware(client: _redfish_session.Client) -> Section:
    """Installed version of each component, by its name and its place in the machine."""
    section: Section = {}
    for entry in _entries(client, "UpdateService", "FirmwareInventory"):
        identifier = str(entry.get("Id", ""))
        if identifier.startswith(_NOT_INSTALLED):
            continue
        # Dell: Installed-<component>-<version>__<place>.
        place = identifier.rpartition("__")[2]
        name = f"{entry.get('Name')} {place}"
        section[_free(name, section)] = str(entry.get("Version"))
    return section


def _users(client: _redfish_session.Client) -> Section:
    service = client.get(_linked(client, client.once(_redfish_session.ROOT), "AccountService"))
    section = {
        f"{name} enabled": str((service.get(name) or {}).get("ServiceEnabled"))
        for name in _PROVIDERS
        if isinstance(service.get(name), dict)
    }
    section["LocalAccountAuth"] = str(service.get("LocalAccountAuth"))
    for account in _members(client, _linked(client, service, "Accounts")):
        # An iDRAC lists all its user slots, most of which are empty.
        if account.get("UserName") or account.get("Enabled"):
            state = "enabled" if account.get("Enabled") else "disabled"
            values = (account.get("UserName"), account.get("RoleId"), state)
            section[_free(f"user {account.get('Id')}", section)] = " ".join(map(str, values))
    return section


def _boot(client: _redfish_session.Client, system: str) -> Section:
    at = _redfish_attributes.system_path(client, client.once(_redfish_session.ROOT), system)
    machine = client.get(at)
    boot = machine.get("Boot")
    boot = boot if isinstance(boot, dict) else {}
    section = {name: str(boot[name]) for name in _BOOT if name in boot}
    order = boot.get("BootOrder")
    section["BootOrder"] = ",".join(map(str, order)) if isinstance(order, list) else "None"
    if secure := client.link(machine, "SecureBoot"):
        values = client.get(secure)
        section |= {name: str(values.get(name)) for name in _SECURE_BOOT}
    return section


def _entries(client: _redfish_session.Client, *links: str) -> Documents:
    document = client.once(_redfish_session.ROOT)
    for name in links[:-1]:
        document = client.get(_linked(client, document, name))
    yield from _members(client, _linked(client, document, links[-1]))


def _members(client: _redfish_session.Client, at: str) -> Documents:
    for member in _redfish_attributes.collected(client, f"{at}?$expand=*($levels=1)"):
        yield member if "Id" in member else client.get(client.link({"it": member}, "it"))


def _linked(client: _redfish_session.Client, document: dict[str, Any], name: str) -> str:
    path = client.link(document, name)
    if not path:
        raise Refusal(
            "bmc_feature_missing",
            expected=f"a link {name} on the BMC",
            found="none",
            remedy="update the BMC's firmware, or compare this by hand",
        )
    return path


def _free(name: str, section: Mapping[str, str]) -> str:
    """The name, with a number when another entry has it."""
    return name if name not in section else f"{name} {len(section)}"


def _cut(text: str) -> str:
    return _host.abridged(text, LONGEST)


def main(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Print the report for `words` (without the program's name); the exit code."""
    parser = argparse.ArgumentParser(
        prog="redfish_firmware_inventory.py",
        description="Print firmware versions, users and boot settings of a machine by its BMC, for"
        " `gpuaas nodes record-bmc`.",
        epilog="Environment: IDRAC_HOST, IDRAC_USER, IDRAC_PASSWORD.",
    )
    parser.add_argument("--system", default="", help="id of the system, where the BMC has several")
    parser.add_argument("--ca-file", default=environment.get("IDRAC_CA_FILE", ""))
    parser.add_argument("--fingerprint", default=environment.get("IDRAC_FINGERPRINT", ""))
    parser.add_argument("--timeout", type=float, default=180, help="seconds for all of it (180)")
    options = parser.parse_args(words)
    if missing := [name for name in _ENVIRONMENT if not environment.get(name)]:
        parser.error(f"the environment lacks {', '.join(missing)}")
    _redfish_session.end_by_signals()
    host, user, secret = (environment[name] for name in _ENVIRONMENT)
    account = _redfish_session.Account(user, secret)
    trust = Trust(options.ca_file, options.fingerprint)
    try:
        with _redfish_session.Client(host, account, trust, timeout=options.timeout) as client:
            report = read(client, system=options.system)
    except Refusal as refusal:
        sys.stderr.write(f"{refusal}\n".replace(secret, "***"))
        return 1
    written = json.dumps(report, indent=2)
    for form in (json.dumps(secret)[1:-1], secret):
        written = written.replace(form, "***")
    sys.stdout.write(f"{written}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], os.environ))
