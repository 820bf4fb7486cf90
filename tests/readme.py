"""Writes the generated parts of README.md, each between `<!-- name -->` and `<!-- /name -->`: python tests/readme.py"""

import functools
import json
import pathlib
import re
import shlex
import statistics
import subprocess
from collections.abc import Iterable, Iterator

import torch

from vllm_rocm_ops import arch as archs
from vllm_rocm_ops import cli, envs
from vllm_rocm_ops import op as op_module

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "serving_benchmarks" / "results"
EXAMPLE = "explain fused_add_rms_norm_static_fp8_quant --shape 1x16384 --arch gfx942"
SHOWN_ROWS = (1, 8, 32, 128, 512, 2048)


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


@functools.cache
def launches_of(op, arch_name: str) -> tuple:
    """(arguments, outputs, launch) for every launch of every case of an op in every configuration that fits."""
    arch = archs.ARCHS[arch_name]
    found = []
    for case in op.cases():
        a = op.Arguments(*case.make("meta", torch.Generator().manual_seed(0), arch.fp8_dtype))
        if all(holds for _, holds in op.envelope(a, arch)):
            outputs = op.allocate(a)
            found += [
                (a, outputs, launch) for config in op.configs(a, arch) for launch in op.plan(config, outputs, a, arch)
            ]
    return tuple(found)


def switches() -> str:
    rows = ((f"`{v.name}`", f"`{v.default}`" if v.default else "", v.meaning) for v in envs.VARIABLES.values())
    return markdown(("variable", "default", "meaning"), rows)


def op_table() -> str:
    def short(dtype: torch.dtype) -> str:
        return next(name for name, known in cli.DTYPES.items() if known == dtype)

    def cell(op, arch: str) -> str:
        found = launches_of(op, arch)
        inputs = dict.fromkeys(short(a[0].dtype) for a, _, _ in found)
        outputs = {short((o if isinstance(o, torch.Tensor) else o[0]).dtype) for _, o, _ in found}
        to = "" if outputs == set(inputs) else f" → {', '.join(sorted(outputs))}"
        return f"{', '.join(inputs)}{to}"

    header = ("op", "computes", *archs.ARCHS)
    rows = (
        (f"`{op.name}`", op.__doc__.strip().partition("\n")[0], *(cell(op, arch) for arch in archs.ARCHS))
        for op in op_module.registered()
    )
    return markdown(header, rows)


def explanation() -> str:
    arguments = shlex.split(EXAMPLE)
    options = dict(zip(arguments[2::2], arguments[3::2]))
    op = next(op for op in op_module.registered() if op.name == arguments[1])
    explained = cli.explain(op, options["--arch"], cli.parse_shape(options["--shape"]))
    return f"```\n$ vllm-rocm-ops {EXAMPLE}\n{explained}\n```"


def committed(path: pathlib.Path) -> int:
    """When a file was last committed; later than all others if it never was."""
    git = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct", "--", str(path)]
    return int(subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip() or 2**62)


def newest_lines(folder: pathlib.Path, kinds: Iterable[str]) -> dict[tuple[str, str], tuple[dict, pathlib.Path]]:
    """The last line of every case in a folder's results of these kinds, and its file."""
    newest = {}
    for path in sorted(
        (path for kind in kinds for path in folder.glob(f"*-{kind}.jsonl")),
        key=lambda path: (committed(path), path.name),
    ):
        for line in map(json.loads, path.read_text().splitlines()):
            newest[line["op"], line["case"]] = line, path
    return newest


def measured(*kinds: str) -> Iterator[dict[tuple[str, str], tuple[dict, pathlib.Path]]]:
    """`newest_lines` of each folder of results that has any of these kinds."""
    folders = sorted(path for path in RESULTS.glob("*") if path.is_dir())
    return filter(None, (newest_lines(folder, kinds) for folder in folders))


def time(us: float | None) -> str:
    return "" if us is None else f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def links(paths: Iterable[pathlib.Path]) -> str:
    return ", ".join(f"[{path.name}]({path.relative_to(ROOT).as_posix()})" for path in sorted(set(paths)))


