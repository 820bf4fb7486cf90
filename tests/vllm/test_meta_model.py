"""Test what vLLM says of models that it builds without memory, on a simulated GPU: any architecture's layers, and the shipped lists."""

import json
import pathlib
import subprocess
import sys
import time

import pytest
import torch
from marks import full

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers, vllm_launches
from vllm_rocm_ops.tools import cli, explain

ROOT = pathlib.Path(__file__).parents[2]
MODELS = {
    path.parent.name if path.name == "config.json" else path.stem: path
    for path in (
        *ROOT.glob("tests/data/models/*.json"),
        *ROOT.glob("serving_benchmarks/configs/*/config.json"),
        *(model_config.SHIPPED / name / "config.json" for name in ("minimax-m2", "gpt-oss-120b", "kimi-k2-thinking")),
    )
}
WANTED = {
    # model -> TP, and by layer: the op or a word of what vLLM runs, the parameters, and the calls of a step
    "mixtral-8x7b-fp8": (2, {
        "o": ("scaled_mm", (4096, 2048, False), 32), "router": ("unquantized_gemm", (8, 4096), 32),
        "routing": ("topk_softmax", (8, 2, True), 32), "experts": ("fused_experts", (8, 8, 2, 4096, 7168, "static"), 32),
    }),
    "minimax-m2": (8, {
        "qkv": ("block_scaled_mm", (1024, 3072), 62), "experts": ("TritonExperts", (), 62), "rotation": ("", (64,), 62),
    }),
    "mistral-small-24b-fp8-dynamic": (1, {"down": ("scaled_mm", (5120, 32768, True), 40)}),
    "qwen3-8b-mxfp4": (2, {"o": ("mx_gemm", (4096, 2048, "fp4"), 36), "gate_up": ("mx_gemm", (12288, 4096, "fp4"), 36)}),
    "qwen3-8b-mxfp8": (1, {"down": ("mx_gemm", (4096, 12288, "fp8"), 36), "lm_head": ("unquantized_gemm", (151936, 4096), 1)}),
    "ernie-4.5-21b-a3b-fp8": (1, {
        "dense down": ("block_scaled_mm", (2560, 12288), 1), "shared down": ("block_scaled_mm", (2560, 3072), 27),
        "experts": ("fused_experts", (64, 64, 6, 2560, 1536, "block"), 27), "routing": ("FusedTopKBiasRouter", (64, 6, True, 1, 1, "softmax", 1.0, True), 27),
    }),
    "gpt-oss-20b": (2, {
        "qkv": ("unquantized_gemm", (2560, 2880, True), 24), "attention": ("paged_attention_decode", (32, 4, 64, 131072, True), 24),
        "experts": ("fused_experts", (32, 32, 4, 3072, 1536, "mxfp4", False, True, 7.0, 1.702, 1.0, True), 24), "routing": ("topk_softmax", (32, 4, True), 24),
    }),
    "gpt-oss-120b": (1, {
        "experts": ("fused_experts", (128, 128, 4, 3072, 3072, "mxfp4", False, True, 7.0, 1.702, 1.0, True), 36), "routing": ("topk_softmax", (128, 4, True), 36),
    }),
    "qwen3-next-80b-a3b-fp8": (2, {
        "in_proj_qkvz": ("block_scaled_mm", (6144, 2048), 36), "qkv": ("block_scaled_mm", (4608, 2048), 12),
        "Gated DeltaNet": ("vLLM's convolution and recurrence", (8, 16, True, "bfloat16"), 36),
        "shared down": ("block_scaled_mm", (2048, 256), 48), "shared gate": ("unquantized_gemm", (1, 2048), 48),
        "experts": ("fused_experts", (512, 512, 10, 2048, 256, "block"), 48),
        "norms of q and k": ("", (True, True, 0, 0, False), 12), "rotation": ("", (64,), 12),
        "input norm": ("rms_norm", (2048, False, 1e-06, True), 48),
        "output gate": ("sigmoid_and_mul_per_block_quant", (2048, 256), 12),
        "post-attention norm": ("fused_add_rms_norm", (2048, True, 1e-06, True), 48),
    }),
    "kimi-k2-thinking": (8, {
        "experts": ("fused_experts", (384, 384, 8, 7168, 256, "int4_32"), 60), "o": ("unquantized_gemm", (7168, 1024), 61),
    }),
    "qwen2.5-72b": (4, {"qkv": ("unquantized_gemm", (2560, 8192, True), 80), "SwiGLU": ("silu_and_mul", (7392,), 80)}),
    "phi-4": (2, {"gate_up": ("unquantized_gemm", (17920, 5120), 40), "o": ("unquantized_gemm", (5120, 2560), 40)}),
    "olmo-2-32b": (2, {"qkv": ("unquantized_gemm", (3584, 5120), 64), "down": ("unquantized_gemm", (5120, 13824), 64)}),
    "granite-3.1-3b-a800m": (2, {
        "experts": ("fused_experts", (40, 40, 8, 1536, 256, "none"), 32), "lm_head": ("unquantized_gemm", (24608, 1536), 1),
    }),
    "gemma-3-1b": (1, {
        "SwiGLU": ("GeluAndMul", (), 26), "qkv": ("unquantized_gemm", (1536, 1152), 26), "norms of q and k": ("", (True, False, 0, 0, False), 26),
        "input norm": ("rms_norm", (1152, False, 1e-06, True), 26), "post-attention norm": ("compiler", (), 26),
    }),
    "falcon-h1-7b": (2, {"mamba_mixer2": ("vLLM", (), 44), "in": ("unquantized_gemm", (3596, 3072), 44)}),
}  # fmt: skip


