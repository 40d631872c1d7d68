"""The run contract: the variables of each playbook and the result document.

The schemas lie in contracts/runs. The reconciler is checked against them here, the playbooks in
tests/contract.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, cast

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from reconciler.model.recovery import UNKNOWN_EFFECT
from reconciler.model.storable import STORABLE, unstorable
from reconciler.runs.spec import RunError
from reconciler.shipped import PROJECT

DIRECTORY = PROJECT / "contracts" / "runs"
_SUFFIX = ".schema.json"
# Schemas that belong to every playbook.
_SHARED = frozenset({"common", "result"})
# Each playbook has a schema, and only playbooks with a schema can be run.
PLAYBOOKS = tuple(
    sorted({file.name.removesuffix(_SUFFIX) for file in DIRECTORY.glob(f"*{_SUFFIX}")} - _SHARED)
)

# Error code of a result that cannot be stored; the effect of its run on the host is unknown.
UNREADABLE = "outcome_unreadable"
# Error code of a result in a form that the contract does not allow. Its effect is unknown too.
INVALID = "result_invalid"
# Errors of which the first to name is chosen. Each takes kilobytes, and a host may make
# millions.
_MOST_ERRORS = 50


class ContractError(RunError):
    """A document breaks the run contract; `field` is the dotted path of the offending value."""

    def __init__(self, code: str, *, field: str, expected: str, found: str, remedy: str) -> None:
        self.field = field
        super().__init__(code, expected=f"{field}: {expected}", found=found, remedy=remedy)


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
    """The document itself when it is a valid slice_result that can be stored."""
    if (field := unstorable(document)) is not None:
        raise ContractError(
            UNREADABLE,
            field=field,
            expected=STORABLE,
            found="something else",
            remedy=UNKNOWN_EFFECT,
        )
    _check(INVALID, "result", document)
    return cast("dict[str, Any]", document)


def schema(name: str) -> dict[str, Any]:
    """The schema of a playbook, or `result` or `common`, or `../discovery`, its part."""
    text = (DIRECTORY / f"{name}{_SUFFIX}").read_text(encoding="utf-8")
    return cast("dict[str, Any]", json.loads(text))


def _check(code: str, name: str, document: object) -> None:
    errors = list(islice(_validator(name).iter_errors(document), _MOST_ERRORS))
    if not errors:
        return
    first = _deepest(min(errors, key=lambda error: len(error.absolute_path)))
    field = ".".join(str(part) for part in first.absolute_path) or "(document)"
    raise ContractError(
        code,
        field=field,
        expected=f"{first.validator} {json.dumps(first.validator_value, default=str)[:300]}",
        found=repr(first.instance)[:300],
        remedy=f"compare with contracts/runs/{name}{_SUFFIX}: {first.message[:300]}",
    )


def _deepest(error: ValidationError) -> ValidationError:
    """The actual error inside an `allOf` or `anyOf`."""
    while error.context:
        error = max(error.context, key=lambda inner: len(inner.absolute_path))
    return error


def _pattern(
    _validator: object, pattern: str, instance: object, _schema: object
) -> Iterator[ValidationError]:
    """Patterns as JSON Schema defines them: Python's `$` would accept a trailing newline."""
    if isinstance(instance, str) and not re.search(re.sub(r"\$$", r"\\Z", pattern), instance):
        yield ValidationError(f"{instance[:100]!r} does not match {pattern!r}")


def _of_bounded(keyword: str, bound: str) -> Callable[..., Iterator[ValidationError]]:
    """The keyword, which does not look into a value that is too large: a host may have filled it
    with a million entries.
    """

    def validate(
        validator: Any, rule: Any, instance: Any, schema: Mapping[str, Any]
    ) -> Iterator[ValidationError]:
        sized = isinstance(instance, list | Mapping)
        if not sized or len(instance) <= schema.get(bound, len(instance)):
            yield from Draft202012Validator.VALIDATORS[keyword](validator, rule, instance, schema)

    return validate


def _max_bytes(
    _validator: object, limit: int, instance: object, _schema: object
) -> Iterator[ValidationError]:
    """Bound of a whole value, which no keyword of JSON Schema can give."""
    if len(json.dumps(instance)) > limit:
        yield ValidationError(f"longer than {limit} bytes as JSON")


@functools.cache
def _validator(name: str) -> Draft202012Validator:
    registry: Registry[Any] = Registry()
    for part in ("common", "../discovery"):
        contents = schema(part)
        # What names its dialect would be judged by it, without the keywords below.
        del contents["$schema"]
        registry = registry.with_resource(part + _SUFFIX, DRAFT202012.create_resource(contents))
    # jsonschema does not annotate this function.
    extended: Callable[..., type[Draft202012Validator]] = extend
    strict = extended(
        Draft202012Validator,
        {
            "pattern": _pattern,
            "maxBytes": _max_bytes,
            "items": _of_bounded("items", "maxItems"),
            "uniqueItems": _of_bounded("uniqueItems", "maxItems"),
            "additionalProperties": _of_bounded("additionalProperties", "maxProperties"),
            "propertyNames": _of_bounded("propertyNames", "maxProperties"),
        },
    )
    return strict(schema(name), registry=registry)
