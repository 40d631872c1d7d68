"""Checks of this machine: listeners, state folder with its keys, needs of runs."""

from __future__ import annotations

import json
import os
import pwd
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from reconciler import shipped
from reconciler.doctor import Finding, fail, ok, refused, warn
from reconciler.model.errors import Problem
from reconciler.runs import contract
from reconciler.runs.launch import SEARCH_PATH
from reconciler.service.listeners import api_address, host_port, is_local, operator_address
from reconciler.settings import Settings, is_exposed
from reconciler.trust.ca import Trust, gateway_folder, open_gateway
from reconciler.trust.keygen import TrustError, public_key

_GIB = 1 << 30
# Below the first limit the disk is full within days, below the second within hours.
_LITTLE_GIB, _LEAST_GIB = 5, 1
# Programs on the search path of runs (runs.launch), each with its remedy. Only the first is beside
# our interpreter.
PROGRAMS = {
    "ansible-playbook": "install the Python packages of requirements.lock into one environment",
    "ssh": "install openssh-client",
    "ssh-keygen": "install openssh-client",
}


def listen(settings: Settings) -> Iterator[Finding]:
    """The API listens on loopback, behind a proxy."""
    try:
        address = api_address(settings)
    except Problem as problem:
        yield refused(problem)
        return
    local = is_local(address)
    text = f"{host_port(address)}: API, with tokens"
    yield warn(
        text if local else f"{text}, unencrypted on the network",
        unless=local,
        expected="a loopback address behind a proxy that terminates TLS",
        remedy="GPUAAS_LISTEN=127.0.0.1:8080 and docs/operations.md, TLS; nothing if only the"
        " service uses that network",
    )


def operator_listen(settings: Settings) -> Iterator[Finding]:
    """The operators' listener is off or on loopback."""
    try:
        address = operator_address(settings)
    except Problem as problem:
        yield refused(problem)
        return
    users = "operators on this machine, without a token"
    yield ok(f"{host_port(address)}: {users}" if address else "off")


def public_url(settings: Settings) -> Iterator[Finding]:
    """Hosts have a URL of the API."""
    try:
        url = settings.url_for_hosts
    except Problem as problem:
        finding = warn if problem.code == "public_url_missing" else fail
        text = f"{problem.found}: no host can enrol"
        yield finding(text, expected=problem.expected, remedy=problem.remedy)
        return
    yield warn(
        f"hosts reach the API at {url}",
        unless=not is_exposed(url),
        expected="an https URL, because hosts carry out the answer to an enrolment as root",
        remedy="a proxy with TLS before the API, then unset GPUAAS_ENROLMENT_INSECURE",
    )


def state_folder(settings: Settings) -> Iterator[Finding]:
    """The folder exists, belongs to the service's user, is private and writable."""
    folder = settings.state_dir
    if not folder.is_dir():
        yield fail(
            f"no folder {folder}",
            expected="the state folder of the service",
            remedy="set GPUAAS_STATE_DIR, or start the service once: it creates the folder",
        )
        return
    findings = list(_private(folder, 0o700))
    if not os.access(folder, os.W_OK | os.X_OK):
        findings.append(_other_owner(folder))
    yield from findings or [ok(str(folder))]


def keys(settings: Settings) -> Iterator[Finding]:
    """The keys of the authorities are complete and private: with them a reader can pose as any
    host, or as the reconciler.
    """
    trust = Trust(settings.state_dir.resolve() / "trust")
    if not trust.directory.is_dir():
        yield warn(
            "no authority yet",
            expected=f"keys in {trust.directory}",
            remedy="start the service, which creates them, or restore the backup that has them:"
            " with new keys every host must enrol again; a machine with a gateway alone needs none",
        )
        yield from _gateway(settings)
        return
    findings = [*_private(trust.directory, 0o700), *_gateway(settings)]
    for key in (trust.host_authority, trust.user_authority, trust.operator):
        public = key.with_name(f"{key.name}.pub")
        if not key.exists() or not public.exists():
            findings.append(
                fail(
                    f"{key.name} or {public.name} is missing",
                    expected="a pair of keys",
                    remedy="restore the trust folder from a backup",
                )
            )
            continue
        public_key(public.read_text())
        findings += _private(key, 0o600)
    if trust.gateway_authority.exists():
        findings += _private(trust.gateway_authority, 0o600)
    for key in sorted(trust.directory.iterdir()):
        findings += ownership(key, settings)
    yield from findings or [ok(str(trust.directory))]


def ownership(file: Path, settings: Settings) -> Iterator[Finding]:
    """A failure when a file belongs to another user than its state folder: a command that root ran
    has written it.
    """
    owner = settings.state_dir.stat().st_uid
    if file.stat().st_uid != owner:
        yield fail(
            f"{file} belongs to the user {file.stat().st_uid}, its state folder to {owner}",
            expected="files of the service's user, who cannot read others",
            remedy=f"chown --reference={settings.state_dir} {file}",
        )


