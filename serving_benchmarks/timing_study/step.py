"""Model a decode step of one rank as vLLM launches it: every launch in order, with its time, HBM roofline and the gap after it.

    nodes = step.nodes(model_config.read("deepseek-v3"), 8, None, 1, machines.named("MI300X"), "plugin", step.frozen_time(machine))
    step.total(nodes)

On the side "plugin", the plugin's calls have the kernel model's times, and fused launches replace separate ones where predicted faster:
the rows of `fused_calls.FUSIONS`; an all-reduce and the following norm (by baseline.py's rule), with the sum of routed and shared experts
before; the norm before experts and the quantization of their hidden states. On the side "baseline", they have the times of baseline.py's
table or rule. Launches without an op of the plugin, such as GLM's router, follow the rule on both sides.
Shared experts run on a second stream during routing and experts: the shorter of the two costs nothing. All times are predictions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.collectives import launches
from vllm_rocm_ops.models import fused_calls
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.models.fused_calls import FusedCall
from vllm_rocm_ops.models.layers import LayerCall
from vllm_rocm_ops.timing import CONTEXT, frozen
from vllm_rocm_ops.timing.machines import Machine

from . import baseline
from .baseline import Time

SIDES = ("baseline", "plugin")
MAIN, BESIDE, SECOND = "", "beside the second stream", "second stream"
REDUCED = "all-reduce"
KERNEL_MODEL = "kernel model"  # source of its times
SMALL = (
    "router",
    "routing",
    "input norm",
    "post-attention norm",
    "final norm",
    "q_norm",
    "k_norm",
    fused_calls.HEAD_NORMS,
)
"""Layers of few bytes, which follow the rule where vLLM runs them, such as GLM's router."""
LAUNCHES = {
    "attention": 2,
    "experts": 4,
    model_layers.DELTA_NET: 6,
}  # per baseline call under the rule; others have one
ROTATIONS = ops.rope_and_cache, ops.qk_norm_rope_and_cache

KernelTime = Callable[[LayerCall, int], "tuple[float, int, float | None] | None"]
"""The kernel model: us, launches and error band of a call by its tokens, or None if no kernel serves it."""


@dataclasses.dataclass(frozen=True)
class Node:
    """A launch, or the launches of a call.

    `us` and `floor_us` are per call, of which a step has `count`. `band` is the error band of the kernels, None if unknown. `op` is ""
    if the plugin has no such op.
    """

    layer: str
    op: str
    us: float
    launches: int
    kind: str
    source: str
    floor_us: float
    gap_us: float
    stream: str = MAIN
    band: float | None = None
    count: int = 1

    @property
    def whole_us(self) -> float:
        """Return the time of a call with the gap after it."""
        return self.us + self.gap_us

    @property
    def cost_us(self) -> float:
        """Return the time of all calls in a step above the floor of their bytes."""
        return self.count * (self.whole_us - self.floor_us)


class Total(NamedTuple):
    """The sums of a step in us.

    `hidden_us` is saved by the second stream. `known_us` is the part with an error band, `bound_us` the sum of these errors.
    """

    us: float
    launches: int
    hidden_us: float
    floor_us: float
    gap_us: float
    known_us: float
    bound_us: float


def live_time(machine: Machine, context: int) -> KernelTime:
    """Return the kernel model as live predictions, which need the emulator."""
    from vllm_rocm_ops.timing import predict

    def known(call: LayerCall, tokens: int) -> tuple[float, int, float | None] | None:
        case = call.case(tokens).make("meta", torch.Generator(), machine.arch.fp8_dtype)
        try:
            found = predict.predict_call(call.op, call.op.Arguments(*case)._asdict(), machine, context)
        except ValueError:
            return None
        return sum(kernel.prediction.us for kernel in found), len(found), predict.band(call.op, machine.name).ratio

    return known


