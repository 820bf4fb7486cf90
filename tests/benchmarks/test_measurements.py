"""Tables and figures of results, for made-up results and for the committed ones."""

import json
import os
import re
import xml.etree.ElementTree

import figures
import pytest
from pages import attention_table, host_tables, measurements, op_pages, pictures, readme, results_page
from pages.measurements import (
    NO_ATTENTION,
    attention_in_engine,
    engine,
    measured,
    single_ops,
    times,
    unmeasured,
    whole_models_table,
)

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.vllm import seam

RESULTS_PAGE = measurements.RESULTS / "README.md"
CONFIG = json.loads((measurements.latency.CONFIGS / "tiny-llama" / "config.json").read_text())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the folder of one GPU's results; of two files the older is the one written first."""
    monkeypatch.setattr(measurements, "RESULTS", tmp_path)
    monkeypatch.setattr(measurements, "committed", lambda path: path.stat().st_mtime_ns)
    (tmp_path / "made-up-gpu").mkdir()
    return tmp_path / "made-up-gpu"


def write(path, text: str, age: int = 0) -> None:
    path.write_text(text)
    os.utime(path, (10**9 - age, 10**9 - age))


def line(us: float, m: int = 1, gpu: str = "Made-up GPU", case: str = "", **more) -> str:
    versions = {"torch": "2.11.0", "vllm": "0.33.0"}
    shape, baselines = {"m": m, "n": 32, "k": 64}, {"torch": 8.0, "vllm tensorwise": 4.0}
    found = {"op": "scaled_mm", "case": case or f"{m}x32x64", "shape": shape, "gpu": gpu, "us": us, "peers": baselines}
    return json.dumps({**found, "copy_gb_s": 1.0, "versions": versions, **more}) + "\n"


def report(
    *results: tuple[str, int, float],
    layers: int | None = 4,
    rank_of: int = 1,
    options: str = "--rank-of 8",
    **more: float,
) -> str:
    versions = {"torch": "2.11.0", "vllm": "0.33.0"}
    lines = [
        {
            "model_id": "llama",
            "side": side,
            "batch_size": batch,
            "decode_ms_per_token": ms,
            "decode_ms_percentiles": {"10": ms - 0.5, "90": ms + 1},
            "input_len": 1,
            "output_len": 64,
            "latencies": [0.1] * 5,
            "num_layers": layers,
            "rank_of": rank_of,
            **more,
        }
        for side, batch, ms in results
    ]
    return json.dumps(
        {
            "hardware": "1 x Made-up GPU",
            "versions": versions,
            "command": f"python it --plot /out/a.png {options}",
            "results": lines,
        }
    )


def test_the_newest_pair_through_the_engine_counts(folder):
    assert engine() == results_page.engine() == "Nothing yet."
    pair = [("without", 1, 3.0), ("with", 1, 2.0), ("without", 16, 5.0)]
    write(folder / "2026-11-21-b-latency.json", report(*pair, rank_of=8))
    write(
        folder / "2026-11-21-c-latency.json", report(("without", 1, 2.0), ("with", 1, 4.0), layers=None, host_us=320.4)
    )
    write(folder / "2026-11-21-a-latency.json", report(("without", 1, 9.0), ("with", 1, 9.0), rank_of=8), age=1)
    rank = "llama, one TP8 rank, no all-reduce | 1 x Made-up GPU"
    assert engine().splitlines()[4:] == [
        f"| {rank} | 4 | 1 x 5 | 1.50x (0.83 to 2.67) |  |  |  |  |  |  |",
        "| llama | 1 x Made-up GPU | all | 1 x 5 | **0.50x** (0.30 to 0.86) |  |  |  |  |  | 320 / 320 |",
    ]
    assert results_page.engine().splitlines()[4:] == [
        f"| {rank} | 4 | 64 | 1 x 5 | 3.00 / 2.00 |",
        "| llama | 1 x Made-up GPU | all | 64 | 1 x 5 | **2.00 / 4.00** |",
    ]


