"""Test that vLLM generates the same tokens with the ops, which are called once for each place in the model."""

import collections
import importlib.metadata
from importlib.util import find_spec
from pathlib import Path

import checkpoints
import plain
import pytest
import test_selection
import torch
from engines import BASELINE, FLAVOURS, NOT_COMPILED, STEPS, counted, identity, prompts
from marks import FULL, full

pytestmark = pytest.mark.slow

MODES = ("eager", "compiled")
FEW_COMPILED = [("deepseek", "block")]
COMPILED = [flavour for flavour in FLAVOURS if flavour[1] not in NOT_COMPILED] if FULL else FEW_COMPILED
MODES_OF = [(m, flavour) for m, flavours in zip(MODES, (FLAVOURS, COMPILED)) for flavour in flavours]


@pytest.fixture(scope="module")
def eager(engines) -> dict[str, dict]:
    """Return vLLM's eager answers with the plugin, with --full also with gfx950 code, and with deliberately wrong ops."""
    jobs = {identity(flavour): engines.job(flavour) for flavour in FLAVOURS}
    if FULL:
        jobs["gfx950"] = engines.job(("llama", "mxfp8"), emulate="gfx950", max_tokens=EMULATED_STEPS)
    for name, (flavour, op, make) in FAULTS.items():
        jobs[name] = engines.job(flavour, fault={"op": op, "make": f"lambda exact: lambda {make}"})
    return engines.run(jobs)


@pytest.fixture(scope="module")
def compiled(engines) -> dict[str, dict]:
    """Return the answers with the plugin, compiled by Dynamo and Inductor."""
    return engines.run({identity(flavour): engines.job(flavour, compiled=True) for flavour in COMPILED})


@pytest.fixture(scope="module")
def baseline(engines) -> dict[str, dict]:
    """Return the eager answers without the plugin."""
    return engines.run({identity(flavour): engines.job(flavour) for flavour in BASELINE}, VLLM_PLUGINS="none")


def test_vllm_finds_the_plugin():
    """The installed package has the entry point that vLLM looks for."""
    [entry] = importlib.metadata.entry_points(group="vllm.general_plugins", name="rocm_ops")
    assert entry.value == "vllm_rocm_ops.vllm:register"


def expected_calls(flavour: tuple[str, str], steps: int = STEPS, compiled: bool = False) -> dict[str, int]:
    """Return how often each op runs: places in the model, times steps. Norms quantize in compiled models."""
    model, kind = flavour
    layers = checkpoints.LLAMA["num_hidden_layers"] if model == "llama" else checkpoints.DEEPSEEK["num_hidden_layers"]
    dense = layers if model == "llama" else checkpoints.DEEPSEEK["first_k_dense_replace"]
    latent = (
        0 if model == "llama" else layers
    )  # DeepSeek's norms of the two latents, one read by a linear, one by attention
    norms, add_norms = latent, 1 + layers - dense  # the last norm, and those before a router
    quantized, quantized_add = 1 + latent, layers - 1 + dense
    linears = 4 * layers + latent  # two or three of attention, two of a feed-forward
    names = {
        "static": (
            "rms_norm_static_fp8_quant",
            "fused_add_rms_norm_static_fp8_quant",
            "silu_and_mul_quant",
            "scaled_mm",
        ),
        "token": (*["rms_norm_dynamic_per_token_quant"] * 2, "silu_and_mul_per_token_quant", "scaled_mm"),
        "block": (*["rms_norm_per_block_quant"] * 2, "silu_and_mul_per_block_quant", "block_scaled_mm"),
        "bf16": ("rms_norm", "fused_add_rms_norm", "silu_and_mul", ""),
        "mxfp8": (*["rms_norm_mxfp8_quant"] * 2, "silu_and_mul_mxfp8_quant", "mxfp8_scaled_mm"),
        "int4": ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "w4a16_gemm"),
    }
    norm, add_norm, activation, linear = names["token" if kind in NOT_COMPILED else kind]
    if not compiled:
        norm, add_norm = "rms_norm", "fused_add_rms_norm"
        activation = "silu_and_mul" if kind == "mxfp8" else activation
    handed = (
        layers - dense if compiled and kind == "block" else 0
    )  # norms before experts that accept quantized hidden states
    per_step = collections.Counter({"rms_norm": norms, "fused_add_rms_norm": add_norms})
    per_step.update({norm: quantized})
    per_step.update({add_norm: quantized_add})
    per_step.update(
        {activation: layers, linear: linears, "grouped_topk": layers - dense, "fused_experts": layers - dense}
    )
    per_step.update({"rms_norm_and_per_block_quant": handed, "fused_add_rms_norm": -handed})
    total = {op: count * steps for op, count in per_step.items() if count and op}
    if linear:
        total[linear] += latent  # expands the latents of the prompts, in the first step
    return total


