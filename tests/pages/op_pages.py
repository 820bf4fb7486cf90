"""A page for each op file, made from its ops' specs, an example, vLLM's seams, the rules for results and the files of results."""

import ast
import dataclasses
import functools
import inspect
import pathlib
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator

import torch

from vllm_rocm_ops.core import arch as archs
from vllm_rocm_ops.core import correctness, quantization
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import joined
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.tools import explain
from vllm_rocm_ops.vllm import seam

from . import examples, measurements
from .measurements import ROOT, markdown

DOCS = ROOT / "vllm_rocm_ops" / "docs"
SEAMS = ROOT / "vllm_rocm_ops" / "vllm"
MODELS, TP = ("llama-3.1-405b-fp8", "deepseek-v3"), 8
WIDTH = 120
EXAMPLE = {"op": "fused_add_rms_norm_static_fp8_quant", "shape": "1x16384", "arch": "MI300X"}
GUIDES = (
    "compatibility",
    "configuration",
    "benchmarks",
    "benchmarking",
    "tuning",
    "development",
    "architecture",
    "emulator",
    "timing",
    "all_reduce",
    "decode_steps",
    "CHANGELOG",
)
WRITTEN = "<!-- Written by `python tests/pages`: change what it is made of, not this page. -->"
FIRST = next(iter(archs.ARCHS))


# Specs


@functools.cache
def cases_of(op: Op, arch_name: str) -> tuple:
    """(name, arguments) of every case."""
    dtype = archs.ARCHS[arch_name].fp8_dtype
    made = ((case.name, case.make("meta", torch.Generator().manual_seed(0), dtype)) for case in op.cases())
    return tuple((name, op.Arguments(*arguments)) for name, arguments in made)


@functools.cache
def launches_of(op: Op, arch_name: str) -> tuple:
    """(arguments, outputs, launch) for every launch of every case of an op in every configuration that fits."""
    arch = archs.ARCHS[arch_name]
    found = []
    for _, a in cases_of(op, arch_name):
        if all(holds for _, holds in op.envelope(a, arch)):
            outputs = op.allocate(a)
            found += [
                (a, outputs, launch) for config in op.configs(a, arch) for launch in op.plan(config, outputs, a, arch)
            ]
    return tuple(found)


def short(dtype: torch.dtype) -> str:
    return next((name for name, known in explain.DTYPES.items() if known == dtype), str(dtype).removeprefix("torch."))


def types(op: Op, arch_name: str) -> str:
    """Return the dtypes that the kernels take and, if they differ, the dtypes that they return."""
    found = launches_of(op, arch_name)
    inputs = dict.fromkeys(short(a[0].dtype) for a, _, _ in found)
    outputs = {short(out.dtype) for _, output, _ in found for out in correctness.as_tuple(output)[:1]}
    to = "" if not outputs or outputs == set(inputs) else f" → {', '.join(sorted(outputs))}"
    return f"{', '.join(inputs)}{to}"


OPERANDS = ("b", "w1", "k", "key_cache", "kv_cache")


def operand(a) -> torch.Tensor | None:
    """Return what the first argument is multiplied with, or is written to, if it has a dtype of its own."""
    return next((getattr(a, name) for name in OPERANDS if name in a._fields), None)


def by_file() -> dict[str, list[Op]]:
    """Return the ops of each op file, by its name."""
    found: dict[str, list[Op]] = {}
    for op in op_module.registered():
        found.setdefault(file_of(op).stem, []).append(op)
    return found


def file_of(op: Op) -> pathlib.Path:
    return pathlib.Path(inspect.getmodule(op.reference).__file__)


def link(name: str) -> str:
    """Return the address of an op's page, and of its heading where several ops share the page."""
    file, of = next((file, of) for file, of in by_file().items() if name in {op.name for op in of})
    return f"{file}.md" + (f"#{name}" if len(of) > 1 else "")


