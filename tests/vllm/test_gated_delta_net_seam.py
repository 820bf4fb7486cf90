"""Test the launch of Gated DeltaNet in vLLM's engine, for Qwen3-Next and Qwen3.5: tokens, the steps that it serves, and its selection."""

import checkpoints
import delta_net
import pytest
import torch
from engines import STEPS, prompts_of
from marks import FULL, full
from test_drafts import NGRAM, PLAIN_NUMBA

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.quantization import LIMIT
from vllm_rocm_ops.vllm.attention import gated_delta_net

OP = ops.gated_delta_net_decode
LAYERS = checkpoints.DELTA["layer_types"].count("linear_attention")
ON_GPU = torch.cuda.is_available()
LONG = 400  # tokens of prompts that fill a page, of 384
CACHED = {"enable_prefix_caching": True, "mamba_cache_mode": "align", "max_model_len": 512, "max_num_batched_tokens": 512}

# In vLLM's engine

SEEDS = {
    # as in engines.py, found in vLLM without the launch
    "next": (80, 173, 212),
    "cached": (41, 56, 72),
    "drafts": (154, 173, 238),
    "dense": (26, 82, 119),
    "static": (38, 72, 119),
    "experts": (100, 244, 279),
}
FLAVOURS = {
    "dense": ("qwen3_5_text", "block"),
    "static": ("qwen3_5_text", "static"),
    "experts": ("qwen3_5_moe_text", "mixed"),
}
PLUGIN_ONLY = "dense", "static"
"""Models whose linear layers vLLM's CPU build lacks."""
RUN = [name for name in SEEDS if FULL or name != "static"]
BEFORE = f"{PLAIN_NUMBA}\nimport delta_net\ndelta_net.install_absent()\n"


def jobs(engines, names, switch: str) -> dict[str, dict]:
    """Return a job for each name, with the launch or without."""
    result = {}
    for name in names:
        flavour, compiled = FLAVOURS.get(name, ("qwen3_next", "mixed")), name == "next" and switch == "1"
        environment = {"VLLM_ROCM_OPS_ATTENTION": switch, "VLLM_ROCM_OPS_MEASURE": "0"}
        prompts = long_prompts(SEEDS[name]) if name == "cached" else prompts_of(SEEDS[name])
        job = engines.job(flavour, compiled=compiled, environment=environment, prompts=prompts)
        if name == "cached":
            job["engine"] |= CACHED
            job["then"] = ["again", "reload"] if switch == "1" else ["again"]  # after it vLLM's CPU build says something else
        elif name == "drafts" and switch == "1":  # vLLM's CPU build says something else with drafts
            job["engine"]["speculative_config"] = {**NGRAM, "num_speculative_tokens": 3}
            job["engine"]["enable_prefix_caching"] = False  # its copies of drafts' states are a kernel of Triton's
        elif name == "next":
            job["max_tokens"] = [STEPS, STEPS - 2, STEPS]
        if name == "drafts":
            job["max_tokens"] = [3 * STEPS, 3 * STEPS, STEPS]
        result[f"{name} {switch}"] = job
    return result


def long_prompts(seeds: tuple[int, ...]) -> list[list[int]]:
    """Return a prompt of `LONG` tokens for each seed."""
    words = checkpoints.LLAMA["vocab_size"]
    return [
        torch.randint(3, words, (LONG,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in seeds
    ]


@pytest.fixture(scope="module")
def plugin(engines) -> dict[str, dict]:
    """Return the answers with the launch, and without it where vLLM alone has none."""
    without = jobs(engines, [name for name in RUN if name in PLUGIN_ONLY], "0")
    return engines.run(jobs(engines, RUN, "1") | without, f"{BEFORE}delta_net.install()", "cache-delta-net")


@pytest.fixture(scope="module")
def alone(engines) -> dict[str, dict]:
    """Return the answers of vLLM alone, by its own kernels."""
    names = [name for name in RUN if name not in PLUGIN_ONLY]
    return engines.run(jobs(engines, names, "0"), BEFORE, VLLM_PLUGINS="none")


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="replaces what only vLLM's CPU build has")
@pytest.mark.parametrize("name", RUN)
def test_tokens_are_vllms(request, plugin, name):
    """Prefill and mixed steps stay vLLM's, and decode steps go on with their states."""
    found = plugin[f"{name} 1"]
    wanted = (plugin if name in PLUGIN_ONLY else request.getfixturevalue("alone"))[f"{name} 0"]
    assert OP.name not in wanted["stats"] and found["tokens"] == wanted["tokens"]
    calls = sum(found["stats"][OP.name].values())
    if name == "drafts":
        assert found["accepted"] > 0 and "8" in found["rows"][OP.name]
        return
    if name == "cached":  # prompts come one after another, beside decodes
        assert min(found["cached"], wanted["cached"]) >= 384 and wanted["then"] == [wanted["tokens"]]
        assert found["then"] == [found["tokens"]] * 2 and 0 < calls < LAYERS * (STEPS + 2)
        return
    assert calls == LAYERS * (STEPS - 1)
