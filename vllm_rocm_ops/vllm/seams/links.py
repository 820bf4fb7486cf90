"""Seam: models whose norms and activations know the linear that reads their result, their consumer.

vLLM gives an activation its linear in some models, and a norm its linear in none. Subclasses of the models (models.py) replace
vLLM's classes in vLLM's model registry. They set the consumers when a model has been built.
"""

import importlib.util
import pathlib
import re

from vllm_rocm_ops.vllm import seam

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v2",
}
TOUCHED = {
    "llama": ("class LlamaDecoderLayer", "self.qkv_proj =", "self.gate_up_proj =", "self.post_attention_layernorm ="),
    "deepseek_v2": (
        "class DeepseekV2DecoderLayer",
        "class DeepseekV2MLP",
        "self.mla_attn = MultiHeadLatentAttentionWrapper",
        "self.use_sequence_parallel_moe =",
        "self.is_v32 =",
        "self.q_lora_rank =",
    ),
}


def probe() -> None:
    """The registry holds vLLM's own classes, and their files have the names that models.py reads. Imports no model."""
    from vllm import ModelRegistry

    for architecture, module in ARCHITECTURES.items():
        entry = ModelRegistry.models.get(architecture)
        found = getattr(entry, "module_name", None), getattr(entry, "class_name", None)
        seam.require(found == (f"vllm.model_executor.models.{module}", architecture), f"{architecture} in its registry")
    for module, touched in TOUCHED.items():
        origin = importlib.util.find_spec(f"vllm.model_executor.models.{module}").origin
        source = pathlib.Path(origin).read_text()
        for text in touched:
            seam.require(re.search(rf"^\s*{re.escape(text)}", source, re.MULTILINE), f"{text!r} in models/{module}.py")


def install() -> None:
    """Register the subclasses by name, so that a model is imported only when vLLM needs it."""
    from vllm import ModelRegistry

    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"vllm_rocm_ops.vllm.models:RocmOps{architecture}")


SEAM = seam.Seam(
    name="links",
    replaces=f"{', '.join(ARCHITECTURES)}, through ModelRegistry.register_model",
    probe=probe,
    install=install,
)
