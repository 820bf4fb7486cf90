"""Every recorded launch has a name and an owner, and every launch that the plugin leaves to others has a reason."""

import json
import re

import decode_profile
import launches
import pytest
from pages import launch_table, measurements, results_page

RECORDED = {
    (run["model_id"], run["side"], name)
    for path in measurements.RESULTS.glob("*/*-latency.json")
    for run in json.loads(path.read_text())["runs"]
    for ranks in run.get("profile", {}).values()
    for name in ranks[0]["kernels"]
}
"""Model, side and name of every kernel in the profiles of all results."""


def test_every_entry_is_of_a_recorded_kernel():
    used = {launches.entry(model, name) for model, _, name in RECORDED}
    listed = {
        (kind, pattern, launch)
        for kind, patterns in launches.LAUNCHES.items()
        for pattern, found in patterns.items()
        for launch in ([found] if isinstance(found, launches.Launch) else found)
    }
    assert listed - used == set()
    assert launches.LAUNCHES.keys() == {*decode_profile.CLASSES, decode_profile.REST}


def test_only_plain_symbols_of_runs_with_the_plugin_are_the_plugins():
    owned = {(side, name) for model, side, name in RECORDED if launches.entry(model, name)[-1].owner == launches.PLUGIN}
    assert {side for side, _ in owned} == {"with"}
    assert [name for _, name in owned if not re.fullmatch(r"[a-z]\w+", name) or name.startswith("triton")] == []


def test_every_launch_that_stays_has_a_reason_and_every_reason_a_launch():
    left = {
        (run.model, kernel.what)
        for run in launch_table.newest()
        for kernel in launch_table.kernels(run.model, run.batches[min(run.batches, key=int)]["with"][0])
        if kernel.owner != launches.PLUGIN
    }
    used = {launch_table.reason(model, what) for model, what in left}
    written = [of if isinstance(of, str) else list(of.values()) for of in launch_table.REASONS.values()]
    assert used == {why for of in written for why in ([of] if isinstance(of, str) else of)}
    assert launch_table.REASONS.keys() == {what for _, what in left}


def test_launch_tables_have_at_most_25_rows():
    tables = launch_table.launches().split("### ")[1:]
    assert [len(re.findall("^[|]", table, re.MULTILINE)) - 2 <= 25 for table in tables] == [True] * len(tables) != []


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "RESULTS", tmp_path)
    monkeypatch.setattr(measurements, "committed", lambda path: 0)
    (tmp_path / "made-up-gpu").mkdir()
    return tmp_path / "made-up-gpu"


def write(folder, name: str, sides: dict[str, dict[str, list[float]]], seams: str = "", backend: str = "") -> None:
    """Write the profile of four layers of Llama, 1000 us a step."""
    asked = f""" --engine-args '{{"attention_backend": "{backend}"}}'""" if backend else ""
    runs = [
        {
            "model_id": "llama-3.1-405b-fp8",
            "side": side,
            "profile": {batch: [{"kernels": kernels, "span_us": 1000.0, "busy_us": 900.0}] for batch in ("8", "1")},
        }
        for side, kernels in sides.items()
    ]
    report = {
        "hardware": "1 x Made-up GPU",
        "command": f"python it --model llama-3.1-405b-fp8 --num-layers 4{asked}",
        "commit": "abc",
        "environment": {"VLLM_ROCM_OPS_SEAMS": seams} if seams else {},
        "results": [{"model_id": "llama-3.1-405b-fp8", "num_layers": 4}],
        "runs": runs,
    }
    (folder / f"2026-11-26-{name}-latency.json").write_text(json.dumps(report))


GEMM = "void cutlass::device_kernel<vllm::cutlass_3x_gemm_sm90_fp8<cutlass::float_e4m3_t, cutlass::bfloat16_t, "
BASELINE = {
    GEMM: [16.0, 600.0],
    "triton_poi_fused_4": [3.0, 30.0],
    "triton_poi_fused_1": [1.0, 20.0],
    "memcpy128": [1, 1],
}
PLUGIN = {
    "scaled_mm_wave_splitk_16": [8.0, 200.0],
    GEMM: [8.0, 300.0],
    "triton_poi_fused_1": [4.0, 40.0],
    "_post_update_kernel": [1.0, 1.0],
    "Memcpy DtoH (Device -> Pinned)": [1.0, 0.5],
}


