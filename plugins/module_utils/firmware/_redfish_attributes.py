"""BIOS attributes and jobs of a server through Redfish, in the form of `_bios`.

All paths come from links. Only requested settings are kept, because the others include CHAP secrets
and asset data. Of another client's pending change only the name is kept.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware import _bios, _redfish_session

_JOB_ID = re.compile(r"[JR]ID_[0-9]{6,20}")
_BIOS_JOB = "BIOSConfiguration"
# RACADM's job uses PowerCycle. Both types stop the machine's software abruptly.
_RESETS = ("PowerCycle", "ForceRestart")
# An iDRAC returns 50 jobs per page and keeps some hundred. The limit stops an endless list.
_MOST_PAGES = 64


@dataclass(frozen=True)
class Rule:
    """Registry entry of a BIOS setting.

    kind: Enumeration, Integer, String, Boolean or Password. allowed: values of an Enumeration.
    """

    kind: str
    allowed: tuple[str, ...] = ()
    lower: int | None = None
    upper: int | None = None
    read_only: bool = False


@dataclass(frozen=True)
class Firmware:
    """settings, jobs, reset: paths, "" if the BMC lacks the resource.

    on_reset: whether a change may wait for the next reset. reset_types: the BMC's reset types.
    rules: registry entries of the requested settings; None when the BMC publishes no registry.
    """

    state: _bios.State
    settings: str
    jobs: str
    reset: str
    on_reset: bool = False
    powered: bool = True
    reset_types: tuple[str, ...] = ()
    rules: Mapping[str, Rule] | None = None


def read(client: _redfish_session.Client, names: Collection[str], *, system: str = "") -> Firmware:
    """The firmware of `system` (its id; "" is allowed if the BMC has a single system). Raises
    Refusal.
    """
    root = client.once(_redfish_session.ROOT)
    at = system_path(client, root, system)
    machine = client.get(at)
    bios_at = client.link(machine, "Bios") or _missing("a Bios resource", at)
    # The queue before the values: a job that ends between the two reads then still appears open. In
    # the other order its old values would look like work for another job.
    jobs_at = _jobs_at(client, machine)
    jobs = tuple(queue(client, jobs_at)) if jobs_at else ()
    bios = client.get(bios_at)
    settings_at = client.link(bios, "@Redfish.Settings", "SettingsObject")
    waiting = client.get(settings_at) if settings_at else {}
    rules = _rules(client, root, bios, names)
    reset = _object(_object(machine.get("Actions")).get("#ComputerSystem.Reset"))
    return Firmware(
        state=_bios.State(_attributes(_held(bios), _held(waiting), names, rules or {}), jobs),
        settings=settings_at,
        jobs=jobs_at,
        reset=client.path(reset["target"]) if reset.get("target") else "",
        on_reset="OnReset"
        in _list(_object(bios.get("@Redfish.Settings")).get("SupportedApplyTimes")),
        powered=machine.get("PowerState") != "Off",
        reset_types=tuple(map(str, _list(reset.get("ResetType@Redfish.AllowableValues")))),
        rules=rules,
    )


def stage(
    client: _redfish_session.Client, firmware: Firmware, changes: Mapping[str, str], *, commit: bool
) -> str:
    """Request `changes`. With commit, a job applies them at the next reset: returns its id, or "".

    All changes go in a single request: the first change creates the job, and an iDRAC accepts no
    more while that job is open.
    """
    rules = firmware.rules or {}
    body: dict[str, Any] = {
        "Attributes": {name: typed(value, rules.get(name)) for name, value in changes.items()}
    }
    if commit:
        body["@Redfish.SettingsApplyTime"] = {"ApplyTime": "OnReset"}
    return _job_id(client.patch(firmware.settings, body).headers.get("location", ""))


def schedule(client: _redfish_session.Client, firmware: Firmware) -> str:
    """Create the job for values that are pending without a job; its id or "".

    If the value is already pending, an iDRAC answers 200 and creates no job; the values would then
    wait for ever.
    """
    answer = client.post(firmware.jobs, {"TargetSettingsURI": firmware.settings})
    return _job_id(answer.headers.get("location", ""))


def queue(client: _redfish_session.Client, jobs_at: str) -> Iterator[_bios.Job]:
    """Every job, page by page, because an open job on an unread page would look settled."""
    for member in collected(client, f"{jobs_at}?$expand=*($levels=1)"):
        # A BMC that does not expand gives links only.
        full = member if "JobState" in member else client.get(client.link({"job": member}, "job"))
        parsed = _job(full)
        if parsed is not None:
            yield parsed


def collected(client: _redfish_session.Client, first: str) -> Iterator[dict[str, Any]]:
    """The members of a collection, of all its pages. Raises Refusal when some are not shown."""
    at, pages, seen, announced = first, {first}, 0, 0
    while at:
        page = client.get(at)
        members = _list(page.get("Members"))
        seen += len(members)
        # The count of the whole collection. A member removed during the read may hide another
        # member.
        count = page.get("Members@odata.count")
        announced = max(announced, count) if isinstance(count, int) else announced
        yield from map(_object, members)
        following = page.get("Members@odata.nextLink")
        # Only the path is used, so that the request always goes to this BMC, whatever host the link
        # names.
        at = "" if following is None else client.path(following)
        if at in pages or len(pages) > _MOST_PAGES:
            raise _garbled(f"a list that ends within {_MOST_PAGES} pages", following)
        pages.add(at)
    if seen < announced:
        raise _garbled(f"all {announced} entries of {first}", f"{seen} of them")


def job(client: _redfish_session.Client, firmware: Firmware, job_id: str) -> _bios.Job:
    document = client.get(f"{firmware.jobs}/{job_id}")
    parsed = _job(document)
    if parsed is None or parsed.id != job_id:
        raise _garbled(f"the job {job_id}", document.get("Id"))
    return parsed


def reset(client: _redfish_session.Client, firmware: Firmware) -> str:
    """Power-cycle the machine, or start it when it is off; returns the requested reset type."""
    offered = [kind for kind in _RESETS if kind in firmware.reset_types]
    kind = "On" if not firmware.powered else next(iter(offered), "")
    if not firmware.reset or not kind:
        _missing("a reset that ends in a restart", firmware.reset or "Actions of the system")
    client.post(firmware.reset, {"ResetType": kind})
    return kind


def typed(value: str, rule: Rule | None) -> str | int | bool:
    """`value` as the JSON type of its setting. Raises ValueError when it does not fit."""
    if rule is not None and rule.kind == "Integer":
        return int(value)
    if rule is not None and rule.kind == "Boolean":
        return {"True": True, "False": False}[value.capitalize()]
    return value


def system_path(client: _redfish_session.Client, root: dict[str, Any], requested: str) -> str:
    """Path of the system with this id; "" is allowed if the BMC has a single system."""
    listed = client.once(client.link(root, "Systems") or _missing("Systems", _redfish_session.ROOT))
    paths = {path.rstrip("/").rpartition("/")[2]: path for path in _members(client, listed)}
    if requested in paths:
        return paths[requested]
    if len(paths) == 1 and not requested:
        return next(iter(paths.values()))
    raise Refusal(
        "system_ambiguous",
        expected=f"the system {requested!r}" if requested else "one system on this BMC",
        found=", ".join(map(ascii, paths)) or "none",
        remedy="name one of them",
    )


def _members(client: _redfish_session.Client, listed: dict[str, Any]) -> Iterator[str]:
    for member in _list(listed.get("Members")):
        yield client.link({"member": member}, "member")


def _held(document: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in _object(document.get("Attributes")).items() if v is not None}


def _attributes(
    current: dict[str, Any],
    waiting: dict[str, Any],
    names: Collection[str],
    rules: Mapping[str, Rule],
) -> dict[str, _bios.Attribute]:
    """The requested settings, and the names of other settings with a pending change, without their
    values.
    """
    attributes = {}
    for name, value in current.items():
        pending = waiting.get(name, value)
        changes = pending != value
        rule = rules.get(name)
        if name in names and not (rule is not None and rule.kind == "Password"):
            attributes[name] = _bios.Attribute(
                name,
                str(value),
                str(pending) if changes else None,
                read_only=rule is not None and rule.read_only,
            )
        elif changes or name in names:
            hidden = "a value not shown"
            attributes[name] = _bios.Attribute(name, hidden, "another" if changes else None)
    return attributes


def _rules(
    client: _redfish_session.Client,
    root: dict[str, Any],
    bios: dict[str, Any],
    names: Collection[str],
) -> dict[str, Rule] | None:
    name, listed_at = bios.get("AttributeRegistry"), client.link(root, "Registries")
    if not isinstance(name, str) or not listed_at:
        return None
    for path in _members(client, client.once(listed_at)):
        last = path.rstrip("/").rpartition("/")[2]
        if last == name or name.startswith(f"{last}."):
            file = client.once(path)
            # The first is enough, because names and values are the same in every language.
            places = [_object(each).get("Uri") for each in _list(file.get("Location"))]
            at = client.path(next(iter(places), None))
            entries = _list(_object(client.once(at).get("RegistryEntries")).get("Attributes"))
            named = {each.get("AttributeName"): each for each in map(_object, entries)}
            return {each: _rule(named[each]) for each in names if each in named}
    return None


def _rule(entry: dict[str, Any]) -> Rule:
    lower, upper = entry.get("LowerBound"), entry.get("UpperBound")
    values = [each.get("ValueName") for each in map(_object, _list(entry.get("Value")))]
    return Rule(
        kind=str(entry.get("Type")),
        allowed=tuple(value for value in values if isinstance(value, str)),
        lower=lower if isinstance(lower, int) else None,
        upper=upper if isinstance(upper, int) else None,
        read_only=entry.get("ReadOnly") is True or entry.get("Immutable") is True,
    )


def _jobs_at(client: _redfish_session.Client, machine: dict[str, Any]) -> str:
    """Dell's queue, linked from the manager of the system."""
    managers = _list(_object(machine.get("Links")).get("ManagedBy"))
    if not managers:
        return ""
    manager = client.once(client.link({"by": managers[0]}, "by"))
    return client.link(manager, "Links", "Oem", "Dell", "Jobs").rstrip("/")