def test_attention_in_the_engine_stands_beside_the_run_without_it(folder):
    """It is not a side of other tables.

    A run with vLLM's own choice of backend is not part of one with a requested backend.
    """

    def runs(name: str, *results: tuple[str, int, float], backend: str = "TRITON_MLA", **environment: str) -> None:
        asked = f"""--engine-args '{{"attention_backend": "{backend}"}}'"""
        made = json.loads(report(*results, options=asked)) | {"commit": "abc", "environment": environment}
        write(folder / f"2026-11-21-{name}-latency.json", json.dumps(made))

    runs("a", ("without", 8, 6.0), ("with", 8, 3.0))
    assert attention_in_engine() == "Nothing yet."
    runs("b", ("with", 8, 4.5), VLLM_ROCM_OPS_SEAMS=NO_ATTENTION)
    runs("c", ("with", 8, 1.0), backend="")
    assert [row.rpartition(" | 1 | ")[2] for row in attention_in_engine().splitlines()[2:]] == [
        "6.00 / 4.50 / 3.00 1.50x |"
    ]
    [row] = engine().splitlines()[4:]
    assert row.startswith("| llama, TRITON_MLA | 1 x Made-up GPU | 4 | 1 x 5 |  | 2.00x (")
    assert results_page.engine().endswith(" | 6.00 / 3.00 |")


