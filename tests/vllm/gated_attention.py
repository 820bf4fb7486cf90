"""A tiny attention layer of vLLM's Qwen3-Next and Qwen3.5, between two norms as in their decoder layers."""

import contextlib
import functools

import fakes
import torch
from fakes import Fake, set_config
from transformers import Qwen3NextConfig
from vllm.distributed import parallel_state

from vllm_rocm_ops.vllm.attention import backends, decoder, rope_and_cache
from vllm_rocm_ops.vllm.graph import compilation, markers

HEADS, KV_HEADS, SIZE, ROTARY, HIDDEN = 4, 2, 64, 16, 256
SECTIONS = [4, 2, 2]


@contextlib.contextmanager
def one_rank(folder):
    """Enter vLLM's groups of one rank. They are left without vLLM's garbage collection, which takes seconds."""
    if parallel_state.model_parallel_is_initialized():
        yield
        return
    parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
    parallel_state.initialize_model_parallel(1, 1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


class Method:
    """A linear layer's method: vLLM's quantization of its input, marked, and a product."""

    def __init__(self, key: str):
        from vllm.model_executor.layers.quantization import input_quant_fp8
        from vllm.model_executor.layers.quantization.utils import quant_utils

        scale = getattr(quant_utils, key).scale
        quant = input_quant_fp8.QuantFP8(scale.static, scale.group_shape, use_ue8m0=False, compile_native=False)
        self.scale = torch.full((1,), 0.02) if scale.static else None
        self.quantize = markers.of_quantization(quant, input_quant_fp8.QuantFP8.forward_native.__get__(quant))

    def apply(self, layer, x, bias=None):
        values, scale = self.quantize(x, self.scale)
        groups = scale.repeat_interleave(x.shape[1] // scale.shape[-1], 1) if scale.dim() == 2 else scale
        return (values.bfloat16() * groups.bfloat16()) @ layer.weight.data.t()


def attention_of(
    monkeypatch, member: str = "TRITON_ATTN", sections: bool = False, key: str = "kFp8Dynamic128Sym"
) -> torch.nn.Module:
    """Return vLLM's layer, with a backend that the plugin covers."""
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models import qwen3_next

    rope = {"rope_theta": 1e4, "partial_rotary_factor": ROTARY / SIZE, "rope_type": "default"}
    if sections:
        rope |= {"mrope_section": SECTIONS, "mrope_interleaved": True}
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": SIZE, "hidden_size": HIDDEN}
    config = Qwen3NextConfig(**sizes, max_position_embeddings=128, num_hidden_layers=1, rope_parameters=rope)
    backend = backends.made(decoder.BACKENDS[member])
    monkeypatch.setattr(qwen3_next, "Attention", functools.partial(Attention, attn_backend=backend))
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = qwen3_next.Qwen3NextAttention(config, prefix="model.layers.0.self_attn")
    finally:
        torch.set_default_dtype(before)
    layer.rotary_emb._forward_method = layer.rotary_emb.forward_native
    layer.attn.use_direct_call = False
    for linear in (layer.qkv_proj, layer.o_proj):
        linear.quant_method = Method(key)
        torch.nn.init.normal_(linear.weight, std=HIDDEN**-0.5)
    return layer


def front(monkeypatch, block: torch.nn.Module, sections: bool = False, compiles: bool = True):
    """Return what the seam finds in the layer of a model that vLLM compiles and splits."""
    settings = Fake(pass_config=Fake(fuse_norm_quant=False), use_inductor_graph_partition=False)
    settings.splitting_ops = [rope_and_cache.UPDATE]
    model = Fake(dtype=torch.bfloat16, uses_mrope=sections)
    set_config(monkeypatch, compilation_config=settings, model_config=model)
    monkeypatch.setattr(compilation, "is_compiled", lambda config, model: compiles)
    found = [*rope_and_cache.pre_attentions(block, compiles)]
    return found[0] if found else None


class Block(torch.nn.Module):
    """The norms around the layer."""

    def __init__(self, layer: torch.nn.Module):
        from vllm.model_executor.layers.layernorm import GemmaRMSNorm

        super().__init__()
        self.attention, self.before, self.after = layer, *(GemmaRMSNorm(HIDDEN).bfloat16() for _ in range(2))
        self.requires_grad_(False)

    def forward(self, positions, hidden, residual):
        hidden, residual = self.before(hidden * 2, residual * 2)
        hidden = self.attention(positions, hidden)
        return self.after(hidden, residual)


def traced(block: Block, positions: torch.Tensor) -> torch.fx.GraphModule:
    """Return the graph that vLLM's backend gets."""
    hidden = torch.zeros(positions.shape[-1], HIDDEN).bfloat16()
    residual = hidden.clone()
    for x, dimension in ((positions, positions.dim() - 1), (hidden, 0), (residual, 0)):
        torch._dynamo.maybe_mark_dynamic(x, dimension)
    return fakes.traced(block, positions, hidden, residual)


def pieces(module: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    from vllm.compilation.backends import split_graph

    at = [rope_and_cache.UPDATE, rope_and_cache.TORCH_OP, "vllm::unified_attention_with_output"]
    _, items = split_graph(module, at)
    return [item.submod if hasattr(item, "submod") else item.graph for item in items if not item.is_splitting_graph]


def inputs_of(piece: torch.fx.GraphModule, tokens: int = 5) -> list:
    """Return random inputs of a piece, with the strides of its trace."""
    generator, made = torch.Generator().manual_seed(0), []
    for node in piece.graph.find_nodes(op="placeholder"):
        value = node.meta["example_value"]
        if not isinstance(value, torch.Tensor):
            made.append(tokens if isinstance(value, torch.SymInt) else value)
            continue
        size, stride = ([int(x) for x in of] for of in (value.shape, value.stride()))
        if value.dtype == torch.long:
            made.append(torch.randint(0, 100, size, generator=generator))
            continue
        reach = 1 + sum((n - 1) * step for n, step in zip(size, stride))
        rows = torch.randn(reach, generator=generator).to(value.dtype)
        made.append(rows.as_strided(size, stride))
    return made
