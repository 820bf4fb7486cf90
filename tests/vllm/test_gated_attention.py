"""Test what the plugin replaces in attention layers of Qwen3-Next and Qwen3.5, as vLLM traces them."""

import gated_attention as tiny
import pytest
import torch
from fakes import Fake, set_config
from test_rope_and_cache_seam import dynamo  # noqa: F401
from vllm_rocm_ops.vllm.attention import rope_and_cache
from vllm_rocm_ops.vllm.graph import compilation


@pytest.mark.parametrize("sections", [False, True])
def test_trace(dynamo, monkeypatch, tmp_path, sections):
    with tiny.one_rank(tmp_path):
        layer = tiny.attention_of(monkeypatch, sections=sections)
        settings = Fake(
            pass_config=Fake(fuse_norm_quant=False),
            use_inductor_graph_partition=False,
            splitting_ops=[rope_and_cache.UPDATE],
        )
        set_config(
            monkeypatch, compilation_config=settings, model_config=Fake(dtype=torch.bfloat16, uses_mrope=sections)
        )
        monkeypatch.setattr(compilation, "is_compiled", lambda config, model: True)
        block = tiny.Block(layer)
        print(
            layer.attn.attn_type, [*rope_and_cache.unsupported_features(layer.attn, layer.rotary_emb, torch.bfloat16)]
        )
        [front] = rope_and_cache.pre_attentions(block, True)
        print(front.key)
        front.take(True)
        g = tiny.traced(block, torch.zeros((3, 5) if sections else 5).long())
        print(rope_and_cache.rewrite(g.graph, [rope_and_cache.TORCH_OP]))
        g.graph.lint()
        g.recompile()
        print(g.code)
        assert 0
