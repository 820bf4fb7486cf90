"""Install the seams, the places where vLLM calls the plugin's code instead of its own.

A seam is a file with a `SEAM`, listed in `FILES` or named `linear/*_linear.py`. It is installed if

- the user asks for it (VLLM_ROCM_OPS_SEAMS),
- it supports this platform,
- it was tested on this vLLM version, or VLLM_ROCM_OPS_ANY_VERSION=1 skips this check,
- its probe finds every name and signature that it touches.

Otherwise the seam stays off, vLLM's own code runs, and `status` says why. The log has one line per reason, not per
seam.

The platform is ROCm. On NVIDIA, VLLM_ROCM_OPS_ON_NVIDIA=1 installs the seams into vLLM's CUDA platform, to measure a
model with and without the ops. On CPU, which has no kernels, VLLM_ROCM_OPS_ON_CPU=1 installs them for tests, and the
ops' references run.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_rocm_ops.core import archs, envs
from vllm_rocm_ops.core import launch as launches
from vllm_rocm_ops.vllm import compat

logger = logging.getLogger("vllm.vllm_rocm_ops")

FILES = {
    "activation": "graph.activation",
    "all_reduce": "graph.aiter_all_reduce",
    "checked_scales": "guards.checked_scales",
    "compile_cache": "guards.compile_cache",
    "cpu_shims": "guards.cpu_shims",
    "decode_attention": "attention.decoder",
    "fp8_experts": "moe.fp8_experts",
    "fusion": "graph.pass_manager",
    "gated_delta_net": "attention.gated_delta_net",
    "measured_selection": "worker_startup",
    "mla_attention": "attention.mla",
    "mla_norms": "attention.mla_norms",
    "mxfp4_experts": "moe.mxfp4_experts",
    "mxfp8_experts": "moe.mxfp8_experts",
    "norm": "graph.norm",
    "norm_residuals": "attention.norm_residuals",
    "quantized_attention": "attention.quantized_attention",
    "quantized_input": "graph.input_quantization",
    "rope_and_cache": "attention.rope_and_cache",
    "routing_experts": "moe.routing_experts",
    "unquantized_experts": "moe.unquantized_experts",
    "wna16_experts": "moe.wna16_experts",
}
FILES |= {
    name: f"linear.{name}"
    for _, name, _ in pkgutil.iter_modules([str(Path(__file__).with_name("linear"))])
    if name.endswith("_linear")
}
"""The module of each seam."""

NAMES = tuple(sorted(FILES))

needs_code = True
"""False in a process that launches nothing: the package may lack the kernels of a simulated GPU."""


class Unavailable(Exception):
    """Signal that vLLM or the machine lacks something that a seam needs. Raised by probes."""


@dataclasses.dataclass(frozen=True)
class Seam:
    """One replacement inside vLLM.

    Attributes:
        replaces: What the seam replaces, for people.
        probe: Raises if a name or signature that `install` relies on is missing. Changes nothing.
        versions: The first and the last vLLM minor release that the seam was tested on.
        requires: Seams without which this one stays off. They are installed before it.
        after: Further seams that are installed before this one.
        ops: Prefixes of the names of the ops that the seam calls.
        comparisons: The `Linear` comparisons of a seam of linear layers (linear/base.py).
    """

    name: str
    replaces: str
    probe: Callable[[], None]
    install: Callable[[], None]
    platforms: tuple[str, ...] = ("rocm", "cuda", "cpu")
    versions: tuple[str, str] = compat.RELEASES
    requires: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    comparisons: tuple = ()


@dataclasses.dataclass(frozen=True)
class Status:
    """Tell whether a seam is on in this process, and why."""

    name: str
    replaces: str
    on: bool
    reason: str


_status: dict[str, Status] = {}


def status() -> list[Status]:
    """Return the status of every seam in installation order. Empty until `install_all` ran."""
    return list(_status.values())


def active() -> list[str]:
    """Return the names of the seams that are on."""
    return [entry.name for entry in _status.values() if entry.on]


def replace(op_class: type, plugin: type) -> type:
    """Register a subclass in place of vLLM's custom op, under the name by which `custom_ops` switches it."""
    op_class.register_oot(plugin)
    plugin.name = op_class.name
    return plugin


def replace_function(name: str, function: Callable, plugin: Callable) -> None:
    """Replace a function of vLLM's in every module that imported it by name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is function:
            setattr(module, name, plugin)


@functools.cache
def mixed(mixin: type, plain: type) -> type:
    """Return the plugin's subclass of a class of vLLM's, with the same name."""
    return type(plain.__name__, (mixin, plain), {"__module__": plain.__module__})


def plain_of(module: object, mixin: type) -> type:
    """Return vLLM's class of an object, which may have the plugin's, `mixed`."""
    return type(module).__bases__[1] if isinstance(module, mixin) else type(module)


@contextlib.contextmanager
def surviving(what: str, level: int = logging.WARNING) -> Iterator[None]:
    """Log an exception with what does not happen because of it, and go on: vLLM starts anyway."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        logger.log(level, "vllm-rocm-ops: %s: %s: %s", what, type(error).__name__, error)


