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


def ours(architecture: str) -> str:
    return f"vllm_rocm_ops.vllm.models:RocmOps{architecture}"


def theirs(architecture: str) -> str:
    return f"vllm.model_executor.models.{ARCHITECTURES[architecture]}:{architecture}"


def registered(architecture: str) -> str:
    """The class in vLLM's registry, as "module:class"; empty if there is none."""
    from vllm import ModelRegistry

    entry = ModelRegistry.models.get(architecture)
    if cls := getattr(entry, "model_cls", None):
        return f"{cls.__module__}:{cls.__qualname__}"
    return f"{entry.module_name}:{entry.class_name}" if entry else ""


def replaced() -> str:
    """Which models another plugin, as ROCm/ATOM, replaces by its own classes. Empty if there are none."""
    by: dict[str, list[str]] = {}
    for architecture in ARCHITECTURES:
        if (found := registered(architecture)).partition(".")[0] not in ("", "vllm", "vllm_rocm_ops"):
            by.setdefault(found, []).append(architecture)
    classes = "; ".join(f"{', '.join(names)} by {found}" for found, names in by.items())
    return f"another plugin replaces {classes}" if by else ""


def probe() -> None:
    """The registry holds vLLM's own classes, and their files have the names that models.py reads. Imports no model."""
    from vllm import ModelRegistry

    seam.require_parameters(ModelRegistry.register_model, "model_arch", "model_cls")
    if why := replaced():
        raise seam.Unavailable(why)
    for architecture in ARCHITECTURES:
        seam.require(registered(architecture) == theirs(architecture), f"{architecture} in its registry")
    for module, touched in TOUCHED.items():
        origin = importlib.util.find_spec(f"vllm.model_executor.models.{module}").origin
        source = pathlib.Path(origin).read_text()
        for text in touched:
            seam.require(re.search(rf"^\s*{re.escape(text)}", source, re.MULTILINE), f"{text!r} in models/{module}.py")


def install() -> None:
    """Register the subclasses by name, so that a model is imported only when vLLM needs it. Each process of vLLM loads all plugins;
    where one of them replaces a model later, vLLM's classes come back for the others."""
    from vllm import ModelRegistry

    register = ModelRegistry.register_model

    def register_model(model_arch, model_cls):
        register(model_arch, model_cls)
        if why := replaced():
            for architecture in ARCHITECTURES:
                if registered(architecture) == ours(architecture):
                    register(architecture, theirs(architecture))
            seam.turn_off("links", why)

    for architecture in ARCHITECTURES:
        register(architecture, ours(architecture))
    ModelRegistry.register_model = register_model


SEAM = seam.Seam(
    name="links",
    replaces=f"{', '.join(ARCHITECTURES)}, through ModelRegistry.register_model",
    probe=probe,
    install=install,
)
