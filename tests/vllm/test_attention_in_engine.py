"""Test the plugin's decode attention in vLLM's engine on a GPU, in place of TRITON_ATTN and TRITON_MLA.

Its tokens are compared with vLLM's without the plugin, with caches of 16 bits and of FP8, speculative decoding, and
chunked prefills along with decoding requests. Graphs are captured.

No other seam is on. Several engines run at the same time. Without a GPU, with --full, they run on CPU, eagerly, in
vLLM's CPU backends; there are no FP8 caches, and no n-gram drafts.
"""

import concurrent.futures
import os
from typing import NamedTuple

import checkpoints
import plain
import pytest
import torch

from vllm_rocm_ops.core.stats import FALLBACK

ON_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ON_GPU and not os.environ.get("FULL_TESTS"), reason="needs a GPU"),
]

AT_ONCE = 12 if ON_GPU else 1
TOKENS = 24
TIE = 1.0
"""The allowed gap of a token to the plain model's best one, in log probability, where two engines first differ."""


class Tiny(NamedTuple):
    """A model's checkpoint, the backend of its attention, and the plugin's op for it."""

    model: str
    sizes: dict[str, int]
    backend: str
    op: str


MODELS = {
    "heads of 64": Tiny("llama", {}, "TRITON_ATTN", "paged_attention_decode"),
    "heads of 128": Tiny("llama", {"head_dim": 128}, "TRITON_ATTN", "paged_attention_decode"),
    "latent": Tiny("deepseek", {"num_nextn_predict_layers": 1}, "TRITON_MLA", "mla_decode"),
}
NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}
CHUNKS = {"max_num_batched_tokens": 32, "max_num_seqs": 3}
FP8 = {"kv_cache_dtype": "fp8"}


def options(model: str) -> dict[str, dict]:
    """Return the engine's options of each run of a model."""
    drafts = {"method": "mtp"} if model == "latent" else NGRAM
    found = {"cache of 16 bits": {}, "chunks": CHUNKS}
    if ON_GPU:
        found["cache of FP8"] = FP8
    if ON_GPU or model == "latent":
        found |= {f"{n} drafts": {"speculative_config": drafts | {"num_speculative_tokens": n}} for n in (2, 4)}
    if ON_GPU:
        found["2 drafts, FP8"] = found["2 drafts"] | FP8
    return found


RUNS = [(model, run) for model in MODELS for run in options(model)]
SIDES = {
    "plugin": {"VLLM_ROCM_OPS_ATTENTION": "1", "VLLM_ROCM_OPS_SEAMS": "decode_attention,mla_attention"},
    "stock": {"VLLM_PLUGINS": "none"},
}


def prompts() -> list[list[int]]:
    """Return a prompt that repeats itself, a short one, and long ones."""
    generator = torch.Generator().manual_seed(3)
    some = [torch.randint(3, 500, (length,), generator=generator).tolist() for length in (12, 5, 90, 150)]
    return [some[0] * 5, *some[1:]]


def start(engines, folder, model: str, run: str, side: str) -> dict:
    job = engines.job(("llama", "bf16"), model=str(folder), max_tokens=TOKENS, logprobs=None)
    job["prompts"] = prompts()
    if ON_GPU:
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # nothing is compiled, which takes long
        job["engine"] = {"compilation_config": graphs, "attention_backend": MODELS[model].backend}
    job["engine"] |= options(model)[run]
    both = {"VLLM_ROCM_OPS_ON_NVIDIA": "1", "VLLM_ROCM_OPS_ON_CPU": "1"}
    return engines.run_one(job, cache=f"cache-{model}-{side}", **both, **SIDES[side])


@pytest.fixture(scope="module")
def folders(engines) -> dict:
    made = {name: engines.folder / f"attention-{name}" for name in MODELS}
    for name, tiny in MODELS.items():
        checkpoints.build(made[name], tiny.model, "bf16", **tiny.sizes)
    return made


@pytest.fixture(scope="module")
def answers(engines, folders):
    """Return a function for an engine's answer by model, run and side, which raises if the engine failed."""
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        futures = {
            (*run, side): pool.submit(start, engines, folders[run[0]], *run, side) for run in RUNS for side in SIDES
        }
    return lambda *which: futures[which].result()


@pytest.fixture(scope="module")
def models(folders) -> dict[str, plain.Model]:
    return {name: plain.Model(folder) for name, folder in folders.items()}


def calls(answer: dict, op: str) -> int:
    """Return the calls of the plugin's kernels, captured ones included."""
    kernels = [(name, n) for of in (*answer["captured"], answer["stats"]) for name, n in of.get(op, {}).items()]
    return sum(n for name, n in kernels if not ON_GPU or not name.startswith(FALLBACK))


@pytest.mark.parametrize(("model", "run"), RUNS)
def test_tokens_equal_baseline_vllms(answers, models, capsys, model, run):
    """Tokens may differ from a place on where the plain model, given the tokens before it, finds both likely."""
    plugin, baseline = (answers(model, run, side) for side in SIDES)
    op = MODELS[model].op
    assert calls(plugin, op) > 0 and not baseline["stats"]
    assert not ON_GPU or plugin["fallbacks"] == [{}]
    assert ("drafts" in run) == (min(plugin["drafted"], baseline["drafted"]) > 0)
    said = []
    for prompt, found, wanted in zip(prompts(), plugin["tokens"], baseline["tokens"], strict=True):
        assert len(found) == len(wanted) == TOKENS
        place = next((i for i, both in enumerate(zip(found, wanted)) if both[0] != both[1]), None)
        if place is None:
            continue
        logits = models[model].logits(prompt + found[:place], len(prompt))[-1].log_softmax(-1)
        behind = [(logits.max() - logits[token]).item() for token in (found[place], wanted[place])]
        said.append(f"token {place}: {found[place]} and {wanted[place]}, {behind[0]:.2f} and {behind[1]:.2f} behind")
        assert max(behind) <= TIE, said
    with capsys.disabled():
        print(f"\n{model}, {run}: {calls(plugin, op)} calls of {op}, {'; '.join(said) or 'the same tokens'}")
