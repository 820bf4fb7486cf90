"""The extension _C: its declarations against the vendors' headers, a HIP that only remembers, and AMD's own without a GPU."""

import ctypes
import ctypes.util
import importlib.util
import os
import shutil
import subprocess
import sys
import timeit
from pathlib import Path

import pytest

import vllm_rocm_ops

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "hip"  # what is downloaded stays there


class LastLaunch(ctypes.Structure):
    """fake_launch of fake_hip.c."""

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
    """The built _C."""
    return next(Path(vllm_rocm_ops.__file__).parent.glob("_C.*.so"))


def fresh_runtime(folder: Path):
    """_C as a new process sees it: a copy of the file, under a name of its own, has its own state."""
    copy = shutil.copy(extension(), folder)
    spec = importlib.util.spec_from_file_location(f"{folder.name}._C", copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory) -> Path:
    library = tmp_path_factory.mktemp("fake") / "libamdhip64.so"
    command = [*host_compiler("cc"), "-shared", "-fPIC", "-O2", str(ROOT / "tests/fake_hip.c"), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


@pytest.fixture
def fake(fake_library, tmp_path, monkeypatch) -> ctypes.CDLL:
    """The remembering HIP, as $VLLM_ROCM_OPS_HIP_LIBRARY, with nothing remembered yet."""
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
    """The machine's "cc" or "c++", or ziglang's."""
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
        for _ in range(2):  # a failure is not remembered as a success
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


def test_no_device_is_a_status_and_no_failure(fake, tmp_path, code_object):
    set_value(fake, "fake_devices", 0)
    runtime = fresh_runtime(tmp_path)
    no_cuda = "libcuda.so.1: cannot open shared object file: No such file or directory"
    if runtime.backend() == "cuda":
        pytest.skip("this machine has a CUDA device, which is used then")
    reason = f"{tmp_path}/libfake_hip.so: no device: no ROCm-capable device is detected (hipErrorNoDevice); {no_cuda}"
    assert (runtime.backend(), runtime.status(), runtime.versions()) == (None, reason, {})
    with pytest.raises(RuntimeError) as error:
        runtime.load(code_object, "kernel", 0)
    assert str(error.value) == f"no GPU: {reason}"
    with pytest.raises(IndexError):
        runtime.launch(0, 1, 1, 1, 64, 1, 1, 0, 0, b"")


def test_a_loaded_hip_is_shared(fake_library, tmp_path, monkeypatch):
    """torch has its own libamdhip64, at a path of its own; a second copy in the process would not know torch's streams."""
    monkeypatch.delenv("VLLM_ROCM_OPS_HIP_LIBRARY", raising=False)
    code = f"""
import ctypes, importlib.util
torchs = ctypes.CDLL({str(fake_library)!r})
spec = importlib.util.spec_from_file_location("_C", {str(extension())!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.status())
"""
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == f"{fake_library}: 2 devices"


def test_importing_opens_no_driver(fake_library, monkeypatch):
    monkeypatch.setenv("VLLM_ROCM_OPS_HIP_LIBRARY", str(fake_library))
    code = "import vllm_rocm_ops, vllm_rocm_ops._C; print(open('/proc/self/maps').read())"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "amdhip" not in result.stdout and "libcuda.so" not in result.stdout


def test_launch_is_cheap(runtime, code_object):
    """Goal: under 1.5 us of our own, the driver's cost apart."""
    handle = runtime.load(code_object, "kernel", 0)
    arguments = bytes(96)
    count = 20000
    seconds = min(timeit.repeat(lambda: runtime.launch(handle, 1, 1, 1, 64, 1, 1, 0, 7, arguments), number=count))
    assert seconds / count < 1.5e-6


def download_debian(package: str) -> Path | None:
    """The package and all it needs, unpacked under CACHE, without root; None where there is no such package."""
    root = CACHE / package
    if not root.exists() and shutil.which("apt-get"):
        state, unpacked = CACHE / "apt", CACHE / f"{package}.unfinished"
        for folder in (state / "lists/partial", state / "archives/partial", unpacked):
            folder.mkdir(parents=True, exist_ok=True)
        # An apt state of our own: reading lists and downloading then needs no root.
        apt = ["apt-get", "-qq", "-o", f"Dir::State={state}", "-o", f"Dir::Cache={state}", "-o", "APT::Sandbox::User="]
        apt += ["-o", "Dir::State::status=/var/lib/dpkg/status", "-o", "Debug::NoLocking=1"]
        if subprocess.run([*apt, "update"], check=False).returncode:
            return None
        needed = subprocess.run(
            [*apt, "install", "-s", "--reinstall", "--no-install-recommends", package],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        names = {line.split()[1] for line in needed.stdout.splitlines() if line.startswith("Inst ")}
        if package not in names:
            return None
        subprocess.run([*apt, "download", *names], check=True, cwd=unpacked)
        for archive in unpacked.glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(archive), str(unpacked)], check=True)
        unpacked.rename(root)
    return root if root.exists() else None


def vendor_include(vendor: str, header: str) -> Path:
    """A folder with that vendor's real headers: triton's wheel has both, else what the system has, else Debian's."""
    spec = importlib.util.find_spec("triton")
    folders = [Path(spec.submodule_search_locations[0], "backends", vendor, "include")] if spec else []
    folders += [Path(os.environ.get("ROCM_PATH", "/opt/rocm"), "include"), Path("/usr/local/cuda/include")]
    folders += [Path("/usr/include")]
    for folder in folders:
        if (folder / header).exists():
            return folder
    debian = download_debian({"amd": "libamdhip64-dev", "nvidia": "nvidia-cuda-dev"}[vendor])
    if debian is None:
        pytest.skip(f"no {header} on this machine, and no Debian package with it")
    return debian / "usr/include"


@pytest.mark.parametrize(("vendor", "header"), [("amd", "hip/hip_runtime_api.h"), ("nvidia", "cuda.h")])
def test_declarations_are_the_vendors(vendor, header, tmp_path):
    """check_api.cpp holds every entry point and constant against the real header."""
    command = [*host_compiler("c++"), "-std=c++20", "-w", "-I", str(ROOT / "csrc/runtime")]
    command += [
        "-I",
        str(vendor_include(vendor, header)),
        str(ROOT / "tests/check_api.cpp"),
        "-o",
        str(tmp_path / "check"),
    ]
    command += ["-DCHECK_HIP"] if vendor == "amd" else []
    compiled = subprocess.run(command, check=False, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    assert subprocess.run([str(tmp_path / "check")], check=False).returncode == 0, "a constant differs"


def test_amds_own_library_without_a_device(tmp_path):
    """A real libamdhip64, the system's or Debian's: every entry point is there, and no device is a status."""
    if Path("/dev/kfd").exists():
        pytest.skip("this machine may have a device")
    search = ""
    library = ctypes.util.find_library("amdhip64")
    if library is None:
        debian = download_debian("libamdhip64-5")
        if debian is None:
            pytest.skip("no libamdhip64 on this machine, and no Debian package with it")
        (library,) = debian.glob("usr/lib/*/libamdhip64.so.5")
        search = str(library.parent)
    code = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("_C", {str(extension())!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.backend(), module.status(), sep="\\n")
"""
    environment = os.environ | {"VLLM_ROCM_OPS_HIP_LIBRARY": str(library), "LD_LIBRARY_PATH": search}
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    backend, status = result.stdout.splitlines()
    assert backend in ("None", "cuda")
    assert backend == "cuda" or status.startswith(f"{library}: no device: hipError")