@pytest.mark.parametrize(("mode", "flavour"), MODES_OF, ids=identity)
def test_ops_are_called(request, mode, flavour):
    """Every norm, activation and quantized linear runs the plugin's op; compiled, nothing else quantizes."""
    answer = request.getfixturevalue(mode)[identity(flavour)]
    off = {name for name, reason in answer["seams"].items() if reason != "on"}
    assert off == {"unquantized_linear"}
    assert counted(answer["stats"]) == expected_calls(flavour, compiled=mode == "compiled")


@pytest.mark.parametrize(("mode", "flavour"), MODES_OF, ids=identity)
def test_tokens_are_those_of_a_plain_computation(request, expected, mode, flavour):
    """Each token is the best one of the plain PyTorch model, given the same tokens before it."""
    answer = request.getfixturevalue(mode)[identity(flavour)]
    agree(answer, expected(flavour, answer["tokens"]))


def agree(answer: dict, plain_logprobs: list[torch.Tensor], steps: int = STEPS) -> None:
    """Raise unless tokens are equal and their log probabilities close to the plain model's."""
    for tokens, logprobs, wanted in zip(answer["tokens"], answer["logprobs"], plain_logprobs):
        assert tokens == wanted.argmax(-1).tolist()
        assert len(tokens) == steps
        if logprobs:
            error = (torch.tensor(logprobs) - wanted[torch.arange(steps), tokens]).abs()
            assert error.mean() < 0.03, error


OTHERS = [release for release in test_selection.RELEASES if release != "0.32"]


@full
@pytest.mark.parametrize("release", OTHERS)
def test_other_releases(engines, expected, release, tmp_path):
    """Their models go through their own passes, the newest's on the installed vLLM's binaries. By default these are few.

    CPU builds run no MLA up to 0.28. Up to 0.29 the activation of shared experts cannot quantize for the linear after it.
    """
    few = [("llama", "static")]
    more = [
        ("llama", "token"),
        ("llama", "block"),
        ("llama", "mxfp8"),
        *([("deepseek", "block")] if release not in ("0.27", "0.28") else []),
    ]
    flavours, experts = [*few, *(more if FULL else ())], ("qwen3_moe", "mixed")
    jobs = {identity(flavour): engines.job(flavour, compiled=True) for flavour in (*flavours, experts)}
    answers = engines.run(jobs, cache=f"cache-{release}", vllm=test_selection.runnable(release, tmp_path))
    for flavour in flavours:
        answer = answers[identity(flavour)]
        if (release, flavour) != ("0.29", ("deepseek", "block")):
            assert counted(answer["stats"]) == expected_calls(flavour, compiled=True)
        agree(answer, expected(flavour, answer["tokens"]))
    answer = answers[identity(experts)]
    assert counted(answer["stats"])["fused_experts"] == STEPS
    assert not any(layers["missed"] for kind, layers in answer["reach"].items() if kind != "layers of attention")


EXPERTS = [flavour for flavour in FLAVOURS if flavour[0] == "deepseek"]


