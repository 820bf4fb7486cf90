"""Test that every published row gets a time or a reason, whatever it contains."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import time

import pytest
import torch
from marks import full
from timing_study import external_kernel, published, published_gemm, residuals, validation

from vllm_rocm_ops.core import launch
from vllm_rocm_ops.timing import launch_time, machines

pytestmark = full
HEAD = residuals.HEADER
MACHINE = machines.MI300X
TILES = (2, 64)

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="published objects are read from git")


@pytest.fixture(scope="module")
def git(tmp_path_factory):
    """Return a bare git directory with one of the package's objects, and its blob."""
    folder = tmp_path_factory.mktemp("git")
    subprocess.run(["git", "init", "-q", "--bare", str(folder)], check=True)
    path = launch.code_object("silu_and_mul", "gfx942")
    command = ["git", f"--git-dir={folder}", "hash-object", "-w", str(path)]
    return folder, subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def row(**others) -> dict[str, str]:
    given = {"gpu": "MI308X (80 CU)", "op": "bf16", "code_object": "hsa/gfx942/bf16gemm/bf16gemm_tn_32x64_splitk.co"}
    given |= {"M": "64", "N": "128", "K": "256", "batch_or_experts": "1", "extra": "splitK=2", "us": "5"}
    return dict.fromkeys(HEAD, "") | given | others


def printed(tmp_path, git, rows, limit=30.0, jobs=1, kept=None):
    """Return the printed rows for these, and the log."""
    path, out, log = tmp_path / "points.csv", io.StringIO(), io.StringIO()
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, HEAD)
        writer.writeheader()
        writer.writerows(rows)
    validation.run(path, git, out, log, limit, jobs, kept)
    return list(csv.DictReader(io.StringIO(out.getvalue()))), log.getvalue().splitlines()


@needs_git
def test_every_row_gets_a_time_or_a_reason(tmp_path, git, monkeypatch):
    folder, blob = git
    times = {64: 12.5, 65: 1 / 3}
    monkeypatch.setattr(published, "predict", lambda machine, of, *others: times[of.m])
    monkeypatch.setattr(validation, "call", lambda of, kernel: of)
    monkeypatch.setattr(validation, "CodeObject", lambda path: type("Code", (), {"kernels": {"k": path}}))
    good = row(blob_at_measurement=blob)
    rows = [
        good, row(blob_at_measurement="0" * 40), row(), row(M="many"), row(code_object="archive/kernel.s"),
        row(gpu="a GPU", blob_latest=blob), good, row(blob_latest=blob, M="65"), row(blob_latest=blob, M="66"),
    ]  # fmt: skip
    found, log = printed(tmp_path, folder, rows)
    assert [each["predicted_us"] for each in found] == ["12.5", *[""] * 5, "12.5", "0.3333", ""]
    reasons = [each["why"] for each in found]
    for why, wanted in zip(
        reasons,
        ("", "does not have the blob 000", "no code object is named", "invalid literal", "is no code object of aiter",
         "the GPU must be a product", "", "", "KeyError: 66"), strict=True,
    ):  # fmt: skip
        assert wanted in why and bool(why) == bool(wanted), (why, wanted)
    assert all(each[name] == of[name] for each, of in zip(found, rows, strict=True) for name in HEAD)
    assert len(log) == 8 and log[0].startswith("1 of 8, ") and sum(line.endswith(" s: 12.5 us") for line in log) == 1


@needs_git
def test_a_row_that_takes_too_long_is_left(tmp_path, git, monkeypatch):
    def slow(fields, *_):
        if fields["M"] == "1":
            time.sleep(60)
        return validation.Found(1.0, "")

    monkeypatch.setattr(validation, "predict_row", slow)
    found, _ = printed(tmp_path, git[0], [row(M=str(n)) for n in range(4)], 1.0)
    assert [each["predicted_us"] for each in found] == ["1", "", "1", "1"]
    assert [each["why"][:16] for each in found] == ["", "took longer than", "", ""]


