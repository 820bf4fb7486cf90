"""Test the command vllm-rocm-ops, without a GPU."""

import argparse
import importlib.util
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import types
import typing

import pytest
import torch
from keys import keyed

import vllm_rocm_ops
from vllm_rocm_ops.collectives import wire
from vllm_rocm_ops.core import archs, envs, launch
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.tools import cli, doctor, explain, options
from vllm_rocm_ops.vllm import comparisons
from vllm_rocm_ops.vllm.selection import kernel_selection

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
GFX942 = archs.ARCHS["gfx942"]
COMMAND = [sys.executable, "-m", "vllm_rocm_ops.tools.cli"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, **environment}
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="module")
def found() -> dict:
    """Return the doctor's JSON report with one seam switched off."""
    result = run("doctor", "--json", VLLM_ROCM_OPS_SEAMS="-norm")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_doctor_says_what_is_here(found):
    said = doctor.text(found, verbose=True)
    assert f"vllm-rocm-ops {vllm_rocm_ops.__version__} in" in said
    for expected in (*archs.ARCHS, "VLLM_ROCM_OPS_SEAMS=-norm", *(op.name for op in op_module.registered())):
        assert expected in said


def test_doctor_json_holds_the_same_for_machines(found):
    assert found["package"]["version"] == vllm_rocm_ops.__version__
    assert list(found["code_objects"]) == list(archs.ARCHS)
    for modules in found["code_objects"].values():
        for stamp in modules.values():
            assert stamp["compiler"]
    assert found["driver"]["status"]
    assert (found["driver"]["backend"] is None) == (found["driver"]["versions"] == {})


def test_doctor_says_the_limits_of_the_all_reduce(found, monkeypatch):
    """Boundaries are by GPUs and hidden size; FP8 is named where a variable allows it."""
    said = [" ".join(line.split()) for line in doctor.text(found, verbose=True).splitlines()]
    assert any("hidden sizes up to 16384, bf16 up to 4 MiB, fp16 up to 512 KiB; sends 16 bits" in line for line in said)
    assert {"predicted on gfx942:", "8 16384 1 to 3 4 to 128 129", "2 7168 1 to 9 10 to 292 293"} <= set(said)
    monkeypatch.setenv(wire.VARIABLE, wire.FP8)
    report = found | {"all_reduce": doctor.find_all_reduce(["gfx942"])}
    said = [" ".join(line.split()) for line in doctor.text(report, verbose=True).splitlines()]
    assert (
        any(line.endswith("FP8 above 512 KiB where faster") for line in said)
        and "8 16384 1 to 3 4 to 128 37 129" in said
    )
    monkeypatch.setenv(wire.VARIABLE, "int4")
    assert doctor.find_all_reduce(["gfx942"]) == {
        "limits": f"{wire.VARIABLE} must be bf16 or fp8, got 'int4'",
        "ways": {},
    }


def test_doctor_fits_one_screen(found):
    lines = doctor.text(found).splitlines()
    assert len(lines) <= 40 and lines[-1].startswith("--verbose")
    assert any(re.match(r"ops +\d+ of \d+ run kernels on gfx942", line) for line in lines)


@needs_vllm
def test_doctor_names_the_seams_that_are_off(found):
    [count] = [line for line in doctor.text(found).splitlines() if line.startswith("seams")]
    on = [seam["name"] for seam in found["vllm"]["seams"] if seam["on"]]
    assert count == f"seams         {len(on)} on" and "off  norm " in doctor.text(found)
    assert not any(f" {name} " in doctor.text(found) for name in ("scaled_linear", "activation"))
    assert all(re.search(f"on +{name} ", doctor.text(found, verbose=True)) for name in on)


@needs_vllm
def test_doctor_knows_the_seams(found):
    assert found["vllm"]["plugin"]
    assert {seam["name"] for seam in found["vllm"]["seams"]} >= {"norm", "activation"}
    assert all(seam["on"] or seam["reason"] for seam in found["vllm"]["seams"])


