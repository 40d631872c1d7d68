"""Settings: environment variables with the prefix GPUAAS_, each documented here.

A file may contain the same names, one `NAME=value` per line; the environment overrides the file.
`docs/configuration.md` is generated from this class (`python -m reconciler.service.configuration`).
"""

from __future__ import annotations

import errno
import os
import re
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from dotenv.parser import parse_stream
from pydantic import Field, IPvAnyAddress, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from reconciler import shipped
from reconciler.model.errors import Problem

PROJECT = shipped.PROJECT
PREFIX = "GPUAAS_"
# Default path of the file, so that a service's unit need not name it.
CONFIG_FILE = Path("/etc/gpuaas/gpuaas.env")
CONFIG_FILE_VARIABLE = f"{PREFIX}CONFIG_FILE"

# Schemes of PostgreSQL in a URL. Other programs write the first, our driver needs the last.
_POSTGRESQL = ("postgres", "postgresql", "postgresql+psycopg")
# The rest of the URL as SQLAlchemy reads it, but without an @ in the host. There it would be the
# end of a password, which a message about an unknown host would show.
_POSTGRESQL_REST = re.compile(
    r"([^:/]*(:[^@]*)?@)?(\[[^/?]+\]|[^/:?@]+)?(:[0-9]+)?(/[^?]*)?(\?.*)?", re.DOTALL
)


def config_file() -> Path:
    """The file of settings. The default file need not exist."""
    return Path(os.environ.get(CONFIG_FILE_VARIABLE) or CONFIG_FILE)