def merged(ops: list[Op], lines_of: Callable[[Op], Iterable[str]]) -> Iterator[str]:
    """Yield each line once: first those of all ops, then those of some with their names."""
    found: dict[str, list[str]] = {}
    for op in ops:
        for line in lines_of(op):
            found.setdefault(line, []).append(f"`{op.name}`")
    yield from (line for line, names in found.items() if len(names) == len(ops))
    for line, names in found.items():
        if len(names) < len(ops):
            mark = "- " * line.startswith("- ")
            yield f"{mark}{', '.join(names)}: {line.removeprefix('- ')}"


def documentation(of) -> tuple[str, str]:
    """The first line of a docstring, and the rest with one paragraph per line."""
    first, _, rest = inspect.getdoc(of).partition("\n")
    return first, "\n\n".join(" ".join(paragraph.split()) for paragraph in rest.strip().split("\n\n"))


def paragraphs(of) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in inspect.getdoc(of).split("\n\n")]


def sentence(of) -> str:
    """A docstring on one line."""
    return " ".join(inspect.getdoc(of.func if isinstance(of, functools.partial) else of).split())


# Arguments and rules


def signature(op: Op) -> str:
    """The reference's signature, one argument per line."""

    def annotation(of) -> str:
        return inspect.formatannotation(of).replace("torch.Tensor", "Tensor")

    of = inspect.signature(op.reference, eval_str=True)
    lines = [
        f"    {parameter.name}: {annotation(parameter.annotation)}"
        + ("" if parameter.default is parameter.empty else f" = {parameter.default!r}")
        + ",\n"
        for parameter in of.parameters.values()
    ]
    return f"{op.name}(\n{''.join(lines)}) -> {annotation(of.return_annotation)}"


def value(of) -> str:
    """A short text for an argument."""
    if isinstance(of, torch.Tensor):
        return f"{short(of.dtype)}[{' x '.join(map(str, of.shape))}]"
    return short(of) if isinstance(of, torch.dtype) else str(of)


def arguments(ops: list[Op]) -> str:
    """Return each argument with what contracts require of it, in the case of each op with the most requirements."""
    found: dict[str, dict[str, tuple[str, str, list[str]]]] = {}
    for op in ops:
        _, a = max(cases_of(op, FIRST), key=lambda case: (len(list(op.contract(case[1]))), case[1][0].numel() > 0))
        wanted: dict[str, list[str]] = {}
        for argument, must_be, _, _ in op.contract(a):
            wanted.setdefault(argument, []).append(must_be.replace("torch.", ""))
        for argument in dict.fromkeys((*a._fields, *wanted)):
            must = "; ".join(wanted.get(argument, []))
            alike = found.setdefault(argument, {}).setdefault(
                re.sub(r"\d+", "0", must), (value_of(a, argument), must, [])
            )
            alike[2].append(f"`{op.name}`")
    rows = []
    for argument, by_rule in found.items():
        several = len(by_rule) > 1 or len(next(iter(by_rule.values()))[2]) < len(ops)
        for shown, must, names in by_rule.values():
            rows.append((f"`{argument}`", shown, must, ", ".join(names) if several else "all"))
    about = "A call that breaks a rule raises ValueError and writes nothing. Sizes are of a test case."
    header = ("argument", "for example", "must be", "ops")
    return f"{about}\n\n" + (
        markdown(header, rows) if len(ops) > 1 else markdown(header[:3], [row[:3] for row in rows])
    )


def value_of(a, argument: str) -> str:
    return value(getattr(a, argument, ""))


