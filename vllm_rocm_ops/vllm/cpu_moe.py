"""Seam, CPU only: FP8 128x128-block experts in plain PyTorch, so that FP8 models run, and are tested, on any machine."""

import torch

from vllm_rocm_ops import ops, quantization
from vllm_rocm_ops.ops.gemm import BLOCK
from vllm_rocm_ops.vllm import seam


def linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [m, k], quantized with a scale per row and 128 columns, times weight [n, k] transposed, in x's dtype."""
    groups = x.float().unflatten(-1, (-1, BLOCK))
    group_scale = quantization.scale_of(quantization.absmax(groups), weight.dtype)
    values = quantization.cast(groups / group_scale, weight.dtype).flatten(-2)
    return ops.block_scaled_mm.reference(values, weight, group_scale.squeeze(-1), scale, x.dtype)


@torch.library.custom_op("vllm_rocm_ops_cpu::fp8_block_experts", mutates_args=())
def fp8_block_experts(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor | None,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """The weighted sum over each row's experts of linear(SwiGLU(linear(x, w1)), w2); weights of None are ones."""
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        local = expert if expert_map is None else int(expert_map[expert])
        if local < 0:
            continue
        tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = linear(x[tokens], w1[local], w1_scale[local]).float().chunk(2, -1)
        inner = (torch.nn.functional.silu(gate) * up).to(x.dtype)
        result = linear(inner, w2[local], w2_scale[local]).float()
        if topk_weights is not None:
            result *= topk_weights[tokens, slots, None].float()
        total.index_add_(0, tokens, result)
    return total.to(x.dtype)


@fp8_block_experts.register_fake
def _(x, w1, w2, w1_scale, w2_scale, topk_weights, topk_ids, expert_map):
    return torch.empty_like(x)


def probe() -> None:
    """vLLM's table of FP8 expert backends and the experts' base class are as expected."""
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.oracle import fp8

    seam.require_parameters(fp8.backend_to_kernel_cls, "backend")
    seam.require({"TRITON", "CPU"} <= set(fp8.Fp8MoeBackend.__members__), "Fp8MoeBackend.TRITON and CPU")
    seam.require_parameters(
        modular_kernel.FusedMoEExpertsModular.apply,
        *("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "global_num_experts"),
        *("expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta"),
        "apply_router_weight_on_input",
    )


def install() -> None:
    """vLLM has no registry for FP8 experts: answer for its TRITON backend, which leaves the weights as loaded."""
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.oracle import fp8
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym

    class ReferenceFp8BlockExperts(modular_kernel.FusedMoEExpertsModular):
        """Each expert a pair of block-scaled linears with SwiGLU between them."""

        @property
        def expects_unquantized_inputs(self):
            return True

        @staticmethod
        def activation_format():
            return modular_kernel.FusedMoEActivationFormat.Standard

        @staticmethod
        def _supports_current_device():
            return True

        @staticmethod
        def _supports_no_act_and_mul():
            return False

        @staticmethod
        def _supports_activation(activation):
            return activation == MoEActivation.SILU

        @staticmethod
        def _supports_quant_scheme(weight_key, activation_key):
            return (weight_key, activation_key) == (kFp8Static128BlockSym, kFp8Dynamic128Sym)

        @staticmethod
        def _supports_parallel_config(config):
            return not config.use_all2all_kernels

        def workspace_shapes(self, M, N, K, *others, **more):
            return (0,), (0,), (M, K)

        def finalize_weight_and_reduce_impl(self):
            return TopKWeightAndReduceNoOP()

        def apply(
            self,
            output,
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            activation,
            global_num_experts,
            expert_map,
            a1q_scale,
            a2_scale,
            workspace13,
            workspace2,
            expert_tokens_meta,
            apply_router_weight_on_input,
        ):
            weights = None if apply_router_weight_on_input else topk_weights
            scales = self.w1_scale, self.w2_scale
            op = torch.ops.vllm_rocm_ops_cpu.fp8_block_experts
            output.copy_(op(hidden_states, w1, w2, *scales, weights, topk_ids, expert_map))

    instead = {
        fp8.Fp8MoeBackend.TRITON: [ReferenceFp8BlockExperts],
        # With AMX tiles these would come first and leave the activations unquantized.
        fp8.Fp8MoeBackend.CPU: [],
        getattr(fp8.Fp8MoeBackend, "CPU_W8A8", None): [],
    }
    classes = fp8.backend_to_kernel_cls
    fp8.backend_to_kernel_cls = lambda backend: instead[backend] if backend in instead else classes(backend)


SEAM = seam.Seam(
    name="cpu_moe",
    replaces="backend_to_kernel_cls of the FP8 expert backends",
    probe=probe,
    install=install,
    platforms=("cpu",),
)
