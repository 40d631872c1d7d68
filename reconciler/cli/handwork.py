"""What the commands of `gpuaas host` share: running, hardware profile, the API's evidence."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reconciler.cli import show
from reconciler.cli.session import secret
from reconciler.model import hardware
from reconciler.model.bundle import BUNDLE_FIELDS
from reconciler.model.errors import Problem, Refusal
from reconciler.runs.reach import Reach, Work

# The hardware class that this product is for; another host is named by --profile or by its node.
DEFAULT_PROFILE = "xe9680l-h200"

_CODE = re.compile(r"[a-z][a-z0-9_]{0,63}")

Record = dict[str, Any]


@dataclass(frozen=True)
class Api:
    """Where the reconciler answers and as whom; without token file or node id nothing is asked."""

    base: str
    token_file: Path | None
    node_id: str


@dataclass(frozen=True)
class Known:
    """What the reconciler knows of the host. topology {}: it was not asked.

    own: its place on the fabric, as its node's record has it. maas_tags: as the record has them.
    """

    profile: str = ""
    slots: list[Record] = field(default_factory=list)
    topology: Record = field(default_factory=dict)
    own: Record = field(default_factory=dict)
    maas_tags: list[str] | None = None


def ask(api: Api) -> Known:
    """The node's profile, approved slots and latest discovery.

    Evidence that was asked for and cannot be had is a failed check with the reason, not a warning:
    a wrong token must not look like none.
    """
    if api.token_file is None or not api.node_id:
        return Known()
    # The HTTP library takes longer to import than most commands to run.
    from reconciler.client import Client

    try:
        client = Client(api.base, secret(api.token_file, "name the file with --api-token-file"))
        node = f"/admin/nodes/{api.node_id}"
        slots = list(client.items(f"{node}/resource-slots"))
        document = client.get(f"{node}/slice-topology/discovery")["document"]
        record = client.get(node)
        profile, own = str(record["profile"]), {name: record[name] for name in hardware.OWN}
        tags = record["maas_tags"]
    except (Problem, ValueError, LookupError, TypeError) as refused:
        code = refused.code if isinstance(refused, Problem) else "api_answer_unreadable"
        show.line(f"no evidence from the API: {refused}")
        reasons = [code] if _CODE.fullmatch(code) else ["api_refused"]
        return Known(topology={"source": "api", "completed": False, "blockers": reasons})
    return Known(profile, [_bundle(slot) for slot in slots], _topology(document), own, tags)


def work(
    playbook: str, kind: str, profile: str, own: Record | None = None, /, **variables: Any
) -> Work:
    """A piece of work with the hardware profile in full, and what is the host's own over it."""
    from reconciler.profiles import hardware_profile
    from reconciler.settings import Settings

    shared = hardware_profile(Settings().profiles_dir, profile or DEFAULT_PROFILE)
    resolved = hardware.node_profile(shared, own or {})
    return Work(playbook, kind, {"slice_profile": resolved, **variables})


def play(what: Work, reach: Reach) -> Record:
    """The evidence of the playbook; progress goes to standard error."""
    # Ansible's runner takes seconds to load, which --help should not.
    from reconciler.runs import byhand
    from reconciler.settings import Settings

    try:
        return byhand.play(what, reach, Settings().collections_path, _tell)
    except Refusal as refused:
        raise _problem(refused) from refused


def read_json(file: Path, code: str, expected: str, remedy: str) -> Any:
    """What an operator's file says; Problem `code` when it cannot be read."""
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


def slots_of(file: Path | None) -> list[Record]:
    """Approved bundles from a file, for a host whose reconciler cannot be asked."""
    if file is None:
        return []
    found = read_json(
        file,
        "slots_unreadable",
        "a JSON list of slot bundles",
        "save `gpuaas slots list NODE --output json`",
    )
    rows = found if isinstance(found, list) else []
    return [_bundle(row) for row in rows if isinstance(row, Mapping)]


def _tell(task: str) -> None:
    show.line(f"  {task}")


def _problem(refused: Refusal) -> Problem:
    told = refused.told()
    return Problem(
        told["code"], 422, expected=told["expected"], found=told["found"], remedy=told["remedy"]
    )


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
