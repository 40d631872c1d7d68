"""Request of a capture."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """Labels, targets and sizes of a capture. Captures with different sizes are not comparable.

    label: name of the capture. tuning: `off`, or the active profiles.
    kind: `host` or `vm`; `auto` detects a VM by its CPU.
    vcpus: required number of usable CPUs; 0 accepts any number.
    harness: digest of the sent modules.
    fio_target, rdma_peer: if empty, the probe is skipped.
    """

    label: str
    kind: str
    tuning: str = "off"
    vcpus: int = 0
    harness: str = ""
    fio_target: str = ""
    rdma_peer: str = ""
    rdma_device: str = ""
    vllm_model: str = "facebook/opt-125m"
    repetitions: int = 5
    # About a second of a core at 3 GHz.
    cpu_steps: int = 8_000_000
    # Two buffers of this size must exceed the last-level cache: 300 MiB per socket of a Xeon 8570.
    memory_bytes: int = 512 << 20
    # Duration of a run of fio or ib_write_bw.
    seconds: int = 10
