"""libvirt domains through virsh, and QEMU processes."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

_VIRSH = ("virsh", "--connect", "qemu:///system")

# libvirt's virDomainState, by number.
STATES = (
    "no state",
    "running",
    "blocked",
    "paused",
    "in shutdown",
    "shut off",
    "crashed",
    "suspended",
)
# Its CPUs run; libvirt calls some domains that wait for a device blocked.
RUNNING = frozenset({"running", "blocked"})
ACTIVE = frozenset({"running", "blocked", "paused", "in shutdown", "suspended"})

# virDomainPausedReason: paused by a user (also `start --paused`), and while starting up. Only these
# may be resumed; all other reasons (a disk error, a watchdog) report a fault.
PAUSED_ON_PURPOSE = frozenset({1, 11})

# virDomainShutoffReason of a guest that powered off; libvirt forgets it with the host's boot.
_SHUT_DOWN = 1

_RESEND_SECONDS = 15
# A definition in the output of several commands, and its name.
_DEFINITION = re.compile(r"^<domain [^>]*>$.*?^  <name>([^<]*)</name>$.*?^</domain>$", re.M | re.S)
# Where libvirt keeps definitions.
_KEPT = "/etc/libvirt/qemu"
# Names that are a word of their own in virsh's form of several commands.
_WORD = re.compile(r"\w[\w.+:@-]*", re.ASCII)
# A file for each domain whose guest was asked to power off, until its next start. It has the time
# until which the guest may take, by the clock that begins at the host's boot.
_REQUESTS = "/run/gpuaas/shutdowns"


@dataclass(frozen=True)
class State:
    """A domain's state in words, with libvirt's number of the reason. stop_requested: whether
    its guest was asked to power off since its start.
    """

    name: str
    reason: int = 0
    stop_requested: bool = False

    @property
    def active(self) -> bool:
        """Whether QEMU runs for it."""
        return self.name in ACTIVE

    @property
    def runs(self) -> bool:
        """Whether its CPUs run."""
        return self.name in RUNNING

    @property
    def paused_on_purpose(self) -> bool:
        """Whether it was started or set paused, and may be resumed."""
        return self.name == "paused" and self.reason in PAUSED_ON_PURPOSE

    @property
    def off_by_guest(self) -> bool:
        """Whether the guest powered off by itself; not on request, after a crash or a loss of
        power.
        """
        return self.name == "shut off" and self.reason == _SHUT_DOWN and not self.stop_requested


def state(name: str) -> State | None:
    """A domain's state; None when libvirt has no domain of the name.

    It queries this domain alone first, because a query of all waits for one that is starting.
    """
    # virsh does not tell an absent domain from a failed query, so all domains are listed then.
    alone = states(name, ok=(0, 1))
    return alone[name] if name in alone else states().get(name)


def states(*names: str, ok: tuple[int, ...] = (0,)) -> dict[str, State]:
    """Domains of this host, defined or running, by name; every one without `names`."""
    return _states(statistics("--state", names=names, ok=ok))


def described(name: str, *, live: bool = False) -> tuple[State | None, list[str]]:
    """As `state`, with the domain's persistent definition, and with `live` what QEMU runs; no
    definition without a domain. All from a single virsh, whose start takes longest.
    """
    known: dict[str, State] = {}
    definitions: list[str] = []
    dumps = [("dumpxml", "--inactive", name), *([("dumpxml", name)] if live else [])]
    # Without its file there is most likely no domain, which only a list of all domains shows.
    if _host.path(f"{_KEPT}/{name}.xml").exists():
        commands = [f"domstats --state --nowait {name}", *map(" ".join, dumps)]
        # After a command that fails virsh goes on, and its exit code is that of the last one.
        out = _virsh("; ".join(commands), ok=(0, 1)).out
        known = _states(_numbers(out.partition("<domain")[0]))
        definitions = [match[0] for match in _DEFINITION.finditer(out)]
    if name not in known:
        known = states()
    if name not in known:
        return None, []
    if len(definitions) != len(dumps):
        definitions = [_virsh(*words).out for words in dumps]
    return known[name], definitions


def settled(name: str, check: Callable[[], object]) -> tuple[State | None, list[str]]:
    """As `described`, after a guest that was asked to power off has done so, or has not in its
    time.

    check: as for `shut_down`.
    """
    while True:
        life, definitions = described(name)
        if life is None or not life.active or not stops(name):
            return life, definitions
        check()
        time.sleep(1)


def stops(name: str) -> bool:
    """Whether a guest was asked to power off, and has time left for it."""
    return _uptime() <= float(_host.read(_request(name)) or "0")


def statistics(
    *groups: str, names: tuple[str, ...] = (), ok: tuple[int, ...] = (0,), timeout: float = 180
) -> dict[str, dict[str, int]]:
    """libvirt's numbers of domains, by name; of every one without `names`. groups: options of
    `virsh domstats`.
    """
    # --nowait: a QEMU that does not answer its monitor must not block the query of the others.
    return _numbers(_virsh("domstats", *groups, "--nowait", *names, ok=ok, timeout=timeout).out)


def _numbers(out: str) -> dict[str, dict[str, int]]:
    by_name: dict[str, dict[str, int]] = {}
    values: dict[str, int] = {}
    for line in out.splitlines():
        text = line.strip()
        if text.startswith("Domain: "):
            values = by_name.setdefault(text[len("Domain: ") :].strip("'"), {})
        key, _sep, value = text.partition("=")
        if value.lstrip("-").isdigit():
            values[key] = int(value)
    return by_name


def _states(numbers: Mapping[str, Mapping[str, int]]) -> dict[str, State]:
    requests = set(_host.listed(_REQUESTS))
    return {
        name: State(
            _word(values.get("state.state", 0)), values.get("state.reason", 0), name in requests
        )
        for name, values in numbers.items()
    }


def definition(name: str, *, live: bool = False) -> str:
    """The persistent definition of a domain that exists, or with `live` what QEMU runs."""
    return _virsh("dumpxml", *(() if live else ("--inactive",)), name).out


def definitions(names: Iterable[str]) -> dict[str, str]:
    """The persistent definitions of these domains, by name; without those that went since they were
    listed, such as that of a slice which another run releases. Those with plain names are read by a
    single virsh.
    """
    listed = list(names)
    plain = [f"dumpxml --inactive {name}" for name in listed if _WORD.fullmatch(name)]
    out = _virsh("; ".join(plain), ok=(0, 1)).out if len(plain) > 1 else ""
    read = {match[1]: match[0] for match in _DEFINITION.finditer(out)}
    by_name = {name: read[name] for name in listed if name in read}
    for name in (name for name in listed if name not in read):
        try:
            by_name[name] = definition(name)
        except Refusal:
            if state(name) is not None:
                raise
    return by_name


def forget_disk(name: str, path: str) -> None:
    """Remove a disk from the persistent definition."""
    _virsh("detach-disk", name, path, "--config")


def unplug_disk(name: str, path: str, *, deadline: float = 30) -> None:
    """Unplug a disk from a running guest, which must cooperate."""
    _virsh("detach-disk", name, path, "--live")
    end = time.monotonic() + deadline
    while path in definition(name, live=True):
        if time.monotonic() > end:
            raise Refusal(
                "disk_not_unplugged",
                expected=f"{path} unplugged from {name} within {deadline:g} s",
                found="the guest has not released it",
                remedy="nothing is to be done: the disk is gone when the guest is powered off",
            )
        time.sleep(1)


def define(xml: str) -> None:
    """Define a domain, checked against libvirt's schema; replaces a domain of the same name."""
    _virsh("define", "--validate", "/dev/stdin", stdin=xml)