def frozen_time(machine: Machine, calls: dict[str, dict] | None = None) -> KernelTime:
    """Return the kernel model as a lookup in frozen predictions, by default the newest.

    It returns None for calls without a prediction, and raises ValueError for a number of tokens without any.
    """
    calls = frozen.newest()["calls"] if calls is None else calls
    sizes = {name.rsplit(" ", 2)[1] for name in calls if name.startswith(f"{machine.name} ")}

    def known(call: LayerCall, tokens: int) -> tuple[float, int, float | None] | None:
        if str(tokens) not in sizes:
            raise ValueError(
                f"tokens must be one of {', '.join(sizes)} for frozen predictions of {machine.name}, got {tokens}"
            )
        values = calls.get(frozen.key(machine.name, call, tokens))
        return values and (values["us"], values["launches"], values["band"])

    return known


def read_bytes(call: LayerCall, tokens: int, machine: Machine, context: int) -> float:
    """Return the bytes that a call reads: its arguments, the experts that are hit, and `context` keys per request of caches."""
    given = call.op.Arguments(*call.case(tokens).make("meta", torch.Generator(), machine.arch.fp8_dtype))._asdict()
    sizes = {
        name: value.numel() * value.element_size() for name, value in given.items() if isinstance(value, torch.Tensor)
    }
    if call.op in ROTATIONS:  # they write caches, and read few angles
        sizes = {name: size for name, size in sizes.items() if "cache" not in name}
    if call.op is ops.gated_delta_net_decode:  # and writes it
        sizes["state"] *= 2
    if "w1" in sizes:
        share = hit(*call.parameters[:3:2], tokens)
        sizes = {name: size * (share if name.startswith("w") else 1) for name, size in sizes.items()}
    if call.op in model_layers.ATTENTION:
        positions = next(value for value in reversed(call.parameters) if type(value) is int)
        sizes = {name: size * context / positions if "cache" in name else size for name, size in sizes.items()}
    return float(sum(sizes.values()))


def hit(experts: int, topk: int, tokens: int) -> float:
    """Return the expected fraction of experts hit with random routing."""
    return 1 - (1 - topk / experts) ** tokens


def order(
    config: dict, tp: int, ep: int | None, arch: str = model_layers.ARCH
) -> Iterator[tuple[str, LayerCall | None, str]]:
    """Yield the launches of a step: the layer, the call if the plugin has an op, and the stream.

    Raises ValueError for a layer with weights that no op takes: the bytes that it reads are unknown.
    """
    launched = model_layers.launches(config, tp, ep, arch)
    has_shared = any(launch.layer.startswith("shared") for launch in launched)
    fused = fused_calls.calls(config, tp, ep, arch=arch)
    delta_net, inside = next((call for call in fused if call.op is ops.gated_delta_net_decode), None), 0
    if delta_net and delta_net.parts:  # apart here: the projection of b and a
        launches = tuple(launch for launch in delta_net.launches if isinstance(launch, str))
        given = {"parameters": (*delta_net.parameters[:-1], 0), "launches": launches}
        delta_net = dataclasses.replace(delta_net, layer=" + ".join(launches), **given)
    for launch in launched:
        is_call, inside = isinstance(launch, LayerCall), max(inside - 1, 0)
        if launch.layer == model_layers.DELTA_NET:  # with what follows: vLLM's launches have no bytes of their own
            inside = len(delta_net.launches)
            yield delta_net.layer, dataclasses.replace(delta_net, count=1), MAIN
        if inside:
            continue
        if is_call and not launch.count:
            continue
        if not is_call and launch.runs and launch.layer not in SMALL:
            raise ValueError(f"{launch.layer} runs in vLLM ({launch.runs}), whose time is unknown")
        beside = has_shared and launch.layer in ("routing", "experts")
        stream = SECOND if launch.layer.startswith("shared") else BESIDE if beside else MAIN
        yield launch.layer, launch if is_call else None, stream
    for _ in range(int(baseline.REST.value)):
        yield "inputs, sampling and copies", None, MAIN