@pytest.mark.parametrize(
    ("half", "ranks"), [("--tensor-parallel-size 2", "TP2"), ("--rank-of 2", "one TP2 rank, no all-reduce")]
)
def test_the_newest_profile_counts(folder, half, ranks):
    """The minimum time of the weights is beside it: two layers of tiny-llama on one of two GPUs."""

    def profiled(us: float) -> str:
        rank = {"kernels": {"scaled_mm_skinny_16": [4.0, us]}, "span_us": us + 1, "busy_us": us, "steps": 8}
        made = json.loads(report(options=f"--model tiny-llama --num-layers 2 {half}"))
        made["results"] = [{"model_id": "tiny-llama", "num_layers": 2}]
        ranks = [rank | {"waiting_us": 0.0}, {"span_us": 5.0, "busy_us": 2.0, "waiting_us": 2.0}]
        runs = [("without", ranks), ("with", ranks)]
        made["runs"] = [{"model_id": "tiny-llama", "side": side, "profile": {"8": r}} for side, r in runs]
        return json.dumps(made)

    assert results_page.steps() == results_page.ranks() == "Nothing yet."
    write(folder / "2026-11-21-b-latency.json", profiled(7.0))
    write(folder / "2026-11-21-a-latency.json", profiled(9.0), age=1)
    write(folder / "2026-11-21-ops.jsonl", line(1.0, copy_gb_s=2.0))
    hidden, intermediate, vocabulary, head, key_value = (
        *(CONFIG[name] for name in ("hidden_size", "intermediate_size", "vocab_size")),
        *(CONFIG["hidden_size"] // CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]),
    )
    layer = hidden * (2 * hidden + 2 * key_value * head + 3 * intermediate) // 2  # elements of a rank, two bytes each
    least = 2 * (2 * layer + hidden * vocabulary // 2) / 2.0 / 1e3
    header, _, row = results_page.steps().splitlines()
    cells = dict(zip(header.split(" | "), row.split(" | ")))
    assert cells.pop("| model") == f"| [tiny-llama, {ranks}](made-up-gpu/2026-11-21-b-latency.json)"
    found = {name.strip("| "): cell.strip("| ") for name, cell in cells.items() if cell.strip("| ")}
    assert found == {
        "GPU": "1 x Made-up GPU", "layers": "2", "batch": "8", "step": "8 / 8", "launches": "4 / 4",
        "weights alone": f"{least:.0f}", "FP8 linears": "7 / 7", "idle": "1 / 1",
    }  # fmt: skip
    row = results_page.ranks().splitlines()[2]
    above = f"{8 - least:.0f} {5 - least:.0f}"
    assert row.endswith(f" | 1 x Made-up GPU | 2 | 8 | {above} / {above} | 1 3 / 1 3 | 0 2 / 0 2 |")


def test_starts_and_host_times_show_the_newest_of_each_model(folder):
    def started(with_ms: float) -> str:
        made = json.loads(report(("without", 1, 1.0), ("with", 1, 1.0)))
        for result in made["results"]:
            result["ttft_ms"] = with_ms if result["side"] == "with" else 10.0
        made["runs"] = [{"model_id": "llama", "side": side, "start": {"load_s": 2.0}} for side in ("without", "with")]
        return json.dumps(made)

    assert host_tables.starts() == host_tables.host_times() == "Nothing yet."
    write(folder / "2026-11-21-a-start.json", started(99.0), age=1)
    write(folder / "2026-11-21-b-start.json", started(12.0))
    [row] = host_tables.starts().splitlines()[2:]
    assert row == "| llama | Made-up GPU | 4 | 1 | 2.00 / 2.00 | **10.00 / 12.00** (+20.0 %) |"

    def timed(serves: float) -> str:
        us, apart = {"vLLM's own": 50.0, "ours serves": 50 + serves}, {"ours serves": serves}
        of = {"model": "llama", "seam": "norm", "us": us, "apart_us": apart}
        return "".join(json.dumps(of | {"layer": layer}) + "\n" for layer in "ab")

    write(folder / "2026-11-21-a-host-time.jsonl", timed(1.0), age=1)
    write(folder / "2026-11-21-b-host-time.jsonl", timed(10.5))
    [row] = host_tables.host_times().splitlines()[2:]
    assert row == f"| {folder.name} | llama | `norm` | 2 | 50 | **+10.5** |  |"


def test_attention_is_compared_with_each_baseline(folder):
    def attention(case: str, us: float, **baselines: float) -> str:
        batch, context = map(int, case.split("x"))
        of = {"op": "mla_decode", "shape": {"batch": batch, "context": context}, "peers": baselines}
        return line(us, case=f"model tp8 {case}", **of)

    write(
        folder / "2026-11-21-a-decode-attention.jsonl",
        attention("1x128", 2.0, fast=4.0)
        + attention("2x128", 2.0, fast=1.0, slow=8.0)
        + attention("64x128", 1.0, slow=3.0),
    )
    rows = attention_table.decode().splitlines()[4:]
    short = attention_table.SHORT
    assert rows == [
        f"| model tp8 | {short} | 2 | 1.00x, least **0.50x** | 4.00x, least 4.00x | 1.00x, least **0.50x** |",
        "| model tp8 | longer or more | 1 |  | 3.00x, least 3.00x | 3.00x, least 3.00x |",
    ]


LOWER = " vLLM's compiler would fuse a part of the baseline: expect lower speedups with it."


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("", "vLLM's default compilation and graph capture, vLLM 0.33.0."),
        ("--enforce-eager", "eager: neither compiled nor captured in graphs, vLLM 0.33.0." + LOWER),
        (
            '--engine-args \'{"compilation_config": {"mode": 0}}\'',
            "captured in graphs, without compilation, vLLM 0.33.0." + LOWER,
        ),
        ("--engine-args '{\"compilation_config\": 3}'", "vLLM's default compilation and graph capture, vLLM 0.33.0."),
    ],
)
def test_a_table_through_the_engine_says_how_it_was_measured(folder, options, says):
    pair = [("without", 1, 3.0), ("with", 1, 2.0)]
    write(folder / "2026-11-21-a-latency.json", report(*pair, options=options))
    assert engine().startswith(f"Random weights, 1 token of prompt, {says}\n\n| model |")
    write(folder / "2026-11-21-b-latency.json", report(*pair, rank_of=8, options="--enforce-eager"))
    assert engine().count("| model |") == (2 if "without compilation" in says else 1), (
        "what was measured compiled stands alone"
    )


@pytest.mark.parametrize(
    ("sizes", "says"),
    [("--tensor-parallel-size 4", "TP4 + EP"), ("--tensor-parallel-size 2 --data-parallel-size 2", "TP2 + DP2 + EP")],
)
def test_a_table_through_the_engine_says_over_how_many_gpus(folder, sizes, says):
    experts = sizes + " --engine-args '{\"enable_expert_parallel\": true}'"
    write(folder / "2026-11-21-a-latency.json", report(("without", 1, 3.0), ("with", 1, 2.0), options=experts))
    assert f"\n| llama, {says} | 1 x Made-up GPU | 4 | 1 x 5 | 1.50x (" in engine()