def rules(ops: list[Op]) -> str:
    """Return every rule of the envelopes in any case: first the rules for all calls of all ops, then those for some."""
    scope: dict[str, dict[str, str]] = {}
    held = set()
    for op in ops:
        met: dict[str, dict[str, object]] = {}
        for arch in archs.ARCHS.values():
            for name, a in cases_of(op, arch.name):
                for rule, holds in op.envelope(a, arch):
                    met.setdefault(rule, {})[name] = a
                    held |= {rule} if holds else set()
        for rule, cases in met.items():
            name, a = next(iter(cases.items()))
            sizes = ", ".join(f"{name} {size}" for name, size in op.problem(a).items())
            some = "" if len(cases) == len(cases_of(op, FIRST)) else f"`{name}` ({sizes})"
            scope.setdefault(rule, {})[op.name] = some
    groups: dict[tuple, list[str]] = {}
    for rule in sorted(scope, key=lambda rule: not any(arch in rule for arch in archs.ARCHS)):
        by_op = scope[rule]
        everywhere = tuple(f"`{name}`" for name, some in by_op.items() if not some)
        in_part = tuple(f"`{name}`" for name, some in by_op.items() if some)
        example = next(filter(None, by_op.values()), "")
        groups.setdefault((everywhere, in_part, example if len(ops) == 1 else example.partition(" (")[0]), []).append(
            rule
        )
    parts = []
    for (everywhere, in_part, example), group in sorted(groups.items(), key=lambda of: (-len(of[0][0]), len(of[0][1]))):
        said = [", ".join(everywhere)] if everywhere and len(everywhere) < len(ops) else []
        if in_part:
            which = f" of {', '.join(in_part)}" if len(in_part) < len(ops) else ""
            said.append(f"some calls{which}, such as {example}")
        if said:
            parts.append(f"For {'; for '.join(said)}:")
        parts.append("\n".join(f"- {rule.replace('torch.', '')}{'' if rule in held else ': never'}" for rule in group))
    return "\n\n".join(parts)


# Support


SCALED = ("scale", "scale_a", "scale_b", "q_scale", "k_scale", "v_scale", "p_scale", "kv_scale", "w1_scale")


def granularity(op: Op, a, name: str) -> str:
    """Return what a scale of a call is for."""
    scale = getattr(a, name)
    e8m0 = scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
    if "mxfp8" in op.name or (e8m0 and name == "w1_scale"):
        return "e8m0 per 1x32"
    if op.name == "block_scaled_mm" or getattr(a, "block_scales", False) or (name == "w1_scale" and scale.dim() == 3):
        return "per block, float32 or e8m0" if op.name == "block_scaled_mm" else "per block"
    if scale.numel() == 1 or (name == "w1_scale" and scale.dim() == 1):
        return "per tensor"
    return {"scale_b": "per column", "w1_scale": "per row"}.get(name, "per row" if name == "scale_a" else "per head")


def scales(op: Op, calls: Iterable) -> str:
    """Return the scales that calls take, and those of their results."""
    found: dict[str, list[str]] = {}
    for a in calls:
        for name in (name for name in SCALED if isinstance(getattr(a, name, None), torch.Tensor)):
            kinds = found.setdefault(f"`{name}`", [])
            kinds += [kind] if (kind := granularity(op, a, name)) not in kinds else []
        if op.name.endswith("_mxfp8_quant"):
            found["dynamic,"] = ["e8m0 per 1x32"]
        elif "group_size" in a._fields:
            found["dynamic,"] = ["per block of a row"]
        elif {"scale_ub", "quant_dtype"} <= set(a._fields):
            found["dynamic,"] = ["per row"]
    by_kind: dict[str, list[str]] = {}
    for name, kinds in found.items():
        by_kind.setdefault(" or ".join(sorted(kinds)), []).append(name)
    return "; ".join(f"{', '.join(names)} {kind}" for kind, names in by_kind.items()) or "none"


