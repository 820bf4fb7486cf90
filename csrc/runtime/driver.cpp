// Implements driver.h.
#include "driver.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <stdexcept>

namespace {

template <class Pointer>
void look_up(Pointer& pointer, void* handle, const char* symbol) {
  pointer = reinterpret_cast<Pointer>(dlsym(handle, symbol));
  if (pointer == nullptr) throw std::runtime_error(std::string("has no ") + symbol);
}

template <class Pointer>
void look_up_optional(Pointer& pointer, std::string& missing, void* handle, const char* symbol) {
  pointer = reinterpret_cast<Pointer>(dlsym(handle, symbol));
  if (pointer == nullptr && missing.empty()) missing = symbol;
}

#define LOOK_UP_SHARED_HIP(name, hip, cuda, type) look_up(shared_.name, handle, #hip);
#define LOOK_UP_SHARED_CUDA(name, hip, cuda, type) look_up(shared_.name, handle, #cuda);
#define LOOK_UP_OPTIONAL_HIP(name, hip, cuda, type) look_up_optional(shared_.name, missing_, handle, #hip);
#define LOOK_UP_OPTIONAL_CUDA(name, hip, cuda, type) look_up_optional(shared_.name, missing_, handle, #cuda);
#define LOOK_UP(name, symbol, type) look_up(own_.name, handle, #symbol);

class HipDriver final : public Driver {
 public:
  HipDriver(const std::string& library, void* handle) : Driver(library) {
    API_SHARED(LOOK_UP_SHARED_HIP)
    API_OPTIONAL(LOOK_UP_OPTIONAL_HIP)
    API_HIP(LOOK_UP)
  }
  const char* backend() const override { return "hip"; }
  std::map<std::string, std::string> versions() const override {
    return {
        {"library", library_}, {"driver", version(shared_.driver_version)}, {"runtime", version(own_.runtime_version)}};
  }

 private:
  std::string version(api::Result (*query)(int*)) const {
    int number = 0;
    check(query(&number), "version");
    return std::to_string(number / 10000000) + "." + std::to_string(number / 100000 % 100) + "." +
           std::to_string(number % 100000);
  }
  std::string describe(api::Result result) const override {
    own_.clear_error();  // otherwise torch would find it in hipGetLastError and report it as its own
    return std::string(own_.error_string(result)) + " (" + own_.error_name(result) + ")";
  }
  api::Module load_image(const std::string& path, const void* image) const override {
    api::Module module = nullptr;
    check(shared_.load_module(&module, image, 0, nullptr, nullptr), path);
    return module;
  }
  void on_device(int device, const std::function<void()>& action) const override {
    struct Current {
      const api::Hip& hip;
      int device = 0;
      ~Current() { hip.set_device(device); }
    } before{own_};
    check(own_.get_device(&before.device), "hipGetDevice");
    check(own_.set_device(device), "device " + std::to_string(device));
    action();
  }
  void* allocate(std::size_t bytes) const override {
    void* memory = nullptr;
    check(own_.allocate(&memory, bytes), std::to_string(bytes) + " bytes");
    return memory;
  }
  // clr takes extended fine-grained memory for this flag; it sets an uncached memory type on gfx12 alone.
  void* allocate_shared(std::size_t bytes) const override {
    void* memory = nullptr;
    check(own_.allocate_with_flags(&memory, bytes, api::kHipUncached), std::to_string(bytes) + " bytes, uncached");
    return memory;
  }
  api::Result free(void* memory) const override { return own_.free(memory); }
  api::Result get_handle(api::MemoryHandle* handle, void* memory) const override {
    return own_.get_handle(handle, memory);
  }
  api::Result open_handle(void** memory, const api::MemoryHandle& handle, unsigned flags) const override {
    return own_.open_handle(memory, handle, flags);
  }
  api::Result close_handle(void* memory) const override { return own_.close_handle(memory); }
  api::Result set_zero(void* memory, std::size_t bytes, api::Stream stream) const override {
    return own_.set_bytes(memory, 0, bytes, stream);
  }
  void* arguments_end() const override { return reinterpret_cast<void*>(api::kHipArgumentsEnd); }
  // HIP needs no attribute: a launch may use the device's whole LDS.
  unsigned max_dynamic_lds() const override { return std::numeric_limits<unsigned>::max(); }
  void raise_max_dynamic_lds(Kernel&, unsigned) const override {}
  bool recover(api::Result, int) const override { return false; }

