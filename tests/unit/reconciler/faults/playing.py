"""The repository's own playbooks, played step by step against a model of a host.

The playbooks are read, not copied: a step that is added to them is played, and has to survive every
fault, without a change here. A construct that this reader does not know is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any

import jinja2
import yaml
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.modules import slice_handover, slice_vm
from jinja2.runtime import Context, Undefined

from reconciler.runs.events import ON_CONTROLLER

ROOT = Path(__file__).resolve().parents[4]
OURS = "gpuaas.slice."
CORE = "ansible.builtin."
OMIT = object()
REBOOT = f"{CORE}reboot"
_PLAIN = {
    *("name", "when", "vars", "register", "check_mode", "failed_when"),
    *("loop", "loop_control"),
}

# Modules that do several steps in one call; each of them may go wrong by itself.
PARTS: Mapping[str, Callable[[Mapping[str, Any]], Iterable[_change.Part]]] = {
    "slice_vm": slice_vm.parts,
    "slice_handover": slice_handover.parts,
}

Document = dict[str, Any]
Act = Callable[[str, Document, bool], Document]


@dataclass(frozen=True)
class Step:
    """A module of ours, or a part of it, about to run. rescuing: its play has failed already."""

    name: str
    module: str
    rescuing: bool


class Killed(BaseException):
    """The process is gone, at this instant."""


@dataclass
class Failed(Exception):
    """A task failed; result: as Ansible registers it."""

    task: str
    result: Document


# A driver's answer to a step: how to do it. None: just do it.
How = Callable[[Callable[[], Document]], Document]
Playing = Generator[Step, How | None, Document]


def play(playbook: str, given: Mapping[str, Any], act: Act) -> Playing:
    """Yields each step before it is done; returns `{"ok", "result"}`, the result from set_stats."""
    (the_play,) = read(ROOT / "playbooks" / f"{playbook}.yml")
    scope = Scope(given)
    scope.layers.append(the_play.get("vars", {}))
    run = _Run(act, scope)
    try:
        yield from run.tasks(the_play["tasks"], ROOT / "playbooks")
    except Failed:
        return {"ok": False, "result": run.stats.get("slice_result")}
    return {"ok": True, "result": run.stats.get("slice_result")}


def steps_of(playbook: str) -> set[tuple[str, str]]:
    """Every task of ours that the playbook can reach, by name and module, whatever its `when`."""
    (the_play,) = read(ROOT / "playbooks" / f"{playbook}.yml")
    return set(_reachable(the_play["tasks"], ROOT / "playbooks"))


def rescue_of(playbook: str) -> set[tuple[str, str]]:
    """Those of them that only a failure leads to."""
    (the_play,) = read(ROOT / "playbooks" / f"{playbook}.yml")
    rescues = [step for task in the_play["tasks"] for step in task.get("rescue", ())]
    return set(_reachable(rescues, ROOT / "playbooks"))


def round_trips(playbook: str) -> int:
    """Commands over SSH of a run that nothing goes wrong in: its tasks that reach the host.

    With pipelining each is a single command.
    """
    (the_play,) = read(ROOT / "playbooks" / f"{playbook}.yml")
    assert the_play["gather_facts"] is False
    return sum(1 for action in _actions(the_play["tasks"]) if action not in ON_CONTROLLER)


def _actions(tasks: Iterable[Document]) -> Iterable[str]:
    for task in tasks:
        if "block" in task:
            yield from _actions(task["block"])
            continue
        action, arguments = _action(task)
        yield action
        if action == f"{CORE}include_tasks":
            yield from _actions(read(ROOT / "playbooks" / arguments))


@cache
def read(path: Path) -> Any:
    """A YAML file of the collection."""
    return yaml.safe_load(path.read_text())


class Scope:
    """Variables. Values given to the run are data; others are templates until they are used."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = dict(given) | {"omit": OMIT}
        self.registered: Document = {}
        self.layers: list[Mapping[str, Any]] = []

    def get(self, name: str) -> Any:
        for variables in (self.given, self.registered):
            if name in variables:
                return variables[name]
        for layer in reversed(self.layers):
            if name in layer:
                return self.value(layer[name])
        return _MISSING

    def value(self, raw: Any) -> Any:
        """With all templates in it resolved."""
        if isinstance(raw, str):
            return self._text(raw)
        if isinstance(raw, list):
            return [self.value(item) for item in raw]
        if isinstance(raw, dict):
            resolved = {key: self.value(item) for key, item in raw.items()}
            return {key: item for key, item in resolved.items() if item is not OMIT}
        return raw

    def true(self, conditions: Any) -> bool:
        """All of a `when`."""
        if isinstance(conditions, bool):
            return conditions
        listed = [conditions] if isinstance(conditions, str) else conditions
        return all(bool(_expression(item)(scope=self)) for item in listed)

    def _text(self, text: str) -> Any:
        if "{{" not in text:
            return text
        inner = text.strip()
        if inner.startswith("{{") and inner.endswith("}}") and inner.count("{{") == 1:
            value = _expression(inner[2:-2])(scope=self)
            if isinstance(value, Undefined):
                raise jinja2.UndefinedError(f"{text}: {value._undefined_name}")
            return value
        return _template(text).render(scope=self)


