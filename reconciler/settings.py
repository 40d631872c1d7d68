"""Configuration: environment variables with the prefix GPUAAS_, each documented here.

The same names may stand in a file, one `NAME=value` per line; the environment goes before the file.
`docs/configuration.md` is made from this class (`python -m reconciler.service.configuration`).
"""

from __future__ import annotations

import errno
import os
import re
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, IPvAnyAddress, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from reconciler import shipped
from reconciler.model.errors import Problem

PROJECT = shipped.PROJECT
PREFIX = "GPUAAS_"
# Where the file is; a service's unit need not say so.
CONFIG_FILE = Path("/etc/gpuaas/gpuaas.env")
CONFIG_FILE_VARIABLE = f"{PREFIX}CONFIG_FILE"


# Names of PostgreSQL in a URL. The first is what other programs write, the last our driver's.
_POSTGRESQL = ("postgres", "postgresql", "postgresql+psycopg")
# What follows, as SQLAlchemy reads it, but for an @ in the host: that is the end of a password,
# which a message about an unknown host would show.
_POSTGRESQL_PLACE = re.compile(
    r"([^:/]*(:[^@]*)?@)?(\[[^/?]+\]|[^/:?@]+)?(:[0-9]+)?(/[^?]*)?(\?.*)?", re.DOTALL
)


def config_file() -> Path:
    """The file of settings; the usual one need not be there."""
    return Path(os.environ.get(CONFIG_FILE_VARIABLE) or CONFIG_FILE)


