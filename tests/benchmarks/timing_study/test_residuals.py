"""Test the list of published points and the errors of predictions."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
import subprocess

import pytest
import torch
from marks import full
from timing_study import external_kernel, left_out, published, published_mla, residuals

pytestmark = full
OBJECT = "hsa/gfx950/bf16gemm/a_64x64.co"

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="published objects are read from git")


def write(path, header, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, header, restval="")
        writer.writeheader()
        writer.writerows(rows)


def point(us: float, predicted: float | str = "", **others) -> dict[str, str]:
    """Return a row as validation.py prints it."""
    given = dict.fromkeys(residuals.HEADER, "") | {"set": "fit", "gpu": "MI308X", "op": "bf16", "code_object": "a.co"}
    given |= {"M": "1", "N": "2", "K": "3", "us": str(us), "predicted_us": str(predicted), "why": ""}
    return given | {key: str(value) for key, value in others.items()}


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the published tables and a bare git directory with two versions of an object."""
    git, work = tmp_path / "git", tmp_path / "work"

    def run(*command) -> str:
        of = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", f"--git-dir={git}", f"--work-tree={work}", *command]
        return subprocess.run(of, check=True, capture_output=True, text=True).stdout.strip()

    subprocess.run(["git", "init", "-q", "--bare", str(git)], check=True)
    commits = []
    for content in ("old", "new"):
        for name in (OBJECT, residuals.LATENT):
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_text(content + name)
        run("add", ".")
        run("commit", "-q", "-m", content)
        commits.append((run("rev-parse", "HEAD"), run("rev-parse", f"HEAD:{OBJECT}")))
    gemm = {"gpu": "MI350X/MI355X (256 CU)", "op": "bf16", "code_object": OBJECT, "M": "8", "N": "64", "K": "128"}
    gemm |= {"us": "5", "B": "1", "splitK": "3", "dtype": "bfloat16->bfloat16"}
    rows = [gemm | {"commit": commit} for commit, _ in commits]
    rows[0] |= {"dtype": "bfloat16->float32"}
    rows += [rows[0] | {"code_object": ""}, rows[0] | {"us": "0"}]
    write(tmp_path / residuals.GEMMS, [*gemm, "commit"], rows)
    peer = {
        "gpu": "MI300X",
        "op": "mla_decode",
        "kernel": "aiter asm",
        "extra": "batch 16 heads 128 ctx 21",
        "us": "16.4",
    }
    write(tmp_path / residuals.PEERS, list(peer), [peer, peer | {"kernel": "hipkittens"}, peer | {"gpu": "MI355X"}])
    points = [point(10 + n, M=n) for n in range(5)] + [
        point(30, M=0, code_object="b.co"),
        point(3, M=4, set="holdout_op"),
    ]
    write(
        tmp_path / residuals.POINTS, residuals.HEADER, [{key: row[key] for key in residuals.HEADER} for row in points]
    )
    return tmp_path, git, [blob for _, blob in commits], run("rev-parse", f"HEAD:{residuals.LATENT}")


@needs_git
def test_all_points_with_an_object_are_listed_each_with_the_object_that_was_measured(folder, capsys):
    path, git, blobs, latent = folder
    rows = residuals.listed(path, git)
    assert [row["set"] for row in rows] == ["fit"] * 6 + ["holdout_op", "peer"] + ["other architecture"] * 2
    assert [row["blob_at_measurement"] for row in rows[-2:]] == blobs
    assert [row["extra"] for row in rows[-2:]] == ["splitK=3 out=float32", "splitK=3"]
    assert residuals.shape(rows[-1]) != residuals.shape(rows[-2])
    assert [rows[7][name] for name in ("M", "N", "K", "blob_latest", "us")] == ["16", "21", "128", latent, "16.4"]
    assert residuals.main(["points", str(path), "--git", str(git)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
    assert residuals.main(["points", str(path / "none"), "--git", str(git)]) == 2
    assert "FileNotFoundError" in capsys.readouterr().err


def test_errors_and_pairs_are_those_of_the_rows(tmp_path, monkeypatch):
    fault = "OutOfBounds: _Z4name+0x10 `buffer_load_dword v7`, block (1, 0, 0): 4 bytes"
    rows = [
        point(10, 11, M=1), point(12, 9, M=1, code_object="b.co"),  # in the wrong order
        point(10, 12, M=2), point(20, 30, M=2, code_object="b.co"), point(30, 31, M=2, code_object="b.co", extra="splitK=2"),
        point(10, 5, M=3), point(10.5, 20, M=3, code_object="b.co"),  # not apart
        point(10, 10, M=4), point(30, 10, M=4),  # one kernel twice
        point(10, M=5, why=fault), point(40, M=5, code_object="b.co", why="x/b.co sorts tokens itself"),
        point(10, M=6, set="holdout_op", why="no"), point(10, 20, M=7, set="holdout_op"),
    ]  # fmt: skip
    found = residuals.judged(rows)
    assert found["pairs"] == [{"gpu": "MI308X", "op": "bf16", "pairs": 3, "right": 2}]
    fit, other = found["classes"]
    assert (fit["points"], fit["predicted"], fit["median"], fit["p90"]) == (11, 9, 0.5, None)
    assert fit["bias"] == 0.033 and fit["why"] == {"OutOfBounds in buffer_load_dword": 1, "it sorts tokens itself": 1}
    assert (other["points"], other["predicted"], other["median"], other["p90"]) == (2, 1, 1.0, None)
    monkeypatch.setattr(residuals, "REPORT", tmp_path / "published.json")
    residuals.REPORT.write_text('{"simpler": []}')
    write(tmp_path / "predicted.csv", list(rows[0]), rows)
    assert residuals.main(["judge", str(tmp_path / "predicted.csv")]) == 0
    assert json.loads(residuals.REPORT.read_text()) == found | {"simpler": []}
    others = [point(10, 11, gpu="MI300X"), point(10, 12, M=7, set="holdout_op")]
    write(tmp_path / "others.csv", list(rows[0]), others)
    assert residuals.main(["judge", str(tmp_path / "others.csv"), "--keep"]) == 0
    both = json.loads(residuals.REPORT.read_text())
    assert both["pairs"] == found["pairs"] and [(each["gpu"], each["set"], each["points"]) for each in both["classes"]] == [
        ("MI300X", "fit", 1), ("MI308X", "fit", 11), ("MI308X", "holdout_op", 1),
    ]  # fmt: skip


def moe(us: str, **others) -> dict[str, str]:
    given = {
        "op": "fused_moe stage 1",
        "gpu": "MI308X",
        "N": 512,
        "K": 7168,
        "batch_or_experts": 256,
        "extra": "topk=8",
    }
    return point(1, **(given | {"M": 1024} | others)) | {"us": us}


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([moe("763.616"), moe("763.616", M=2048), moe("763.617", M=4)], [left_out.COPY, left_out.COPY, None]),
        ([moe("763.61"), moe("763.61", M=2048)], [left_out.COPY] * 2),
        ([moe("763.6"), moe("763.60", M=2048)], [None] * 2),  # four digits
        ([moe("763.61"), moe("763.6100", M=2048)], [left_out.COPY] * 2),
        ([moe("763.616"), moe("763.616", code_object="b.co")], [None] * 2),  # equal numbers of tokens
        ([moe("763.616"), moe("763.616", M=2048, N=256), moe("763.616", M=2048, gpu="MI300X")], [None] * 3),
        ([moe("698", M=4096)], [left_out.IMPOSSIBLE]),  # 688 TFLOP/s take 699 us
        ([moe("705", M=4096), moe("690", M=4096, op="fused_moe stage 1+2", N=341)], [None, left_out.IMPOSSIBLE]),
        ([moe("140", M=4096, gpu="MI300X"), moe("190", M=4096, gpu="MI300X")], [left_out.IMPOSSIBLE, None]),
        ([moe("1", op="bf16", M=4096, batch_or_experts=1), moe("1", op="attn_fwd", K="128")], [left_out.IMPOSSIBLE, None]),
    ],
)  # fmt: skip
def test_times_that_cannot_be_are_left_out(rows, wanted):
    found = left_out.reasons(rows)
    assert [found.get(id(row)) for row in rows] == wanted


