"""What a capture is asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """Labels, targets and sizes. Sizes are part of each workload: other sizes, another measurement.

    label, tuning (`off`, or the profiles that are on): what the capture is of.
    kind: `host` or `vm`; `auto` asks the CPU whether it is a virtual one.
    vcpus: CPUs that the harness must find usable; 0 takes what there is.
    harness: digest of the modules that were sent.
    fio_target, rdma_peer: empty means that the probe is skipped.
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
    # About a second of one core at 3 GHz.
    cpu_steps: int = 8_000_000
    # Two such buffers must exceed the last-level cache, 300 MiB a socket on a Xeon 8570.
    memory_bytes: int = 512 << 20
    # One run of fio or ib_write_bw.
    seconds: int = 10