@needs_vllm
def test_doctor_says_why_vllm_does_not_use_the_ops(found, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "VLLM_PLUGINS=other excludes rocm_ops" in doctor.text(doctor.find())
    assert {seam["name"]: seam["on"] for seam in found["vllm"]["seams"]}["norm"] is False


def test_doctor_without_vllm(monkeypatch):
    find_spec = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    found = doctor.find()
    assert found["vllm"]["why_off"] == "vLLM is not installed"
    assert "vLLM is not installed" in doctor.text(found)


def test_doctor_survives_a_vllm_that_does_not_import(tmp_path):
    (tmp_path / "vllm.py").write_text("raise RuntimeError('wrong torch')")
    result = run("doctor", "--verbose", PYTHONPATH=str(tmp_path), VLLM_ROCM_OPS_SEAMS="none")
    assert result.returncode == 0
    assert "RuntimeError: wrong torch" in result.stdout and "VLLM_ROCM_OPS_SEAMS=none" in result.stdout


def test_doctor_reports_missing_code_objects(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "CODE", tmp_path)
    op = vllm_rocm_ops.ops.rms_norm
    assert doctor.what_runs(op, "gfx942") == "fallback: no code object of rms_norm for gfx942"
    assert launch.stamps("gfx942") == {}


@pytest.mark.parametrize(
    ("hip", "arch", "says"), [("7.2.53211", "gfx942", True), ("7.2.1", "gfx950", False), ("7.1.1", "gfx942", False)]
)
def test_doctor_warns_of_graphs_that_hip_corrupts(found, hip, arch, says):
    gpus = [{"name": "", "product": "MI300X", "arch": arch}]
    other = {**found, "torch": {**found["torch"], "hip": hip}, "gpus": gpus}
    assert ("ROCm/clr#279" in doctor.text(other)) == says == ("--enforce-eager" in doctor.text(other))


@pytest.mark.parametrize("unbuilt", [["sm_90"], ["gfx942", "gfx950", "sm_90"]])
def test_doctor_says_once_what_was_not_built(found, unbuilt):
    runs = {arch: "fallback: no code object of it" if arch in unbuilt else "a_kernel" for arch in archs.ARCHS}
    ops = dict.fromkeys(found["ops"], runs)
    objects = {arch: {} if arch in unbuilt else {"rms_norm": {"compiler": "one"}} for arch in archs.ARCHS}
    lines = (
        doctor.text(found | {"ops": ops, "code_objects": objects}, verbose=True)
        .partition("\nops, ")[2]
        .splitlines()[1:]
    )
    built = len(archs.ARCHS) > len(unbuilt)
    assert len(lines) == len(ops) * built + len(unbuilt)
    assert [line.split()[2] for line in lines if "no code object was built" in line] == unbuilt


def test_doctor_reports_switches(monkeypatch):
    monkeypatch.setenv("VLLM_ROCM_OPS_DISABLE", "rms_norm")
    assert "switched off by VLLM_ROCM_OPS_DISABLE" in doctor.what_runs(vllm_rocm_ops.ops.rms_norm, "gfx942")
    assert "VLLM_ROCM_OPS_DISABLE" in envs.VARIABLES


@pytest.mark.parametrize("arch", archs.ARCHS)
@pytest.mark.parametrize("op", list(op_module.registered()), ids=lambda op: op.name)
def test_explain_takes_every_op(op, arch):
    explained = explain.explain(op, arch)
    assert explained.arch == arch
    assert explained.launches or "fallback: the kernels require" in explained.source, str(explained)


@pytest.mark.parametrize("op", [vllm_rocm_ops.ops.mla_decode, vllm_rocm_ops.ops.paged_attention_decode])
def test_what_is_not_given_lets_attention_choose_its_parts(op):
    """vLLM calls it so unless a constant partition is requested."""
    assert explain.example(op, GFX942)["fixed_split_size"] == 0
    assert len(explain.explain(op, "gfx942").considered) > 1


@pytest.mark.parametrize("arch", archs.ARCHS)
def test_explain_changes_what_belongs_together(arch):
    explained = explain.explain(vllm_rocm_ops.ops.fused_add_rms_norm, arch, (9, 2048), options.DTYPES["fp16"])
    [planned] = explained.launches
    assert "fp16" in planned.symbol and planned.grid == (9, 1, 1)
    assert [tuple(a.shape) for a in planned.named.values() if hasattr(a, "shape")][:3] == [
        (9, 2048),
        (9, 2048),
        (2048,),
    ]


def test_explain_prints_rules_and_launch(capsys):
    assert cli.main(["explain", "rms_norm", "--shape", "bf16[3x16384]", "--arch", "gfx950"]) == 0
    printed = capsys.readouterr().out
    assert "rms_norm on gfx950" in printed and "grid (3, 1, 1)" in printed
    assert "yes weight is contiguous" in printed


def test_explain_says_which_rule_does_not_hold(capsys):
    arguments = ["--with", "quant_dtype=e4m3fn", "residual=none", "--arch", "gfx942"]
    assert cli.main(["explain", "rms_norm_dynamic_per_token_quant", *arguments]) == 0
    assert "NO  quant_dtype is float8_e4m3fnuz, the FP8 dtype of gfx942" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("weight=bf16[12]", "rms_norm: weight must be bfloat16[hidden=4096], got bfloat16[12]"),
        ("epsilon=small", "epsilon must be a number, true, false, none, a dtype or dtype[shape], got small"),
        ("nonsense=1", "rms_norm has no argument nonsense; arguments: input, weight, epsilon, one_plus_weight"),
        ("nonsense", "nonsense must be name=value"),
        ("weight=5", "rms_norm: weight must be a tensor, e.g. bf16[8x7168] or none, got 5"),
        ("input=none", "rms_norm: input must be a tensor, e.g. bf16[8x7168], got none"),
        ("epsilon=true", "rms_norm: epsilon must be a number, got true"),
        ("epsilon=99999999999", "rms_norm: epsilon must be a number, got 99999999999"),
        ("weight=bf16[x]", "weight: shape must be sizes joined by x, e.g. 8x7168, got x"),
        ("weight=bf16[99999999999999999999]", "weight: shape must be sizes joined by x"),
        ("epsilon=" + "[" * 10**5, "epsilon must be a number, true"),
    ],
)
def test_explain_refuses_with_a_plain_message(given, message, capsys):
    assert cli.main(["explain", "rms_norm", "--with", given]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(message) and printed.count("\n") == 1


def test_an_error_of_torch_is_one_line(capsys, monkeypatch):
    def fail(*arguments, **given):
        raise RuntimeError("no such size\nException raised from somewhere\nframe #0")

    monkeypatch.setattr(explain, "explain", fail)
    assert cli.main(["explain", "rms_norm"]) == 2
    assert capsys.readouterr().err == "explain: no such size\n"


@pytest.mark.parametrize("asked", [["rms_norm"], ["rows"]])
@pytest.mark.parametrize("product", ["H200", "gfx942"])
def test_predict_knows_gpus_with_a_timing_model_only(asked, product, capsys):
    assert cli.main(["predict", *asked, "--arch", product]) == 2
    assert capsys.readouterr() == (
        "",
        f"arch must be a product with a timing model (MI300X, MI308X, MI325X, MI350X, MI355X), got {product}\n",
    )


def test_commands_say_what_the_emulator_needs():
    """Nothing else is printed before."""
    asked = ["predict", "rms_norm"], ["emulate", "rms_norm"]
    code = "import sys; sys.modules['tinygrad.renderer.amd'] = None; from vllm_rocm_ops.tools import cli\n"
    code += f"sys.exit([cli.main(given) for given in {[*asked]}] != [2] * {len(asked)})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    first, *others = result.stderr.splitlines()[-len(asked) :]
    assert re.fullmatch(r"the emulator needs [\w.]+: pip install 'vllm-rocm-ops\[emulator\]'", first)
    assert others == [first] * (len(asked) - 1)


@pytest.mark.parametrize(
    ("name", "arch"), [("scaled_mm", "gfx942"), ("block_scaled_mm", "gfx942"), ("mxfp8_scaled_mm", "gfx950")]
)
def test_explain_of_a_shape_resizes_scales(name, arch, capsys):
    """The first case has one row, as its scale per tensor: sizes come from a case that tells them apart."""
    assert cli.main(["explain", name, "--shape", "3x7168", "--arch", arch]) == 0
    arguments = explain.example(getattr(vllm_rocm_ops.ops, name), archs.named(arch), (3, 7168))
    assert tuple(next(iter(arguments.values())).shape) == (3, 7168)
    group = {"block_scaled_mm": 128, "mxfp8_scaled_mm": 32}.get(name)
    assert arguments["scale_a"].shape[-1] == (7168 // group if group else 1)


def measured(monkeypatch, shapes: dict | None = None, off: dict | None = None) -> None:
    """Let this machine's record hold these shapes and these ops that are off."""
    record = kernel_selection.Record({}, off or {}, keyed(shapes or {}))
    monkeypatch.setattr(comparisons, "record_for", lambda arch: record)


def kernels(model: str, tokens: tuple[int, ...], tp: int = 8, products: bool = True) -> dict[str, str]:
    """Return what explain says of the kernel of each layer of a model: its products, too, or only what is around."""
    config = model_config.read(model)
    calls = [*(model_layers.calls(config, tp) if products else ()), *explain.around(config, tp, None, GFX942)]
    unserved = model_layers.unserved(config, tp) if products else ()
    return {
        layer: kernel
        for layer, _, _, kernel in explain.shortened(explain.table(calls, GFX942, tokens, False, unserved))
    }


def test_explain_of_a_model_says_what_vllm_keeps(capsys, monkeypatch):
    """Seams limit the plugin's kernels to 64 tokens for GEMMs and experts, and to 16 in bf16."""
    arguments = [
        "explain",
        "--model",
        "tiny-deepseek-v3-fp8",
        "--batch",
        "16,17,64,65",
        "--arch",
        "mi300x",
        "--verbose",
    ]

    def kept() -> dict[str, tuple[str, str]]:
        assert cli.main(arguments) == 0
        header, *lines = capsys.readouterr().out.splitlines()
        columns = [header.index(name) for name in ("layer", "tokens", "kernel", "configuration")]
        cells = [[line[at:].split("  ")[0].strip() for at in columns] for line in lines]
        return {layer: (tokens, why) for layer, tokens, kernel, why in cells if kernel == "vLLM's kernel"}

    found = kept()
    assert found["o"] == found["experts"] == ("65", "unmeasured: vLLM above 64 tokens")
    limited = "unmeasured: vLLM above 16 tokens"
    assert found["lm_head"] == found["router"] == ("17,64,65", limited)
    assert not {"input norm", "routing", "dense SwiGLU"} & found.keys()


def test_explain_of_a_model_shows_what_was_measured_here(capsys, monkeypatch, tmp_path):
    """On a GPU of that arch, measurements replace fixed limits: the serving kernel, both times, and what is off."""
    monkeypatch.setenv("VLLM_ROCM_OPS_TABLES", str(tmp_path))
    here = {"arch": "gfx942", "units": "304", "gpu": "MI300X"}
    monkeypatch.setattr(kernel_selection, "machine", lambda: here)
    plugin, theirs = kernel_selection.Measured(5.0, 10.0), kernel_selection.Measured(20.0, 10.0)
    call = {call.layer: call for call in model_layers.calls(model_config.read("deepseek-v3"), 8)}
    shapes = {
        "block_scaled_mm 7168x2048 float8_e4m3fnuz bfloat16 VllmKernel": {
            1: theirs,
            64: plugin,
            512: plugin,
            1024: theirs,
        },
        "unquantized_gemm 256x7168 bfloat16 VllmKernel": {1: plugin},
        "fused_experts 256 experts 7168x256 top 8 float8_e4m3fnuz bfloat16 scales block shuffled AiterExperts": {
            8: plugin
        },
        "rms_norm_per_block_quant 7168 bfloat16 residual column-major compiled": {2: theirs, 8: theirs},
        "rms_norm_per_block_quant 1536 bfloat16 eager": {2: theirs, 8: theirs},
        "rms_norm_per_block_quant 1536 bfloat16 AITER-compiled": {2: plugin, 8: plugin},
    }
    record = kernel_selection.Record(here, {"silu_and_mul_per_block_quant": "wrong here"}, keyed(shapes))
    path = kernel_selection.path_of(here)
    path.parent.mkdir(parents=True)
    kernel_selection.write(path, record)

    def rows(arch: str = "MI300X") -> dict[str, dict[str, tuple[bool, str]]]:
        """Return, by layer and number of tokens, whether the plugin's kernel runs, and why."""
        lines = explain.table(list(call.values()), archs.named(arch), (1, 8, 64, 512, 700, 2048))
        cells = [
            (line[0], tokens, line[4] != "vLLM's kernel", line[6])
            for line in lines[1:]
            for tokens in line[3].split(",")
        ]
        found: dict[str, dict[str, tuple[bool, str]]] = {}
        for layer, tokens, plugin_serves, why in cells:
            found.setdefault(layer, {})[tokens] = plugin_serves, why
        return found

    found = rows()
    assert {t: plugin_serves for t, (plugin_serves, _) in found["o"].items()} == {
        "1": False,
        "8": False,
        "64": True,
        "512": True,
        "700": False,
        "2048": False,
    }
    assert found["o"]["1"][1] == "measured: plugin 20.0 us, vLLM 10.0 us"
    assert found["o"]["512"][1].startswith("measured: plugin 5.0 us, vLLM 10.0 us: default TiledConfig")
    assert found["o"]["700"][1] == "measured at 1, 64, 512, 1024 tokens"
    assert [found["experts"][t][0] for t in ("1", "8", "64")] == [True, True, False]
    assert [found["q_a norm"][t][0] for t in ("1", "8", "2048")] == [True] * 3
    assert not any(plugin_serves for plugin_serves, _ in found["dense post-attention norm"].values())
    assert found["dense SwiGLU"]["8"] == (False, "off on this GPU: wrong here")
    assert found["q_b"]["8"][1].startswith("unmeasured: ") and found["q_b"]["512"][1].startswith("unmeasured: ")
    assert rows("MI355X")["o"]["1"][1].startswith("unmeasured: ")


def test_explain_of_a_model_says_that_attention_is_measured_first(capsys, monkeypatch):
    """Attention is measured at every length, unless it is requested by name."""

    def explained(*lengths: tuple[float, float]) -> str:
        shapes = {
            f"paged_attention_decode 8:2x64 auto page 16 {128 << i} of 8192 keys RocmAttentionBackend": {
                1: kernel_selection.Measured(plugin, baseline, 0.0, 0.0)
            }
            for i, (plugin, baseline) in enumerate(lengths)
        }
        measured(monkeypatch, shapes)
        assert cli.main(["explain", "--model", "tiny-llama", "--arch", "gfx942", "--verbose"]) == 0
        [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("attention")]
        return " ".join(line.split()[3:])

    assert explained().endswith("vLLM's kernel unmeasured: vLLM until the plugin is measured faster")
    assert explained((2.0, 3.0), (4.0, 3.0)).endswith("vLLM's kernel measured: 2 (context length, backend) pairs")
    assert "1 paged_attention_decode_bf16_64_native" in explained((2.0, 3.0), (2.0, 3.0))
    monkeypatch.setenv("VLLM_ROCM_OPS_ATTENTION", "1")
    assert "VLLM_ROCM_OPS_ATTENTION=1: default DecodeConfig" in explained()


def test_explain_of_a_model_knows_the_launch_that_rotates_and_writes_the_cache(monkeypatch):
    """It serves where it was measured to be faster, with each cache dtype and pairing, or on request."""

    def explained(model: str, shapes: dict | None = None, off: dict | None = None) -> dict[str, str]:
        measured(monkeypatch, shapes, off)
        return kernels(model, (1, 64), 8 if "llama" in model else 1, products=False)

    fast, slow = ({1: kernel_selection.Measured(us, 3.0, 0.0, 0.0)} for us in (2.0, 4.0))
    without, normed = "rotation + cache write", "norms of q and k + rotation + cache write"
    for model, layer, count, kernel, heads in (
        ("llama-3.1-405b-fp8", without, "two", "rope_and_cache_bf16", "16:1x128/128"),
        ("glm-4.5-air-fp8", without, "two", "rope_and_cache_bf16", "96:8x128/64"),
        ("qwen3-8b-fp8", normed, "three", "qk_norm_rope_and_cache_bf16_128", "32:8x128/128"),
    ):
        op = kernel.partition("_bf16")[0]
        unmeasured = f"{count} launches (unmeasured: vLLM until the plugin is measured faster)"
        assert explained(model)[layer] == unmeasured
        for rest in ("auto", "fp8", "auto interleaved"):
            key = f"{op} {heads} bfloat16 {rest} compiled"
            assert explained(model, {key: fast})[layer].startswith(f"{kernel} (measured")
            assert explained(model, {key: slow})[layer].startswith(f"{count} launches (measured")
        other = key.replace(heads, heads.replace("x128", "x64"))
        assert explained(model, {other: fast})[layer] == unmeasured
        assert explained(model, {key: fast}, {op: "wrong here"})[layer].startswith(f"{count} launches (off on this GPU")
        with monkeypatch.context() as patch:
            patch.setenv("VLLM_ROCM_OPS_ATTENTION", "1")
            assert explained(model)[layer].startswith(f"{kernel} (VLLM_ROCM_OPS_ATTENTION=1")


def test_explain_of_a_model_says_where_gate_up_and_swiglu_are_one_launch(capsys, monkeypatch):
    """It wins over two launches, and the plugin's kernel serves the linear alone, too."""

    def explained(shapes: dict | None = None, off: dict | None = None) -> dict[str, list[str]]:
        measured(monkeypatch, shapes, off)
        config = model_config.read("llama-3.1-405b-fp8")
        calls = [*model_layers.calls(config, 8), *explain.around(config, 8, None, GFX942)]
        found: dict[str, list[str]] = {}
        for layer, _, _, tokens, kernel, _, why in explain.table(calls, GFX942, (1, 64, 65))[1:]:
            found.setdefault(layer, []).append(f"{tokens} {kernel}: {why}")
        return found

    one, parts = "gate_up + SwiGLU", ("gate_up", "SwiGLU")
    found = explained()
    assert found[one][0].startswith("1 scaled_mm_silu_wave_splitk_8: unmeasured: default SkinnyConfig")
    assert found[one][2].startswith("65 two launches: gate_up: unmeasured: vLLM above 64 tokens")
    assert [found[part][0] for part in parts] == ["1,64 in gate_up + SwiGLU: "] * 2
    assert found["SwiGLU"][1].startswith("65 silu_and_mul_quant_bf16")
    wins, loses = kernel_selection.Measured(50.0, 60.0), kernel_selection.Measured(60.0, 50.0)
    names = (
        "scaled_mm_silu_and_mul_quant 6656x16384 float8_e4m3fnuz bfloat16 1 scales static VllmKernel",
        "scaled_mm 13312x16384 float8_e4m3fnuz bfloat16 1 scales static VllmKernel",
    )

    def timed(*measurements: kernel_selection.Measured) -> dict[str, list[str]]:
        return explained({name: {1: measurement} for name, measurement in zip(names, measurements)})

    assert timed(wins, wins)[one][0].startswith(
        "1 scaled_mm_silu_wave_splitk_8: measured: plugin 50.0 us, two launches 60.0 us: default"
    )
    found = timed(loses, wins)
    assert found[one][0] == "1 two launches: measured: plugin 60.0 us, two launches 50.0 us"
    assert found["gate_up"][0].startswith("1 scaled_mm_wave_splitk_8: measured: plugin 50.0 us, vLLM 60.0 us")
    found = timed(wins, loses)
    assert found[one][0] == "1 two launches: gate_up: measured: plugin 60.0 us, vLLM 50.0 us"
    assert found["gate_up"][0] == "1 vLLM's kernel: measured: plugin 60.0 us, vLLM 50.0 us"
    found = explained(off={"silu_and_mul_quant": "wrong here"})
    assert found[one] == ["1,64 two launches: SwiGLU: off on this GPU: wrong here", found[one][1]]


def test_explain_of_a_model_says_that_mla_absorb_are_measured_first(capsys, monkeypatch):
    def explained(shapes: dict | None = None) -> dict[str, str]:
        measured(monkeypatch, shapes)
        assert cli.main(["explain", "--model", "deepseek-v3", "--tp", "8", "--arch", "gfx950", "--verbose"]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        return {line[0]: " ".join(line[3:]) for line in lines if line[0].startswith("W_U") and line[1] != "+"}

    plugin = {"W_UK": "1 batched_gemm_bf16_transposed_16 128"}
    assert set(explained().values()) == {"1 vLLM's kernel unmeasured: vLLM until the plugin is measured faster"}
    wins = {1: kernel_selection.Measured(2.0, 3.0, 0.0, 0.0)}
    found = explained({"batched_gemm 16x512x128 bfloat16 transposed bmm": wins})
    assert found["W_UK"].startswith(f"{plugin['W_UK']} measured: plugin 2.0 us, vLLM 3.0 us")
    assert found["W_UV"].startswith("1 vLLM's kernel unmeasured")


def test_explain_of_a_model_knows_the_launch_between_the_first_projection_and_the_scores(monkeypatch):
    """vLLM's launches are shown until the plugin's is measured to be faster; then the norms are part of it."""
    one = "q_a norm + kv_a norm + cache write"

    def explained(shapes: dict | None = None, off: dict | None = None) -> dict[str, str]:
        measured(monkeypatch, shapes, off)
        return kernels("deepseek-v3", (1, 64))

    found = explained()
    assert found[one].startswith("vLLM's kernel (unmeasured") and found["q_a norm"].startswith(
        "rms_norm_per_block_quant"
    )
    kernel = "mla_norm_rope_and_cache_bf16_per_block_quant"
    for cache, order in (("auto", ""), ("fp8", " column-major")):
        key = f"mla_norm_rope_and_cache 1536+512+64 bfloat16 {cache} block{order} compiled"
        fast, slow = ({1: kernel_selection.Measured(us, 3.0, 0.0, 0.0)} for us in (2.0, 4.0))
        found = explained({key: fast})
        assert found[one].startswith(kernel) and found["q_a norm"] == found["kv_a norm"] == f"in {one}"
        assert explained({key: slow})[one].startswith("vLLM's kernel (measured")
    assert explained({key: fast}, {"mla_norm_rope_and_cache": "wrong here"})[one].startswith(
        "vLLM's kernel (off on this GPU"
    )
    monkeypatch.setenv("VLLM_ROCM_OPS_ATTENTION", "1")
    assert explained()[one].startswith(f"{kernel} (VLLM_ROCM_OPS_ATTENTION=1")


def test_explain_reports_the_limit_of_every_seam():
    """Every seam with a limit reports it to `explain`."""
    folder = pathlib.Path(comparisons.__file__).parent
    limited = {
        path.stem for path in folder.rglob("*.py") if re.search(r"^MAX_TOKENS = ", path.read_text(), re.MULTILINE)
    }
    assert limited == {type(one).__module__.rpartition(".")[2] for one in comparisons.COMPARISONS.values()}


@pytest.mark.parametrize("arguments", [["doctor"], ["explain", "rms_norm"], ["--version"]])
def test_without_torch_there_is_a_message(tmp_path, arguments):
    """The Python has this package and no other."""
    (tmp_path / "vllm_rocm_ops").symlink_to(pathlib.Path(vllm_rocm_ops.__file__).parent)
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(tmp_path)!r})\n"]
    command[-1] += "from vllm_rocm_ops.__main__ import main\nsys.exit(main())"
    result = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("vllm-rocm-ops needs torch, and ") and result.stderr.count("\n") == 1
    command[-1] = command[-1].partition("\n")[0] + "\nfrom vllm_rocm_ops import ops"
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "ImportError: vllm_rocm_ops.ops needs torch, which this Python lacks" in result.stderr


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "MI308X", "sm_90"])
@pytest.mark.parametrize("model", ["llama-3.1-405b-fp8", "deepseek-v3"])
def test_explain_takes_a_model(model, arch, capsys):
    asked = ["explain", "--model", model, "--tp", "8", "--batch", "1,8,64", "--arch", arch]
    assert cli.main([*asked, "--verbose"]) == 0
    header, *lines, said = capsys.readouterr().out.splitlines()
    assert header.split() == ["layer", "calls", "op", "tokens", "kernel", "blocks", "configuration"]
    assert re.fullmatch(r"layers as vLLM \d+\.\d+\.\d+ builds them", said)
    layers = {line[: header.index("calls")].strip() for line in lines}
    assert {"o", "input norm", "final norm", "lm_head"} <= layers and len(layers) >= 9
    assert not [line for line in lines if "fallback" in line]
    kernels = {
        kernel for line in lines for kernel in line[header.index("kernel") : header.index("blocks")].split(" + ")
    }
    assert cli.main(asked) == 0
    short = capsys.readouterr().out
    assert max(map(len, short.splitlines())) <= 120
    assert {kernel.strip() for kernel in kernels} <= set(
        re.findall(r"vLLM's kernel|(?:two|three) launches|in gate_up|\w+", short)
    )


