"""Generate the documentation: parts of pages, each between `<!-- name -->` and `<!-- /name -->`, whole pages, and figures."""

import pathlib
import re
from collections.abc import Callable

import vllm_rocm_ops
from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, envs
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.tools import doctor
from vllm_rocm_ops.vllm import seam

from . import (
    attention_table,
    compatibility,
    host_tables,
    launch_table,
    measurements,
    op_pages,
    pictures,
    predicted_table,
    quality_table,
    results_page,
    step_table,
    systems,
)
from .measurements import RESULTS, ROOT, markdown, merged
from .op_pages import DOCS

README = ROOT / "README.md"


def variables() -> str:
    """Return a row for each environment variable."""
    rows = ((f"`{v.name}`", f"`{v.default}`" if v.default else "", v.meaning) for v in envs.VARIABLES.values())
    return markdown(("variable", "default", "meaning"), rows)


def seams() -> str:
    """Return a row for each seam of the ROCm platform."""
    loaded = (seam.load(name) for name in seam.NAMES)
    rows = ((f"`{found.name}`", found.replaces) for found in loaded if "rocm" in found.platforms)
    return markdown(("seam", "replaces"), rows)


ATTENTION = {"MHA, GQA": (ops.paged_attention_decode, "key_cache"), "MLA": (ops.mla_decode, "kv_cache")}


def support() -> str:
    """Return the support matrix: the layers that have kernels for each format, and the KV cache dtypes, by GPU."""

    def runs(arch: str, formats: list) -> str:
        cells: dict[str, set[str]] = {}
        for one in formats:
            for kind, what in compatibility.layers_of(one).items():
                cells.setdefault(kind, set()).add(compatibility.selected(what, arch, one))
        served = [kind for kind, of in cells.items() if of == {"selected"}]
        return ", ".join(served) or "vLLM's kernels"

    def cached(arch: str, op: Op, cache: str) -> str:
        dtypes = {getattr(a, cache).dtype for a in op_pages.supported_calls(op, arch)}
        names = ("FP8" if dtype.itemsize == 1 else op_pages.short(dtype).upper() for dtype in dtypes)
        return ", ".join(sorted(names, key=("BF16", "FP16", "FP8").index))

    rows = [
        (name, *(runs(arch, formats) for arch in compatibility.AMD))
        for name, formats in compatibility.formats.GROUPS.items()
    ]
    rows.append(("; ".join(compatibility.formats.REFUSED), *["vLLM's kernels"] * len(compatibility.AMD)))
    caches = merged((name, *(cached(arch, *op) for arch in compatibility.AMD)) for name, op in ATTENTION.items())
    rows += [(f"{names} decode attention: KV cache", *cells) for names, *cells in caches]
    titles = []
    for arch in compatibility.AMD:
        products = ", ".join(name for name, known in archs.PRODUCTS.items() if known.name == arch)
        fp8 = str(archs.ARCHS[arch].fp8_dtype).removeprefix("torch.float8_")
        titles.append(f"{products} ({arch}, FP8 is {fp8})")
    return markdown(("weights and activations", *titles), rows)


def faster() -> str:
    """Return how much faster models decode."""
    return f"- **Faster?** {measurements.fastest_and_slowest()} [Benchmarks and predictions](#performance)"


def requires() -> str:
    """Return the GPUs and versions that the package requires."""
    *others, last = archs.PRODUCTS
    python, emulator, torch = map(compatibility.required, ("requires-python", "python_version", "torch"))
    driver = (ROOT / "csrc" / "runtime" / "driver.cpp").read_text()
    rocm = " or ".join(sorted(set(re.findall(r"libamdhip64\.so\.(\d+)", driver))))
    return (
        f"Requires an {', '.join(others)} or {last}, vLLM {' to '.join(seam.Seam.versions)}, torch {torch} or newer for ROCm, "
        f"Python {python} or newer ({emulator} for the emulator), and the driver library of ROCm {rocm}."
    )


SHOWN = ("vllm-rocm-ops", "GPUs", "measured", "vLLM", "seams")  # of doctor's sections, in README


