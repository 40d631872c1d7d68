"""Network namespaces for the sockets of parity's probes."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

_CLONE_NEWNET = 0x40000000


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Sockets created inside belong to this namespace of `ip netns` for their whole life."""
    there = os.open(_host.path(f"/run/netns/{name}"), os.O_RDONLY | os.O_CLOEXEC)
    try:
        with inside(there):
            yield
    finally:
        os.close(there)


@contextlib.contextmanager
def anonymous() -> Iterator[int]:
    """Descriptor of a new namespace without a name. It ends with this process, however it ends."""
    with _returning():
        _call("unshare", _CLONE_NEWNET)
        there = _current()
    try:
        yield there
    finally:
        os.close(there)


@contextlib.contextmanager
def inside(descriptor: int) -> Iterator[None]:
    """Sockets created inside belong to this namespace for their whole life, as do programs."""
    with _returning():
        enter(descriptor)
        yield


def enter(descriptor: int) -> None:
    _call("setns", descriptor, _CLONE_NEWNET)


@contextlib.contextmanager
def _returning() -> Iterator[None]:
    """Return to the caller's namespace at the end."""
    here = _current()
    try:
        yield
    finally:
        try:
            enter(here)
        finally:
            os.close(here)


def _current() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _call(function: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise Refusal(
            "namespace_refused",
            expected="to enter a network namespace",
            found=os.strerror(number),
            remedy="run as root on the host itself, not in a container",
        )
