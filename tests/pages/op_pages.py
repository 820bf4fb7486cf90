"""A page for each op, made from its spec, vLLM's seams, the rules for results and the files of results."""

import ast
import dataclasses
import functools
import inspect
import pathlib
import re
import textwrap
from collections.abc import Iterable, Iterator

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

from . import measurements
from .measurements import ROOT, markdown

DOCS = ROOT / "vllm_rocm_ops" / "docs"
SEAMS = ROOT / "vllm_rocm_ops" / "vllm"
MODELS, TP = ("llama-3.1-405b-fp8", "deepseek-v3"), 8
WIDTH = 120
EXAMPLE = {"op": "fused_add_rms_norm_static_fp8_quant", "shape": "1x16384", "arch": "MI300X"}
GUIDES = (
    "compatibility",
    "configuration",
    "measuring",
    "tuning",
    "development",
    "architecture",
    "emulator",
    "timing",
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
    """The dtypes that the kernels take and, if they differ, the dtypes that they return."""
    found = launches_of(op, arch_name)
    inputs = dict.fromkeys(short(a[0].dtype) for a, _, _ in found)
    outputs = {short(out.dtype) for _, output, _ in found for out in correctness.as_tuple(output)[:1]}
    to = "" if not outputs or outputs == set(inputs) else f" → {', '.join(sorted(outputs))}"
    return f"{', '.join(inputs)}{to}"


def documentation(of) -> tuple[str, str]:
    """The first line of a docstring, and the rest with one paragraph per line."""
    first, _, rest = inspect.getdoc(of).partition("\n")
    return first, "\n\n".join(" ".join(paragraph.split()) for paragraph in rest.strip().split("\n\n"))


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


def arguments(op: Op) -> str:
    """Each argument with what the contract requires of it, in the case with the most requirements."""
    name, a = max(cases_of(op, FIRST), key=lambda case: (len(list(op.contract(case[1]))), case[1][0].numel() > 0))
    wanted: dict[str, list[str]] = {}
    for argument, must_be, _, _ in op.contract(a):
        wanted.setdefault(argument, []).append(must_be.replace("torch.", ""))
    rows = [
        (f"`{argument}`", value(getattr(a, argument, "")), "; ".join(wanted.get(argument, [])))
        for argument in dict.fromkeys((*a._fields, *wanted))
    ]
    return (
        "A call that breaks one of these rules raises ValueError before anything is written. The values are those of the test "
        f"case `{name}`:\n\n" + markdown(("argument", "value", "must be"), rows)
    )


def rules(op: Op) -> str:
    """Every rule of the envelope in any case: first the rules for all calls, then those for some calls, with an example."""
    met: dict[str, dict[str, object]] = {}
    held = set()
    for arch in archs.ARCHS.values():
        for name, a in cases_of(op, arch.name):
            for rule, holds in op.envelope(a, arch):
                met.setdefault(rule, {})[name] = a
                held |= {rule} if holds else set()
    groups: dict[tuple[str, ...], list[str]] = {}
    for rule in sorted(met, key=lambda rule: not any(arch in rule for arch in archs.ARCHS)):
        groups.setdefault(tuple(met[rule]), []).append(rule)
    parts = []
    for cases, group in sorted(groups.items(), key=lambda found: -len(found[0])):
        if len(cases) < len(cases_of(op, FIRST)):
            sizes = op.problem(met[group[0]][cases[0]]).items()
            parts.append(
                f"For some calls only, such as `{cases[0]}` ({', '.join(f'{name} {size}' for name, size in sizes)}):"
            )
        parts.append("\n".join(f"- {rule.replace('torch.', '')}{'' if rule in held else ': never'}" for rule in group))
    return "\n\n".join(parts)


# Kernels


def kernels(op: Op) -> str:
    """The dtypes for each arch, and the kernels with the threads of their blocks for each arch that has them."""
    found: dict[str, dict[str, set[int]]] = {}
    for arch in archs.ARCHS:
        for _, _, launch in launches_of(op, arch):
            found.setdefault(launch.symbol, {}).setdefault(arch, set()).add(launch.block[0])
    alike: dict[tuple[str, ...], list[str]] = {}
    for symbol, by_arch in sorted(found.items()):
        threads = {arch: f"{min(of)}" + f" to {max(of)}" * (len(of) > 1) for arch, of in by_arch.items()}
        alike.setdefault(tuple(threads.get(arch, "") for arch in archs.ARCHS), []).append(f"`{symbol}`")
    files = sorted({f"`csrc/ops/{launch.module}.hip`" for arch in archs.ARCHS for *_, launch in launches_of(op, arch)})
    return "\n\n".join(
        (
            markdown(
                ("GPU", "takes, and returns if it differs"),
                ((arch, types(op, arch) or "nothing: PyTorch runs") for arch in archs.ARCHS),
            ),
            f"The source is {', '.join(files)}. The columns have the threads of a block:",
            markdown(("kernels", *archs.ARCHS), ((", ".join(symbols), *threads) for threads, symbols in alike.items())),
        )
    )


def configurations(op: Op) -> str:
    """The parts of a configuration, and how a configuration is chosen."""
    classes = dict.fromkeys(
        type(config)
        for arch in archs.ARCHS.values()
        for _, a in cases_of(op, arch.name)
        for config in op.configs(a, arch)
    )
    lines = ["A configuration says how the kernels are launched:", ""]
    for of in classes:
        lines.append(f"- `{of.__name__}({', '.join(part.name for part in dataclasses.fields(of))})`. {sentence(of)}")
    if op.cost is not None:
        chosen = (
            "The configuration of the least cost by a model of the GPU runs. `vllm-rocm-ops explain` shows the others and the terms "
            "of the cost."
        )
    else:
        chosen = sentence(op.default) if op.default.__doc__ else "The spec chooses one."
    key = ", ".join(("compute_units", *op.problem(cases_of(op, FIRST)[0][1])))
    lines += ["", f"{chosen} A row of a tuned table, which `vllm-rocm-ops tune` writes, comes first. Its key: {key}."]
    return "\n".join(lines)


# Results


def exactness(op: Op) -> str:
    """The rules for results, and the errors that were measured."""
    c = correctness
    launches = [of for arch in archs.ARCHS for of in launches_of(op, arch)]
    outputs = [output for _, output, _ in launches] + [getattr(a, name) for a, *_ in launches for name in op.inexact]
    dtypes = {tensor.dtype for output in outputs for tensor in c.as_tuple(output)}
    floats = {dtype for dtype in dtypes if dtype.is_floating_point}
    path = pathlib.Path(c.__file__)
    rules_file = f"the rules of [{path.name}](../{path.parent.name}/{path.name})"
    lines = [
        f"Every test case is compared with the PyTorch reference in the same precision and in float64, by {rules_file}:",
        "",
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
    if "quantization" in op.reference.__code__.co_names:
        lines += ["", documentation(quantization)[1]]
    return "\n".join([*lines, *("\n" + line for line in seen(op))])


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


def tested(op: Op) -> str:
    """The number of cases, their purpose, and those that no kernel takes."""
    lines = []
    for arch in archs.ARCHS.values():
        left: dict[str, list[str]] = {}
        for name, a in cases_of(op, arch.name):
            broken = [rule.replace("torch.", "") for rule, holds in op.envelope(a, arch) if not holds]
            if broken:
                left.setdefault("; ".join(broken), []).append(f"`{name}`")
        for why, names in left.items():
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            lines.append(f"- {arch.name}: PyTorch runs {shown}. The kernels need that {why}.")
    how = (
        "The tests run on the GPU if there is one, else AMD's machine code runs in an emulator: "
        f"`bash tests/run.sh -k {op.name}` in a checkout, or `vllm-rocm-ops verify --op {op.name}` on a GPU."
    )
    cases = f"{len(cases_of(op, FIRST))} cases run in every configuration of the kernels. {sentence(op.cases)}"
    return "\n\n".join(filter(None, (cases, "\n".join(lines), how)))


def measured(op: Op) -> str:
    """Ratios by rows for each GPU, and the GPUs on which nothing was timed."""
    parts = []
    for found in measurements.of_op(op.name, *measurements.timed_kinds()):
        lines = [line for line, _ in found]
        shown = sorted({measurements.rows_of(line) for line in lines})
        body = []
        for what, by_rows in measurements.groups_of(lines).items():
            cells = [measurements.times([measurements.ratio(by_rows[m])]) if m in by_rows else "" for m in shown]
            body += [(what[1], *cells)] if any(cells) else []
        peers = "; ".join(sorted({name for line in lines for name in line["peers"]}))
        parts.append(
            f"{measurements.head(lines)}: speedup over the best peer ({peers}), by rows, tokens or requests. Bold is slower. "
            f"Microseconds, also of what has no peer, are in {files_of([found])}.\n\n"
            + markdown(("size", *map(str, shown)), body)
        )
    static = measurements.of_op(op.name, "static")
    if static:
        parts.append(f"Registers, traffic and cycles by layer, from code objects and the emulator: {files_of(static)}.")
    parts.append(measurements.unmeasured(op.name))
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


def in_vllm(op: Op) -> str:
    """A line for each seam that calls the op, then the layers of the shipped models that call it."""
    lines = []
    for name, most in seams_of(op).items():
        limits = {None: "", 0: " It calls the op where it was measured to be faster than vLLM's kernel."}
        limit = limits.get(most, f" It calls the op for at most {most} tokens, if vLLM has a kernel for more.")
        lines.append(f"- The seam `{name}` replaces {seam.load(name).replaces}.{limit}")
    parts = ["\n".join(lines) or "No seam calls this op, so vLLM does not run it. Your own programs can call it."]
    counts: dict[tuple[str, str, str], int] = {}
    for model in MODELS:
        config = model_config.read(model)
        for call in [*model_layers.calls(config, TP), *joined.gated(config, TP)]:
            if call.op is op and call.count:
                a = op.Arguments(*call.case(1).make("meta", torch.Generator(), archs.ARCHS[FIRST].fp8_dtype))
                sizes = (f"{name} {size}" for name, size in op.problem(a).items() if name not in ("m", "rows", "dtype"))
                row = model, call.layer, ", ".join(sizes)
                counts[row] = counts.get(row, 0) + call.count
    if counts:
        rows = ((*row, str(count)) for row, count in counts.items())
        parts += [
            f"In a decode step of one of {TP} tensor parallel ranks:",
            markdown(("model", "layer", "sizes", "calls"), rows),
            f"`vllm-rocm-ops explain --model {next(iter(counts))[0]} --tp {TP}` says which kernels they run.",
        ]
    return "\n\n".join(parts)


# Pages


def page(op: Op) -> str:
    first, rest = documentation(op)
    module = inspect.getmodule(op.reference)
    file = pathlib.Path(module.__file__).name
    sections = {
        "Arguments": arguments(op),
        "Will kernels take it?": (
            "If one of these rules does not hold, the PyTorch reference computes the same result, more slowly. "
            f"`vllm-rocm-ops explain {op.name}` says which rule.\n\n{rules(op)}"
        ),
        "Kernels": f"{kernels(op)}\n\n{configurations(op)}",
        "How exact": exactness(op),
        "Tested": tested(op),
        "In vLLM": in_vllm(op),
        "Measured": measured(op),
    }
    parts = [
        WRITTEN,
        f"# {op.name}",
        first,
        rest,
        f"```python\n{signature(op)}\n```",
        (
            f"The op is `vllm_rocm_ops.ops.{op.name}` and `torch.ops.{op_module.NAMESPACE}.{op.name}`. Its spec is "
            f"[{file}](../ops/{file}). [All ops](README.md)."
        ),
        sentence(module),
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
        (f"[`{op.name}`]({op.name}.md)", documentation(op)[0], *(types(op, arch) for arch in archs.ARCHS))
        for op in op_module.registered()
    )
    about = (
        "Names, arguments and roundings are those of vLLM's ops, but results are returned. A GPU's column has the types that its "
        "kernels take and, if they differ, return. PyTorch computes other types. sm_90 is for development."
    )
    parts = (
        WRITTEN,
        "# Ops",
        about,
        markdown(("op", "computes", *archs.ARCHS), rows),
        "`explain` says which kernel a call runs, and why:",
        explanation(),
        "Other pages: " + ", ".join(f"[{name.lower()}]({name}.md)" for name in GUIDES) + ".",
    )
    return wrapped("\n\n".join(parts))


def pages() -> dict[pathlib.Path, str]:
    """All pages, by path."""
    return {DOCS / "README.md": index()} | {DOCS / f"{op.name}.md": page(op) for op in op_module.registered()}
