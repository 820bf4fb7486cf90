"""Test the extension _C against the vendors' headers, a recording HIP, and AMD's own without a GPU."""

import contextlib
import ctypes
import ctypes.util
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import timeit
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from load_build import load_build

from vllm_rocm_ops.core import archs

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / "build" / "hip"  # downloads stay there


class LastLaunch(ctypes.Structure):
    """The fake_launch of fake_hip.c."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("geometry", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("parameters", ctypes.c_void_p),
        ("bytes", ctypes.c_ulonglong),
        ("arguments", ctypes.c_ubyte * 256),
        ("end", ctypes.c_void_p),
    )


def extension() -> Path:
    """Return the built _C."""
    return Path(importlib.util.find_spec("vllm_rocm_ops._C").origin)


def fresh_runtime(folder: Path):
    """Return _C as a new process sees it.

    A copy of the file, under another name, has its own state.
    """
    copy = shutil.copy(extension(), folder)
    spec = importlib.util.spec_from_file_location(f"{folder.name}._C", copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_fake(source: str, library: Path, *flags: str) -> Path:
    """Compile a source of this folder to a shared library."""
    subprocess.run([*host_compiler("cc"), "-shared", "-fPIC", "-O2", *flags, HERE / source, "-o", library], check=True)
    return library


def run_alone(code: str, **environment: str) -> str:
    """Return the output of Python code in a new process, where `runtime` is _C, without the package and torch."""
    start = f"""