@needs_git
def test_processes_share_rows_and_what_they_found_is_kept(tmp_path, git, monkeypatch):
    def asked(fields, *_):
        if fields["M"] == "3":
            time.sleep(60)
        return validation.Found(None, "odd") if int(fields["M"]) % 2 else validation.Found(float(fields["M"]), "")

    monkeypatch.setattr(validation, "predict_row", asked)
    rows, kept = [row(M=str(n)) for n in (6, 2, 3, 4, 6, 1)], tmp_path / "kept"
    wanted = [("6", ""), ("2", ""), ("", "took longer than 1 s"), ("4", ""), ("6", "")]
    for asked_anew in (5, 1):
        found, log = printed(tmp_path, git[0], rows, 1.0, 3, kept)
        assert [(each["predicted_us"], each["why"]) for each in found] == [*wanted, ("", "odd")]
        assert len(log) == asked_anew and log[-1].startswith(f"{asked_anew} of {asked_anew}, ")
    monkeypatch.setattr(validation, "_model", lambda: "another")
    assert len(printed(tmp_path, git[0], rows, 1.0, 3, kept)[1]) == 5
    assert len(list(kept.iterdir())) == 2


def test_a_process_gets_rows_of_like_launches(monkeypatch):
    def key(**others) -> tuple[str, ...]:
        return tuple(row(**others)[name] for name in validation.COLUMNS)

    monkeypatch.setattr(validation, "PORTION", 3)
    keys = [key(M=str(m), K=k) for m in (100, 20, 3, 5) for k in ("512", "256")]
    found = [[(of[validation.COLUMNS.index("M")], of[validation.COLUMNS.index("K")]) for of in portion] for portion in
             validation._portions([*keys, key(gpu="MI325X", M="20")])]  # fmt: skip
    assert found == [
        [("100", "512")], [("20", "256"), ("100", "256")], [("3", "512"), ("5", "512"), ("20", "512")],
        [("3", "256"), ("5", "256"), ("20", "256")],
    ]  # fmt: skip


@needs_git
@pytest.mark.parametrize(
    ("rows", "git_folder", "message"),
    [
        ("M,N", None, "must have the columns gpu"),
        (None, None, "must be a CSV file"),
        (",".join(HEAD), "none", "--git must be"),
    ],
)
def test_files_that_are_not_as_wanted(tmp_path, git, capsys, rows, git_folder, message):
    path = tmp_path / "points.csv"
    if rows:
        path.write_text(rows + "\n")
    assert validation.main([str(path), "--git", str(git_folder or git[0])]) == 2
    assert message in capsys.readouterr().err


def kernel(bytes: int):
    """Return a foreign kernel with the fields that layouts need."""
    metadata = {".max_flat_workgroup_size": 512, ".args": [{".offset": 0, ".size": bytes, ".value_kind": "by_value"}]}
    return external_kernel.KernelObject("k", *[0] * 11, metadata)


@pytest.mark.parametrize(
    ("name", "extra", "bytes", "grid", "ran", "numbers"),
    [
        ("fp8gemm_blockscale/x_96x128.co", "splitK=2", 256, (32, 11, 1), (32, 3, 1), {96: 288, 112: 2048, 128: 512, 192: 2, 240: 4}),
        ("fp8gemm_blockscale/x_32x128.co", "splitK=3", 256, (32, 32, 1), (32, 3, 1), {192: 2}),
        ("i8gemm/x_64x256.co", "splitK=1", 208, (8, 16, 1), (8, 3, 1), {96: 192, 144: 512, 176: 4096, 192: 1}),
        ("bf16gemm/x_32x64_splitk.co", "splitK=4", 352, (32, 32, 4), (32, 3, 4), {96: 4096, 160: 1024, 224: 96, 272: 4, 288: 1}),
    ],
)  # fmt: skip
def test_layouts_of_products(name, extra, bytes, grid, ran, numbers):
    of = published.row(row(code_object=f"hsa/gfx942/{name}", M="1024", N="2048", K="512", extra=extra))
    found = validation.call(of, kernel(bytes))
    assert (found.grid, found.launch.grid, found.launch.block) == (grid, ran, (256, 1, 1))
    assert {at: int.from_bytes(found.launch.args[at], "little") for at in numbers} == numbers
    assert len(external_kernel.packed(found.launch.args, lambda tensor: 0)) == bytes
    assert found.cleared == ((2 * 1024 * 2048,) if name.startswith("fp8") else ())


