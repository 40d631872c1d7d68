"""`ansible-inventory` over the collection's plugins, and a service that answers anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[4]


NODE: dict[str, Any] = {
    "id": "node-1",
    "name": "node-1",
    "address": "192.0.2.7",
    "port": 22,
    "ssh_user": "ubuntu",
    "state": "ready",
    "mode": "slice",
    "profile": "xe9680l-h200",
    "pool": "default",
    "region": "",
    "health_state": "healthy",
    "fabric_interface": "",
    "fabric_address": "",
    "slice_scheduling": True,
    "reboot_required": False,
    "reinstall_required": False,
    "maas_tags": None,
}


def page(*nodes: Any, more: Any = None) -> dict[str, Any]:
    """An answer of the reconciler."""
    return {"items": list(nodes), "next": more}


def machine(name: str, **fields: Any) -> dict[str, Any]:
    """A machine as MAAS shows it."""
    return {
        "system_id": f"{name}id",
        "hostname": name,
        "fqdn": f"{name}.maas",
        "status": 6,
        "tag_names": ["gpuaas-slice", "virtual"],
        "ip_addresses": ["172.16.0.4", "10.20.0.4"],
        "hardware_uuid": "4c4c4544-0051-3810-8057-b7c04f4e4733",
        "zone": {"id": 1, "name": "rack-1"},
        "pool": {"id": 0, "name": "default"},
        "locked": False,
        **fields,
    }


def deployed(name: str, **fields: Any) -> dict[str, Any]:
    return machine(name, status_name="Deployed", **fields)


def environment(**variables: str) -> dict[str, str]:
    """That of an Ansible program with our collection, and without settings of this machine."""
    return {
        **{name: value for name, value in os.environ.items() if "ANSIBLE" not in name},
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "build" / "collections"),
        **variables,
    }


def inventory(*sources: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The real program; unreadable sources are warnings on its standard error."""
    words = [word for source in sources for word in ("-i", str(source))]
    enabled = {"ANSIBLE_INVENTORY_ENABLED": "auto,yaml", "COLUMNS": "10000"}
    return subprocess.run(
        [str(Path(sys.executable).parent / "ansible-inventory"), *words, "--list"],
        env=environment(**enabled, **variables),
        cwd=sources[0].parent,
        capture_output=True,
        text=True,
        check=False,
    )


def hosts(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The variables of each host, without the mark of texts that are no templates."""
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout, object_hook=lambda value: value.get("__ansible_unsafe", value))
    variables: dict[str, Any] = output["_meta"]["hostvars"]
    return variables


def source(folder: Path, plugin: str, case: str = "site", **options: Any) -> Path:
    """A source file. The credential of its options is a file beside it."""
    token = folder / f"{plugin}-token"
    token.write_text({"reconciler": "t" * 20, "maas": "c:t:s"}[plugin] + "\n")
    path = folder / f"{case}.{plugin}.yml"
    values = {"token_file": str(token), **options}
    path.write_text(yaml.safe_dump({"plugin": f"gpuaas.slice.{plugin}", **values}))
    return path


@dataclass
class Anything:
    """answers: by the first part of the path, a JSON value or bytes. calls: paths and headers."""

    port: int = 0
    answers: dict[str, Any] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def url(self, case: str) -> str:
        return f"http://127.0.0.1:{self.port}/{case}"


@contextmanager
def answering() -> Iterator[Anything]:
    """The service, in threads of this process. The case `drip` never ends its headers."""
    service = Anything()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

        def do_GET(self) -> None:
            service.calls.append((self.path, dict(self.headers)))
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            case = self.path.split("/")[1]
            if case == "drip":
                with suppress(OSError):
                    for _ in range(100):
                        self.wfile.write(b"HTTP/1.1 200 OK\r\n"[:1])
                        time.sleep(0.1)
                return
            answer = service.answers[case]
            body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(302 if case == "moved" else 200)
            self.send_header("Location", f"http://127.0.0.1:{service.port}/other/")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        service.port = int(server.server_address[1])
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield service
        server.shutdown()
