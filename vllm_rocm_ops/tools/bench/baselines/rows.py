"""Call what runs in place of an op on rows."""

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.op import Op


def four_launches(activation: Op) -> Callable[..., object]:
    """Return a shared expert's activation and gate as vLLM runs them, with the plugin's kernels of the activation and of the GEMM."""

    def call(input: Tensor, tokens: Tensor, expert_gate: Tensor, *options) -> object:
        made = activation(input, *options)
        return made, torch.sigmoid(ops.unquantized_gemm(tokens, expert_gate)) * tokens  # as wide as down_proj's result

    return call
