"""vLLM's models whose norms and activations know their consumer, the linear that reads their result. No forward is rewritten."""

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.deepseek_v2 import (
    DeepseekV2DecoderLayer,
    DeepseekV2ForCausalLM,
    DeepseekV2MLP,
    DeepseekV3ForCausalLM,
)
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM


def set_consumer(producer: torch.nn.Module | None, parent: torch.nn.Module, name: str) -> None:
    """Tell a norm or an activation of ours its one consumer. The consumer is kept by name, as LoRA may wrap the linear later."""
    if hasattr(type(producer), "consumer") and getattr(parent, name, None) is not None:
        producer.consumer = (parent, name)


def set_consumers(model: torch.nn.Module) -> None:
    """Set every consumer of a model. A norm whose result has a second reader (a router, an indexer, a gather) gets none."""
    layers = list(model.modules())
    sequence_parallel = any(getattr(layer, "use_sequence_parallel_moe", False) for layer in layers)
    for layer in layers:
        if isinstance(layer, LlamaDecoderLayer):
            set_consumer(layer.input_layernorm, layer.self_attn, "qkv_proj")
            set_consumer(layer.post_attention_layernorm, layer.mlp, "gate_up_proj")
        elif isinstance(layer, DeepseekV2MLP):
            set_consumer(layer.act_fn, layer, "down_proj")
        elif isinstance(layer, DeepseekV2DecoderLayer):
            attention = layer.self_attn
            latent = getattr(attention, "mla_attn", None)
            if latent is not None and attention.q_lora_rank is not None and not attention.is_v32:
                set_consumer(latent.q_a_layernorm, latent, "q_b_proj")
                if not sequence_parallel:
                    set_consumer(layer.input_layernorm, latent, "fused_qkv_a_proj")
            if isinstance(layer.mlp, DeepseekV2MLP):
                set_consumer(layer.post_attention_layernorm, layer.mlp, "gate_up_proj")


class RocmOpsLlamaForCausalLM(LlamaForCausalLM):
    """vLLM's Llama with its consumers set."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        set_consumers(self)


class RocmOpsDeepseekV2ForCausalLM(DeepseekV2ForCausalLM):
    """vLLM's DeepSeek V2 with its consumers set."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        set_consumers(self)


class RocmOpsDeepseekV3ForCausalLM(DeepseekV3ForCausalLM):
    """vLLM's DeepSeek V3 with its consumers set."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        set_consumers(self)