def load(name: str) -> Seam:
    """Import a seam's file, which does not import vLLM, and return its `SEAM`."""
    return importlib.import_module(module_of(name)).SEAM


def module_of(name: str) -> str:
    """Return the module of a seam."""
    return f"{__package__}.{FILES[name]}"


def in_folder(folder: str) -> tuple[str, ...]:
    """Return the seams whose files are in a folder."""
    return tuple(name for name, module in FILES.items() if module.startswith(f"{folder}."))


def install_all() -> list[Status]:
    """Install every seam that applies here, once per process, and return their status."""
    if _status:
        return status()
    import vllm

    platform = served_platform()
    if platform is None:
        logger.debug("vllm-rocm-ops is off: unsupported platform")
        return []
    lack, off, untested = unsupported_reason(platform), {}, []
    for seam in ordered([load(name) for name in NAMES]):
        _status[seam.name], level = _install(seam, platform, vllm.__version__, lack)
        if not _status[seam.name].on:
            off.setdefault(level, {}).setdefault(_status[seam.name].reason, []).append(seam.name)
        elif not in_range(vllm.__version__, seam.versions):
            untested.append(seam.name)
    for_others = sum(map(len, off.pop(logging.DEBUG, {}).values()))
    for level, reasons in off.items():
        for reason, names in reasons.items():
            what = " is" if len(names) == len(_status) - for_others else f": {', '.join(names)}"
            logger.log(level, "vllm-rocm-ops%s off: %s. vLLM's own code runs.", what, reason)
    if untested:
        text = "vllm-rocm-ops: VLLM_ROCM_OPS_ANY_VERSION=1 enables %s, not tested on vLLM %s"
        logger.warning(text, ", ".join(untested), vllm.__version__)
    return status()


def ordered(seams: list[Seam]) -> list[Seam]:
    """Return the seams sorted so that each comes after those in its `requires` and `after`."""
    left, done = {seam.name: seam for seam in seams}, []
    while left:
        ready = next((seam for seam in left.values() if not left.keys() & {*seam.requires, *seam.after}), None)
        if ready is None:
            raise ValueError(f"the `requires` and `after` of seams must have no cycle, got {', '.join(left)}")
        done.append(left.pop(ready.name))
    return done


def served_platform() -> str | None:
    """Return vLLM's platform as `Seam.platforms` names it.

    None for other platforms, and for NVIDIA and CPU unless their variable is set.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        return "cuda" if envs.VLLM_ROCM_OPS_ON_NVIDIA == "1" else None
    if current_platform.is_cpu():
        return "cpu" if envs.VLLM_ROCM_OPS_ON_CPU == "1" else None
    return "rocm" if current_platform.is_rocm() else None


def unsupported_reason(platform: str) -> str:
    """Return why this machine has no kernels. Empty if it has them, and on CPU."""
    if platform == "cpu":
        return ""
    arch = arch_here(platform)
    if arch is None:
        return f"this GPU is not supported, kernels exist for {' and '.join(_known(platform))}"
    if not needs_code:
        return ""
    code = launches.CODE / arch
    if not any(code.glob("*")):
        return f"{code} has no code objects; this package was installed without them"
    try:
        importlib.import_module("vllm_rocm_ops._C")  # opens no driver
    except ImportError as error:
        return f"the extension vllm_rocm_ops._C does not load: {error}"
    return ""


def _known(platform: str) -> list[str]:
    return [name for name, arch in archs.ARCHS.items() if (arch.vendor == "amd") == (platform == "rocm")]


def arch_here(platform: str | None) -> str | None:
    """Return this machine's arch if the package has kernels for it. Asks vLLM, which initializes no GPU."""
    if platform == "rocm":
        from vllm.platforms import rocm

        return next((name for name in _known(platform) if getattr(rocm, f"on_{name}", bool)()), None)
    if platform == "cuda":
        from vllm.platforms import current_platform

        capability = current_platform.get_device_capability()
        return next((name for name in _known(platform) if capability and name == f"sm_{capability.to_int()}"), None)
    return None


