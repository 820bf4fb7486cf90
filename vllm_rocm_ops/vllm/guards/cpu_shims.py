"""Fill the gaps of vLLM's CPU build for FP8 models, so that they can be tested on any machine. CPU only."""

from vllm_rocm_ops.vllm import compat, seam


def probe() -> None:
    """Raise `Unavailable` unless the functions that the seam replaces or calls exist."""
    import torch
    from vllm import _custom_ops
    from vllm.model_executor.layers.quantization.fbgemm_fp8 import FBGEMMFp8Config

    seam.require_parameters(
        _custom_ops.scaled_fp8_quant,
        "input",
        "scale",
        "num_token_padding",
        "scale_ub",
        "use_per_token_if_dynamic",
        "output",
        "group_shape",
    )
    seam.require(isinstance(compat.fused_act_quants(), dict), "_FUSED_ACT_QUANT")
    seam.require_parameters(FBGEMMFp8Config.__init__, "ignore_list", "input_scale_ub")
    seam.require(hasattr(torch.cpu, "_is_amx_tile_supported"), "a torch with torch.cpu._is_amx_tile_supported")


def install() -> None:
    """Replace what does not work on CPU."""
    import torch
    from vllm import _custom_ops
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.quantization.fbgemm_fp8 import FBGEMMFp8Config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, kFp8StaticTensorSym

    # Loading a checkpoint with per-tensor scales requantizes the weight by an op that does nothing on CPU.
    without_gap = _custom_ops.scaled_fp8_quant

    def scaled_fp8_quant(
        input,
        scale=None,
        num_token_padding=None,
        scale_ub=None,
        use_per_token_if_dynamic=False,
        output=None,
        group_shape=None,
    ):
        if input.device.type != "cpu" or group_shape not in (None, (-1, -1)) or output is not None:
            return without_gap(input, scale, num_token_padding, scale_ub, use_per_token_if_dynamic, output, group_shape)
        group = GroupShape.PER_TOKEN if use_per_token_if_dynamic and scale is None else GroupShape.PER_TENSOR
        quant = QuantFP8(static=scale is not None, group_shape=group, num_token_padding=num_token_padding)
        return quant.forward_native(input, scale, scale_ub)

    _custom_ops.scaled_fp8_quant = scaled_fp8_quant

    # vLLM's entry for this key calls an op that CPU builds lack.
    compat.fused_act_quants().pop((SiluAndMul, kFp8StaticTensorSym), None)

    # On a CPU with AMX vLLM selects other kernels, which no seam serves.
    torch.cpu._is_amx_tile_supported = lambda: False

    # vLLM treats a device without a capability, such as a CPU, as a GPU that needs Marlin.
    construct = FBGEMMFp8Config.__init__

    def __init__(self, *arguments, **keywords):
        construct(self, *arguments, **keywords)
        self.use_marlin = False

    FBGEMMFp8Config.__init__ = __init__


SEAM = seam.Seam(
    name="cpu_shims",
    replaces="_custom_ops.scaled_fp8_quant, FBGEMMFp8Config.use_marlin, one row of _FUSED_ACT_QUANT, torch.cpu._is_amx_tile_supported",
    probe=probe,
    install=install,
    platforms=("cpu",),
)
