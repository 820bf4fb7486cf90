"""Generate the documentation: parts of pages, each between `<!-- name -->` and `<!-- /name -->`, whole pages, and figures."""

import pathlib
import re
from collections.abc import Callable

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, envs
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.vllm import seam

from . import (
    attention_table,
    compatibility,
    host_tables,
    launch_table,
    measurements,
    models,
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
        served = [
            kind + of.pop().removeprefix("selected")
            for kind, of in cells.items()
            if len(of) == 1 and min(of).startswith("selected") and "not at all" not in min(of)
        ]
        return ", ".join(served) or "vLLM's kernels"

    def cached(arch: str, op: Op, cache: str) -> str:
        dtypes = {getattr(a, cache).dtype for a in op_pages.supported_calls(op, arch)}
        names = ("FP8" if dtype.itemsize == 1 else op_pages.short(dtype).upper() for dtype in dtypes)
        return ", ".join(sorted(names, key=("BF16", "FP16", "FP8").index))

    rows = [
        (name, *(runs(arch, formats) for arch in compatibility.AMD))
        for name, formats in compatibility.formats.GROUPS.items()
    ]
    rows.append(("; ".join(compatibility.formats.REFUSED), *["vLLM's kernels, if any"] * len(compatibility.AMD)))
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
    return f"- **How much faster?** {measurements.fastest_and_slowest()} [Measured and predicted](#how-much-faster)"


def requires() -> str:
    """Return the GPUs and versions that the package requires."""
    *others, last = archs.PRODUCTS
    python, emulator, torch = map(compatibility.required, ("requires-python", "python_version", "torch"))
    *earlier, rocm = compatibility.rocm_versions()
    return (
        f"**Requires** an {', '.join(others)} or {last}, vLLM {' to '.join(seam.Seam.versions)}, torch {torch} or newer for ROCm, "
        f"Python {python} to {[*compatibility.SUITES][-1]} ({emulator} on for the emulator; later ones build from source), and the driver library of "
        f"ROCm {', '.join(earlier)} or {rocm}."
    )


BLOCKS: dict[pathlib.Path, dict[str, Callable[[], str]]] = {
    README: {
        "unmeasured": measurements.unmeasured,
        "faster": faster,
        "engine": measurements.whole_models_table,
        "predicted": step_table.readme,
        "recipes": models.your_recipe,
        "support": lambda: f"{support()}\n\n{requires()}",
    },
    compatibility.PAGE: compatibility.TABLES
    | {"models": models.model_table, "answer": models.answer, "steps": models.step_table},
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
