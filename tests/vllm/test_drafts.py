"""Test that vLLM's engine with MTP, EAGLE3 and n-gram drafts says the same with the plugin, which serves their rows.

A step verifies 1 + `DRAFTS` rows per request. On CPU that is CPU_ATTN and CPU_MLA with references for kernels, on a GPU
TRITON_ATTN and TRITON_MLA with captured graphs: `python -m pytest tests/vllm/test_drafts.py`.
"""

import collections
from typing import NamedTuple

import checkpoints
import pytest
import test_selection
import torch
from engines import STEPS, prompts_of
from marks import full
from test_families import INSTALLED, NOT_ON_CPU

from vllm_rocm_ops.core.stats import FALLBACK

pytestmark = pytest.mark.slow

ON_GPU = torch.cuda.is_available()
DRAFTS = 3


class Drafting(NamedTuple):
    """A model with drafts.

    Attributes:
        flavour: The model, and how it is quantized.
        config: vLLM's speculative configuration.
        backend: The attention backend on a GPU.
        ops: The plugin's ops for attention and for quantized linears, and how often a step that verifies drafts calls them.
        seeds: Of prompts for which the best token leads by 3 in log probability in each of `steps`; None for the flavor's.
    """

    flavour: tuple[str, str]
    config: dict
    backend: str
    ops: dict[str, int]
    seeds: tuple[int, ...] | None = None
    steps: int = STEPS


NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}
HEADS, LATENT = "paged_attention_decode", "mla_decode"
LLAMA = ("llama", "token"), "TRITON_ATTN"
RUNS = {
    # the draft model's attention, with linears in bf16, sees the verified rows, too
    "EAGLE3": Drafting(LLAMA[0], {"method": "eagle3"}, LLAMA[1], {HEADS: 3, "scaled_mm": 8}),
    "MTP": Drafting(("deepseek_v3", "mixed"), {"method": "mtp"}, "TRITON_MLA", {LATENT: 4, "scaled_mm": 20}),
    # answers that repeat themselves at once
    "n-gram": Drafting(LLAMA[0], NGRAM, LLAMA[1], {HEADS: 2, "scaled_mm": 8}, (94, 166, 396), 24),
    # requests with other numbers of drafts
    "ragged n-gram": Drafting(LLAMA[0], NGRAM, LLAMA[1], {HEADS: 2, "scaled_mm": 8}, (94, 270, 356), 24),
}
PLAIN_NUMBA = """
import importlib.util, sys, types
if importlib.util.find_spec("numba") is None:  # compiles the search for n-grams
    numba = sys.modules["numba"] = types.ModuleType("numba")
    numba.jit = numba.njit = lambda *given, **_: given[0] if given and callable(given[0]) else lambda function: function
    numba.prange, numba.get_num_threads, numba.set_num_threads = range, lambda: 1, lambda threads: None
"""
UNIFORM_MLA = """
from vllm.model_executor.layers.attention import mla_attention
mla_attention.MLACommonMetadataBuilder.query_len_support = mla_attention.QueryLenSupport.UNIFORM
"""
"""As TRITON_MLA declares, CPU_MLA gives `forward_mqa` several rows per request, which its own kernel lacks."""


def answers(engines, runs=tuple(RUNS), serves: bool = True, vllm=None) -> dict[str, dict]:
    """Return the engine's answers, with the plugin or without."""
    draft, jobs = checkpoints.build_draft(engines.folder / "eagle3", checkpoints.LLAMA), {}
    for name in runs:
        run = RUNS[name]
        job = jobs[name] = engines.job(run.flavour, max_tokens=run.steps)
        job["prompts"] = prompts_of(run.seeds) if run.seeds else job["prompts"]
        given = {"model": str(draft)} if run.config["method"] == "eagle3" else {}
        if ON_GPU:
            graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # nothing is compiled, which takes long
            job["engine"] = {"compilation_config": graphs, "attention_backend": run.backend}
        job["engine"]["speculative_config"] = {**run.config, **given, "num_speculative_tokens": DRAFTS}
    plugin = {"VLLM_ROCM_OPS_ATTENTION": "1", "VLLM_ROCM_OPS_ON_NVIDIA": "1"}
    environment = plugin if serves else {"VLLM_PLUGINS": "none"}
    before = PLAIN_NUMBA + UNIFORM_MLA * (serves and not ON_GPU)
    cache = f"cache-drafts-{serves}-{vllm and vllm.parent.name}"
    return engines.run(jobs, before, cache, vllm, VLLM_USE_DEEP_GEMM="0", **environment)


@pytest.fixture(scope="module")
def plugin(engines) -> dict[str, dict]:
    return answers(engines)


@pytest.fixture(scope="module")
def baseline(engines) -> dict[str, dict]:
    return answers(engines, serves=False)


def require_rows(name: str, answer: dict) -> None:
    """Raise unless attention and the linears of each step that verifies drafts were the plugin's, for all its rows."""
    run, of_request = RUNS[name], 1 + DRAFTS
    assert answer["drafted"] > 0 and (answer["accepted"] > 0 or run.config != NGRAM)
    attention, linear = run.ops
    if ON_GPU:
        captured = [kernel for of in answer["captured"] for kernel in of.get(attention, {})]
        assert captured and not [kernel for kernel in captured if kernel.startswith(FALLBACK)]
        assert answer["fallbacks"] == [{}]
        assert any(rows.endswith(f"x{of_request}") for rows in answer["captured_rows"][attention])
        return
    steps = collections.Counter()
    for rows, calls in answer["rows"][attention].items():
        requests, length = map(int, rows.split("x"))
        if length == of_request:
            steps[str(requests * length)] += calls / run.ops[attention]
    assert steps and steps == {rows: answer["rows"][linear][rows] / run.ops[linear] for rows in steps}


@pytest.mark.parametrize("name", RUNS)
def test_answers_with_drafts_are_vllms(plugin, baseline, name):
    assert baseline[name]["stats"] == {} and baseline[name]["drafted"] > 0
    assert plugin[name]["tokens"] == baseline[name]["tokens"]
    require_rows(name, plugin[name])


WITHOUT_DRAFTS = "0.30"
"""The release whose CPU build raises where it samples drafts, without the plugin, too."""
OTHERS = [release for release in test_selection.RELEASES if release not in (INSTALLED, WITHOUT_DRAFTS)]


@full
@pytest.mark.skipif(ON_GPU, reason="has its own release")
@pytest.mark.parametrize("release", OTHERS)
def test_answers_with_drafts_in_other_releases(engines, baseline, release, tmp_path):
    """They are the installed release's, without the plugin."""
    runs = [name for name, run in RUNS.items() if run.flavour[0] not in NOT_ON_CPU.get(release, ())]
    found = answers(engines, runs, vllm=test_selection.runnable(release, tmp_path / release))
    for name in runs:
        assert found[name]["tokens"] == baseline[name]["tokens"]
        require_rows(name, found[name])
