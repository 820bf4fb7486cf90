"""vLLM generates the same tokens with the plugin as without it with every family of models, and each layer calls the ops that its
structure has places for."""

import json
import re

import checkpoints
import pytest
from engines import FAMILIES, STEPS, identity
from marks import FULL, full

pytestmark = pytest.mark.slow

ALWAYS = ("glm4_moe", "gemma3_text")
"""Heads' norms and experts whose router reads the norm; norms of 1 + weight. Others run with --full."""
RUN = [family for family in FAMILIES if FULL or family[0] in ALWAYS]


def job(engines, family: tuple[str, str], **options) -> dict:
    """A job; that of DeepSeek V3 predicts a token more in each step."""
    result = engines.job(family, **options)
    if family[0] == "deepseek_v3":
        result["engine"]["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 1}
    return result


@pytest.fixture(scope="module")
def with_plugin(engines) -> dict[str, dict]:
    return engines.run({identity(family): job(engines, family) for family in RUN})


@pytest.fixture(scope="module")
def without(engines) -> dict[str, dict]:
    return engines.run({identity(family): job(engines, family) for family in RUN}, VLLM_PLUGINS="none")


def calls_of_a_layer(config: dict, layer: int) -> dict[str, int]:
    """How often each op runs in a layer in one step, eagerly."""
    family = config["model_type"]
    routed, latent = checkpoints.has_experts(config, layer), "kv_lora_rank" in config
    dense = not routed or family not in ("mixtral", "qwen3_moe")  # or experts that all tokens share
    gemma, queries = family == "gemma3_text", config.get("q_lora_rank") is not None
    linked = (not latent or queries) + (not routed) + (latent and queries)
    heads = 2 * (family in ("qwen3", "qwen3_moe", "glm4_moe"))
    grouped = config.get("topk_method") == "noaux_tc" or family == "glm4_moe"
    plain = heads + latent  # the norm of the keys' latent
    return {
        "rms_norm_dynamic_per_token_quant": linked,
        "rms_norm": 4 if gemma else plain + (latent and not queries and layer == 0),
        "fused_add_rms_norm": routed + (latent and not queries and layer > 0),
        "silu_and_mul_per_token_quant": 0 if gemma else int(dense),
        "scaled_mm": 2 + latent + 2 * dense,
        "fused_experts": int(routed),
        "grouped_topk": int(routed and grouped),
        "topk_softmax": int(routed and not grouped),
    }


def expected_calls(config: dict) -> dict[str, int]:
    """Of a generation. The last norm is vLLM's where it leaves the residual as it is."""
    layers = [calls_of_a_layer(config, layer) for layer in range(config["num_hidden_layers"])]
    calls = {op: STEPS * sum(layer[op] for layer in layers) for op in layers[0]}
    calls["fused_add_rms_norm"] += STEPS * (config["model_type"] != "gemma3_text")
    if "kv_lora_rank" in config:  # expands the latents of the prompts, in the first step
        calls["scaled_mm"] += config["num_hidden_layers"]
    return {op: count for op, count in calls.items() if count}


def configuration(family: tuple[str, str]) -> dict:
    return {**checkpoints.LLAMA, **checkpoints.FAMILIES[family[0]], "model_type": family[0]}


@pytest.mark.parametrize("family", RUN, ids=identity)
def test_tokens_are_those_of_stock_vllm(with_plugin, without, family):
    ours, stock = with_plugin[identity(family)], without[identity(family)]
    assert stock["stats"] == {} and ours["tokens"] == stock["tokens"]


@pytest.mark.parametrize("family", [family for family in RUN if family[0] != "deepseek_v3"], ids=identity)
def test_each_layer_calls_its_ops(with_plugin, family):
    found = with_plugin[identity(family)]["stats"]
    assert {op: sum(kernels.values()) for op, kernels in found.items()} == expected_calls(configuration(family))


@pytest.mark.parametrize("family", RUN, ids=identity)
def test_each_layer_is_taken(with_plugin, family):
    """By the seams of its kind, but Gemma's GeGLU, which no op of ours computes."""
    found, config = with_plugin[identity(family)]["reach"], configuration(family)
    assert {kind: one["missed"] for kind, one in found.items() if one["missed"]} == {}
    routed = sum(checkpoints.has_experts(config, layer) for layer in range(config["num_hidden_layers"]))
    assert found.get("layers of experts", {"taken": 0})["taken"] == routed
    assert found["norms"]["taken"] > config["num_hidden_layers"] and found["linear layers"]["taken"] > 0
    assert ("activations" in found) == (family[0] != "gemma3_text")


LOST = {
    ("qwen3", "token"): 1,
    ("mixtral", "mixed"): 1,
    ("glm4_moe", "mixed"): 2,
    ("gemma3_text", "token"): 0,
    ("kimi_k2", "mixed"): 5,
}
"""How many kernels a model takes more than where Inductor has all norms and activations: one gathers the embedding, one in each layer
of experts with shared ones adds their results; Inductor fuses both with the norm behind. Each layer of Kimi's experts takes two more.
Latent attention loses none: two dense layers with it take 18 kernels, with Inductor's norms 17 and the embedding's gather in them."""


@pytest.fixture(scope="module")
def graphs(engines) -> dict[str, dict[str, dict[str, int]]]:
    """By seams, then by family, what the compiled graph of the model would launch on a GPU."""
    import kernels

    found = {}
    for seams in ("all", "-norm,-activation", "-links"):
        jobs = {identity(family): engines.job(family, compiled=True, max_tokens=1) for family in LOST}
        options = {"VLLM_USE_AOT_COMPILE": "0", "VLLM_DISABLE_COMPILE_CACHE": "1", "VLLM_ROCM_OPS_SEAMS": seams}
        output = engines.run(jobs, before="import kernels; kernels.install()", **options)["output"]
        parts = re.split(r"Starting to load model", output)[1:]
        counted = [
            [json.loads(line) for line in re.findall(rf"^{kernels.MARK}(.*)$", part, re.MULTILINE)] for part in parts
        ]
        found[seams] = {name: max(graphs, key=lambda graph: sum(graph.values())) for name, graphs in zip(jobs, counted)}
    return found


def around_linears(graph: dict[str, int]) -> dict[str, int]:
    """The kernels that Inductor makes, and those of our norms and activations."""
    ours = {
        op.partition(".")[2]: count for op, count in graph.items() if re.search(r"\.(fused_add_)?(rms_norm|silu)", op)
    }
    return {"generated": graph["generated"], **ours}


@full
@pytest.mark.parametrize("family", LOST, ids=identity)
def test_kernels_of_compiled_graphs(graphs, family, capsys):
    """Norms, activations and quantizations take as many as where Inductor has them all, but for LOST. Without links, where nothing of ours
    quantizes, they are Inductor's; so are Gemma's, whose norms follow one another. Ours alone is a norm that only latent attention
    reads."""
    ours, inductors, unlinked = (around_linears(graphs[seams][identity(family)]) for seams in graphs)
    with capsys.disabled():
        print(f"\n{identity(family)}: {ours}, without norms and activations {inductors}, without links {unlinked}")
    assert sum(ours.values()) == inductors["generated"] + LOST[family] and unlinked == inductors
    assert any(op.endswith("quant") for op in ours) == (family[0] != "gemma3_text")
    alone = configuration(family)["num_hidden_layers"] if "kv_lora_rank" in configuration(family) else 0
    assert ours.get("rms_norm", 0) == alone
