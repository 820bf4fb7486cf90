"""Test vLLM's serving modes with the ops.

The modes are tensor and expert parallelism, LoRA, chunked prefill with a prefix cache, and weights that are loaded
again. The tokens are the plain computation's, or vLLM's without the plugin. vLLM's CPU build lacks pipeline
parallelism, sleep and CUDA graphs, which are not tested here.
"""

import re

import checkpoints
import pytest
from engines import FORKED, counted
from marks import full

pytestmark = pytest.mark.slow

MTP = {"method": "mtp", "num_speculative_tokens": 1}
TOKEN, BLOCK, EXPERTS = ("llama", "token"), ("llama", "block"), ("deepseek", "block")


def best(expected, flavour, tokens) -> list[list[int]]:
    """Return the tokens of the plain computation."""
    return [wanted.argmax(-1).tolist() for wanted in expected(flavour, tokens)]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> str:
    """Return the folder of a LoRA adapter of rank 8 for every linear layer of the Llama."""
    return str(checkpoints.build_adapter(tmp_path_factory.mktemp("adapter"), checkpoints.LLAMA))


def lora(engines, flavour, adapter: str) -> dict:
    """Return a job that generates without an adapter, then with one."""
    job = engines.job(flavour, then=[adapter])
    job["engine"] |= {"enable_lora": True, "max_lora_rank": 8}
    return job


@pytest.fixture(scope="module")
def answers(engines, adapter) -> dict[str, dict]:
    """Return the answers of one model after the other, in one process."""
    jobs = {
        "chunked": engines.job(TOKEN, then=["again"]),
        "reload token": engines.job(TOKEN, then=["reload", "reload"]),
        "reload block": engines.job(EXPERTS, then=["reload", "reload"]),
        "lora": lora(engines, TOKEN, adapter),
    }
    chunks = {"max_num_batched_tokens": 16, "enable_chunked_prefill": True}
    glm = checkpoints.build(engines.folder / "glm drafts", "glm4_moe", "mixed", num_nextn_predict_layers=1)
    for name, drafts in {"glm": {}, "glm drafts": {"speculative_config": MTP}}.items():
        jobs[name] = engines.job(("glm4_moe", "mixed")) | {"model": str(glm)}
        jobs[name]["engine"] |= drafts
    jobs["chunked"]["engine"] |= chunks | {"enable_prefix_caching": True, "block_size": 32}
    return engines.run(jobs)


def test_chunked_prefill_and_a_prefix_cache(answers, expected):
    """Prompts come in parts of 16 tokens, and the second time out of the cache."""
    answer = answers["chunked"]
    assert answer["then"] == [answer["tokens"]] == [best(expected, TOKEN, answer["tokens"])]
    assert answer["cached"] >= 32
    assert answer["stats"]["scaled_mm"]


@pytest.mark.parametrize(("name", "flavour"), [("reload token", TOKEN), ("reload block", EXPERTS)])
def test_weights_that_are_loaded_again(answers, expected, name, flavour):
    """They are loaded twice: the second loading starts from the parameters that the first one left."""
    answer = answers[name]
    assert answer["then"] == [answer["tokens"]] * 2 == [best(expected, flavour, answer["tokens"])] * 2


def test_drafts_of_glm(answers):
    """The seams take all layers of its multi-token prediction, too, and drafts change no token."""
    plain, drafting = answers["glm"], answers["glm drafts"]
    assert drafting["tokens"] == plain["tokens"] and drafting["drafted"]
    for op in ("scaled_mm", "fused_experts", "grouped_topk"):
        assert sum(drafting["stats"][op].values()) > sum(plain["stats"][op].values())
    without = {"taken": 0}  # attention with drafts
    taken = {k: (plain["reach"].get(k, without)["taken"], one["taken"]) for k, one in drafting["reach"].items()}
    assert all(more > fewer for fewer, more in taken.values()), taken
    assert not any(layers["missed"] for layers in drafting["reach"].values())


def test_lora(answers, engines, adapter, expected):
    """Requests without an adapter have the model's tokens, those with one have vLLM's without the plugin."""
    answer = answers["lora"]
    baseline = engines.run({"lora": lora(engines, TOKEN, adapter)}, VLLM_PLUGINS="none")["lora"]
    assert baseline["stats"] == {} and answer["stats"]["scaled_mm"]
    assert answer["tokens"] == best(expected, TOKEN, answer["tokens"]) == baseline["tokens"]
    assert answer["then"] == baseline["then"] != [answer["tokens"]]


def in_parallel(engines, flavour, **options) -> dict:
    """Return a job of two ranks."""
    job = engines.job(flavour)
    job["engine"] |= {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", **options}
    return job


OFF = "silu_and_mul_per_token_quant"


@pytest.fixture(scope="module")
def parallel(engines) -> dict[str, dict]:
    """Return the answers of two ranks, without one op's kernels."""
    jobs = {
        "tensor": in_parallel(engines, TOKEN),
        "expert": in_parallel(engines, ("deepseek", "bf16"), enable_expert_parallel=True),
    }
    return engines.run(jobs, before=FORKED, VLLM_ROCM_OPS_DISABLE=OFF)


def test_tensor_parallelism(parallel, expected):
    """Each of two ranks runs its ops as often as one would, and logs its fallbacks when it ends."""
    answer, why = parallel["tensor"], "switched off by VLLM_ROCM_OPS_DISABLE"
    assert answer["tokens"] == best(expected, TOKEN, answer["tokens"])
    calls = 2 * len(answer["tokens"][0])  # of an activation: in each layer, each step
    assert counted(answer["stats"])[OFF] == calls and counted(answer["stats"])["scaled_mm"] == 4 * calls
    assert answer["other_ranks"] == [answer["stats"]]
    assert answer["fallbacks"] == [{OFF: {why: calls}}] * 2
    found = re.findall(rf"own code in this process: {OFF} (\d+)x \({why}\)$", parallel["output"], re.MULTILINE)
    assert len(found) == 2 and min(map(int, found)) >= calls


def test_expert_parallelism(parallel, expected):
    """Each of two ranks has half of the experts."""
    answer = parallel["expert"]
    assert answer["tokens"] == best(expected, ("deepseek", "bf16"), answer["tokens"])
    assert answer["other_ranks"] == [answer["stats"]]
    assert counted(answer["stats"])["fused_experts"] == 2 * len(answer["tokens"][0])


@full
def test_shuffled_weights_that_are_loaded_again(engines, expected):
    """They are put in fragment order again."""
    job = engines.job(BLOCK, then=["reload", "reload"])
    answer = engines.run_one(job, VLLM_ROCM_OPS_SHUFFLE="1")
    assert answer["then"] == [answer["tokens"]] * 2 == [best(expected, BLOCK, answer["tokens"])] * 2