_MISSING = object()


class _Lazy(Context):
    """Names are looked up in the scope when they are used, as Ansible does."""

    def resolve_or_missing(self, key: str) -> Any:
        scope = self.parent.get("scope")
        if isinstance(scope, Scope) and (value := scope.get(key)) is not _MISSING:
            return value
        return super().resolve_or_missing(key)


def _listed(of: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(of)
    def listed(*given: Any, **options: Any) -> list[Any]:
        return list(of(*given, **options))

    return listed


class _Missing(jinja2.StrictUndefined):
    """A missing value holds only missing values: `a.b.c | default(…)` works, as in Ansible."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, _key: object) -> Any:
        return self


def _combine(old: Any, other: Any, *, recursive: bool = False) -> Any:
    """As Ansible combines: the second wins, and with recursive only in the innermost dicts."""
    if not (isinstance(old, dict) and isinstance(other, dict)):
        return other
    deeper = {name: _combine(old[name], other[name], recursive=True) for name in old.keys() & other}
    return {**old, **other, **(deeper if recursive else {})}


# Nothing of it is ever shown in a browser.
_JINJA = jinja2.Environment(undefined=_Missing)  # noqa: S701
_JINJA.context_class = _Lazy
_JINJA.filters["bool"] = lambda value: value is True or str(value).lower() in {"true", "yes", "1"}
for _name in ("map", "select", "selectattr", "reject", "rejectattr"):
    # Jinja gives generators; Ansible makes lists of them.
    _JINJA.filters[_name] = _listed(_JINJA.filters[_name])
_JINJA.filters["combine"] = _combine
_JINJA.tests["failed"] = lambda value: bool(value.get("failed"))


@cache
def _expression(text: str) -> Any:
    return _JINJA.compile_expression(text, undefined_to_none=False)


@cache
def _template(text: str) -> jinja2.Template:
    return _JINJA.from_string(text)


class _Run:
    def __init__(self, act: Act, scope: Scope) -> None:
        self._act = act
        self._scope = scope
        self._rescuing = False
        self.stats: Document = {}

    def tasks(self, tasks: Iterable[Document], folder: Path) -> Generator[Step, How | None, None]:
        for task in tasks:
            self._scope.layers.append(task.get("vars", {}))
            try:
                yield from self._task(task, folder)
            finally:
                self._scope.layers.pop()

    def _task(self, task: Document, folder: Path) -> Generator[Step, How | None, None]:
        if not self._scope.true(task.get("when", True)):
            if "register" in task:
                self._scope.registered[task["register"]] = {"skipped": True, "changed": False}
            return
        if "block" in task:
            yield from self._block(task, folder)
            return
        action, arguments = _action(task)
        if action == f"{CORE}include_tasks":
            file = folder / self._scope.value(arguments)
            yield from self.tasks(
                read(file), file.parent if file.parent.name == "tasks" else folder
            )
        elif action == f"{CORE}validate_argument_spec":
            # The given values follow the contract, which a test of the contract compares.
            return
        elif action == f"{CORE}set_stats":
            self.stats |= self._scope.value(arguments["data"])
        elif action == f"{CORE}fail":
            raise Failed(task["name"], {"msg": self._scope.value(arguments["msg"])})
        elif action.startswith(OURS) or action == REBOOT:
            yield from self._module(task, action.rpartition(".")[2], arguments)
        else:
            raise NotImplementedError(f"{action} in {task['name']!r}")

    def _block(self, task: Document, folder: Path) -> Generator[Step, How | None, None]:
        try:
            yield from self.tasks(task["block"], folder)
        except Failed as failed:
            if "rescue" not in task:
                raise
            self._rescuing = True
            self._scope.registered["ansible_failed_task"] = {"name": failed.task}
            self._scope.registered["ansible_failed_result"] = failed.result
            yield from self.tasks(task["rescue"], folder)

    def _module(
        self, task: Document, module: str, arguments: Document
    ) -> Generator[Step, How | None, None]:
        if "loop" not in task:
            result = yield from self._call(task, module, arguments)
        else:
            results = []
            for item in self._scope.value(task["loop"]):
                self._scope.registered["item"] = item
                done = yield from self._call(task, module, arguments)
                results.append({**done, "item": item})
            result = {"results": results, "failed": any(each.get("failed") for each in results)}
        if task.get("failed_when") is False:
            result = {**result, "failed": False}
        if "register" in task:
            self._scope.registered[task["register"]] = result
        if result.get("failed"):
            raise Failed(task["name"], result)

    def _call(
        self, task: Document, module: str, arguments: Document
    ) -> Generator[Step, How | None, Document]:
        params = self._scope.value(arguments)
        dry = bool(task.get("check_mode", False))
        if module not in PARTS:
            return (yield from self._act_once(task["name"], module, params, dry))
        result: Document = {}
        for part in PARTS[module](params):
            done = yield from self._act_once(
                task["name"], part.name, dict(part.params(params, result)), dry
            )
            result |= done
            if done.get("failed"):
                result["part"] = part.name
                break
        return result

    def _act_once(
        self, name: str, module: str, params: Document, dry: bool
    ) -> Generator[Step, How | None, Document]:
        def do() -> Document:
            return self._act(module, params, dry)

        how = yield Step(name, module, self._rescuing)
        try:
            return do() if how is None else how(do)
        except Refusal as refusal:
            document = {
                name: getattr(refusal, name) for name in ("code", "expected", "found", "remedy")
            }
            return {"failed": True, "msg": str(refusal), "error": document}


def _steps(name: str, module: str, arguments: Document) -> Iterable[tuple[str, str]]:
    if module not in PARTS:
        return [(name, module)]
    return [(name, part.name) for part in PARTS[module](arguments)]


def _action(task: Document) -> tuple[str, Any]:
    (action,) = set(task) - _PLAIN
    return action, task[action]


def _reachable(tasks: Iterable[Document], folder: Path) -> Iterable[tuple[str, str]]:
    for task in tasks:
        if "block" in task:
            yield from _reachable(task["block"] + task.get("rescue", []), folder)
            continue
        action, arguments = _action(task)
        if action.startswith(OURS) or action == REBOOT:
            yield from _steps(task["name"], action.rpartition(".")[2], arguments)
        elif action == f"{CORE}include_tasks":
            yield from _reachable(read(folder / arguments), folder)
