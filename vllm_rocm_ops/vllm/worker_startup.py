"""Time the plugin's kernels against vLLM's when a worker starts.

Norms and activations are timed before vLLM compiles a model (compiled_ops.py), linear layers, experts and attention at
vLLM's kernel warm-up (kernel_timing.py).
"""

import functools
import logging
import sys
from collections.abc import Callable

import torch

from vllm_rocm_ops.core import envs
from vllm_rocm_ops.vllm import coverage, seam
from vllm_rocm_ops.vllm.graph import aiter_all_reduce, all_reduce_timing, compilation, compiled_ops, model_queries
from vllm_rocm_ops.vllm.guards import compile_cache
from vllm_rocm_ops.vllm.linear import weight_order
from vllm_rocm_ops.vllm.moe import expert_support, quantized_input, routing_gate, shared_expert_gate
from vllm_rocm_ops.vllm.selection import group_clock as group_clocks
from vllm_rocm_ops.vllm.selection import kernel_selection, kernel_timing, kernel_trial
from vllm_rocm_ops.vllm.selection.key import COMPILED

logger = logging.getLogger("vllm.vllm_rocm_ops")

METHOD, WARM_UP, LOAD = "compile_or_warm_up_model", "kernel_warmup", "load_model"
ENGINE, CONFIGURE = "vllm.engine.arg_utils", "create_engine_config"
"""The module and the method with which a front end configures an engine. Other processes do not import it."""


def probe() -> None:
    """Raise `Unavailable` unless executors reach a worker's methods through its wrapper, as expected."""
    from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

    seam.require_parameters(getattr(WorkerBase, METHOD))
    seam.require_parameters(getattr(WorkerBase, LOAD))
    seam.require_parameters(WorkerWrapperBase.init_device)
    seam.require_parameters(WorkerWrapperBase.__getattr__, "attr")
    for name in (METHOD, LOAD):
        seam.require(name not in vars(WorkerWrapperBase), f"a free WorkerWrapperBase.{name}")
    if engine := sys.modules.get(ENGINE):
        seam.require(hasattr(engine.EngineArgs, CONFIGURE), f"EngineArgs.{CONFIGURE}")


def install() -> None:
    """Wrap a worker's start, and in a front end the configuration of an engine.

    On a new machine the kernels are tried between both, before the worker opens its GPU. Norms and activations are selected when the
    model is loaded. Layers are noted from the device's start to the warm-up, and timed then. With
    VLLM_ROCM_OPS_MEASURE=0 nothing is noted or timed.
    """
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    def load_model(self, *arguments, **keywords):
        result = self.worker.load_model(*arguments, **keywords)
        before_compiling(self.worker)
        return result

    setattr(WorkerWrapperBase, LOAD, load_model)
    if "fusion" in seam.active():
        compiled_ops.pattern_finders.append(quantized_input.norms_before_experts)
    if "activation" in seam.active():
        compiled_ops.pattern_finders.append(shared_expert_gate.gates)
    if envs.VLLM_ROCM_OPS_MEASURE == "0":
        return

    if engine := sys.modules.get(ENGINE):
        configure = getattr(engine.EngineArgs, CONFIGURE)

        @functools.wraps(configure)
        def create_engine_config(self, *arguments, **keywords):
            kernel_trial.begin()
            return configure(self, *arguments, **keywords)

        setattr(engine.EngineArgs, CONFIGURE, create_engine_config)

    begin = WorkerWrapperBase.init_device

    @functools.wraps(begin)
    def init_device(self, *arguments, **keywords):
        kernel_selection.begin_recording()
        kernel_trial.before_device(self.worker)
        result = begin(self, *arguments, **keywords)
        kernel_trial.after_device()
        return result

    def compile_or_warm_up_model(self):
        """Run the worker's method, and time kernels after vLLM's kernel warm-up, before graphs are captured.

        A worker without kernel warm-up, as on CPU, captures none.
        """
        worker = self.worker
        module = sys.modules[getattr(type(worker), METHOD).__module__]
        vllm_warm_up = getattr(module, WARM_UP, None)
        if vllm_warm_up is None:
            result = worker.compile_or_warm_up_model()
            warm_up(worker)
            log_calls(worker)
            return result

        @functools.wraps(vllm_warm_up)
        def kernel_warmup(held, *arguments, **keywords):
            vllm_warm_up(held, *arguments, **keywords)
            if not keywords.get("process_local_only"):  # process-local: the other ranks do not take part
                warm_up(held)

        setattr(module, WARM_UP, kernel_warmup)
        try:
            result = worker.compile_or_warm_up_model()
        finally:
            setattr(module, WARM_UP, vllm_warm_up)
        log_calls(worker)
        return result

    WorkerWrapperBase.init_device = init_device
    setattr(WorkerWrapperBase, METHOD, compile_or_warm_up_model)


