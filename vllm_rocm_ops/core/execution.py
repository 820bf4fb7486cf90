"""Run calls of a known signature: its execution binds pointers and launches."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable

import torch

from vllm_rocm_ops.core.launch import Counters, Launch, NotLaunched, Workspace
from vllm_rocm_ops.core.stats import counter


class Execution:
    """Runs the calls of one signature of one op, by the reference or by bound launches."""

    def __init__(self, op: str, kernel: str, run: Callable[[tuple], object], is_fallback: bool = False):
        self.apart: tuple[tuple[int, int, int, int], ...] = ()  # see arguments.apart
        self.become(op, kernel, run, is_fallback)

    def become(self, op: str, kernel: str, run: Callable[[tuple], object], is_fallback: bool) -> None:
        """Run `run` from now on."""
        self.run = run
        self.is_fallback = is_fallback
        self.count = counter(op, kernel)

    def __call__(self, args: tuple):
        self.count.calls += 1
        return self.run(args)


def signature(names: tuple[str, ...], hints: dict[str, object]) -> Callable[..., tuple]:
    """Return a function (executor, *arguments) -> signature, which has everything that the choice of a kernel depends on.

    Its code is generated per op: it takes half the time of a loop over arguments, and is a fifth of a call's dispatch.
    """
    parts = ["executor"]
    for name in names:
        layout = f"{name}.shape if {name}.is_contiguous() else ({name}.shape, {name}.stride())"
        seen = f"{layout}, {name}.dtype, {name}.data_ptr() & 15, {name}.get_device()"
        if hints[name] is torch.Tensor:
            parts.append(seen)
        elif hints[name] == (torch.Tensor | None):
            parts.append(f"{name} if {name} is None else ({seen})")
        else:
            parts.append(name)
    return eval(f"lambda executor, {', '.join(names)}: ({', '.join(parts)})")


def _outputs(outputs) -> tuple[torch.Tensor, ...]:
    """Return the outputs as a tuple, empty for None."""
    return outputs if isinstance(outputs, tuple) else () if outputs is None else (outputs,)


def _buffers(planned: tuple[Launch, ...], outputs, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the buffers that each call allocates: outputs, then the launches' workspaces."""
    return (*_outputs(outputs), *(torch.empty(w, dtype=torch.uint8, device=device) for w in _workspaces(planned)))


def _workspaces(planned: tuple[Launch, ...]) -> list[Workspace]:
    """Return the launches' workspaces; one that several launches name counts once."""
    return list({id(arg): arg for l in planned for arg in l.args.values() if isinstance(arg, Workspace)}.values())


def _allocator(buffers: tuple[torch.Tensor, ...]) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return a function that allocates buffers of the same shapes, strides and dtypes."""
    makers = [
        functools.partial(torch.empty_strided, b.size(), b.stride(), dtype=b.dtype, device=b.device) for b in buffers
    ]
    return lambda: tuple([make() for make in makers])


def _positions(planned: tuple[Launch, ...], buffers: tuple, a) -> list[list[tuple[str, int]]]:
    """Return, per launch, the name and the place in (*buffers, *a) of each pointer that differs between calls.

    Workspaces are the last buffers.
    """
    place = {id(tensor): i for i, tensor in enumerate((*buffers, *a)) if isinstance(tensor, torch.Tensor)}
    workspaces = _workspaces(planned)
    place |= {id(workspace): len(buffers) - len(workspaces) + i for i, workspace in enumerate(workspaces)}
    pointers = (torch.Tensor, Workspace)
    return [[(name, place[id(arg)]) for name, arg in l.args.items() if isinstance(arg, pointers)] for l in planned]


def _counters(l: Launch) -> tuple[str, int] | None:
    """Return the name of the launch's Counters argument and their number, or None."""
    counters = [(name, int(arg)) for name, arg in l.args.items() if isinstance(arg, Counters)]
    if len(counters) > 1:
        raise TypeError(f"{l.symbol} must have one Counters, got {len(counters)}")
    return counters[0] if counters else None


def bind_device(
    runtime,
    device: torch.device,
    planned: tuple[Launch, ...],
    handles: list[int],
    packers: list[tuple[struct.Struct, dict[str, object]]],
    outputs,
    a,
    advice: str,
) -> Callable[[tuple], object]:
    """Return a function that runs calls of one signature on a GPU: allocate, fill in pointers, launch on the current stream.

    `packers` pack the arguments. `advice` ends the message of a failed launch, which is `NotLaunched` for a call's first
    launch, else RuntimeError.
    """
    index = device.index
    # Workspaces are allocated like outputs. During graph capture they come from the graph's pool, where a stream does not get memory
    # that another stream freed; graphs that share a pool must not run concurrently. Counters outlive a call, so the runtime owns
    # them.
    buffers = _buffers(planned, outputs, device)
    allocate, count, single = _allocator(buffers), len(_outputs(outputs)), isinstance(outputs, torch.Tensor)
    bound = []
    for l, handle, (layout, values), positions in zip(planned, handles, packers, _positions(planned, buffers, a)):
        slot, counters = {name: i for i, name in enumerate(values)}, _counters(l)
        slots = [(slot[name], place) for name, place in positions]
        geometry = (handle, *l.grid, *l.block, l.lds)
        bound.append((layout.pack, [*values.values()], slots, counters and (slot[counters[0]], counters[1]), geometry))
    current_device, stream_of, launch = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream, runtime.launch
    counters_of = runtime.counters

    def run(args: tuple):
        if current_device() != index:
            with torch.cuda.device(index):
                return run(args)
        new = allocate()
        tensors = new + args
        stream, failure = stream_of(index), NotLaunched
        try:
            for pack, values, slots, counters, geometry in bound:
                for slot, place in slots:
                    values[slot] = tensors[place].data_ptr()
                if counters:
                    slot, number = counters
                    values[slot] = counters_of(index, stream, 4 * number)
                launch(*geometry, stream, pack(*values))
                failure = RuntimeError
        except RuntimeError as error:
            raise failure(f"{error}. {advice}") from error
        return new[0] if single else new[:count] or None

    return run


def bind_executor(executor, planned: tuple[Launch, ...], outputs, a) -> Callable[[tuple], object]:
    """Return a function that runs calls of one signature on CPU tensors through `executor`."""
    device = torch.device("cpu")
    buffers = _buffers(planned, outputs, device)
    allocate, count, single = _allocator(buffers), len(_outputs(outputs)), isinstance(outputs, torch.Tensor)
    named = (_counters(l) for l in planned)
    counters = [pair and (pair[0], torch.zeros(pair[1], dtype=torch.int32)) for pair in named]
    bound = list(zip(planned, _positions(planned, buffers, a), counters))

    def run(args: tuple):
        new = allocate()
        tensors = new + args
        unwritten = new
        for l, positions, zeroed in bound:
            values = dict(l.args)
            for name, place in positions:
                values[name] = tensors[place]
            if zeroed:
                name, values[name] = zeroed
            executor.launch(Launch(l.module, l.symbol, l.grid, l.block, values, l.lds), unwritten)
            unwritten = ()
        return new[0] if single else new[:count] or None

    return run
