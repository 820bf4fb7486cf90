// Implements counters.h.
#include "counters.h"

#include <algorithm>
#include <memory>

namespace {

constexpr std::size_t kCacheLine = 128;         // bytes: concurrent launches share no cache line
constexpr std::size_t kAllocation = 64 * 1024;  // bytes per allocation

}  // namespace

void* Counters::get(const Driver& driver, int device, api::Stream stream, std::size_t bytes) {
  const Size size{device, (bytes + kCacheLine - 1) / kCacheLine * kCacheLine};
  const Capture capture = driver.capture_info(stream, device);
  if (capture.graph == nullptr) {
    void*& memory = stream_counters_[{stream, size}];
    if (memory == nullptr) memory = take(driver, size);
    return memory;
  }
  if (!driver.has_user_objects()) return take(driver, size);
  CaptureCounters& of = counters_of_capture(driver, capture);
  void* memory = take(driver, size);
  std::lock_guard lock(mutex_);
  of.in_use.emplace_back(size, memory);
  return memory;
}

void* Counters::take(const Driver& driver, const Size& size) {
  {
    std::lock_guard lock(mutex_);
    if (auto& free = free_[size]; !free.empty()) {
      void* memory = free.back();
      free.pop_back();
      return memory;
    }
  }
  const std::size_t count = std::max<std::size_t>(kAllocation / size.bytes, 1);
  char* allocation = static_cast<char*>(driver.zeroed_memory(size.device, count * size.bytes));
  std::lock_guard lock(mutex_);
  for (std::size_t i = 1; i < count; ++i) free_[size].push_back(allocation + i * size.bytes);
  return allocation;
}

// The graph of a capture in progress still exists, so release() does not delete what is found here.
Counters::CaptureCounters& Counters::counters_of_capture(const Driver& driver, const Capture& capture) {
  {
    std::lock_guard lock(mutex_);
    if (auto found = captures_.find(capture.id); found != captures_.end()) return *found->second;
  }
  auto fresh = std::unique_ptr<CaptureCounters>(new CaptureCounters{*this, capture.id, {}});
  driver.retain_user_object(capture.graph, &release, fresh.get());
  std::lock_guard lock(mutex_);
  return *(captures_[capture.id] = fresh.release());
}

void Counters::release(void* capture_counters) {
  const std::unique_ptr<CaptureCounters> destroyed(static_cast<CaptureCounters*>(capture_counters));
  Counters& counters = destroyed->counters;
  std::lock_guard lock(counters.mutex_);
  for (const auto& [size, memory] : destroyed->in_use) counters.free_[size].push_back(memory);
  counters.captures_.erase(destroyed->id);
}