def test_rows_that_are_left_out_are_in_no_class_and_no_pair():
    rows = [
        point(10, 10, M=1), point(12, 11, M=1, code_object="b.co"),
        *(point(11.2345, 9, M=m, code_object="c.co") for m in (1, 2)),
    ]  # fmt: skip
    found = residuals.judged(rows)
    assert [(each["points"], each["left out"]) for each in found["classes"]] == [(2, {left_out.COPY: 2})]
    assert found["pairs"] == [{"gpu": "MI308X", "op": "bf16", "pairs": 1, "right": 1}]


@pytest.mark.parametrize(
    ("requests", "keys", "units", "blocks", "most"),
    [(1, 21, 304, 2, 1), (16, 21, 304, 32, 1), (128, 21, 304, 128, 1), (256, 21, 304, 256, 1), (256, 21, 80, 64, 4),
     (256, 21, 228, 128, 2), (3, 4000, 304, 84, 1), (40, 640, 304, 200, 1)],
)  # fmt: skip
def test_requests_are_divided_among_blocks(requests, keys, units, blocks, most):
    found = published_mla.divided(requests, keys, units)
    assert len(found) == blocks <= units and max(map(len, found)) == most
    works = [work for block in found for work in block]
    for request in range(requests):
        mine = [work for work in works if work.request == request]
        ends = [(work.start, work.end) for work in mine]
        assert ends[0][0] == request * keys and ends[-1][1] == (request + 1) * keys
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(ends))
        assert (len(mine) == 1) == (mine[0].part < 0)
    parts = [work.part for work in works if work.part >= 0]
    assert parts == list(range(len(parts)))


def test_a_pointer_to_pointers_is_packed_and_named():
    table, one, other = torch.zeros(32, dtype=torch.uint8), torch.zeros(4), torch.zeros(8)
    addresses = {id(table): 7 << 36, id(one): 1 << 36, id(other): 2 << 36}
    launch = external_kernel.ObjectLaunch(
        "k", (1, 1, 1), (64, 1, 1), {8: external_kernel.Pointers(table, (one, other))}
    )
    assert external_kernel.packed(launch.args, lambda tensor: addresses[id(tensor)]) == bytes(8) + (7 << 36).to_bytes(
        8, "little"
    )
    assert table.view(torch.int64).tolist() == [1 << 36, 2 << 36, 0, 0]
    assert [id(value) for value in launch.named.values()] == [id(table), id(one), id(other)]


def test_launches_whose_blocks_are_told_other_things_are_recorded_apart(monkeypatch, tmp_path):
    made = []
    recording = external_kernel.trace.Recording("k", 1, 1, [], frozenset())
    monkeypatch.setattr(external_kernel, "record", lambda *arguments: made.append(arguments) or recording)
    recorder = published.Recorder()
    for told in ((0, 1), (0, 2), (0, 1)):
        args = {0: external_kernel.Pointers(published.zeros(16), (published.numbers(told),))}
        launch = external_kernel.ObjectLaunch("k", (1, 1, 1), (64, 1, 1), args)
        recorder.record("x", tmp_path / "a.co", published.Call(launch, (1, 1, 1), (), True), launch)
    assert len(made) == 2
