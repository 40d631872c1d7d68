"""GPU probes: rates of the first visible device by the CUDA driver, and throughput of vLLM.

The driver API is called through ctypes, so no toolkit is needed. An H200 reached 32.5
TFLOP/s and 4.27 TB/s in November 2026.
"""

from __future__ import annotations

import ctypes
import re
import struct
import tempfile
from typing import TYPE_CHECKING, Any

from reconciler.benchmark.harness import probe
from reconciler.benchmark.harness.probe import Failed, Reason, Request, Unavailable, metric

if TYPE_CHECKING:
    from collections.abc import Callable

_MULTIPROCESSORS = ctypes.c_int(16)  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_STREAM = ctypes.c_void_p(0)

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

_VLLM_PROMPTS, _VLLM_TOKENS, _VLLM_LIMIT_S = 200, 128, 840
_CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_MODEL = re.compile(r"[A-Za-z0-9/][A-Za-z0-9._/-]{0,199}")
_THROUGHPUT = re.compile(r"^Throughput: .*?([\d.]+) output tokens/s", re.MULTILINE)


def deadline_s(request: Request) -> float:
    # Loading the driver of eight GPUs and compiling may take a minute.
    return 180 + 10 * request.repetitions


def measure(request: Request) -> dict[str, Any]:
    """FP64 rate of plain FMA (not the tensor cores), and copy bandwidth, reads plus writes."""
    rounds = request.repetitions
    gpu = Gpu()
    try:
        count = gpu.get("cuDeviceGetAttribute", ctypes.c_int, _MULTIPROCESSORS, gpu.device)
        threads = count.value * _BLOCKS_EACH * _THREADS
        operations = 2 * _CHAINS * _STEPS * threads
        moved = 2 * _COPY_BYTES * _COPIES
        fma = [operations / seconds / 1e12 for seconds in _time_fma(gpu, rounds, threads)]
        copied = [moved / seconds / 1e9 for seconds in _time_copies(gpu, rounds)]
        # The CUDA version that the driver supports.
        major, rest = divmod(gpu.get("cuDriverGetVersion", ctypes.c_int).value, 1000)
        name = gpu.get("cuDeviceGetName", ctypes.c_char * 256, ctypes.c_int(256), gpu.device)
        return {
            "tool": {"name": "cuda driver", "version": f"{major}.{rest // 10}"},
            "subject": name.value.decode(errors="replace"),
            "workload": {
                "fma_steps": _STEPS,
                "fma_threads": threads,
                "copy_bytes": _COPY_BYTES,
                "copies": _COPIES,
                "repetitions": rounds,
            },
            "metrics": [metric("gpu.fp64", "TFLOP/s", fma), metric("gpu.hbm_copy", "GB/s", copied)],
        }
    finally:
        gpu.close()


