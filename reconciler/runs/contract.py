"""The run contract: the variables of each playbook and the one result document.

The schemas lie in contracts/runs; both sides are held to them, the reconciler here and the
playbooks in tests/contract.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend
from referencing import Registry, Resource

from reconciler.runs import storable as legible
from reconciler.runs.errors import ContractError
from reconciler.shipped import PROJECT

DIRECTORY = PROJECT / "contracts" / "runs"

PLAYBOOKS = (
    "firmware",
    "bootstrap",
    "prepare_runtime",
    "restore_baremetal",
    "discover",
    "transition_storage",
    "bind_topology",
    "parity",
    "cache_image",
    "provision_slice",
    "release_slice",
    "verify_absent",
    "renew_certificate",
    "reconcile_drift",
    "provision_baremetal",
    "release_baremetal",
    "managed_key",
)


def check_vars(playbook: str, variables: Mapping[str, Any]) -> None:
    """Refuse variables that the playbook's schema does not know or allow."""
    if playbook not in PLAYBOOKS:
        raise ContractError(
            "unknown_playbook",
            field="playbook",
            expected=f"one of {', '.join(PLAYBOOKS)}",
            found=playbook[:100],
            remedy="name a playbook that has a schema in contracts/runs",
        )
    _check("variables_invalid", playbook, dict(variables))


def check_result(document: object) -> dict[str, Any]:
    """The document itself when it is a valid slice_result that can be kept."""
    if (field := legible.unstorable(document)) is not None:
        raise ContractError(
            legible.UNREADABLE,
            field=field,
            expected=legible.STORABLE,
            found="something else",
            remedy="the effect on the host is unknown: verify the host before anything is freed",
        )
    _check("result_invalid", "result", document)
    return cast("dict[str, Any]", document)


def schema(name: str) -> dict[str, Any]:
    """The schema of a playbook, or `result` or `common`."""
    text = (DIRECTORY / f"{name}.schema.json").read_text(encoding="utf-8")
    return cast("dict[str, Any]", json.loads(text))


def _check(code: str, name: str, document: object) -> None:
    errors = list(_validator(name).iter_errors(document))
    if not errors:
        return
    first = _deepest(min(errors, key=lambda error: len(error.absolute_path)))
    field = ".".join(str(part) for part in first.absolute_path) or "(document)"
    raise ContractError(
        code,
        field=field,
        expected=f"{first.validator} {json.dumps(first.validator_value, default=str)[:300]}",
        found=repr(first.instance)[:300],
        remedy=f"compare with contracts/runs/{name}.schema.json: {first.message[:300]}",
    )


def _deepest(error: ValidationError) -> ValidationError:
    """What really is wrong inside an `allOf` or `anyOf`."""
    while error.context:
        error = max(error.context, key=lambda inner: len(inner.absolute_path))
    return error


def _pattern(
    _validator: object, pattern: str, instance: object, _schema: object
) -> Iterator[ValidationError]:
    """Patterns as JSON Schema means them: Python's `$` would let a trailing newline through."""
    if isinstance(instance, str) and not re.search(re.sub(r"\$$", r"\\Z", pattern), instance):
        yield ValidationError(f"{instance[:100]!r} does not match {pattern!r}")


@functools.cache
def _validator(name: str) -> Draft202012Validator:
    common = Resource.from_contents(schema("common"))
    registry: Registry[Any] = Registry().with_resource("common.schema.json", common)
    # Without annotations in jsonschema itself.
    extended: Callable[..., type[Draft202012Validator]] = extend
    strict = extended(Draft202012Validator, {"pattern": _pattern})
    return strict(schema(name), registry=registry)
