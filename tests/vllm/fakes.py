"""Stand-ins that tests share: for vLLM's objects, the clock, the emulator and wrong kernels; and decisions made by hand."""

import contextlib
import types

import torch
from torch._dynamo.testing import EagerAndRecordGraphs

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.vllm.selection import kernel_selection, kernel_timing


class Fake(types.SimpleNamespace):
    """An object of vLLM's, with the attributes that a test gives it."""


def parameter(values: torch.Tensor) -> torch.nn.Parameter:
    """Return a weight as vLLM's layers hold it."""
    return torch.nn.Parameter(values, requires_grad=False)


def fake_worker(model: torch.nn.Module | None = None, **config) -> Fake:
    """Return a worker that has loaded a model, with this vLLM configuration."""
    return Fake(vllm_config=Fake(**config), model_runner=Fake(get_model=lambda: model))


def set_config(monkeypatch, **config) -> Fake:
    """Make this vLLM's current configuration, and return it."""
    kernels = Fake(ir_op_priority=Fake(rms_norm=["native"]))
    made = Fake(**{"kernel_config": kernels} | config)
    monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: made)
    return made


def fake_decoder(longest: int = 8192, **changed) -> Fake:
    """Return the decoder of an attention layer, for requests of up to `longest` keys."""
    model = Fake(dtype=torch.bfloat16, max_model_len=longest)
    config = Fake(model_config=model, scheduler_config=Fake(max_num_seqs=4), speculative_config=None)
    known = {"config": config, "op": ops.paged_attention_decode, "backend": Fake(name="Backend"), "choices": {}}
    known |= {
        "impl": Fake(head_size=128, dcp_world_size=1),
        "unsupported_reason": "",
        "quantized": "",
        "quantized_contexts": (),
    }
    known |= {"describe": lambda: "32:8x128 auto", "heads": lambda: "32:8x128", "supports_rows": lambda rows: True}
    return Fake(**known | dict.fromkeys(("is_forced", "is_batch_invariant", "is_fp8"), False) | changed)


class Counting(Emulator):
    """An emulator that keeps its launches."""

    def __init__(self, arch: str):
        super().__init__(arch)
        self.launches = []

    def launch(self, planned, uninitialized):
        self.launches.append(planned)
        super().launch(planned, uninitialized)

    @property
    def symbols(self) -> list[str]:
        return [planned.symbol for planned in self.launches]


def graph_of(function, *arguments) -> torch.fx.Graph:
    """Compile and call a function, and return its only graph, as vLLM's backend gets it."""
    torch._dynamo.reset()
    torch.compile(function, backend=(kept := EagerAndRecordGraphs()), fullgraph=True)(*arguments)
    [module] = kept.graphs
    return module.graph


def traced(module: torch.nn.Module, *arguments: torch.Tensor) -> torch.fx.GraphModule:
    """Return the graph that vLLM's backend gets, without running it."""
    graphs = []
    torch._dynamo.reset()
    keep = lambda graph, inputs: (graphs.append(graph), lambda *_: ())[1]
    with contextlib.suppress(IndexError), torch.no_grad():  # the result is empty
        torch.compile(module, backend=keep, fullgraph=True)(*arguments)
    return graphs[0]


def called_in(graph: torch.fx.Graph) -> set[str]:
    """Return the names of the functions that a graph calls."""
    return {str(node.target) for node in graph.nodes if node.op == "call_function"}


class FakeClock:
    """A clock of samples(side, tokens), which notes its calls' arguments; the one at `place` has a row per token."""

    def __init__(self, samples=lambda side, tokens: [1.0 if side == "plugin" else 2.0], place: int = 0):
        self.samples, self.place, self.asked = samples, place, []

    def times(self, calls, sets, replays):
        self.asked.append(sets)
        for call in calls.values():
            call(*sets[0])
        tokens = len(sets[0][self.place])
        return {side: self.samples(side, tokens) for side in calls}

    def finish(self):
        pass


class RowClock(FakeClock):
    """A clock by which a call takes as long as its first result has rows."""

    def times(self, calls, sets, replays):
        results = {side: call(*sets[0]) for side, call in calls.items()}
        return {side: [float(len(x[0] if isinstance(x, tuple) else x))] for side, x in results.items()}


def plugin_wins_up_to(most: int, place: int = 0) -> FakeClock:
    """Return a clock by which the plugin is faster with up to `most` tokens, and slower with more."""
    return FakeClock(lambda side, tokens: [2.0 if side == "baseline" else 1.0 if tokens <= most else 3.0], place)


def check_and_time(kernels, tokens: int = 3) -> kernel_selection.Measured:
    """Compare kernels that need no layers with the baseline, and time both by a clock."""
    return kernel_timing.check_and_time(kernels, [(), ()], tokens, FakeClock(), contextlib.nullcontext())


def require_near(kernels, tokens: int = 3) -> None:
    """Raise unless emulated kernels that need no layers are about as close to the exact results as the baseline."""
    with launch.executor(Emulator("gfx950", races=False)):
        timed = check_and_time(kernels, tokens)
    assert (timed.plugin_us, timed.baseline_us) == (1.0, 2.0) and 0 < timed.error < 0.05


def time_choices(captured=(1, 17), most: int = 65, clock: FakeClock | None = None) -> list[kernel_selection.Choice]:
    """Time on the only rank what was noted, and return the choices. The plugin wins up to 17 tokens by default."""
    kernel_timing.warm_up(captured, most, clock or plugin_wins_up_to(17), lambda mine: [mine])
    return kernel_selection.all_choices()


def decide(*serves: bytes, off: tuple[str, ...] = ()) -> list[kernel_selection.Choice]:
    """Decide the noted choices, in order: whether the plugin serves each number of tokens. Return them."""
    choices = kernel_selection.all_choices()
    shapes = {choice.key: by_tokens for choice, by_tokens in zip(choices, serves, strict=True)}
    kernel_selection.apply_decisions(kernel_selection.Decided(dict.fromkeys(off, "of a test"), shapes))
    return choices


def by_reference(monkeypatch, *of) -> None:
    """Make the kernels of ops their references."""
    for op in of:
        monkeypatch.setattr(op, "run_kernels", op.reference)


def spoil(monkeypatch, op, argument: str) -> None:
    """Make an op's kernels its reference, except that an argument that it writes is 10 % too large."""

    def run_kernels(*arguments):
        op.reference(*arguments)
        getattr(op.Arguments(*arguments), argument).mul_(1.1)
        return True

    monkeypatch.setattr(op, "run_kernels", run_kernels)


GONE = object()


def change(holder, path: str, value: object = GONE) -> None:
    """Set an attribute, or one of its attributes as in `attn.impl`, or delete it."""
    *way, name = path.split(".")
    for part in way:
        holder = getattr(holder, part)
    delattr(holder, name) if value is GONE else setattr(holder, name, value)
