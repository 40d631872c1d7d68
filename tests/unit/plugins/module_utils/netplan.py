"""Stand-in for netplan's generator, for the needs of parity; test_netplan compares it with the real
program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command

Run = Callable[..., _command.Result]


def before(run: Run) -> Run:
    """Return `run`, with netplan answered here."""

    def answer(argv: Sequence[str], **options: Any) -> _command.Result:
        if list(argv[:3]) == ["netplan", "generate", "--root-dir"]:
            return generate(Path(argv[3]))
        return run(argv, **options)

    return answer


def generate(root: Path) -> _command.Result:
    files = {file.name: file for top in ("lib", "etc", "run") for file in _of(root / top)}
    links: dict[str, Any] = {}
    for name in sorted(files):
        document = yaml.safe_load(files[name].read_text()) or {}
        for key in document:
            if key != "network":
                return _refusal(files[name], f"unknown key '{key}'")
        for link, values in (document.get("network") or {}).get("ethernets", {}).items():
            for address in values.get("addresses", []):
                if "/" not in address:
                    return _refusal(files[name], f"address '{address}' is missing /prefixlength")
                if int(address.partition("/")[2]) > 32:
                    return _refusal(files[name], f"invalid prefix length in address '{address}'")
            links[link] = values
    folder = root / "run/systemd/network"
    folder.mkdir(parents=True, exist_ok=True)
    for link, values in links.items():
        match, text = values.get("match", {}), "[Match]\n"
        if "macaddress" in match:
            text += f"PermanentMACAddress={match['macaddress']}\n"
        else:
            text += f"Name={match.get('name', link)}\n"
        text += "\n[Network]\nLinkLocalAddressing=ipv6\n"
        text += "".join(f"Address={address}\n" for address in values.get("addresses", []))
        (folder / f"10-netplan-{link}.network").write_text(text)
    return _command.Result(0, "", "")


def _of(top: Path) -> list[Path]:
    return sorted((top / "netplan").glob("*.yaml"))


def _refusal(file: Path, why: str) -> _command.Result:
    return _command.Result(1, "", f"{file}:1:1: Error in network definition: {why}\n")
