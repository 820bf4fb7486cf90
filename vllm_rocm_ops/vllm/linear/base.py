"""Keep vLLM's kernel next to the plugin's for the same linear layer, for unsupported or slower calls.

Each call chooses between the op and vLLM's kernel (kernel_selection.py) inside one opaque torch op: a compiled graph
serves every token count, and a captured graph holds the choice for its batch size. The torch op names the baseline
by class and configuration. Both are the same in every process, so graphs from vLLM's compile cache find the kernel, and
equal layers compile to equal graphs. A kernel has no other state: the weights are arguments of the torch op.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from vllm_rocm_ops.core import envs
from vllm_rocm_ops.core import launch as launches
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.core.tensors import rows_of
from vllm_rocm_ops.ops.shared.weight_layout import fits
from vllm_rocm_ops.vllm import compat, seam
from vllm_rocm_ops.vllm.linear import weight_order
from vllm_rocm_ops.vllm.selection import kernel_selection
from vllm_rocm_ops.vllm.selection.comparison import LayerComparison
from vllm_rocm_ops.vllm.selection.kernel_selection import Choice
from vllm_rocm_ops.vllm.selection.key import Baseline, Key

shuffled: set[str] = set()
"""The shapes of weights that this process put in fragment weight_order.order."""

_kernels: dict[str, object] = {}

_named: dict[str, str] = {}
"""By a kept kernel's name: the option by which the user named its backend."""


METHODS = {
    "is_supported": ("compute_capability",),
    "process_weights_after_loading": ("layer",),
    "apply_weights": ("layer", "x", "bias"),
}
"""The methods of vLLM's linear kernels that the plugin overrides or calls, and their parameters."""


@dataclasses.dataclass(frozen=True)
class Table:
    """One of vLLM's tables of linear kernels, into which a seam inserts one.

    Attributes:
        name: Its name in vLLM's `kernels.linear`.
        quantization: vLLM's name of its kind of layers.
        base: The base class of the plugin's kernel, in `kernels.linear`.
        config: The parameter of `can_implement`.
        methods: More methods of the base class that the plugin overrides or calls, and their parameters.
    """

    name: str
    quantization: str
    base: str
    chooser: ClassVar = "choose_scaled_mm_linear_kernel", ("config", "possible_kernels")
    """vLLM's function that chooses from the table, and its parameters."""
    config: str = "c"
    methods: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def base_class(self) -> type:
        module, _, name = self.base.rpartition(".")
        return getattr(importlib.import_module(f"vllm.model_executor.kernels.linear.{module}"), name)

    def kernels(self) -> dict:
        """Return vLLM's kernels by platform."""
        from vllm.model_executor.kernels import linear

        return getattr(linear, self.name)

    def all_methods(self) -> Mapping[str, tuple[str, ...]]:
        """Return all methods that the plugin overrides or calls, and their parameters."""
        return {**METHODS, "can_implement": (self.config,), **self.methods}

    def probe(self) -> None:
        """Raise `Unavailable` unless the table, how vLLM chooses from it, and the base class are as expected."""
        from vllm.model_executor.kernels import linear

        for name in (self.name, "_LINEAR_BACKEND_KERNEL_MAP"):
            seam.require(isinstance(getattr(linear, name, None), dict), name)
        chooser, parameters = self.chooser
        seam.require_parameters(getattr(linear, chooser), *parameters)
        base = self.base_class()
        for name, parameters in self.all_methods().items():
            seam.require_parameters(getattr(base, name), *parameters)

    def choose(self, config) -> type:
        return compat.choose_linear_kernel(config, self.kernels(), self.quantization)

    def seam(self, *comparisons: "Linear", install: Callable[[], None], **options) -> seam.Seam:
        """Return the seam that inserts a kernel, by default named after the torch op of its first comparison."""
        given = {"probe": self.probe, "comparisons": comparisons, "ops": tuple(one.op.name for one in comparisons)}
        first = f"the first row of {self.name}"
        given |= {"name": comparisons[0].run.__name__, "replaces": first, "install": install}
        return seam.Seam(**{**given, **options})


