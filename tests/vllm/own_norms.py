"""Check whether vLLM's pass fuse_qk_norm_rope_kvcache matches Qwen3 and GLM with the plugin's backends.

The process uses vLLM's ROCm platform with a faked machine. It prints, by backend, how many norms, rotations and cache
writes the pass finds, and whether the order of values changes.
"""

import contextlib
import functools
import json
import types

import own_fusions
import selection

HEADS, KV_HEADS, SIZE = 32, 4, 128
FORMS = {"qwen3": (1e-6, SIZE), "glm": (1e-5, SIZE // 2)}
"""Epsilon, and the rotated elements of a head."""
AITER = "rocm_aiter_per_tensor_quant(Tensor! out, Tensor x, Tensor! scale, bool is_dynamic) -> ()"


def main(members: list[str]) -> None:
    """Print the answers as JSON."""
    selection.fake_amd("gfx942", "0")
    import torch

    kept = [torch.library.Library(name, "FRAGMENT") for name in ("_C", "vllm")]
    for library, schemas in zip(kept, (own_fusions.SCHEMAS, (AITER,))):
        for schema in schemas:
            library.define(schema)
            library.impl(schema.partition("(")[0], lambda *_, **__: None, "Meta")
    from vllm.config import CompilationConfig, CompilationMode, DeviceConfig, VllmConfig, set_current_vllm_config

    answers = {}
    for member in members:
        settings = CompilationConfig(custom_ops=["none", "+rotary_embedding"], mode=CompilationMode.VLLM_COMPILE)
        config = VllmConfig(device_config=DeviceConfig("cuda"), compilation_config=settings)
        with set_current_vllm_config(config, check_compile=False):
            answers[member] = found(config, member)
    print("\n" + json.dumps(answers))


def found(config, member: str) -> tuple[int | bool, ...]:
    """Return the pass's matches in the graph of each form of a layer, and whether it reorders the layer's values."""
    import torch
    from torch._dynamo.source import ConstantSource
    from torch._inductor import config as inductor
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from vllm.compilation.passes.fusion.qk_norm_rope_kvcache_fusion import QkNormRopeKvCacheFusionPass
    from vllm.compilation.passes.inductor_pass import pass_context
    from vllm.config.utils import Range
    from vllm.model_executor.layers.attention import Attention

    from vllm_rocm_ops.vllm.attention import backends, decoder, rope_and_cache

    rope_and_cache.install()
    made = backends.made(decoder.BACKENDS[member]).get_impl_cls()
    impl = made(HEADS, SIZE, 0.1, KV_HEADS, None, None, "auto")
    layer = Attention.__new__(Attention)
    torch.nn.Module.__init__(layer)
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE, "head_size_v": SIZE}
    for name, value in {"layer_name": "layer", "query_quant": None, "impl": impl, **sizes}.items():
        setattr(layer, name, value)
    config.compilation_config.static_forward_context["layer"] = layer
    model = types.SimpleNamespace(dtype=torch.bfloat16, hf_config=None, hf_text_config=None)
    object.__setattr__(config, "model_config", model)
    object.__setattr__(config, "compile_debug_dump_path", lambda: None)
    theirs, counts = QkNormRopeKvCacheFusionPass(config), []
    for form, (_, rotary) in FORMS.items():
        environment = ShapeEnv()
        with FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment), contextlib.ExitStack() as stack:
            stack.enter_context(inductor.patch(enable_auto_functionalized_v2=False))
            stack.enter_context(pass_context(Range(1, 64)))
            tokens = environment.create_symintnode(
                environment.create_symbol(5, ConstantSource("tokens")), hint=5, source=ConstantSource("tokens")
            )
            shapes = (tokens, (HEADS + 2 * KV_HEADS) * SIZE), (SIZE,), (SIZE,), (4096, rotary)
            inputs = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
            positions = torch.empty(tokens, dtype=torch.int64, device="cuda")
            module = make_fx(functools.partial(attention, form))(tokens, positions, *inputs)
            view_to_reshape(module)
            module.graph.eliminate_dead_code()
            theirs(module.graph)
        counts.append(theirs.matched_count)
    return *counts, getattr(impl, "_use_interleaved_v_cache", False)


def attention(form, tokens, positions, qkv, q_weight, k_weight, cos_sin):
    """Compute norms, rotation and write as in the graphs of Qwen3Attention and Glm4MoeAttention.

    The number of tokens is the first argument there.
    """
    import torch
    import vllm.ir.ops
    from torch._higher_order_ops.auto_functionalize import auto_functionalized
    from vllm.utils.torch_utils import _encode_layer_name

    q, k, v = qkv.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], -1)
    normed = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        heads = x.shape[-1] // SIZE
        by_head = x.view(*x.shape[:-1], heads, SIZE) if form == "qwen3" else x.reshape(-1, heads, SIZE)
        normed.append(vllm.ir.ops.rms_norm(by_head, weight, FORMS[form][0]).reshape(x.shape))
    q, k = normed
    rotation = {"positions": positions, "query": q, "key": k, "head_size": SIZE, "cos_sin_cache": cos_sin}
    _, q, k = auto_functionalized(torch.ops._C.rotary_embedding.default, **rotation, is_neox=True)
    q, k, v = q.view(-1, HEADS, SIZE), k.view(-1, KV_HEADS, SIZE), v.view(-1, KV_HEADS, SIZE)
    return torch.ops.vllm.unified_kv_cache_update(k, v, _encode_layer_name("layer")), q, k, v
