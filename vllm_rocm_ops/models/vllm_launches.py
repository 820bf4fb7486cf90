"""Ask vLLM for the launches of a model's decode step, in a process that simulates the GPU (vllm/meta/model.py), or read a list.

A shipped model has a list of vLLM's answers and the version that gave them, `launches.json`, written by

    python -m vllm_rocm_ops.models.vllm_launches

The list is read if this version or no vLLM is installed. Any other vLLM is asked.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from importlib import metadata

from vllm_rocm_ops.core import archs, envs
from vllm_rocm_ops.models import config as model_config

AMD = [name for name, arch in archs.ARCHS.items() if arch.vendor == "amd"]
LISTED = [*((tp, ep) for tp in (1, 2, 4, 8, 16) for ep in (None, tp)), (1, 4), (1, 8)]
"""(TP, EP) of the steps in shipped lists; EP None is without expert parallelism."""
TIMEOUT_S = 300
MAX_LAYERS, MAX_SIZE = 1024, 2**24
"""Limits of a configuration: layers, and any size."""


class Builder:
    """A process in which vLLM builds models for one architecture. Its first answer takes about 6 s, others 0.1 to 1 s."""

    def __init__(self, arch: str):
        quiet = {"VLLM_PLUGINS": "none", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
        environment = envs.of_child(quiet)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        command = [sys.executable, "-m", "vllm_rocm_ops.vllm.meta.model", arch]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._stderr}
        self._process = subprocess.Popen(command, text=True, env=environment, start_new_session=True, **pipes)
        self._lock = threading.Lock()
        atexit.register(self.end)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def ask(self, request: dict) -> dict:
        """Return the answer to a request, {"error": reason} if the process ended or took longer than TIMEOUT_S."""
        timer = threading.Timer(TIMEOUT_S, self.end)
        with self._lock:
            timer.start()
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except BrokenPipeError:
                line = ""
            finally:
                timer.cancel()
        if line:
            return json.loads(line)
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines() or ["no message"]
        return {"error": f"vLLM could not be asked: {lines[-1]}"}


builder = functools.cache(Builder)


@functools.cache
def installed_version() -> str | None:
    """Return the version of the installed vLLM, None without one. Imports nothing."""
    if importlib.util.find_spec("vllm") is None:
        return None
    names = ("vllm", *metadata.packages_distributions().get("vllm", ()))
    for name in names:
        try:
            return metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return ""


@functools.cache
def shipped() -> dict[str, dict]:
    """Return the lists of shipped models, by the JSON of their configuration."""
    result = {}
    for name in model_config.shipped():
        path = model_config.SHIPPED / name / "launches.json"
        if path.is_file():
            result[json.dumps(model_config.read(name), sort_keys=True)] = json.loads(path.read_text())
    return result


def shipped_list(config: dict, tp: int, ep: int | None) -> dict | None:
    """Return the shipped list that has a step, None if there is none or another version of vLLM is installed."""
    known = shipped().get(json.dumps(config, sort_keys=True))
    is_valid = known and installed_version() in (None, known["vllm"]) and step_key(tp, ep) in known["steps"]
    return known if is_valid else None


def version(config: dict, tp: int, ep: int | None) -> str:
    """Return the version of vLLM whose launches `blocks` returns for a step."""
    known = shipped_list(config, tp, ep)
    return known["vllm"] if known else installed_version() or ""


def blocks(config: dict, tp: int, ep: int | None, arch: str) -> list:
    """Return the blocks of a step: [count, launches], of vllm/meta/model.py. Raises ValueError if neither list nor vLLM has it."""
    if known := shipped_list(config, tp, ep):
        return expand(known, step_key(tp, ep))
    if installed_version() is None:
        known = shipped().get(json.dumps(config, sort_keys=True))
        lists = f"; its list has {', '.join(known['steps'])}" if known else ""
        raise ValueError(f"needs vLLM, which says what it builds for {step_key(tp, ep)}{lists}")
    return ask_vllm(config, tp, ep, arch)["blocks"]


def ask_vllm(config: dict, tp: int, ep: int | None, arch: str) -> dict:
    """Return the installed vLLM's answer for a step. Raises ValueError with its reason, or for a size above the limits."""
    for name, value in config.items():
        limit = MAX_LAYERS if name.endswith("layers") else MAX_SIZE
        if type(value) is int and value > limit and name.endswith(("layers", "size", "experts", "heads", "dim")):
            raise ValueError(f"{name} must be at most {limit}, got {model_config.shown(value)}")
    answer = builder(arch).ask({"config": config, "tp": tp, "ep": ep})
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer


# Shipped lists


def step_key(tp: int, ep: int | None) -> str:
    """Return the key of a step in a list."""
    return f"TP {tp}" if ep is None else f"TP {tp} EP {ep}"


def expand(known: dict, step: str) -> list:
    """Return the blocks of a step of a list, whose blocks have indices of launches."""
    return [[count, [known["launches"][index] for index in indices]] for count, indices in known["steps"][step]]


def build_list(config: dict) -> dict:
    """Return a model's list of the steps that vLLM can build: every launch once, and steps as indices of launches."""
    launches, steps, version = {}, {}, ""
    for tp, ep in LISTED:
        try:
            answer = ask_vllm(config, tp, ep, AMD[0])
        except ValueError:
            continue
        version = answer["vllm"].partition("+")[0]
        steps[step_key(tp, ep)] = [
            [count, [launches.setdefault(json.dumps(launch), len(launches)) for launch in block]]
            for count, block in answer["blocks"]
        ]
    return {"vllm": version, "launches": [json.loads(launch) for launch in launches], "steps": steps}


def to_json(known: dict) -> str:
    """Return a list as JSON, with one line per launch and step."""
    launches = ",\n".join(json.dumps(launch) for launch in known["launches"])
    steps = ",\n".join(f"{json.dumps(name)}: {json.dumps(step)}" for name, step in known["steps"].items())
    return f'{{"vllm": {json.dumps(known["vllm"])}, "launches": [\n{launches}\n], "steps": {{\n{steps}\n}}}}\n'


if __name__ == "__main__":
    for model in sys.argv[1:] or model_config.shipped():
        (model_config.SHIPPED / model / "launches.json").write_text(to_json(build_list(model_config.read(model))))
