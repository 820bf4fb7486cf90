"""Explain which kernels a call or the calls of a model run, and why, without a GPU."""

from __future__ import annotations

import argparse
import json
import math
import re
import textwrap
import typing
from collections.abc import Iterable, Iterator

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs
from vllm_rocm_ops.core.op import Explanation, Op
from vllm_rocm_ops.models import fused_calls
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.models.layers import LayerCall
from vllm_rocm_ops.vllm.attention import quantized_attention
from vllm_rocm_ops.vllm.attention.decoder import is_forced
from vllm_rocm_ops.vllm.comparisons import COMPARISONS, RECORDED
from vllm_rocm_ops.vllm.selection import kernel_selection
from vllm_rocm_ops.vllm.selection.key import EAGER, SEPARATE, Key

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}
MAX_ELEMENTS = 2**60  # per tensor
MAX_NUMBER = 2**31
WIDTH = 120  # columns of a model's table


def example(op: Op, arch: str, shape: tuple[int, ...] = (), dtype: torch.dtype | None = None, **given) -> dict:
    """Return arguments like the op's first case, on the meta device.

    `shape` and `dtype` replace the first tensor's, and equal sizes and dtypes of the others. The order of strides stays.
    `given` replaces whole arguments by name.
    """
    case = next(iter(op.cases()))
    of_case = op.Arguments(*case.make("meta", torch.Generator().manual_seed(0), archs.named(arch).fp8_dtype))
    first = next(value for value in of_case if isinstance(value, torch.Tensor))
    sizes = dict(zip(reversed(first.shape), reversed(shape or first.shape)))

    def like(value: torch.Tensor) -> torch.Tensor:
        new_shape = shape if shape and value.shape == first.shape else [sizes.get(size, size) for size in value.shape]
        new_dtype = dtype if dtype and value.dtype == first.dtype else value.dtype
        if (*new_shape, new_dtype) == (*value.shape, value.dtype):
            return value
        if len(new_shape) != value.dim():
            return torch.empty(new_shape, dtype=new_dtype, device="meta")
        outermost_first = sorted(range(value.dim()), key=value.stride, reverse=True)
        return torch.empty_permuted(new_shape, outermost_first, dtype=new_dtype, device="meta")

    return {k: like(v) if isinstance(v, torch.Tensor) else v for k, v in of_case._asdict().items()} | given


def explain(op: Op, arch: str, *changes, require_code: bool = False, **given) -> Explanation:
    """Return the explanation of a call on `arch` with the arguments of `example`, without memory or a GPU."""
    return op.explain(**example(op, arch, *changes, **given), arch=arch, require_code=require_code)


def emulate(op: Op, arch: str, *changes, **given) -> Iterator[str]:
    """Yield lines about that call in the emulator: its kernels' registers, LDS, waves, instructions, bytes and waits."""
    from vllm_rocm_ops.emulator import cases as emulated  # an extra

    case = None if any(changes) or given else next(iter(op.cases()))
    return emulated.describe(op, op.Arguments(**example(op, arch, *changes, **given)), case, arch)