def doctor_sample() -> str:
    """Return the sections of `doctor` that a user reads first, composed for an MI300X."""
    product, arch = next((product, known_arch.name) for product, known_arch in archs.PRODUCTS.items())
    known = [known for known in map(seam.load, seam.NAMES) if "rocm" in known.platforms]
    state = {
        "package": {"version": vllm_rocm_ops.__version__, "path": ".../site-packages/vllm_rocm_ops"},
        "torch": {"version": "", "hip": "", "cuda": ""},
        "driver": {"backend": "hip", "status": "", "versions": {}},
        "gpus": [{"product": product, "name": f"AMD Instinct {product}", "arch": arch}],
        "code_objects": {arch: {}},
        "tables": {"rows": {}, "folder": ""},
        "measured": [],
        "reached": [],
        "machine": {},
        "vllm": {
            "version": f"{known[0].versions[1]}.0",
            "plugin": True,
            "why_off": "",
            "seams": [{"name": on.name, "on": True, "replaces": on.replaces, "reason": ""} for on in known],
        },
        "emulator": {"why_off": ""},
        "environment": {},
        "ops": {},
    }
    shown, lines = False, []
    for line in doctor.text(state).splitlines():
        shown = line.startswith(SHOWN) or (shown and line.startswith(" "))
        lines += [line] if shown else []
    return "\n".join(("```", "$ vllm-rocm-ops doctor", *lines, "```"))


BLOCKS: dict[pathlib.Path, dict[str, Callable[[], str]]] = {
    README: {
        "unmeasured": measurements.unmeasured,
        "faster": faster,
        "engine": measurements.whole_models_table,
        "predicted": step_table.readme,
        "support": support,
        "requires": requires,
        "doctor": doctor_sample,
    },
    compatibility.PAGE: compatibility.TABLES,
    compatibility.DRAFTS_PAGE: {"drafts": compatibility.drafts_table},
    DOCS / "README.md": {
        "ops": lambda: op_pages.index(standalone=False),
        "standalone ops": lambda: op_pages.index(standalone=True),
        "explain": lambda: op_pages.explanation(ops.fused_add_rms_norm_static_fp8_quant, "--shape", "1x16384"),
        "numerics": op_pages.numerics,
        "quantization": op_pages.conversion,
    },
    DOCS / "configuration.md": {"variables": variables, "seams": seams},
    DOCS / "benchmarks.md": {
        "unmeasured": measurements.unmeasured,
        "engine": measurements.engine,
        "serving": measurements.serving,
        "attention in the engine": measurements.attention_in_engine,
        "decode attention": attention_table.decode,
        "prefill attention": attention_table.prefill,
        "experts": measurements.experts,
        "single ops": measurements.single_ops,
        "regret": measurements.regret,
        "host time": host_tables.host_times,
        "starts": host_tables.starts,
        "quality": quality_table.quality,
        "arithmetic": quality_table.arithmetic,
    },
    DOCS / "tuning.md": {"defaults": compatibility.defaults_table},
    DOCS / "timing.md": {"accuracy": predicted_table.accuracy},
    ROOT / "serving_benchmarks" / "timing_study" / "notes.md": {
        "published": predicted_table.published,
        "simpler": predicted_table.simpler,
        "facts": predicted_table.facts,
        "profiles": step_table.h200,
        "constants": step_table.constants,
        "times": step_table.times,
    },
    DOCS / "decode_steps.md": {
        "steps": step_table.steps,
        "worst": step_table.worst,
        "published": step_table.published,
        "others": step_table.others,
    },
    RESULTS / "README.md": {
        "engine": results_page.engine,
        "steps": results_page.steps,
        "ranks": results_page.ranks,
        "launches": launch_table.launches,
        "ops": results_page.ops,
        "index": results_page.index,
    },
}


def fresh(path: pathlib.Path) -> str:
    """Return a file's text with every generated part written anew."""
    text = path.read_text()
    for name, make in BLOCKS[path].items():
        block = f"<!-- {name} -->\n{make()}\n<!-- /{name} -->"
        text, count = re.subn(
            rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, block=block: block, text, flags=re.DOTALL
        )
        if count != 1:
            raise ValueError(f"{path.relative_to(ROOT)} must have the part {name} once, got {count} times")
    return text


def documents() -> dict[pathlib.Path, str]:
    """Return the wanted text of every generated file, and of every file with generated parts."""
    pages = {systems.PAGE: systems.page()}
    return {path: fresh(path) for path in BLOCKS} | op_pages.pages() | pages | pictures.drawn()