import ctypes, importlib.util
spec = importlib.util.spec_from_file_location("_C", {str(extension())!r})
runtime = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runtime)
"""
    command, environment = [sys.executable, "-c", start + code], os.environ | environment
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory) -> Path:
    return compile_fake("fake_hip.c", tmp_path_factory.mktemp("fake") / "libamdhip64.so")


@pytest.fixture
def fake(fake_library, tmp_path, monkeypatch) -> ctypes.CDLL:
    """Yield the recording HIP as $VLLM_ROCM_OPS_HIP_LIBRARY, with nothing recorded yet."""
    library = shutil.copy(fake_library, tmp_path / "libfake_hip.so")
    monkeypatch.setenv("VLLM_ROCM_OPS_HIP_LIBRARY", str(library))
    return ctypes.CDLL(str(library))


@pytest.fixture
def runtime(fake, tmp_path):
    return fresh_runtime(tmp_path)


@pytest.fixture
def code_object(tmp_path) -> str:
    path = tmp_path / "code.co"
    path.write_bytes(b"\x7fELF and so on")
    return str(path)


def host_compiler(language: str) -> list[str]:
    """Return the machine's "cc" or "c++", or ziglang's."""
    return [language] if shutil.which(language) else [sys.executable, "-m", "ziglang", language]


def value(library: ctypes.CDLL, name: str) -> int:
    return ctypes.c_int.in_dll(library, name).value


def set_value(library: ctypes.CDLL, name: str, number: int) -> None:
    ctypes.c_int.in_dll(library, name).value = number


def test_finds_the_driver(runtime, fake, tmp_path):
    library = str(tmp_path / "libfake_hip.so")
    assert runtime.backend() == "hip"
    assert runtime.status() == f"{library}: 2 devices"
    assert runtime.versions() == {"library": library, "driver": "7.1.51831", "runtime": "6.4.43484"}


def test_load_goes_to_the_device_and_is_cached(runtime, fake, code_object):
    set_value(fake, "fake_device", 1)
    handle = runtime.load(code_object, "kernel", 0)
    assert value(fake, "fake_load_device") == 0
    assert value(fake, "fake_load_capture_mode") == 2, "loading is allowed while a stream is captured"
    assert (value(fake, "fake_device"), value(fake, "fake_capture_mode")) == (1, 0), "all is as it was before"
    assert runtime.load(code_object, "kernel", 0) == handle
    assert runtime.load(code_object, "another", 0) != handle
    assert value(fake, "fake_loads") == 1
    assert runtime.load(code_object, "kernel", 1) != handle
    assert (value(fake, "fake_loads"), value(fake, "fake_load_device")) == (2, 1)


def test_memory_that_peers_store_to(runtime, fake):
    """It is uncached and zero by then; other processes open it by its handle, and close it before it is freed."""
    set_value(fake, "fake_device", 1)
    address = runtime.shared_memory(0, 4096)
    assert (value(fake, "fake_uncached"), value(fake, "fake_allocated"), value(fake, "fake_zeroed")) == (1, 4096, 4096)
    assert ctypes.string_at(address, 4097) == bytes(4096) + b"\0"
    assert value(fake, "fake_memory_capture_mode") == 2, "allowed while a stream is captured"
    assert (value(fake, "fake_waited"), value(fake, "fake_streams")) == (1, 0)
    handle = runtime.memory_handle(0, address)
    assert [runtime.open_memory(device, handle) for device in (0, 1)] == [address] * 2
    assert value(fake, "fake_opened") == 2
    for device in (0, 1):
        runtime.close_memory(device, address)
    assert (value(fake, "fake_opened"), value(fake, "fake_freed")) == (0, 0)
    runtime.free_shared_memory(0, address)
    assert value(fake, "fake_freed") == 1
    assert (value(fake, "fake_device"), value(fake, "fake_capture_mode")) == (1, 0), "all is as it was before"
    with pytest.raises(RuntimeError, match="2097152 bytes, uncached: invalid argument"):
        runtime.shared_memory(0, 2**21)
    with pytest.raises(ValueError, match="handle must have 64 bytes, got 3"):
        runtime.open_memory(0, b"abc")
    for call, what in (
        (runtime.free_shared_memory, "freeing shared"),
        (runtime.close_memory, "closing another process's"),
    ):
        with pytest.raises(RuntimeError, match=f"{what} memory: invalid argument"):
            call(0, 0)


@pytest.mark.parametrize(("source", "library"), [("fake_hip.c", "fake"), ("fake_cuda.c", "cuda")])
def test_what_a_fake_counts_is_read(source, library):
    """A number that no test reads lets a wrong call pass."""
    headers = [HERE / name for name in re.findall(r'#include "(.*)"', (HERE / source).read_text())]
    texts = [path.read_text() for path in (HERE / source, *headers)]
    lines = [line for text in texts for line in re.findall(r"^\w[^(;]*?;", text, re.MULTILINE)]
    names = {name for line in lines for name in re.findall(r"\b(fake_\w+) =", line)}
    assert len(names) > 4
    found = set(re.findall(rf'(?:value|in_dll)\((?:{library}|ctypes.CDLL\(.*\)), "(\w+)"', Path(__file__).read_text()))
    if library == "cuda":
        found |= set(re.findall(r'number\("(\w+)"\)', Path(__file__).read_text()))
    assert names <= found, sorted(names - found)


def test_counters_are_zero_by_then(runtime, fake):
    set_value(fake, "fake_device", 1)
    address = runtime.counters(0, 0, 48)
    zeroed = value(fake, "fake_zeroed")
    assert zeroed == value(fake, "fake_allocated") >= 128
    assert ctypes.string_at(address, zeroed + 1) == bytes(zeroed) + b"\0"
    assert value(fake, "fake_memory_capture_mode") == 2, "allowed while a stream is captured"
    assert (value(fake, "fake_waited"), value(fake, "fake_streams")) == (1, 0)
    assert (value(fake, "fake_device"), value(fake, "fake_capture_mode")) == (1, 0), "all is as it was before"
    with pytest.raises(RuntimeError, match="2097152 bytes: invalid argument"):
        runtime.counters(0, 0, 2**21)


SIZES = (4, 576, 128, 640)  # bytes of counters


def lines(first: int, size: int) -> set[int]:
    """Return the cache lines of counters."""
    return set(range(first // 128, -(-(first + size) // 128)))


def test_eager_counters_are_the_streams(runtime, fake):
    """Launches on a stream are ordered; launches on another stream, or device, may overlap them."""
    got = {(d, s, n): runtime.counters(d, s, n) for d in (0, 1) for s in (0, 16, 32) for n in SIZES}
    assert all(runtime.counters(*where) == address for where, address in got.items())
    for (d, s, n), address in got.items():
        for (other_d, other_s, other_n), other in got.items():
            assert (d, s) == (other_d, other_s) or not lines(address, n) & lines(other, other_n)


def test_each_captured_launch_has_its_own_counters(runtime, fake):
    """There are two captures on one stream, two streams in one capture, and eager launches before and after."""
    eager = {runtime.counters(0, stream, 576) for stream in (0, 16, 32)}
    captured = []
    for graph in (5, 6):
        fake.fake_capture(ctypes.c_void_p(16), ctypes.c_ulonglong(graph))
        fake.fake_capture(ctypes.c_void_p(32), ctypes.c_ulonglong(graph))
        captured += [(runtime.counters(0, stream, n), n) for stream in (16, 32, 16) for n in SIZES]
        fake.fake_capture(ctypes.c_void_p(32), ctypes.c_ulonglong(0))
        assert runtime.counters(0, 0, 576) in eager, "the default stream is not captured"
        fake.fake_capture(ctypes.c_void_p(16), ctypes.c_ulonglong(0))
    assert value(fake, "fake_objects") == 2, "one for each graph"
    assert {runtime.counters(0, stream, 576) for stream in (0, 16, 32)} == eager
    used = [lines(address, n) for address, n in captured] + [lines(address, 576) for address in eager]
    assert sum(map(len, used)) == len(set().union(*used)), "no two share a line"


def capture(runtime, fake, graph: int, launches: int = 40) -> list[int]:
    """Return the counters of a capture's launches."""
    fake.fake_capture(ctypes.c_void_p(16), ctypes.c_ulonglong(graph))
    taken = [runtime.counters(0, 16, SIZES[i % len(SIZES)]) for i in range(launches)]
    fake.fake_capture(ctypes.c_void_p(16), ctypes.c_ulonglong(0))
    return taken