def _words(text: str) -> list[str]:
    """The parts of a list that is separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


# Of a task at a site with AWX or UFM, and with MAAS: they have 20 and 25 s for their answers before
# a run begins.
_LEAST_LEASE_S, _MAAS_LEASE_S = 25, 30
# Name of a region to come, and its title.
_REGION = r"[a-z0-9][a-z0-9-]{0,62}(=[^,=\x00-\x1f]{1,64})?"
# URL of another server: with TLS, or on this machine.
_SERVER = r"^$|^https://[^/?#@]+/?$|^http://(127\.0\.0\.1|localhost|\[::1\])(:[0-9]+)?/?$"


class Settings(BaseSettings):
    """All settings of the reconciler; `GPUAAS_STATE_DIR=/srv/gpuaas` sets `state_dir`."""

    # A refused value may be a secret, or contain secrets.
    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="ignore", hide_input_in_errors=True, use_attribute_docstrings=True
    )

    state_dir: Path = shipped.STATE
    """Folder of the database, runs, SSH CA and logs."""
    database_url: str = ""
    """postgresql://USER:PASSWORD@HOST/NAME (postgresql+psycopg:// means the same) or
    sqlite:///FILE. Empty: SQLite in the state folder."""
    listen: str = "127.0.0.1:8080"
    """Address that the API listens on, host:port."""
    operator_listen: str = ""
    """Address of the operators' listener, such as 127.0.0.1:8008. Loopback only: every user of
    this machine is a platform admin there without a token, audited as local-operator. Empty:
    none."""
    public_url: str = ""
    """URL under which hosts reach the API. Empty: the listen address, which hosts can use for
    enrolment only if other machines can reach it."""
    public_address: IPvAnyAddress | None = None
    """IP address behind the name in public_url, for a site whose DNS lacks the name. Hosts use
    it to enrol, and bootstrap writes it into their /etc/hosts."""
    enrolment_insecure: bool = False
    """Accept a public_url of plain http:// for enrolment. An attacker between a host and the API
    can then run commands as root on that host, so use it only on a network of the service alone."""
    enrolment_ca_file: Path | None = None
    """PEM of the only CA that hosts accept for the API when they enrol over HTTPS. Unset: the
    CAs that the host itself trusts."""
    collections_path: Path = shipped.COLLECTIONS
    """Ansible collections path that holds gpuaas.slice."""
    profiles_dir: Path = PROJECT / "profiles"
    """Folder of hardware profiles, one YAML file each."""
    images_dir: Path = Path("/srv/images")
    """Folder of the image files that this service hands to hosts; nothing outside of it is served.
    It and the state folder may not contain each other."""
    workers: int = Field(3, ge=0)
    """Tasks that a process runs at the same time. Of three or more, one project, or work on hosts,
    has all but one at most."""
    task_lease_s: int = Field(30, ge=5)
    """Seconds after which the task of a silent worker is taken over. With AWX or UFM at least 25,
    with MAAS 30: they may take 20 and 25 s to answer before a run begins."""
    poll_s: float = Field(0.5, gt=0)
    """Seconds between two checks of the queue and of runs."""
    leader_lease_s: float = Field(10.0, ge=1)
    """Seconds after which a silent leader is replaced. Too low, and a busy database changes the
    leader without need; too high, and deadlines pass unnoticed for that long."""
    drift_interval_s: int = Field(900, ge=0)
    """Seconds between two comparisons of a slice host with the records; 0: only on request. An
    idle host that falls silent is noticed in the same interval. Too low, and comparisons keep
    workers busy; too high, and leftovers or losses on a host stay unnoticed for that long."""
    drift_at_once: int = Field(1, ge=1)
    """Hosts of the whole site that are compared at the same time. Each occupies a worker for
    some seconds. Beside them, one host is compared that hangs or did so lately. Of several that
    begin to hang, all but one are given up while others wait."""
    keep_events_days: int = Field(7, ge=1)
    """Days after which events that a relay has read are deleted."""
    keep_unsent_events_days: int = Field(30, ge=1)
    """Days after which events that no relay has read are deleted. A relay that stops for longer
    misses events; a site without a relay keeps this many days."""
    keep_answers_days: int = Field(7, ge=1)
    """Days for which an idempotency key is remembered; longer while its allocation lives. A
    request repeated later is carried out again."""
    keep_progress_days: int = Field(30, ge=1)
    """Days for which the progress of an ended task is kept. Its result, history, audit and
    usage are kept for ever, but for long results of old reports of hosts, long evidence of old
    failures, and changes to a health beyond 12 in a day and 60 in 30 days."""
    keep_runs_days: int = Field(30, ge=1)
    """Days after which the run files of an ended task are deleted, with Ansible's output. Files
    and progress stay while the task's allocation lives, or while a slot or machine that it had is
    not clean."""
    keep_jobs_days: int = Field(7, ge=1)
    """Days after which an ended inference job is deleted, unless its project needs the room before.
    A model stays known for as long after its last worker."""
    keep_recordings_days: int = Field(30, ge=1)
    """Days after which a recording of a terminal is deleted; earlier, if its person's newer ones
    need the room."""
    log_format: Literal["text", "json"] = "text"
    """Log lines as text for people, or as JSON objects for programs."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    member_address: str = Field(
        "", pattern=r"^$|^[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?(:[0-9]{1,5})?$"
    )
    """Name of the SSH gateway for tenants, host or host:port. Empty: no gateway."""
    gateway_listen: str = Field("0.0.0.0:2222", pattern=r"^.+:[0-9]{1,5}$")
    """Address that `gpuaas gateway` listens on, host:port."""
    ingress_addresses: str = ""
    """IPv4 addresses, separated by commas, that the site keeps for public ingress to slices. Each
    is on an interface of one host and is no management address. Empty: no ingress."""

    planned_regions: str = Field("", pattern=rf"^$|^{_REGION}(, ?{_REGION}){{0,31}}$")
    """Names of regions to come, separated by commas. The catalogue shows them as disabled. A name
    may have a title for people (`eu-north=Stockholm`), which stays when the region has machines."""

    currency: str = Field("EUR", pattern=r"^[A-Z]{3}$")
    """Currency of the prices in hardware profiles (`gpu_hour_price`, `machine_gpu_hour_price`), by
    its code of ISO 4217."""

    launcher: Literal["runner", "awx"] = "runner"
    """Launcher of playbooks: processes of ansible-runner on this machine, or job templates of
    an AWX (docs/awx.md). A change does not move runs that have begun."""
    awx_url: str = Field("", pattern=_SERVER)
    """URL of the AWX, without /api; required with launcher=awx."""
    awx_token_file: Path | None = None
    """File with the OAuth2 token of AWX's service user; read for each request."""
    awx_ca_file: Path | None = None
    """PEM of the only CA accepted for AWX. Unset: the system's CAs."""
    awx_template_prefix: str = Field("gpuaas.slice.", pattern=r"^[A-Za-z0-9._ -]*$")
    """Prefix of each job template's name, before the name of its playbook."""
    awx_project: str = Field("", max_length=512)
    """Name of the project of all launched job templates. Unset: nothing is launched while they
    differ. The next two settings work alike."""
    awx_execution_environment: str = Field("", max_length=512)
    """Name of the execution environment of these templates."""
    awx_credential: str = Field("", max_length=512)
    """Name of the Machine credential of these templates."""
    awx_project_url: str = Field("", max_length=1024)
    """URL of the repository that this project has in AWX. It is compared before each launch,
    for which the token's user needs the right to read the project."""
    awx_project_branch: str = Field("", max_length=256)
    """Branch, tag or commit that this project has in AWX; compared with the URL."""
    awx_execution_environment_image: str = Field("", max_length=1024)
    """Image of the execution environment in AWX, compared before each launch; with a digest it
    cannot be replaced in the registry either. Unset: any."""
    ufm_url: str = Field("", pattern=_SERVER)
    """URL of UFM, the manager of an InfiniBand fabric with partitions. Empty: none."""
    ufm_token_file: Path | None = None
    """File with a token of a UFM user that may manage partitions; read for each request."""
    ufm_ca_file: Path | None = None
    """PEM of the only CA accepted for UFM. Unset: the system's CAs."""
    netbox_url: str = Field("", pattern=_SERVER)
    """URL of the NetBox whose tagged devices are this site's machines (docs/netbox.md), without
    /api. Empty: none."""
    netbox_token_file: Path | None = None
    """File with a token of NetBox; read for each request."""
    netbox_ca_file: Path | None = None
    """PEM of the only CA accepted for NetBox. Unset: the system's CAs."""
    netbox_sync: bool = False
    """Write slots and state to NetBox, and add its new devices as nodes, automatically. Off: only
    with `gpuaas netbox sync`."""
    maas_url: str = Field("", pattern=_SERVER)
    """URL of the MAAS that installs this site's machines (docs/maas.md), without /MAAS. Empty:
    none."""
    maas_token_file: Path | None = None
    """File with an API key of a MAAS administrator (three parts with colons); read for each
    request."""
    maas_ca_file: Path | None = None
    """PEM of the only CA accepted for MAAS. Unset: the system's CAs."""
    maas_erase_disks: bool = False
    """Have MAAS erase all disks of a machine, the system disk included, before it is installed anew
    after its tenant (docs/maas.md). Off: the system disk is only installed over."""
    gpu_pool_max_total: int = Field(16, ge=0)
    """Largest number of living worker pools of the site (docs/pools.md)."""
    redis_url: str = Field("", pattern=r"^$|^(rediss?|unix)://")
    """URL of a Redis whose streams wake idle workers of jobs (docs/pools.md). Empty: they poll."""
    oidc_issuer: str = Field(
        "", pattern=r"^$|^https://|^http://(127\.0\.0\.1|localhost|\[::1\])[:/]"
    )
    """Issuer of the site's OpenID provider, whose bearer tokens are accepted too. Empty: none."""
    oidc_ca_file: Path | None = None
    """PEM of the only CA accepted for the provider. Unset: the public CAs."""
    oidc_audience: str = ""
    """Audience that a provider's token must have; required with an issuer."""
    oidc_name_claim: str = "sub"
    """Claim that names the holder in audit. Holders must not be able to choose it."""
    oidc_groups_claim: str = "groups"
    """Claim with the holder's groups."""
    oidc_admin_group: str = ""
    """Members of this group are platform admins. Empty: no group."""
    oidc_project_prefix: str = ""
    """Groups with this prefix make their members project members; the rest of the group's name
    is the project's id. Empty: no groups."""
    oidc_skew_s: int = Field(30, ge=0, le=120)
    """Largest accepted difference of the provider's clock, in seconds."""

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
    def _database_is_supported(cls, url: str) -> str:
        """Accept the schemes of other programs, and set our driver."""
        scheme, separator, rest = url.partition("://")
        if not url or (scheme == "sqlite" and separator):
            return url
        if scheme not in _POSTGRESQL or not separator:
            raise ValueError("a URL that begins with postgresql:// or sqlite:///")
        if not _POSTGRESQL_REST.fullmatch(rest):
            raise ValueError(
                "a URL with USER:PASSWORD@HOST:PORT/NAME; in a password @ is written %40, and % %25"
            )
        return f"postgresql+psycopg://{rest}"

    @field_validator("redis_url")
    @classmethod
    def _redis_has_an_address(cls, url: str) -> str:
        try:
            _ = urlsplit(url).port
        except ValueError:
            # Or jobs would be queued, and their requests fail. The text may hold the password.
            raise ValueError(
                "a URL with :PASSWORD@HOST:PORT/0; in a password / is written %2F, @ %40, and % %25"
            ) from None
        return url

    @field_validator("ingress_addresses")
    @classmethod
    def _addresses_are_public(cls, text: str) -> str:
        for name in _words(text):
            address = IPv4Address(name)
            if address.is_loopback or address.is_multicast or address.is_unspecified:
                raise ValueError(f"addresses that clients can reach, not {address}")
        return text

    @model_validator(mode="after")
    def _companions_are_set(self) -> Settings:
        if self.oidc_issuer and not self.oidc_audience:
            raise ValueError("GPUAAS_OIDC_AUDIENCE goes with GPUAAS_OIDC_ISSUER")
        images = self.images_dir.resolve()
        for other in (self.state_dir.resolve(), *map(Path, ("/proc", "/sys", "/dev"))):
            if images.is_relative_to(other) or other.is_relative_to(images):
                raise ValueError(f"GPUAAS_IMAGES_DIR: a folder outside of {other}, not above it")
        if self.ufm_url and not self.ufm_token_file:
            raise ValueError("GPUAAS_UFM_TOKEN_FILE goes with GPUAAS_UFM_URL")
        if self.netbox_url and not self.netbox_token_file:
            raise ValueError("GPUAAS_NETBOX_TOKEN_FILE goes with GPUAAS_NETBOX_URL")
        if self.maas_url and not self.maas_token_file:
            raise ValueError("GPUAAS_MAAS_TOKEN_FILE goes with GPUAAS_MAAS_URL")
        if self.launcher == "awx" and not (self.awx_url and self.awx_token_file):
            raise ValueError("GPUAAS_LAUNCHER=awx needs GPUAAS_AWX_URL and GPUAAS_AWX_TOKEN_FILE")
        for peer, least in (
            ("GPUAAS_MAAS_URL", _MAAS_LEASE_S if self.maas_url else 0),
            ("GPUAAS_UFM_URL", _LEAST_LEASE_S if self.ufm_url else 0),
            ("GPUAAS_LAUNCHER=awx", _LEAST_LEASE_S if self.launcher == "awx" else 0),
        ):
            # A worker whose lease ends while it waits is refused its run, at each attempt.
            if self.task_lease_s < least:
                raise ValueError(
                    f"GPUAAS_TASK_LEASE_S: at least {least}, not {self.task_lease_s}, with {peer}"
                )
        return self

    def __init__(self, **values: Any) -> None:
        """Arguments override the environment, which overrides the file."""
        if os.environ.get(CONFIG_FILE_VARIABLE) and not config_file().exists():
            # Without the file, the defaults would mean another site with a new database.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(config_file()))
        if config_file().is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(config_file()))
        try:
            _refuse_misread(config_file())
            super().__init__(_env_file=config_file(), **values)
        except UnicodeDecodeError:
            # UnicodeDecodeError would show the content of the file.
            raise OSError(errno.EILSEQ, "is no text in UTF-8", str(config_file())) from None

    @property
    def database(self) -> str:
        return self.database_url or f"sqlite:///{self.state_dir / 'reconciler.db'}"

    @property
    def sqlite_file(self) -> Path | None:
        """The file of the database; None for one of PostgreSQL, or in memory."""
        scheme, _, rest = self.database.partition(":///")
        name = rest.partition("?")[0]
        usual = scheme.startswith("sqlite") and name not in ("", ":memory:")
        return Path(name) if usual and not name.startswith("file:") else None

    @property
    def ingress(self) -> frozenset[str]:
        """The addresses of ingress_addresses."""
        return frozenset(_words(self.ingress_addresses))

    @property
    def regions_to_come(self) -> dict[str, str]:
        """Titles of planned_regions by name; the name where none is set."""
        pairs = (word.partition("=") for word in _words(self.planned_regions))
        return {name: title or name for name, _, title in pairs}

    @property
    def gateway(self) -> tuple[str, int]:
        """Name and port of member_address; an empty name without a gateway."""
        name, _, port = self.member_address.partition(":")
        return name, int(port or 22)

    @property
    def api_url(self) -> str:
        return self.public_url or f"http://{self.listen}"

    @property
    def url_for_hosts(self) -> str:
        """URL of the API for hosts; Problem `public_url_missing` when only this machine reaches it,
        `enrolment_without_tls` when others can change what a host gets from it.

        A local address in public_url is accepted: a tunnel may end there, or the host is this
        machine.
        """
        name = self.listen.rpartition(":")[0].strip("[]")
        if not self.public_url and _is_local(name):
            raise Problem(
                "public_url_missing",
                expected="GPUAAS_PUBLIC_URL, the URL under which hosts reach this API",
                found=f"none, and {self.listen} is no address for another machine",
                remedy="set it, such as https://gpuaas.example; for a host that reaches the API"
                f" at this very address set GPUAAS_PUBLIC_URL=http://{self.listen}",
            )
        if is_exposed(self.api_url) and not self.enrolment_insecure:
            raise Problem(
                "enrolment_without_tls",
                expected="an https URL in GPUAAS_PUBLIC_URL, because hosts carry out the answer as"
                " root",
                found=self.api_url,
                remedy="put a proxy with TLS before the API (docs/operations.md, TLS), or set"
                " GPUAAS_ENROLMENT_INSECURE=1 if nobody else uses the network",
            )
        return self.api_url

    @property
    def api_names(self) -> dict[str, str]:
        """Address by name of the API, for /etc/hosts of hosts; {} if their DNS knows the name."""
        name = urlsplit(self.api_url).hostname or ""
        return {name: str(self.public_address)} if name and self.public_address else {}


