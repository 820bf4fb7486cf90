// Counters shared by a launch's blocks: memory that is zero before the launch, and zero again after it.
#pragma once

#include <compare>
#include <cstddef>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "driver.h"

// Launches on a stream run one after the other and share counters. A captured launch has its own counters: a graph is
// replayed on any stream, concurrently with other graphs, and streams that joined its capture run concurrently. When
// the graph is destroyed, its counters are free for later captures.
class Counters {
 public:
  // Returns counters for the next launch on `stream`. Not thread-safe.
  void* get(const Driver& driver, int device, api::Stream stream, std::size_t bytes);

 private:
  struct Size {
    int device;
    std::size_t bytes;
    auto operator<=>(const Size&) const = default;
  };
  struct CaptureCounters {
    Counters& counters;
    unsigned long long id;
    std::vector<std::pair<Size, void*>> in_use;
  };

  void* take(const Driver& driver, const Size& size);
  CaptureCounters& counters_of_capture(const Driver& driver, const Capture& capture);
  static void release(void* capture_counters);  // driver callback, which must not call the driver

  std::map<std::pair<api::Stream, Size>, void*> stream_counters_;
  std::mutex mutex_;  // guards the members below; never held during a driver call, which may be waiting in release
  std::map<Size, std::vector<void*>> free_;
  std::map<unsigned long long, CaptureCounters*> captures_;  // by id
};
