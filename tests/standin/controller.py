"""Stand-in AWX of `awx.py` as a process, with its own certificate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reconciler.runs.awx.client import AwxAccess
from tests.standin.bmc import ask, listening

# Canary: no output, log or file of a test may contain it.
TOKEN = "canary-9be2d1-do-not-print"


@dataclass(frozen=True)
class Controller:
    """ca_file: verifies its certificate. token_file: holds the accepted token."""

    port: int
    ca_file: Path
    token_file: Path

    @property
    def access(self) -> AwxAccess:
        return AwxAccess(self.url, self.token_file, self.ca_file)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def begin(self, **faults: Any) -> None:
        """Reset it with the faults of `awx.Faults`."""
        self.token_file.write_text(f"{TOKEN}\n")
        self._ask("POST", "/standin/begin", {"token": TOKEN, **faults})

    def change(self, **faults: Any) -> None:
        self._ask("POST", "/standin/change", faults)

    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = self._ask("GET", "/standin/record")
        return record

    def objects(self) -> dict[str, Any]:
        """Objects of an AWX that began `empty`."""
        objects: dict[str, Any] = self._ask("GET", "/standin/objects")
        return objects

    def spoil(self, name: str, **fields: Any) -> None:
        """Change a job template as a person would."""
        self._ask("PATCH", self._path(name), fields)

    def delete(self, name: str) -> None:
        """Delete a job template as a person would."""
        self._ask("DELETE", self._path(name))

    def _path(self, name: str) -> str:
        templates = self.objects()["job_templates"]
        (number,) = (template["id"] for template in templates if template["name"] == name)
        return f"/api/v2/job_templates/{number}/"

    def jobs(self) -> list[dict[str, Any]]:
        return list(self.record()["jobs"])

    def launch(self, template: int, **variables: Any) -> None:
        """Launch a job as another user would."""
        path = f"/api/v2/job_templates/{template}/launch/"
        self._ask("POST", path, {"extra_vars": variables, "limit": "x", "timeout": 9})

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return ask(self.port, self.ca_file, method, path, body or {}, **headers)


@contextmanager
def standing(folder: Path) -> Iterator[Controller]:
    """An AWX that listens until the end of the block."""
    with listening(folder, "awx") as (port, certificate):
        yield Controller(port, certificate, folder / "token")