def nodes(
    config: dict,
    tp: int,
    ep: int | None,
    tokens: int,
    machine: Machine,
    side: str,
    known: KernelTime,
    context: int = CONTEXT,
    launch: float = baseline.LAUNCH.value,
    skinny: int = int(baseline.SKINNY.value),
    aiter: bool | None = None,
) -> list[Node]:
    """Return the launches of a step in order of first occurrence, equal ones merged into a count.

    `launch` is the us of a vLLM launch, and `skinny` the most rows of its wvSplitKQ. `aiter` says whose all-reduce the
    step has, by default AITER's where the baseline's GEMMs are AITER's.
    """
    if side not in SIDES or (side == "baseline" and machine.name not in baseline.PRODUCTS):
        raise ValueError(
            f"side must be {' or '.join(SIDES)} (baseline on {' and '.join(baseline.PRODUCTS)}), got {side} on {machine.name}"
        )
    hidden = config["hidden_size"]
    if aiter is None:
        aiter = uses_aiter(config, tp, ep, machine)

    @functools.cache
    def node(layer: str, call: LayerCall | None, stream: str) -> Node:
        band, read = None, 0.0 if call is None else read_bytes(call, tokens, machine, context)
        is_ours = call is not None and side != "baseline" and not layer.startswith(REDUCED)
        ours = _ours(call, tokens, known) if is_ours else None
        if ours:
            time, band = Time(*ours[:2], "predicted", KERNEL_MODEL), ours[2]
        elif layer == REDUCED:
            time = baseline.all_reduce(machine, tokens * hidden * 2 / 1024, aiter)
        elif layer.startswith(REDUCED):
            time = baseline.fused_all_reduce(machine, tp, tokens, hidden) or Time(math.inf, 1, "", "no kernel")
            time = time._replace(us=time.us + baseline.ADDEND.value * (fused_calls.SHARED_SUM in layer))
        else:
            time = _baseline(call, layer, tokens, machine, read, launch, skinny)
        floor = read / machine["hbm_bandwidth"] / 1e3
        name = call.op.name if call else ""
        gap = time.launches * baseline.GAP.value + max(time.launches * baseline.MIN_LAUNCH.value - time.us, 0)
        return Node(layer, name, time.us, time.launches, time.kind, time.source, floor, gap, stream, band)

    arch = model_layers.built_for(machine.arch)
    fused = [dataclasses.replace(call, count=1) for call in fused_calls.calls(config, tp, ep, arch=arch)]
    apart, quantized = [*order(config, tp, ep, arch)], fused_calls.quantized_hidden(config, tp, ep, arch)
    found = [
        [dataclasses.replace(node(*each), count=count) for each, count in Counter(_faster(way, fused, node)).items()]
        for way in (apart, _quantized(apart, quantized, node))
    ]
    return min(found, key=lambda way: total(way).us)


def _quantized(launched: list[tuple], calls: list[LayerCall], node: Callable[..., Node]) -> list[tuple]:
    """Return a step's launches with the experts' input quantized by the preceding norm, if the kernel model has both times."""
    ours = {call.layer: dataclasses.replace(call, count=1) for call in calls}
    changed = {layer: (layer, ours[layer], stream) for layer, _, stream in launched if layer in ours}
    if not ours or any(node(*each).source != KERNEL_MODEL for each in changed.values()):
        return launched
    return [changed.get(each[0], each) for each in launched if each[0] != fused_calls.SHARED_QUANTIZATION]


def _faster(launched: Sequence[tuple], fused: Sequence[FusedCall], node: Callable[..., Node]) -> Iterator[tuple]:
    """Yield the launches of a step, with a fused launch of the plugin in place of several if predicted faster."""
    left: list[tuple | None] = [*launched]
    for places, one in [*_in_one(left, fused)]:
        first, *others = places
        if any(each and each[0] == fused_calls.CACHE_WRITE for each in left[first : others[-1]]):
            continue  # W_UK's launch rotates queries only where the cache write's has rotated keys
        each = one.layer, one, left[first][2]
        found, apart = node(*each), sum(node(*left[place]).whole_us for place in places)
        is_ours = KERNEL_MODEL in (found.source, node(*left[others[-1]]).source if REDUCED in one.layer else "")
        if is_ours and found.whole_us < apart:
            left[first] = each
            for place in others:
                left[place] = None
    yield from filter(None, left)


