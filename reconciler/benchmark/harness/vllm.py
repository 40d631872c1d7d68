"""vLLM probe: offline throughput benchmark of an installed vLLM, with a local model."""

from __future__ import annotations

import re
from typing import Any

from reconciler.benchmark.harness import program
from reconciler.benchmark.harness.reasons import Failed
from reconciler.benchmark.harness.request import Request
from reconciler.benchmark.harness.series import metric

_PROMPTS, _TOKENS = 200, 128
_LIMIT_S = 840
_MODEL = re.compile(r"[A-Za-z0-9/][A-Za-z0-9._/-]{0,199}")
_LINE = re.compile(r"^Throughput: .*?([\d.]+) output tokens/s", re.MULTILINE)


def deadline_s(_request: Request) -> float:
    return _LIMIT_S + 60


def measure(request: Request) -> dict[str, Any]:
    """Output tokens per second of a single run, because the engine takes minutes to start."""
    tool = program.find("vllm", "vLLM")
    if not _MODEL.fullmatch(request.vllm_model):
        raise Failed(
            "name_invalid",
            expected="the name or path of a model",
            found=repr(request.vllm_model),
            remedy="for example facebook/opt-125m",
        )
    # Offline: a download would falsify the measurement and has no limit.
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    argv = [tool, "bench", "throughput", "--model", request.vllm_model]
    argv += ["--input-len", str(_TOKENS), "--output-len", str(_TOKENS)]
    argv += ["--num-prompts", str(_PROMPTS)]
    out, _ = program.run(argv, timeout=_LIMIT_S, extra=offline)
    return {
        "tool": {"name": "vllm", "version": program.version(tool, "--version")},
        "subject": request.vllm_model,
        "workload": {
            "model": request.vllm_model,
            "prompts": _PROMPTS,
            "input_tokens": _TOKENS,
            "output_tokens": _TOKENS,
        },
        "metrics": [metric("vllm.throughput", "token/s", [parse(out)])],
    }


def parse(text: str) -> float:
    """Output tokens per second, from the last line of the benchmark."""
    rates = _LINE.findall(text)
    if not rates:
        raise Failed(
            "output_unreadable",
            expected="a line `Throughput: … output tokens/s`",
            found=repr(text[-300:]),
            remedy="use a vLLM that has `vllm bench throughput`",
        )
    return float(rates[-1])
