"""Seam, CPU only: FP8 linear layers in plain PyTorch, so that FP8 models run, and are tested, on any machine."""

import torch

from vllm_rocm_ops.vllm import seam

BLOCK = 128


@torch.library.custom_op("vllm_rocm_ops_cpu::fp8_linear", mutates_args=())
def fp8_linear(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """a [m, k] @ b [k, n], times a scale per tensor or row of a and per tensor or column of b, in fp32."""
    output = (a.float() @ b.float()) * a_scale.reshape(-1, 1) * b_scale.reshape(1, -1)
    return (output if bias is None else output + bias.float()).to(dtype)


@fp8_linear.register_fake
def _(a, b, a_scale, b_scale, bias, dtype):
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


def dequantize_blocks(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight [n, k] with one scale per 128x128 block, in fp32."""
    rows, columns = weight.shape
    return weight.float() * scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


@torch.library.custom_op("vllm_rocm_ops_cpu::fp8_block_linear", mutates_args=())
def fp8_block_linear(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """a [m, k] with a scale per row and 128 columns, times b [n, k] transposed with a scale per 128x128 block, in fp32."""
    values = a.float() * a_scale.repeat_interleave(BLOCK, 1)[:, : a.shape[1]]
    return (values @ dequantize_blocks(b, b_scale).t()).to(dtype)


@fp8_block_linear.register_fake
def _(a, b, a_scale, b_scale, dtype):
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def probe() -> None:
    """vLLM's kernel tables and base classes are as expected."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel

    for table in ("_POSSIBLE_FP8_KERNELS", "_POSSIBLE_FP8_BLOCK_KERNELS"):
        seam.require(isinstance(getattr(linear, table, None), dict), table)
    seam.require_parameters(FP8ScaledMMLinearKernel.is_supported, "compute_capability")
    seam.require_parameters(Fp8BlockScaledMMLinearKernel.can_implement, "config")
    seam.require_parameters(Fp8BlockScaledMMLinearKernel.apply_block_scaled_mm, "A", "B", "As", "Bs")
    names = ("A", "B", "out_dtype", "As", "Bs", "bias", "output_shape")
    seam.require_parameters(FP8ScaledMMLinearKernel.apply_scaled_mm, *names)


def install() -> None:
    """Put the kernels first in vLLM's tables: its `register_linear_kernel` only appends, and not block kernels in 0.32."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
    from vllm.platforms import PlatformEnum

    class ReferenceFp8Linear(FP8ScaledMMLinearKernel):
        """One scale per tensor, or per token and output channel."""

        @classmethod
        def is_supported(cls, compute_capability=None):
            return True, None

        @classmethod
        def can_implement(cls, c):
            return not c.activation_quant_key.scale.group_shape.is_per_group(), "group scales"

        def apply_scaled_mm(self, *, A, B, out_dtype, As, Bs, bias, output_shape):
            output = torch.ops.vllm_rocm_ops_cpu.fp8_linear(A, B, As, Bs, bias, out_dtype)
            return output.view(output_shape)

    class ReferenceFp8BlockLinear(Fp8BlockScaledMMLinearKernel):
        """One scale per token and 128 columns, and per 128x128 block of the weight."""

        @classmethod
        def is_supported(cls, compute_capability=None):
            return True, None

        @classmethod
        def can_implement(cls, config):
            shape = config.weight_quant_key.scale.group_shape
            if (shape.row, shape.col) != (BLOCK, BLOCK):
                return False, "blocks other than 128x128"
            return super().can_implement(config)

        def process_weights_after_loading(self, layer):
            if not getattr(layer, "_cpu_skip_gemm_dispatch", False):  # latent attention reads this weight as it is
                super().process_weights_after_loading(layer)

        def apply_block_scaled_mm(self, A, B, As, Bs):
            return torch.ops.vllm_rocm_ops_cpu.fp8_block_linear(A, B, As, Bs, self.config.out_dtype)

    linear._POSSIBLE_FP8_KERNELS.setdefault(PlatformEnum.CPU, []).insert(0, ReferenceFp8Linear)
    linear._POSSIBLE_FP8_BLOCK_KERNELS.setdefault(PlatformEnum.CPU, []).insert(0, ReferenceFp8BlockLinear)


SEAM = seam.Seam(
    name="cpu_linear",
    replaces="the CPU rows of _POSSIBLE_FP8_KERNELS and _POSSIBLE_FP8_BLOCK_KERNELS",
    probe=probe,
    install=install,
    platforms=("cpu",),
)