def _in_one(launched: Sequence[tuple], fused: Sequence[FusedCall]) -> Iterator[tuple[list[int], LayerCall]]:
    """Yield the places of launches that one call replaces, and the call."""
    names, given = [layer for layer, *_ in launched], [call or layer for layer, call, _ in launched]
    for one in fused:
        for place in (place for place, launch in enumerate(given) if launch == one.launches[0]):
            again = next((i for i in range(place + 1, len(names)) if names[i] == names[place]), len(names))
            places = [place]
            for launch in one.launches[1:]:
                places += [i for i in range(places[-1] + 1, again) if given[i] == launch][:1]
            if len(places) == len(one.launches):
                yield places, one
    for place, second in enumerate(given[1:], 1):
        if names[place - 1] == REDUCED and isinstance(second, LayerCall) and second.op.name in launches.NORMS:
            places = [place - 1, place]
            if place > 1 and names[place - 2] == fused_calls.SHARED_SUM:
                places.insert(0, place - 2)
            name = " + ".join((REDUCED, *(names[i] for i in places[:-2]), second.layer))
            yield places, dataclasses.replace(second, layer=name)


def _ours(call: LayerCall, tokens: int, known: KernelTime) -> tuple[float, int, float | None] | None:
    """Return the kernel model's time of a call, scaled for experts: it assigns tokens in turn, random routing hits fewer."""
    found = known(call, tokens)
    if found and call.layer == "experts":
        experts, _, topk = call.parameters[:3]
        return found[0] * hit(experts, topk, tokens) / min(topk * tokens / experts, 1), *found[1:]
    return found


def uses_aiter(config: dict, tp: int, ep: int | None, machine: Machine) -> bool:
    """True if the baseline's GEMMs are AITER's: all on MI355X, block-scaled ones elsewhere."""
    blocks = (call.op.name == ops.block_scaled_mm.name for call in model_layers.sequence(config, tp, ep) if call.count)
    return machine.name == baseline.LARGER_PRODUCT or any(blocks)


def speedup(plugin: Callable[[float], Total], stock: Callable[[float], Total], machine: Machine) -> tuple[float, float]:
    """Return the least and the most baseline / plugin over the costs of a vLLM launch, the same on both sides."""
    ratios = [stock(launch).us / plugin(launch).us for launch in baseline.launch_costs(machine)]
    return min(ratios), max(ratios)


def _baseline(
    call: LayerCall | None, layer: str, tokens: int, machine: Machine, read: float, launch: float, skinny: int
) -> Time:
    found = call and baseline.published(machine, call.op.name, call.parameters, tokens, skinny)
    if found and layer == "experts":  # published without token sorting and input quantization
        more = baseline.rule(machine, 2, 0, launch)
        return found._replace(us=found.us + more.us, launches=found.launches + more.launches)
    return found or baseline.rule(machine, LAUNCHES.get(layer.partition(" + ")[0], 1), read, launch)


def total(found: Sequence[Node]) -> Total:
    """Return the sums of a step."""

    def sum_of(value: Callable[[Node], float], *streams: str) -> float:
        return sum(node.count * value(node) for node in found if not streams or node.stream in streams)

    hidden = min(sum_of(lambda node: node.whole_us, BESIDE), sum_of(lambda node: node.whole_us, SECOND))
    return Total(
        sum_of(lambda node: node.whole_us) - hidden,
        sum(node.count * node.launches for node in found),
        hidden,
        sum_of(lambda node: node.floor_us),
        sum_of(lambda node: node.gap_us),
        sum_of(lambda node: node.us if node.band is not None else 0),
        sum_of(lambda node: node.us * (node.band or 0)),
    )


def worst(found: Sequence[Node], most: int = 10) -> list[Node]:
    """Return the launches with the most time above the floor of their bytes, without those that the second stream hides."""
    seen = [node for node in found if node.stream != SECOND]
    return sorted(seen, key=lambda node: -node.cost_us)[:most]


def cause(node: Node) -> str:
    """Return why a launch exceeds the time of its bytes: launches, bandwidth or latency."""
    if node.layer.startswith(REDUCED):
        return "8-GPU synchronization"
    if not node.op:
        return f"not a plugin op: {node.us:.1f} us by the rule"
    fixed = node.launches * baseline.MIN_LAUNCH.value
    share = node.floor_us / node.us if node.us else 1.0
    if fixed >= node.us - node.floor_us:
        return f"launches: {node.launches} x at least {baseline.MIN_LAUNCH.value} us"
    return f"bandwidth: {share:.0%} of HBM bandwidth" if share >= 0.5 else f"latency: bytes explain {share:.0%}"