  api::Hip own_;
};

class CudaDriver final : public Driver {
 public:
  CudaDriver(const std::string& library, void* handle) : Driver(library) {
    API_SHARED(LOOK_UP_SHARED_CUDA)
    API_OPTIONAL(LOOK_UP_OPTIONAL_CUDA)
    API_CUDA(LOOK_UP)
  }
  const char* backend() const override { return "cuda"; }
  std::map<std::string, std::string> versions() const override {
    int number = 0;
    check(shared_.driver_version(&number), "version");
    return {{"library", library_},
            {"driver", std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10)}};
  }

 private:
  std::string describe(api::Result result) const override {
    const char *name = "unknown error", *text = "";
    own_.error_name(result, &name);
    own_.error_string(result, &text);
    return std::string(text) + " (" + name + ")";
  }
  api::Module load_image(const std::string& path, const void* image) const override {
    api::Module module = nullptr;
    std::vector<char> log(8192);
    int options[] = {api::kCudaErrorLog, api::kCudaErrorLogBytes};
    void* values[] = {log.data(), reinterpret_cast<void*>(log.size() - 1)};
    api::Result result = shared_.load_module(&module, image, 2, options, values);
    check(result, path, log.data());
    return module;
  }
  api::Context primary_context(int device) const {
    api::Context context = nullptr;
    check(own_.retain_primary_context(&context, device), "device " + std::to_string(device));
    return context;
  }
  void on_device(int device, const std::function<void()>& action) const override {
    struct Current {
      const api::Cuda& cuda;
      api::Context context = nullptr;
      ~Current() { cuda.set_context(context); }
    } before{own_};
    check(own_.get_context(&before.context), "cuCtxGetCurrent");
    check(own_.set_context(primary_context(device)), "device " + std::to_string(device));
    action();
  }
  void* allocate(std::size_t bytes) const override {
    unsigned long long memory = 0;
    check(own_.allocate(&memory, bytes), std::to_string(bytes) + " bytes");
    return reinterpret_cast<void*>(memory);
  }
  static unsigned long long number(void* memory) { return reinterpret_cast<unsigned long long>(memory); }
  void* allocate_shared(std::size_t bytes) const override { return allocate(bytes); }
  api::Result free(void* memory) const override { return own_.free(number(memory)); }
  api::Result get_handle(api::MemoryHandle* handle, void* memory) const override {
    return own_.get_handle(handle, number(memory));
  }
  api::Result open_handle(void** memory, const api::MemoryHandle& handle, unsigned flags) const override {
    unsigned long long address = 0;
    const api::Result result = own_.open_handle(&address, handle, flags);
    *memory = reinterpret_cast<void*>(address);
    return result;
  }
  api::Result close_handle(void* memory) const override { return own_.close_handle(number(memory)); }
  api::Result set_zero(void* memory, std::size_t bytes, api::Stream stream) const override {
    return own_.set_bytes(number(memory), 0, bytes, stream);
  }
  void* arguments_end() const override { return reinterpret_cast<void*>(api::kCudaArgumentsEnd); }
  unsigned max_dynamic_lds() const override { return 48 * 1024; }
  void raise_max_dynamic_lds(Kernel& kernel, unsigned lds) const override {
    check(own_.set_attribute(kernel.function, api::kCudaDynamicLds, static_cast<int>(lds)),
          kernel.name + ": " + std::to_string(lds) + " bytes of dynamic LDS");
    kernel.max_dynamic_lds = lds;
  }
  // A thread that has not used CUDA has no current context. torch sets one only to change the device.
  bool recover(api::Result result, int device) const override {
    return result == api::kCudaInvalidContext && own_.set_context(primary_context(device)) == 0;
  }