def test_every_model_of_the_tests_is_asked():
    assert WANTED.keys() == MODELS.keys()


@pytest.mark.parametrize("model", WANTED)
def test_layers_of_any_model(model):
    """Each layer has its sizes, or the name of what vLLM runs, and each call has arguments that its op takes."""
    tp, wanted = WANTED[model]
    config = model_config.read(str(MODELS[model]))
    launches = layers.launches(config, tp, arch="gfx942")
    for layer, (what, parameters, count) in wanted.items():
        found = [launch for launch in launches if launch.layer == layer]
        first = found[0]
        runs = first.op.name if isinstance(first, layers.LayerCall) else first.runs
        assert (first.parameters, len(found)) == (parameters, count), layer
        assert what == runs if parameters and runs else what in runs, layer
    embeddings = [launch for launch in launches if launch.layer == "embedding"]
    assert len(embeddings) == 1 and launches[-1].layer == "lm_head"
    assert ("all-reduce" in {launch.layer for launch in launches}) == (tp > 1)
    arch = archs.ARCHS["gfx942"]
    for call in [*layers.calls(config, tp, arch="gfx942"), *explain.around(config, tp, None, arch)]:
        arguments = call.case(3).make("meta", torch.Generator(), arch.fp8_dtype)
        call.op.explain(*arguments, arch=arch)


def test_experts_have_their_biases_and_activation():
    """Without its quantization gpt-oss has BF16 experts, whose gate and up rows alternate."""
    config = model_config.read(str(MODELS["gpt-oss-20b"]))
    del config["quantization_config"]
    [experts, *_] = [launch for launch in layers.launches(config, 2, arch="gfx942") if launch.layer == "experts"]
    swiglu = False, True, 7.0, 1.702, 1.0, True
    assert experts.parameters == (32, 32, 4, 2880, 1440, "none", *swiglu)
    arch = archs.ARCHS["gfx942"]
    arguments = experts.case(3).make("meta", torch.Generator(), arch.fp8_dtype)
    planned = experts.op.explain(*arguments, arch=arch).launches
    assert {"gate_up_clamped", "down_biased"} <= {
        launch.symbol.removeprefix("fused_experts_").rpartition("_")[0] for launch in planned
    }


def test_explain_names_what_vllm_runs(capsys):
    """The path is a file, and each layer without an op has a row with vLLM's class."""
    given = ["explain", "--model", str(MODELS["minimax-m2"]), "--tp", "8", "--arch", "MI300X"]
    assert cli.main(given) == 0
    lines = capsys.readouterr().out.splitlines()
    [experts] = [line for line in lines if line.startswith("experts ")]
    assert experts.split()[1:3] == ["62", "1"] and experts.endswith("vLLM's kernel (TritonExperts)")
    assert lines[-1] == f"layers as vLLM {vllm_launches.installed_version()} builds them"
    assert len([line for line in lines if "whose squares vLLM sums over" in line]) == 2


def test_norms_over_all_heads_of_one_rank():
    """They are in the launch that rotates, whose weights have all heads."""
    config, arch = model_config.read(str(MODELS["minimax-m2"])), archs.ARCHS["gfx942"]
    [call] = [one for one in explain.around(config, 1, None, arch) if one.op is ops.qk_norm_rope_and_cache]
    arguments = call.op.Arguments(*call.case(3).make("meta", torch.Generator(), arch.fp8_dtype))
    assert (arguments.q_weight.shape, arguments.k_weight.shape, call.count) == ((6144,), (1024,), 62)
    [planned] = call.op.explain(*arguments, arch=arch).launches
    assert planned.symbol.endswith("_all_heads_128") and planned.grid == (3, 3, 1) and planned.block == (384, 1, 1)


