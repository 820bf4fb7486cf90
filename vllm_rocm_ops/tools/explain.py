"""Explain which kernels a call or the calls of a model run, and why, without a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from vllm_rocm_ops.collectives.launches import MAX_RANKS
from vllm_rocm_ops.core import archs
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.op import Explanation, Op
from vllm_rocm_ops.core.quantization import MX_BLOCK
from vllm_rocm_ops.models import fused_calls
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.models.layers import Launch, LayerCall
from vllm_rocm_ops.ops.shared.gemm import BLOCK
from vllm_rocm_ops.vllm import comparisons
from vllm_rocm_ops.vllm.selection.report import columns

ALL_REDUCE = "all-reduce"
WIDTH = 120  # columns of a model's table


def example(op: Op, arch: Arch, shape: tuple[int, ...] = (), dtype: torch.dtype | None = None, **given) -> dict:
    """Return arguments like the op's first case, on the meta device.

    `shape` and `dtype` replace the first tensor's, and equal sizes and dtypes of the others, and in scales sizes in groups of 128 or 32.
    The order of strides stays. A shape is put into the first case whose sizes can be told apart. `given` replaces whole arguments by name.
    """

    def first_tensor(arguments: tuple) -> torch.Tensor:
        return next(value for value in arguments if isinstance(value, torch.Tensor))

    def tells_sizes_apart(arguments: tuple) -> bool:
        sizes = first_tensor(arguments).shape
        return len({1, *sizes}) == 1 + len(sizes)

    made = (op.Arguments(*c.make("meta", torch.Generator().manual_seed(0), arch.fp8_dtype)) for c in op.cases())
    of_case = next(made)
    if shape and not tells_sizes_apart(of_case):
        of_case = next(filter(tells_sizes_apart, made), of_case)
    first = first_tensor(of_case)
    changed = dict(zip(reversed(first.shape), reversed(shape or first.shape)))
    groups = {old // g: new // g for g in (MX_BLOCK, BLOCK) for old, new in changed.items() if old % g == new % g == 0}

    def like(name: str, value: torch.Tensor) -> torch.Tensor:
        sizes = groups | changed if "scale" in name else changed
        new_shape = shape if shape and value.shape == first.shape else [sizes.get(size, size) for size in value.shape]
        new_dtype = dtype if dtype and value.dtype == first.dtype else value.dtype
        if (*new_shape, new_dtype) == (*value.shape, value.dtype):
            return value
        if len(new_shape) != value.dim():
            return torch.empty(new_shape, dtype=new_dtype, device="meta")
        outermost_first = sorted(range(value.dim()), key=value.stride, reverse=True)
        return torch.empty_permuted(new_shape, outermost_first, dtype=new_dtype, device="meta")

    return {k: like(k, v) if isinstance(v, torch.Tensor) else v for k, v in of_case._asdict().items()} | given


def explain(op: Op, arch: str, *changes, require_code: bool = False, **given) -> Explanation:
    """Return the explanation of a call on `arch` with the arguments of `example`, without memory or a GPU."""
    known = archs.named(arch)
    return op.explain(**example(op, known, *changes, **given), arch=known, require_code=require_code)


def emulate(op: Op, arch: str, *changes, **given) -> Iterator[str]:
    """Yield lines about that call in the emulator: its kernels' registers, LDS, waves, instructions, bytes and waits."""
    from vllm_rocm_ops.emulator import cases as emulated  # an extra

    case = None if any(changes) or given else next(iter(op.cases()))
    return emulated.describe(op, op.Arguments(**example(op, archs.named(arch), *changes, **given)), case, arch)


def usual_arch() -> str:
    """Return the architecture of this machine's first GPU, or the first of `ARCHS` if it has no kernels."""
    arch = archs.of_device(0) if torch.cuda.is_available() else None
    return str(arch or next(iter(archs.ARCHS)))


def around(config: dict, tp: int, ep: int | None, arch: Arch) -> list[LayerCall]:
    """Return the decode calls that the plugin serves only if measured faster, on request, or in place of other calls.

    The KV cache is as vLLM has it on `arch`.
    """
    rocm_cache_layout, of = arch.vendor == "amd", model_layers.built_for(arch)
    fused = [
        *fused_calls.calls(config, tp, ep, rocm_cache_layout, of),
        *fused_calls.quantized_hidden(config, tp, ep, of)[:1],
        *model_layers.absorbed(config, tp, ep, of),
        *model_layers.attention(config, tp, rocm_cache_layout, ep, of),
    ]
    return sorted(fused, key=lambda call: call.fusion in fused_calls.AROUND_ATTENTION)


