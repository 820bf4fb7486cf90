"""Old names in environment variables, tuned tables and results: each still has its effect."""

import functools
import json
import warnings

import pytest
from pages import measurements

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import arch as archs
from vllm_rocm_ops.core import envs, op, renamed, stats, tables
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.timing import frozen
from vllm_rocm_ops.tools import explain
from vllm_rocm_ops.vllm import seam


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch):
    monkeypatch.setattr(stats, "warned", set())


def test_present_names_exist_and_old_ones_do_not():
    """A seam, an op or a field of a configuration that is renamed again needs its entry."""
    known = {*seam.NAMES, *(one.name for one in op.registered())}
    assert set(renamed.NAMES.values()) <= known and not known & renamed.NAMES.keys()
    for name, fields in renamed.CONFIG_FIELDS.items():
        config = (
            getattr(ops, name).explain(*explain.example(getattr(ops, name), "gfx942").values(), arch="gfx942").config
        )
        assert set(fields.values()) <= vars(config).keys() and not fields.keys() & vars(config).keys()


@pytest.mark.parametrize(
    ("old", "present"),
    [
        ("scaled_mm_silu_narrow_8", "scaled_mm_silu_wave_splitk_8"),
        ("batched_gemm_bf16_narrow_16 + narrow_epoch", "batched_gemm_bf16_wave_splitk_16 + narrow_epoch"),
        ("latent_norm_rope_and_cache_bf16_fp8", "mla_norm_rope_and_cache_bf16_fp8"),
        ("-decode_attention,-latent_attention", "-decode_attention,-mla_attention"),
        ("SkinnyConfig(rows=64, parts=1)", "SkinnyConfig(rows=64, parts=1)"),
    ],
)
def test_texts(old, present):
    assert renamed.current(old) == renamed.current(present) == present


@pytest.mark.parametrize("old", ["latent_attention", "latent_norms", "cpu_gaps"])
def test_a_seam_is_switched_by_its_old_name_which_warns_once(monkeypatch, old):
    present = renamed.NAMES[old]
    monkeypatch.setenv("VLLM_ROCM_OPS_SEAMS", f"-{old}")
    with pytest.warns(UserWarning, match=f"VLLM_ROCM_OPS_SEAMS=-{old} .* is read as VLLM_ROCM_OPS_SEAMS=-{present}$"):
        left = {name for name in seam.NAMES if seam.wanted(name, envs.VLLM_ROCM_OPS_SEAMS)}
    assert left == {*seam.NAMES} - {present}
    monkeypatch.setenv("VLLM_ROCM_OPS_SEAMS", f"{present},all")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert seam.names(present) and not seam.names(old)
        monkeypatch.setenv("VLLM_ROCM_OPS_SEAMS", f"-{old}")
        assert not seam.wanted(present, envs.VLLM_ROCM_OPS_SEAMS)


def test_an_op_is_disabled_by_its_old_name(monkeypatch):
    monkeypatch.setenv("VLLM_ROCM_OPS_DISABLE", "latent_norm_rope_and_cache,softmax")
    with pytest.warns(UserWarning, match="is read as VLLM_ROCM_OPS_DISABLE=mla_norm_rope_and_cache,softmax$"):
        assert op.disabled() == {"mla_norm_rope_and_cache", "softmax"}


def test_a_tuned_table_may_have_old_columns(monkeypatch, tmp_path):
    """Beside rows with present columns, as `tune` adds them to a file."""
    monkeypatch.setenv("VLLM_ROCM_OPS_TABLES", str(tmp_path))
    the_op, arch = ops.paged_attention_decode, archs.ARCHS["gfx942"]
    a = the_op.Arguments(**explain.example(the_op, "gfx942"))
    *_, other = (config for config in the_op.configs(a, arch) if config != the_op.default(a, arch))
    key = {"compute_units": str(arch.compute_units), **{name: str(value) for name, value in the_op.problem(a).items()}}
    rows = [(*key.values(), str(other.num_kv_splits), str(other.min_steps), "", "", "old")]
    rows += [("1", *rows[0][1 : len(key)], "", "", "64", "1", "present")]
    columns = *key, "config.parts", "config.least_steps", "config.num_kv_splits", "config.min_steps", "source"
    path = tmp_path / "gfx942" / "paged_attention_decode.csv"
    path.parent.mkdir()
    path.write_text("".join(",".join(row) + "\n" for row in (columns, *rows)))
    op.invalidate_tables()
    try:
        row = the_op.tuned_row(a, arch)
        assert (row.config, row.source) == (other, "old")
        present = tables.table(path, tuple(key))[rows[1][: len(key)]]
        assert present.fields == {"num_kv_splits": "64", "min_steps": "1"}
    finally:
        op.invalidate_tables()


def test_results_are_read_by_present_names(tmp_path):
    """By the tables of pages; the files stay."""
    path = tmp_path / "2026-11-25-abc-cases.jsonl"
    old = {"op": "latent_norm_rope_and_cache", "kernel": "scaled_mm_narrow_8", "seam": "latent_attention", "gpu": "G"}
    path.write_text(json.dumps(old) + "\n")
    present = {
        "op": "mla_norm_rope_and_cache",
        "kernel": "scaled_mm_wave_splitk_8",
        "seam": "mla_attention",
        "gpu": "G",
    }
    assert measurements.lines_of(path) == [present]
    assert measurements.gpus(path, present["op"]) == {"G"} and not measurements.gpus(path, old["op"])
    assert measurements.seams_of({"environment": {"VLLM_ROCM_OPS_SEAMS": "-decode_attention,-latent_attention"}}) == (
        measurements.NO_ATTENTION
    )


def test_frozen_predictions_hold_for_code_whose_symbols_alone_changed(monkeypatch):
    call = next(
        call for call in model_layers.calls(model_config.read("llama-3.1-405b-fp8"), 8) if call.op is ops.scaled_mm
    )
    values = frozen.newest()["calls"][frozen.key("MI300X", call, 1)]
    [(symbol, digest)] = values["code"].items()
    assert symbol == "scaled_mm_narrow_8"
    find = functools.partial(frozen.find, "MI300X", call, 1, archs.ARCHS["gfx942"])
    for code, holds in (
        ({"scaled_mm_wave_splitk_8": renamed.OBJECTS[digest]}, True),
        ({"scaled_mm_wave_splitk_16": renamed.OBJECTS[digest]}, False),
        ({"scaled_mm_wave_splitk_8": "0" * 16}, False),
    ):
        monkeypatch.setattr(frozen, "code_of", lambda *_, code=code: code)
        assert find() == (values if holds else None)