def support(ops: list[Op]) -> str:
    """Return the matrix of dtypes, scales and GPUs: a row for each op and dtype of what the first argument is multiplied with."""
    rows = []
    for op in ops:
        kinds: dict[str, dict[str, list[tuple]]] = {}
        for arch in archs.ARCHS:
            for launch in launches_of(op, arch):
                kinds.setdefault(kind_of(op, launch[0], arch), {}).setdefault(arch, []).append(launch)
        alike: dict[tuple[str, ...], list[str]] = {}
        for (kind, _), by_arch in kinds.items():
            found = [(arch, *launch) for arch, launches in by_arch.items() for launch in launches]
            inputs = dict.fromkeys(of_gpu(a[0], op, arch) for arch, a, *_ in found)
            made = [(arch, a[0], out) for arch, a, of, _ in found for out in correctness.as_tuple(of)[:1]]
            outputs = dict.fromkeys(of_gpu(out, op, arch) for arch, _, out in made)
            differ = any(given.dtype != out.dtype for _, given, out in made)
            here = ("kernels" if arch in by_arch else "PyTorch" for arch in archs.ARCHS)
            results = ", ".join(outputs) if differ else "as inputs" if made else "in place"
            cells = ", ".join(inputs), scales(op, [a for _, a, *_ in found]), results, *here
            alike.setdefault(cells, []).append(kind)
        rows += [(f"`{op.name}`", inputs, ", ".join(others), *rest) for (inputs, *rest), others in alike.items()]
    header = ("op", "inputs", "weights or cache", "scales", "results", *archs.ARCHS)
    shown = [place for place in range(len(header)) if any(row[place] for row in rows) and (place or len(ops) > 1)]
    fp8 = ", ".join(f"{str(of.fp8_dtype).removeprefix('torch.float8_')} on {name}" for name, of in archs.ARCHS.items())
    about = "Combinations that test cases cover. PyTorch computes what [the rules](#when-kernels-run) exclude."
    if any("e4m3" in row for row in rows):
        about += f" e4m3 is {fp8}."
    return f"{about}\n\n" + markdown(
        [header[place] for place in shown], [[row[place] for place in shown] for row in rows]
    )


def kind_of(op: Op, a, arch_name: str) -> tuple[str, bool]:
    """Return the dtype of what the first argument is multiplied with, and whether its scales are e8m0 per 1x32."""
    other = operand(a)
    is_like = other is not None and other.dtype == a[0].dtype and other.dtype.itemsize == 2
    is_mx = getattr(a, "w1_scale", None) is not None and granularity(op, a, "w1_scale") == "e8m0 per 1x32"
    return "as inputs" if is_like else of_gpu(other, op, arch_name), is_mx


def of_gpu(tensor: torch.Tensor | None, op: Op, arch_name: str) -> str:
    """Return a dtype's name, where a GPU's FP8 dtypes are e4m3 and e5m2."""
    if tensor is None:
        return ""
    is_own = tensor.dtype == archs.ARCHS[arch_name].fp8_dtype and "mxfp8" not in op.name
    return "e4m3" if is_own else short(tensor.dtype).removeprefix("float8_").replace("e5m2fnuz", "e5m2")


# Kernels


def kernels(ops: list[Op]) -> str:
    """Return the sources, the parts of a configuration, and how one is chosen."""
    files = {launch.module for op in ops for arch in archs.ARCHS for *_, launch in launches_of(op, arch)}
    return "Sources: " + ", ".join(f"[{file}.hip](../../csrc/ops/{file}.hip)" for file in sorted(files)) + "."


def configurations(ops: list[Op]) -> str:
    def lines(op: Op) -> Iterator[str]:
        for of in dict.fromkeys(
            type(config)
            for arch in archs.ARCHS.values()
            for _, a in cases_of(op, arch.name)
            for config in op.configs(a, arch)
        ):
            yield f"- `{of.__name__}({', '.join(part.name for part in dataclasses.fields(of))})`: {sentence(of)}"
        if op.cost is not None:
            yield "- Default: the lowest predicted cost. `vllm-rocm-ops explain` lists all configurations with their costs."
        elif op.default.__doc__:
            yield f"- Default: {sentence(op.default)}"
        key = ", ".join(("compute_units", *op.problem(cases_of(op, FIRST)[0][1])))
        yield f"- A tuned row, which `vllm-rocm-ops tune` writes, overrides the default. Its key: {key}."

    return "\n".join(merged(ops, lines))


# Results