def test_counters_come_back_when_their_graph_is_gone(runtime, fake):
    """There are 1,000 captures and releases, with two graphs alive at a time."""
    first = capture(runtime, fake, 1)
    before = 0
    for graph in range(2, 1002):
        taken = capture(runtime, fake, graph)
        assert len({*first, *taken}) == len(first) + len(taken), "the counters of a graph that lives"
        fake.fake_release(ctypes.c_ulonglong(graph - 1))
        first, before = taken, before or value(fake, "fake_allocated")
    assert value(fake, "fake_allocated") == before and value(fake, "fake_objects") == 1


def test_a_driver_that_cannot_say_when_graphs_are_gone(tmp_path, monkeypatch):
    """With HIP before 5.3, no launch gets counters that a graph may still use."""
    library = compile_fake("fake_hip.c", tmp_path / "libold_hip.so", "-DFAKE_OLD")
    monkeypatch.setenv("VLLM_ROCM_OPS_HIP_LIBRARY", str(library))
    runtime, fake = fresh_runtime(tmp_path), ctypes.CDLL(str(library))
    assert (
        "2 devices; it has no hipUserObjectCreate, so counters of destroyed graphs are not reused" in runtime.status()
    )
    taken = [address for graph in range(1, 9) for address in capture(runtime, fake, graph)]
    assert len(set(taken)) == len(taken)


def test_a_graph_may_go_while_memory_is_allocated(fake_library):
    """The driver may call back from another thread while it allocates, and wait for that call."""
    output = run_alone(
        f"""
fake = ctypes.CDLL({str(fake_library)!r})
for graph in (1, 2):
    fake.fake_capture(ctypes.c_void_p(16), ctypes.c_ulonglong(graph))
    print(runtime.counters(0, 16, 128) > 0)
    ctypes.c_int.in_dll(fake, "fake_gone_at_malloc").value = 1
print(runtime.counters(0, 16, 256) > 0, ctypes.c_int.in_dll(fake, "fake_objects").value)
""",
        VLLM_ROCM_OPS_HIP_LIBRARY=str(fake_library),
    )
    assert output.splitlines() == ["True", "True", "True 1"]