def start_paused(name: str, *, timeout: float) -> None:
    """Start with the virtual CPUs stopped, so that the port can be guarded before a guest runs."""
    _virsh("start", name, "--paused", timeout=timeout)
    forget_request(name)


def forget_request(name: str) -> None:
    """From now on, the guest powers off by itself."""
    _host.remove(_request(name))


def resume(name: str) -> None:
    _virsh("resume", name)


def shut_down(name: str, *, deadline: float, check: Callable[[], object]) -> bool:
    """Ask the guest to power off and wait; False when it has not within `deadline` seconds.

    check: refuses a run that a later one has overtaken, whose guest may be another's by now.
    """
    end = time.monotonic() + deadline
    requested_at = 0.0
    while time.monotonic() < end:
        if not _active(name):
            return True
        check()
        if requested_at == 0.0:
            _note_request(name, deadline)
        # A guest that is still booting ignores the first request.
        if requested_at == 0.0 or time.monotonic() - requested_at > _RESEND_SECONDS:
            # The guest may end between query and request, and its QEMU may not answer at all.
            with contextlib.suppress(Refusal):
                _virsh("shutdown", name, timeout=max(end - time.monotonic(), 1))
            requested_at = time.monotonic()
        time.sleep(1)
    return not _active(name)


def destroy(name: str, *, check: Callable[[], object], deadline: float = 60) -> None:
    """Power the domain off. The request is repeated, because unpinning a large guest's memory takes
    time. check: as for `shut_down`.
    """
    end = time.monotonic() + deadline
    while True:
        check()
        _virsh("destroy", name, ok=(0, 1))
        if not _active(name):
            return
        if time.monotonic() > end:
            raise Refusal(
                "domain_not_stopped",
                expected=f"{name} to be off {deadline:g} s after its power was taken",
                found="libvirt still reports it active",
                remedy="look at its QEMU process and the kernel log; do not wipe its disk",
            )
        time.sleep(2)