def test_the_spread_covers_all_pairs(folder):
    """n is pairs x iterations; the speedup is the median of the pairs, its bounds are the widest percentiles."""
    pairs = [("without", 1, 3.0), ("with", 1, 2.0), ("without", 1, 4.0), ("with", 1, 2.5)]
    write(folder / "2026-11-21-a-latency.json", report(*pairs))
    assert engine().endswith(f" | 2 x 5 | 1.55x ({2.5 / 3.5:.2f} to {5 / 1.5:.2f}) |  |  |  |  |  |  |")
    assert results_page.engine().endswith(" | 2 x 5 | 3.50 / 2.25 |")


def test_the_switches_of_the_baseline_are_said(folder):
    made = json.loads(report(("without", 1, 3.0), ("with", 1, 2.0)))
    made["environment"] = {"VLLM_USE_DEEP_GEMM": "0", "VLLM_CACHE_ROOT": "/elsewhere"}
    write(folder / "2026-11-21-a-latency.json", json.dumps(made))
    assert ", vLLM 0.33.0 with `VLLM_USE_DEEP_GEMM=0`.\n" in engine()


def test_the_readme_has_whole_models_and_real_parallelism(folder, monkeypatch):
    monkeypatch.setattr(measurements, "layers_of", lambda model: 9)
    pair = [("without", 8, 3.0), ("with", 8, 2.0), ("without", 2, 3.0), ("with", 2, 3.3)]
    write(folder / "2026-11-21-a-latency.json", report(*pair, layers=None))
    write(folder / "2026-11-21-b-latency.json", report(*pair, rank_of=8))
    backend = '--engine-args \'{"attention_backend": "TRITON_ATTN"}\''
    for name, options in (("c", ""), ("d", backend)):
        made = report(*pair, options=f"--data-parallel-size 4 {options}")
        write(folder / f"2026-11-21-{name}-latency.json", made, age=0 if options else 1)
    rows = whole_models_table().splitlines()[4:]
    assert [row.split(" | ")[0] for row in rows] == ["| llama, DP4, TRITON_ATTN, 4 of 9 layers", "| llama"]
    assert rows[1] == "| llama | 1 x Made-up GPU | 1 x 5 |  | 1.50x (0.83 to 2.67) |  |  |  |  |"
    assert "llama, 1 x Made-up GPU" not in texts_of(pictures.speedups())  # it shows few models
    monkeypatch.setattr(pictures, "PROFILED", ("llama",))
    assert {"2", "8", "0.9x", "1.5x", "llama, 1 x Made-up GPU"} <= set(texts_of(pictures.speedups()))


def test_the_newest_line_of_what_is_chosen_counts(folder):
    chosen, others = line(2.0, chosen=True), line(1.0, chosen=False)
    write(
        folder / "2026-11-21-b-gemm.jsonl",
        others + chosen + others + line(8.0, m=8) + line(1.0, m=8, case="x shuffled"),
    )
    write(folder / "2026-11-21-a-gemm.jsonl", line(100.0), age=1)
    write(folder / "2026-11-20-c-gemm.jsonl", line(50.0), age=-1)
    [newest] = measured("gemm")
    assert newest["scaled_mm", "1x32x64"][0]["us"] == 2.0
    rows = single_ops().splitlines()[4:]
    assert rows[0].startswith("| `scaled_mm` | 1 | 2.00x | **0.50x** |  |") and rows[0].endswith("| vllm |")
    assert rows[1].startswith("| `scaled_mm`, shuffled | 1 |  | 4.00x |  |")


def test_unmeasured_products_are_named(folder):
    assert unmeasured() == "No time was ever measured."
    write(folder / "a-gemm.jsonl", line(1.0))
    write(folder / "a-static.jsonl", json.dumps({"op": "rms_norm", "case": "a", "arch": "made up"}))
    every = "MI300X, MI325X, MI308X, MI350X or MI355X"
    assert unmeasured() == f"**No time was ever measured on an {every}.** All times are of Made-up GPU."
    write(folder / "b-latency.json", report(("with", 1, 1.0)).replace("Made-up GPU", "AMD Instinct MI355X"))
    assert "MI325X, MI308X or MI350X.** All times are of AMD Instinct MI355X, Made-up GPU." in unmeasured()
    assert op_pages.measured([ops.rms_norm], op_pages.timed_results()) == "No time of `rms_norm` was ever measured."
    assert f"**No time of `scaled_mm` was ever measured on an {every}.**" in op_pages.measured(
        [ops.scaled_mm], op_pages.timed_results()
    )
    write(folder / "c-ops.jsonl", "".join(line(1.0, gpu=f"AMD {name}", case=name) for name in archs.PRODUCTS))
    assert "No time" not in op_pages.measured([ops.scaled_mm], op_pages.timed_results())


