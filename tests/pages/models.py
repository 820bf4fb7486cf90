"""Tabulate what users run: models with their classes and recipes, and who runs the layers of a decode step."""

import functools
import itertools
import json

from vllm_rocm_ops.core import archs
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import fused_calls
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.tools import explain

from . import compatibility, measurements
from .compatibility import AMD, answers, formats, releases, selected
from .measurements import ROOT, grouped, markdown, merged

FAMILIES = {
    # models as users name them -> vLLM's classes, the first of which has a shipped list
    "Qwen3.5, Qwen3.6, Qwen3-Next": (
        *("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
        *("Qwen3_5ForCausalLM", "Qwen3NextForCausalLM"),
    ),
    "DeepSeek-R1, V3, V3.1; Kimi-K2": ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM"),
    "GLM-4.5 to 4.7": ("Glm4MoeForCausalLM",),
    "MiniMax-M2 to M2.7": ("MiniMaxM2ForCausalLM",),
    "Qwen3, Qwen2": ("Qwen3MoeForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM", "Qwen2ForCausalLM"),
    "Llama, Mistral, Mixtral": ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"),
    "gpt-oss": ("GptOssForCausalLM",),
}
"""In the order of how many AMD configurations, recipes and issues name them."""
STEPS = {
    # shipped model -> TP of its recipes
    "qwen3.5-397b-a17b-fp8": 8,
    "deepseek-v3": 8,
    "glm-4.5-air-fp8": 4,
    "minimax-m2": 4,
    "qwen3-30b-a3b-fp8": 1,
    "qwen3-8b-fp8": 1,
    "llama-3.1-405b-fp8": 8,
    "gpt-oss-120b": 8,
    "kimi-k2-thinking": 8,
}
TOKENS = 8
PRODUCT = "MI300X"
KINDS = {
    "experts": "experts",
    "routing": "routing",
    "attention": "attention",
    "W_UK": "MLA absorption",
    "W_UV": "MLA absorption",
    fused_calls.ROTATION: "RoPE, cache write",
    fused_calls.CACHE_WRITE: "RoPE, cache write",
    fused_calls.HEAD_NORMS: "RoPE, cache write",
    model_layers.DELTA_NET: "Gated DeltaNet",
    model_layers.GATED_NORM: "Gated DeltaNet",
    **dict.fromkeys(("q_norm", "k_norm", "minimax_qk_norm_fusion"), "norms of q and k"),
    "output gate": "activations",
    explain.ALL_REDUCE: "all-reduce",
}
"""Layers of a step -> their kinds; others are norms, activations or linear layers."""
TRIVIAL = "embedding", "sum with shared experts"


def kind_of(layer: str) -> str:
    """Return the kind of a step's layer, empty for what no table names."""
    if layer in TRIVIAL or layer.endswith("input quantization"):
        return ""
    return KINDS.get(
        layer, "norms" if layer.endswith("norm") else "activations" if "SwiGLU" in layer else "linear layers"
    )


@functools.cache
def explained(model: str, tp: int) -> tuple[list[tuple[str, ...]], list]:
    """Return the table of a shipped model's step, before start-up timing, and the step's launches."""
    config, arch = model_config.read(model), archs.named(PRODUCT)
    calls = [*model_layers.calls(config, tp, arch=AMD[0]), *explain.around(config, tp, None, arch)]
    rows = explain.table(calls, arch, (TOKENS,), False, model_layers.unserved(config, tp, arch=AMD[0]))
    return rows, model_layers.launches(config, tp, arch=AMD[0])


def why_vllm(model: str, tp: int, layer: str) -> str:
    """Return why a layer of a step is vLLM's."""
    unserved = model_layers.unserved(model_config.read(model), tp, arch=AMD[0])
    return next((launch.runs.rpartition(": ")[2] for launch, _ in unserved if launch.layer == layer), "")


def kinds_by_side(model: str, tp: int) -> list[str]:
    """Return the kinds of layers that each side runs. A kind is with the side that runs most of it; others name its layers."""
    sides = explain.sides(*explained(model, tp), TOKENS, tp)
    of = {layer: side for layer, side in sides.items() if kind_of(layer)}
    counted = {kind: [*layers] for kind, layers in grouped(of, kind_of).items()}
    by_side: dict[str, dict[str, None]] = {side: {} for side in explain.SIDES}
    for kind, layers in counted.items():
        home = max(explain.SIDES, key=lambda side: sum(of[layer] == side for layer in layers))
        for layer in layers:
            by_side[of[layer]][kind if of[layer] == home else layer] = None
    return [", ".join(names) for names in by_side.values()]


def step_table() -> str:
    """Return a row for each shipped model: who runs the layers of a decode step on an MI300X."""
    rows = [(f"`{model}`", str(tp), *kinds_by_side(model, tp)) for model, tp in STEPS.items()]
    return markdown(("`--model`", "`--tp`", *explain.SIDES), rows)


def family_of(architecture: str) -> str:
    """Return the family of one of vLLM's classes."""
    return next((family for family, classes in FAMILIES.items() if architecture in classes), "others")


def model_table() -> str:
    """Return a row for each class of vLLM's, by family: where it has run, and whether commands know it."""
    others = sorted((ROOT / "serving_benchmarks" / "configs").glob("*/config.json"))
    configs = {name: model_config.read(name) for name in model_config.shipped() if not name.startswith("tiny")}
    configs |= {path.parent.name: json.loads(path.read_text()) for path in others}
    shipped = grouped(configs, lambda name: configs[name]["architectures"][0])
    ran = {run.model for run in measurements.engine_runs()}
    known = dict.fromkeys((*(name for of in FAMILIES.values() for name in of), *compatibility.flavours(), *shipped))
    rows = []
    for architecture in known:
        named = {one.flavour: one.title for one in formats.FORMATS if one.flavour}
        named |= {"mixed": f"{named['token']}, experts in BF16", "int4_experts": f"BF16, experts with {named['int4']}"}
        tested = [name for flavour, name in named.items() if flavour in compatibility.flavours().get(architecture, ())]
        on_cpu = f"tested: {'; '.join(tested)}" if tested else "selected, not run"
        on_gpu = ", ".join(name for name in shipped.get(architecture, ()) if name in ran) or "not run"
        lists = [f"`{name}`" for name in shipped.get(architecture, ()) if name in model_config.shipped()]
        rows.append((f"`{architecture}`", family_of(architecture), on_cpu, on_gpu, ", ".join(lists)))
    by_family = [(family, name, *cells) for name, family, *cells in merged(rows)]
    plugged = "not run; norms and activations use the plugin if vLLM compiles it"
    by_family.append(("from another vLLM plugin", "", plugged, "not run", "none: `explain` refuses it"))
    rest = "selected by layer class and compiled graph, not run"
    by_family.append(("any other", "", rest, "not run", "none: `explain` asks the installed vLLM"))
    header = ("models", "vLLM's class", "engine on CPU", "engine on H100 or H200", "`explain` without vLLM")
    return markdown(header, by_family)


# Recipes

OTHER_RECIPES = {
    # models -> format, flags, the rows of selection.csv by kind, and the shipped model whose attention counts
    "gpt-oss-120b, 20b": (
        *("MXFP4 experts, BF16 inputs", "--attention-backend ROCM_AITER_UNIFIED_ATTN"),
        *({"linear": "linear unquantized", "experts": "experts mxfp4"}, "gpt-oss-120b"),
    ),
    "Kimi-K2 to K2.7, INT4": (
        *("INT4 weights, symmetric, BF16 inputs", ""),
        *({"linear": "linear unquantized", "experts": "experts int4"}, "kimi-k2-thinking"),
    ),
}
ORDER = "Qwen3.5", "DeepSeek", "GLM", "MiniMax", "Qwen3", "Llama", "gpt-oss", "Kimi"
NAMES = {"linear": "linear layers"}
SHORT = {
    "a sink dtype other than float32 is not supported": "its sinks are 16-bit",
    "sparse attention": "sparse",
}


def parts_of_recipe(models: str, recipe, arch: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the kinds of layers that the plugin serves under a recipe, and those that stay, with the reason."""
    served, stays = {}, {}
    for kind in recipe.parts:
        text, name = answers("with")[f"recipe {models}: {kind}", arch][releases()[-1]][0], NAMES.get(kind, kind)
        if " holds " in text:
            served[name] = ""
        else:
            why = text.partition(": ")[2]
            stays[name] = SHORT.get(why, why)
    if recipe.has_own_attention:
        stays["attention"] = "the model's own"
    return served, stays


def parts_of_format(rows: dict[str, str], model: str, arch: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the same for a recipe of a format, with AITER."""
    served, stays = {}, {}
    for kind, what in rows.items():
        is_served = selected(what, arch) in ("selected", "selected with AITER")
        (served if is_served else stays)[NAMES.get(kind, kind)] = ""
    why = why_vllm(model, STEPS[model], "attention")
    (stays if why else served)["attention"] = SHORT.get(why, why)
    return served, stays


def your_recipe() -> str:
    """Return a row for each recipe: model, format and flags, and what the plugin serves, for README."""
    rows = []
    for models, recipe in compatibility.loaded("recipes").RECIPES.items():
        titles = {one.title: None for one in formats.FORMATS if one.linear == recipe.linear}
        title = f"{next(iter(titles))}{', at load' * bool(recipe.quantization)}"
        by_arch = {arch: parts_of_recipe(models, recipe, arch) for arch in AMD}
        rows.append((models, title, recipe.flags, by_arch))
    for models, (title, flags, of, model) in OTHER_RECIPES.items():
        rows.append((models, title, flags, {arch: parts_of_format(of, model, arch) for arch in AMD}))
    rows.sort(key=lambda row: next((n for n, name in enumerate(ORDER) if row[0].startswith(name)), len(ORDER)))
    lines = []
    for models, title, flags, by_arch in rows:
        cells = (by_gpu([by_arch[arch][place] for arch in AMD]) for place in range(2))
        lines.append((models, title, f"`{flags}`" if flags else "", *cells))
    header = "models", "format", "flags", "plugin, where timed faster", "stays vLLM's or AITER's"
    return markdown(header, merged(lines))


def by_gpu(parts: list[dict[str, str]]) -> str:
    """Return the parts of both architectures as one text; a part of one alone names it."""
    texts = []
    for part in dict.fromkeys(itertools.chain(*parts)):
        held = [arch for arch, of in zip(AMD, parts) if part in of]
        why = next(of[part] for of in parts if part in of)
        why = ", ".join(filter(None, (*held[: len(held) < len(AMD)], why)))
        texts.append(f"{part} ({why})" if why else part)
    return ", ".join(texts) or "none"


def answer() -> str:
    """Return what `explain` says of the first shipped model at the end, for README."""
    model, tp = next(iter(STEPS.items()))
    lines = explain.summary(*explained(model, tp), (TOKENS,), tp)
    command = f"$ vllm-rocm-ops explain --model {model} --tp {tp} --batch {TOKENS} --arch {PRODUCT}"
    return "\n".join(("```", command, "...", *lines, "```"))