def undefine(name: str, *, attempts: int = 3) -> None:
    """Remove the definition, with the NVRAM file when it names one."""
    uefi = "<nvram" in definition(name)
    options = ("--nvram",) if uefi else ()
    for attempt in range(attempts):
        last = attempt == attempts - 1
        done = _virsh("undefine", name, *options, ok=(0,) if last else (0, 1))
        if done.rc == 0:
            forget_request(name)
            return
        time.sleep(2)


def qemu_pid(name: str) -> int | None:
    """The process libvirt started for an active domain."""
    text = _host.read(f"/run/libvirt/qemu/{name}.pid")
    return int(text) if text and text.isdigit() and _alive(int(text)) else None


def processes(marker: str) -> dict[int, str]:
    """QEMU processes with `marker` in their arguments, including those that libvirt has lost:
    program by pid.
    """
    programs: dict[int, str] = {}
    for pid in _host.processes():
        arguments = _host.of_process(pid, "cmdline").split("\0")
        program = PurePosixPath(arguments[0]).name
        if program.startswith("qemu") and any(marker in argument for argument in arguments):
            programs[pid] = program
    return programs


def disk_io() -> str:
    """How QEMU reads and writes disks: io_uring, unless an administrator has turned it off.

    libvirt and QEMU of every supported distribution support it. Only newer kernels have the
    setting that turns it off.
    """
    off = (_host.read("/proc/sys/kernel/io_uring_disabled") or "0").strip() != "0"
    return "native" if off else "io_uring"


def _note_request(name: str, deadline: float) -> None:
    """Whatever becomes of this run, its guest's end is not the guest's own doing."""
    # Without the note the guest is still to be stopped.
    with contextlib.suppress(OSError):
        _host.write(_request(name), f"{_uptime() + deadline}\n")


def _request(name: str) -> str:
    return f"{_REQUESTS}/{name}"


def _uptime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _active(name: str) -> bool:
    domain = state(name)
    return domain is not None and domain.active


def _alive(pid: int) -> bool:
    return _host.path(f"/proc/{pid}").is_dir()


def _word(number: int) -> str:
    return STATES[number] if 0 <= number < len(STATES) else f"state {number}"


def _virsh(
    *arguments: str, ok: tuple[int, ...] = (0,), stdin: str | None = None, timeout: float = 180
) -> _command.Result:
    """Run virsh with a long limit: libvirtd stops when idle, and after a start it first queries
    QEMU's capabilities.
    """
    return _command.run([*_VIRSH, *arguments], ok=ok, stdin=stdin, timeout=timeout)