  api::Cuda own_;
};

// Returns the path of the library with this name that the process has loaded: torch bundles its own HIP.
std::string loaded_library(const char* stem) {
  struct Search {
    const char* stem;
    std::string path;
  } search{stem, ""};
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        Search& search = *static_cast<Search*>(data);
        std::string path = info->dlpi_name;
        if (path.compare(path.rfind('/') + 1, std::strlen(search.stem), search.stem) != 0) return 0;
        search.path = path;
        return 1;
      },
      &search);
  return search.path;
}

std::vector<std::string> hip_libraries() {
  const char* explicit_library = std::getenv("VLLM_ROCM_OPS_HIP_LIBRARY");
  if (explicit_library && *explicit_library) return {explicit_library};
  if (std::string loaded = loaded_library("libamdhip64"); !loaded.empty()) return {loaded};
  return {"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "/opt/rocm/lib/libamdhip64.so"};
}

}  // namespace

void Driver::check(api::Result result, const std::string& what, const std::string& details) const {
  if (result != 0) throw std::runtime_error(what + ": " + describe(result) + (details.empty() ? "" : "\n" + details));
}

int Driver::count_devices() const {
  int devices = 0;
  check(shared_.init(0), "no device");
  check(shared_.count_devices(&devices), "no device");
  if (devices == 0) throw std::runtime_error("no device");
  return devices;
}

std::unique_ptr<Driver> Driver::find(std::string& status) {
  std::vector<std::string> reasons;
  std::unique_ptr<Driver> driver;
  auto try_vendor = [&](auto make, const std::vector<std::string>& libraries) {
    std::string missing;
    for (const std::string& library : libraries) {
      if (void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL)) {
        try {
          driver = make(library, handle);
          int devices = driver->count_devices();
          status = library + ": " + std::to_string(devices) + (devices == 1 ? " device" : " devices");
          if (!driver->has_user_objects())
            status += "; it has no " + driver->missing_ + ", so counters of destroyed graphs are not reused";
          return true;
        } catch (const std::runtime_error& error) {
          reasons.push_back(library + ": " + error.what());
          return false;  // the library stays loaded: drivers do not survive dlclose
        }
      }
      // An existing library with a missing dependency gives a more helpful error than a missing library.
      std::string error = dlerror();
      if (missing.empty() || error.compare(0, library.size(), library) != 0) missing = error;
    }
    reasons.push_back(missing);
    return false;
  };
  auto hip = [](auto&... arguments) { return std::make_unique<HipDriver>(arguments...); };
  auto cuda = [](auto&... arguments) { return std::make_unique<CudaDriver>(arguments...); };
  if (try_vendor(hip, hip_libraries()) || try_vendor(cuda, {"libcuda.so.1"})) return driver;
  for (const std::string& reason : reasons) status += (status.empty() ? "" : "; ") + reason;
  return nullptr;
}

api::Module Driver::load_module(const std::string& path, int device) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + ": cannot be read");
  auto image =
      std::make_unique<const std::string>(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  api::Module module = nullptr;
  on_device_relaxed(device, [&] { module = load_image(path, image->c_str()); });
  images_.push_back(std::move(image));
  return module;
}

void Driver::on_device_relaxed(int device, const std::function<void()>& action) const {
  on_device(device, [&] {
    int mode = api::kHipCaptureRelaxed;
    check(shared_.exchange_capture_mode(&mode), "capture mode");
    struct Restore {
      const api::Shared& shared;
      int& mode;
      ~Restore() { shared.exchange_capture_mode(&mode); }
    } restore{shared_, mode};
    action();
  });
}

void* Driver::zeroed_memory(int device, std::size_t bytes) const {
  void* memory = nullptr;
  on_device_relaxed(device, [&] { set_zero_now(memory = allocate(bytes), bytes); });
  return memory;
}