def usual_arch() -> str:
    """Return the architecture of this machine's first GPU, or the first of `ARCHS` if it has no kernels."""
    arch = archs.of_device(0) if torch.cuda.is_available() else None
    return str(arch or next(iter(archs.ARCHS)))


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse '8x7168' to (8, 7168)."""
    sizes = [int(size) if re.fullmatch(r"[0-9]{1,18}", size) else -1 for size in text.split("x")]
    if min(sizes) < 0 or math.prod(filter(None, sizes)) >= MAX_ELEMENTS:
        raise argparse.ArgumentTypeError(f"must be sizes joined by x, e.g. 8x7168, got {text}")
    return tuple(sizes)


def parse_first(text: str) -> tuple[tuple[int, ...], torch.dtype | None]:
    """Parse '8x7168' to ((8, 7168), None), and 'fp16[8x7168]' to ((8, 7168), torch.float16)."""
    dtype, bracket, sizes = text.partition("[")
    if bracket and dtype in DTYPES and sizes.endswith("]"):
        return parse_shape(sizes[:-1]), DTYPES[dtype]
    return parse_shape(text), None


def parse_argument(text: str) -> tuple[str, object]:
    """Parse 'name=value'; a value is bf16[8x7168] (a tensor), e4m3fn (a dtype), none, true, false or a number."""
    name, equals, value = text.partition("=")
    tensor = re.fullmatch(r"(\w+)\[([\dx]+)\]", value)
    if not equals:
        raise ValueError(f"{text} must be name=value")
    if tensor and tensor[1] in DTYPES:
        try:
            return name, torch.empty(parse_shape(tensor[2]), dtype=DTYPES[tensor[1]], device="meta")
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{name}: shape {error}") from None
    if value in DTYPES:
        return name, DTYPES[value]
    constants = {"none": None, "true": True, "false": False}
    try:
        return name, constants[value] if value in constants else json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"{name} must be a number, true, false, none, a dtype or dtype[shape], got {value}") from None


KINDS = {
    torch.Tensor: "a tensor, e.g. bf16[8x7168]",
    torch.dtype: "a dtype, e.g. e4m3fn",
    float: "a number",
    int: "an integer",
    bool: "true or false",
    str: "a quoted string",
    type(None): "none",
}


def parse_arguments_of(op: Op, texts: Iterable[str]) -> dict[str, object]:
    """Parse an op's arguments by name. Raises ValueError for an unknown name or a wrong type."""
    given = {}
    hints = typing.get_type_hints(op.reference)
    for text in texts:
        name, value = parse_argument(text)
        if name not in op.Arguments._fields:
            raise ValueError(f"{op.name} has no argument {name}; arguments: {', '.join(op.Arguments._fields)}")
        kinds = typing.get_args(hints[name]) or (hints[name],)
        taken = (*kinds, int) if float in kinds else kinds
        if type(value) not in taken or (type(value) is int and abs(value) >= MAX_NUMBER):
            wanted = " or ".join(KINDS[kind] for kind in kinds)
            raise ValueError(f"{op.name}: {name} must be {wanted}, got {text.partition('=')[2]}")
        given[name] = value
    return given


# a model


FORCED = "VLLM_ROCM_OPS_ATTENTION=1"
UNMEASURED = "unmeasured: {} until the plugin is measured faster"


def around(config: dict, tp: int, ep: int | None, arch: str) -> list[LayerCall]:
    """Return the decode calls that the plugin serves only if measured faster, on request, or in place of other calls.

    The KV cache is as vLLM has it on `arch`.
    """
    rocm_cache_layout = archs.named(arch).vendor == "amd"
    fused = [
        *fused_calls.calls(config, tp, ep, rocm_cache_layout),
        *fused_calls.quantized_hidden(config, tp, ep)[:1],
        *model_layers.absorbed(config, tp),
        model_layers.attention(config, tp, rocm_cache_layout),
    ]
    return sorted(fused, key=lambda call: call.fusion in fused_calls.AROUND_ATTENTION)


def measured_shapes(call: LayerCall, arch: str) -> list[str]:
    """Return the shapes, as in kernel_selection.py, under which a call may have been measured."""
    if shapes_of := RECORDED.get(call.op):
        return shapes_of(call.parameters, call.dtype)
    a = call.op.Arguments(*call.case(2).make("meta", torch.Generator(), archs.named(arch).fp8_dtype))
    if in_vllm := COMPARISONS.get(call.op):
        return [in_vllm.describe(layer) for layer in in_vllm.layers_of(a)]
    if not hasattr(a, "quant_dtype"):
        return []
    columns = a.input.shape[1] // (1 if hasattr(a, "weight") else 2)
    residuals = ("", " residual") if getattr(a, "residual", None) is None else (" residual",)
    start = f"{columns} {kernel_selection.types(a.input.dtype)}"
    return [f"{start}{residual}{way}" for residual in residuals for way in ("", " column-major", " bound")]


