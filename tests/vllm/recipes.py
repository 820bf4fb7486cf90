"""Ask what vLLM selects under the FP8 recipes for AMD, with the plugin. selection.py calls this where AITER is on.

An answer has a part for linear layers, experts, attention, and the router of a model: the plugin's class or op and what it holds, or
vLLM's class and why.
"""

import contextlib
import dataclasses
import os

LATENT = {"head_size": 576, "use_mla": True}
SPARSE = {**LATENT, "use_sparse": True}
SHUFFLED = {"VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "1"}
FUSED = {"VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS": "1"}
NO_EXPERTS = {"VLLM_ROCM_USE_AITER_MOE": "0"}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Flags besides VLLM_ROCM_USE_AITER=1, and the layers of the models.

    `linear` and `experts` are names of formats.LINEARS. `options` belong to vLLM's kernel configuration, `moe` to
    `selection.moe_config`, `heads` to `selection.attention_backend`. `gated` is a model whose router has a float32 weight.
    """

    linear: str
    experts: str = ""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    attention: str | None = None
    quantization: str = ""
    moe: dict = dataclasses.field(default_factory=dict)
    heads: dict = dataclasses.field(default_factory=dict)
    has_own_attention: bool = False
    gated: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """The kinds of layers that are asked about."""
        experts = *["experts"] * bool(self.experts), *["router"] * bool(self.gated)
        return "linear", *experts, *["attention"] * (not self.has_own_attention)

    @property
    def flags(self) -> str:
        """The flags as on a command line."""
        named = self.options | {"attention_backend": self.attention, "quantization": self.quantization}
        options = [f"--{name.replace('_', '-')} {value}" for name, value in named.items() if value]
        return " ".join([*(f"{name}={value}" for name, value in self.environment.items()), *options])


AITER = {"moe_backend": "aiter", "linear_backend": "aiter"}
SOFTMAX = {"routing_method": "RenormalizeNaive"}
RECIPES = {
    "DeepSeek-R1, V3, V3.1": Recipe("block", "block", heads=LATENT),
    "DeepSeek-V3.2": Recipe("block", "block", heads=SPARSE),
    "GLM-5.2": Recipe("block", "block", FUSED, AITER, heads=SPARSE),
    "GLM-4.5 to 4.7": Recipe("per token", "per token", gated="glm-4.5-air-fp8"),
    "MiniMax-M2 to M2.7": Recipe(
        *("block", "block", SHUFFLED, {}, "ROCM_AITER_FA"),
        moe={"routing_method": "MiniMax2"},
        gated="minimax-m2",
    ),
    "MiniMax-M3, MXFP8": Recipe(
        *("mxfp8", "mxfp8", FUSED, {"linear_backend": "emulation"}),
        has_own_attention=True,
        moe={"activation": "SWIGLUOAI_UNINTERLEAVE", "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0},
    ),
    "Qwen3-235B, Qwen3-Coder-480B": Recipe("block", "block", moe=SOFTMAX),
    "Qwen3-VL-235B": Recipe("block", "block", SHUFFLED, {}, "ROCM_AITER_FA", moe=SOFTMAX),
    "Qwen3.5-397B": Recipe("block", "block", moe=SOFTMAX, heads={"head_size": 256}),
    "Qwen3.5-122B": Recipe("block", "block", {}, {}, "ROCM_AITER_UNIFIED_ATTN", moe=SOFTMAX, heads={"head_size": 256}),
    "Hy3": Recipe("static", "static", NO_EXPERTS),
    "Intern-S1, Step-3.5, Laguna": Recipe("block", "block", NO_EXPERTS),
    "Llama-3.1-405B, 3.3-70B": Recipe("static", heads={"kv_cache_dtype": "fp8"}),
    "BF16 checkpoints": Recipe("per token", "per token", quantization="fp8_per_channel", moe=SOFTMAX),
}
"""By models: the recipes of vLLM, InferenceX and users of 2026-08 to 2026-09."""


def linear(torch, recipe: Recipe, config) -> str:
    """Return the part for linear layers."""
    import selection

    kernel = selection.linear_kernel(recipe.linear)
    if (baseline := getattr(kernel, "baseline", None)) is not None:
        return f"{type(kernel).__name__} holds {type(baseline).__name__}"
    return f"{type(kernel).__name__}: named {config.kernel_config.linear_backend}"


def experts(torch, recipe: Recipe, config) -> str:
    """Return the part for experts."""
    import selection
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat
    from vllm.model_executor.layers.fused_moe.oracle import fp8, mxfp8
    from vllm.model_executor.layers.quantization.utils import quant_utils

    from vllm_rocm_ops.vllm.moe import fp8_experts, mxfp8_experts

    members = {"activation": MoEActivation, "routing_method": RoutingMethodType}
    traits = {name: members[name][value] if name in members else value for name, value in recipe.moe.items()}
    asked = selection.moe_config(torch, moe_backend=config.kernel_config.moe_backend, **traits)
    if recipe.experts == "mxfp8":
        scheme, plugin = [getattr(quant_utils, key) for key in mxfp8_experts.SCHEME], mxfp8_experts.PLUGIN_EXPERTS
        _, chosen = mxfp8.select_mxfp8_moe_backend(asked)
    else:
        scheme, plugin = selection.keys_of(recipe.experts), fp8_experts.PLUGIN_EXPERTS
        _, chosen = fp8.select_fp8_moe_backend(asked, *scheme)
    if chosen in plugin:
        return f"{chosen.__name__} holds {chosen.baseline_class().__name__}"
    whole = asked, *scheme, FusedMoEActivationFormat.Standard
    fits = [one for one in plugin if one.backend.name.partition("_")[0] in chosen.__name__.upper()]
    beside = next((one for one in fits if tuple(scheme) in one.schemes), plugin[-1])
    why = beside.is_supported_config(beside, *whole)[1] or ""
    return f"{chosen.__name__}: {why.removeprefix(f'{beside.__name__} ').removeprefix('kernel ')}"


def router(torch, recipe: Recipe, config) -> str:
    """Return the part for routers: the op with vLLM's gate, in a decode step of a model that vLLM builds in another process."""
    from vllm_rocm_ops.models import config as model_config
    from vllm_rocm_ops.models import vllm_launches

    arch = torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]
    blocks = vllm_launches.ask_vllm(model_config.read(recipe.gated), 1, None, arch)["blocks"]
    named = {launch[0]: launch for _, block in blocks for launch in block}
    _, _, sizes, dtype, gate = named["router"]
    if len(sizes) == 2 and named["routing"][2] and dtype == "float32":
        return f"router_gemm_topk holds {gate.partition(' ')[0]}"
    return f"{gate.partition(' ')[0]}: {named['routing'][-1]} routes"


