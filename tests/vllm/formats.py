"""The formats of weights and activations: those whose linear layers the plugin serves, and those that stay vLLM's.

selection.py asks vLLM about each, and tests/pages shows them. This file imports no other of its folder.
"""

import inspect
from collections.abc import Callable
from typing import NamedTuple

from compressed import compressed, number


def kernel_by(function: str, **given) -> Callable[[tuple[int, int], tuple[str, ...]], object]:
    """Return a function (shape, keys) -> the kernel that one of vLLM's functions makes for a layer, with what it knows of `given`."""

    def make(shape: tuple[int, int], keys: tuple[str, ...]) -> object:
        import torch
        from vllm.model_executor.kernels import linear
        from vllm.model_executor.layers.quantization.utils import quant_utils

        init = getattr(linear, function)
        of_keys = zip(("weight_quant_key", "activation_quant_key"), (getattr(quant_utils, key) for key in keys))
        dtypes = dict.fromkeys(("input_dtype", "out_dtype"), torch.bfloat16)
        known = {"module_name": "test", "weight_shape": shape, **dtypes, **dict(of_keys), **given}
        return init(**{name: known[name] for name in inspect.signature(init).parameters if name in known})

    return make


def unquantized(shape: tuple[int, int], keys: tuple[str, ...]) -> Callable:
    """Return vLLM's function for 16-bit layers."""
    from vllm.model_executor.layers.utils import dispatch_unquantized_gemm

    return dispatch_unquantized_gemm()


def int4(shape: tuple[int, int], keys: tuple[str, ...]) -> object:
    """Return vLLM's kernel for a layer of symmetric INT4 weights in groups of 128; older releases ask for more."""
    import torch
    from vllm.model_executor.kernels import linear
    from vllm.scalar_type import scalar_types

    known = dict.fromkeys(("full_weight_shape", "partition_weight_shape"), shape[::-1])
    known |= {"weight_type": scalar_types.uint4b8, "act_type": torch.bfloat16, "group_size": 128}
    of_config = inspect.signature(linear.MPLinearLayerConfig).parameters
    known |= {name: False for name in ("zero_points", "has_g_idx") if name in of_config}
    config = linear.MPLinearLayerConfig(**known)
    return linear.choose_mp_linear_kernel(config)(config, "weight_packed", "weight_scale")


class Format(NamedTuple):
    """One format that the plugin serves.

    Attributes:
        title: Its name on the compatibility page.
        op: The op of its linear layers, or of its experts.
        linear: Its name after "linear " in selection.csv, empty where no seam serves them.
        written: The quant_methods of checkpoints.
        experts: Its name after "experts " in selection.csv: empty where vLLM has no such layer, None where no seam serves it.
        flavour: The flavour of engines.py that runs it.
        keys: The names of vLLM's keys of weights and inputs.
        takes: The key of the quantized input that the plugin's kernel accepts.
        group: Its row in README's support matrix, by default its own.
        needs: What an architecture must have (core/arch.py).
        without: The plugin's kernel for linear layers on the others.
        make: Makes vLLM's kernel for a layer.
        written_experts: The quant_methods of checkpoints with experts, by default as `written`.
    """

    title: str
    op: str
    linear: str
    written: str = ""
    experts: str | None = None
    flavour: str = ""
    keys: tuple[str, ...] = ()
    takes: str = "no quantized input"
    group: str = ""
    needs: str = ""
    without: str = ""
    make: Callable = kernel_by("init_fp8_linear_kernel")
    written_experts: str = ""

    def kernel(self, n: int, k: int) -> object:
        """Return the kernel that vLLM makes for a layer."""
        return self.make((n, k), self.keys)


