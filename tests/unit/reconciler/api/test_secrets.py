"""Secrets of the API are shown once: in no later answer, log, event, metric or row."""

from __future__ import annotations

import logging
import time
from hashlib import sha256

import pytest

from reconciler.db.engine import transaction
from reconciler.records import images
from reconciler.trust import ca, downloads
from tests.unit.reconciler.api.refusals import kept
from tests.unit.reconciler.api.stack import NODE, Stack, discovery
from tests.unit.reconciler.api.test_security import CLOSED, names

__all__ = ["names"]
pytestmark = pytest.mark.covers("P3")


def planted(stack: Stack) -> list[str]:
    """Every secret that the service has handed out, or holds."""
    admin = stack.client("admin")
    issued = admin.post("admin/tokens", json={"role": "platform-admin", "name": "once"}).json()
    enrolment = admin.post(f"admin/nodes/{NODE}/enrollment-token").json()["token"]
    sent = {**discovery()["identity"], "node_id": NODE, "hostname": "lab"}
    used = stack.client().post(f"nodes/{NODE}/enrol", json={**sent, "token": enrolment})
    assert used.status_code == 200, used.text
    unused = admin.post(f"admin/nodes/{NODE}/enrollment-token").json()["token"]
    trust = ca.open_trust(stack.settings.state_dir)
    ca.operator_identity(trust)
    keys = [path for path in trust.directory.iterdir() if "PRIVATE KEY" in path.read_text()]
    assert len(keys) >= 3
    return [
        *stack.secrets.values(),
        *(issued["token"], enrolment, unused),
        *(path.read_text().splitlines()[1] for path in keys),
        *(path.read_text().splitlines()[2] for path in keys),
        image_link(stack).partition("token=")[2],
    ]


def image_link(stack: Stack) -> str:
    file = stack.settings.images_dir / "image.raw"
    file.write_bytes(b"x")
    body = {"name": "i", "version": "1", "digest": f"sha256:{sha256(b'x').hexdigest()}"}
    body |= {"url": file.as_uri(), "size_bytes": 1}
    image = stack.client("admin").post("admin/images", json=body).json()
    with transaction(stack.engine) as conn:
        key = images.link_key(conn)
    return downloads.url(stack.settings, image, key, time.time())


def test_a_secret_of_the_api_is_shown_once(
    selling: Stack, names: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Every readable answer of the contract, the metrics, the log of all of it, and every row."""
    with caplog.at_level(logging.DEBUG):
        secrets = planted(selling)
        assert len(secrets) > 12 and min(map(len, secrets)) > 30
        link = image_link(selling)
        assert selling.client().get(link).status_code == 200
        seen = {}
        for verb, path, operation in CLOSED:
            if verb == "get" and operation["operationId"] != "tasks_events":
                answer = selling.client("admin").get("http://test" + path.format(**names))
                seen[path] = f"{answer.headers} {answer.text}"
        wrong = selling.client("admin").post("admin/tokens", json={"role": secrets[0]})
        assert wrong.status_code == 422
        seen["a refusal"] = wrong.text
    assert any("gpuaas_" in text for path, text in seen.items() if path.endswith("/metrics"))
    ours = (row for row in caplog.records if row.name != "httpx")  # the client of the test
    seen["log"] = "\n".join(row.getMessage() for row in ours)
    seen["rows"] = str(kept(selling))
    assert "POST /api/v1/admin/tokens 201" in seen["log"]
    assert [
        where for where, text in seen.items() if any(secret in text for secret in secrets)
    ] == []