def test_launch_passes_everything_on(runtime, fake, code_object):
    runtime.load(code_object, "first", 0)
    handle = runtime.load(code_object, "second", 0)
    arguments = bytes(range(200))
    runtime.launch(handle, 2**31 - 1, 65535, 3, 1024, 2, 1, 65536, 2**63 + 8, arguments)
    last = LastLaunch.in_dll(fake, "fake_launch")
    assert last.function == 1001 * 1000 + len("second")
    assert list(last.geometry) == [2**31 - 1, 65535, 3, 1024, 2, 1, 65536], "the grid is in blocks"
    assert (last.stream, last.parameters, last.end) == (2**63 + 8, None, 3)
    assert bytes(last.arguments)[: last.bytes] == arguments
    runtime.launch(handle, 1, 1, 1, 64, 1, 1, 0, 0, b"")
    assert (last.bytes, last.stream) == (0, None)


def test_failures_say_what_the_driver_says(runtime, fake, code_object, tmp_path):
    with pytest.raises(RuntimeError) as error:
        runtime.load(code_object, "missing", 0)
    assert str(error.value) == f"missing of {code_object}: named symbol not found (hipErrorNotFound)"
    assert value(fake, "fake_last_error") == 0, "torch must not find our error as its own"
    bad = tmp_path / "bad.co"
    bad.write_bytes(b"not a code object")
    for path, symbol, device, text in (
        (str(bad), "kernel", 0, f"{bad}: device kernel image is invalid (hipErrorInvalidImage)"),
        (str(tmp_path / "absent.co"), "kernel", 0, "absent.co: cannot be read"),
        (code_object, "kernel", 7, "device 7: invalid device ordinal (hipErrorInvalidDevice)"),
    ):
        for _ in range(2):  # a failure is not cached as a success
            with pytest.raises(RuntimeError) as error:
                runtime.load(path, symbol, device)
            assert text in str(error.value)
    assert value(fake, "fake_device") == 0

    handle = runtime.load(code_object, "kernel", 0)
    with pytest.raises(RuntimeError) as error:
        runtime.launch(handle, 0, 1, 1, 64, 1, 1, 512, 0, bytes(24))
    assert str(error.value) == (
        f"kernel of {code_object}: launch of [0, 1, 1] blocks of [64, 1, 1] threads with 512 bytes of dynamic LDS and "
        "24 bytes of arguments: invalid argument (hipErrorInvalidValue)"
    )
    with pytest.raises(IndexError, match="launch: handle must be one that load returned, got 99"):
        runtime.launch(99, 1, 1, 1, 64, 1, 1, 0, 0, b"")
    with pytest.raises(TypeError):
        runtime.launch(handle, 1, 1, 1, 64, 1, 1, 0, 0, "text")
    with pytest.raises(TypeError):
        runtime.launch(handle, -1, 1, 1, 64, 1, 1, 0, 0, b"")


def test_no_device_is_a_status_and_no_failure(fake_library, tmp_path):
    (tmp_path / "libcuda.so.1").touch()  # hides this machine's real one, if any
    output = run_alone(
        f"""
ctypes.c_int.in_dll(ctypes.CDLL({str(fake_library)!r}), "fake_devices").value = 0
print(runtime.backend(), runtime.versions(), runtime.status(), sep="\\n")
for call in (lambda: runtime.load("code.co", "kernel", 0), lambda: runtime.launch(0, 1, 1, 1, 64, 1, 1, 0, 0, b"")):
    try:
        call()
    except (RuntimeError, IndexError) as error:
        print(error)
""",
        VLLM_ROCM_OPS_HIP_LIBRARY=str(fake_library),
        LD_LIBRARY_PATH=str(tmp_path),
    )
    status = (
        f"{fake_library}: no device: no ROCm-capable device is detected (hipErrorNoDevice); "
        f"{tmp_path}/libcuda.so.1: file too short"
    )
    unknown = "launch: handle must be one that load returned, got 0"
    assert output.splitlines() == ["None", "{}", status, f"no GPU: {status}", unknown]


def test_a_loaded_hip_is_shared(fake_library, tmp_path, monkeypatch):
    """The libamdhip64 of torch is in a folder of its own; a second copy in the process would not know torch's streams."""
    monkeypatch.delenv("VLLM_ROCM_OPS_HIP_LIBRARY", raising=False)
    assert run_alone(f"ctypes.CDLL({str(fake_library)!r}); print(runtime.status())") == f"{fake_library}: 2 devices"


