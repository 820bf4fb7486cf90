"""Let vLLM's own FP8 linear kernels accept a `QuantizedActivation`, and advertise it.

`FP8ScaledMMLinearKernel.apply_weights` accepts one already, but only a few subclasses advertise it. The block-scaled
kernels accept none. `Fp8LinearMethod` and `FBGEMMFp8LinearMethod` do not tell the layer which input its kernel accepts.
A kernel that overrides `apply_weights` is left alone, because it may quantize in its own way.

Weights from vLLM's weight cache are already prepared, and `Fp8LinearMethod` skips its kernel's preparation. Then this
seam tells the kernel the order of the weight, and the layer its kernel's input.
"""

import functools

from vllm_rocm_ops.vllm import compat, seam
from vllm_rocm_ops.vllm.graph import moe_side_channel


def probe() -> None:
    """Raise `Unavailable` unless both base classes and a layer's record of its input quantization are as expected."""
    import torch
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
    from vllm.model_executor.layers.fusion.quant_activation import as_quantized_activation, expose_input_quant_key

    for kernel in (FP8ScaledMMLinearKernel, Fp8BlockScaledMMLinearKernel):
        seam.require_parameters(kernel.apply_weights, "layer", "x", "bias")
        seam.require_parameters(kernel.process_weights_after_loading, "layer")
        seam.require_parameters(kernel.input_quant_key)
    seam.require_parameters(Fp8BlockScaledMMLinearKernel.apply_block_scaled_mm, "A", "B", "As", "Bs")
    seam.require(hasattr(Fp8BlockScaledMMLinearKernel, "apply_input_quant"), "apply_input_quant")
    seam.require_parameters(as_quantized_activation, "x", "expected_key")
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

    seam.require_parameters(Fp8LinearMethod.process_weights_after_loading, "layer")
    layer, kernel = torch.nn.Module(), type("Kernel", (), {"input_quant_key": lambda self: "key"})()
    expose_input_quant_key(layer, kernel)
    seam.require(
        compat.input_quant_key_getter()(layer) == "key", "the input_quant_key that expose_input_quant_key stored"
    )


def install() -> None:
    """Wrap the two base classes."""
    import torch
    from vllm import envs
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
    from vllm.model_executor.layers.fusion.quant_activation import as_quantized_activation, expose_input_quant_key
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

    from vllm_rocm_ops.vllm.graph import compiled_ops, fused_quant
    from vllm_rocm_ops.vllm.linear import block_scaled_linear, weight_order

    current = moe_side_channel.current

    def set_input_quantization(layer, kernel) -> None:
        """Store in a layer which quantized input its kernel accepts, for the producer of the input."""
        # With batch invariance Fp8LinearMethod reads its input as a tensor.
        if kernel.input_quant_key() is not None and not envs.VLLM_BATCH_INVARIANT:
            layer.vllm_rocm_ops_quantize = compiled_ops.quantizer(layer, kernel)
            layer.vllm_rocm_ops_column_major_scales = kernel.quant_fp8.column_major_scales
            layer.vllm_rocm_ops_takes_rows = block_scaled_linear.takes_rows(kernel)
            expose_input_quant_key(layer, kernel)

    def advertise(base) -> None:
        """Have kernels with the base's `apply_weights` advertise quantized input, and store it in their layers."""
        construct, prepare = base.__init__, base.process_weights_after_loading

        @functools.wraps(construct)
        def __init__(self, *arguments, **keywords):
            construct(self, *arguments, **keywords)
            key = self.config.activation_quant_key
            plain = type(self).apply_weights is base.apply_weights and getattr(self, "apply_input_quant", True)
            self.rocm_ops_input_key = key if plain and key in fused_quant.KEYS else None

        @functools.wraps(prepare)
        def process_weights_after_loading(self, layer):
            prepare(self, layer)
            set_input_quantization(layer, self)

        base.__init__ = __init__
        base.process_weights_after_loading = process_weights_after_loading
        base.input_quant_key = lambda self: getattr(self, "rocm_ops_input_key", None)

    quantize_and_multiply = Fp8BlockScaledMMLinearKernel.apply_weights

    @functools.wraps(quantize_and_multiply)
    def apply_weights(self, layer, x, bias=None, **keywords):
        key = self.input_quant_key()
        activation = as_quantized_activation(x, key)
        may_be_handed = activation is None and not torch.compiler.is_compiling()
        if (
            may_be_handed
            and current.given is not None  # in a layer of experts
            and key == fused_quant.kFp8Dynamic128Sym
            and block_scaled_linear.takes_rows(self)
        ):
            made = moe_side_channel.quantized(x)
            activation = made and fused_quant.Quantized(*made, x.dtype, x.shape, key)
        if activation is None:
            return quantize_and_multiply(self, layer, x, bias, **keywords)
        params = self._get_layer_params(layer)
        weight_scale = getattr(params, compat.block_scale_attr(params))
        data = activation.data.view(-1, activation.data.shape[-1])
        output = self.apply_block_scaled_mm(A=data, B=params.weight, As=activation.scale, Bs=weight_scale)
        if bias is not None:
            output = output + bias
        return output.to(self.config.out_dtype).view(*activation.orig_shape[:-1], params.weight.shape[0])

    Fp8BlockScaledMMLinearKernel.apply_weights = apply_weights
    advertise(FP8ScaledMMLinearKernel)
    advertise(Fp8BlockScaledMMLinearKernel)
    prepare_layer = Fp8LinearMethod.process_weights_after_loading

    @functools.wraps(prepare_layer)
    def process_weights_after_loading(self, layer):
        prepare_layer(self, layer)
        kernel = self.fp8_linear
        if compat.is_weights_pre_processed() and isinstance(
            kernel, FP8ScaledMMLinearKernel | Fp8BlockScaledMMLinearKernel
        ):
            weight_order.recall_order(kernel, layer)
            set_input_quantization(layer, kernel)

    Fp8LinearMethod.process_weights_after_loading = process_weights_after_loading


SEAM = seam.Seam(
    name="quantized_input",
    replaces="input_quant_key of FP8ScaledMMLinearKernel and Fp8BlockScaledMMLinearKernel; the latter's apply_weights; "
    "Fp8LinearMethod.process_weights_after_loading",
    probe=probe,
    install=install,
)