void Driver::set_zero_now(void* memory, std::size_t bytes) const {
  api::Stream stream = nullptr;  // not the default stream, which synchronizes with other streams
  check(shared_.create_stream(&stream, api::kHipNonBlocking), "stream");
  api::Result result = set_zero(memory, bytes, stream);
  if (result == 0) result = shared_.wait_for_stream(stream);
  shared_.destroy_stream(stream);
  check(result, "zeroing " + std::to_string(bytes) + " bytes");
}

void* Driver::shared_memory(int device, std::size_t bytes) const {
  void* memory = nullptr;
  on_device_relaxed(device, [&] { set_zero_now(memory = allocate_shared(bytes), bytes); });
  return memory;
}

void Driver::free_shared_memory(int device, void* memory) const {
  on_device(device, [&] { check(free(memory), "freeing shared memory"); });
}

api::MemoryHandle Driver::memory_handle(int device, void* memory) const {
  api::MemoryHandle handle{};
  on_device(device, [&] { check(get_handle(&handle, memory), "shared memory handle"); });
  return handle;
}

void* Driver::open_memory(int device, const api::MemoryHandle& handle) const {
  void* memory = nullptr;
  on_device(device,
            [&] { check(open_handle(&memory, handle, api::kHipPeerAccess), "opening another process's memory"); });
  return memory;
}

void Driver::close_memory(int device, void* memory) const {
  on_device(device, [&] { check(close_handle(memory), "closing another process's memory"); });
}

Capture Driver::capture_info(api::Stream stream, int device) const {
  if (stream == nullptr) return {};  // the default stream; while another stream captures, the query fails
  int status = 0;
  Capture capture;
  auto ask = [&] { return shared_.get_capture_info(stream, &status, &capture.id, &capture.graph, nullptr, nullptr); };
  api::Result result = ask();
  if (result != 0 && recover(result, device)) result = ask();
  check(result, "stream capture status");
  return status == api::kHipCaptureActive ? capture : Capture{};
}

void Driver::retain_user_object(api::Graph graph, void (*destroy)(void*), void* data) const {
  api::UserObject object = nullptr;
  check(shared_.create_user_object(&object, data, destroy, 1, api::kHipNoDestructorSync), "user object");
  check(shared_.retain_user_object(graph, object, 1, api::kHipMoveReferences), "retaining a graph's user object");
}

Kernel Driver::find_kernel(api::Module module, const std::string& path, const std::string& symbol, int device) const {
  Kernel kernel{symbol + " of " + path, nullptr, device, max_dynamic_lds()};
  on_device(device, [&] { check(shared_.get_function(&kernel.function, module, symbol.c_str()), kernel.name); });
  return kernel;
}

void Driver::launch(Kernel& kernel, const LaunchDimensions& g, api::Stream stream, void* arguments,
                    std::size_t bytes) const {
  if (g.lds > kernel.max_dynamic_lds) raise_max_dynamic_lds(kernel, g.lds);
  void* extra[] = {reinterpret_cast<void*>(api::kHipArguments), arguments,
                   reinterpret_cast<void*>(api::kHipArgumentsSize), &bytes, arguments_end()};
  auto attempt = [&] {
    return shared_.launch_kernel(kernel.function, g.grid_x, g.grid_y, g.grid_z, g.block_x, g.block_y, g.block_z, g.lds,
                                 stream, nullptr, extra);
  };
  api::Result result = attempt();
  if (result == 0) [[likely]]
    return;
  if (recover(result, kernel.device)) result = attempt();
  auto size = [](unsigned x, unsigned y, unsigned z) {
    return "[" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + "]";
  };
  check(result, kernel.name + ": launch of " + size(g.grid_x, g.grid_y, g.grid_z) + " blocks of " +
                    size(g.block_x, g.block_y, g.block_z) + " threads with " + std::to_string(g.lds) +
                    " bytes of dynamic LDS and " + std::to_string(bytes) + " bytes of arguments");
}
