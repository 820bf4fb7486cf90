"""Import what every engine imports, and compile a small graph: for a process that then forks engines.

A fork's first compilation took 3 s longer than its second, a third of it for imports.
"""

import os
from unittest import mock

import passes
import torch
import vllm.model_executor.models.llama
import vllm.model_executor.warmup.kernel_warmup
import vllm.v1.worker.cpu_worker  # noqa: F401
from torch._inductor import compile_fx, config
from vllm.model_executor.layers.quantization import get_quantization_config

get_quantization_config("fp8")  # imports all


def layer(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a normalized sum times a weight, and the sum, by functions that vLLM's layers use."""
    total = (x.float() + residual.float()).to(x.dtype)
    scaled = total.float() * torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    halves = torch.nn.functional.linear(scaled.to(x.dtype), weight).chunk(2, dim=-1)
    return torch.nn.functional.silu(halves[0]) * halves[1], total


def compile_once() -> None:
    x, weight = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(16, 8, dtype=torch.bfloat16)
    torch._dynamo.mark_dynamic(x, 0)
    with (
        mock.patch.dict(os.environ, TORCHDYNAMO_DISABLE="0"),
        mock.patch.object(compile_fx._InProcessFxCompile, "codegen_and_compile", passes.run_nodes),
        config.patch(force_disable_caches=True),
        torch.inference_mode(),
    ):
        torch.compile(layer, backend=compile_fx.compile_fx, fullgraph=True)(x, weight, x)
    torch._dynamo.reset()


compile_once()
