// Declared in counters.h.
#include "counters.h"

#include <algorithm>
#include <memory>

namespace {

constexpr std::size_t kLine = 128;        // of the caches: launches that run at once share none
constexpr std::size_t kSlab = 64 * 1024;  // bytes asked of the driver at a time

}  // namespace

void* Counters::get(const Driver& driver, int device, api::Stream stream, std::size_t bytes) {
  const Size size{device, (bytes + kLine - 1) / kLine * kLine};
  const Capture capture = driver.capture_of(stream, device);
  if (capture.graph == nullptr) {
    void*& memory = of_streams_[{stream, size}];
    if (memory == nullptr) memory = take(driver, size);
    return memory;
  }
  if (!driver.knows_when_gone()) return take(driver, size);
  OfCapture& of = of_capture(driver, capture);
  void* memory = take(driver, size);
  std::lock_guard lock(mutex_);
  of.taken.emplace_back(size, memory);
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
  const std::size_t count = std::max<std::size_t>(kSlab / size.bytes, 1);
  char* slab = static_cast<char*>(driver.zeroed_memory(size.device, count * size.bytes));
  std::lock_guard lock(mutex_);
  for (std::size_t i = 1; i < count; ++i) free_[size].push_back(slab + i * size.bytes);
  return slab;
}

// The graph of a capture that goes on is not gone, so what is found stays.
Counters::OfCapture& Counters::of_capture(const Driver& driver, const Capture& capture) {
  {
    std::lock_guard lock(mutex_);
    if (auto found = captures_.find(capture.id); found != captures_.end()) return *found->second;
  }
  auto fresh = std::unique_ptr<OfCapture>(new OfCapture{*this, capture.id, {}});
  driver.call_when_gone(capture.graph, &give_back, fresh.get());
  std::lock_guard lock(mutex_);
  return *(captures_[capture.id] = fresh.release());
}

void Counters::give_back(void* of_capture) {
  const std::unique_ptr<OfCapture> gone(static_cast<OfCapture*>(of_capture));
  Counters& counters = gone->counters;
  std::lock_guard lock(counters.mutex_);
  for (const auto& [size, memory] : gone->taken) counters.free_[size].push_back(memory);
  counters.captures_.erase(gone->id);
}
