"""A seam is one place where vLLM takes our code instead of its own: a file with a `SEAM`, and its line in `FILES`.

A seam is installed if the user asks for it, it is made for this platform, it was tried on this vLLM version, and its probe
finds every name and signature that the seam touches. Otherwise the seam stays off, vLLM's own code runs, and `status` says why.
The log has one line for each reason, however many seams are off for it. With `VLLM_ROCM_OPS_ANY_VERSION=1` the probes alone say
whether a seam fits this vLLM version.

On NVIDIA no seam is installed, unless `VLLM_ROCM_OPS_ON_NVIDIA=1`. The seams then serve vLLM's CUDA platform as they serve its
ROCm platform, so that a model can be measured with the ops and without. On CPU, which has no kernels, no seam is installed,
unless `VLLM_ROCM_OPS_ON_CPU=1`. Then the ops' references run, for tests.
"""

import ast
import dataclasses
import importlib
import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path

from vllm_rocm_ops.core import arch as archs
from vllm_rocm_ops.core import envs
from vllm_rocm_ops.core import launch as launches

logger = logging.getLogger("vllm.vllm_rocm_ops")

FILES = {
    "activation": "fusion",
    "all_reduce": "fusion",
    "block_scaled_linear": "linear",
    "checked_scales": "guards",
    "compile_cache": "guards",
    "cpu_gaps": "guards",
    "decode_attention": "attention.decoder",
    "fp8_experts": "experts",
    "fusion": "fusion",
    "int8_linear": "linear",
    "latent_attention": "attention.mla",
    "latent_norms": "attention",
    "measured_selection": "selection",
    "mxfp8_experts": "experts",
    "mxfp8_linear": "linear",
    "norm": "fusion",
    "quantized_attention": "attention",
    "quantized_input": "fusion",
    "rope_and_cache": "attention",
    "routing_experts": "experts",
    "scaled_linear": "linear",
    "unquantized_experts": "experts",
    "unquantized_linear": "linear",
}
"""The file of each seam, or the folder that has a file of its name."""

NAMES = tuple(FILES)


class Unavailable(Exception):
    """A probe raises it when vLLM or the machine lacks something that a seam needs."""


@dataclasses.dataclass(frozen=True)
class Seam:
    """One replacement inside vLLM.

    `versions` are the first and last vLLM minor releases that the seam was tried on. `probe` raises when a name or a
    signature that `install` relies on is missing; it changes nothing. `after` names seams that are installed before this one. `ops` begin the names of the ops that it calls.
    """

    name: str
    replaces: str
    probe: Callable[[], None]
    install: Callable[[], None]
    platforms: tuple[str, ...] = ("rocm", "cuda", "cpu")
    versions: tuple[str, str] = ("0.30", "0.33")
    after: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Status:
    """Whether a seam is on in this process, and why."""

    name: str
    replaces: str
    on: bool
    reason: str


_status: dict[str, Status] = {}


def status() -> list[Status]:
    """Every seam's status, in the order of installation. Empty until `install_all` ran."""
    return list(_status.values())


def active() -> list[str]:
    """The names of the seams that are on."""
    return [entry.name for entry in _status.values() if entry.on]


def replace(theirs: type, ours: type) -> type:
    """Register a subclass in the place of a custom op of vLLM's, under the name by which `custom_ops` switches that."""
    theirs.register_oot(ours)
    ours.name = theirs.name
    return ours


def log_off(level: int, what: str, reason: str) -> None:
    logger.log(level, "vllm-rocm-ops%s off: %s. vLLM's own code runs.", what, reason)


def load(name: str) -> Seam:
    """The seam of that name. Imports the seam's file, which does not import vLLM."""
    return importlib.import_module(module_of(name)).SEAM


def module_of(name: str) -> str:
    """Return the module of a seam."""
    place = FILES[name]
    return f"{__package__}.{place}" if "." in place else f"{__package__}.{place}.{name}"


def install_all() -> list[Status]:
    """Install every seam that applies here, once per process."""
    if _status:
        return status()
    import vllm

    platform = served_platform()
    if platform is None:
        logger.debug("vllm-rocm-ops has nothing for this platform")
        return []
    lack, off, untested = lacks(platform), {}, []
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
            log_off(level, what, reason)
    if untested:
        text = "vllm-rocm-ops: VLLM_ROCM_OPS_ANY_VERSION=1 turns on %s, not tried on this vLLM, %s"
        logger.warning(text, ", ".join(untested), vllm.__version__)
    return status()


def ordered(found: list[Seam]) -> list[Seam]:
    """The same seams, each behind those in its `after`."""
    left, done = {seam.name: seam for seam in found}, []
    while left:
        ready = next((seam for seam in left.values() if not left.keys() & set(seam.after)), None)
        if ready is None:
            raise ValueError(f"seams that each come after another: {', '.join(left)}")
        done.append(left.pop(ready.name))
    return done


