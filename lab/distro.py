"""Linux distribution and package mirror of this machine, from which the images are made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lab.command import LabError

APT = Path("/etc/apt")
KEYRINGS = Path("/usr/share/keyrings")


@dataclass(frozen=True)
class Distro:
    """A supported distribution, in the terms of mmdebstrap."""

    id: str
    suite: str
    components: str
    mirror: str
    keyring: str
    # Further one-line sources.
    more: tuple[str, ...] = ()

    @property
    def sources(self) -> list[str]:
        """Return one-line apt sources: the release, its updates, and further ones."""
        option = f"[signed-by={self.keyring}]"
        return [
            f"deb {option} {self.mirror} {self.suite} {self.components}",
            f"deb {option} {self.mirror} {self.suite}-updates {self.components}",
            *self.more,
        ]


SUPPORTED = {
    ("debian", "bookworm"): ("main", "debian-archive-keyring.gpg"),
    ("ubuntu", "noble"): ("main universe", "ubuntu-archive-keyring.gpg"),
    ("debian", "trixie"): ("main", "debian-archive-keyring.gpg"),
}
# Release of the lab host's own distribution, where it is not this machine's.
HOST_VARIABLE = "GPUAAS_LAB_DISTRO"


def parse_os_release(text: str) -> dict[str, str]:
    """Parse os-release(5) into a dictionary."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {key: value.strip().strip('"') for key, value in pairs}


def parse_sources(text: str) -> list[tuple[str, list[str]]]:
    """Return (URI, suites) of each binary source, from one-line and deb822 text alike."""
    sources: list[tuple[str, list[str]]] = []
    for stanza in text.split("\n\n"):
        fields: dict[str, str] = {}
        for line in stanza.splitlines():
            if line.startswith("#") or not line.strip():
                continue
            if line.startswith("deb "):
                words = line.split("]", 1)[1].split() if "[" in line else line.split()[1:]
                sources.append((words[0], [words[1]]))
            elif ":" in line and not line[0].isspace():
                name, value = line.split(":", 1)
                fields[name.strip().lower()] = value.strip()
        if "deb" in fields.get("types", "").split() and fields.get("enabled", "yes") != "no":
            suites = fields.get("suites", "").split()
            sources += [(uri, suites) for uri in fields.get("uris", "").split()]
    return sources


def this_distro(root: Path = Path("/")) -> Distro:
    """Return this machine's distribution, or raise a LabError that names the supported ones."""
    release = parse_os_release((root / "etc/os-release").read_text())
    name, suite = release.get("ID", "?"), release.get("VERSION_CODENAME", "?")
    if (name, suite) not in SUPPORTED:
        supported = ", ".join(f"{d} {s}" for d, s in SUPPORTED)
        raise LabError(
            f"the lab is built from one of: {supported}; this machine runs {name} {suite}"
        )
    components, keyring = SUPPORTED[name, suite]
    apt = root / APT.relative_to("/")
    files = [
        apt / "sources.list",
        *sorted((apt / "sources.list.d").glob("*.sources")),
        *sorted((apt / "sources.list.d").glob("*.list")),
    ]
    sources = [
        entry for file in files if file.is_file() for entry in parse_sources(file.read_text())
    ]
    # Third-party repositories have other suites; only the distribution's carries its codename.
    mirror = next((uri for uri, suites in sources if suite in suites), None)
    if mirror is None:
        raise LabError(f"no apt source of this machine offers {suite}: add one to {apt}")
    return Distro(name, suite, components, mirror.rstrip("/"), str(KEYRINGS / keyring))


def host_distro(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Distro:
    """Return the distribution of the lab host: this machine's, or another release from its mirror.

    Debian 12's keyring has the keys of Debian 13.
    """
    here = this_distro(root)
    suite = environment.get(HOST_VARIABLE) or here.suite
    if (here.id, suite) not in SUPPORTED:
        suites = ", ".join(suite for name, suite in SUPPORTED if name == here.id)
        raise LabError(f"{HOST_VARIABLE} is one of {suites} on {here.id}; it is {suite!r}")
    return replace(here, suite=suite)