def results() -> str:
    """One table per GPU that has been measured: each op and size, beside the peer named in its row."""
    tables = []
    for newest in measured("ops", "gemm"):
        lines = [line for line, _ in newest.values()]
        groups: dict[tuple[str, str], dict[int, dict]] = {}
        for line in lines:
            rows, *sizes = line["shape"].values()
            layout = ", shuffled" if line["case"].endswith("shuffled") else ""
            groups.setdefault((line["op"], " x ".join(map(str, sizes)) + layout), {})[rows] = line
        shown = [rows for rows in SHOWN_ROWS if any(rows in group for group in groups.values())]
        body = []
        for (op, size), group in groups.items():
            best = {rows: min(line["peers"], key=line["peers"].get, default=None) for rows, line in group.items()}
            pairs = {rows: (line["us"], line["peers"].get(best[rows])) for rows, line in group.items()}
            ratios = [theirs / ours for ours, theirs in pairs.values() if theirs]
            cells = [" / ".join(map(time, pairs[rows])) if rows in pairs else "" for rows in shown]
            peer = " or ".join(sorted({name.split()[0] for name in best.values() if name}))
            versus = f"{statistics.geometric_mean(ratios):.2f}x {peer}, least {min(ratios):.2f}x" if ratios else ""
            body.append((f"`{op}`", size, *cells, versus))
        versions = sorted({f"{k} {v}" for line in lines for k, v in line["versions"].items() if k in ("torch", "vllm")})
        sources = links(path for _, path in newest.values())
        bandwidth = statistics.median(line["copy_gb_s"] for line in lines)
        header = ("op", "size", *(f"{rows} row{'s' * (rows > 1)}" for rows in shown), "all rows: geometric mean")
        tables.append(
            f"**{lines[0]['gpu']}**, {', '.join(versions)}; a copy reads and writes {bandwidth:.0f} GB/s. Microseconds, ours / "
            f"best peer.\nEvery case with every peer: {sources}\n\n" + markdown(header, body)
        )
    return "\n\n".join(tables) or "Nothing yet."


def experts() -> str:
    """One table per GPU on which experts were timed: each rank's share, beside the best of vLLM's."""
    tables = []
    for newest in measured("moe"):
        groups: dict[str, dict[int, dict]] = {}
        for line, _ in newest.values():
            case, _, weights = line["case"].split()
            groups.setdefault(f"{case}, {weights}", {})[line["shape"]["m"]] = line
        shown = sorted({m for group in groups.values() for m in group})
        body = []
        for case, group in groups.items():
            best = {m: min(line["peers"].values(), default=None) for m, line in group.items()}
            cells = [f"{time(group[m]['us'])} / {time(best[m])}" if m in group else "" for m in shown]
            ratios = [best[m] / line["us"] for m, line in group.items() if best[m] and line["us"]]
            body.append((case, *cells, f"{statistics.geometric_mean(ratios):.2f}x, least {min(ratios):.2f}x"))
        [line, _], *_ = newest.values()
        header = ("rank of DeepSeek-V3", *(f"{m} token{'s' * (m > 1)}" for m in shown), "geometric mean")
        tables.append(
            "All launches of one layer's experts, random routing, microseconds, ours / the best of vLLM's fused MoE (Triton), by"
            f" `python serving_benchmarks/moe.py`.\n**{line['gpu']}**, torch {line['versions']['torch']}, vllm"
            f" {line['versions']['vllm']}: {links(path for _, path in newest.values())}\n\n" + markdown(header, body)
        )
    return "\n\n".join(tables)


def decode() -> str:
    """One table per GPU on which decode steps were timed; nothing where there was none."""
    tables = []
    for newest in measured("decode_step"):
        body = []
        for line, _ in sorted(
            newest.values(), key=lambda found: (found[0]["case"].rpartition(" ")[0], found[0]["shape"]["batch"])
        ):
            what, _, batch = line["case"].rpartition(", batch ")
            stock, ours = line["peers"]["stock"], line["us"]
            milliseconds = (f"{us / 1000:.2f}" for us in (stock, ours, line["floor_us"]))
            launches = " / ".join(str(line["launches"][path] or "?") for path in ("stock", "ours"))
            body.append((what, batch, *milliseconds, f"{stock / ours:.2f}x", launches, ", ".join(line["left_out"])))
        [line, _], *_ = newest.values()
        header = ("step", "batch", "stock ms", "ours ms", "floor ms", "ratio", "launches, stock / ours", "left out")
        tables.append(
            "A whole decode step of one rank, all layers in one graph, vLLM's kernels (stock) beside the same step with ours,"
            f" by `python serving_benchmarks/decode_step.py`.\n**{line['gpu']}**, torch {line['versions']['torch']}, vllm"
            f" {line['versions']['vllm']}: {links(path for _, path in newest.values())}\n\n" + markdown(header, body)
        )
    return "\n\n".join(tables)


