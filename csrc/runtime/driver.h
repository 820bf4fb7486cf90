// Loads code objects and launches kernels through whichever of HIP and CUDA this process has. The library is found with
// dlopen at first use, so that one binary serves the CPU, ROCm and CUDA builds of torch.
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
  unsigned lds_allowed;  // a launch with more dynamic LDS bytes than this asks the driver first
};

struct Geometry {
  unsigned grid_x, grid_y, grid_z;     // blocks
  unsigned block_x, block_y, block_z;  // threads
  unsigned lds;                        // dynamic LDS bytes
};

struct Capture {
  api::Graph graph = nullptr;
  unsigned long long id = 0;  // no two captures of a process have the same
};

// A vendor's library, initialised, with at least one device. What fails throws std::runtime_error in the driver's
// words.
class Driver {
 public:
  // HIP if it is there and has a device, else CUDA, else null. `status` says what was found, or why nothing was.
  static std::unique_ptr<Driver> find(std::string& status);

  virtual ~Driver() = default;
  virtual const char* backend() const = 0;  // "hip" or "cuda"
  virtual std::map<std::string, std::string> versions() const = 0;

  // A code object or PTX onto `device`. Allowed while a stream is being captured.
  api::Module load_module(const std::string& path, int device);
  Kernel find_kernel(api::Module module, const std::string& path, const std::string& symbol, int device) const;
  // Memory of `device` that is zero when this returns; it is kept for good. Allowed while a stream is being captured.
  void* zeroed_memory(int device, std::size_t bytes) const;
  // What `stream`, one of `device`, is being captured into; no graph if it is not.
  Capture capture_of(api::Stream stream, int device) const;
  // Whether call_when_gone works: older drivers cannot say when a graph is gone.
  bool knows_when_gone() const { return missing_.empty(); }
  // Calls destroy(data) when the graph, all that was instantiated or cloned from it and its last replay are gone, on any
  // thread. It must not call the driver.
  void call_when_gone(api::Graph graph, void (*destroy)(void*), void* data) const;
  // Asynchronous, on `stream`, which is one of the kernel's device. `arguments`: the packed kernarg segment; it is
  // copied.
  void launch(Kernel& kernel, const Geometry& geometry, api::Stream stream, void* arguments, std::size_t bytes) const;

 protected:
  explicit Driver(std::string library) : library_(std::move(library)) {}
  virtual std::string describe(api::Result result) const = 0;
  virtual api::Module load_image(const std::string& path, const void* image) const = 0;
  // Run with `device` current; what was current before is so again afterwards.
  virtual void on_device(int device, const std::function<void()>& action) const = 0;
  virtual void* allocate(std::size_t bytes) const = 0;
  virtual api::Result set_zero(void* memory, std::size_t bytes, api::Stream stream) const = 0;
  virtual void* arguments_end() const = 0;
  virtual unsigned lds_allowed() const = 0;
  virtual void allow_lds(Kernel& kernel, unsigned lds) const = 0;
  // After a failed call on a stream of `device`: whether its cause is removed, so that it is worth another try.
  virtual bool repair(api::Result result, int device) const = 0;

  // Throws "<what>: <the driver's words>\n<details>" unless `result` is success.
  void check(api::Result result, const std::string& what, const std::string& details = "") const;

  const std::string library_;
  api::Shared shared_;
  std::string missing_;  // the first of API_OPTIONAL that the library lacks

 private:
  int count_devices() const;  // at least 1, or it throws
  // As on_device; a thread that captures a stream may do in it what is not for the graph: load and allocate.
  void on_device_uncaptured(int device, const std::function<void()>& action) const;

  // What was loaded: HIP's modules point into it for as long as they live.
  std::vector<std::unique_ptr<const std::string>> images_;
};