def log_calls(worker) -> None:
    """Log a worker's calls so far on the first rank, and write them for `vllm-rocm-ops doctor`."""
    if getattr(worker, "rank", 0):
        return
    with seam.surviving("this start's calls are not recorded for `vllm-rocm-ops doctor`", logging.INFO):
        called = coverage.calls(captured_by(worker.vllm_config))
        coverage.log_calls(called)
        coverage.write(worker, called)


def captured_by(config) -> list[int] | tuple[()]:
    """Return the token counts for which graphs are captured."""
    from vllm.config import CUDAGraphMode

    settings = config.compilation_config
    captures = settings.cudagraph_mode != CUDAGraphMode.NONE
    return (captures and settings.cudagraph_capture_sizes) or ()


def warm_up(worker) -> None:
    """Time kernels for a worker, and agree within its tensor-parallel group. The group's first rank logs the result."""
    with seam.surviving("kernel timing failed, default token limits apply"):
        from vllm.config import set_current_vllm_config
        from vllm.distributed.parallel_state import get_tp_group

        config, group = worker.vllm_config, get_tp_group()
        max_tokens = config.scheduler_config.max_num_batched_tokens * config.parallel_config.data_parallel_size
        is_logging_rank = group.rank_in_group == 0
        gather = functools.partial(gather_from, group)
        with set_current_vllm_config(config):
            timer, left = clock(), []
            if timer is not None:
                tokens = config.scheduler_config.max_num_batched_tokens
                left = call_others(compilation.models_of(worker), tokens, config.model_config.dtype)
            kernel_timing.warm_up(captured_by(config), max_tokens, timer, gather, is_logging_rank)
        if left and is_logging_rank:
            text = "vllm-rocm-ops: not timed, as vLLM's profile run did not call them (default token limits apply): %s"
            logger.info(text, ", ".join(left))


def call_others(models: list[torch.nn.Module], max_tokens: int, dtype: torch.dtype) -> list[str]:
    """Call each FP8 linear layer whose shape the profile run did not call, so that it is timed too.

    Examples are a projection of MLA and a draft model's layers.

    Returns:
        The names of layers that cannot be called this way, experts among them.
    """
    seen = {
        (layer[0].shape, layer[0].dtype)
        for choice in kernel_selection.all_choices()
        for layer in (choice.layers or {}).values()
    }
    left = []
    for name, module in (named for model in models for named in model.named_modules()):
        method, has_experts = getattr(module, "quant_method", None), expert_support.serving_experts(module) is not None
        weight = expert_support.first_weight(module) if has_experts else getattr(module, "weight", None)
        mark = getattr(module, weight_order.MARK, None)
        plugin_serves = has_experts or (mark is not None and not weight_order.STATES[int(mark)][1])
        if not plugin_serves or (weight.shape, weight.dtype) in seen:
            continue
        seen.add((weight.shape, weight.dtype))
        before = set(kernel_selection.all_choices())
        try:
            x = torch.zeros(1, module.input_size_per_partition, dtype=dtype, device=weight.device)
            with torch.inference_mode():
                method.apply(module, x, getattr(module, "bias", None))
        except Exception:  # noqa: BLE001  its default limit applies
            left.append(name)
        for choice in set(kernel_selection.all_choices()) - before:
            choice.max_tokens = max_tokens
    return left


def before_compiling(worker) -> None:
    """Select a worker's norms, activations and all-reduces, as `warm_up` does for the rest."""
    with seam.surviving("selection of norms and activations failed"):
        from vllm.config import set_current_vllm_config
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        gather = functools.partial(gather_from, group)
        try:
            with set_current_vllm_config(worker.vllm_config):
                select_compiled_ops(worker, clock(), gather, group.rank_in_group == 0)
                all_reduce_timing.before_compiling(worker, group, group_clock())
                if clock() is not None:
                    routing_gate.adopt(compilation.models_of(worker))
                if group.rank_in_group == 0:
                    coverage.log_results(coverage.reached(worker))
                    coverage.log_packed([*coverage.packed(compilation.models_of(worker))])
        finally:
            compile_cache.mark_again(worker)


