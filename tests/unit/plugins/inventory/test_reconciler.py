"""The inventory of a reconciler that lies, hangs, or sends invalid answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpuaas.slice.plugins.module_utils.core._service import LARGEST

from tests.standin.bmc import authority
from tests.standin.controller import standing
from tests.unit.plugins.inventory.inventories import NODE, answering, hosts, inventory, page, source

pytestmark = pytest.mark.covers("ECO-1", "ECO-4")

REFUSED: dict[str, tuple[Any, str]] = {
    "twice": (page(NODE, NODE), "reconciler_name_ambiguous"),
    "local": (page({**NODE, "id": "localhost"}), "reconciler_name_ambiguous"),
    "group": (page({**NODE, "id": "sellable"}), "reconciler_name_ambiguous"),
    "option": (page({**NODE, "address": "-oProxyCommand=id"}), "reconciler_invalid"),
    "template": (page({**NODE, "address": "{{ lookup('pipe', 'id') }}"}), "reconciler_invalid"),
    "user": (page({**NODE, "ssh_user": "root\nx"}), "reconciler_invalid"),
    "port": (page({**NODE, "port": True}), "reconciler_invalid"),
    "flag": (page({**NODE, "slice_scheduling": "yes"}), "reconciler_invalid"),
    "second": (page(NODE, ["no", "node"]), "reconciler_invalid"),
    "list": ([NODE], "reconciler_invalid"),
    "endless": (page(more="again"), "reconciler_invalid"),
    "portal": (b"<html>log in</html>", "reconciler_silent"),
    "deep": (b"[" * 100_000, "reconciler_silent"),
    "large": (b" " * LARGEST + json.dumps(page(NODE)).encode(), "reconciler_silent"),
    "moved": (page(NODE), "reconciler_refused"),
    "drip": (None, "reconciler_silent"),
}


def test_a_hostile_answer_gives_no_host(tmp_path: Path) -> None:
    groups = {"sellable": "gpuaas_scheduling"}
    with answering() as service:
        service.answers = {case: answer for case, (answer, _) in REFUSED.items()}
        sources = []
        for case in REFUSED:
            options = {"url": service.url(case), "timeout": 1 if case == "drip" else 20}
            sources.append(source(tmp_path, "reconciler", case, **options, groups=groups))
        done = inventory(*sources)
    assert hosts(done) == {}
    for case, (_, code) in REFUSED.items():
        lines = [line for line in done.stderr.splitlines() if f"{case}.reconciler.yml: " in line]
        assert any(f"{code}: expected" in line for line in lines), (case, done.stderr)
    # No request follows a redirect with the token.
    assert not [path for path, _ in service.calls if path.startswith("/other")]


def test_no_text_is_a_template_and_no_connection_of_another_source_changes(tmp_path: Path) -> None:
    trap = "{{ lookup('ansible.builtin.pipe', 'touch " + str(tmp_path / "trap") + "') }}"
    nodes = [
        {**NODE, "name": trap, "ansible_connection": "local", "vars": {"ansible_host": "::1"}},
        {**NODE, "id": "bastion", "address": "203.0.113.66", "port": 23},
    ]
    static = tmp_path / "a.yml"
    bastion = {"ansible_host": "192.0.2.1", "ansible_port": 2222}
    static.write_text(yaml.safe_dump({"all": {"hosts": {"bastion": bastion}}}))
    compose = {"copied": "gpuaas_name ~ ''"}
    with answering() as service:
        late = [{**NODE, "id": name, "state": "draining"} for name in ("bastion", "node-2")]
        service.answers = {"site": page(*nodes), "broken": page(*late)}
        site = source(tmp_path, "reconciler", url=service.url("site"), compose=compose)
        unmade = {"url": service.url("broken"), "compose": {"copied": "gpuaas_none.x"}}
        broken = source(tmp_path, "reconciler", "broken", strict=True, **unmade)
        done = inventory(static, site, broken)
        listed = hosts(done)
    assert not (tmp_path / "trap").exists()
    text = [
        v["__ansible_unsafe"] if isinstance(v, dict) else v for v in (listed["node-1"]["copied"],)
    ]
    assert text == [trap]
    assert "ansible_connection" not in listed["node-1"]
    assert listed["node-1"]["ansible_host"] == "192.0.2.7"
    assert listed["bastion"]["ansible_host"] == "192.0.2.1"
    assert listed["bastion"]["ansible_port"] == 2222
    # A source that is refused while its hosts are added leaves no values.
    assert "Could not set copied" in done.stderr
    assert (listed["bastion"]["gpuaas_state"], "node-2" in listed) == ("ready", False)
    assert "state_draining" not in json.loads(done.stdout)


def test_a_login_of_netrc_replaces_no_token(tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("default login somebody password other-word\n")
    netrc.chmod(0o600)
    with answering() as service:
        service.answers = {"site": page(NODE)}
        site = source(tmp_path, "reconciler", url=service.url("site"))
        assert list(hosts(inventory(site, NETRC=str(netrc)))) == ["node-1"]
    ((_, headers),) = service.calls
    assert headers["Authorization"] == f"Bearer {'t' * 20}"


def test_the_cache_is_of_one_service_and_is_checked_like_an_answer(tmp_path: Path) -> None:
    cache = {
        "cache": True,
        "cache_plugin": "ansible.builtin.jsonfile",
        "cache_connection": str(tmp_path / "cache"),
        "cache_timeout": 600,
    }
    with answering() as service:
        service.answers = {"site": page(NODE), "other": page({**NODE, "id": "node-2"})}
        site = source(tmp_path, "reconciler", url=service.url("site"), **cache)
        first = hosts(inventory(site))
        assert hosts(inventory(site)) == first
        assert len(service.calls) == 1
        other = source(tmp_path, "reconciler", url=service.url("other"), **cache)
        assert set(hosts(inventory(other))) == {"node-2"}
        (entry,) = (tmp_path / "cache").iterdir()
        entry.write_text(entry.read_text().replace("192.0.2.7", "-oProxyCommand=id"))
        assert hosts(inventory(other)) == {}


def test_only_the_named_authority_vouches_for_the_service(tmp_path: Path) -> None:
    """The stand-in for AWX serves HTTPS and refuses the token."""
    other, _ = authority(tmp_path, "other", "IP:127.0.0.1")
    with standing(tmp_path) as controller:
        done = inventory(
            source(
                tmp_path,
                "reconciler",
                "right",
                url=controller.url,
                ca_file=str(tmp_path / "awx.pem"),
            ),
            source(tmp_path, "reconciler", "wrong", url=controller.url, ca_file=str(other)),
        )
    assert hosts(done) == {}
    assert "right.reconciler.yml: reconciler_refused" in done.stderr
    assert "HTTP 401" in done.stderr
    assert "wrong.reconciler.yml: reconciler_silent" in done.stderr
    assert "certificate verify failed" in done.stderr
    assert "t" * 20 not in done.stderr