def table(
    calls: list[LayerCall],
    arch: Arch,
    batches: tuple[int, ...],
    verbose: bool = True,
    unserved: Sequence[tuple[Launch, int]] = (),
) -> list[tuple[str, ...]]:
    """Return a table of the calls of a rank on `arch`, and of the layers that no op serves, with what vLLM runs there.

    Columns are layer, calls per step, op, tokens, kernel, blocks of the kernels at each batch size, and configuration with its
    reason. Batch sizes that differ in blocks only share a row. This machine's measurements decide which kernel serves, and
    fixed limits decide unmeasured calls. Without `verbose` reasons have no configurations.
    """
    lines: list[tuple[str, ...]] = [("layer", "calls", "op", "tokens", "kernel", "blocks", "configuration")]
    record = comparisons.record_for(arch)
    fused = {part: call for call in calls for part in call.parts}
    for call in calls:
        rows: dict[tuple[str, str, str], list[tuple[int, str]]] = {}
        for batch in batches:
            serves, said = comparisons.served(call, arch, record, batch)
            layer = call.layer_at(batch) if call.fusion else call.layer
            whole = fused.get(call)
            if whole and whole.has_parts(batch) and comparisons.served(whole, arch, record, batch)[0]:
                kernel, why, blocks = f"in {whole.layer}", "", ""
            elif not serves:
                kernel, why, blocks = call.fusion.apart if call.fusion else "vLLM's kernel", said, ""
            else:
                kernel, why, blocks = plugin_kernel(call, arch, batch, verbose)
                why = ": ".join(filter(None, (said, why)))
            rows.setdefault((layer, kernel, why), []).append((batch, blocks))
        for (layer, kernel, why), sizes in rows.items():
            tokens, blocks = (",".join(filter(None, map(str, column))) for column in zip(*sizes))
            lines.append((layer, str(call.count), call.op.name, tokens, kernel, blocks, why))
    named = {launch: call for call in calls for launch in getattr(call, "launches", ()) if isinstance(launch, str)}
    for launch, count in unserved:
        by: dict[tuple[str, str], list[str]] = {}
        for batch in batches:
            within = named.get(launch.layer)
            is_ours = within is not None and comparisons.served(within, arch, record, batch)[0]
            by.setdefault((f"in {within.layer}", "") if is_ours else ("vLLM's kernel", launch.runs), []).append(
                str(batch)
            )
        for (kernel, why), sizes in by.items():
            lines.append((launch.layer, str(count), "", ",".join(sizes), kernel, "", why))
    return lines


def shortened(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return a table of `table` without op, blocks and configuration; reasons follow the kernels."""
    short = [(*row[:2], row[3], f"{row[4]} ({row[6]})" if row[6] else row[4]) for row in rows[1:]]
    return [("layer", "calls", "tokens", "kernel"), *short]


PLUGIN, TIMED, VLLM = SIDES = "plugin, unless timed slower", "plugin, if timed faster", "vLLM"


def sides(rows: list[tuple[str, ...]], launches: Sequence[LayerCall | Launch], batch: int, tp: int) -> dict[str, str]:
    """Return the side in `SIDES` of each layer of a step at a batch size, by the arguments of `summary`."""
    side = {launch.layer: VLLM for launch in launches if launch.layer != model_layers.PREFILL}
    if ALL_REDUCE in side and tp <= MAX_RANKS:
        side[ALL_REDUCE] = TIMED
    for layers, _, _, tokens, kernel, blocks, why in rows[1:]:
        if str(batch) in tokens.split(",") and not kernel.startswith("in "):
            of_row = PLUGIN if blocks else TIMED if "unmeasured" in why else VLLM
            for layer in side.keys() & layers.split(" + "):
                side[layer] = min(side[layer], of_row, key=SIDES.index)
    return side


def summary(
    rows: list[tuple[str, ...]], launches: Sequence[LayerCall | Launch], batches: tuple[int, ...], tp: int
) -> list[str]:
    """Return lines that name the layers of a step by who runs them at each batch size: now, or after start-up timing.

    Args:
        rows: A `table` of the step's calls.
        launches: All launches of the step.
        batches: The table's batch sizes.
        tp: The ranks of the step's all-reduces.
    """
    said: dict[tuple[str, ...], list[int]] = {}
    for batch in batches:
        side = sides(rows, launches, batch, tp)
        by_side = (", ".join(layer for layer in side if side[layer] == each) for each in SIDES)
        said.setdefault((*by_side,), []).append(batch)
    lines = [("tokens", "runs", "layers")]
    for by_side, sizes in said.items():
        shown = [(each, names) for each, names in zip(SIDES, by_side) if names]
        lines += [(",".join(map(str, sizes)) if not place else "", *row) for place, row in enumerate(shown)]
    return columns(lines, WIDTH)


def lines_of(rows: list[tuple[str, ...]], verbose: bool) -> list[str]:
    """Format a table of a model's calls."""
    return columns(rows, None if verbose else WIDTH)


def plugin_kernel(call: LayerCall, arch: Arch, tokens: int, verbose: bool) -> tuple[str, str, str]:
    """Return the plugin's kernels for a call, the configuration's source, and their blocks."""
    arguments = call.case(tokens).make("meta", torch.Generator(), arch.fp8_dtype)
    explained = call.op.explain(*arguments, arch=arch)
    if not explained.launches:
        return "PyTorch", explained.source, ""
    row = call.op.tuned_row(call.op.Arguments(*arguments), arch)
    why = f"{explained.source}: {row.path}: {row.source}" if row else explained.source
    kernel = " + ".join(launch.symbol for launch in explained.launches)
    blocks = "+".join(str(math.prod(launch.grid)) for launch in explained.launches)
    return kernel, why if verbose else "tuned" if row else "", blocks
