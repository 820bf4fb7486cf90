// Declarations of the HIP and CUDA driver functions that load code objects and launch kernels. The build needs no
// vendor headers. tests/core/test_runtime.py checks every line against the vendor headers.
#pragma once

#include <cstddef>
#include <type_traits>

namespace api {

using Result = int;  // hipError_t, CUresult: int-sized enums; 0 is success
using Module = struct ModuleObject*;
using Function = struct FunctionObject*;
using Stream = struct StreamObject*;
using Context = struct ContextObject*;  // CUDA only; HIP has a current device
using Graph = struct GraphObject*;
using Node = struct NodeObject*;
using UserObject = struct UserObjectObject*;  // calls back when the graphs that retain it are destroyed
struct MemoryHandle {                         // for memory that another process opens
  char bytes[64];
};

// X(name here, HIP function, CUDA function, type): functions with the same meaning in both APIs.
#define API_SHARED(X)                                                                                                \
  X(init, hipInit, cuInit, Result(unsigned flags))                                                                   \
  X(count_devices, hipGetDeviceCount, cuDeviceGetCount, Result(int* count))                                          \
  X(driver_version, hipDriverGetVersion, cuDriverGetVersion, Result(int* version))                                   \
  X(load_module, hipModuleLoadDataEx, cuModuleLoadDataEx,                                                            \
    Result(Module*, const void* image, unsigned option_count, int* options, void** option_values))                   \
  X(get_function, hipModuleGetFunction, cuModuleGetFunction, Result(Function*, Module, const char* symbol))          \
  X(launch_kernel, hipModuleLaunchKernel, cuLaunchKernel,                                                            \
    Result(Function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,          \
           unsigned block_z, unsigned lds, Stream, void** arguments, void** extra))                                  \
  X(exchange_capture_mode, hipThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, Result(int* mode)) \
  X(create_stream, hipStreamCreateWithFlags, cuStreamCreate, Result(Stream*, unsigned flags))                        \
  X(wait_for_stream, hipStreamSynchronize, cuStreamSynchronize, Result(Stream))                                      \
  X(destroy_stream, hipStreamDestroy, cuStreamDestroy_v2, Result(Stream))                                            \
  X(get_capture_info, hipStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v2,                                         \
    Result(Stream, int* status, unsigned long long* id, Graph*, const Node** dependencies, std::size_t* count))

// Like API_SHARED, for functions missing before HIP 5.3 and CUDA 11.3.
#define API_OPTIONAL(X)                                                                                \
  X(create_user_object, hipUserObjectCreate, cuUserObjectCreate,                                       \
    Result(UserObject*, void* data, void (*destroy)(void* data), unsigned references, unsigned flags)) \
  X(retain_user_object, hipGraphRetainUserObject, cuGraphRetainUserObject,                             \
    Result(Graph, UserObject, unsigned references, unsigned flags))

// X(name here, vendor function, type): functions that differ between the APIs.
#define API_HIP(X)                                                                                  \
  X(get_device, hipGetDevice, Result(int* device))                                                  \
  X(set_device, hipSetDevice, Result(int device))                                                   \
  X(runtime_version, hipRuntimeGetVersion, Result(int* version))                                    \
  X(error_name, hipGetErrorName, const char*(Result))                                               \
  X(error_string, hipGetErrorString, const char*(Result))                                           \
  X(clear_error, hipGetLastError, Result())                                                         \
  X(allocate, hipMalloc, Result(void** memory, std::size_t))                                        \
  X(allocate_with_flags, hipExtMallocWithFlags, Result(void** memory, std::size_t, unsigned flags)) \
  X(free, hipFree, Result(void*))                                                                   \
  X(get_handle, hipIpcGetMemHandle, Result(MemoryHandle*, void*))                                   \
  X(open_handle, hipIpcOpenMemHandle, Result(void** memory, MemoryHandle, unsigned flags))          \
  X(close_handle, hipIpcCloseMemHandle, Result(void*))                                              \
  X(set_bytes, hipMemsetAsync, Result(void*, int value, std::size_t, Stream))

#define API_CUDA(X)                                                                                       \
  X(error_name, cuGetErrorName, Result(Result, const char** text))                                        \
  X(error_string, cuGetErrorString, Result(Result, const char** text))                                    \
  X(retain_primary_context, cuDevicePrimaryCtxRetain, Result(Context*, int device))                       \
  X(get_context, cuCtxGetCurrent, Result(Context*))                                                       \
  X(set_context, cuCtxSetCurrent, Result(Context))                                                        \
  X(set_attribute, cuFuncSetAttribute, Result(Function, int attribute, int value))                        \
  X(allocate, cuMemAlloc_v2, Result(unsigned long long* memory, std::size_t))                             \
  X(free, cuMemFree_v2, Result(unsigned long long))                                                       \
  X(get_handle, cuIpcGetMemHandle, Result(MemoryHandle*, unsigned long long))                             \
  X(open_handle, cuIpcOpenMemHandle_v2, Result(unsigned long long* memory, MemoryHandle, unsigned flags)) \
  X(close_handle, cuIpcCloseMemHandle, Result(unsigned long long))                                        \
  X(set_bytes, cuMemsetD8Async, Result(unsigned long long, unsigned char value, std::size_t, Stream))

// A table of function pointers for each list.
#define API_SHARED_MEMBER(name, hip, cuda, type) std::add_pointer_t<type> name;
#define API_MEMBER(name, symbol, type) std::add_pointer_t<type> name;
struct Shared {
  API_SHARED(API_SHARED_MEMBER)
  API_OPTIONAL(API_SHARED_MEMBER)
};
struct Hip {
  API_HIP(API_MEMBER)
};
struct Cuda {
  API_CUDA(API_MEMBER)
};

// X(name here, vendor constant, value)
#define API_HIP_CONSTANTS(X)                                \
  X(kHipArguments, HIP_LAUNCH_PARAM_BUFFER_POINTER, 1)      \
  X(kHipArgumentsSize, HIP_LAUNCH_PARAM_BUFFER_SIZE, 2)     \
  X(kHipArgumentsEnd, HIP_LAUNCH_PARAM_END, 3)              \
  X(kHipCaptureRelaxed, hipStreamCaptureModeRelaxed, 2)     \
  X(kHipCaptureActive, hipStreamCaptureStatusActive, 1)     \
  X(kHipNoDestructorSync, hipUserObjectNoDestructorSync, 1) \
  X(kHipMoveReferences, hipGraphUserObjectMove, 1)          \
  X(kHipNonBlocking, hipStreamNonBlocking, 1)               \
  X(kHipUncached, hipDeviceMallocUncached, 3)               \
  X(kHipPeerAccess, hipIpcMemLazyEnablePeerAccess, 1)

#define API_CUDA_CONSTANTS(X)                                            \
  X(kCudaArguments, CU_LAUNCH_PARAM_BUFFER_POINTER, 1)                   \
  X(kCudaArgumentsSize, CU_LAUNCH_PARAM_BUFFER_SIZE, 2)                  \
  X(kCudaArgumentsEnd, CU_LAUNCH_PARAM_END, 0)                           \
  X(kCudaCaptureRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED, 2)              \
  X(kCudaCaptureActive, CU_STREAM_CAPTURE_STATUS_ACTIVE, 1)              \
  X(kCudaNoDestructorSync, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, 1)         \
  X(kCudaMoveReferences, CU_GRAPH_USER_OBJECT_MOVE, 1)                   \
  X(kCudaNonBlocking, CU_STREAM_NON_BLOCKING, 1)                         \
  X(kCudaPeerAccess, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, 1)              \
  X(kCudaErrorLog, CU_JIT_ERROR_LOG_BUFFER, 5)                           \
  X(kCudaErrorLogBytes, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, 6)           \
  X(kCudaDynamicLds, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 8) \
  X(kCudaInvalidContext, CUDA_ERROR_INVALID_CONTEXT, 201)

#define API_CONSTANT(name, vendor, value) constexpr int name = value;
API_HIP_CONSTANTS(API_CONSTANT)
API_CUDA_CONSTANTS(API_CONSTANT)
static_assert(kHipArguments == kCudaArguments && kHipArgumentsSize == kCudaArgumentsSize &&
              kHipCaptureRelaxed == kCudaCaptureRelaxed && kHipNonBlocking == kCudaNonBlocking &&
              kHipCaptureActive == kCudaCaptureActive && kHipNoDestructorSync == kCudaNoDestructorSync &&
              kHipMoveReferences == kCudaMoveReferences && kHipPeerAccess == kCudaPeerAccess);

}  // namespace api