def measured_keys(call: LayerCall, arch: str, record: kernel_selection.Record) -> list[Key]:
    """Return the keys of a call's measurements, the one that decides first. Compiled comes before eager."""
    shapes = measured_shapes(call, arch) if record.shapes else []
    keys = sorted(record.shapes, key=lambda key: key.baseline.scope == EAGER.scope)
    return [key for shape in shapes for key in keys if (key.op, key.shape) == (call.op.name, shape)]


def decision(call: LayerCall, keys: list[Key], record: kernel_selection.Record, tokens: int) -> tuple[bool, str]:
    """Return whether the plugin or the baseline serves a call at this number of tokens, and why.

    The reason is a measurement on this machine or a fixed limit. It is empty for ops that no seam limits.
    """
    name, fusion, in_vllm = call.op.name, call.fusion, COMPARISONS.get(call.op)
    if name in record.off:
        return False, f"off on this GPU: {record.off[name]}"
    if call.op in model_layers.ATTENTION:
        return attention_decision(call, record, tokens)
    by_attention, limit = getattr(fusion or in_vllm, "by_attention", False), getattr(in_vllm, "limit", None)
    baseline = "two launches" if fusion and (fusion.needs_parts or fusion.needs_all) else "vLLM"
    if by_attention and is_forced():
        return limit is None or tokens <= limit, FORCED
    if not keys:
        if limit == 0 or by_attention or (fusion and fusion.needs_all):
            return False, UNMEASURED.format(baseline)
        if limit is None:
            return True, ""
        few = tokens <= limit
        return few, "unmeasured" if few else f"unmeasured: {baseline} above {limit} tokens"

    def runs_by(key: Key) -> bool:
        served_by = kernel_selection.serves_by_tokens(key, record.shapes[key])
        return bool(served_by[0] if key.has_one_choice else tokens < len(served_by) and served_by[tokens])

    if fusion and fusion.needs_all:
        return all(map(runs_by, keys)), f"measured: against {' and '.join(str(key.baseline) for key in keys)}"
    runs, measured = runs_by(keys[0]), record.shapes[keys[0]]
    if times := measured.get(tokens):
        us = [
            f"{whose} {time:.1f} us"
            for whose, time in (("plugin", times.plugin_us), (baseline, times.baseline_us))
            if time is not None
        ]
        return runs, f"measured: {', '.join(us) or 'plugin not selected'}"
    return runs, f"measured at {', '.join(map(str, sorted(measured)))} tokens"


def served(call: LayerCall, arch: str, record: kernel_selection.Record, tokens: int) -> tuple[bool, str]:
    """Return the decision for a call of a model; the plugin must also serve the calls that some fused calls replace."""
    if call.fusion and call.fusion.needs_parts:
        for part in call.parts:
            serves, said = served(part, arch, record, tokens)
            if not serves:
                return False, f"{part.layer}: {said}"
        given = call.case(tokens).make("meta", torch.Generator(), archs.named(arch).fp8_dtype)
        explained = call.op.explain(*given, arch=arch)
        if not explained.launches:
            return False, explained.source
    return decision(call, measured_keys(call, arch, record), record, tokens)


def attention_decision(call: LayerCall, record: kernel_selection.Record, tokens: int) -> tuple[bool, str]:
    """Return the decision for attention.

    The plugin serves it where it was faster at every context length, in each measured backend of vLLM.
    """
    if is_forced():
        return True, FORCED
    heads, *sizes = call.parameters
    is_paged = call.op is ops.paged_attention_decode
    heads_of_call = f"{heads}:{sizes[0]}x{sizes[1]}" if is_paged else f"{heads}x{sizes[0]}+{sizes[1]}"
    kind = quantized_attention.KINDS.get(sizes[-1], "")
    served_by = {
        key: kernel_selection.serves_by_tokens(key, measured)
        for key, measured in record.shapes.items()
        if key.op == call.op.name and (key.decode.heads, key.decode.quantized) == (heads_of_call, kind)
    }
    separate = [served_by.pop(key) for key in list(served_by) if key.baseline == SEPARATE]
    served = list(served_by.values())
    if not served:
        return False, UNMEASURED.format("vLLM")
    if separate and not quantized_attention.at_some_size(separate):
        return False, "measured: not faster than attention plus a separate quantization"
    return all(
        tokens < len(table) and table[tokens] for table in served
    ), f"measured: {len(served)} (context length, backend) pairs"