class Settings(BaseSettings):
    """Every setting of the reconciler; `GPUAAS_STATE_DIR=/srv/gpuaas` sets `state_dir`."""

    # What is refused may be a secret, or hold one.
    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", hide_input_in_errors=True)

    state_dir: Path = Field(
        default=shipped.STATE,
        description="Where database, run folders, SSH CA and logs live.",
    )
    database_url: str = Field(
        default="",
        description="postgresql://USER:PASSWORD@HOST/NAME (or postgresql+psycopg://, which is the"
        " same), or sqlite:///FILE; empty means SQLite in the state folder.",
    )
    listen: str = Field(default="127.0.0.1:8080", description="Address of the API, host:port.")
    operator_listen: str = Field(
        default="",
        description="Address of the operators' listener, such as 127.0.0.1:8008: loopback only, for"
        " whoever is on this machine is a platform admin there, without a token and audited as"
        " local-operator. Empty: none.",
    )
    public_url: str = Field(
        default="",
        description="URL under which hosts reach the API; empty: the listen address, with which a"
        " host enrols only if that is one which other machines can reach.",
    )
    public_address: IPvAnyAddress | None = Field(
        default=None,
        description="IP address behind the name in public_url, for a site whose DNS does not know"
        " the name: hosts use it to enrol, and bootstrap writes it into their /etc/hosts.",
    )
    enrolment_ca_file: Path | None = Field(
        default=None,
        description="PEM of the CA that alone may vouch for the API when a host enrols over HTTPS;"
        " unset: the CAs that the host itself trusts.",
    )
    collections_path: Path = Field(
        default=shipped.COLLECTIONS,
        description="Ansible collections path that holds gpuaas.slice.",
    )
    profiles_dir: Path = Field(
        default=PROJECT / "profiles", description="Hardware profiles, one YAML file each."
    )
    workers: int = Field(default=2, ge=0, description="Tasks that one process runs at a time.")
    task_lease_s: int = Field(
        default=30, ge=5, description="Seconds after which a silent worker's task is taken over."
    )
    poll_s: float = Field(
        default=0.5, gt=0, description="Seconds between two looks at the queue and at runs."
    )
    leader_lease_s: float = Field(
        default=10.0,
        ge=1,
        description="Seconds after which a silent leader is replaced. Too low, and a busy database"
        " makes the leader change for nothing; too high, and deadlines pass unseen for that long.",
    )
    drift_interval_s: int = Field(
        default=900,
        ge=0,
        description="Seconds between two comparisons of what a slice host holds with the records;"
        " 0: only when asked for. It is also how soon a host that falls silent with nothing to do"
        " is noticed. Too low, and workers are kept busy with looking; too high, and what is left"
        " on a host or lost there stays unseen for that long.",
    )
    drift_at_once: int = Field(
        default=1,
        ge=1,
        description="Hosts that are compared at the same time, on the whole site; each occupies a"
        " worker for some seconds.",
    )
    keep_events_days: int = Field(
        default=7, ge=1, description="Days after which events that a relay has taken are deleted."
    )
    keep_unsent_events_days: int = Field(
        default=30,
        ge=1,
        description="Days after which events are deleted that no relay has taken. A relay that"
        " stands still for longer misses what came before; a site without one keeps that many.",
    )
    keep_answers_days: int = Field(
        default=7,
        ge=1,
        description="Days for which an idempotency key is remembered; for longer while it names an"
        " allocation that lives. A request repeated later is done anew.",
    )
    keep_progress_days: int = Field(
        default=30,
        ge=1,
        description="Days for which the progress of a task that ended is kept. How it ended is kept"
        " for ever, and so are history, audit and usage.",
    )
    keep_runs_days: int = Field(
        default=30,
        ge=1,
        description="Days after which the files of the runs of a task that ended are deleted, with"
        " what Ansible printed. They stay, and so does the progress, while the task's allocation"
        " lives or a slot of it is not clean.",
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="One line per event: for people, or a JSON object for programs."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least that is logged."
    )
    member_address: str = Field(
        default="", description="Tenant-facing SSH address; empty until the gateway is configured."
    )

    launcher: Literal["runner", "awx"] = Field(
        default="runner",
        description="What carries out the playbooks: processes of ansible-runner on this machine,"
        " or job templates of an AWX (docs/awx.md). Runs under way are followed where they began.",
    )
    awx_url: str = Field(
        default="",
        pattern=r"^$|^https://[^/?#@]+/?$|^http://(127\.0\.0\.1|localhost|\[::1\])(:[0-9]+)?/?$",
        description="URL of the AWX, without /api; required with launcher=awx.",
    )
    awx_token_file: Path | None = Field(
        default=None,
        description="File with the OAuth2 token of AWX's service user; read for each request.",
    )
    awx_ca_file: Path | None = Field(
        default=None,
        description="PEM of the CA that alone may vouch for AWX; unset: the system's.",
    )
    awx_template_prefix: str = Field(
        default="gpuaas.slice.",
        pattern=r"^[A-Za-z0-9._ -]*$",
        description="What the name of each job template has before the name of its playbook.",
    )
    oidc_issuer: str = Field(
        default="",
        pattern=r"^$|^https://|^http://(127\.0\.0\.1|localhost|\[::1\])[:/]",
        description="Issuer of the site's OpenID provider, whose bearer tokens are accepted too;"
        " empty: none.",
    )
    oidc_ca_file: Path | None = Field(
        default=None,
        description="PEM of the CA that alone may vouch for the provider; unset: the public ones.",
    )
    oidc_audience: str = Field(
        default="", description="What a provider's token must be for; required with an issuer."
    )
    oidc_name_claim: str = Field(
        default="sub",
        description="Claim that names the holder in audit; one that nobody can choose for himself.",
    )
    oidc_groups_claim: str = Field(default="groups", description="Claim with the holder's groups.")
    oidc_admin_group: str = Field(
        default="", description="Members of this group are platform admins; empty: nobody is."
    )
    oidc_project_prefix: str = Field(
        default="",
        description="A group with this prefix makes its members project members; what follows the"
        " prefix is the project's id. Empty: nobody is.",
    )
    oidc_skew_s: int = Field(
        default=30, ge=0, le=120, description="How far the provider's clock may be from ours."
    )

    @field_validator("public_address", mode="before")
    @classmethod
    def _address_without_zone(cls, text: Any) -> Any:
        """An empty variable sets no address. A zone (fe80::1%eth0) means something to one machine
        only, and this address is for others.
        """
        if isinstance(text, str) and "%" in text:
            raise ValueError("an IP address without a zone")
        return text or None

    @field_validator("database_url")
    @classmethod
    def _database_is_one_of_ours(cls, url: str) -> str:
        """With the driver that we have, whatever other programs call it."""
        scheme, separator, rest = url.partition("://")
        if not url or (scheme == "sqlite" and separator):
            return url
        if scheme not in _POSTGRESQL or not separator:
            raise ValueError("a URL that begins with postgresql:// or sqlite:///")
        if not _POSTGRESQL_PLACE.fullmatch(rest):
            raise ValueError(
                "a URL with USER:PASSWORD@HOST:PORT/NAME; in a password @ is written %40, and % %25"
            )
        return f"postgresql+psycopg://{rest}"

    @model_validator(mode="after")
    def _oidc_is_whole(self) -> Settings:
        if self.oidc_issuer and not self.oidc_audience:
            raise ValueError("GPUAAS_OIDC_AUDIENCE goes with GPUAAS_OIDC_ISSUER")
        return self

    @model_validator(mode="after")
    def _awx_is_whole(self) -> Settings:
        if self.launcher == "awx" and not (self.awx_url and self.awx_token_file):
            raise ValueError("GPUAAS_LAUNCHER=awx needs GPUAAS_AWX_URL and GPUAAS_AWX_TOKEN_FILE")
        return self

    def __init__(self, **values: Any) -> None:
        """Arguments, environment, file: what comes first wins."""
        if os.environ.get(CONFIG_FILE_VARIABLE) and not config_file().exists():
            # Else this would be another site, with a new database of its own.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(config_file()))
        if config_file().is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(config_file()))
        try:
            super().__init__(_env_file=config_file(), **values)
        except UnicodeDecodeError:
            # Not as that: it holds what was read.
            raise OSError(errno.EILSEQ, "is no text in UTF-8", str(config_file())) from None

    @property
    def database(self) -> str:
        return self.database_url or f"sqlite:///{self.state_dir / 'reconciler.db'}"

    @property
    def api_url(self) -> str:
        return self.public_url or f"http://{self.listen}"

    @property
    def url_for_hosts(self) -> str:
        """The API as hosts reach it; Problem `public_url_missing` for one that is this machine's
        alone. Said outright in public_url, such an address is meant: a tunnel ends there, or the
        host is this machine.
        """
        name = self.listen.rpartition(":")[0].strip("[]")
        if not self.public_url and (name == "localhost" or _of_this_machine(name)):
            raise Problem(
                "public_url_missing",
                expected="GPUAAS_PUBLIC_URL, the URL under which hosts reach this API",
                found=f"none, and {self.listen} is no address for another machine",
                remedy="set it, such as https://gpuaas.example; for a host that reaches the API"
                f" at this very address set GPUAAS_PUBLIC_URL=http://{self.listen}",
            )
        return self.api_url

    @property
    def api_names(self) -> dict[str, str]:
        """Address by name of the API, as hosts must know it; {} where their DNS does."""
        name = urlsplit(self.api_url).hostname or ""
        return {name: str(self.public_address)} if name and self.public_address else {}


def _of_this_machine(name: str) -> bool:
    try:
        address = ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def refused(error: ValidationError) -> list[tuple[str, str]]:
    """Name and rule of each setting that is refused; never its value, which may be a secret."""
    # Rules about several settings together name them in their text.
    return [
        (PREFIX + (".".join(map(str, one["loc"])).upper() or "*"), one["msg"])
        for one in error.errors(include_input=False, include_url=False, include_context=False)
    ]
