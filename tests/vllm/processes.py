"""Run code in new processes, each with another vLLM or environment, or with a replacement made before vLLM is imported.

They are forks of a process that has imported what every vLLM imports, which takes seconds, and nothing of vLLM; or of
one that has imported the installed vLLM, too. On a machine with a GPU they are spawned.
"""

import gc
import glob
import multiprocessing
import os
import pathlib
import sys
import tempfile
import threading
from multiprocessing import forkserver
from unittest import mock

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # vLLM's own setting, which Inductor reads at import
# vLLM's all_reduce between CPU ranks returns its input, which PyTorch makes an error where CI is set.
os.environ["TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING"] = "0"
# A process in which a GPU's runtime has started cannot fork.
FORKS = multiprocessing.get_context("spawn" if glob.glob("/dev/nvidia[0-9]") + glob.glob("/dev/kfd") else "forkserver")
HERE = pathlib.Path(__file__).parent
ANY = [
    "torch._inductor.standalone_compile",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.models.auto.image_processing_auto",
    *("fastapi", "networkx", "openai.types.responses", "prometheus_client", "requests", "xgrammar"),
]
INSTALLED = ["vllm.entrypoints.llm", "vllm.model_executor.models.registry", "warmed"]


def server(*modules: str) -> forkserver.ForkServer:
    """Return what forks processes that have imported these modules. It starts with the first one."""
    made = forkserver.ForkServer()
    made.set_forkserver_preload(["uncollected", *modules])
    return made


STARTING = threading.Lock()
SERVERS = {False: server(*ANY), True: server(*ANY, *INSTALLED)}


def begin(code: str, folders: list[str], environment: dict[str, str], output: str) -> None:
    """Set up a fork, and run its code."""
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # a collection would write to every page of what was imported
    gc.set_threshold(50_000)
    gc.enable()
    sys.path[:0] = folders
    sys.dont_write_bytecode = False  # compiling vLLM's source takes seconds, too
    exec(code, {"__name__": "__main__"})  # noqa: S102  a test's own


def run(code: str, *folders: pathlib.Path, timeout: float = 900, imported: bool = False, **environment: str) -> str:
    """Return the output of the code, run with these folders first on sys.path; it must not fail.

    The installed vLLM is imported already if the caller says so: then it has read its environment at import.
    """
    path = [str(folder) for folder in folders]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment}
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        process = FORKS.Process(target=begin, args=(code, path, environment, output.name))
        # A server ignores modules that it does not find, and up to Python 3.12 this process's sys.path.
        # vLLM compiles some functions when it is imported, where it may. Compiled models compile them with all else.
        with (
            STARTING,  # a test's threads share os.environ
            mock.patch.dict(os.environ, PYTHONPATH=str(HERE), TORCHDYNAMO_DISABLE="1"),
            mock.patch.object(forkserver, "connect_to_new_process", SERVERS[imported].connect_to_new_process),
        ):
            process.start()
        process.join(timeout)
        process.kill()
        process.join()
        text = output.read()
    assert process.exitcode == 0, text[-8000:]
    return text