def attention(torch, recipe: Recipe, config) -> str:
    """Return the part for attention. A backend that is the plugin's may still refuse its cache."""
    import selection

    from vllm_rocm_ops.vllm.attention import backends, decoder

    path, chosen = selection.attention_backend(torch, recipe.attention, **recipe.heads)
    if not path.startswith("vllm_rocm_ops"):
        return f"{chosen.__name__}: sparse attention"
    held = chosen.__mro__[1].__name__
    backend = next((one for one in decoder.BACKENDS.values() if one.name == held), None)
    impl = object.__new__(chosen.get_impl_cls())
    impl.head_size, impl.num_kv_heads = 128, 1
    if (
        backend is not None
        and backend.caches(impl, None, backends.cache_of(backend, impl, 64, torch.bfloat16, "cpu")) is None
    ):
        return f"{held}: shuffled cache"
    return f"{chosen.__name__} holds {held}"


@contextlib.contextmanager
def under(recipe: Recipe, config):
    """Have vLLM read a recipe's flags within a context."""
    from vllm._aiter_ops import rocm_aiter_ops

    kernels, before = config.kernel_config, dict(os.environ)
    changed = {name: getattr(kernels, name) for name in recipe.options}
    os.environ |= recipe.environment
    for name, value in recipe.options.items():
        setattr(kernels, name, value)
    rocm_aiter_ops.refresh_env_variables()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
        for name, value in changed.items():
            setattr(kernels, name, value)
        rocm_aiter_ops.refresh_env_variables()


def answers(torch, config) -> dict[str, str]:
    """Return the answer for each recipe and kind of layers."""
    answer = {}
    for models, recipe in RECIPES.items():
        with under(recipe, config):
            for part in (globals()[name] for name in recipe.parts):
                answer[f"recipe {models}: {part.__name__}"] = part(torch, recipe, config)
    return answer