def test_importing_opens_no_driver(fake_library, monkeypatch):
    monkeypatch.setenv("VLLM_ROCM_OPS_HIP_LIBRARY", str(fake_library))
    code = "import torch, vllm_rocm_ops._C; print(torch.cuda.is_initialized(), open('/proc/self/maps').read())"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "_C.cpython" in result.stdout and str(fake_library) not in result.stdout
    assert result.stdout.startswith("False")


def test_launch_is_cheap(runtime, code_object):
    """The goal is under 1.5 us without the driver."""
    handle = runtime.load(code_object, "kernel", 0)
    arguments = bytes(96)
    count = 20000
    seconds = min(timeit.repeat(lambda: runtime.launch(handle, 1, 1, 1, 64, 1, 1, 0, 7, arguments), number=count))
    assert seconds / count < 1.5e-6


def test_cuda(tmp_path, code_object):
    """CUDA differs in PTX with the assembler's log, contexts by thread, and dynamic LDS above 48 KiB on request only."""
    compile_fake("fake_cuda.c", tmp_path / "libcuda.so.1")
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(".version 8.7")
    output = run_alone(
        f"""
from concurrent.futures import ThreadPoolExecutor
cuda = ctypes.CDLL("libcuda.so.1")
number = lambda name: ctypes.c_int.in_dll(cuda, name).value
context = ctypes.c_void_p(1)
print(runtime.backend(), runtime.status(), runtime.versions())
try:
    runtime.load({code_object!r}, "kernel", 0)
except RuntimeError as error:
    print(error)
handle = runtime.load({str(ptx)!r}, "kernel", 0)
cuda.cuCtxGetCurrent(ctypes.byref(context))
print(bool(ctypes.c_void_p.in_dll(cuda, "fake_load_context")), context.value)
launch = lambda lds, grid=2: runtime.launch(handle, grid, 1, 1, 64, 1, 1, lds, 0, b"12345678")
launch(49152)
with ThreadPoolExecutor(1) as pool:
    pool.submit(launch, 0).result()
print(number("fake_launches"), number("fake_attribute_calls"), number("fake_bytes"))
with ThreadPoolExecutor(1) as pool:
    counters = [pool.submit(runtime.counters, 0, 16, 64).result() for _ in range(2)]
cuda.fake_capture(ctypes.c_void_p(16), ctypes.c_ulonglong(3))
captured = [runtime.counters(0, 16, 64) for _ in range(2)]
cuda.fake_release(ctypes.c_ulonglong(3))
cuda.fake_capture(ctypes.c_void_p(16), ctypes.c_ulonglong(4))
print(len(set(counters + captured)), runtime.counters(0, 16, 64) in captured)
allocated = number("fake_allocated")
address = runtime.shared_memory(0, 64)
opened = runtime.open_memory(0, runtime.memory_handle(0, address))
print(opened == address, ctypes.string_at(address, 64) == bytes(64), number("fake_allocated") - allocated)
print(number("fake_opened"), runtime.close_memory(0, opened), number("fake_opened"), number("fake_freed"))
print(runtime.free_shared_memory(0, address), number("fake_freed"), number("fake_objects"))
launch(49153), launch(100), launch(65536), launch(65536)
print(number("fake_launches"), number("fake_attribute_calls"), number("fake_lds_allowed"))
for lds, grid in ((2**20, 1), (0, 0)):
    try:
        launch(lds, grid)
    except RuntimeError as error:
        print(error)
""",
        VLLM_ROCM_OPS_HIP_LIBRARY="absent.so",
        LD_LIBRARY_PATH=str(tmp_path),
    )
    assert output.splitlines() == [
        "cuda libcuda.so.1: 1 device {'driver': '13.1', 'library': 'libcuda.so.1'}",
        f"{code_object}: a PTX JIT compilation failed (CUDA_ERROR_INVALID_PTX)",
        "ptxas: line 1",
        "True None",
        "2 0 8",
        "3 True",
        "True True 64",
        "1 None 0 0",
        "None 1 1",
        "6 2 65536",
        f"kernel of {ptx}: 1048576 bytes of dynamic LDS: other (CUDA_ERROR_OTHER)",
        (
            f"kernel of {ptx}: launch of [0, 1, 1] blocks of [64, 1, 1] threads with 0 bytes of dynamic LDS and "
            "8 bytes of arguments: other (CUDA_ERROR_OTHER)"
        ),
    ]