def rules_for_results(op: Op) -> list[str]:
    """Return the rules for results."""
    c = correctness
    launches = [of for arch in archs.ARCHS for of in launches_of(op, arch)]
    outputs = [output for _, output, _ in launches] + [getattr(a, name) for a, *_ in launches for name in op.inexact]
    dtypes = {tensor.dtype for output in outputs for tensor in c.as_tuple(output)}
    floats = {dtype for dtype in dtypes if dtype.is_floating_point}
    lines = [
        "- NaNs are where the reference has them, and nowhere else.",
    ]
    if dtypes - floats:
        lines.append("- Integers are those of the reference.")
    if not op.sums and any(dtype.itemsize < 4 for dtype in floats):
        lines.append(
            f"- No element of 8 or 16 bits is off by more than one ULP. At most {100 * c.OFF_BY_ONE:g} % of the elements, or two, are "
            "off."
        )
    if any(dtype.itemsize > 1 for dtype in floats):
        lines.append(
            f"- Elements of 16 or 32 bits: against float64, the largest error is at most {c.LARGEST_ERROR:g} times the reference's "
            f"and the mean error {c.MEAN_ERROR:g} times, plus {c.FLOOR:g} of the largest element."
        )
    if torch.float32 in floats and not op.sums:
        lines.append("- Errors of 32-bit elements are relative to the element.")
    if op.name in c.PRODUCTS:
        lines += [
            f"- Each element is off by at most half a ULP plus {c.FLOOR:g} of the sum of its absolute terms.",
            "- Matrix products of small whole numbers with scales that are powers of two have the reference's bits.",
        ]
    if op.sums:
        wide = [f"{a.name} {a.sum_rounding:.1e}" for a in archs.ARCHS.values() if a.sum_rounding]
        lines.append(
            f"- Results are long sums, which may cancel, so ULPs are not counted. On {', '.join(wide)} of the largest element is "
            "allowed, because matrix instructions keep fewer bits of a sum there."
        )
    exact = [argument for argument in op.mutates if argument not in op.inexact]
    if exact:
        lines.append(f"- Arguments that are updated in place (`{'`, `'.join(exact)}`) have the reference's bits.")
    if op.inexact:
        lines.append(f"- Those that take results (`{'`, `'.join(op.inexact)}`) may be as far off as these.")
    lines.append("- The same arguments give the same bits in every call.")
    return lines


def exactness(ops: list[Op]) -> str:
    """Return the rules for results, and the errors that were measured."""
    path = pathlib.Path(correctness.__file__)
    parts = [
        (
            "Every test case is compared with the PyTorch reference in the same precision and in float64, by "
            f"[{path.name}](../{path.parent.name}/{path.name}):"
        ),
        "\n".join(merged(ops, rules_for_results)),
    ]
    if any("quantization" in op.reference.__code__.co_names for op in ops):
        parts.append(documentation(quantization)[1])
    errors = [f"- {line}" if len(ops) == 1 else f"- `{op.name}`: {line}" for op in ops for line in seen(op)]
    return "\n\n".join(filter(None, (*parts, "\n".join(errors))))


def seen(op: Op) -> Iterator[str]:
    """The errors in the newest results."""
    for found in measurements.of_op(op.name, *measurements.timed_kinds()):
        where = f"On {found[0][0]['gpu']}, in"
        if errors := [line["relative_error"] for line, _ in found if "relative_error" in line]:
            least = f"the norm of the error against float64 was at most {max(errors):.2g} of the result's"
            yield f"{where} {len(errors)} cases, {least}."
        shares: dict[str, list[float]] = {}
        for line, _ in found:
            for name, share in (line.get("differs_from_vllm") or {}).items():
                shares.setdefault(name, []).append(share)
        if shares:
            scales = shares.pop("scale_relative", None)
            parts = [f"at most {100 * max(of):.2g} % of `{name}`" for name, of in shares.items()]
            parts += [f"scales by at most {max(scales):.2g} of their size"] if scales else []
            yield f"{where} {len(shares['out'])} cases, the bits that differ from vLLM's own op: {', '.join(parts)}."
        if largest := [share for line, _ in found for share in line.get("differs", {}).values()]:
            off = f"the largest difference from vLLM's was {max(largest):.2g} of the largest result"
            yield f"{where} {len(found)} cases, {off}."


