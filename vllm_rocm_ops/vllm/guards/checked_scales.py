"""Refuse weights at every load if their FP8 scales are missing or invalid, and a checkpoint if its weights are e5m2.

vLLM finds scales of a wrong shape. Without this seam the other faults load, and the model answers nonsense. Some expert
scales of a layer may be missing, as for experts that only pad. They get vLLM's initial values back, with a warning.

A first load is checked as a whole. Later weights, from a path or a trainer, pass through vLLM's layerwise reload: a layer is
checked before it replaces the one in use, and after a refusal the next load begins anew. Weights in kernel format, which
overwrite those in use, are checked when they are there. FP8 layers in use refuse `load_weights` in vLLM itself.
"""

import functools
import logging
import re
import types
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core.quantization import MX_SCALES
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.moe import expert_support

logger = logging.getLogger("vllm.vllm_rocm_ops")

E5M2 = (torch.float8_e5m2, torch.float8_e5m2fnuz)
WEIGHT_SCALE = re.compile(r"(.*weight)_scale(_inv)?$")
INPUT_SCALE = re.compile(r".*input_scale$")
NOT_LOADED = torch.finfo(torch.float32).min
"""vLLM's initial value of scales. Merged layers with one scale per tensor keep it in all scales but the first."""
MX_NAN = 255
UPDATES = ("reload_weights", "finish_weight_update")
"""A worker's methods after which a model has other weights."""


def probe() -> None:
    """Raise `Unavailable` unless vLLM's loaders and its reload are as expected."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    seam.require_parameters(DefaultModelLoader.load_weights, "model", "model_config")
    seam.require_parameters(DefaultModelLoader.get_all_weights, "model_config", "model")
    for name in ("_layerwise_process", "materialize_layer", "_place_kernel_tensors"):
        seam.require_parameters(getattr(layerwise, name), "layer", "info")
    seam.require_parameters(WorkerWrapperBase.__getattr__, "attr")
    for name in UPDATES:
        seam.require(name not in vars(WorkerWrapperBase), f"a free WorkerWrapperBase.{name}")


def install() -> None:
    """Wrap the loader's methods, the reload of a layer, and a worker's methods that update weights."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    load, read = DefaultModelLoader.load_weights, DefaultModelLoader.get_all_weights

    @functools.wraps(load)
    def load_weights(self, model, model_config):
        before = invalidate_scales(model)
        result = load(self, model, model_config)
        keep_padding(model, before)
        check(model)
        return result

    @functools.wraps(read)
    def get_all_weights(self, model_config, model):
        for name, tensor in read(self, model_config, model):
            if tensor.dtype in E5M2 and model_config.quantization is not None:
                raise ValueError(f"{name} must be e4m3, as {model_config.quantization} has it, got {tensor.dtype}")
            yield name, tensor

    DefaultModelLoader.load_weights, DefaultModelLoader.get_all_weights = load_weights, get_all_weights
    check_layers(layerwise)
    for name in UPDATES:

        def update(self, *arguments, name=name, **keywords):
            result = getattr(self.worker, name)(*arguments, **keywords)
            model = self.worker.model_runner.get_model()
            check_in_use(model)
            refresh(model)
            return result

        setattr(WorkerWrapperBase, name, update)


def refresh(model: torch.nn.Module) -> None:
    """Have the plugin's experts read the weights that a model has now."""
    for module in model.modules():
        if (experts := expert_support.serving_experts(module)) is not None:
            experts.refresh()


def check_layers(layerwise) -> None:
    """Wrap vLLM's layerwise reload: check a layer between the load of its weights and their use."""
    materialize, process = layerwise.materialize_layer, layerwise._layerwise_process

    @functools.wraps(materialize)
    def materialize_layer(layer, info):
        materialize(layer, info)
        if info.kernel_tensors is not None:
            info.scales_before = initial_scales(only(layer))

    @functools.wraps(process)
    def layerwise_process(layer, info):
        method = getattr(layer, "quant_method", None)
        if info.kernel_tensors is None or not hasattr(method, "process_weights_after_loading"):
            process(layer, info)  # a first load, or a layer without quantization
            return
        use = method.process_weights_after_loading

        def process_weights_after_loading(layer):
            keep_padding(only(layer), info.scales_before)
            check(only(layer))
            use(layer)

        method.process_weights_after_loading = process_weights_after_loading
        try:
            process(layer, info)
        except ValueError as error:
            restore(layerwise)
            raise ValueError(f"{error}. Layers that were loaded before it have the new weights") from error
        finally:
            del method.process_weights_after_loading

    layerwise.materialize_layer, layerwise._layerwise_process = materialize_layer, layerwise_process


def only(layer: torch.nn.Module):
    """Return a layer as a model of its own, under its name in its model."""
    name = getattr(layer, "prefix", None) or getattr(layer, "layer_name", None) or type(layer).__name__
    return types.SimpleNamespace(named_modules=lambda: [(name, layer)])


def initial_scales(model) -> dict[str, Tensor]:
    """Give scales in new memory vLLM's initial values, then do as `invalidate_scales`."""
    of_experts = any(
        value.dim() == 3 for _, layer in model.named_modules() for value in layer.parameters(recurse=False)
    )
    for _, scale, _ in scales(model):
        if scale.dtype in MX_SCALES:
            scale.view(torch.uint8).fill_(127)
        else:
            scale.fill_(1.0 if of_experts else NOT_LOADED)
    return invalidate_scales(model)