def _time_fma(gpu: Gpu, rounds: int, threads: int) -> list[float]:
    sums = gpu.allocate(8 * threads)
    # The driver compiles the kernel for this device.
    module = gpu.get("cuModuleLoadData", ctypes.c_void_p, ctypes.c_char_p(KERNEL.encode()))
    kernel = gpu.get("cuModuleGetFunction", ctypes.c_void_p, module, ctypes.c_char_p(b"fma64"))
    steps = ctypes.c_uint(_STEPS)
    arguments = (ctypes.c_void_p * 2)(ctypes.addressof(sums), ctypes.addressof(steps))
    grid = [ctypes.c_uint(size) for size in (threads // _THREADS, 1, 1, _THREADS, 1, 1, 0)]

    def queue() -> None:
        gpu.call("cuLaunchKernel", kernel, *grid, _STREAM, arguments, ctypes.c_void_p(0))

    samples = gpu.time(queue, rounds)
    last = gpu.last_bytes(sums, 8 * threads)
    _ensure_calculated(last == bytes.fromhex("0000000000003040"), "16.0 from each thread")
    return samples


def _time_copies(gpu: Gpu, rounds: int) -> list[float]:
    size = ctypes.c_size_t(_COPY_BYTES)
    source, target = gpu.allocate(_COPY_BYTES), gpu.allocate(_COPY_BYTES)
    gpu.call("cuMemsetD8_v2", source, ctypes.c_ubyte(0xA5), size)
    gpu.call("cuMemsetD8_v2", target, ctypes.c_ubyte(0), size)

    def queue() -> None:
        for _ in range(_COPIES):
            gpu.call("cuMemcpyDtoDAsync_v2", target, source, size, _STREAM)

    samples = gpu.time(queue, rounds)
    last = gpu.last_bytes(target, _COPY_BYTES)
    _ensure_calculated(last == b"\xa5" * 8, "the copied bytes at the end")
    return samples


def _ensure_calculated(right: bool, expected: str) -> None:
    remedy = "this GPU miscalculates: take it out of service"
    probe.ensure_result(right, expected=expected, found="another result", remedy=remedy)


def vllm_deadline_s(_request: Request) -> float:
    return _VLLM_LIMIT_S + 60


def measure_vllm(request: Request) -> dict[str, Any]:
    """Output tokens per second of a single run, because the engine takes minutes to start."""
    tool, model = probe.find_tool("vllm", "vLLM"), request.vllm_model
    expected = "the name or path of a model"
    probe.ensure_name(model, _MODEL, expected=expected, remedy="for example facebook/opt-125m")
    # Offline: a download would falsify the measurement and has no limit.
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    argv = [tool, "bench", "throughput", "--model", model]
    argv += ["--input-len", str(_VLLM_TOKENS), "--output-len", str(_VLLM_TOKENS)]
    argv += ["--num-prompts", str(_VLLM_PROMPTS)]
    with tempfile.TemporaryDirectory() as folder:
        # Not below the user's home, where they would stay.
        caches = dict.fromkeys(_CACHES, folder)
        output = probe.run_tool(argv, timeout=_VLLM_LIMIT_S, extra={**offline, **caches})
    rate = parse_vllm(output)
    return {
        "tool": {"name": "vllm", "version": probe.tool_version(tool)},
        "subject": model,
        "workload": {
            "model": model,
            "prompts": _VLLM_PROMPTS,
            "input_tokens": _VLLM_TOKENS,
            "output_tokens": _VLLM_TOKENS,
        },
        "metrics": [metric("vllm.throughput", "token/s", [rate])],
    }


def parse_vllm(text: str) -> float:
    """Output tokens per second, from the last line of the benchmark."""
    expected = "a line `Throughput: … output tokens/s`"
    remedy = "use a vLLM that has `vllm bench throughput`"
    return probe.last_figure(text, _THROUGHPUT, expected=expected, remedy=remedy)


class Gpu:
    """The first visible device with its primary context, held until `close`."""

    def __init__(self) -> None:
        try:
            self._library: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Unavailable(
                "cuda_driver_missing",
                expected="NVIDIA's driver library libcuda.so.1",
                found=str(error),
                remedy="install the NVIDIA driver on the machine that has the GPU",
            ) from error
        if result := self._library.cuInit(ctypes.c_uint(0)):
            raise _refused_start(result, self._text(result))
        self.device = self.get("cuDeviceGet", ctypes.c_int, ctypes.c_int(0))
        self.call(
            "cuCtxSetCurrent", self.get("cuDevicePrimaryCtxRetain", ctypes.c_void_p, self.device)
        )

    def close(self) -> None:
        self._library.cuDevicePrimaryCtxRelease_v2(self.device)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver; Failed `cuda_failed` for an error."""
        if result := getattr(self._library, name)(*arguments):
            raise Failed(
                "cuda_failed",
                expected=f"{name} to succeed",
                found=self._text(result),
                remedy="check the kernel log for Xid messages",
            )

    def get(self, name: str, kind: type[Any], *arguments: Any) -> Any:
        """Call a function whose first parameter is for its result, of this ctypes type."""
        result = kind()
        self.call(name, ctypes.byref(result), *arguments)
        return result

    def allocate(self, size: int) -> ctypes.c_ulonglong:
        """Address of new device memory, which is freed with the process."""
        address: ctypes.c_ulonglong = self.get(
            "cuMemAlloc_v2", ctypes.c_ulonglong, ctypes.c_size_t(size)
        )
        return address

    def last_bytes(self, address: ctypes.c_ulonglong, size: int) -> bytes:
        """The last eight bytes of device memory of this size."""
        last = ctypes.c_ulonglong(address.value + size - 8)
        content: bytes = self.get(
            "cuMemcpyDtoH_v2", ctypes.c_char * 8, last, ctypes.c_size_t(8)
        ).raw
        return content

    def time(self, queue: Callable[[], None], rounds: int) -> list[float]:
        """Seconds of the operations that `queue()` queues, by the device's clock."""
        # The first run warms up: clock speed and compilation.
        return [self._seconds(queue) for _ in range(rounds + 1)][1:]

    def _seconds(self, queue: Callable[[], None]) -> float:
        marks = [self.get("cuEventCreate", ctypes.c_void_p, ctypes.c_uint(0)) for _ in range(2)]
        self.call("cuEventRecord", marks[0], _STREAM)
        queue()
        self.call("cuEventRecord", marks[1], _STREAM)
        self.call("cuEventSynchronize", marks[1])
        elapsed: float = self.get("cuEventElapsedTime", ctypes.c_float, *marks).value
        for mark in marks:
            self.call("cuEventDestroy_v2", mark)
        return elapsed / 1e3

    def _text(self, result: int) -> str:
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(ctypes.c_int(result), ctypes.byref(name))
        return f"error {result} {(name.value or b'unknown').decode(errors='replace')}"


def _refused_start(result: int, text: str) -> Reason:
    """Reason for an error of cuInit."""
    if result == 100:  # CUDA_ERROR_NO_DEVICE
        expected = "a GPU that the driver can use"
        remedy = "on a slice host GPUs belong to vfio-pci; capture inside the VM"
        return Unavailable("gpu_missing", expected=expected, found=text, remedy=remedy)
    code, remedy = "cuda_failed", "compare the versions of driver library and kernel module"
    if result == 802:  # CUDA_ERROR_SYSTEM_NOT_READY
        code = "cuda_system_not_ready"
        remedy = "start Fabric Manager, or load the driver with NVLink disabled in a VM"
    return Failed(code, expected="cuInit to succeed", found=text, remedy=remedy)
