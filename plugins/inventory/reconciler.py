# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Inventory of the nodes of a reconciler."""

from __future__ import annotations

DOCUMENTATION = r"""
name: reconciler
short_description: Nodes of a gpuaas.slice reconciler
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Makes a host of each node, named by the node's id, with the address, port and user by which the
    reconciler reaches it.
  - Each host has the variables C(gpuaas_name), C(gpuaas_state), C(gpuaas_mode), C(gpuaas_profile),
    C(gpuaas_pool), C(gpuaas_region), C(gpuaas_health), C(gpuaas_fabric_interface),
    C(gpuaas_fabric_address), C(gpuaas_scheduling), C(gpuaas_reboot_required),
    C(gpuaas_reinstall_required), C(gpuaas_maas_tags) and C(gpuaas_enabled), which is false for a
    retired node.
  - Each host is in the groups C(state_STATE) and C(mode_MODE).
options:
  plugin:
    description: The name of this plugin.
    type: str
    required: true
    choices: [gpuaas.slice.reconciler]
  url:
    description: Address of the reconciler. Plain HTTP only on the machine itself.
    type: str
    required: true
    env:
      - name: GPUAAS_API
  token_file:
    description: File with a token of the role platform-admin.
    type: path
    required: true
    env:
      - name: GPUAAS_TOKEN_FILE
  ca_file:
    description: PEM file of the only CA that is accepted for the reconciler. Unset, the system's.
    type: str
    env:
      - name: GPUAAS_CA_FILE
extends_documentation_fragment:
  - gpuaas.slice.site_inventory
  - constructed
  - inventory_cache
seealso:
  - plugin: gpuaas.slice.maas
    plugin_type: inventory
"""

EXAMPLES = r"""
# site.reconciler.yml
plugin: gpuaas.slice.reconciler
url: https://gpuaas.example
token_file: /etc/gpuaas/token
cache: true
cache_plugin: ansible.builtin.jsonfile
cache_connection: ~/.cache/gpuaas
cache_timeout: 60
keyed_groups:
  - {prefix: profile, key: gpuaas_profile}
groups:
  sellable: gpuaas_state == 'ready' and gpuaas_scheduling
"""

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from ansible_collections.gpuaas.slice.plugins.module_utils.core._service import refuse
from ansible_collections.gpuaas.slice.plugins.plugin_utils._site_inventory import (
    Fields,
    Record,
    SiteInventory,
)

_WORD = r"[a-z][a-z_]{0,39}"
_LABEL = r"[A-Za-z0-9._-]{0,64}"
# Pages of a thousand nodes.
_PAGES = 100


class InventoryModule(SiteInventory):
    """Nodes of the reconciler."""

    NAME = "gpuaas.slice.reconciler"
    SERVICE = "reconciler"
    REMEDY = "url and token_file, whose token must be of a platform-admin"

    def fetch(self, ask: Callable[..., Any]) -> list[Record]:
        headers = {"Authorization": f"Bearer {self.credential('token_file')}"}
        nodes: list[Record] = []
        cursor = ""
        for _page in range(_PAGES):
            path = f"/api/v1/admin/nodes?limit=1000&cursor={quote(cursor)}"
            answer = ask("GET", path.removesuffix("&cursor="), headers)
            items = answer.get("items") if isinstance(answer, dict) else None
            if not isinstance(items, list):
                raise refuse("reconciler_invalid", "a page of nodes", answer, "check url")
            nodes += items
            last, cursor = cursor, Fields(answer, "reconciler_invalid", "a page").text("next")
            if not cursor:
                return nodes
            if cursor == last:
                break
        expected = f"an end within {_PAGES} pages"
        raise refuse("reconciler_invalid", expected, "a page that leads on", "check url")

    def host(self, record: Record) -> tuple[str, Record]:
        node = Fields(record, "reconciler_invalid", "a node")
        name = node.text("id", r"[a-z0-9][a-z0-9-]{0,62}")
        node = Fields(record, "reconciler_invalid", f"node {name}")
        state, user = node.text("state", _WORD), node.text("ssh_user", r"[a-z_][a-z0-9_-]{0,31}")
        return name, {
            "ansible_host": node.text("address", r"[A-Za-z0-9:][A-Za-z0-9.:%-]{0,252}"),
            "ansible_port": node.number("port", 1, 65535),
            "ansible_user": user,
            # Left out for root, because a false value would outrank -b.
            **({} if user == "root" else {"ansible_become": True}),
            "gpuaas_name": node.text("name"),
            "gpuaas_state": state,
            "gpuaas_mode": node.text("mode", _WORD),
            "gpuaas_profile": node.text("profile", _LABEL),
            "gpuaas_pool": node.text("pool", _LABEL),
            "gpuaas_region": node.text("region", _LABEL),
            "gpuaas_health": node.text("health_state", _WORD),
            "gpuaas_fabric_interface": node.text("fabric_interface", r"[a-z0-9]{0,15}"),
            "gpuaas_fabric_address": node.text("fabric_address", r"[0-9./]{0,18}"),
            "gpuaas_scheduling": node.flag("slice_scheduling"),
            "gpuaas_reboot_required": node.flag("reboot_required"),
            "gpuaas_reinstall_required": node.flag("reinstall_required"),
            "gpuaas_maas_tags": node.texts("maas_tags", r"[A-Za-z0-9_-]{1,64}"),
            "gpuaas_enabled": state != "retired",
        }

    def groups_of(self, variables: Record) -> list[str]:
        return [f"state_{variables['gpuaas_state']}", f"mode_{variables['gpuaas_mode']}"]