def download_debian(package: str) -> Path | None:
    """Return the package and its dependencies, unpacked under CACHE without root, or None if it does not exist."""
    root = CACHE / package
    if root.exists() or not shutil.which("apt-get"):
        return root if root.exists() else None
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        # With a separate apt state, reading lists and downloading need no root.
        state, unpacked = Path(folder, "apt"), Path(folder, "unpacked")
        for path in (state / "lists/partial", state / "archives/partial", unpacked):
            path.mkdir(parents=True)
        apt = ["apt-get", "-qq", "-o", f"Dir::State={state}", "-o", f"Dir::Cache={state}", "-o", "APT::Sandbox::User="]
        apt += ["-o", "Dir::State::status=/var/lib/dpkg/status", "-o", "Debug::NoLocking=1"]
        plan = [*apt, "install", "-s", "--reinstall", "--no-install-recommends", package]
        if subprocess.run([*apt, "update"], check=False).returncode:
            return None
        planned = subprocess.run(plan, check=False, capture_output=True, text=True).stdout
        names = {line.split()[1] for line in planned.splitlines() if line.startswith("Inst ")}
        if package not in names:
            return None
        subprocess.run([*apt, "download", *names], check=True, cwd=unpacked)
        for archive in unpacked.glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(archive), str(unpacked)], check=True)
            archive.unlink()
        with contextlib.suppress(OSError):  # another test run was faster
            unpacked.rename(root)
    return root


def vendor_include(vendor: str, header: str) -> Path:
    """Return a folder with that vendor's real headers: from triton's wheel, else the system, else Debian."""
    spec = importlib.util.find_spec("triton")
    folders = [Path(spec.submodule_search_locations[0], "backends", vendor, "include")] if spec else []
    folders += [Path(os.environ.get("ROCM_PATH", "/opt/rocm"), "include"), Path("/usr/local/cuda/include")]
    folders += [Path("/usr/include")]
    for folder in folders:
        if (folder / header).exists():
            return folder
    debian = download_debian({"amd": "libamdhip64-dev", "nvidia": "nvidia-cuda-dev"}[vendor])
    assert debian, f"no {header} on this machine (triton's wheel brings it), and no Debian package with it"
    return debian / "usr/include"


