"""Checks of the site's NetBox and MAAS: version, custom fields, and rights of token and key."""

from __future__ import annotations

from collections.abc import Iterator

from reconciler.doctor import Finding, fail, ok, refused, warn
from reconciler.inventory import maas as maas_client
from reconciler.inventory.expected import DEVICE_FIELDS, MACHINE_FIELDS
from reconciler.inventory.netbox import (
    ADDRESSES,
    DEVICES,
    INTERFACES,
    JOURNAL,
    MACHINES,
    MACS,
    PREFIXES,
    VRFS,
    Client,
    Device,
    Machine,
    netbox_access,
)
from reconciler.inventory.networks import MANAGED
from reconciler.inventory.patches import PURPOSES
from reconciler.model.errors import Refusal
from reconciler.runs.spec import RunError
from reconciler.settings import Settings

# Rights that a sync needs.
_NEEDED = {
    **{DEVICES: {"change"}, MACHINES: {"add", "change", "delete"}, JOURNAL: {"add"}},
    **{VRFS: {"add"}, INTERFACES: {"add", "change", "delete"}, MACS: {"add"}, ADDRESSES: {"add"}},
    PREFIXES: set(),
}
# Rights for these belong to no token of ours: they allow changes of tags, users and sites.
_FOREIGN = ("/dcim/sites/", "/extras/tags/", "/extras/custom-fields/", "/users/permissions/")


def netbox(settings: Settings) -> Iterator[Finding]:
    """NetBox answers, has our custom fields, and its token has the rights that are needed."""
    if not settings.netbox_url:
        return
    try:
        with Client(netbox_access(settings)) as client:
            yield from _fields(client)
            yield from _rights(client, settings)
    except RunError as refusal:
        yield refused(refusal, f"{refusal.code}: {refusal.found}")


def _fields(client: Client) -> Iterator[Finding]:
    devices = [row for tag in PURPOSES.values() for row in client.every(Device, tag=tag)]
    machines = list(client.every(Machine, tag=MANAGED))
    if not devices:
        yield warn(
            "no tagged device, so that the custom fields were not looked at",
            expected="a device with a tag of docs/netbox.md, which shows its custom fields",
            remedy="tag a device, and run the doctor again",
        )
        return
    missing = sorted(
        {
            name
            for rows, names in ((devices, DEVICE_FIELDS), (machines, MACHINE_FIELDS))
            for row in rows[:1]
            for name in names.keys() - row.custom_fields.keys()
        }
    )
    yield fail(
        f"no custom field {', '.join(missing)}" if missing else f"{len(devices)} tagged devices",
        unless=not missing,
        expected="the custom fields of docs/netbox.md",
        remedy="import them into NetBox",
    )


def _rights(client: Client, settings: Settings) -> Iterator[Finding]:
    rights = {path: client.rights(path) for path in _NEEDED}
    missing = [
        f"{verb} {path}" for path in _NEEDED for verb in sorted(_NEEDED[path] - rights[path])
    ]
    unseen = [path for path in sorted(_NEEDED) if not client.may_view(path)]
    missing += [f"view {path}" for path in unseen]
    if missing:
        yield (fail if settings.netbox_sync or PREFIXES in unseen else warn)(
            f"the token may not: {', '.join(missing)}",
            expected="the rights of docs/netbox.md; without the view of prefixes not even a"
            " comparison is possible",
            remedy="give them to the token's user in NetBox",
        )
    excess = [f"{verb} {path}" for path in _NEEDED for verb in sorted(rights[path] - _NEEDED[path])]
    for path in _FOREIGN:
        try:
            excess += [f"{verb} {path}" for verb in sorted(client.rights(path))]
        except RunError as refusal:
            # A token that may not even read them is as it should be.
            if refusal.code not in ("netbox_forbidden", "netbox_not_found"):
                raise
    if excess:
        yield warn(
            f"the token may also: {', '.join(excess)}",
            expected="a token with the rights of docs/netbox.md only",
            remedy="take the others from the token's user in NetBox",
        )
    if not missing and not excess:
        yield ok(f"{settings.netbox_url}: the token has the rights that are needed, and no others")


def maas(settings: Settings) -> Iterator[Finding]:
    """MAAS answers, is recent enough, and its key is an administrator's."""
    if not settings.maas_url:
        return
    least = maas_client.LEAST
    try:
        with maas_client.Client(maas_client.maas_access(settings)) as client:
            version, user = client.version(), client.user()
    except Refusal as refusal:
        yield refused(refusal, f"{refusal.code}: {refusal.found}")
        return
    yield fail(
        f"version {'.'.join(map(str, version)) or 'unknown'}",
        unless=version >= least,
        expected=f"MAAS {'.'.join(map(str, least))} or later",
        remedy="upgrade MAAS",
    )
    yield fail(
        f"user {user.username}, {'an' if user.is_superuser else 'no'} administrator",
        unless=user.is_superuser,
        expected="the key of an administrator, who alone may set tags and scripts",
        remedy="make a user of its own for this service in MAAS, and take its key",
    )