@pytest.mark.parametrize(
    ("name", "commit", "split", "cleared"),
    [
        ("fp8gemm_blockscale", published_gemm.CLEARS_BIAS[0], 2, (2 * 64 * 128, 4 * 128)),
        ("fp8gemm_blockscale", published_gemm.CLEARS_BIAS[1], 1, (4 * 128,)), ("fp8gemm_blockscale", "", 1, ()),
        ("i8gemm", published_gemm.CLEARS_NOTHING[0], 2, ()), ("i8gemm", published_gemm.CLEARS_BIAS[0], 2, (2 * 64 * 128,)),
    ],
)  # fmt: skip
def test_launch_code_of_a_commit_clears(name, commit, split, cleared, monkeypatch):
    of = published.row(row(code_object=f"hsa/gfx942/{name}/x_64x128.co", commit=commit, extra=f"splitK={split}"))
    found = validation.call(of, kernel(256))
    assert found.cleared == cleared
    monkeypatch.setattr(published.Recorder, "record", lambda *_: None)
    monkeypatch.setattr(external_kernel, "predict", lambda *_: launch_time.Prediction(7.0, 0.0, 0.0, 1, 0.0))
    us = published.predict(MACHINE, found, None, published.Recorder())
    bytes_us = sum(cleared) / MACHINE["mall_bandwidth"] / 1e3
    assert us == pytest.approx(7 + (1 + len(cleared)) * MACHINE["profiled"] + bytes_us)


def test_mla_attention_adds_up_by_a_kernel():
    name = "hsa/gfx942/mla/mla_a8w8_qh128_m32x4_n16x2_msk0_ps.co"
    given = {"gpu": "MI300X", "op": "mla_decode", "code_object": name, "M": "16", "N": "21", "K": "128"}
    for requests, added in (("16", (4 * 32 + 2 * 16) * 128 * 512), ("128", 1)):  # divided into 32 splits, and not
        found = validation.call(published.row(row(**given | {"M": requests})), kernel(512))
        assert found.cleared == (added,)


def test_products_of_four_bytes():
    given = row(code_object="hsa/gfx950/bf16gemm/x_32x64_splitk.co")
    for extra, size in (("splitK=2 out=float32", 4), ("splitK=2", 2)):
        args = validation.call(published.row(given | {"extra": extra}), kernel(352)).launch.args
        numbers = {at: int.from_bytes(args[at], "little") for at in (96, 128, 288)}
        assert args[0].numel() == 64 * 128 * size and numbers == {96: 128 * size, 128: 128 * size, 288: size == 2}


ATTENTION = {
    "": ("128", 4096, (8, 32, 2), (4, 32, 1), (4, 32, 1), 7.0),
    "_causal": ("128", 4096, (8, 32, 2), (1, 32, 1), (2, 32, 1), 7.0),
    "_group": ("128/128", 2583, (32, 2, 8), (32, 1, 4), (32, 1, 4), (2583 - 512) / 512),
}


@pytest.mark.parametrize("kind", ATTENTION)
def test_layouts_of_attention(kind):
    sizes, keys, grid, short, long, beyond = ATTENTION[kind]
    causal = int(kind == "_causal")
    queries = 4096 if causal else 2048
    extra = f"q_heads=32 kv_heads=8 causal={causal}"
    given = {"M": queries, "N": keys, "K": sizes, "batch_or_experts": 2, "extra": extra}
    name = f"hsa/gfx942/fmha_v3_fwd/MI300/fwd_hd128_bf16{kind}.co"
    of = published.row(row(code_object=name) | {key: str(value) for key, value in given.items()})
    found = validation.call(of, kernel(512))
    assert (found.grid, found.launch.grid, found.second.grid, found.beyond) == (grid, short, long, beyond)
    numbers = {at: int.from_bytes(found.second.args[at], "little") for at in (96, 112, 128, 176, 192, 272, 304, 384)}
    assert numbers == {96: 1024, 112: 8192, 128: 256 * 8192, 176: 4, 192: 2048, 272: 1024, 304: 128, 384: 8192}
    assert found.launch.args[48].numel() == 512 * 8 * 128 * 2
    if kind == "_group":
        assert found.launch.args[448].view(torch.int32).tolist()[:2] == [0, 512]