@pytest.mark.parametrize(("vendor", "header"), [("amd", "hip/hip_runtime_api.h"), ("nvidia", "cuda.h")])
def test_declarations_are_the_vendors(vendor, header, tmp_path):
    """check_api.cpp compares every entry point and constant with the real header."""
    command = [*host_compiler("c++"), "-std=c++20", "-w", "-I", ROOT / "csrc/runtime"]
    command += ["-I", vendor_include(vendor, header), HERE / "check_api.cpp", "-o", tmp_path / "check"]
    command += ["-DCHECK_HIP"] if vendor == "amd" else []
    compiled = subprocess.run(command, check=False, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    assert subprocess.run([tmp_path / "check"], check=False).returncode == 0, "a constant differs"


@pytest.mark.skipif(Path("/dev/kfd").exists(), reason="this machine may have a device")
def test_amds_own_library_without_a_device():
    """The system's or Debian's real libamdhip64 has every entry point, and reports a missing device as a status."""
    search = ""
    library = ctypes.util.find_library("amdhip64")
    if library is None:
        debian = download_debian("libamdhip64-5")
        if debian is None:
            raise unittest.SkipTest("no libamdhip64 on this machine, and no Debian package with it")
        (library,) = debian.glob("usr/lib/*/libamdhip64.so.5")
        search = str(library.parent)
    output = run_alone(
        "print(runtime.backend(), runtime.status(), sep='\\n')",
        VLLM_ROCM_OPS_HIP_LIBRARY=str(library),
        LD_LIBRARY_PATH=search,
    )
    backend, status = output.splitlines()
    assert backend in ("None", "cuda")
    assert backend == "cuda" or re.match(rf"{re.escape(str(library))}: no device: .*\bhipError\w+", status), status


class Gpu:
    """The real thing: _C, torch's device, and runtime_kernels.hip on it."""

    def __init__(self):
        from vllm_rocm_ops import _C

        self.runtime, self.arch = _C, archs.of_device(torch.cuda.current_device())
        tree = ROOT / "build" / "runtime_kernels" / "csrc"
        (tree / "ops").mkdir(parents=True, exist_ok=True)
        shutil.copytree(ROOT / "csrc/device", tree / "device", dirs_exist_ok=True)
        shutil.copy(HERE / "runtime_kernels.hip", tree / "ops")
        for name in ("build.py", "debug_info.py"):
            shutil.copy(ROOT / "csrc" / name, tree)
        (self.path,) = load_build(tree).build(archs=[self.arch.name])

    def load(self, symbol: str) -> int:
        return self.runtime.load(str(self.path), symbol, torch.cuda.current_device())

    def scale(self, x: torch.Tensor, factor: float, offset: int) -> torch.Tensor:
        out = torch.empty_like(x)
        arguments = struct.pack("QQifq", x.data_ptr(), out.data_ptr(), x.numel(), factor, offset)
        grid = (-(-x.numel() // 256), 1, 1)
        self.runtime.launch(self.load("scale"), *grid, 256, 1, 1, 0, torch.cuda.current_stream().cuda_stream, arguments)
        return out


@pytest.fixture(scope="session")
def gpu():
    return Gpu()


needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or archs.of_device(torch.cuda.current_device()) is None,
    reason="no GPU that there is code for",
)


@needs_gpu
def test_gpu_launch(gpu):
    assert gpu.runtime.backend() == ("hip" if torch.version.hip else "cuda")
    x = torch.randn(1000, device="cuda")
    torch.testing.assert_close(gpu.scale(x, 2.5, 2**24), x * 2.5 + 2**24)


@needs_gpu
def test_gpu_launch_from_a_thread_that_has_not_used_the_gpu(gpu):
    x = torch.ones(300, device="cuda")
    out = torch.zeros_like(x)
    arguments = struct.pack("QQifq", x.data_ptr(), out.data_ptr(), 300, 3.0, 4)
    handle = gpu.load("scale")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(gpu.runtime.launch, handle, 2, 1, 1, 256, 1, 1, 0, 0, arguments).result()
    torch.cuda.synchronize()
    assert (out == 7).all()


@needs_gpu
def test_gpu_graph_captures_first_load_and_launch(gpu, tmp_path):
    x = torch.ones(300, device="cuda")
    gpu.path = Path(shutil.copy(gpu.path, tmp_path))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = gpu.scale(x, 3.0, 4)
    x.fill_(2.0)
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 10).all()


@needs_gpu
def test_gpu_dynamic_lds_up_to_all_of_it(gpu):
    x, out = torch.randn(256, device="cuda"), torch.empty(256, device="cuda")
    handle, stream = gpu.load("through_lds"), torch.cuda.current_stream().cuda_stream
    for size in (4096, gpu.arch.lds_bytes, 4096):
        out.zero_()
        arguments = struct.pack("QQi", x.data_ptr(), out.data_ptr(), size)
        gpu.runtime.launch(handle, 1, 1, 1, 256, 1, 1, size, stream, arguments)
        assert torch.equal(out, x)
    with pytest.raises(RuntimeError, match="through_lds of .*dynamic LDS"):
        gpu.runtime.launch(handle, 1, 1, 1, 256, 1, 1, 2**20, stream, bytes(20))
    assert torch.equal(gpu.scale(x, 1.0, 0), x), "the failure left no error behind"


@needs_gpu
def test_gpu_failures_are_the_drivers_words(gpu, tmp_path):
    with pytest.raises(RuntimeError, match="absent of .*not found"):
        gpu.load("absent")
    bad = tmp_path / f"bad{gpu.path.suffix}"
    bad.write_bytes(gpu.path.read_bytes()[:400] + b"nonsense")
    with pytest.raises(RuntimeError) as error:
        gpu.runtime.load(str(bad), "scale", torch.cuda.current_device())
    assert str(error.value).startswith(f"{bad}: ")
    if gpu.runtime.backend() == "cuda":
        assert "ptxas" in str(error.value), "the assembler's own log"
    with pytest.raises(RuntimeError, match="device 99: "):
        gpu.runtime.load(str(gpu.path), "scale", 99)
    torch.cuda.synchronize()
