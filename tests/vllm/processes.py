"""Runs code in processes of its own, each with another vLLM or environment, or something replaced before vLLM is there.

They are forks of one that has imported what every vLLM imports, which takes seconds, and nothing of vLLM. Beside a GPU they start anew.
"""

import glob
import multiprocessing
import os
import pathlib
import sys
import tempfile

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # vLLM's own setting, which Inductor reads when it is imported
# vLLM's all_reduce between CPU ranks returns its input, which PyTorch makes an error where CI is set.
os.environ["TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING"] = "0"
# What a GPU's runtime has started in does not fork.
FORKS = multiprocessing.get_context("spawn" if glob.glob("/dev/nvidia[0-9]") + glob.glob("/dev/kfd") else "forkserver")
multiprocessing.get_context("forkserver").set_forkserver_preload(
    [
        "torch._inductor.standalone_compile",
        "transformers.modeling_gguf_pytorch_utils",
        "transformers.models.auto.image_processing_auto",
        *("fastapi", "networkx", "openai.types.responses", "prometheus_client", "requests", "xgrammar"),
    ]
)


def begin(code: str, folders: list[str], environment: dict[str, str], output: str) -> None:
    """What a fork does first."""
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = folders
    sys.dont_write_bytecode = False  # compiling vLLM's source takes seconds, too
    exec(code, {"__name__": "__main__"})  # noqa: S102  a test's own


def run(code: str, *folders: pathlib.Path, timeout: float = 900, **environment: str) -> str:
    """What the code writes, run with these folders first on sys.path; it must not fail."""
    path = [str(folder) for folder in folders]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment}
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        process = FORKS.Process(target=begin, args=(code, path, environment, output.name))
        process.start()
        process.join(timeout)
        process.kill()
        process.join()
        text = output.read()
    assert process.exitcode == 0, text[-8000:]
    return text