def _gateway(settings: Settings) -> Iterator[Finding]:
    """The keys of this machine's gateway are complete and private."""
    folder = gateway_folder(settings.state_dir)
    if folder.is_dir():
        yield from _private(folder, 0o700)
        try:
            yield from _private(open_gateway(settings.state_dir).gateway_authority, 0o600)
        except TrustError as wrong:
            yield fail(wrong.found, expected=wrong.expected, remedy=wrong.remedy)


def free_space(settings: Settings) -> Iterator[Finding]:
    """The disk of the state folder has room for the database and the output of runs."""
    folder = settings.state_dir
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / _GIB
    yield (fail if free < _LEAST_GIB else warn)(
        f"{free:.1f} GiB free in {folder}",
        unless=free >= _LITTLE_GIB,
        expected=f"at least {_LITTLE_GIB} GiB",
        remedy="free space or move the folder",
    )


def program(name: str, _settings: Settings) -> Iterator[Finding]:
    """The program is on the search path of a run."""
    file = shutil.which(name, path=SEARCH_PATH)
    text = file or f"not in {SEARCH_PATH}"
    yield fail(text, unless=bool(file), expected="the program", remedy=PROGRAMS[name])


def ansible_runner(_settings: Settings) -> Iterator[Finding]:
    """The package ansible-runner is installed."""
    try:
        yield ok(version("ansible-runner"))
    except PackageNotFoundError:
        remedy = PROGRAMS["ansible-playbook"]
        yield fail("not installed", expected="the package ansible-runner", remedy=remedy)


def collection(settings: Settings) -> Iterator[Finding]:
    """The collection gpuaas.slice is installed with all playbooks of the tasks."""
    folder = settings.collections_path / shipped.COLLECTION
    playbooks = {file.stem for file in (folder / "playbooks").glob("*.yml")}
    missing = [name for name in contract.PLAYBOOKS if name not in playbooks]
    version = _collection_version(shipped.COLLECTIONS / shipped.COLLECTION)
    present = _collection_version(folder)
    text = f"{folder}, version {present or 'unknown'}, {len(playbooks)} playbooks"
    if missing:
        text = f"{folder} without {', '.join(missing) if playbooks else 'any playbook'}"
    yield fail(
        text,
        unless=not missing and present == version,
        expected=f"the collection gpuaas.slice {version}, which comes with this program",
        remedy="remove GPUAAS_COLLECTIONS_PATH from the settings, or install the archive of this"
        " version there; in a checkout: scripts/collection-path",
    )


def _collection_version(folder: Path) -> str:
    """Version of a collection, as installed from its archive or as a checkout, or ""."""
    try:
        manifest = folder / "MANIFEST.json"
        if manifest.exists():
            return str(json.loads(manifest.read_bytes())["collection_info"]["version"])
        return str(yaml.safe_load((folder / "galaxy.yml").read_bytes())["version"])
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return ""


def profiles(settings: Settings) -> Iterator[Finding]:
    """Each hardware profile is valid."""
    rules: dict[str, Any] = contract.schema("common")
    validator = Draft202012Validator({**rules, "$ref": "#/$defs/linked_profile"})
    files = sorted(settings.profiles_dir.glob("*.yml"))
    if not files:
        yield fail(
            f"none in {settings.profiles_dir}",
            expected="hardware profiles, each a YAML file",
            remedy="set GPUAAS_PROFILES_DIR to the folder with the profiles",
        )
    for file in files:
        try:
            wrong = [
                f"{'.'.join(map(str, error.absolute_path)) or 'document'}: {error.message[:120]}"
                for error in validator.iter_errors(yaml.safe_load(file.read_text()))
            ]
        except yaml.YAMLError as unreadable:
            wrong = [" ".join(str(unreadable).split())[:200]]
        yield fail(
            f"{file.name}: {'; '.join(wrong[:3])}" if wrong else file.name,
            unless=not wrong,
            expected="linked_profile of contracts/runs/common.schema.json",
            remedy=f"correct {file}",
        )


def _private(path: Path, mode: int) -> Iterator[Finding]:
    status = path.stat()
    if status.st_uid != os.geteuid():
        yield _other_owner(path)
    elif status.st_mode & 0o077:
        yield fail(
            f"{path} has mode {status.st_mode & 0o777:03o}",
            expected=f"mode {mode:03o}, for the service's user only",
            remedy=f"chmod {mode:03o} {path}",
        )


def _other_owner(path: Path) -> Finding:
    try:
        owner = pwd.getpwuid(path.stat().st_uid).pw_name
    except KeyError:
        owner = str(path.stat().st_uid)
    return fail(
        f"{path} belongs to {owner}, this is {pwd.getpwuid(os.geteuid()).pw_name}",
        expected="the same user for the service and its files",
        remedy=f"run as {owner} (`runuser -u {owner} -- gpuaas doctor`), or chown the folder",
    )
