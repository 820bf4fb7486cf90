"""Compare the baseline's step with published steps beyond its band: their slope over batch, and other engines."""

from __future__ import annotations

from typing import NamedTuple

from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.timing import machines, published_steps, step, step_report

KEPT = 0.15  # relative error of a slope


def slopes() -> list[tuple[str, int, float, float]]:
    """Return release, batch, and the ms added since batch 1, published and predicted."""
    return [
        (
            release,
            batch,
            points[batch] - points[1],
            (published_steps.predicted(batch)[0] - published_steps.predicted(1)[0]) / 1e3,
        )
        for release, points in published_steps.RELEASES.items()
        for batch in points
        if batch > 1
    ]


def explained() -> bool:
    """Return whether the constants of baseline.py explain all slopes within `KEPT`."""
    return all(abs(found / published - 1) <= KEPT for _, _, published, found in slopes())


class Other(NamedTuple):
    """Published ms per token by concurrent requests, of another engine or an older vLLM.

    `model` is the name of a shipped config.json, or its contents. `context` is the average number of keys of a request.
    """

    name: str
    model: str | dict
    product: str
    context: int
    ms: dict[int, float]
    source: str
    ranks: int = published_steps.RANKS


DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


OTHERS = (
    Other(
        "ATOM in vLLM, DeepSeek-R1 FP8, TP 8",
        "deepseek-v3",
        "MI355X",
        1536,
        {4: 11.2, 8: 12.0, 16: 13.5, 32: 17.8, 64: 21.3},
        "2026-03, 1k in, 1k out; the GPU is presumed",
    ),
    Other(
        "SGLang, DeepSeek-R1 FP8, TP 8",
        "deepseek-v3",
        "MI355X",
        1536,
        {4: 9.6, 8: 10.7, 16: 13.6, 32: 18.4, 64: 23.0},
        "2026-05, 1k in, 1k out",
    ),
    Other(
        "an older vLLM, Llama-3.1-405B FP8, TP 8",
        published_steps.MODEL,
        "MI300X",
        192,
        {1: 27.6, 8: 31.0, 16: 34.2, 32: 40.1, 64: 54.1},
        "Oracle, 128 in, 128 out: requests over tokens a second, with the prefill",
    ),
    Other(
        "vLLM 0.11.2, DeepSeek-V2-Lite BF16",
        DEEPSEEK_V2_LITE,
        "MI300X",
        512,
        {1: 4.52},
        "cklxx/fleet-mi300x, 2026-09: wall time of full graphs, with the scheduler; the number of keys is presumed",
        ranks=1,
    ),
)
"""Held-out checks of the baseline's step: nothing is fitted to them, and they do not define the band."""


def other_step(other: Other, batch: int) -> step.Total:
    """Return the predicted step of the baseline for a point of `OTHERS`."""
    machine = machines.named(other.product)
    config = model_config.read(other.model) if isinstance(other.model, str) else other.model
    given = config, other.ranks, None, batch, machine, "baseline", lambda *_: None, other.context
    return step.total(step.nodes(*given))


def is_in_band(other: Other, batch: int) -> bool:
    """Return whether a point lies within the band of its predicted step."""
    low, high = step_report.interval(other_step(other, batch))
    return low <= other.ms[batch] <= high
