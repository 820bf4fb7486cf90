// Compiles if every line of csrc/runtime/api.h is what the vendor's real header says. One vendor per compilation.
#ifdef CHECK_HIP
#define __HIP_PLATFORM_AMD__
#define __HIP_DISABLE_CPP_FUNCTIONS__  // its overloads: an address of hipMalloc would be ambiguous
#include <hip/hip_runtime_api.h>
#else
#define __CUDA_API_VERSION_INTERNAL  // declares older versions of a function too, which its library keeps
#include <cuda.h>
#endif

#include <cstdint>
#include <type_traits>

#include "api.h"

// Whether two types are passed the same way and mean the same: an enum is its integer, an opaque struct any struct.
template <class Ours, class Theirs>
constexpr bool kSame = [] {
  using A = std::remove_cv_t<Ours>;
  using B = std::remove_cv_t<Theirs>;
  if constexpr (std::is_pointer_v<A> && std::is_pointer_v<B>) {
    return kSame<std::remove_pointer_t<A>, std::remove_pointer_t<B>>;
  } else if constexpr ((std::is_integral_v<A> || std::is_enum_v<A>) && (std::is_integral_v<B> || std::is_enum_v<B>)) {
    return sizeof(A) == sizeof(B);
  } else {
    return std::is_same_v<A, B> || (std::is_class_v<A> && std::is_class_v<B>);
  }
}();
template <class Result, class... Ours, class Theirs, class... TheirArguments>
constexpr bool kSame<Result(Ours...), Theirs(TheirArguments...)> = [] {
  if constexpr (sizeof...(Ours) == sizeof...(TheirArguments))
    return (kSame<Result, Theirs> && ... && kSame<Ours, TheirArguments>);
  else return false;
}();

// The check itself can fail.
enum Enum : unsigned {};
struct Opaque;
static_assert(kSame<int(int*, Opaque**, const char*), Enum(Enum*, struct Another**, const char*)>);
static_assert(!kSame<int(int), int(long)> && !kSame<int(int), int(int*)> && !kSame<int(int), int(int, int)>);
static_assert(!kSame<int(int*), int(int**)> && !kSame<int(Opaque*), int(void*)> && !kSame<int(float), int(int)>);

namespace api {
#define CHECK(name, symbol, type) static_assert(kSame<type, decltype(symbol)>, #symbol);
#define CHECK_SHARED_HIP(name, hip, cuda, type) CHECK(name, hip, type)
#define CHECK_SHARED_CUDA(name, hip, cuda, type) CHECK(name, cuda, type)

#ifdef CHECK_HIP
API_SHARED(CHECK_SHARED_HIP)
API_OPTIONAL(CHECK_SHARED_HIP)
API_HIP(CHECK)
#else
API_SHARED(CHECK_SHARED_CUDA)
API_OPTIONAL(CHECK_SHARED_CUDA)
API_CUDA(CHECK)
#endif
}  // namespace api

// Some constants are pointers by cast, which no constant expression may hold: main compares them.
#define DIFFERS(name, constant, value) || (std::uintptr_t)(constant) != value
int main() {
#ifdef CHECK_HIP
  return false API_HIP_CONSTANTS(DIFFERS);
#else
  return false API_CUDA_CONSTANTS(DIFFERS);
#endif
}
