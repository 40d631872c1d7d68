"""Telemetry of a slice: its values with their limits, as hosts send them and the API shows them.

A host may be hostile, and the root of a guest always may be. A value decides nothing; a silent
guest is only named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

# The host's collector has the same limits for a guest (`slice/_guest_values.py`).
HIGHEST = 2**53 - 1
GPUS = 16
NUMA_NODES = 16
# More slices than any host has.
_SLICES = 256

Count = Annotated[int, Field(ge=0, le=HIGHEST)]
Names = Annotated[list[Annotated[str, Field(max_length=32)]], Field(max_length=16)]
Load = Annotated[float, Field(ge=0, le=1e6)]


class Values(BaseModel):
    """Values of a source. An unknown name is left out, a wrong value refuses all of them."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="ignore",
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": False},
    )


class HostValues(Values):
    """What the host measured without the guest. Numbers without another unit are counters, which
    begin again when the machine or its guard is started again.
    """

    source: Literal["host"] = "host"
    state: Literal[
        "no state", "running", "blocked", "paused", "in shutdown", "shut off", "crashed",
        "suspended",
    ] = Field(description="State of the machine.")  # fmt: skip
    cpu_s: Annotated[float, Field(ge=0, le=1e12)] | None = None
    vcpus: Annotated[int, Field(ge=0, le=4096)] | None = None
    memory_bytes: Count | None = None
    large_pages_bytes: Count | None = Field(None, description="Memory on large pages.")
    node_memory_bytes: Annotated[list[Count], Field(max_length=NUMA_NODES)] | None = Field(
        None, description="Memory on each NUMA node of the host."
    )
    disk_read_bytes: Count | None = None
    disk_written_bytes: Count | None = None
    disk_reads: Count | None = None
    disk_writes: Count | None = None
    sent_bytes: Count | None = None
    sent_packets: Count | None = None
    received_bytes: Count | None = None
    received_packets: Count | None = None
    received_dropped_packets: Count | None = None
    address_leased: bool | None = Field(None, description="Whether it has its address by DHCP.")
    refused_packets: dict[Annotated[str, Field(pattern="^[a-z0-9_]{1,32}$")], Count] = Field(
        default_factory=dict, max_length=32, description="Packets that the guard refused, by kind."
    )


class GpuValues(Values):
    """A GPU, by what its driver in the guest says."""

    index: Annotated[int, Field(ge=0, lt=GPUS)]
    utilisation_percent: Annotated[float, Field(ge=0, le=100)] | None = None
    memory_used_bytes: Count | None = None
    memory_total_bytes: Count | None = None
    temperature_c: Annotated[float, Field(ge=0, le=1000)] | None = None
    power_w: Annotated[float, Field(ge=0, le=100_000)] | None = None
    ecc_corrected: Count | None = None
    ecc_uncorrected: Count | None = None


class GuestValues(Values):
    """What the guest says of itself; its root can make it say anything.

    disk: sum of the mounted file systems. xid: last error number of NVIDIA's driver.
    """

    source: Literal["guest"] = "guest"
    age_s: Annotated[float, Field(ge=0, le=3600, description="When the host received them.")]
    uptime_s: Annotated[float, Field(ge=0, le=1e10)] | None = None
    cpus: Annotated[int, Field(ge=0, le=4096)] | None = None
    load_1: Load | None = None
    load_5: Load | None = None
    load_15: Load | None = None
    memory_total_bytes: Count | None = None
    memory_available_bytes: Count | None = None
    disk_total_bytes: Count | None = None
    disk_free_bytes: Count | None = None
    cuda: Literal["ready", "failed", "absent"] | None = Field(
        None, description="Whether CUDA initialises."
    )
    xid: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    gpus: Annotated[list[GpuValues], Field(max_length=GPUS)] = []

    @field_validator("gpus")
    @classmethod
    def _each_once(cls, gpus: list[GpuValues]) -> list[GpuValues]:
        """Of each GPU the last values. Two series of the same name make metrics ambiguous."""
        return list({gpu.index: gpu for gpu in gpus}.values())


class SliceValues(Values):
    """The part of a snapshot about a slice."""

    allocation_id: Annotated[str, Field(max_length=64, pattern="^[0-9a-f-]*$")]
    host: HostValues
    guest: GuestValues | None = None


class Snapshot(Values):
    """What a host printed. problems: its sources that did not answer. differs: parts of its
    baseline that are not as bootstrap left them.
    """

    version: Literal[1]
    problems: Names = []
    differs: Names = []
    slices: Annotated[list[SliceValues], Field(max_length=_SLICES)]

    @classmethod
    def read(cls, text: bytes) -> Self | str:
        """The snapshot in the answer of a host, or the place of the first error in it."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as invalid:
            error = invalid.errors(include_input=False, include_url=False)[0]
            # Names of fields come from the host; they go to the log.
            return f"{'.'.join(map(str, error['loc']))[:100]}: {error['msg'][:100]}"


# Values that change while a guest lives: it asks for the time or its address, or keeps a journal.
_SIGNS = ("sent_packets", "disk_writes")


def is_silent(
    samples: Sequence[tuple[float, Mapping[str, Any], Mapping[str, Any] | None]],
    *,
    since: float,
    until: float,
    gap_s: float,
) -> bool:
    """Whether a running guest has shown no sign of life in this time.

    samples: time and values of host and guest, the oldest first. After a sample with a missing
    value, or a gap of more than gap_s seconds, the answer is False: the guest may have spoken.
    """
    times = [since, *(at for at, _host, _guest in samples), until]
    if any(later - earlier > gap_s for earlier, later in pairwise(times)):
        return False
    if any(host.get("state") != "running" or guest is not None for _at, host, guest in samples):
        return False
    signs = {tuple(host.get(sign) for sign in _SIGNS) for _at, host, _guest in samples}
    return len(signs) == 1 and None not in signs.pop()
