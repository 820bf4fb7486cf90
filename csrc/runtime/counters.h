// Counters of launches: memory that is zero before a launch, and that the launch leaves zero.
#pragma once

#include <compare>
#include <cstddef>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "driver.h"

// Launches on a stream run one after the other and share theirs. A captured launch has its own: a graph is replayed on any
// stream, beside other graphs, and streams that joined its capture run beside each other. When the graph is gone, later
// captures get them.
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
  struct OfCapture {
    Counters& counters;
    unsigned long long id;
    std::vector<std::pair<Size, void*>> taken;
  };

  void* take(const Driver& driver, const Size& size);
  OfCapture& of_capture(const Driver& driver, const Capture& capture);
  static void give_back(void* of_capture);  // called by the driver, which must not be called then

  std::map<std::pair<api::Stream, Size>, void*> of_streams_;
  std::mutex mutex_;  // of what follows; never held while the driver is called, as it may be waiting in give_back
  std::map<Size, std::vector<void*>> free_;
  std::map<unsigned long long, OfCapture*> captures_;  // by id
};