@pytest.mark.parametrize(
    ("name", "arch"),
    [("tiny-deepseek-v3-fp8", "gfx942"), ("tiny-deepseek-v3-fp8", "gfx950"), ("tiny-deepseek-v3", "gfx942")],
)
def test_a_shipped_list_is_what_vllm_says(name, arch):
    """`python -m vllm_rocm_ops.models.vllm_launches` writes the lists again, for the installed vLLM."""
    config = model_config.read(name)
    known = json.loads((model_config.SHIPPED / name / "launches.json").read_text())
    assert known["vllm"] == vllm_launches.installed_version()
    for tp, ep in ((1, None), (2, None), (2, 2), (1, 4)):
        assert vllm_launches.ask_vllm(config, tp, ep, arch)["blocks"] == vllm_launches.expand(
            known, vllm_launches.step_key(tp, ep)
        )


def test_vllm_says_the_list_of_a_model_that_sees(name="qwen3.5-397b-a17b-fp8"):
    """Its language layers are asked without torchvision, too, and without a vision model in a process of vLLM's."""
    config = model_config.read(name)
    assert vllm_launches.ask_vllm(config, 8, None, "gfx942")["blocks"] == vllm_launches.blocks(
        config, 8, None, "gfx942"
    )


def test_lists_have_steps_of_every_shipped_model():
    assert len(vllm_launches.shipped()) == len(model_config.shipped())
    for known in vllm_launches.shipped().values():
        assert (
            "TP 1" in known["steps"]
            and vllm_launches.to_json(known).count("\n") == len(known["launches"]) + len(known["steps"]) + 3
        )
        assert all(op is None or hasattr(ops, op) for _, op, *_ in known["launches"])


def test_a_list_is_read_without_vllm_and_refuses_other_steps(monkeypatch):
    """A list of another vLLM than the installed one is not read."""
    config = model_config.read("deepseek-v3")
    assert vllm_launches.shipped_list(config, 8, None)
    monkeypatch.setattr(vllm_launches, "installed_version", lambda: "0.1.0")
    assert vllm_launches.shipped_list(config, 8, None) is None
    monkeypatch.setattr(vllm_launches, "installed_version", lambda: None)
    started = time.monotonic()
    assert vllm_launches.blocks(config, 8, None, "gfx942") and time.monotonic() - started < 5
    with pytest.raises(
        ValueError, match="needs vLLM, which says what it builds for TP 3; its list has TP 1, TP 1 EP 1"
    ):
        vllm_launches.blocks(config, 3, None, "gfx942")
    with pytest.raises(ValueError, match=r"needs vLLM, which says what it builds for TP 1$"):
        vllm_launches.blocks(config | {"num_hidden_layers": 5}, 1, None, "gfx942")


def test_a_process_that_ends_is_an_error_with_its_last_words(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho first >&2\necho RuntimeError: no kernels >&2\n")
    program.chmod(0o755)
    monkeypatch.setattr(vllm_launches.sys, "executable", str(program))
    assert vllm_launches.Builder("gfx942").ask({}) == {"error": "vLLM could not be asked: RuntimeError: no kernels"}


@full
def test_an_architecture_without_kernels_is_refused():
    """By the seams, once vLLM is imported. test_selection.py tests their message by default."""
    with pytest.raises(ValueError, match="vLLM could not be asked: RuntimeError: this GPU is not supported"):
        vllm_launches.ask_vllm(model_config.read("tiny-llama"), 1, None, "gfx90a")


FOR_CUDA = """
import torch

def asked():
    raise NameError("name 'amdsmi' is not defined")

torch.cuda._is_compiled, torch.cuda._device_count_amdsmi = lambda: True, asked
torch._C._cuda_getDeviceCount, torch._C._cuda_getCurrentRawStream = lambda: 1, lambda index: 0
"""
"""PyTorch for CUDA that looks like one for ROCm."""


def test_a_package_without_kernels_for_the_simulated_gpu_answers(monkeypatch, tmp_path):
    """As beside an NVIDIA GPU, where PyTorch is one for CUDA and the package has kernels for that GPU alone."""
    package = tmp_path / "vllm_rocm_ops"
    (package / "code" / "sm_90").mkdir(parents=True)
    for path in (ROOT / "vllm_rocm_ops").iterdir():
        if path.name != "code" and not path.name.startswith("_C"):
            (package / path.name).symlink_to(path)
    (tmp_path / "sitecustomize.py").write_text(FOR_CUDA)
    monkeypatch.chdir(tmp_path)  # where the process looks first
    monkeypatch.syspath_prepend(tmp_path)
    builder = vllm_launches.Builder("gfx950")
    answer = builder.ask({"config": model_config.read("tiny-llama"), "tp": 1, "ep": None})
    builder.end()
    ops_of = {name for _, block in answer["blocks"] for _, name, *_ in block}
    assert ops_of >= {"rms_norm", "unquantized_gemm"}


def test_the_installed_vllm_is_found_without_importing_it():
    code = "import sys; from vllm_rocm_ops.models import vllm_launches; vllm_launches.installed_version(); sys.exit('vllm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