def served_platform() -> str | None:
    """vLLM's platform as `Seam.platforms` names it. None for other platforms, and for NVIDIA and CPU unless the user asked for
    them."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        return "cuda" if envs.VLLM_ROCM_OPS_ON_NVIDIA == "1" else None
    if current_platform.is_cpu():
        return "cpu" if envs.VLLM_ROCM_OPS_ON_CPU == "1" else None
    return "rocm" if current_platform.is_rocm() else None


def lacks(platform: str) -> str:
    """Why this machine has no kernels. Empty if it has kernels, and on CPU."""
    if platform == "cpu":
        return ""
    arch = arch_here(platform)
    if arch is None:
        return f"there are kernels for {' and '.join(_known(platform))} only"
    code = launches.CODE / arch
    if not any(code.glob("*")):
        return f"there are no code objects in {code}; this package was installed without them"
    try:
        importlib.import_module("vllm_rocm_ops._C")  # which opens no driver
    except ImportError as error:
        return f"the extension vllm_rocm_ops._C does not load: {error}"
    return ""


def _known(platform: str) -> list[str]:
    return [name for name, arch in archs.ARCHS.items() if (arch.vendor == "amd") == (platform == "rocm")]


def arch_here(platform: str | None) -> str | None:
    """This machine's arch, if there are kernels for it. vLLM is asked, which initialises no GPU."""
    if platform == "rocm":
        from vllm.platforms import rocm

        return next((name for name in _known(platform) if getattr(rocm, f"on_{name}", bool)()), None)
    if platform == "cuda":
        from vllm.platforms import current_platform

        capability = current_platform.get_device_capability()
        return next((name for name in _known(platform) if capability and name == f"sm_{capability.to_int()}"), None)
    return None


def _install(seam: Seam, platform: str, version: str, lack: str) -> tuple[Status, int]:
    """The status of a seam that was installed if it applies, and the level of the log for it."""

    def off(reason: str, level: int = logging.WARNING) -> tuple[Status, int]:
        return Status(seam.name, seam.replaces, False, reason), level

    if not wanted(seam.name, envs.VLLM_ROCM_OPS_SEAMS):
        return off(f"VLLM_ROCM_OPS_SEAMS={envs.VLLM_ROCM_OPS_SEAMS}", logging.INFO)
    if platform not in seam.platforms:
        return off(f"for {' and '.join(seam.platforms)} only", logging.DEBUG)
    if lack:
        return off(lack)
    if not in_range(version, seam.versions) and envs.VLLM_ROCM_OPS_ANY_VERSION != "1":
        return off(f"tried on vLLM {seam.versions[0]} to {seam.versions[1]}, this is {version}")
    try:
        seam.probe()
        seam.install()
    except Unavailable as error:
        return off(str(error))
    except Exception as error:  # noqa: BLE001  the other seams go on
        return off(f"{type(error).__name__}: {error}")
    return Status(seam.name, seam.replaces, True, f"vLLM {version}"), logging.DEBUG


def wanted(name: str, switch: str) -> bool:
    """Whether the switch asks for a seam: "all", "none", names, or "-name" for all but that one; comma separated."""
    words = [word.strip() for word in switch.split(",") if word.strip()]
    unknown = {word.removeprefix("-") for word in words} - {"all", "none", *NAMES}
    if unknown:
        raise ValueError(f"VLLM_ROCM_OPS_SEAMS: {', '.join(sorted(unknown))} not in all, none, {', '.join(NAMES)}")
    if f"-{name}" in words or "none" in words:
        return False
    return "all" in words or name in words or all(word.startswith("-") for word in words)


def names(name: str) -> bool:
    """Whether the user asks for a seam by its name."""
    return name in [word.strip() for word in envs.VLLM_ROCM_OPS_SEAMS.split(",")]


def in_range(version: str, versions: tuple[str, str]) -> bool:
    """Whether a vLLM version is within two minor releases, both included. False for a version without numbers."""

    def minor(text: str) -> tuple[int, int] | None:
        numbers = re.match(r"(\d+)\.(\d+)", text)
        return numbers and (int(numbers[1]), int(numbers[2]))

    return minor(version) is not None and minor(versions[0]) <= minor(version) <= minor(versions[1])


def require(holds: object, wanted: str) -> None:
    """Raise `Unavailable` unless a probe's condition holds."""
    if not holds:
        raise Unavailable(f"this vLLM lacks {wanted}")


def require_parameters(function: Callable, *names: str) -> None:
    """Raise `Unavailable` unless a callable's first parameters after `self` have these names, in this order."""
    found = [name for name in inspect.signature(function).parameters if name != "self"]
    text = f"{function.__qualname__}({', '.join(names)}), it has ({', '.join(found)})"
    require(tuple(found[: len(names)]) == names, text)


def require_function(path: str, *wanted: str) -> None:
    """Raise `Unavailable` unless a module has a function with these parameters, and no more."""
    module, _, name = path.rpartition(".")
    require_in(
        {node.name: node for node in body_of(module) if isinstance(node, ast.FunctionDef)}, name, name, 0, wanted
    )


def require_in(
    functions: dict[str, ast.FunctionDef], name: str, says: str, bound: int, wanted: tuple, may: tuple = ()
) -> None:
    """Raise `Unavailable` unless a function has these parameters behind so many that are bound, and none but those that it `may` have."""
    had = [argument.arg for argument in functions[name].args.args[bound:]] if name in functions else []
    text = f"{says}({', '.join(wanted)}), it has ({', '.join(had)})"
    require(name in functions and [one for one in had if one not in may] == [*wanted], text)


def body_of(module: str) -> list[ast.stmt]:
    """Return what a module of vLLM's has, read and not imported."""
    import vllm

    source = Path(vllm.__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py").read_text()
    return ast.parse(source).body