@pytest.fixture(scope="module")
def routed_by_vllm(engines) -> dict[str, dict]:
    """Return the answers with vLLM's own routing before the plugin's experts."""
    jobs = {identity(flavour): engines.job(flavour) for flavour in EXPERTS}
    return engines.run(jobs, VLLM_ROCM_OPS_SEAMS="-routing_experts")


@pytest.mark.parametrize("flavour", EXPERTS, ids=identity)
def test_experts_answer_the_same_with_and_without_routing(routed_by_vllm, eager, flavour):
    """Tokens and log probabilities are the same whether vLLM or the experts route; the op's calls tell which did."""
    theirs, plugin = (answers[identity(flavour)] for answers in (routed_by_vllm, eager))
    assert theirs["tokens"] == plugin["tokens"]
    torch.testing.assert_close(torch.tensor(theirs["logprobs"]), torch.tensor(plugin["logprobs"]), atol=0.05, rtol=0)
    calls = counted(theirs["stats"])
    assert {**calls, "grouped_topk": calls["fused_experts"]} == expected_calls(flavour)
    assert "grouped_topk" not in calls


@pytest.mark.parametrize(("mode", "flavour"), [run for run in MODES_OF if run[1] in BASELINE], ids=identity)
def test_tokens_are_those_of_baseline_vllm(request, baseline, mode, flavour):
    """The plugin changes no token of a model that vLLM runs without it."""
    name = identity(flavour)
    assert baseline[name]["stats"] == {}
    assert request.getfixturevalue(mode)[name]["tokens"] == baseline[name]["tokens"]


GFX942_FORMAT = """
import torch
from vllm.platforms.cpu import CpuPlatform
CpuPlatform.fp8_dtype = classmethod(lambda cls: torch.float8_e4m3fnuz)
CpuPlatform.is_fp8_fnuz = classmethod(lambda cls: True)
"""


EMULATED_STEPS = 3