def tested(ops: list[Op]) -> str:
    """Return the number of cases, their purpose, and those that no kernel takes."""

    def lines(op: Op) -> Iterator[str]:
        yield f"- {sentence(op.cases)}"
        for arch in archs.ARCHS.values():
            left: dict[str, list[str]] = {}
            for name, a in cases_of(op, arch.name):
                broken = [rule.replace("torch.", "") for rule, holds in op.envelope(a, arch) if not holds]
                if broken:
                    left.setdefault("; ".join(broken), []).append(f"`{name}`")
            for why, names in left.items():
                shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                yield f"- {arch.name}: PyTorch runs {shown}. Kernels need that {why}."

    how = (
        f"`vllm-rocm-ops verify --op {ops[0].name}` runs them on a GPU, `bash tests/run.sh -k {ops[0].name}` in a checkout on a GPU "
        "or in the [emulator](emulator.md)."
    )
    counts = [f"{len(cases_of(op, FIRST))}" + f" of `{op.name}`" * (len(ops) > 1) for op in ops]
    cases = f"Cases in every configuration: {', '.join(counts)}."
    return f"{cases}\n\n" + "\n".join(merged(ops, lines)) + f"\n\n{how}"


def measured(ops: list[Op]) -> str:
    """Return speedups by rows for each GPU, and the GPUs on which nothing was timed."""
    by_gpu: dict[str, list[tuple[Op, list[tuple[dict, pathlib.Path]]]]] = {}
    for op in ops:
        for found in measurements.of_op(op.name, *measurements.timed_kinds()):
            by_gpu.setdefault(measurements.head([line for line, _ in found]), []).append((op, found))
    parts = []
    for gpu, of_ops in by_gpu.items():
        lines = [line for _, found in of_ops for line, _ in found]
        shown = sorted({measurements.rows_of(line) for line in lines})
        body = []
        for op, found in of_ops:
            for what, by_rows in measurements.groups_of(line for line, _ in found).items():
                cells = [measurements.times([measurements.ratio(by_rows[m])]) if m in by_rows else "" for m in shown]
                body += [(*([f"`{op.name}`"] * (len(ops) > 1)), what[1], *cells)] if any(cells) else []
        peers = "; ".join(sorted({name for line in lines for name in line["peers"]}))
        header = (*(["op"] * (len(ops) > 1)), "size", *map(str, shown))
        parts.append(
            f"{gpu}: speedup over the fastest baseline ({peers}) by rows, tokens or requests. Bold is slower. Times in microseconds: "
            f"{files_of([found for _, found in of_ops])}.\n\n" + markdown(header, body)
        )
    static = [found for op in ops for found in measurements.of_op(op.name, "static")]
    if static:
        parts.append(f"Registers, traffic and cycles by layer, from code objects and the emulator: {files_of(static)}.")
    said: dict[str, list[str]] = {}
    for op in ops:
        said.setdefault(measurements.unmeasured(op.name).replace(f"`{op.name}`", "{}"), []).append(f"`{op.name}`")
    for text, names in said.items():
        parts.append(text.format("these ops" if len(names) == len(ops) > 1 else ", ".join(names)))
    return "\n\n".join(filter(None, parts))


def files_of(found: Iterable[list[tuple[dict, pathlib.Path]]]) -> str:
    return ", ".join(sorted({f"`{path.relative_to(ROOT).as_posix()}`" for lines in found for _, path in lines}))


# vLLM


@functools.cache
def definitions() -> dict[tuple[str, str], ast.AST]:
    """The definitions in the files of the seams: (file, name) -> syntax tree."""
    found = {}
    for path in SEAMS.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
            for target in targets:
                found[path.stem, getattr(target, "id", getattr(target, "name", ""))] = node
    return found


