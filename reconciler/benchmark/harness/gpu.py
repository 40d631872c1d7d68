"""GPU probe: double-precision rate and memory bandwidth of the first visible device.

Not run on hardware yet (no GPU was lent to the session that wrote it).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from ctypes import c_uint
from typing import Any

from reconciler.benchmark.harness.cuda import Gpu
from reconciler.benchmark.harness.reasons import Failed
from reconciler.benchmark.harness.request import Request
from reconciler.benchmark.harness.series import metric

_COPY_BYTES, _COPIES = 2 << 30, 20
_CHAINS, _STEPS = 8, 400_000
# Eight blocks of 256 fill a multiprocessor's 2048 threads.
_THREADS, _BLOCKS_EACH = 256, 8

# Each thread runs independent chains x = x / 2 + 1, which converge to 2 from any start. The sum of
# all chains therefore proves the work without a second computation.
_CHAIN = "".join(f"  fma.rn.f64 %x{i}, %x{i}, %half, %one;\n" for i in range(_CHAINS))
_START = "".join(
    f"  add.f64 %x{i}, %start, 0d{struct.pack('>d', i).hex()};\n" for i in range(_CHAINS)
)
_SUM = "".join(f"  add.f64 %sum, %sum, %x{i};\n" for i in range(_CHAINS))
KERNEL = f"""
.version 6.0
.target sm_60
.address_size 64
.visible .entry fma64(.param .u64 out, .param .u32 steps)
{{
  .reg .pred %more;
  .reg .b32 %left, %index, %block, %size, %lane;
  .reg .b64 %base, %offset;
  .reg .f64 %x<{_CHAINS}>, %half, %one, %start, %sum;
  ld.param.u64 %base, [out];
  ld.param.u32 %left, [steps];
  cvta.to.global.u64 %base, %base;
  mov.u32 %block, %ctaid.x;
  mov.u32 %size, %ntid.x;
  mov.u32 %lane, %tid.x;
  mad.lo.u32 %index, %block, %size, %lane;
  cvt.rn.f64.u32 %start, %index;
  mov.f64 %half, 0d3fe0000000000000;
  mov.f64 %one, 0d3ff0000000000000;
  mov.f64 %sum, 0d0000000000000000;
{_START}
again:
{_CHAIN}
  sub.u32 %left, %left, 1;
  setp.ne.u32 %more, %left, 0;
  @%more bra again;
{_SUM}
  mul.wide.u32 %offset, %index, 8;
  add.u64 %base, %base, %offset;
  st.global.f64 [%base], %sum;
  ret;
}}
"""


def deadline_s(request: Request) -> float:
    # Loading the driver of eight GPUs and compiling may take a minute.
    return 180 + 10 * request.repetitions


def measure(request: Request) -> dict[str, Any]:
    """FP64 rate of plain FMA (not the tensor cores), and copy bandwidth, reads plus writes."""
    rounds = request.repetitions
    with Gpu() as gpu:
        threads = gpu.multiprocessors * _BLOCKS_EACH * _THREADS
        work = 2 * _CHAINS * _STEPS * threads
        moved = 2 * _COPY_BYTES * _COPIES
        fma = [work / seconds / 1e12 for seconds in _fp64(gpu, rounds)]
        copied = [moved / seconds / 1e9 for seconds in _copies(gpu, rounds)]
        return {
            "tool": {"name": "cuda driver", "version": gpu.driver},
            "subject": gpu.name,
            "workload": {
                "fma_steps": _STEPS,
                "fma_threads": threads,
                "copy_bytes": _COPY_BYTES,
                "copies": _COPIES,
                "repetitions": rounds,
            },
            "metrics": [
                metric("gpu.fp64", "TFLOP/s", fma),
                metric("gpu.hbm_copy", "GB/s", copied),
            ],
        }


def _fp64(gpu: Gpu, rounds: int) -> list[float]:
    blocks = gpu.multiprocessors * _BLOCKS_EACH
    size = 8 * blocks * _THREADS
    out = gpu.allocate(size)
    kernel = gpu.kernel(KERNEL, "fma64")
    steps = c_uint(_STEPS)
    samples = _timed(gpu, lambda: gpu.launch(kernel, blocks, _THREADS, out, steps), rounds)
    _check(gpu.read(out, size - 8, 8) == bytes.fromhex("0000000000003040"), "16.0 from each thread")
    return samples


def _copies(gpu: Gpu, rounds: int) -> list[float]:
    source, target = gpu.allocate(_COPY_BYTES), gpu.allocate(_COPY_BYTES)
    gpu.fill(source, 0xA5, _COPY_BYTES)
    gpu.fill(target, 0, _COPY_BYTES)

    def queue() -> None:
        for _ in range(_COPIES):
            gpu.copy(target, source, _COPY_BYTES)

    samples = _timed(gpu, queue, rounds)
    _check(gpu.read(target, _COPY_BYTES - 8, 8) == b"\xa5" * 8, "the copied bytes at the end")
    return samples


def _timed(gpu: Gpu, queue: Callable[[], None], rounds: int) -> list[float]:
    gpu.seconds(queue)  # warm up: clock speed and compilation
    return [gpu.seconds(queue) for _ in range(rounds)]


def _check(right: bool, expected: str) -> None:
    if not right:
        raise Failed(
            "result_wrong",
            expected=expected,
            found="another result",
            remedy="this GPU miscalculates: take it out of service",
        )
