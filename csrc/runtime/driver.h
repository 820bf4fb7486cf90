// Loads code objects and launches kernels through HIP or CUDA, whichever is available. dlopen finds the library at
// first use, so one binary serves the CPU, ROCm and CUDA builds of torch.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "api.h"

struct Kernel {
  std::string name;  // "<symbol> of <path>", for messages
  api::Function function;
  int device;
  unsigned max_dynamic_lds;  // bytes; a launch with more must raise the limit first
};

struct LaunchDimensions {
  unsigned grid_x, grid_y, grid_z;     // blocks
  unsigned block_x, block_y, block_z;  // threads
  unsigned lds;                        // dynamic LDS bytes
};

struct Capture {
  api::Graph graph = nullptr;
  unsigned long long id = 0;  // unique in the process
};

// An initialized vendor library with at least one device. A failed call throws std::runtime_error with the driver's
// message.
class Driver {
 public:
  // Returns HIP if its library loads and finds a device, else CUDA, else null. `status` reports what was found, or why
  // nothing was.
  static std::unique_ptr<Driver> find(std::string& status);

  virtual ~Driver() = default;
  virtual const char* backend() const = 0;  // "hip" or "cuda"
  virtual std::map<std::string, std::string> versions() const = 0;

  // Loads a code object or PTX onto `device`. Allowed during stream capture.
  api::Module load_module(const std::string& path, int device);
  Kernel find_kernel(api::Module module, const std::string& path, const std::string& symbol, int device) const;
  // Returns zeroed memory on `device`, never freed. Allowed during stream capture.
  void* zeroed_memory(int device, std::size_t bytes) const;
  // Returns zeroed memory on `device` that peers store to while kernels read it. On AMD it is fine-grained and may be
  // cached, so kernels access it at system scope only (device/amd/system.h).
  void* shared_memory(int device, std::size_t bytes) const;
  void free_shared_memory(int device, void* memory) const;
  // The handle by which another process opens such memory, and its address there, for kernels on that process's
  // `device`.
  api::MemoryHandle memory_handle(int device, void* memory) const;
  void* open_memory(int device, const api::MemoryHandle& handle) const;
  void close_memory(int device, void* memory) const;
  // The capture in progress on `stream`, a stream of `device`; without one the graph is null.
  Capture capture_info(api::Stream stream, int device) const;
  // True if the driver supports user objects, which report the destruction of a graph. Older drivers lack them.
  bool has_user_objects() const { return missing_.empty(); }
  // The driver calls destroy(data), on any thread, once the graph, its instances and clones, and their last replay are
  // destroyed. destroy must not call the driver.
  void retain_user_object(api::Graph graph, void (*destroy)(void*), void* data) const;
  // Launches asynchronously on `stream`, a stream of the kernel's device. `arguments` is the kernarg segment, which is
  // copied.
  void launch(Kernel& kernel, const LaunchDimensions& geometry, api::Stream stream, void* arguments,
              std::size_t bytes) const;

 protected:
  explicit Driver(std::string library) : library_(std::move(library)) {}
  virtual std::string describe(api::Result result) const = 0;
  virtual api::Module load_image(const std::string& path, const void* image) const = 0;
  // Runs `action` with `device` current, then restores the previous device.
  virtual void on_device(int device, const std::function<void()>& action) const = 0;
  virtual void* allocate(std::size_t bytes) const = 0;
  virtual void* allocate_shared(std::size_t bytes) const = 0;
  virtual api::Result free(void* memory) const = 0;
  virtual api::Result get_handle(api::MemoryHandle* handle, void* memory) const = 0;
  virtual api::Result open_handle(void** memory, const api::MemoryHandle& handle, unsigned flags) const = 0;
  virtual api::Result close_handle(void* memory) const = 0;
  virtual api::Result set_zero(void* memory, std::size_t bytes, api::Stream stream) const = 0;
  virtual void* arguments_end() const = 0;
  virtual unsigned max_dynamic_lds() const = 0;
  virtual void raise_max_dynamic_lds(Kernel& kernel, unsigned lds) const = 0;
  // Called after a failed call on a stream of `device`. Returns true if the cause has been removed: the call may be
  // retried.
  virtual bool recover(api::Result result, int device) const = 0;

  // Throws "<what>: <the driver's words>\n<details>" unless `result` is success.
  void check(api::Result result, const std::string& what, const std::string& details = "") const;

  const std::string library_;
  api::Shared shared_;
  std::string missing_;  // the first API_OPTIONAL function that the library lacks

 private:
  int count_devices() const;  // at least 1, or it throws
  void set_zero_now(void* memory, std::size_t bytes) const;
  // Like on_device, in relaxed capture mode: a thread that captures a stream may load modules and allocate.
  void on_device_relaxed(int device, const std::function<void()>& action) const;

  // The files of loaded modules: HIP's modules point into them for their lifetime.
  std::vector<std::unique_ptr<const std::string>> images_;
};
