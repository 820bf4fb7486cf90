// Counters that the blocks of a launch share: memory that is zero before the launch, and that the launch leaves zero.
#pragma once

#include <compare>
#include <cstddef>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "driver.h"

// Launches on a stream run one after the other and share counters. A captured launch has counters of its own: a graph is replayed
// on any stream, concurrently with other graphs, and streams that joined its capture run concurrently. When the graph is destroyed,
// its counters are free for later captures.
class Counters {
 public:
  // For the next launch on `stream`. One thread at a time.
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
  static void release(void* capture_counters);  // the driver's callback, in which the driver must not be called

  std::map<std::pair<api::Stream, Size>, void*> stream_counters_;
  std::mutex mutex_;  // guards what follows; never held during a call of the driver, which may be waiting in release
  std::map<Size, std::vector<void*>> free_;
  std::map<unsigned long long, CaptureCounters*> captures_;  // by id
};