@pytest.mark.parametrize(
    "ratios, text", [([2.0, 0.5], "1.00x"), ([0.99], "**0.99x**"), ([0.996], "1.00x"), ([None], "")]
)
def test_bold_is_what_is_slower(ratios, text):
    assert times(ratios) == text


# The committed results


GONE = results_page.GONE  # the kind of files whose benchmark no longer exists
RESULT_FILES = sorted(path for path in measurements.RESULTS.glob("*/*.jsonl") if measurements.kind_of(path) != GONE)
PAGES = RESULTS_PAGE, readme.DOCS / "benchmarks.md"
TABLES = {
    # kind of file -> the tables that show it
    **{kind: {"ops", "single ops"} for kind in measurements.PER_OP},
    "products": {"ops"},
    "moe": {"ops", "experts"},
    "attention": {"ops", "prefill attention"},
    "decode-attention": {"ops", "decode attention"},
    **{kind: {"ops"} for kind in ("gated-delta-net", "gates", "expert-gates", "four-bit", "mx", "moe-four-bit")},
    "quality": {"quality"},
    "arithmetic": {"arithmetic"},
    "configurations": {"regret"},
    "host-time": {"host time"},
    "serve": {"serving"},
    **{kind: set() for kind in ("predicted", "static", "waits", "compare")},  # in the index alone
}