def measured_here(arch: archs.Arch) -> kernel_selection.Record:
    """Return the measurements of this machine, if its GPU has that architecture."""
    record = kernel_selection.record_here()
    known = record.machine["arch"] == arch.name and record.machine["units"] == str(arch.compute_units)
    return record if known else kernel_selection.Record({})


def explain_model(
    calls: list[LayerCall], arch: str, batches: tuple[int, ...], verbose: bool = True
) -> list[tuple[str, ...]]:
    """Return a table of the calls of a rank on `arch`.

    Columns are layer, calls per step, op, tokens, kernel, blocks of the kernels at each batch size, and configuration with its
    reason. Batch sizes that differ in blocks only share a row. This machine's measurements decide which kernel serves, and
    fixed limits decide unmeasured calls. Without `verbose`, reasons follow the kernels, and op, blocks and configuration are
    omitted.
    """
    lines: list[tuple[str, ...]] = [("layer", "calls", "op", "tokens", "kernel", "blocks", "configuration")]
    known = archs.named(arch)
    record = measured_here(known)
    fused = {part: call for call in calls for part in call.parts}
    for call in calls:
        same: dict[tuple[str, str], list[tuple[int, str]]] = {}
        for batch in batches:
            serves, said = served(call, arch, record, batch)
            if call in fused and served(fused[call], arch, record, batch)[0]:
                same.setdefault((f"in {fused[call].layer}", ""), []).append((batch, ""))
                continue
            if not serves:
                apart = call.fusion.apart if call.fusion else "vLLM's kernel"
                same.setdefault((apart, said), []).append((batch, ""))
                continue
            arguments = call.case(batch).make("meta", torch.Generator(), known.fp8_dtype)
            explained = call.op.explain(*arguments, arch=known)
            row = call.op.tuned_row(call.op.Arguments(*arguments), known) if explained.launches else None
            kernel = " + ".join(launch.symbol for launch in explained.launches) or "PyTorch"
            blocks = "+".join(str(math.prod(launch.grid)) for launch in explained.launches)
            why = f"{explained.source}: {row.path}: {row.source}" if row else explained.source
            if not verbose and explained.launches:
                why = "tuned" if row else ""
            same.setdefault((kernel, ": ".join(filter(None, (said, why)))), []).append((batch, blocks))
        for (kernel, why), sizes in same.items():
            tokens, blocks = (",".join(filter(None, map(str, column))) for column in zip(*sizes))
            lines.append((call.layer, str(call.count), call.op.name, tokens, kernel, blocks, why))
    if verbose:
        return lines
    return [
        ("layer", "calls", "tokens", "kernel"),
        *(
            (layer, count, tokens, f"{kernel} ({why})" if why else kernel)
            for layer, count, _, tokens, kernel, _, why in lines[1:]
        ),
    ]


def table(rows: list[tuple[str, ...]], width: int | None = None) -> list[str]:
    """Format rows as lines with aligned columns; the last column wraps at `width`."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    left = sum(widths[:-1]) + 2 * len(widths[:-1])
    lines = []
    for *row, last in rows:
        parts = textwrap.wrap(last, max(width - left, 1), break_on_hyphens=False) if width else [last]
        for part in parts or [""]:
            lines.append("  ".join((*map(str.ljust, row, widths), part)).rstrip())
            row = [""] * len(row)
    return lines
