"""`gpuaas` as people type it, against the API of a test's own service."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from reconciler import client
from reconciler.cli.main import main
from reconciler.db.engine import transaction
from reconciler.model.states import TaskState
from reconciler.records import queue
from tests.standin.service import Manager
from tests.unit.reconciler.api.conftest import databases, new, prepared, selling
from tests.unit.reconciler.api.stack import ACT, Stack

__all__ = ["Gpuaas", "databases", "gpuaas", "new", "prepared", "selling"]


class Gpuaas:
    """Runs commands; `status`, `out` and `err` belong to the last command."""

    def __init__(self, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._patch = patch
        self.status = 0
        self.out = ""
        self.err = ""

    def __call__(self, *words: str) -> str:
        try:
            main(words)
            self.status = 0
        except SystemExit as end:
            self.status = int(end.code or 0)
        self.out, self.err = self._capsys.readouterr()
        return self.out

    def at(self, stack: Stack, who: str = "admin") -> Gpuaas:
        """Talk to this service, as this caller."""
        file = stack.settings.state_dir / f"{who}.token"
        file.write_text(stack.secrets[who] + "\n")
        self._patch.setenv("GPUAAS_TOKEN_FILE", str(file))
        http = stack.client(who, base="/")
        self._patch.setattr("reconciler.client.httpx.Client", lambda **_options: http)
        return self

    def leading(self, stack: Stack, manager: Manager, tend: Callable[[Any, Any], None]) -> None:
        """Talk to this service with a stand-in; its leader takes a turn while a command waits."""
        real = httpx.Client
        stack.settings = stack.settings.model_copy(update=manager.settings)

        def turn(_seconds: float) -> None:
            # The command's own connection is patched into the library.
            with self._patch.context() as patch:
                patch.setattr(httpx, "Client", real)
                tend(stack.engine, stack.settings)

        self._patch.setattr(time, "sleep", turn)
        self.at(stack)

    def ending(self, stack: Stack, act: Callable[[Any, Any], dict[str, Any]]) -> Gpuaas:
        """Tasks end at once: `act(conn, task)` gives the result, or the error under "error"."""

        def wait(api: client.Client, task_id: str, **options: Any) -> Any:
            if "on_progress" in options:
                options["on_progress"](api.get(f"/admin/tasks/{task_id}"))
            task = stack.lease()
            with transaction(stack.engine) as conn:
                result = act(conn, task)
                error = result.pop("error", None)
                state = TaskState.FAILED if error else TaskState.SUCCEEDED
                held = (task.id, task.lease_token)
                queue.finish(conn, *held, state, ACT, result=result, error=error)
            return api.get(f"/admin/tasks/{task_id}")

        self._patch.setattr(client.Client, "wait", wait)
        return self


@pytest.fixture
def gpuaas(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Gpuaas:
    """The command, with nothing configured."""
    for name in ("GPUAAS_API", "GPUAAS_TOKEN_FILE", "GPUAAS_STATE_DIR", "GPUAAS_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    return Gpuaas(capsys, monkeypatch)