class HasBaseline:
    """Mix into vLLM's base class of a kind of kernels, and keep vLLM's kernel for the same layer."""

    table: Table
    comparison: "Linear"
    quantization: str
    """The quantization of the layer's input, for the norm or activation before it (core/quantization.py)."""
    traits: tuple = ()
    """The arguments of `Op.linear` between the sizes and a bias."""
    order = None

    @classmethod
    def is_supported(cls, compute_capability=None) -> tuple[bool, str | None]:
        """Answer vLLM. The op's order of summation depends on the token count."""
        from vllm import envs as vllm_envs

        return (False, "is not batch invariant") if vllm_envs.VLLM_BATCH_INVARIANT else (True, None)

    @classmethod
    def can_keep_baseline(cls, config) -> tuple[bool, str]:
        """Answer vLLM whether the plugin may quantize the input of the kernel that vLLM would run."""
        return can_keep(vllm_kernel_for(cls, config), cls.table.base_class())

    def __init__(self, *arguments, **named):
        """Create and keep the kernel that vLLM would run. It serves alone until the weight's order is known."""
        super().__init__(*arguments, **named)
        baseline = vllm_kernel_for(type(self), arguments[0])
        self.baseline = baseline and baseline(*arguments, **named)
        option = baseline and named_backend(baseline, self.table.quantization)
        self.baseline_name = baseline and register_baseline(self.baseline, option)
        self.order = None if self.baseline else "plain"


def register_first(plugin: type, table: dict) -> None:
    """Have vLLM ask the plugin's kernel before its own. `register_linear_kernel` appends, after catch-all kernels.

    It is asked beside a backend that the user names, too, but for emulation, unless the user keeps named backends.
    """
    from vllm.model_executor.kernels import linear
    from vllm.platforms import current_platform

    kernels = table.setdefault(current_platform._enum, [])
    for backend, members in linear._LINEAR_BACKEND_KERNEL_MAP.items():
        if backend != "emulation" and envs.VLLM_ROCM_OPS_NAMED_BACKEND != "keep" and members.intersection(kernels):
            members.add(plugin)
    kernels.insert(0, plugin)


def named_backend(kernel: type, quantization: str) -> str:
    """Return the option by which the user named the backend of a kernel, with its value. Empty if none names it."""
    from vllm.model_executor.kernels import linear

    option, backend = compat.linear_backend(quantization)
    return f"{option} {backend}" if kernel in linear._LINEAR_BACKEND_KERNEL_MAP.get(backend, ()) else ""


def vllm_kernel_for(plugin: type[HasBaseline], config) -> type | None:
    """Return the kernel that vLLM would choose without the plugin. None if there is none, and on CPU for tests.

    Raises vLLM's ValueError if the user named a backend and no kernel of it supports the layer.
    """
    from vllm.platforms import current_platform

    if seam.served_platform() == "cpu":
        return None
    table = plugin.table
    kernels = table.kernels()[current_platform._enum]
    place = kernels.index(plugin)
    del kernels[place]
    try:
        return table.choose(config)
    except ValueError:
        if named_backend(plugin, table.quantization):
            raise
        return None
    finally:
        kernels.insert(place, plugin)


def can_keep(baseline: type | None, base: type) -> tuple[bool, str]:
    """Answer vLLM whether its kernel can be kept: its input must be quantized by `base`, as the plugin's is."""
    plain = baseline is None or (
        baseline.apply_weights is base.apply_weights and getattr(baseline, "apply_input_quant", True)
    )
    return plain, "" if plain else f"leaves the layer to {baseline.__name__}, which quantizes its input itself"


def register_baseline(kernel: object, named: str = "") -> str:
    """Keep a kernel and how its backend is named, and return the name by which `baseline_named` finds it."""
    name = name_of(kernel)
    _kernels.setdefault(name, kernel)
    _named[name] = named
    return name


def name_of(kernel: object) -> str:
    """Return the name of a kernel that is kept."""
    return f"{type(kernel).__name__} {kernel.config}"


def baseline_named(name: str) -> object:
    """Return the kernel that was kept by this name."""
    return _kernels[name]


