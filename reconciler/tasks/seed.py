"""The cloud-init documents of a slice: its user, its keys, its one managed interface. Pure."""

from __future__ import annotations

from typing import Any


def documents(allocation: dict[str, Any], management_mac: str) -> dict[str, Any]:
    """user_data, meta_data and network_config as structures; the host renders them."""
    user = {
        "name": allocation["username"],
        "shell": "/bin/bash",
        "sudo": "ALL=(ALL) NOPASSWD:ALL",
        "lock_passwd": True,
        "ssh_authorized_keys": list(allocation["ssh_keys"]),
    }
    return {
        "user_data": {
            "hostname": allocation["hostname"],
            "users": [user],
            "disable_root": True,
            "ssh_pwauth": False,
        },
        "meta_data": {
            "instance-id": allocation["id"],
            "local-hostname": allocation["hostname"],
        },
        "network_config": {
            "version": 2,
            "ethernets": {
                # The fabric function has another address, so it stays out of the management plane.
                "management": {"match": {"macaddress": management_mac}, "dhcp4": True}
            },
        },
    }
