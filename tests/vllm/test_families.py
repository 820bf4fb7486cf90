"""Test that vLLM generates the same tokens with and without the plugin, and calls each layer's ops, by model family."""

import collections
import csv
import json
import re

import checkpoints
import pytest
import test_selection
from engines import FAMILIES, HERE, STEPS, counted, identity
from marks import FULL, full

pytestmark = pytest.mark.slow

ALWAYS = ("glm4_moe", "gemma3_text")
"""Heads' norms, and experts whose router reads the norm; norms of 1 + weight.

Others run with --full.
"""
RUN = [family for family in FAMILIES if FULL or family[0] in ALWAYS]


def job(engines, family: tuple[str, str], **options) -> dict:
    """Return a job; DeepSeek V3's predicts one more token in each step."""
    result = engines.job(family, **options)
    if family[0] == "deepseek_v3":
        result["engine"]["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 1}
    return result


@pytest.fixture(scope="module")
def eager(engines) -> dict[str, dict]:
    """Return vLLM's answers with the plugin."""
    return engines.run({identity(family): job(engines, family) for family in RUN})


@pytest.fixture(scope="module")
def compiled(engines) -> dict[str, dict]:
    """Return the same through vLLM's passes."""
    return engines.run({identity(family): job(engines, family, compiled=True) for family in RUN})


@pytest.fixture(scope="module")
def without(engines) -> dict[str, dict]:
    return engines.run({identity(family): job(engines, family) for family in RUN}, VLLM_PLUGINS="none")


def calls_of_a_layer(config: dict, layer: int, compiled: bool) -> dict[str, int]:
    """Return how often each op runs in a layer in one step. Compiled norms quantize for the linear that reads them."""
    family = config["model_type"]
    routed, latent = checkpoints.has_experts(config, layer), "kv_lora_rank" in config
    dense = not routed or family not in ("mixtral", "qwen3_moe", "minimax_m2")  # or experts that all tokens share
    gemma, queries = family == "gemma3_text", config.get("q_lora_rank") is not None
    heads = 2 * (family in ("qwen3", "qwen3_moe", "glm4_moe"))
    grouped = config.get("topk_method") == "noaux_tc" or family == "glm4_moe"
    first = int(layer == 0)  # its norm has no residual
    calls = {
        "rms_norm_dynamic_per_token_quant": 1 + (not routed) + (latent and queries),
        "rms_norm": latent,
        "fused_add_rms_norm": routed and family not in ("glm4_moe", "minimax_m2"),  # these routers read it in float32
    }
    if gemma:
        calls = {"rms_norm_dynamic_per_token_quant": first} if compiled else {"rms_norm": 4 + first}
    elif not compiled:
        calls["rms_norm"] = latent + heads + first + (latent and queries)
        calls["fused_add_rms_norm"] = 1 + (not first)
        del calls["rms_norm_dynamic_per_token_quant"]
    return calls | {
        "silu_and_mul_per_token_quant": 0 if gemma else int(dense),
        "scaled_mm": 2 + latent + 2 * dense,
        "fused_experts": int(routed),
        "grouped_topk": int(routed and grouped),
        "topk_softmax": int(routed and not grouped),
    }


def expected_calls(config: dict, compiled: bool) -> dict[str, int]:
    """Return the calls of a generation. The last norm is vLLM's where it leaves the residual as it is."""
    calls = collections.Counter()
    for layer in range(config["num_hidden_layers"]):
        calls.update({op: STEPS * count for op, count in calls_of_a_layer(config, layer, compiled).items()})
    calls["fused_add_rms_norm"] += STEPS * (config["model_type"] != "gemma3_text")
    if "kv_lora_rank" in config:  # expands the latents of the prompts, in the first step
        calls["scaled_mm"] += config["num_hidden_layers"]
    return {op: count for op, count in calls.items() if count}


def configuration(family: tuple[str, str]) -> dict:
    return {**checkpoints.LLAMA, **checkpoints.FAMILIES[family[0]], "model_type": family[0]}


MODES = pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=full)])


@MODES
@pytest.mark.parametrize("family", RUN, ids=identity)
def test_tokens_are_those_of_baseline_vllm(request, without, family, mode):
    plugin, baseline = request.getfixturevalue(mode)[identity(family)], without[identity(family)]
    assert baseline["stats"] == {} and plugin["tokens"] == baseline["tokens"]


@MODES
@pytest.mark.parametrize("family", [family for family in RUN if family[0] != "deepseek_v3"], ids=identity)
def test_each_layer_calls_its_ops(request, family, mode):
    found = request.getfixturevalue(mode)[identity(family)]["stats"]
    wanted = expected_calls(configuration(family), mode == "compiled")
    assert counted(found) == wanted


@pytest.mark.parametrize("family", RUN, ids=identity)
def test_each_layer_is_taken(eager, family):
    """The seams take every layer except Gemma's GeGLU, MiniMax's norms over all heads, and on CPU windows and MLA with drafts."""
    found, config = eager[identity(family)]["reach"], configuration(family)
    missed = {kind for kind, one in found.items() if one["missed"]}
    left = {"mistral": {"layers of attention"}, "minimax_m2": {"norms"}}
    left["deepseek_v3"] = {"layers of attention with drafts"}
    assert missed == left.get(family[0], set())
    routed = sum(checkpoints.has_experts(config, layer) for layer in range(config["num_hidden_layers"]))
    drafts = config["model_type"] == "deepseek_v3"  # its layer has experts, too
    assert found.get("layers of experts", {"taken": 0})["taken"] == routed + drafts
    assert found["norms"]["taken"] > config["num_hidden_layers"] and found["linear layers"]["taken"] > 0
    assert ("activations" in found) == (family[0] not in ("gemma3_text", "mixtral", "minimax_m2"))