def _refuse_misread(file: Path) -> None:
    """OSError `EILSEQ` for a line that would be skipped, or a value that took the next lines into
    it, as after a quote that is not closed. Defaults would mean another, empty site.
    """
    if not file.is_file():
        return
    with file.open(encoding="utf-8") as text:
        for binding in parse_stream(text):
            long = "\n" in (binding.value or "")
            if binding.error or long:
                # Never the line itself, which may be a secret.
                what = "a value with a line break" if long else "no NAME=value"
                line = binding.original.line
                raise OSError(
                    errno.EILSEQ, f"{what} in line {line}; perhaps a quote is not closed", str(file)
                )


def is_exposed(url: str) -> bool:
    """Whether a URL leads over the network without TLS."""
    parts = urlsplit(url)
    return parts.scheme != "https" and not _is_local(parts.hostname or "")


def _is_local(name: str) -> bool:
    try:
        address = ip_address(name)
    except ValueError:
        return name == "localhost"
    return address.is_loopback or address.is_unspecified


def refused(error: ValidationError) -> list[tuple[str, str]]:
    """Name and rule of each refused setting; never its value, which may be a secret."""
    # A rule about several settings has no location; its text names them.
    return [
        (PREFIX + (".".join(map(str, detail["loc"])).upper() or "*"), detail["msg"])
        for detail in error.errors(include_input=False, include_url=False, include_context=False)
    ]