def rows_at(tensor: Tensor, places: Tensor) -> Tensor:
    """Return rows of a tensor in float32."""
    one_byte = tensor.element_size() == 1
    return tensor.view(torch.uint8)[places].view(tensor.dtype).float() if one_byte else tensor[places].float()


def bias_at(bias: Tensor | None, places: Tensor) -> Tensor | float:
    """Return elements of a bias in float32, 0 without one."""
    return 0.0 if bias is None else bias[places].float()


def scales_at(scale: Tensor, places: Tensor) -> Tensor:
    """Return the scales of rows, or the one of all, to multiply rows by."""
    return scale if scale.numel() == 1 else scale.flatten()[places].view(-1, 1)


def asks_for_aiter(kind: str) -> bool:
    """True if vLLM's own answer is that it uses AITER for a kind ("linear", "fused_moe"), by its variables or otherwise."""
    from vllm._aiter_ops import rocm_aiter_ops

    return bool(getattr(rocm_aiter_ops, f"is_{kind}_enabled")())


def baseline_serves(kernel, tokens: Tensor) -> bool:
    """True if the baseline serves this eager call for good.

    A kernel that never serves its layer hands over all later calls.
    """
    choice = None if torch.compiler.is_compiling() else getattr(kernel, "choice", None)
    if choice is None or choice.layers is not None or choice.plugin_serves(tokens.numel() // max(tokens.shape[-1], 1)):
        return False
    if choice.baseline_always_serves:
        kernel.apply_weights = kernel.baseline.apply_weights
    return True


class Linear(LayerComparison):
    """Calls of linear layers.

    A layer's first value is its weight, [N, K] unless `columns` differs.
    """

    op: Op
    covers: tuple[str, int] | None = ("weight", 1)
    """The parameter, and its bytes per element, of layers that coverage.py expects the seam to serve."""
    limit: int
    """The token limit of the op before timing."""
    choice_of: Callable[..., Choice]
    run: Callable[..., Tensor]
    """The function of the seam's torch op, which serves a call by its choice."""
    baseline: Callable[..., Tensor]
    """Runs vLLM's kernel on the arguments of `run`."""

    def plugin(self, *arguments) -> Tensor | None:
        return self.op.run_kernels(*self.op_arguments(*arguments))

    def serve(self, choice: Choice, *arguments) -> Tensor:
        """Run a call by its choice. The first argument is [tokens, K]."""
        output = self.plugin(*arguments) if choice.plugin_serves(arguments[0].shape[0]) else None
        return self.baseline(*arguments) if output is None else output

    def call(self, kernel, *arguments) -> Tensor:
        """Run a call that the plugin may serve: by the torch op in a compiled graph, else by its function."""
        if torch.compiler.is_compiling():
            return getattr(torch.ops.vllm_rocm_ops, self.run.__name__)(*arguments)
        choice = getattr(kernel, "choice", None)
        if choice is None or choice.layers is not None:  # making a key takes as long as launching an op
            choice = kernel.choice = self.choice_of(*arguments)
            return self.serve(choice, *arguments)
        output = self.op.run_kernels(*self.op_arguments(*arguments))  # as `plugin`, with one frame less
        return self.baseline(*arguments) if output is None else output

    def max_tokens(self) -> int:
        return 0 if asks_for_aiter("linear") else self.limit

    def columns(self, layer: tuple) -> tuple[int, int]:
        n, k = layer[0].shape
        return k, n

    def work(self, layer: tuple, tokens: int) -> tuple[float, float]:
        k, n = self.columns(layer)
        return layer[0].nbytes + tokens * (k * layer[0].element_size() + 2 * n), 2.0 * tokens * n * k

    def sizes(self, layer: tuple, *types: torch.dtype, bias: Tensor | None = None) -> str:
        """Return a layer's sizes, dtypes, and whether it has a bias, for its description."""
        k, n = self.columns(layer)
        return f"{n}x{k} {kernel_selection.types(*types)}" + " bias" * (bias is not None)

    def choice(self, key: tuple, baseline_name: str, layer: Callable[[], tuple], weight: Tensor, x: Tensor) -> Choice:
        """Return the choice for layers of a key, and note the layer if it is to be timed, with the tokens of x."""
        choice = kernel_selection.choices.get(key)
        if choice is None or choice.layers is not None:
            kernel = Baseline(self.vllm_kernel(baseline_name), named=_named.get(baseline_name, ""))
            choice = kernel_selection.choice_for(key, self, kernel, layer, weight, rows_of(x))
        return choice

    def vllm_kernel(self, baseline_name: str) -> str:
        return baseline_name.partition(" ")[0]


class GroupedLinear(Linear):
    """Calls of linear layers of 16-bit tokens and packed weights with a scale per group of K.

    A layer: the arguments of `run` except x, which are weight, scale, bias and the baseline's name, and x's dtype.
    """

    def choice_of(self, x, weight, scale, bias, baseline_name):
        key = baseline_name, weight.shape, weight.dtype, scale.shape, bias is None
        return self.choice(key, baseline_name, lambda: (weight, scale, bias, baseline_name, x.dtype), weight, x)

    def work(self, layer, tokens):
        k, n = self.columns(layer)
        return layer[0].nbytes + layer[1].nbytes + 2 * tokens * (k + n), 2.0 * tokens * n * k

    def arguments(self, layer, x, seed):
        return (x, *layer[:-1])

    def layers_of(self, a):
        return [(a.weight, a.scale, a.bias, None, a.x.dtype)]


def has_kernels(op: Op, *arguments, **keywords) -> bool:
    """True if kernels that this machine's GPU loads support these arguments. True on CPU, where references run."""
    arch = seam.arch_here(seam.served_platform())
    if arch is None:
        return True
    try:
        given = (v.to("meta") if isinstance(v, Tensor) else v for v in op.Arguments(*arguments, **keywords))
        planned = op.explain(*given, arch=arch, require_code=seam.needs_code).launches
    except ValueError:
        return False
    if why := launches.not_loaded(planned, arch):
        op.warn("load", why)
    return bool(planned) and not why


def wants_fragments(
    layer: torch.nn.Module, weight: Tensor, kernels: Linear, kept: object, description: tuple, scale: Tensor, out_dtype
) -> bool:
    """Return whether to put a layer's prepared weight in fragment order.

    The user must enable it, the sizes must allow it, nothing else may read the weight, and the op must have kernels,
    because vLLM's do not read that order. Where a kernel of vLLM's is kept, the op must have won at every token count in an
    earlier start.
    """
    # MLA marks a projection that it reads by the first name, DeepSeek V4 by the second.
    read_elsewhere = ("_cpu_skip_gemm_dispatch", "is_bmm")
    asked = envs.VLLM_ROCM_OPS_SHUFFLE == "1" and not any(getattr(layer, mark, False) for mark in read_elsewhere)
    rows = weight_order.rows_of(weight).to("meta")
    if not asked or not fits(rows.shape, rows.dtype):
        return False
    shape = kernels.describe(description)
    if kept is not None:
        beside = Baseline(type(kept).__name__, named=_named.get(name_of(kept), ""))
        if not won_everywhere(Key(kernels.op.name, shape, beside)):
            return False
    a = torch.empty(1, rows.shape[1], dtype=rows.dtype, device="meta")
    scale_a = torch.empty(1, scale.shape[1] if scale.dim() == 2 and scale.shape[1] > 1 else 1, device="meta")
    wants = has_kernels(kernels.op, a, weight_order.fragments_of(rows), scale_a, scale.to("meta"), out_dtype)
    if wants:
        shuffled.add(shape)
    return wants


def won_everywhere(key: Key) -> bool:
    """True if the op won for a shape at every token count of this vLLM.

    The compile cache must not find a graph for the other weight_order.order, which the seam measured_selection ensures
    (compiled_ops.py).
    """
    from vllm.config import get_current_vllm_config

    scheduler = get_current_vllm_config().scheduler_config
    served = kernel_selection.wins(key) if "measured_selection" in seam.active() else b""
    return len(served) > scheduler.max_num_batched_tokens and all(served[1:])
