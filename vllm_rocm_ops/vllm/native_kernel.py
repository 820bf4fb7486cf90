"""Our linear kernels keep vLLM's native kernel for the same layer, for the calls that ours leave to it.

Which of the two runs is decided when a call runs, inside one opaque torch op: a compiled graph serves every number of
tokens, and a captured graph is captured per batch size, with what was decided for it. The op names the native kernel
by its class and configuration. These are the same in every process, so graphs from vLLM's compile cache find it, and equal
layers compile to equal graphs; a kernel keeps no more than them, weights are the op's arguments.
"""

import contextlib
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from vllm_rocm_ops import envs
from vllm_rocm_ops.families.weight_layout import FRAGMENT_BYTES, FRAGMENT_ROWS, STEP, shuffle_weight
from vllm_rocm_ops.op import NAMESPACE, Op
from vllm_rocm_ops.vllm import seam

MARK = "vllm_rocm_ops_order"
"""The buffer that says in what order a layer's weight lies. vLLM's weight cache hands buffers on with the weights."""

STATES = [(order, alone) for order in (None, "plain", "fragments") for alone in (False, True)]
"""What the buffer counts: the order, and whether our kernel alone reads it."""

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_kernels: dict[str, object] = {}


def define(function: Callable, fake: Callable) -> None:
    """Make a function the torch op of its name."""
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    name = function.__name__
    _library.define(name + torch.library.infer_schema(function, mutates_args=()), tags=tags)
    _library.impl(name, function, "CPU")
    _library.impl(name, function, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def is_supported() -> tuple[bool, str | None]:
    """A kernel's answer: ours sum in an order that depends on the number of tokens."""
    from vllm import envs as vllm_envs

    return (False, "is not batch invariant") if vllm_envs.VLLM_BATCH_INVARIANT else (True, None)


def register_first(ours: type, table: dict, kind: str) -> None:
    """Have vLLM ask our kernel before its own: through its registration where that can, see patches/, else in its table."""
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.platforms import current_platform

    if "prepend" in inspect.signature(register_linear_kernel).parameters:
        register_linear_kernel(ours, current_platform._enum, kind, prepend=True)
    else:
        table.setdefault(current_platform._enum, []).insert(0, ours)


@contextlib.contextmanager
def without(kernels: list[type], ours: type):
    """vLLM's list of kernels as it is without ours."""
    place = kernels.index(ours)
    del kernels[place]
    try:
        yield
    finally:
        kernels.insert(place, ours)


def choose(ours: type, config, table: dict, quantization: str) -> type | None:
    """The kernel that vLLM would choose without ours, on a GPU; None where there is none, and on CPU, where our ops'
    references are what is tested."""
    from vllm.model_executor.kernels.linear import choose_scaled_mm_linear_kernel
    from vllm.platforms import current_platform

    if seam.served_platform() == "cpu":
        return None
    with without(table[current_platform._enum], ours):
        try:
            return choose_scaled_mm_linear_kernel(config, table, quantization=quantization)
        except ValueError:
            return None


def can_keep(native: type | None, base: type) -> tuple[bool, str]:
    """A kernel's answer: it can keep one that gets its input from the base class that both have."""
    plain = native is None or (
        native.apply_weights is base.apply_weights and getattr(native, "apply_input_quant", True)
    )
    return plain, "" if plain else f"leaves the layer to {native.__name__}, which quantizes its input itself"


def keep(kernel: object) -> str:
    """The name by which `kept` finds a kernel."""
    name = f"{type(kernel).__name__} {kernel.config}"
    _kernels.setdefault(name, kernel)
    return name


def kept(name: str) -> object:
    """A native kernel of some layer of this process."""
    return _kernels[name]


def run_or_native(native: Callable[[], Tensor], op: Op, most_tokens: int, *arguments) -> Tensor:
    """Our op, where its kernels take the arguments and the first has at most so many rows; else `native()`."""
    tokens = arguments[0].numel() // max(arguments[0].shape[-1], 1)
    output = op.run_kernels(*arguments) if tokens <= most_tokens else None
    return native() if output is None else output


def has_kernels(op: Op, *arguments, **keywords) -> bool:
    """Whether kernels for this machine, which are there, take these arguments, given on the meta device. On CPU, where our ops'
    references are what is tested, it answers yes."""
    arch = seam.arch_here(seam.served_platform())
    if arch is None:
        return True
    try:
        return bool(op.explain(*arguments, arch=arch, require_code=True, **keywords).launches)
    except ValueError:
        return False


def rows_of(weight: Tensor) -> Tensor:
    """A weight as [N, K], given so or as the view [K, N] that vLLM makes of it for some kernels."""
    return weight if weight.stride(-1) == 1 else weight.t()


def has_fragments(weight: Tensor) -> bool:
    """Whether a weight [N, K] can be in fragment order."""
    return weight.shape[0] % FRAGMENT_ROWS == 0 and weight.shape[1] * weight.element_size() % STEP == 0


def fragments_of(weight: Tensor) -> Tensor:
    """A weight that is [N, K] or [K, N] by its shape, but lies in fragment order, in the shape of `shuffle_weight`."""
    rows = rows_of(weight)
    (n, k), size = rows.shape, weight.element_size()
    return rows.view(
        n // FRAGMENT_ROWS, k * size // STEP, STEP // FRAGMENT_BYTES, FRAGMENT_ROWS, FRAGMENT_BYTES // size
    )


def order(weight: Tensor, before: Tensor) -> str | None:
    """How a kernel of vLLM's left a weight that was `before`: "plain", in "fragments" as some of AITER's do, or unknown."""
    weight, before = rows_of(weight), rows_of(before)
    if weight.shape != before.shape or weight.dtype != before.dtype:
        return None
    if torch.equal(weight.view(torch.uint8), before.view(torch.uint8)):
        return "plain"
    if has_fragments(weight) and weight.is_contiguous():
        shuffled = shuffle_weight(before)
        if torch.equal(fragments_of(weight).view(torch.uint8), shuffled.view(torch.uint8)):
            return "fragments"
    return None


def note_order(kernel, layer: torch.nn.Module, order: str | None) -> None:
    """Have a kernel of ours, and who gets the layer's tensors, know the order of the weight that was just prepared."""
    kernel.order = order
    state = torch.tensor(STATES.index((order, kernel.native is None)), dtype=torch.uint8, device="cpu")
    layer.register_buffer(MARK, state, persistent=False)


def recall_order(kernel, layer: torch.nn.Module) -> None:
    """Have a kernel know the order of a weight that another process prepared: nothing, where that did not say."""
    state = getattr(layer, MARK, None)
    if state is None:
        return
    order, alone = STATES[int(state)]
    if hasattr(kernel, "native"):  # it is ours
        kernel.order, kernel.native = order, None if alone else kernel.native
    elif alone and order == "fragments":
        raise RuntimeError(
            f"the weight was shuffled with VLLM_ROCM_OPS_SHUFFLE=1, which {type(kernel).__name__} cannot read"
        )


def wants_fragments(layer: torch.nn.Module, weight: Tensor, op: Op, scale: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether to put a layer's weight in fragment order: asked for, possible, nothing but the kernel reads it, and our kernels
    are there, as vLLM's do not read it then."""
    # By latent attention, which marks its projection so; by DeepSeek V4.
    read_elsewhere = ("_cpu_skip_gemm_dispatch", "is_bmm")
    asked = envs.VLLM_ROCM_OPS_SHUFFLE == "1" and not any(getattr(layer, mark, False) for mark in read_elsewhere)
    rows = rows_of(weight).to("meta")
    if not asked or not has_fragments(rows):
        return False
    a = torch.empty(1, rows.shape[1], dtype=rows.dtype, device="meta")
    scale_a = torch.empty(1, scale.shape[1] if scale.dim() == 2 and scale.shape[1] > 1 else 1, device="meta")
    return has_kernels(op, a, fragments_of(rows), scale_a, scale.to("meta"), out_dtype)