@functools.cache
def reached(file: str) -> frozenset[tuple[str, str]]:
    """The definitions of a file, the definitions of other files of the seams that they refer to, also by a dotted name that vLLM
    imports, and so on."""
    ahead = [key for key in definitions() if key[0] == file]
    found: set[tuple[str, str]] = set()
    while ahead:
        key = ahead.pop()
        if key in found or key not in definitions():
            continue
        found.add(key)
        for node in ast.walk(definitions()[key]):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                ahead.append((node.value.id, node.attr))
            elif isinstance(node, ast.Name):
                ahead.append((key[0], node.id))
            elif isinstance(node, ast.Constant) and str(node.value).startswith(f"{seam.__package__}."):
                ahead.append(tuple(node.value.rsplit(".", 2)[1:]))
    return frozenset(found)


def names_op(node: ast.AST, name: str) -> bool:
    """Whether a syntax tree has `ops.<name>` or `torch.ops.vllm_rocm_ops.<name>`."""
    places = "ops", f"torch.ops.{op_module.NAMESPACE}"
    return any(
        isinstance(part, ast.Attribute) and part.attr == name and ast.unparse(part.value) in places
        for part in ast.walk(node)
    )


def tabulates_op(node: ast.AST, name: str) -> bool:
    """Whether a syntax tree has an op's name, as the tables of norms and activations in fused_quant.py have it."""
    return any(isinstance(part, ast.Constant) and part.value == name for part in ast.walk(node))


@functools.cache
def seams_of(op: Op) -> dict[str, int | None]:
    """The seams that call an op in vLLM's place, and the most tokens that they give it if they keep a kernel of vLLM's for more."""
    found: dict[str, int | None] = {}
    for name in [name for name in seam.NAMES if not seam.load(name).replaces.startswith("nothing")]:
        for file, what in reached(name):
            node = definitions()[file, what]
            if names_op(node, op.name) or (file == "fused_quant" and tabulates_op(node, op.name)):
                limited = any(isinstance(part, ast.Name) and part.id == "MOST_TOKENS" for part in ast.walk(node))
                most = definitions()[file, "MOST_TOKENS"].value.value if limited else None
                found[name] = found.get(name) if most is None else most
    return found


def in_vllm(ops: list[Op]) -> str:
    """Return a line for each seam that calls an op, then the layers of the shipped models that call it."""

    def lines(op: Op) -> Iterator[str]:
        for name, most in seams_of(op).items():
            limits = {None: "", 0: " It calls the op where it was measured to be faster than vLLM's kernel."}
            limit = limits.get(most, f" It calls the op for at most {most} tokens, if vLLM has a kernel for more.")
            yield f"- The seam `{name}` replaces {seam.load(name).replaces}.{limit}"
        if not seams_of(op):
            yield "- vLLM does not call it: no seam does."

    parts = ["\n".join(merged(ops, lines))]
    counts: dict[tuple[str, ...], int] = {}
    for model in MODELS:
        config = model_config.read(model)
        for call in [*model_layers.calls(config, TP), *joined.gated(config, TP)]:
            if call.op in ops and call.count:
                a = call.op.Arguments(*call.case(1).make("meta", torch.Generator(), archs.ARCHS[FIRST].fp8_dtype))
                sizes = (
                    f"{name} {size}" for name, size in call.op.problem(a).items() if name not in ("m", "rows", "dtype")
                )
                row = *([f"`{call.op.name}`"] * (len(ops) > 1)), model, call.layer, ", ".join(sizes)
                counts[row] = counts.get(row, 0) + call.count
    if counts:
        rows = ((*row, str(count)) for row, count in counts.items())
        parts += [
            f"Calls of a decode step of one of {TP} tensor parallel ranks:",
            markdown((*(["op"] * (len(ops) > 1)), "model", "layer", "sizes", "calls"), rows),
        ]
    return "\n\n".join(parts)


