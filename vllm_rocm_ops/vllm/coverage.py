"""Report which layers of a model the seams cover, and which ops a start called.

A seam's probe finds a name that vLLM no longer has. It does not find a model with layer classes of its own, such as
norms that no seam replaces.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

import vllm_rocm_ops
from vllm_rocm_ops.core import tables
from vllm_rocm_ops.core.quantization import MX_BLOCK
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.attention import gated_delta_net_core as delta_net
from vllm_rocm_ops.vllm.attention import rope_pre_attention
from vllm_rocm_ops.vllm.attention import timing as attention_timing
from vllm_rocm_ops.vllm.graph import compilation, compiled_ops, model_queries
from vllm_rocm_ops.vllm.linear import mx_weights
from vllm_rocm_ops.vllm.moe import expert_support
from vllm_rocm_ops.vllm.selection import kernel_selection

logger = logging.getLogger("vllm.vllm_rocm_ops")


def covered_by(name: str) -> set[tuple[str, int]]:
    """Return what `Linear.covers` has for a seam of linear layers."""
    return {one.covers for one in seam.load(name).comparisons} - {None}


SEAMS = {
    "norms": ("norm",),
    "activations": ("activation",),
    "linear layers": tuple(name for name in seam.in_folder("linear") if covered_by(name)),
    "layers of experts": seam.in_folder("moe"),
    "layers of attention": ("decode_attention", "mla_attention"),
    "layers of attention with drafts": ("decode_attention", "mla_attention"),
    "layers of Gated DeltaNet": ("gated_delta_net",),
}
"""Layer kinds, and the seams that cover each."""
LINEARS = set().union(*map(covered_by, SEAMS["linear layers"]))
"""Parameters of the linear layers among these, and their bytes per element."""


@dataclasses.dataclass
class Coverage:
    """Count a kind's layers: those that run through a seam, and the rest by class."""

    taken: int = 0
    missed: dict[str, int] = dataclasses.field(default_factory=dict)


def kernels_of(module: torch.nn.Module) -> Iterator[object]:
    """Yield the plugin's linear kernels and experts that a layer holds."""
    method = getattr(module, "quant_method", None)
    moe = getattr(method, "moe_kernel", None)
    holders = [vars(holder) for holder in (method, getattr(module, "scheme", None), moe) if hasattr(holder, "__dict__")]
    held = [value for holder in holders for value in holder.values()] + [getattr(moe, "fused_experts", None)]
    ours = (kernel for kernel in held if type(kernel).__name__.startswith("RocmOps"))
    yield from {id(kernel): kernel for kernel in ours if not getattr(kernel, "refused", "")}.values()


def kind_of(module: torch.nn.Module) -> str | None:
    """Return the kind of a layer that a seam may cover. Linear layers count by their weight, as `Linear.covers`."""
    name = type(module).__name__
    if name == delta_net.CLASS:
        return "layers of Gated DeltaNet"
    if "RMSNorm" in name:
        return "norms"
    if "SiluAndMul" in name:
        return "activations"
    if expert_support.first_weight(module) is not None:
        return "layers of experts"
    if hasattr(module, "input_size_per_partition"):
        sizes = {(name, getattr(getattr(module, name, None), "itemsize", 0)) for name, _ in LINEARS}
        return "linear layers" if sizes & LINEARS else None
    return None


def layers(model: torch.nn.Module) -> Iterator[tuple[str, bool, str]]:
    """Yield for each layer of a model: its kind, whether a seam covers it, and its class. A launch has its layer's norm inside."""
    inside = {module.norm for module in model.modules() if isinstance(module, delta_net.OneLaunch)}
    for module in model.modules():
        kind, name = kind_of(module), type(module).__name__
        if kind in ("norms", "activations"):
            taken = (
                hasattr(module, "rocm_ops_forward") or module in inside or getattr(module, model_queries.MARKED, False)
            )
            why = rope_pre_attention.norm_refusal(module)
            yield kind, taken, f"{name}, {why}" if why else name
        elif kind == "layers of Gated DeltaNet":
            yield kind, isinstance(module, delta_net.OneLaunch), name
        elif kind is not None:
            method = type(getattr(module, "quant_method", module)).__name__
            why = getattr(expert_support.experts_of(module), "refused", "")
            yield kind, next(kernels_of(module), None) is not None, f"{method}, {why}" if why else method


def attention(config) -> Iterator[tuple[str, bool, str]]:
    """Yield kind, whether it is covered, and class of each attention layer of `static_forward_context`; with drafts once more for these."""
    for layer in config.compilation_config.static_forward_context.values():
        if impl := getattr(layer, "impl", None):
            what, plugin = type(impl).__name__, getattr(impl, "rocm_ops", None)
            why = plugin.unsupported_reason if plugin else ""
            taken = plugin is not None and not why
            yield "layers of attention", taken, f"{what}, {why}" if why else what
            if taken and attention_timing.rows_of(config) > 1:
                kind, why = "layers of attention with drafts", plugin.drafts_refusal
                yield kind, not why, f"{what}, {why}"


def reached(worker) -> dict[str, Coverage]:
    """Return, by kind, how many layers of a worker's models the seams cover.

    Kinds whose seams are all off are left out.
    """
    on, result = set(seam.active()), {}
    every = [layer for model in compilation.models_of(worker) for layer in layers(model)]
    for kind, taken, what in (*every, *attention(worker.vllm_config)):
        if on.isdisjoint(SEAMS[kind]):
            continue
        reach = result.setdefault(kind, Coverage())
        reach.taken += taken
        if not taken:
            reach.missed[what] = reach.missed.get(what, 0) + 1
    return result