# What the seams reach, by model and release

RECORDED = HERE.parent / "data" / "reach.csv"
BUILT = test_selection.BUILD / "reach.csv"
RELEASES = list(test_selection.RELEASES)
INSTALLED = "0.32"
MLA = "deepseek_v2", "kimi_k2", "deepseek_v3"
NOT_ON_CPU = {"0.27": ("minimax_m2", *MLA), "0.28": ("minimax_m2", *MLA), "0.29": ("minimax_m2",)}
"""By release, models that vLLM's CPU build does not run: MLA, and MiniMax-M2, where it corrupts memory without the plugin, too."""
PATTERNS = "norms and activations"


def reached(answer: dict, steps: int) -> dict[str, str]:
    """Return, by kind of layer, how many a seam has taken and which not, and a step's calls of norms and activations."""
    cells = {}
    for kind, one in answer["reach"].items():
        if kind != "layers of attention":  # a GPU has other backends
            missed = ", ".join(f"{count} {what}" for what, count in sorted(one["missed"].items()))
            cells[kind] = f"{one['taken']}" + (f"; vLLM's: {missed}" if missed else "")
    calls = {op: count // steps for op, count in counted(answer["stats"]).items()}
    found = [f"{op} {count}" for op, count in sorted(calls.items()) if re.search("norm|silu", op)]
    return cells | {f"{PATTERNS} in a step": ", ".join(found)}


def recorded_reach() -> dict[tuple[str, str], dict[str, str]]:
    with RECORDED.open(newline="") as file:
        return {(row["model"], row["layers"]): row for row in csv.DictReader(file)}


@full
@pytest.mark.parametrize("family", [family for family in RUN if family[0] != "deepseek_v3"], ids=identity)
def test_reach_is_as_recorded(compiled, family):
    """The release is the installed one. deepseek_v3 drafts, which gives it another number of steps."""
    known = recorded_reach()
    for kind, cell in reached(compiled[identity(family)], STEPS).items():
        assert known[family[0], kind][INSTALLED] == cell


@full
def test_reach_of_every_release_is_as_recorded(engines, tmp_path):
    """One token of each family goes through the passes of each release. Writes build/reach.csv."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for release in RELEASES:
        families = [family for family in FAMILIES if family[0] not in NOT_ON_CPU.get(release, ())]
        jobs = {family[0]: engines.job(family, compiled=True, max_tokens=1) for family in families}
        package = None if release == INSTALLED else test_selection.runnable(release, tmp_path / release)
        answers = engines.run(jobs, cache=f"reach-{release}", vllm=package)
        for model in jobs:
            for kind, cell in reached(answers[model], 1).items():
                rows.setdefault((model, kind), dict.fromkeys(RELEASES, ""))[release] = cell
    with BUILT.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", "layers", *RELEASES])
        writer.writerows([*of, *row.values()] for of, row in rows.items())
    assert BUILT.read_text() == RECORDED.read_text(), "build/reach.csv differs from tests/data/reach.csv"


COUNTED = [family for family in FAMILIES if family[0] in ("qwen3", "mixtral", "glm4_moe", "gemma3_text", "kimi_k2")]


@pytest.fixture(scope="module")
def graphs(engines) -> dict[str, dict[str, dict[str, int]]]:
    """Return, by seams and family, the launches on a GPU of the longest piece of the compiled model."""
    import kernels

    found = {}
    for seams in ("all", "-norm,-activation", "-fusion"):
        jobs = {identity(family): engines.job(family, compiled=True, max_tokens=1) for family in COUNTED}
        options = {"VLLM_USE_AOT_COMPILE": "0", "VLLM_DISABLE_COMPILE_CACHE": "1", "VLLM_ROCM_OPS_SEAMS": seams}
        output = engines.run(jobs, before="import kernels; kernels.install()", **options)["output"]
        parts = re.split(r"Starting to load model", output)[1:]
        counted = [
            [json.loads(line) for line in re.findall(rf"^{kernels.MARK}(.*)$", part, re.MULTILINE)] for part in parts
        ]
        found[seams] = {name: max(graphs, key=lambda graph: sum(graph.values())) for name, graphs in zip(jobs, counted)}
    return found


def around_linears(graph: dict[str, int]) -> dict[str, int]:
    """Return the number of Inductor's kernels, and of the plugin's norms and activations."""
    plugin = {
        op.partition(".")[2]: count for op, count in graph.items() if re.search(r"\.(fused_add_)?(rms_norm|silu)", op)
    }
    return {"generated": graph["generated"], **plugin}


@full
@pytest.mark.parametrize("family", COUNTED, ids=identity)
def test_kernels_of_compiled_graphs(graphs, family, capsys):
    """They are no more than Inductor's, which has all without fusion. Only MLA's own norm is the plugin's alone."""
    plugin, inductors, unfused = (around_linears(graphs[seams][identity(family)]) for seams in graphs)
    with capsys.disabled():
        print(f"\n{identity(family)}: {plugin}, without norms and activations {inductors}, without fusion {unfused}")
    assert sum(plugin.values()) == inductors["generated"] and unfused == inductors
    assert any(op.endswith("quant") for op in plugin) == (family[0] != "gemma3_text")
    assert plugin.get("rms_norm", 0) == ("kv_lora_rank" in configuration(family))