def all_in(stats: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return how often each op ran, and check that each ran kernels only."""
    assert not [(op, kernel) for op in stats for kernel in stats[op] if kernel.startswith("fallback")]
    return counted(stats)


@full
def test_gfx942_multiplies_packed_mx_weights(engines):
    """Its layers of MX-FP8 run `mx_gemm` on bf16 inputs, for prompts too; tokens are of these weights with exact inputs."""
    flavour = "llama", "mxfp8"
    before = "from vllm_rocm_ops.vllm.linear import mxfp8_linear; mxfp8_linear.has_block_scales = lambda: False"
    answer = engines.run_one(engines.job(flavour, emulate="gfx942", max_tokens=EMULATED_STEPS), before=before)
    calls = expected_calls(flavour, EMULATED_STEPS)
    assert all_in(answer["stats"]) == {op.replace("mxfp8_scaled_mm", "mx_gemm"): count for op, count in calls.items()}
    model = plain.Model(engines.checkpoint(flavour))
    model.quantizes = False
    pairs = zip(prompts(flavour), answer["tokens"])
    agree(answer, [model.logits(p + t[:-1], len(p))[len(p) - 1 :].log_softmax(-1) for p, t in pairs], EMULATED_STEPS)


@full
def test_gfx942_code_runs_inside_vllm(engines, expected):
    """Every op of a generation runs its gfx942 code object in the emulator, in gfx942's e4m3fnuz, and tokens are right."""
    flavours = [("llama", kind) for kind in ("static", "token", "block")]
    options = {"emulate": "gfx942", "max_tokens": EMULATED_STEPS}
    jobs = {identity(flavour): engines.job(flavour, **options) for flavour in flavours}
    answers = engines.run(jobs, before=GFX942_FORMAT, vllm=Path(find_spec("vllm").origin).parent)  # imported anew
    for flavour in flavours:
        answer = answers[identity(flavour)]
        assert all_in(answer["stats"]) == expected_calls(flavour, EMULATED_STEPS)
        agree(answer, expected(flavour, answer["tokens"]), EMULATED_STEPS)


MANY_TOKENS_TO_VLLM = """
import torch
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import ChannelWiseTorchFP8ScaledMMLinearKernel
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.linear import scaled_linear, unquantized_linear

linear_base.vllm_kernel_for = lambda *_: ChannelWiseTorchFP8ScaledMMLinearKernel
scaled_linear.ScaledLinear.limit = 16
op = torch.ops.vllm_rocm_ops.unquantized_linear
torch.ops.vllm.rocm_unquantized_gemm = torch.nn.functional.linear
vocab_parallel_embedding.dispatch_unquantized_gemm = lambda: lambda layer, x, weight, bias=None: op(x, weight, bias)
"""
"""As on ROCm, the plugin's kernel holds one of vLLM's, which serves the prompts, and the plugin computes the logits."""


@full
def test_gfx950_code_and_vllms_kernels_share_a_model(engines, eager, expected):
    """One compiled graph runs vLLM's kernels for the prompts and gfx950 code after them; MX-FP8 is all the plugin's."""
    token, mx = ("llama", "token"), ("llama", "mxfp8")
    job = engines.job(token, compiled=True, emulate="gfx950", max_tokens=EMULATED_STEPS)
    shared, alone = engines.run({"it": job}, before=MANY_TOKENS_TO_VLLM)["it"], eager["gfx950"]
    after_prompts = expected_calls(token, EMULATED_STEPS - 1)["scaled_mm"]
    plugin = {"scaled_mm": after_prompts, "unquantized_gemm": EMULATED_STEPS}
    assert all_in(shared["stats"]) == expected_calls(token, EMULATED_STEPS, compiled=True) | plugin
    agree(shared, expected(token, shared["tokens"]), EMULATED_STEPS)
    assert all_in(alone["stats"]) == expected_calls(mx, EMULATED_STEPS)
    agree(alone, expected(mx, alone["tokens"]), EMULATED_STEPS)


BF16, TOKEN, BLOCK, MX, EXPERTS_BF16 = *(("llama", kind) for kind in ("bf16", "token", "block", "mxfp8")), EXPERTS[0]
FAULTS = {
    # what: the model, the op, and its wrong function of these arguments, by the `exact` one
    "the residual is not added": (BF16, "fused_add_rms_norm", "x, r, *rest: exact(x, torch.zeros_like(r), *rest)"),
    "the residual is not updated": (BF16, "fused_add_rms_norm", "x, r, *rest: exact(x, r.clone(), *rest)"),
    "a scale of gfx942's format": (TOKEN, "silu_and_mul_per_token_quant", "*a: (exact(*a)[0], exact(*a)[1] * 2)"),
    "no scale of output channels": (TOKEN, "scaled_mm", "a, b, sa, sb, *rest: exact(a, b, sa, sb.mean(), *rest)"),
    "the next rows' scales": (BLOCK, "block_scaled_mm", "a, b, sa, sb, *rest: exact(a, b, sa, sb.roll(1, 0), *rest)"),
    "the next 32 values' scale": (MX, "mxfp8_scaled_mm", "a, b, sa, *rest: exact(a, b, sa.roll(1, 1), *rest)"),
    "the next expert's weight": (EXPERTS[1], "fused_experts", "x, w1, w2, *rest: exact(x, w1, w2.roll(1, 0), *rest)"),
    "equal weights of experts": (
        *(EXPERTS_BF16, "fused_experts"),
        "x, w1, w2, weights, *rest: exact(x, w1, w2, torch.ones_like(weights), *rest)",
    ),
    "routes without the bias": (EXPERTS_BF16, "grouped_topk", "*a: exact(*a[:-1], torch.zeros_like(a[-1]))"),
    "a neighbor's scale": (BLOCK, "silu_and_mul_per_block_quant", "*a: (exact(*a)[0], exact(*a)[1].roll(1, -1))"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(eager, expected, fault):
    """The comparison with the plain model is able to fail."""
    flavour, *_ = FAULTS[fault]
    with pytest.raises(AssertionError):
        agree(eager[fault], expected(flavour, eager[fault]["tokens"]))
