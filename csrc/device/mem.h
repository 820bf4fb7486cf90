// HBM loads and stores.
#pragma once
#include "types.h"

namespace mem {

// HBM pointers carry their address space, so accesses are global_load / global_store, never flat.
template <class T>
using Global = __attribute__((address_space(1))) T;

template <class T>
DEVICE const Global<T>* global(const T* pointer) {
  return (const Global<T>*)pointer;
}
template <class T>
DEVICE Global<T>* global(T* pointer) {
  return (Global<T>*)pointer;
}

// One access of sizeof(T) bytes (1..16), aligned to sizeof(T).
template <class T>
DEVICE T load(const void* address) {
  return *global((const T*)address);
}
// Non-temporal load: data that is read once should not evict data that is read again.
template <class T>
DEVICE T load_once(const void* address) {
  return __builtin_nontemporal_load(global((const T*)address));
}
template <class T>
DEVICE void store(void* address, T value) {
  *global((T*)address) = value;
}

}  // namespace mem
