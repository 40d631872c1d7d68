"""The claims bench: its figures; it leaves out its peer only on request."""

from __future__ import annotations

import json
import stat
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench import claims
from tests.bench.fleet import openstack
from tests.postgresql import Server

SERVER = Server(folder=Path("/none"), binaries=Path("/none"), prefix=(), options="")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The peer is not installed; the pip of a new environment runs this script."""
    home = tmp_path / "placement"
    monkeypatch.setattr(openstack, "HOME", home)

    def holds(script: str) -> None:
        def create(folder: Path, *, with_pip: bool, clear: bool) -> None:
            assert with_pip and clear, "what was left of another try is no part of it"
            _program(folder / "bin" / "pip", script)

        monkeypatch.setattr(venv, "create", create)

    return holds


def test_its_figures_have_the_names_that_were_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"ours_per_s": 300.0, "p50_ms": 10.0}
    peer = {"placement_per_s": 10.0, "p50_ms": 100.0}
    for name in ("_store", "_http"):
        monkeypatch.setattr(claims, name, lambda *_: dict(figures))
    monkeypatch.setattr(claims, "_peer", lambda *_: peer)
    monkeypatch.setattr(claims, "pgbench", lambda *_, **__: 1000.0)
    monkeypatch.setattr(claims, "profile", lambda *_: {"where_ms": {}})
    results = claims.measure(SERVER, claims.arguments([]))
    against_peer = {"ours_per_s", "placement_per_s", "ratio", "where_ms"}
    assert set(results) == {"claims_store", "claims_http_512", "claims_http_12800"}
    assert against_peer <= set(results["claims_http_512"])
    assert against_peer | {"p50_growth"} <= set(results["claims_http_12800"])
    assert {"ours_per_s", "pgbench_per_s", "ratio"} <= set(results["claims_store"])
    assert [result["ratio"] for result in results.values()] == [0.3, 30.0, 30.0]
    alone = claims.measure(SERVER, claims.arguments(["--no-peer"]))
    assert "placement_per_s" not in alone["claims_http_512"]


def test_a_missing_peer_is_installed_once(tmp_path: Path, index: Callable[[str], None]) -> None:
    calls = tmp_path / "asked"
    index(
        f'echo "$@" >> {calls}\n'
        # The peer needs all three packages.
        'printf \'#!/bin/sh\\n[ "$2" = "import gunicorn, placement, psycopg2" ]\\n\''
        ' > "${0%pip}python" && chmod +x "${0%pip}python"\n'
    )
    assert not openstack.is_installed()
    openstack.install()
    assert openstack.is_installed()
    openstack.install()
    assert calls.read_text().split() == ["install", "--quiet", *openstack.PACKAGES]


def test_without_its_peer_it_measures_nothing_and_says_what_to_do(
    tmp_path: Path,
    index: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    index("echo 'ERROR: no index' >&2; exit 1\n")
    monkeypatch.setattr(claims, "running", lambda **_: pytest.fail("a server was started"))
    output = tmp_path / "bench.json"
    output.write_text(json.dumps({"clone": 1}))
    assert claims.main(["--output", str(output)]) == 1
    stderr = capsys.readouterr().err
    assert "ERROR: no index" in stderr and "--no-peer" in stderr
    assert json.loads(output.read_text()) == {"clone": 1}


def _program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(stat.S_IRWXU)