OF_A_KERNEL = {
    "waves per block": lambda line: f"{line['waves_per_block']}",
    "VGPRs": lambda line: f"{line['vgprs']}",
    "AGPRs": lambda line: f"{line['agprs']}",
    "SGPRs": lambda line: f"{line['sgprs']}",
    "spills": lambda line: f"{line['vgpr_spills'] + line['sgpr_spills']}",
    "LDS bytes": lambda line: f"{line['lds']}",
    "waves that a compute unit holds": lambda line: f"{line['occupancy']}",
}
OF_A_LAYER = {
    "waves per compute unit": lambda line: f"{line['waves_per_compute_unit']:.0f}",
    "KB in flight per compute unit": lambda line: f"{line['bytes_in_flight_per_compute_unit'] / 1024:.0f}",
    "HBM bytes / least": lambda line: f"{line['hbm_bytes_over_minimum']:.2f}",
    "LDS cycles lost to banks": lambda line: f"{100 * line['lds_conflicts']:.0f} %",
    "issue cycles per byte": lambda line: f"{line['issue_cycles_per_byte']:.2f}",
    "matrix cycles per byte": lambda line: f"{line['matrix_cycles_per_byte']:.2f}",
}


def each(values: Iterable[str]) -> str:
    """All values, or the one that they are."""
    values = list(values)
    return values[0] if len(set(values)) == 1 else " / ".join(values)


def static() -> str:
    """Two tables per arch: its GEMM kernels, and the layers of decode with a value for each M."""
    tables = []
    for newest in measured("static"):
        lines = [line for line, _ in newest.values()]
        layers: dict[tuple[str, str], list[dict]] = {}
        for line in lines:
            shape = line["shape"]
            layers.setdefault((line["case"].rpartition(" ")[0], f"{shape['n']} x {shape['k']}"), []).append(line)
        tokens = ", ".join(dict.fromkeys(str(line["shape"]["m"]) for line in lines))
        kernels = {line["kernel"]: line for line in lines}
        of_kernels = [(f"`{name}`", *(show(line) for show in OF_A_KERNEL.values())) for name, line in kernels.items()]
        of_layers = [
            (*layer, *(each(map(show, group)) for show in OF_A_LAYER.values())) for layer, group in layers.items()
        ]
        tables.append(
            f"**{lines[0]['arch']}**, static and emulated, never a time; M = {tokens}. A byte at HBM's full rate takes as long as"
            f" {lines[0]['cycles_per_byte_at_bandwidth']:.2f} issue cycles.\nEvery layer and M with its kernel:"
            f" {links(path for _, path in newest.values())}\n\n"
            + markdown(("kernel", *OF_A_KERNEL), of_kernels)
            + "\n\n"
            + markdown(("layer", "N x K", *OF_A_LAYER), of_layers)
        )
    return "\n\n".join(tables) or "Nothing yet."


BLOCKS = {
    "switches": switches,
    "ops": op_table,
    "explain": explanation,
    "results": results,
    "experts": experts,
    "decode": decode,
    "static": static,
}


def fresh(text: str) -> str:
    """README's text with every generated part as it should be."""
    for name, make in BLOCKS.items():
        block = f"<!-- {name} -->\n{make()}\n<!-- /{name} -->"
        text, count = re.subn(
            rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, block=block: block, text, flags=re.DOTALL
        )
        if count != 1:
            raise ValueError(f"README.md must have the part {name} once, has it {count} times")
    return text


if __name__ == "__main__":
    README.write_text(fresh(README.read_text()))