def select_compiled_ops(
    worker, clock: kernel_timing.GraphClock | None, gather: Callable, is_logging_rank: bool
) -> None:
    """Select for the models that a worker has loaded. Without a clock only recorded times are used."""
    config, models = worker.vllm_config, compilation.models_of(worker)
    compiles = [compilation.is_compiled(config, model) for model in models]
    all_reduced, stays = aiter_all_reduce.leave(config, any(compiles), is_logging_rank)
    compiled_ops.left_to_vllm.update(stays)
    sizes = config.model_config.get_hidden_size(), config.model_config.dtype
    comparisons = [
        comparison
        for model, compiled in zip(models, compiles)
        for find in (
            functools.partial(
                compiled_ops.fused_in, hidden=sizes[0], dtype=sizes[1], baseline=compilation.baseline_of(config, model)
            ),
            *compiled_ops.pattern_finders,
        )
        for comparison in find(model, compiles=compiled)
    ]
    distinct = {comparison.key: comparison for comparison in comparisons}
    max_tokens = config.scheduler_config.max_num_batched_tokens
    counts = sorted({*(tokens for tokens in compiled_ops.TOKENS if tokens < max_tokens), max_tokens})
    wanted = {compiled_ops.choice_of(one): one.token_counts(counts) for one in distinct.values()}
    if clock is not None and envs.VLLM_ROCM_OPS_MEASURE != "0":
        made = functools.cache(lambda: compilation.compiler(config))
        graphs = {choice: counts for choice in wanted if choice.key.baseline.scope == COMPILED.scope}
        for choice in graphs:
            choice.kernels.baseline = choice.kernels.compiled(made)
        compilation.start_compiler(made, graphs)
    record, decided = kernel_selection.Record({}), kernel_selection.Decided({}, {})
    if envs.VLLM_ROCM_OPS_MEASURE != "0":
        record, decided = kernel_timing.agree(wanted, clock, gather, compiled_ops.SHARE)
    others = tuple(filter(None, [decide(config, decided) for decide in compiled_ops.deciders]))
    decisions = compiled_ops.decide(comparisons, decided)
    for choice in comparisons:
        choice.apply_decision(decisions[choice.pattern])
    patterns = {
        comparison.producer: comparison.pattern
        for comparison in comparisons
        if getattr(comparison, "is_norm", None) is False
    }
    for layer in (layer for model in models for layer in model_queries.gated(model)):
        layer.act_fn.consumer = (layer, "down_proj") if decisions.get(patterns.get(layer.act_fn)) else None
    on = frozenset(seam.active()) & {"norm", "activation"}
    choices = compiled_ops.choices
    choices.decisions, choices.off, choices.all_reduced, choices.on = decisions, frozenset(decided.off), all_reduced, on
    choices.others = others
    compiled_ops.left_to_vllm.update(str(pattern) for pattern, runs in decisions.items() if not runs)
    if is_logging_rank:
        kernel_timing.log_results(record, decided, set(distinct))


def clock() -> kernel_timing.GraphClock | None:
    """Return the clock for this device, None on CPU and with VLLM_ROCM_OPS_MEASURE=0."""
    measures = envs.VLLM_ROCM_OPS_MEASURE != "0" and seam.served_platform() != "cpu"
    return kernel_timing.GraphClock() if measures else None


def group_clock() -> group_clocks.GraphClock | None:
    """Return the clock for calls that ranks make together, None where `clock` is or without a GPU."""
    return group_clocks.GraphClock() if clock() is not None and torch.cuda.is_available() else None


def gather_from(group, decided: kernel_selection.Decided) -> list[kernel_selection.Decided]:
    """Return the decisions of each rank of a group."""
    if group.world_size == 1:
        return [decided]
    decisions = [None] * group.world_size
    torch.distributed.all_gather_object(decisions, decided, group=group.cpu_group)
    return decisions


SEAM = seam.Seam(
    name="measured_selection",
    replaces="nothing; times kernels against vLLM's at model load and kernel warm-up, through WorkerWrapperBase",
    probe=probe,
    install=install,
    after=("fusion",),
)