# Pages


def page(file: str, ops: list[Op]) -> str:
    module = inspect.getmodule(ops[0].reference)
    one = len(ops) == 1
    described = []
    for op in ops:
        first, rest = documentation(op)
        described += [*([] if one else [f"### `{op.name}`"]), first, rest, f"```python\n{signature(op)}\n```"]
    sections = {
        "Example": f"```python\n{examples.of(file)}```",
        "Support": support(ops),
        ("Signature" if one else "Ops"): "\n\n".join(filter(None, described)),
        "Arguments": arguments(ops),
        "When kernels run": (
            f"Otherwise the PyTorch reference computes the same result, more slowly. `vllm-rocm-ops explain {ops[0].name}` names the "
            f"rule that a call breaks.\n\n{rules(ops)}"
        ),
        "Numerics": exactness(ops),
        "Performance": measured(ops),
        "In vLLM": in_vllm(ops),
        "Configurations": configurations(ops),
        "Tests": tested(ops),
    }
    name = ops[0].name if one else "<op>"
    parts = [
        WRITTEN,
        f"# {file}" + ("" if one else " ops"),
        *paragraphs(module),
        (
            f"`vllm_rocm_ops.ops.{name}` and `torch.ops.{op_module.NAMESPACE}.{name}` are the same. Spec: "
            f"[{file}.py](../ops/{file}.py). {kernels(ops)} [All ops](README.md)."
        ),
        *(f"## {title}\n\n{text}" for title, text in sections.items()),
    ]
    return wrapped("\n\n".join(filter(None, parts)))


def wrapped(text: str) -> str:
    """Text with long lines broken, except in tables and code."""
    lines, in_code = [], False
    for line in text.splitlines():
        in_code ^= line.startswith("```")
        if in_code or line.startswith("|") or len(line) <= WIDTH:
            lines.append(line)
            continue
        mark = "- " * line.startswith("- ")
        whole = re.sub(r" ([-+*]) ", "\0\\1 ", line.removeprefix(mark))  # at the start of a line these make a list
        indents = {"initial_indent": mark, "subsequent_indent": " " * len(mark)}
        broken = textwrap.wrap(whole, WIDTH, break_long_words=False, break_on_hyphens=False, **indents)
        lines += [part.replace("\0", " ") for part in broken]
    return "\n".join(lines) + "\n"


def explanation() -> str:
    """The output of `vllm-rocm-ops explain` for the example."""
    op = next(op for op in op_module.registered() if op.name == EXAMPLE["op"])
    explained = explain.explain(op, EXAMPLE["arch"], explain.parse_shape(EXAMPLE["shape"]))
    return (
        f"```\n$ vllm-rocm-ops explain {op.name} --shape {EXAMPLE['shape']} --arch {EXAMPLE['arch']}\n{explained}\n```"
    )


def index() -> str:
    """The table of all ops."""
    rows = (
        (f"[`{op.name}`]({link(op.name)})", documentation(op)[0], *(types(op, arch) for arch in archs.ARCHS))
        for op in op_module.registered()
    )
    about = (
        "Ops have the names, arguments and rounding of vLLM's ops, but return their results. GPU columns list the kernels' input dtypes "
        "and, if different, output dtypes; PyTorch runs other dtypes. sm_90 is for development."
    )
    parts = (
        WRITTEN,
        "# Ops",
        about,
        markdown(("op", "computes", *archs.ARCHS), rows),
        "`explain` reports the kernel that a call runs, and why:",
        explanation(),
        "Other pages: " + ", ".join(f"[{name.lower()}]({name}.md)" for name in GUIDES) + ".",
    )
    return wrapped("\n\n".join(parts))


def pages() -> dict[pathlib.Path, str]:
    """All pages, by path."""
    return {DOCS / "README.md": index()} | {DOCS / f"{file}.md": page(file, ops) for file, ops in by_file().items()}
