// vllm_rocm_ops._C: loads and launches kernels.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <tuple>

#include "counters.h"
#include "driver.h"

namespace py = pybind11;

namespace {

// The process's loaded modules and kernels. Everything here runs under the GIL.
struct Runtime {
  std::string status;
  std::unique_ptr<Driver> driver = Driver::find(status);
  std::map<std::tuple<int, std::string>, api::Module> modules;               // by device, path
  std::map<std::tuple<int, std::string, std::string>, std::size_t> handles;  // by device, path, symbol
  std::deque<Kernel> kernels;                                                // by handle
  Counters counters;

  static Runtime& get() {
    static Runtime* runtime = new Runtime;  // never destroyed: drivers are gone before static destructors run
    return *runtime;
  }
};

Driver& driver() {
  Runtime& runtime = Runtime::get();
  if (!runtime.driver) throw std::runtime_error("no GPU: " + runtime.status);
  return *runtime.driver;
}

std::size_t load(const std::string& path, const std::string& symbol, int device) {
  Runtime& runtime = Runtime::get();
  auto [entry, is_new] = runtime.handles.try_emplace({device, path, symbol});
  if (!is_new) return entry->second;
  try {
    auto module = runtime.modules.find({device, path});
    if (module == runtime.modules.end())
      module = runtime.modules.emplace(std::tuple(device, path), driver().load_module(path, device)).first;
    runtime.kernels.push_back(driver().find_kernel(module->second, path, symbol, device));
  } catch (...) {
    runtime.handles.erase(entry);
    throw;
  }
  return entry->second = runtime.kernels.size() - 1;
}

void launch(std::size_t handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
            unsigned block_z, unsigned lds, std::uintptr_t stream, const py::bytes& packed_args) {
  static Runtime& runtime = Runtime::get();
  if (handle >= runtime.kernels.size())
    throw std::out_of_range("launch: handle must be one that load returned, got " + std::to_string(handle));
  runtime.driver->launch(runtime.kernels[handle], {grid_x, grid_y, grid_z, block_x, block_y, block_z, lds},
                         reinterpret_cast<api::Stream>(stream), PyBytes_AS_STRING(packed_args.ptr()),
                         static_cast<std::size_t>(PyBytes_GET_SIZE(packed_args.ptr())));
}

std::uintptr_t counters(int device, std::uintptr_t stream, std::size_t bytes) {
  static Runtime& runtime = Runtime::get();
  void* memory = runtime.counters.get(driver(), device, reinterpret_cast<api::Stream>(stream), bytes);
  return reinterpret_cast<std::uintptr_t>(memory);
}

std::uintptr_t number(void* memory) { return reinterpret_cast<std::uintptr_t>(memory); }
void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

py::bytes memory_handle(int device, std::uintptr_t address) {
  const api::MemoryHandle handle = driver().memory_handle(device, pointer(address));
  return py::bytes(handle.bytes, sizeof handle.bytes);
}

std::uintptr_t open_memory(int device, const std::string& bytes) {
  api::MemoryHandle handle;
  if (bytes.size() != sizeof handle.bytes)
    throw std::invalid_argument("open_memory: handle must have " + std::to_string(sizeof handle.bytes) +
                                " bytes, got " + std::to_string(bytes.size()));
  bytes.copy(handle.bytes, sizeof handle.bytes);
  return number(driver().open_memory(device, handle));
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Load code objects and launch kernels through HIP or CUDA, found at first use, without torch.";
  module.def(
      "backend",
      []() -> std::optional<std::string> {
        const auto& driver = Runtime::get().driver;
        return driver ? std::optional<std::string>(driver->backend()) : std::nullopt;
      },
      "Return 'hip', 'cuda', or None; status() gives the reason. The first call finds and initializes the driver.");
  module.def(
      "status", [] { return Runtime::get().status; },
      "Return the library found, or each library tried and why it failed.");
  module.def(
      "versions",
      [] {
        const auto& driver = Runtime::get().driver;
        return driver ? driver->versions() : std::map<std::string, std::string>();
      },
      "Return the backend's {'library', 'driver', 'runtime'}; {} without one.");
  module.def("load", &load, py::arg("path"), py::arg("symbol"), py::arg("device"),
             "Load a kernel from a code object (or PTX) onto a device. Return its handle, the same for every call.");
  module.def(
      "counters", &counters, py::arg("device"), py::arg("stream"), py::arg("bytes"),
      "Return the address of `bytes` zeroed bytes for the next launch on a device's stream, which must leave them "
      "zero. During stream capture they belong to this launch alone, for the graph's lifetime.");
  module.def(
      "shared_memory", [](int device, std::size_t bytes) { return number(driver().shared_memory(device, bytes)); },
      py::arg("device"), py::arg("bytes"),
      "Return the address of `bytes` zeroed bytes on a device that its peers may store to; fine-grained on AMD.");
  module.def(
      "free_shared_memory",
      [](int device, std::uintptr_t address) { driver().free_shared_memory(device, pointer(address)); },
      py::arg("device"), py::arg("address"), "Free memory from shared_memory. No process may have it open.");
  module.def("memory_handle", &memory_handle, py::arg("device"), py::arg("address"),
             "Return the handle by which another process on this machine opens shared memory.");
  module.def("open_memory", &open_memory, py::arg("device"), py::arg("handle"),
             "Return the address of another process's shared memory, for kernels on one of this process's devices.");
  module.def(
      "close_memory", [](int device, std::uintptr_t address) { driver().close_memory(device, pointer(address)); },
      py::arg("device"), py::arg("address"), "Close memory from open_memory.");
  module.def("launch", &launch, py::arg("handle"), py::arg("grid_x"), py::arg("grid_y"), py::arg("grid_z"),
             py::arg("block_x"), py::arg("block_y"), py::arg("block_z"), py::arg("lds"), py::arg("stream"),
             py::arg("packed_args"),
             "Launch asynchronously on a stream (its handle as int) of the kernel's device. The grid is in blocks, "
             "packed_args is the kernarg segment.");
}