@pytest.mark.parametrize(("family", "bytes"), [("fmoe", 448), ("fmoe_2stages", 368)])
def test_layouts_of_experts(family, bytes):
    name = f"hsa/gfx942/{family}/silu/fmoe_bf16_pertokenFp8_g1u1_32x128.co"
    given = {"M": "512", "N": "256", "K": "2048", "batch_or_experts": "64", "extra": "topk=8 block_m=32 Silu per_Token"}
    of = published.row(row(code_object=name) | given)
    found = validation.call(of, kernel(bytes))
    assert found.launch.grid == (2, 3, 1) and found.grid[0] == 2
    assert 512 * 8 / 32 < found.grid[1] <= 64 * 4 and found.repeats == found.grid[1] / 64
    at = dict(zip(("STP", "SEP", "dim"), (144, 176, 192) if family == "fmoe" else (112, 128, 144), strict=True))
    tokens = found.launch.args[at["STP"]].view(torch.int32).tolist()
    real = [token & 0xFFFFFF for token in tokens[:96] if token & 0xFFFFFF < 512]
    assert len(real) == 3 * round(512 * 8 / found.grid[1]) and tokens[31] == 512 | 8 << 24
    assert found.launch.args[at["SEP"]].view(torch.int32).tolist()[:3] == [0, 1, 2]
    assert int.from_bytes(found.launch.args[at["dim"]], "little") == 2048
    assert found.launch.args[48].view(torch.int32).tolist()[:2] == [3 * 32, 512]  # sorted places, and tokens
    with pytest.raises(ValueError, match="sorts tokens itself"):
        validation.call(of._replace(code_object=name.replace("_32x", "_flat_32x")), kernel(bytes))
    persistent = validation.call(of._replace(code_object=name.replace("_32x", "_ps_32x")), kernel(bytes))
    assert persistent.grid == persistent.launch.grid == persistent.second.grid == (80, 1, 1)
    assert persistent.beyond == (found.grid[1] - 40) / 40
    starts = [each.args[at["SEP"]].view(torch.int32) for each in (persistent.launch, persistent.second)]
    assert [len(each) - 4 for each in starts] == [40, 80]


def test_persistent_experts_with_few_tiles_have_no_idle_blocks():
    def found(name: str, **others) -> published.Call:
        given = {"M": "1", "N": "256", "K": "2048", "batch_or_experts": "64", "extra": "topk=8 block_m=32 Silu"}
        of = published.row(row(code_object=f"hsa/gfx942/fmoe/silu/x_{name}_32x128.co", **given | others))
        return validation.call(of, kernel(448))

    def workers(of: published.Call) -> tuple[int, ...]:
        return tuple(int.from_bytes(of.launch.args[at], "little") for at in (416, 432))

    few, full = found("ps"), found("ps", extra="topk=40 block_m=32 Silu")
    assert few.grid == few.launch.grid == (8 * 2, 1, 1) and few.second is None and workers(few) == (80, 2)
    assert full.grid == full.launch.grid == (80, 1, 1) and full.second is None
    wide = found("ps", N=str(128 * 81))  # one tile has more blocks than the GPU has units
    assert wide.grid == (81, 8, 1) and wide.launch.grid == (81, 3, 1) and workers(wide) == (0, 81)
    with pytest.raises(ValueError, match="gives 8 tiles, fewer than its blocks, to few dies"):
        found("psx")


def test_a_second_launch_says_how_the_time_grows(monkeypatch):
    monkeypatch.setattr(external_kernel, "record", lambda arch, path, launch, *_: RECORDING)
    times = iter((10.0, 14.0))
    monkeypatch.setattr(external_kernel, "predict", lambda *_: RESULT._replace(us=next(times)))
    one = external_kernel.ObjectLaunch("k", (1, 1, 1), (64, 1, 1), {})
    what = published.Call(one, (4, 1, 1), (), False, second=one._replace(symbol="l"), beyond=7.0)
    us = published.predict(MACHINE, what, launch.code_object("silu_and_mul", "gfx942"), published.Recorder())
    assert us == 10 + 7 * 4 + MACHINE["profiled"]


def test_recordings_are_kept_for_more_rows(monkeypatch):
    made = []
    monkeypatch.setattr(external_kernel, "record", lambda *arguments: made.append(arguments) or RECORDING)
    recorder = published.Recorder()
    path = launch.code_object("silu_and_mul", "gfx942")
    for m, cold in (("1024", False), ("4096", True), ("1000000", True), ("16", False)):
        of = published.row(row(code_object="hsa/gfx942/i8gemm/x_64x256.co", M=m, N="2048", K="512", extra=""))
        what = validation.call(of, kernel(208))
        found = recorder.record("gfx942", path, what, what.launch)
        assert found.grid == 8 * -(-int(m) // 64) and bool(found.cold) is cold
    assert len(made) == 2


RESULT = launch_time.Prediction(1.0, 1.0, 0.0, 1, 0.0)
RECORDING = external_kernel.trace.Recording("k", 1, 1, [], frozenset({1}))


def test_unknown_families_say_so():
    with pytest.raises(ValueError, match="the arguments of pa are not known"):
        validation.call(published.row(row(code_object="hsa/gfx942/pa/pa_32x64.co")), kernel(16))
    with pytest.raises(ValueError, match="must have a tile in its name"):
        validation.call(published.row(row(code_object="hsa/gfx942/i8gemm/x.co")), kernel(208))