def _install(seam: Seam, platform: str, version: str, lack: str) -> tuple[Status, int]:
    """Install a seam if it applies, and return its status and the log level for it."""

    def off(reason: str, level: int = logging.WARNING) -> tuple[Status, int]:
        return Status(seam.name, seam.replaces, False, reason), level

    if not wanted(seam.name, envs.VLLM_ROCM_OPS_SEAMS):
        return off(f"VLLM_ROCM_OPS_SEAMS={envs.VLLM_ROCM_OPS_SEAMS}", logging.INFO)
    if platform not in seam.platforms:
        return off(f"for {' and '.join(seam.platforms)} only", logging.DEBUG)
    if lack:
        return off(lack)
    if not in_range(version, seam.versions) and envs.VLLM_ROCM_OPS_ANY_VERSION != "1":
        tested = f"tested on vLLM {seam.versions[0]} to {seam.versions[1]}, got {version}"
        return off(f"{tested}; VLLM_ROCM_OPS_ANY_VERSION=1 skips this check")
    if missing := [name for name in seam.requires if name not in active()]:
        return off(f"requires {' and '.join(missing)}")
    try:
        seam.probe()
        seam.install()
    except Unavailable as error:
        return off(str(error))
    except Exception as error:  # noqa: BLE001  the other seams are still installed
        return off(f"{type(error).__name__}: {error}")
    return Status(seam.name, seam.replaces, True, f"vLLM {version}"), logging.DEBUG


def wanted(name: str, switch: str) -> bool:
    """True if VLLM_ROCM_OPS_SEAMS asks for a seam: "all", "none", names, or "-name" for all but that one.

    Raises:
        ValueError: The value names an unknown seam.
    """
    words = [word.strip() for word in switch.split(",") if word.strip()]
    unknown = {word.removeprefix("-") for word in words} - {"all", "none", *NAMES}
    if unknown:
        raise ValueError(f"VLLM_ROCM_OPS_SEAMS: {', '.join(sorted(unknown))} not in all, none, {', '.join(NAMES)}")
    if f"-{name}" in words or "none" in words:
        return False
    return "all" in words or name in words or all(word.startswith("-") for word in words)


def names(name: str) -> bool:
    """True if VLLM_ROCM_OPS_SEAMS lists a seam by name."""
    return name in [word.strip() for word in envs.VLLM_ROCM_OPS_SEAMS.split(",")]


def in_range(version: str, versions: tuple[str, str]) -> bool:
    """True if a vLLM version is within two minor releases, inclusive. False for a version without numbers."""

    def minor(text: str) -> tuple[int, int] | None:
        numbers = re.match(r"(\d+)\.(\d+)", text)
        return numbers and (int(numbers[1]), int(numbers[2]))

    return minor(version) is not None and minor(versions[0]) <= minor(version) <= minor(versions[1])


def require(holds: object, wanted: str) -> None:
    """Raise `Unavailable` unless a probe's condition holds."""
    if not holds:
        raise Unavailable(f"this vLLM lacks {wanted}")


def replaceable(module: object, name: str, kind: str = "CustomOp") -> type:
    """Return a class of vLLM's. Raise `Unavailable` unless a plugin may replace it through `register_oot`."""
    from vllm.model_executor import custom_op

    found = getattr(module, name, None)
    require(isinstance(found, type) and issubclass(found, getattr(custom_op, kind)), f"{name} as a {kind}")
    require(name not in custom_op.op_registry_oot, f"a free {name}: another plugin has replaced it")
    if kind == "CustomOp":
        require_parameters(found.dispatch_forward, "compile_native")
    return found


def require_parameters(function: Callable, *names: str) -> None:
    """Raise `Unavailable` unless a callable's first parameters after `self` have these names in this order."""
    parameters = [name for name in inspect.signature(function).parameters if name != "self"]
    text = f"{function.__qualname__}({', '.join(names)}), got ({', '.join(parameters)})"
    require(tuple(parameters[: len(names)]) == names, text)


def require_function(path: str, *wanted: str) -> None:
    """Raise `Unavailable` unless a module has a function with exactly these parameters. Reads the source only."""
    module, _, name = path.rpartition(".")
    require_in(
        {node.name: node for node in body_of(module) if isinstance(node, ast.FunctionDef)}, name, name, 0, wanted
    )


def require_in(
    functions: dict[str, ast.FunctionDef], name: str, label: str, bound: int, wanted: tuple, may: tuple = ()
) -> None:
    """Raise `Unavailable` unless a function, `label` in the error, has the wanted parameters after the first `bound`.

    It `may` have further ones.
    """
    had = [argument.arg for argument in functions[name].args.args[bound:]] if name in functions else []
    text = f"{label}({', '.join(wanted)}), got ({', '.join(had)})"
    require(name in functions and [name for name in had if name not in may] == [*wanted], text)


def body_of(module: str) -> list[ast.stmt]:
    """Return the statements of a vLLM module from its source, without an import."""
    import vllm

    source = Path(vllm.__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py").read_text()
    return ast.parse(source).body