@pytest.mark.parametrize("file", RESULT_FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_op_of_a_result_file_stands_in_the_tables_of_its_kind(folder, file):
    """Each file is in the index, too."""
    lines = file.read_text().splitlines()
    ops = {line: json.loads(line).get("op") for line in lines}
    path = folder / file.name
    for op in set(ops.values()):
        path.write_text("".join(line + "\n" for line in lines if ops[line] == op))
        blocks = {name: make for page in PAGES for name, make in readme.BLOCKS[page].items()}
        shown = {name for name, make in blocks.items() if make() not in ("", "Nothing yet.")} - {"unmeasured", "index"}
        assert shown == TABLES[measurements.kind_of(file)], f"{op} of {file.name} stands in {shown or 'no table'}"
    [row] = results_page.index().splitlines()[4:]
    assert row.startswith(f"| [{file.name}]({folder.name}/{file.name}) | ") and row.endswith(
        f" | {sum(o == op for o in ops.values())} |"
    )


def test_the_index_has_every_result_file():
    files = [path for path in measurements.RESULTS.glob("*/*") if path.is_file()]
    index = results_page.index()
    assert [path.name for path in files if f"({path.parent.name}/{path.name})" not in index] == []


def test_the_page_of_an_op_shows_every_kind_of_its_results():
    """It shows times of other libraries, from files of any name."""
    timed: dict[str, set[tuple[str, str]]] = {}
    for path in RESULT_FILES:
        for line in measurements.lines_of(path):
            if {"op", "us", "peers"} <= line.keys():
                timed.setdefault(line["op"], set()).add((path.parent.name, measurements.kind_of(path)))
    known, results = {op.name: op for op in op_module.registered()}, op_pages.timed_results()
    assert {"scaled_mm", "flash_attention", "mla_decode"} < timed.keys() & known.keys()
    for name in timed.keys() & known.keys():
        text = op_pages.measured([known[name]], results)
        for gpu, kind in timed[name]:
            assert re.search(rf"/{gpu}/[\d-]+\w+-{kind}\.jsonl", text), f"{kind} of {gpu} is not on the page of {name}"
        assert re.search(r"\| \**\d+\.\d\dx", text), f"the page of {name} has no ratio"


@pytest.mark.parametrize(("largest", "step"), [(26.3, 5), (41.7, 5), (1.9, 0.2), (10.0, 1), (0.11, 0.02)])
def test_an_axis_has_at_most_ten_ticks(largest, step):
    assert figures.svg.tick_step(largest) == pytest.approx(step)


def texts_of(drawn: str) -> list[str]:
    return [element.text for element in xml.etree.ElementTree.fromstring(drawn).iter() if element.tag.endswith("text")]


def test_speedups_are_drawn_in_place():
    """Batch 4 is twice as far along as batch 2, and a speedup is at the height of its label."""
    drawn = figures.speedups({"one": {1: (1.2, 1.1, 1.3), 2: (1.0, 1.0, 1.0), 4: (0.9, 0.8, 0.95)}})
    y = {found[1]: float(found[0]) for found in re.findall(r'y="([\d.]+)" class="right">([\d.]+)x<', drawn)}
    points = re.search(r'class="line s-red" d="M([\d. L]+)', drawn)[1].split("L")
    (first, at_first), (second, at_second), (third, at_third) = (map(float, point.split()) for point in points)
    assert second - first == pytest.approx(third - second, abs=0.2) and second > first
    assert (at_first, at_second, at_third) == (y["1.2"], y["1.0"], y["0.9"]) and at_first < at_second < at_third
    assert f"{y['1.1']:.1f}V{y['1.3']:.1f}" in drawn
    with pytest.raises(ValueError, match="at most 7 series, got 8"):
        figures.speedups({str(i): {1: (1.0, 1.0, 1.0)} for i in range(8)})


def bars(drawn: str, fill: str) -> list[tuple[float, float]]:
    """Return y and height of the bars with a fill. The legend's begin above their origin, at a negative y."""
    found = re.findall(rf'y="([\d.]+)" width="[\d.]+" height="([\d.]+)" {re.escape(fill)}/>', drawn)
    return [(float(y), float(height)) for y, height in found]


def test_predicted_times_are_hatched_and_named():
    measured_points = {"a, b": {1: (1.5, 1.5, 1.5), 8: (1.0, 1.0, 1.0)}}
    drawn = figures.speedups(measured_points, {"a, c": {1: (1.2, 1.1, 1.4), 8: (0.9, 0.8, 1.0)}}, "MI300X")
    assert "MI300X: predicted, never measured" in texts_of(drawn)
    y = {found[1]: float(found[0]) for found in re.findall(r'y="([\d.]+)" class="right">([\d.]+)x<', drawn)}
    faster, slower = bars(drawn, 'fill="url(#hatch-red)"')  # in the color of the measured model
    assert faster == (y["1.2"], pytest.approx(y["1.0"] - y["1.2"], abs=0.1))
    assert slower == (y["1.0"], pytest.approx(y["0.9"] - y["1.0"], abs=0.1))
    sides = {"baseline": {1: (4.0, 3.0, 5.0)}, "plugin": {1: (2.0, 1.0, 3.0)}}
    drawn = figures.predicted_steps({"model": sides}, {"model": {1: 1.5}}, "MI300X")
    [(_, baseline)], [(_, plugin)] = (bars(drawn, f'fill="url(#hatch-{color})"') for color in figures.SIDES.values())
    assert baseline == pytest.approx(2 * plugin, rel=0.01) and {"4.0", "2.0", "plugin, predicted"} <= set(
        texts_of(drawn)
    )
    assert "never measured" in texts_of(drawn)[0]


def test_a_breakdown_stacks_classes_of_each_side():
    sides = {"without": ({"attention": 1.0, "idle": 3.0}, 4.0), "with": ({"attention": 1.0, "idle": 1.0}, 2.0)}
    drawn = figures.breakdown({"model": {"8": sides}})
    (top, first), (_, second) = bars(drawn, 'class="f-blue"')
    (above, idle), (_, less) = bars(drawn, 'class="f-purple"')
    assert above + idle == pytest.approx(top, abs=0.2), "idle is stacked on attention"
    assert first == second and idle == pytest.approx(3 * first, abs=0.2) and less == pytest.approx(first, abs=0.2)
    assert {"attention", "idle", "4.0", "2.0", "batch 8"} <= set(texts_of(drawn))


def test_a_share_of_the_roofline_is_drawn_by_side():
    curves = {("plugin", 1): {128: 0.4, 1024: 0.8}, ("baseline", 1): {128: 0.2, 1024: 0.4}}
    drawn = figures.roofline({"model": curves}, "title")
    y = {found[1]: float(found[0]) for found in re.findall(r'y="([\d.]+)" class="right">([\d]+)%<', drawn)}
    plugin, baseline = (
        re.search(rf'class="line s-red{dashed}" d="M([\d.]+ [\d.]+L[\d.]+ [\d.]+)"', drawn)[1]
        for dashed in ("", " dashed")
    )
    assert [float(at.split()[1]) for at in plugin.split("L")] == [y["40"], y["80"]]
    assert [float(at.split()[1]) for at in baseline.split("L")] == [y["20"], y["40"]]
    assert {"128", "1k", "plugin, batch 1", "best baseline, batch 1"} <= set(texts_of(drawn))


def test_held_out_points_are_hollow():
    points = {"kernel": [(2.0, 2.0, False), (20.0, 25.0, True)]}
    drawn = figures.accuracy(points, "title", 0.25)
    assert drawn.count('class="s-red f-red"') == 1 == drawn.count('class="s-red f-page"')
    height = {found[1]: float(found[0]) for found in re.findall(r'y="([\d.]+)" class="right">([\d.]+)<', drawn)}
    assert f" {height['1.0']:.1f}m-5 0a5" in drawn


def test_a_baselines_share_of_the_roofline_is_of_the_same_bytes(folder, monkeypatch):
    """Half the plugin's where the baseline takes twice as long. Ragged lengths and other batch sizes are left out."""
    drawn = {}
    monkeypatch.setattr(figures, "roofline", lambda models, title: drawn.update(models) or title)
    monkeypatch.setitem(pictures.PEAK_GB_S, "Made-up GPU", 1000.0)

    def attention(case: str) -> str:
        batch, context = map(int, case.split()[0].split("x"))
        of = {"op": "mla_decode", "shape": {"batch": batch, "context": context}, "bandwidth_gb_s": 800.0}
        return line(2.0, case=f"model tp8 {case}", baselines={"slow": 9.0, "fast": 4.0}, **of)

    write(folder / "2026-11-21-a-decode-attention.jsonl", "".join(map(attention, ("1x128", "2x128", "1x128 ragged"))))
    assert pictures.attention() == "Decode attention on Made-up GPU, measured: share of 1 TB/s"
    assert drawn == {"model tp8: MLA, one layer": {("plugin", 1): {128: 0.8}, ("baseline", 1): {128: 0.4}}}


@pytest.mark.parametrize("name", pictures.FIGURES)
def test_a_page_uses_every_figure(name):
    """In both color schemes, and with one text for each."""
    pages = [readme.README, *readme.DOCS.glob("*.md"), RESULTS_PAGE]
    assert any(f"results/{name}.svg)" in page.read_text() for page in pages)
    drawn = pictures.FIGURES[name]()
    xml.etree.ElementTree.fromstring(drawn)
    assert "@media (prefers-color-scheme:dark)" in drawn
    assert set(re.findall(r"var\(--(\w+)\)", drawn)) <= set(re.findall(r"--(\w+):", drawn))


def test_no_other_figure_is_kept():
    drawn = set(pictures.drawn())
    assert set(readme.ROOT.glob("serving_benchmarks/results/**/*.svg")) == drawn


def test_all_layers_and_their_number_are_one_case():
    kept = [
        measurements.layers_kept({"model_id": model, "num_layers": layers})
        for model, layers in (("deepseek-v3", 61), ("deepseek-v3", 16), ("deepseek-v3", None), ("not-shipped", 61))
    ]
    assert kept == [None, 16, None, 61]


def test_recorded_runs_name_present_seams():
    """A seam that is renamed is renamed in the results as well."""
    known, reports = {"", *seam.NAMES}, measurements.RESULTS.rglob("*.json")
    named = {path.name: measurements.seams_of(json.loads(path.read_text())) for path in reports}
    assert any(named.values())
    assert not {name: text for name, text in named.items() if not {*text.replace("-", "").split(",")} <= known}
