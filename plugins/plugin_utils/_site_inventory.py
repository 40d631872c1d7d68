# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Inventories read from a service of the site: bounded answers, checked records, unsafe values.

The service is not trusted with more than its own records. A record names its host and the address
of that host; it chooses no variable's name, is never a template, and replaces no connection of a
host that another source has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from ipaddress import ip_address
from typing import Any

from ansible.errors import AnsibleError, AnsibleParserError
from ansible.plugins.inventory import BaseInventoryPlugin, Cacheable, Constructable
from ansible.utils.unsafe_proxy import wrap_var
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.core._service import (
    Service,
    credential,
    refuse,
)

Record = dict[str, Any]

# Names that mean something else to Ansible than a host.
_RESERVED = frozenset({"all", "ungrouped", "localhost"})
# Text that no version of Ansible takes for a template. Other text is marked.
_PLAIN = re.compile(r"[A-Za-z0-9._:/@+ -]*")


class Fields:
    """Values of a record of the service. A value of another form is refused with its name."""

    def __init__(self, record: object, code: str, subject: str) -> None:
        if not isinstance(record, Mapping):
            raise refuse(code, f"a record of {subject}", record, "compare versions of both sides")
        self._record, self._code, self._subject = record, code, subject

    def text(self, name: str, pattern: str = r"[^\x00-\x1f\x7f]{0,1000}") -> str:
        """A text; null counts as empty."""
        value = self._record.get(name)
        value = "" if value is None else value
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise self._wrong(name, f"a text like {pattern}", value)
        return value

    def number(self, name: str, low: int, high: int) -> int:
        value = self._record.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._wrong(name, f"a number from {low} to {high}", value)
        return value

    def flag(self, name: str) -> bool:
        value = self._record.get(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def texts(self, name: str, pattern: str) -> list[str]:
        """A list of texts; null counts as an empty list."""
        value = self._record.get(name)
        value = [] if value is None else value
        good = isinstance(value, list) and len(value) <= 1000
        if not good or not all(isinstance(v, str) and re.fullmatch(pattern, v) for v in value):
            raise self._wrong(name, f"a list of texts like {pattern}", value)
        return list(value)

    def inner(self, name: str) -> Fields:
        """A record inside of this record."""
        return Fields(self._record.get(name), self._code, f"{name} of {self._subject}")

    def _wrong(self, name: str, expected: str, value: object) -> Refusal:
        return refuse(
            self._code,
            f"{expected} as {name} of {self._subject}",
            value,
            "correct the record in the service; no host of it was taken",
        )


class SiteInventory(BaseInventoryPlugin, Constructable, Cacheable):  # type: ignore[misc]
    """An inventory plugin over a service.

    SERVICE: its name in refusals, and of its codes. REMEDY: of a credential that it refuses.
    """

    SERVICE = ""
    REMEDY = ""

    def fetch(self, ask: Callable[..., Any]) -> list[Record]:
        """All records of the service. ask(method, path, headers): the JSON value of an answer."""
        raise NotImplementedError

    def host(self, record: Record) -> tuple[str, Record]:
        """Name and variables of the record's host; the name is "" for a record without a host."""
        raise NotImplementedError

    def groups_of(self, variables: Record) -> list[str]:  # noqa: ARG002
        """Groups of a host beside those that the source file asks for."""
        return []

    def verify_file(self, path: str) -> bool:
        suffixes = (f"{self.SERVICE}.yml", f"{self.SERVICE}.yaml")
        return bool(super().verify_file(path)) and path.endswith(suffixes)

    def parse(self, inventory: Any, loader: Any, path: str, cache: bool = True) -> None:
        super().parse(inventory, loader, path)
        self._read_config_data(path)
        self.load_cache_plugin()
        before = {
            name: (dict(host.vars), list(host.groups))
            for name, host in self.inventory.hosts.items()
        }
        try:
            hosts = self._hosts(self._records(self.get_cache_key(path), cache))
            for name, variables in hosts.items():
                self._add(name, variables)
            self._require_hosts(hosts)
        except (AnsibleError, Refusal) as problem:
            self._restore(before)
            raise AnsibleParserError(f"{path}: {problem}") from None

    def _restore(self, before: Mapping[str, tuple[Record, list[Any]]]) -> None:
        """Take the hosts of this source back. before: variables and groups of the hosts before."""
        for name, host in list(self.inventory.hosts.items()):
            if name not in before:
                self.inventory.remove_host(host)
                continue
            host.vars, groups = before[name]
            for group in [group for group in host.groups if group not in groups]:
                group.remove_host(host)

    def credential(self, option: str) -> str:
        """The only word in a file."""
        return credential(self.get_option(option), self.SERVICE)

    def _records(self, key: str, cache: bool) -> list[Record]:
        """From the cache, when it is on, current, and of the same service."""
        service = Service(
            self.SERVICE,
            str(self.get_option("url")),
            self.get_option("ca_file") or "",
            int(self.get_option("timeout")),
            self.REMEDY,
        )
        if cache and self.get_option("cache"):
            try:
                stored = self._cache[key]
            except KeyError:
                stored = None
            if isinstance(stored, dict) and stored.get("url") == service.url:
                return list(stored.get("records") or [])
        records = list(service.converse(self.fetch))
        if self.get_option("cache"):
            self._cache[key] = {"url": service.url, "records": records}
        return records

    def _hosts(self, records: Iterable[Record]) -> dict[str, Record]:
        hosts: dict[str, Record] = {}
        groups = {*self.inventory.groups, *self.get_option("groups")}
        for record in records:
            name, variables = self.host(record)
            if name in hosts or name in groups or name in _RESERVED or _is_address(name):
                expected = "one record for each host, under a name of no group and no address"
                remedy = f"correct the records of {self.SERVICE}; no host of it was taken"
                raise refuse(f"{self.SERVICE}_name_ambiguous", expected, name, remedy)
            if name:
                hosts[name] = variables
        return hosts

    def _add(self, name: str, variables: Record) -> None:
        exists = name in self.inventory.hosts
        self.inventory.add_host(name)
        for variable, value in variables.items():
            # How another source reaches this host is not changed by an answer, also where it has
            # no variable and is found by its name.
            if not (exists and variable.startswith("ansible_")):
                self.inventory.set_variable(name, variable, _marked(value))
        for group in self.groups_of(variables):
            self.inventory.add_child(self.inventory.add_group(group), name)
        composed = self.inventory.get_host(name).get_vars()
        strict = self.get_option("strict")
        self._set_composite_vars(self.get_option("compose"), composed, name, strict)
        self._add_host_to_composed_groups(self.get_option("groups"), {}, name, strict)
        self._add_host_to_keyed_groups(self.get_option("keyed_groups"), {}, name, strict)

    def _compose(self, template: Any, variables: Any, *rest: Any) -> Any:
        """What an expression makes of a record is no template either."""
        return wrap_var(super()._compose(template, variables, *rest))

    def _require_hosts(self, hosts: Mapping[str, Record]) -> None:
        both = sorted(set(hosts) & set(self.inventory.groups))
        if both:
            expected = "hosts whose names are those of no group"
            remedy = "rename the group; a limit of that name would mean more than the host"
            raise refuse(f"{self.SERVICE}_name_ambiguous", expected, ", ".join(both), remedy)


def _is_address(name: str) -> bool:
    """Whether it is an address; Ansible takes those of the loopback for the controller."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _marked(value: Any) -> Any:
    if isinstance(value, list):
        return [_marked(item) for item in value]
    plain = not isinstance(value, str) or _PLAIN.fullmatch(value)
    return value if plain else wrap_var(value)