TORCH_ALONE = """
import sys
sys.modules |= dict.fromkeys(("vllm", "numpy", "triton", "tinygrad"))
from vllm_rocm_ops.tools import cli
sys.exit(cli.main(sys.argv[1:]))
"""


def test_explain_of_a_shipped_model_needs_torch_alone(tmp_path):
    """A checkout suffices, where nothing is built. Torch's warning that NumPy is missing is not repeated."""
    package = tmp_path / "vllm_rocm_ops"
    package.mkdir()
    for path in pathlib.Path(vllm_rocm_ops.__file__).parent.iterdir():
        if path.name != "code" and not path.name.startswith("_C"):
            (package / path.name).symlink_to(path)
    asked = ["explain", "--model", "qwen3.5-397b-a17b-fp8", "--tp", "8", "--arch", "MI300X", "--batch", "8"]
    command = [sys.executable, "-W", "default", "-c", TORCH_ALONE, *asked]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env={"PATH": ""})
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert any(line.startswith("8 ") and explain.PLUGIN in line for line in lines) and "layers as vLLM" in lines[-1]


@pytest.mark.parametrize("model", model_config.shipped())
def test_explain_of_a_shipped_model_fits_a_terminal(model, capsys):
    assert cli.main(["explain", "--model", model, "--batch", "1,2,4,8,16,32,64,128", "--arch", "MI300X"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["layer", "calls", "tokens", "kernel"] and max(map(len, lines)) <= 120


def test_the_launch_of_gated_delta_net_has_its_projection_for_few_requests(monkeypatch):
    """In more than 64 requests b and a are projected before it, as the seam does."""
    monkeypatch.setenv("VLLM_ROCM_OPS_ATTENTION", "1")
    of, rest = (
        (model_config.read("qwen3.5-397b-a17b-fp8"), 8, None),
        "Gated DeltaNet + gated norm + o's input quantization",
    )
    calls = [*model_layers.calls(*of), *explain.around(*of, GFX942)]
    found = {(row[0], row[3]): row[4] for row in explain.table(calls, GFX942, (64, 65), False)}
    assert found["in_proj_ba", "64"] == f"in in_proj_ba + {rest}" and found["in_proj_ba", "65"] == "vLLM's kernel"
    few, many = found[f"in_proj_ba + {rest}", "64"], found[rest, "65"]
    assert "_ba_" in few and "_ba_" not in many, "they are other kernels"


def test_each_layer_of_a_step_has_one_side():
    """A layer of several rows is the plugin's if one of them is."""
    rows = [
        ("layer", "calls", "op", "tokens", "kernel", "blocks", "configuration"),
        ("o", "2", "gemm", "1,8", "gemm_bf16", "64,64", "unmeasured"),
        ("o", "2", "gemm", "64", "vLLM's kernel", "", "unmeasured: vLLM"),
        ("a + b", "1", "x", "1,8,64", "x_bf16", "1,1,1", ""),
        ("a", "1", "y", "1,8,64", "in a + b", "", ""),
        ("b", "1", "z", "1,8,64", "vLLM's kernel", "", "measured: slower"),
    ]
    launches = [model_layers.Launch(name) for name in ("embedding", "o", "a", "b", "kv_b (prefill)", "all-reduce")]
    plugin, timed, vllm = explain.SIDES
    both = {"embedding": vllm, "a": plugin, "b": plugin}
    assert explain.sides(rows, launches, 8, 16) == {**both, "o": plugin, "all-reduce": vllm}
    assert explain.sides(rows, launches, 64, 8) == {**both, "o": timed, "all-reduce": timed}
    said = [line.split() for line in explain.summary(rows, launches, (1, 8, 64), 16)]
    assert [line[0] for line in said] == ["tokens", "1,8", "vLLM", "64", "plugin,", "vLLM"]
    assert said[1][1:] == [*plugin.split(), "o,", "a,", "b"] and said[2] == ["vLLM", "embedding,", "all-reduce"]


def test_explain_of_a_model_says_which_row_and_which_rule(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_ROCM_OPS_TABLES", str(tmp_path))
    (tmp_path / "gfx942").mkdir()
    table = tmp_path / "gfx942" / "scaled_mm.csv"
    table.write_text(
        "compute_units,m,n,k,config.rows,config.split_k,config.blocks,source\n304,8,2304,16384,64,0,304,mine\n"
    )
    op_module.invalidate_tables()
    assert cli.main(["explain", "--model", "llama-3.1-405b-fp8", "--tp", "8", "--batch", "8,128", "--verbose"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [tuned] = [line for line in lines if line.startswith("qkv") and " 8  " in line]
    assert tuned.endswith(f"tuned SkinnyConfig(rows=64, split_k=0, blocks=304): {table}: mine")
    [refused] = [line for line in lines if line.startswith("lm_head") and " 128 " in line]
    assert refused.endswith("vLLM above 16 tokens")
    found = doctor.find()["tables"]
    assert found == {"folder": str(tmp_path), "rows": {"gfx942": {"scaled_mm": 1}}}
    assert f"scaled_mm 1  {tmp_path}" in doctor.text(doctor.find())
    op_module.invalidate_tables()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nothing"], "model must be a config.json, a folder with one, or one of deepseek-v3, glm"),
        (["--model", "deepseek-v3", "--tp", "3"], "must be divisible by tensor parallel size (3)"),
        (["--model", "deepseek-v3", "--arch", "gfx90a"], "arch must be one of "),
    ],
)
def test_explain_of_a_model_refuses_with_a_plain_message(arguments, message, capsys):
    assert cli.main(["explain", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain"], "explain needs either an op or --model"),
        (["explain", "rms_norm", "--model", "deepseek-v3"], "explain needs either an op or --model"),
        (
            ["explain", "--model", "deepseek-v3", "--batch", "1,x"],
            "must be comma-separated positive integers up to 16777216, got 1,x",
        ),
        (["tune", "--model", "deepseek-v3", "--batch", "0"], "must be comma-separated positive integers"),
        (["explain", "rms_norm", "--shape", "x"], "must be sizes joined by x, e.g. 8x7168, got x"),
        (["explain", "rms_norm", "--shape", "99999999999x99999999999"], "must be sizes joined by x"),
        (["bench", "--model", "tiny-llama", "--batch", "99999999999"], "up to 16777216, got 99999999999"),
        (["tune"], "the following arguments are required: --model"),
        (
            ["explain", "rms_norm", "--shape", "int4[8x8]"],
            "must be sizes joined by x, e.g. 8x7168, got int4[8x8]",
        ),
        (["verify", "--jobs", "0"], "--jobs must be at least 1, got 0"),
        (
            ["verify", "rows", "--emulate", "gfx942"],
            "--emulate supports test cases and --model, not the list rows",
        ),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    try:
        code = cli.main(arguments)
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and message in err and "Traceback" not in err


# One command per file

MAX_OPTIONS = 8
NUMBERS = ("parse_batches", "parse_size", "parse_workgroups")
UNITS = ("GPUs", "tokens", "keys", "MiB", "blocks", "minutes", "processes")
FOLDER = pathlib.Path(cli.__file__).parent / "commands"
PLAIN = {str, int, float, bool, list, tuple, pathlib.Path, torch.dtype, types.NoneType}


def actions(module) -> list[argparse.Action]:
    """Return the options that a command adds to a parser, except --help."""
    parser = argparse.ArgumentParser()
    module.add(parser)
    return [action for action in parser._actions if action.dest != "help"]


def kinds(hint) -> set[type]:
    """Return the types that a hint names, nested ones included."""
    parts = typing.get_args(hint)
    return {typing.get_origin(hint) or hint}.union(*map(kinds, parts)) - {types.UnionType, ...} if parts else {hint}


def test_every_file_is_a_command():
    assert {path.stem for path in FOLDER.glob("*.py")} == {*cli.COMMANDS, "__init__"}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_has_few_options_and_takes_their_values(name):
    """Other callers can pass them as well: no Namespace, and no catch-all parameter."""
    module = cli.COMMANDS[name]
    added = actions(module)
    assert len([action for action in added if action.option_strings]) <= MAX_OPTIONS
    parameters = inspect.signature(module.run).parameters.values()
    assert {one.name for one in parameters} == {action.dest for action in added}
    assert {one.kind for one in parameters} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    hints = typing.get_type_hints(
        getattr(module.run, "func", module.run)
    )  # some commands are another one with a fixed value
    assert hints.pop("return") is int and hints.keys() >= {one.name for one in parameters}
    assert set().union(*map(kinds, hints.values())) <= PLAIN


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_gets_the_values_that_its_file_names(name, monkeypatch):
    module, seen = cli.COMMANDS[name], {}
    of_model, of_op = ["--model", "tiny-llama"], ["rms_norm"]
    required = {"tune": of_model, "advise": of_model, "emulate": of_op, "predict": of_op}.get(name, [])
    monkeypatch.setattr(module, "run", lambda **values: seen.update(values) or 7)
    assert cli.main([name, *required]) == 7
    assert seen.keys() == {action.dest for action in actions(module)} and set(map(type, seen.values())) <= PLAIN


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_says_what_each_number_counts(name, capsys):
    module = cli.COMMANDS[name]
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert module.__doc__.partition("\n")[0] in said
    for action in actions(module):
        assert all(option in said for option in action.option_strings)
        assert action.help, action.dest
        if action.type in (int, float) or getattr(action.type, "__name__", "") in NUMBERS:
            assert any(unit in action.help for unit in UNITS), f"{action.dest}: {action.help}"
