# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Inventory of the deployed machines of MAAS."""

from __future__ import annotations

DOCUMENTATION = r"""
name: maas
short_description: Deployed machines of a MAAS
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Makes a host of each deployed machine that has all of O(tags), with its address.
  - Each host has the variables C(maas_system_id), C(maas_hostname), C(maas_fqdn),
    C(maas_hardware_uuid), C(maas_zone), C(maas_pool), C(maas_locked) and C(maas_tags).
  - Machines that are not deployed have no operating system of their own and are left out.
options:
  plugin:
    description: The name of this plugin.
    type: str
    required: true
    choices: [gpuaas.slice.maas]
  url:
    description: Address of MAAS without C(/MAAS), such as C(https://maas.example).
    type: str
    required: true
    env:
      - name: GPUAAS_MAAS_URL
  token_file:
    description: File with an API key of MAAS, three parts with colons between them.
    type: path
    required: true
    env:
      - name: GPUAAS_MAAS_TOKEN_FILE
  ca_file:
    description: PEM file of the only CA that is accepted for MAAS. Unset, the system's.
    type: str
    env:
      - name: GPUAAS_MAAS_CA_FILE
  tags:
    description: Tags that a machine must have, all of them.
    type: list
    elements: str
    default: []
    env:
      - name: GPUAAS_MAAS_TAGS
  host_name:
    description: The field of a machine that names its host.
    type: str
    choices: [hostname, fqdn, system_id]
    default: hostname
  networks:
    description:
      - Networks of the site's management. The first address of a machine in one of them is used; a
        machine without such an address is left out, with a warning. Empty, its first address.
    type: list
    elements: str
    default: []
    env:
      - name: GPUAAS_MAAS_NETWORKS
extends_documentation_fragment:
  - gpuaas.slice.site_inventory
  - constructed
  - inventory_cache
seealso:
  - plugin: gpuaas.slice.reconciler
    plugin_type: inventory
"""

EXAMPLES = r"""
# site.maas.yml
plugin: gpuaas.slice.maas
url: https://maas.example
token_file: /etc/gpuaas/maas-key
tags: [gpuaas-slice]
networks: [10.20.0.0/16]
keyed_groups:
  - {prefix: zone, key: maas_zone}
compose:
  ansible_user: "'ubuntu'"
  ansible_become: "true"
"""

import secrets
import time
from collections.abc import Callable
from ipaddress import ip_address, ip_network
from typing import Any
from urllib.parse import quote, urlencode

from ansible_collections.gpuaas.slice.plugins.module_utils.core._service import refuse
from ansible_collections.gpuaas.slice.plugins.plugin_utils._site_inventory import (
    Fields,
    Record,
    SiteInventory,
)

_NAME = r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?"
_TEXT = r"[^\x00-\x1f\x7f]{0,200}"
_TAG = r"[A-Za-z0-9_.-]{1,256}"


class InventoryModule(SiteInventory):
    """Machines of MAAS."""

    NAME = "gpuaas.slice.maas"
    SERVICE = "maas"
    REMEDY = "url and token_file, and that the clocks of both machines agree"

    def fetch(self, ask: Callable[..., Any]) -> list[Record]:
        query = [("tags", tag) for tag in self.get_option("tags")]
        headers = {"Authorization": _signature(self.credential("token_file"))}
        machines = ask("GET", f"/MAAS/api/2.0/machines/?{urlencode(query)}", headers)
        if not isinstance(machines, list):
            raise refuse("maas_invalid", "a list of machines", machines, "check url")
        return machines

    def host(self, record: Record) -> tuple[str, Record]:
        machine = Fields(record, "maas_invalid", "a machine")
        system_id = machine.text("system_id", r"[a-z0-9]{1,41}")
        machine = Fields(record, "maas_invalid", f"machine {system_id}")
        tags = machine.texts("tag_names", _TAG)
        deployed = machine.text("status_name", _TEXT) == "Deployed"
        if not deployed or not set(self.get_option("tags")) <= set(tags):
            return "", {}
        name = machine.text(self.get_option("host_name"), _NAME)
        address = self._address(machine.texts("ip_addresses", r"[0-9A-Fa-f.:]{2,45}"))
        if not address:
            self.display.warning(f"maas: {name} is left out: no address in its networks")
            return "", {}
        return name, {
            "ansible_host": address,
            "maas_system_id": system_id,
            "maas_hostname": machine.text("hostname", _NAME),
            "maas_fqdn": machine.text("fqdn", _NAME),
            "maas_hardware_uuid": machine.text("hardware_uuid", r"[0-9A-Fa-f-]{0,36}"),
            "maas_zone": machine.inner("zone").text("name", _TEXT),
            "maas_pool": machine.inner("pool").text("name", _TEXT),
            "maas_locked": machine.flag("locked"),
            "maas_tags": tags,
        }

    def _address(self, addresses: list[str]) -> str:
        try:
            networks = [ip_network(network) for network in self.get_option("networks")]
            usable = [text for text in addresses if _in(text, networks)]
        except ValueError as wrong:
            expected = "networks and addresses of IP"
            raise refuse("maas_invalid", expected, str(wrong), "correct networks") from None
        return usable[0] if usable else ""


def _in(text: str, networks: list[Any]) -> bool:
    return not networks or any(ip_address(text) in network for network in networks)


def _signature(key: str) -> str:
    """OAuth 1.0 as MAAS takes it: the key's secret is the signature itself."""
    words = key.split(":")
    if len(words) != 3 or not all(words):
        expected = "CONSUMER:TOKEN:SECRET in token_file"
        raise refuse("maas_token_unreadable", expected, f"{len(words)} words", "copy it from MAAS")
    fields = {
        "oauth_version": "1.0",
        "oauth_signature_method": "PLAINTEXT",
        "oauth_consumer_key": words[0],
        "oauth_token": words[1],
        "oauth_signature": f"&{words[2]}",
        "oauth_nonce": secrets.token_hex(16),
        "oauth_timestamp": str(int(time.time())),
    }
    return "OAuth " + ", ".join(f'{name}="{quote(value, "")}"' for name, value in fields.items())
