/* A libcuda with one device that launches nothing. Contexts belong to threads, as CUDA's do. */
#include <string.h>

#include "fake_graphs.h"

enum { kSuccess = 0, kInvalidValue = 1, kInvalidContext = 201, kInvalidPtx = 218, kNotFound = 500 };
enum { kErrorLog = 5, kErrorLogBytes = 6, kMaxDynamicLds = 8, kDefaultLds = 48 * 1024 };

static int primary;
static __thread void* context;
void* fake_load_context = 0;
int fake_lds_allowed = kDefaultLds;
int fake_attribute_calls = 0;
int fake_launches = 0;
unsigned long long fake_bytes = 0;

int cuInit(unsigned flags) { return flags ? kInvalidValue : kSuccess; }
int cuDeviceGetCount(int* count) { return *count = 1, kSuccess; }
int cuDriverGetVersion(int* version) { return *version = 13010, kSuccess; }
int cuDevicePrimaryCtxRetain(void** result, int device) {
  return *result = &primary, device ? kInvalidValue : kSuccess;
}
int cuCtxGetCurrent(void** result) { return *result = context, kSuccess; }
int cuCtxSetCurrent(void* value) { return context = value, kSuccess; }
int cuThreadExchangeStreamCaptureMode(int* mode) { return *mode = 0, kSuccess; }
int cuGetErrorName(int code, const char** text) {
  return *text = code == kInvalidPtx ? "CUDA_ERROR_INVALID_PTX" : "CUDA_ERROR_OTHER", kSuccess;
}
int cuGetErrorString(int code, const char** text) {
  return *text = code == kInvalidPtx ? "a PTX JIT compilation failed" : "other", kSuccess;
}

int cuModuleLoadDataEx(void** module, const char* image, unsigned count, int* options, void** values) {
  if (!context) return kInvalidContext;
  if (!strncmp(image, ".version", 8)) return fake_load_context = context, *module = &primary, kSuccess;
  if (count == 2 && options[0] == kErrorLog && options[1] == kErrorLogBytes && (unsigned long)values[1] > 20)
    strcpy(values[0], "ptxas: line 1");
  return kInvalidPtx;
}
int cuModuleGetFunction(void** function, void* module, const char* symbol) {
  return *function = module, strcmp(symbol, "missing") ? kSuccess : kNotFound;
}
static _Alignas(256) unsigned char memory[1 << 20];
int fake_allocated = 0;
int cuMemAlloc_v2(unsigned long long* address, unsigned long bytes) {
  if (bytes > sizeof memory - fake_allocated) return kInvalidValue;
  *address = (unsigned long long)memset(memory + fake_allocated, 0xff, bytes);
  return fake_allocated += (int)bytes, kSuccess;
}
struct handle {
  char bytes[64];
};
int fake_opened = 0, fake_freed = 0; /* how many */
int cuMemFree_v2(unsigned long long address) { return address ? (++fake_freed, kSuccess) : kInvalidValue; }
int cuIpcGetMemHandle(struct handle* handle, unsigned long long address) {
  memset(handle, 0, sizeof *handle);
  return memcpy(handle, &address, sizeof address), kSuccess;
}
int cuIpcOpenMemHandle_v2(unsigned long long* address, struct handle handle, unsigned flags) {
  return flags == 1 ? ++fake_opened, memcpy(address, &handle, sizeof *address), kSuccess : kInvalidValue;
}
int cuIpcCloseMemHandle(unsigned long long address) { return address ? (--fake_opened, kSuccess) : kInvalidValue; }
int cuStreamCreate(void** stream, unsigned flags) { return *stream = (void*)77, flags == 1 ? kSuccess : kInvalidValue; }
int cuMemsetD8Async(unsigned long long address, unsigned char value, unsigned long bytes, void* stream) {
  (void)stream;
  for (unsigned long i = 0; i < bytes; ++i) ((unsigned char*)address)[i] = value;
  return kSuccess;
}
int cuStreamSynchronize(void* stream) { return (void)stream, kSuccess; }
int cuStreamDestroy_v2(void* stream) { return (void)stream, kSuccess; }
int cuStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id, void** graph, const void** nodes,
                              unsigned long* count) {
  if (!context) return kInvalidContext;
  return nodes || count ? kInvalidValue : get_capture_info(stream, status, id, graph);
}
int cuUserObjectCreate(void** object, void* data, void (*destroy)(void*), unsigned references, unsigned flags) {
  return create_user_object(object, data, destroy, references, flags);
}
int cuGraphRetainUserObject(void* graph, void* object, unsigned references, unsigned flags) {
  return retain_user_object(graph, object, references, flags);
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  ++fake_attribute_calls;
  if (!function || attribute != kMaxDynamicLds || value > 227 * 1024) return kInvalidValue;
  return fake_lds_allowed = value, kSuccess;
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned lds, void* stream, void** parameters, void** extra) {
  (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)stream;
  if (!context) return kInvalidContext;
  if (!function || !gx || (int)lds > fake_lds_allowed || parameters) return kInvalidValue;
  if (extra[0] != (void*)1 || extra[2] != (void*)2 || extra[4] != 0) return kInvalidValue;
  fake_bytes = *(unsigned long long*)extra[3];
  return ++fake_launches, kSuccess;
}