def log_results(reached: dict[str, Coverage]) -> None:
    """Log the covered layers, and warn of the others."""
    counts = [f"{reach.taken} {kind}" for kind, reach in reached.items() if reach.taken]
    if counts:
        logger.info("vllm-rocm-ops: covers %s", ", ".join(counts))
    missed = [
        f"{sum(reach.missed.values())} {kind} ({', '.join(f'{count} {what}' for what, count in sorted(reach.missed.items()))})"
        for kind, reach in reached.items()
        if reach.missed
    ]
    if missed:
        logger.warning("vllm-rocm-ops: not covered, vLLM's own code runs: %s", "; ".join(missed))


def packed(models: Iterable[torch.nn.Module]) -> Iterator[tuple[int, int]]:
    """Yield the bytes of each layer's packed MX weights, and of the copies in bf16 that vLLM's emulation multiplies."""
    for module in (module for model in models for module in model.modules()):
        if any(mx_weights.has_packed_weights(kernel) for kernel in kernels_of(module)):
            weights = {name: value for name, value in module.named_parameters(recurse=False) if "weight" in name}
            blocks = sum(value.numel() for name, value in weights.items() if "scale" in name)
            yield sum(value.nbytes for value in weights.values()), blocks * MX_BLOCK * torch.bfloat16.itemsize


def log_packed(packed: list[tuple[int, int]]) -> None:
    """Log what packed MX weights save and cost."""
    if packed:
        taken, copies = zip(*packed)
        logger.info(
            "vllm-rocm-ops: %d layers keep MX weights packed: %.1f GiB; copies in bf16 would take %.1f GiB. A call of more tokens than "
            "the plugin serves copies one layer at a time, %.2f GiB at most; %s=1 keeps vLLM's copies",
            len(packed),
            *(amount / 2**30 for amount in (sum(taken), sum(copies), max(copies))),
            "=1 or ".join(mx_weights.DEQUANT_AT_LOAD.values()),
        )


@dataclasses.dataclass
class Calls:
    """Count a worker's calls until the end of its warm-up."""

    seams: dict[str, int]
    """By seam that is on. Seams that share their ops share a count."""
    patterns: dict[str, int]
    """By selected pattern."""
    unreached: list[str]
    """Selected patterns in no graph, and uncalled seams whose shapes all select the plugin at one captured size.

    Attention is left out: it may run outside of graphs.
    """


def calls(captured: tuple[int, ...] = ()) -> Calls:
    """Return this process's calls by seam and by selected pattern.

    A seam is expected to have calls if all its shapes select the plugin at one of the captured token counts.
    """
    counts = {op: sum(kernels.values()) for op, kernels in vllm_rocm_ops.stats().items()}
    shared: dict[tuple[str, ...], list[str]] = {}
    for name in seam.active():
        shared.setdefault(seam.load(name).ops, []).append(name)
    shared.pop((), None)
    served = [pattern for pattern, runs in compiled_ops.choices.decisions.items() if runs]
    with_gate = "silu_and_mul", "silu_and_mul_with_expert_gate"
    names = {
        str(pattern): {f"{prefix}{pattern.op}" for prefix in ("", "scaled_mm_", "all_reduce_")}
        | {pattern.op.replace(*with_gate)}
        for pattern in sorted(served)
    }
    patterns = {pattern: sum(counts.get(name, 0) for name in op_names) for pattern, op_names in names.items()}
    result = Calls({}, patterns, [])
    has_run = bool(counts)  # a CPU worker may have no call before its first request
    result.unreached += [pattern for pattern, count in result.patterns.items() if has_run and not count]
    for ops, names in shared.items():
        seams = "/".join(names)
        result.seams[seams] = sum(count for op, count in counts.items() if op.startswith(ops))
        shapes = [choice for choice in kernel_selection.all_choices() if choice.key.op.startswith(ops)]
        chosen = has_run and any(
            shapes and all(choice.plugin_serves(tokens) for choice in shapes) for tokens in captured
        )
        if chosen and not result.seams[seams] and names[0] not in SEAMS["layers of attention"]:
            result.unreached.append(seams)
    return result


def log_calls(called: Calls) -> None:
    """Log a worker's calls, and warn of selected patterns and seams without one."""
    counts = [f"{seams} {count}" for seams, count in called.seams.items() if count]
    if counts:
        logger.info("vllm-rocm-ops: calls until the end of the warm-up: %s", ", ".join(counts))
    if called.unreached:
        logger.warning("vllm-rocm-ops: selected, but in no graph of this model: %s", ", ".join(called.unreached))


def write(worker, called: Calls) -> None:
    """Write what this start reached to reached.json, for `vllm-rocm-ops doctor`."""
    path = kernel_selection.path_of(kernel_selection.machine()).with_name("reached.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    layers = {kind: dataclasses.asdict(reach) for kind, reach in reached(worker).items()}
    said = {"model": worker.vllm_config.model_config.model, "layers": layers, **dataclasses.asdict(called)}
    tables.replace(path, json.dumps(said, indent=1))


def read(folder: Path) -> list[dict]:
    """Return what the last starts reached, one entry per arch. Unreadable files are left out."""
    result = []
    for path in sorted(folder.glob("*/reached.json")):
        try:
            report = json.loads(path.read_text())
            result.append(
                {"path": str(path), **{name: report[name] for name in ("model", "layers", *Calls.__annotations__)}}
            )
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return result