def _job(document: dict[str, Any]) -> _bios.Job | None:
    """The job in a queue entry. None for an entry that is no machine job, such as Dell's
    JID_CLEARALL. A BIOS entry is never skipped.
    """
    id_, name = str(document.get("Id")), str(document.get("Name"))
    is_bios = document.get("JobType") == _BIOS_JOB
    if not _JOB_ID.fullmatch(id_):
        if is_bios:
            raise _garbled("a BIOS job with the id JID_…", id_)
        return None
    return _bios.Job(
        id=id_,
        name=f"{name} ({_bios.TARGET})" if is_bios and _bios.TARGET not in name else name,
        # Redfish writes CompletedWithErrors where RACADM writes "Completed with errors".
        status=re.sub(r"(?<=[a-z])(?=[A-Z])", " ", str(document.get("JobState"))),
        message=f"{document.get('MessageId')}: {document.get('Message')}",
        percent=str(document.get("PercentComplete", "")),
    )


def _job_id(location: str) -> str:
    """`JID_…` from the Location of a job or of its task monitor; "" when it has none."""
    last = location.rstrip("/").rpartition("/")[2]
    return last if _JOB_ID.fullmatch(last) else ""


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _garbled(expected: str, found: object) -> Refusal:
    return Refusal(
        "bmc_answer_malformed",
        expected=expected,
        found=ascii(found)[:200],
        remedy="look at the BMC's job queue by hand, and at its firmware version",
    )


def _missing(what: str, at: str) -> str:
    raise Refusal(
        "bmc_feature_missing",
        expected=f"{what} at {at}",
        found="nothing there",
        remedy="update the BMC's firmware; its licence may also leave BIOS settings out",
    )