PER_TENSOR, PER_TOKEN = "FP8, per tensor, static or dynamic", "FP8, per token and channel"
TENSOR, CHANNEL, TOKEN = "kFp8StaticTensorSym", "kFp8StaticChannelSym", "kFp8DynamicTokenSym"
BLOCKS = ("kFp8Static128BlockSym", "kFp8Dynamic128Sym")
WITHIN = "`compressed-tensors`, `quark`"
int8 = kernel_by("init_int8_linear_kernel", is_channelwise=True, is_static_input_scheme=False, input_symmetric=True)
FORMATS = (
    Format("BF16, FP16", "unquantized_gemm", "unquantized", "", "bf16", "bf16", make=unquantized),
    Format(
        *("FP8, per tensor, static", "scaled_mm", "static", f"`fp8`, {WITHIN}", "fp8 static", "static"),
        *((TENSOR, TENSOR), TENSOR, PER_TENSOR),
    ),
    Format(
        *("FP8, per tensor, dynamic", "scaled_mm", "dynamic", "`fp8`, `quark`", "fp8 dynamic"),
        keys=(TENSOR, "kFp8DynamicTensorSym"),
        group=PER_TENSOR,
    ),
    Format(PER_TOKEN, "scaled_mm", "per token", WITHIN, "fp8 channel", "token", (CHANNEL, TOKEN), TOKEN),
    Format(
        *(f"{PER_TOKEN}, quantized at load", "scaled_mm", "per token", "none: `--quantization fp8_per_channel`"),
        *("fp8 channel", "online", (CHANNEL, TOKEN), TOKEN, PER_TOKEN),
    ),
    Format(
        *(f"{PER_TOKEN}, bounded token scales", "scaled_mm", "fbgemm", "`fbgemm_fp8`", "", "bounded"),
        *(("kFp8StaticTokenSym", TOKEN), TOKEN, PER_TOKEN),
    ),
    Format(
        *("FP8, 1x128 and 128x128 blocks", "block_scaled_mm", "block", "`fp8`, `compressed-tensors`", "fp8 block"),
        *("block", BLOCKS, BLOCKS[1]),
    ),
    Format(
        *("MXFP8", "mxfp8_scaled_mm", "mxfp8", "`mxfp8`, `modelopt`, `compressed-tensors`", "mxfp8", "mxfp8"),
        needs="block_scales",
        without="RocmOpsMxfp8WeightLinear",
        make=kernel_by("init_mxfp8_linear_kernel"),
    ),
    Format(
        *("INT8, symmetric, per token or static", "gemm", "int8", WITHIN),
        group="INT8 W8A8, symmetric",
        make=int8,
    ),
    Format(
        *("INT4 weights, symmetric, BF16 inputs", "w4a16_gemm", "int4"),
        *("`compressed-tensors`, `gptq`, `quark`", "int4"),
        flavour="int4",
        group="INT4 W4A16, symmetric",
        make=int4,
        written_experts="`compressed-tensors`, `quark`; `gptq` by `--quantization moe_wna16`",
    ),
    Format(
        *("MXFP4 weights, emulated", "mx_gemm", "mxfp4", "`quark`, `mxfp4`, `compressed-tensors`"),
        make=kernel_by("init_mxfp4_linear_kernel"),
        group="MXFP4 linear layers",
    ),
    Format(
        *("MXFP4 experts, BF16 inputs", "fused_experts", "", "`mxfp4`", "mxfp4", "mxfp4_experts"),
    ),
)
GROUPS: dict[str, list[Format]] = {}
for one in FORMATS:
    GROUPS.setdefault(one.group or one.title, []).append(one)
"""The formats of each row of the support matrix."""
LINEARS = {one.linear: one for one in FORMATS if one.linear}
"""By the name in selection.csv."""


NVFP4 = number("float", 4, "tensor_group", group_size=16)
REFUSED = {
    "NVFP4": {
        "modelopt": {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "exclude_modules": ["lm_head"],
        },
        "compressed-tensors": compressed("nvfp4-pack-quantized", NVFP4, NVFP4 | {"dynamic": "local"}),
    },
    "INT4 with zero points": {
        "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    },
    "INT8 with zero points": {
        "compressed-tensors": compressed("int-quantized", number("int", 8, "channel"), number("int", 8, "token"), False)
    },
    "FP8 weights, bf16 inputs": {
        "compressed-tensors": compressed("float-quantized", number("float", 8, "channel"), None)
    },
}
"""Formats without a kernel -> quant_method -> a quantization_config."""
TABLES_OF_REFUSED = {
    "NVFP4": "_POSSIBLE_NVFP4_KERNELS",
    "FP8 weights, bf16 inputs": "_POSSIBLE_WFP8A16_KERNELS",
}
"""vLLM's tables of linear kernels for these formats, in which no seam may insert one."""