def test_both_sides_stand_side_by_side_with_reasons(folder):
    """The sides are in two files of one commit. A run without some seams is neither."""
    assert launch_table.launches() == "Nothing yet."
    write(folder, "a-with", {"with": PLUGIN})
    assert launch_table.launches() == "Nothing yet."
    write(folder, "b-without", {"without": BASELINE})
    write(folder, "c-part", {"with": {"_fwd_kernel_stage2": [1.0, 1.0]}}, seams="-norm")
    title, _, conditions, _, header, _, *rows = launch_table.launches().splitlines()
    assert title == "### llama-3.1-405b-fp8"
    assert conditions.startswith(
        "4 layers, 1 x Made-up GPU, batch 1, [2026-11-26-a-with-latency.json](made-up-gpu/2026"
    )
    assert header == "| launch | baseline | plugin | why launches stay that are not the plugin's |"
    rotation = "Inductor `triton_poi_fused`"
    gemm = "vLLM `cutlass_3x_gemm_sm90_fp8`"
    reasons = launch_table.REASONS
    assert rows == [
        f"| FP8 linears | 4 {gemm} 600 us | 2 {gemm} 300 us; 2 plugin `scaled_mm_wave_splitk_16` 200 us | {reasons['FP8 linears']} |",
        f"| rotation of q and k | 1 {rotation} 50 us | 1 {rotation} 40 us | {reasons['rotation of q and k']} |",
        f"| below 0.2 %: CUDA | 1 a step: CUDA 1 us | 1 a step: CUDA 0 us | {launch_table.OUTSIDE} |",
        f"| below 0.2 %: vLLM |  | 1 a step: vLLM 1 us | {launch_table.OUTSIDE} |",
        "| all | 5.0 a layer, 21 a step, 651 us | 5.0 a layer, 22 a step, 542 us | Not the plugin's: 14 launches a step, 342 us. |",
    ]
    assert results_page.steps().count("\n") == 3  # a row for each batch size


def test_each_backend_has_a_table(folder):
    for backend in ("", "TRITON_ATTN"):
        write(folder, f"a{backend}", {"without": BASELINE, "with": PLUGIN}, backend=backend)
    titles = [line for line in launch_table.launches().splitlines() if line.startswith("#")]
    assert titles == ["### llama-3.1-405b-fp8", "### llama-3.1-405b-fp8, TRITON_ATTN"]


@pytest.mark.parametrize("side", ["without", "with"])
@pytest.mark.parametrize(
    "name", ["unheard_of", "void vllm::new_norm_kernel<int>", "Cijk_Alik_Bljk", "triton_red_fused_7"]
)
def test_an_unknown_kernel_stops_the_generator(folder, side, name):
    sides = {"without": BASELINE, "with": PLUGIN}
    write(folder, "a", sides | {side: sides[side] | {name: [1.0, 0.1]}})
    with pytest.raises(ValueError, match=f"no entry for the kernel {name!r} of llama"):
        launch_table.launches()


def test_a_launch_without_a_reason_stops_the_generator(folder, monkeypatch):
    sort = "void vllm::moe::moe_align_block_size_kernel<int>(int const*, int*"
    write(folder, "a", {"without": BASELINE | {sort: [2.0, 9.0]}, "with": PLUGIN})
    assert "experts: sort" in launch_table.launches()  # on the baseline's side none is needed
    write(folder, "a", {"without": BASELINE, "with": PLUGIN | {sort: [2.0, 9.0]}})
    with pytest.raises(ValueError, match="REASONS must say why 'experts: sort' of llama-3.1-405b-fp8 stays"):
        launch_table.launches()