def restore(layerwise) -> None:
    """Give layers that wait for weights those in use, as vLLM does for a layer that gets none."""
    for layer, info in list(layerwise.LAYERWISE_INFO.items()):
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
            info.reset()


def scales(model: torch.nn.Module) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield the scales of e4m3 weights: name, scale, and the weight, None for input scales."""
    for layer, module in model.named_modules():
        own = {name: value.data for name, value in module.named_parameters(recurse=False) if not value.is_meta}
        if not any(value.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz) for value in own.values()):
            continue
        for name, value in own.items():
            of_weight = WEIGHT_SCALE.match(name)
            if value.dtype not in (torch.float32, *MX_SCALES):
                continue
            if of_weight and of_weight[1] in own:
                yield f"{layer}.{name}", value, own[of_weight[1]]
            elif INPUT_SCALE.match(name):
                yield f"{layer}.{name}", value, None


def unloaded(scale: Tensor) -> Tensor:
    """Return a mask of the elements that were not loaded since `invalidate_scales`."""
    return scale.view(torch.uint8) == MX_NAN if scale.dtype in MX_SCALES else scale == NOT_LOADED


def invalidate_scales(model: torch.nn.Module) -> dict[str, Tensor]:
    """Mark weight scales as not loaded, and return the previous scales of experts."""
    before = {}
    for name, scale, weight in scales(model):
        if weight is not None and weight.dim() == 3:
            before[name] = scale.clone()
        if scale.dtype in MX_SCALES:
            scale.view(torch.uint8).fill_(MX_NAN)
        elif weight is not None and not is_per_tensor(scale, weight):
            scale.fill_(NOT_LOADED)
    return before


def keep_padding(model: torch.nn.Module, before: dict[str, Tensor]) -> None:
    """Restore unloaded expert scales where others of the layer were loaded."""
    for name, scale, _ in scales(model):
        left = unloaded(scale)
        if name in before and left.any() and not left.all():
            scale.copy_(torch.where(left, before[name].float(), scale.float()).to(scale.dtype))
            text = "vllm-rocm-ops: %d of %d elements of %s are not in the checkpoint and keep vLLM's initial values"
            logger.warning(text, left.sum(), left.numel(), name)


def is_per_tensor(scale: Tensor, weight: Tensor | None) -> bool:
    """True if a linear layer has one scale for each layer that it was merged from."""
    return scale.dim() < 2 and (weight is None or weight.dim() == 2)


def check(model: torch.nn.Module) -> None:
    """Check all scales of a model.

    Raises:
        ValueError: A scale was not loaded or is invalid.
    """
    for name, scale, weight in scales(model):
        if scale.dtype in MX_SCALES:
            bad, wanted = scale.view(torch.uint8) == MX_NAN, "be in the checkpoint and not NaN"
        else:
            first = scale.flatten()[:1]
            left = (scale == NOT_LOADED) & (first != NOT_LOADED) & is_per_tensor(scale, weight)
            bad, wanted = ~(scale.isfinite() & (scale >= 0) | left), "be in the checkpoint, finite and positive"
            zero = scale == 0
            if (
                zero.all()
                if weight is None
                else any(not_zero(weight, scale, place) for place in zero.nonzero().tolist())
            ):
                bad |= zero
        if bad.any():
            got = "nothing" if unloaded(scale)[bad][0] else scale.float()[bad][0].item()
            raise ValueError(f"{name} must {wanted}, got {got} in {int(bad.sum())} of {bad.numel()} elements")


def check_in_use(model: torch.nn.Module) -> None:
    """Check the scales of a model as kernels use them, in which a scale's shape may not be its weight's.

    Raises:
        ValueError: A scale is invalid, or all of a layer's are zero.
    """
    for name, scale, weight in scales(model):
        if scale.dtype in MX_SCALES:
            bad, wanted = scale.view(torch.uint8) == MX_NAN, "not be NaN"
        else:
            bad, wanted = ~(scale.isfinite() & (scale >= 0)), "be finite and positive"
            if scale.numel() and not scale.any() and (weight is None or (weight.view(torch.uint8) & 0x7F).any()):
                bad = scale == 0
        if bad.any():
            raise ValueError(
                f"{name} must {wanted}, got {scale.float()[bad][0].item()} in {int(bad.sum())} of {bad.numel()} elements"
            )


def not_zero(weight: Tensor, scale: Tensor, places: list[int]) -> bool:
    """True if the part of a weight that one element of its scale covers has a nonzero value."""
    part = weight
    if scale.dim() == weight.dim():
        for dimension, place in enumerate(places):
            size = (
                1 << (-(-weight.shape[dimension] // scale.shape[dimension]) - 1).bit_length()
            )  # the last block may be partial
            start = min(place * size, weight.shape[dimension])
            part = part.narrow(dimension, start, min(size, weight.shape[dimension] - start))
    elif weight.dim() == 3:
        part = weight[places[0]]
    return bool((part.view(torch.uint8) & 0x7F).any())


SEAM = seam.Seam(
    name="checked_scales",
    replaces="nothing; checks FP8 scales after each load and reload of weights, and dtypes in get_all_weights",
    probe=probe,
    install=install,
)
