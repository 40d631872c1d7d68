"""Runner of `scripts/sanity`: ansible-test sanity on the built archive, unpacked in build/sanity.

ansible-test does not accept the checkout as a collection, because it also holds the reconciler and
the lab. The first run installs the tools that ansible-test pins, each into a separate environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "sanity"
HOME = WORK / "home"
COLLECTION = WORK / "ansible_collections" / "gpuaas" / "slice"
BIN = Path(sys.executable).parent

# ansible-test would download get-pip.py from its own server. Python brings a pip that can install
# the required version from the index that this machine uses.
GET_PIP = """\
import subprocess, sys
wanted = [name for name in sys.argv[1:] if not name.startswith("--no-")]
subprocess.check_call([sys.executable, "-m", "ensurepip"])
sys.exit(subprocess.call([sys.executable, "-m", "pip", "install", *wanted]))
"""


# The modules run on slice hosts, which are Debian 12 or Ubuntu 24.04 and newer.
SETTINGS = """\
modules:
  python_requires: ">=3.11"
"""


def unpack() -> None:
    """Unpack the collection's archive and add the settings of its sanity tests."""
    shutil.rmtree(COLLECTION, ignore_errors=True)
    galaxy("build", str(ROOT), "--output-path", str(WORK), "--force")
    (archive,) = WORK.glob("gpuaas-slice-*.tar.gz")
    galaxy("install", str(archive), "-p", str(WORK), "--offline", "--force")
    (COLLECTION / "tests" / "sanity").mkdir(parents=True)
    (COLLECTION / "tests" / "config.yml").write_text(SETTINGS)
    series = ".".join(version("ansible-core").split(".")[:2])
    (COLLECTION / "tests" / "sanity" / f"ignore-{series}.txt").write_text(ignored())


def ignored() -> str:
    """Return the ignored findings: ansible-test requires GPLv3 of plugins; ours are Apache-2.0."""
    plugins = COLLECTION / "plugins"
    paths = sorted([*plugins.glob("modules/*.py"), *plugins.glob("inventory/*.py")])
    rule = "validate-modules:missing-gplv3-license"
    return "".join(f"{path.relative_to(COLLECTION)} {rule}\n" for path in paths)


def galaxy(*argv: str) -> None:
    subprocess.run(
        [str(BIN / "ansible-galaxy"), "collection", *argv],
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(WORK)},
        stdout=subprocess.DEVNULL,
        check=True,
    )


def prepare_home() -> None:
    """Make a home folder for ansible-test that has the user's settings for pip.

    ansible-test keeps its environments in the home folder and does not pass on pip's variables, so
    the variables are written to a file.
    """
    for name in (".config", ".cache"):
        link = HOME / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(Path.home() / name)
    (HOME / ".pip").mkdir(exist_ok=True)
    (HOME / ".pip" / "pip.conf").write_text(pip_configuration(os.environ))
    cache = HOME / ".ansible" / "test" / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    (cache / f"get_pip_{pinned_pip().replace('.', '_')}.py").write_text(GET_PIP)


def pip_configuration(environment: Mapping[str, str]) -> str:
    """Return pip's variables as a pip file; pip also gets the authorities that Python trusts."""
    options = {
        name.removeprefix("PIP_").lower().replace("_", "-"): " ".join(value.split())
        for name, value in environment.items()
        if name.startswith("PIP_") and name != "PIP_CONFIG_FILE"
    }
    trusted = environment.get("REQUESTS_CA_BUNDLE") or environment.get("SSL_CERT_FILE")
    if trusted:
        options.setdefault("cert", trusted)
    return "[global]\n" + "".join(f"{name} = {value}\n" for name, value in sorted(options.items()))


def pinned_pip() -> str:
    """Return the version of pip that this ansible-test installs into its environments."""
    source = (
        Path(import_module("ansible_test").__path__[0]) / "_internal" / "python_requirements.py"
    )
    match = re.search(r"\bpip='([\d.]+)'", source.read_text())
    if not match:
        raise SystemExit(f"sanity: expected the version of pip in {source}; found none")
    return match[1]


def main() -> int:
    prepare_home()
    unpack()
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    done = subprocess.run(
        [str(BIN / "ansible-test"), "sanity", "--local", "--python", python, *sys.argv[1:]],
        cwd=COLLECTION,
        # Without this variable ansible-test would use the checkout's git, which ignores build.
        env={**os.environ, "HOME": str(HOME), "ANSIBLE_TEST_CONTENT_ROOT": str(COLLECTION)},
        check=False,
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
