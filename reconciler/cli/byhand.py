"""Shared parts of `gpuaas host`: playing a playbook by hand, hardware profile, API evidence."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reconciler.cli import output
from reconciler.cli.session import secret
from reconciler.model import hardware
from reconciler.model.bundle import BUNDLE_FIELDS
from reconciler.model.errors import Problem, Refusal
from reconciler.runs.ssh import Reach

if TYPE_CHECKING:
    from reconciler.runs.byhand import Work

# The hardware class of this product; --profile or the node's record names another.
DEFAULT_PROFILE = "xe9680l-h200"

_CODE = re.compile(r"[a-z][a-z0-9_]{0,63}")

Record = dict[str, Any]


@dataclass(frozen=True)
class Api:
    """Address and token of the reconciler. It is not queried without token file and node id."""

    base: str
    token_file: Path | None
    node_id: str


@dataclass(frozen=True)
class Evidence:
    """The reconciler's records of the host. topology {}: the reconciler was not queried.

    fabric: the host's fields on the fabric, from its node's record. maas_tags: from the record.
    """

    profile: str = ""
    slots: list[Record] = field(default_factory=list)
    topology: Record = field(default_factory=dict)
    fabric: Record = field(default_factory=dict)
    maas_tags: list[str] | None = None


def evidence(api: Api) -> Evidence:
    """The node's profile, approved slots and latest discovery.

    If the evidence was requested and cannot be read, parity reports a failed check with the reason,
    not a warning. Otherwise a wrong token would look like no token.
    """
    if api.token_file is None or not api.node_id:
        return Evidence()
    # The HTTP library takes longer to import than most commands to run.
    from reconciler.client import Client

    try:
        client = Client(api.base, secret(api.token_file, "name the file with --api-token-file"))
        node = f"/admin/nodes/{api.node_id}"
        slots = list(client.items(f"{node}/resource-slots"))
        document = client.get(f"{node}/slice-topology/discovery")["document"]
        record = client.get(node)
        profile, fabric = (
            str(record["profile"]),
            {name: record[name] for name in hardware.NODE_FIELDS},
        )
        tags = record["maas_tags"]
    except (Problem, ValueError, LookupError, TypeError) as failure:
        code = failure.code if isinstance(failure, Problem) else "api_answer_unreadable"
        output.line(f"no evidence from the API: {failure}")
        reasons = [code] if _CODE.fullmatch(code) else ["api_refused"]
        return Evidence(topology={"source": "api", "completed": False, "blockers": reasons})
    return Evidence(profile, [_bundle(slot) for slot in slots], _topology(document), fabric, tags)


def work(
    playbook: str, kind: str, profile: str, fabric: Record | None = None, /, **variables: Any
) -> Work:
    """Work with the complete hardware profile, overridden by the host's own fabric fields."""
    from reconciler.profiles import hardware_profile
    from reconciler.runs.byhand import Work
    from reconciler.settings import Settings

    shared = hardware_profile(Settings().profiles_dir, profile or DEFAULT_PROFILE)
    resolved = hardware.node_profile(shared, fabric or {})
    return Work(playbook, kind, {"slice_profile": resolved, **variables})


def play(work: Work, reach: Reach) -> Record:
    """Play the playbook and return its evidence; progress goes to standard error."""
    # The run contract takes long to load, which --help should not.
    from reconciler.runs import byhand
    from reconciler.settings import Settings

    try:
        return byhand.play(work, reach, Settings().collections_path, _print_task)
    except Refusal as refusal:
        raise Problem(
            refusal.code,
            422,
            expected=refusal.expected,
            found=refusal.found,
            remedy=refusal.remedy,
        ) from refusal


def read_json(file: Path, code: str, expected: str, remedy: str) -> Any:
    """The JSON document in an operator's file; Problem `code` when it cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Problem(
            code,
            422,
            expected=f"{expected} in {file}",
            found=type(error).__name__,
            remedy=remedy,
        ) from error


def read_slots(file: Path | None) -> list[Record]:
    """Approved bundles from a file, for a host whose reconciler cannot be reached."""
    if file is None:
        return []
    document = read_json(
        file,
        "slots_unreadable",
        "a JSON list of slot bundles",
        "save `gpuaas slots list NODE --output json`",
    )
    rows = document if isinstance(document, list) else []
    return [_bundle(row) for row in rows if isinstance(row, Mapping)]


def _print_task(name: str) -> None:
    output.line(f"  {name}")


def _bundle(slot: Mapping[str, Any]) -> Record:
    bundle = {name: slot[name] for name in BUNDLE_FIELDS if name in slot}
    return {"slot_id": slot.get("slot_id") or slot.get("id"), **bundle}


def _topology(document: Mapping[str, Any] | None) -> Record:
    if document is None:
        return {"source": "api", "completed": False, "blockers": []}
    return {
        "source": "api",
        "completed": True,
        "boot_id": str(document["identity"]["boot_id"]),
        "blockers": list(document["candidate_summary"]["blockers"]),
    }
