/* A libamdhip64 with two devices that launches nothing: it remembers what it was asked, and fails where its name says.
 */
#include <string.h>

#include "fake_graphs.h"

enum { kSuccess = 0, kInvalidValue = 1, kNoDevice = 100, kInvalidDevice = 101, kInvalidImage = 200, kNotFound = 500 };

int fake_devices = 2;
int fake_device = 0;       /* the current one */
int fake_loads = 0;        /* modules loaded */
int fake_load_device = -1; /* the device that was current at the last load */
int fake_load_capture_mode = -1;
int fake_capture_mode = 0; /* global, as threads start */
int fake_last_error = 0;
static const char* last_image; /* HIP's modules point into what they were loaded from */
struct {
  void* function;
  unsigned geometry[7];
  void* stream;
  void* parameters;
  unsigned long long bytes;
  unsigned char arguments[256];
  void* end;
} fake_launch;

static int result(int code) {
  if (code) fake_last_error = code;
  return code;
}

int hipInit(unsigned flags) { return result(flags ? kInvalidValue : fake_devices ? kSuccess : kNoDevice); }
int hipGetDeviceCount(int* count) { return *count = fake_devices, kSuccess; }
int hipDriverGetVersion(int* version) { return *version = 70151831, kSuccess; }
int hipRuntimeGetVersion(int* version) { return *version = 60443484, kSuccess; }
int hipGetDevice(int* device) { return *device = fake_device, kSuccess; }
int hipSetDevice(int device) {
  if (device < 0 || device >= fake_devices) return result(kInvalidDevice);
  return fake_device = device, kSuccess;
}
static const struct {
  int code;
  const char *name, *text;
} kErrors[] = {{kInvalidValue, "hipErrorInvalidValue", "invalid argument"},
               {kNoDevice, "hipErrorNoDevice", "no ROCm-capable device is detected"},
               {kInvalidDevice, "hipErrorInvalidDevice", "invalid device ordinal"},
               {kInvalidImage, "hipErrorInvalidImage", "device kernel image is invalid"},
               {kNotFound, "hipErrorNotFound", "named symbol not found"}};
static const int kErrorCount = sizeof kErrors / sizeof *kErrors;
const char* hipGetErrorName(int code) {
  for (int i = 0; i < kErrorCount; ++i)
    if (kErrors[i].code == code) return kErrors[i].name;
  return "hipErrorUnknown";
}
const char* hipGetErrorString(int code) {
  for (int i = 0; i < kErrorCount; ++i)
    if (kErrors[i].code == code) return kErrors[i].text;
  return "unknown error";
}
int hipGetLastError(void) {
  int last = fake_last_error;
  return fake_last_error = 0, last;
}
int hipThreadExchangeStreamCaptureMode(int* mode) {
  int before = fake_capture_mode;
  fake_capture_mode = *mode;
  return *mode = before, kSuccess;
}

int hipModuleLoadDataEx(void** module, const char* image, unsigned options, int* names, void** values) {
  (void)names, (void)values;
  if (options || strncmp(image, "\177ELF", 4)) return result(kInvalidImage);
  fake_load_device = fake_device, fake_load_capture_mode = fake_capture_mode;
  last_image = image;
  *module = (void*)(long)(1000 + ++fake_loads);
  return kSuccess;
}
int hipModuleGetFunction(void** function, void* module, const char* symbol) {
  if (!strcmp(symbol, "missing")) return result(kNotFound);
  *function = (void*)((long)module * 1000 + (long)strlen(symbol));
  return kSuccess;
}

_Alignas(256) unsigned char fake_memory[1 << 20]; /* of which allocations get one part after the other */
int fake_allocated = 0;                           /* bytes */
int fake_memory_capture_mode = -1, fake_streams = 0, fake_zeroed = 0, fake_waited = 0;
int fake_gone_at_malloc = 0; /* the graph of a capture that happens to be gone while memory is allocated */
int hipMalloc(void** memory, unsigned long bytes) {
  if (bytes > sizeof fake_memory - fake_allocated) return result(kInvalidValue);
  if (fake_gone_at_malloc) fake_release(fake_gone_at_malloc);
  *memory = memset(fake_memory + fake_allocated, 0xff, bytes);
  fake_memory_capture_mode = fake_capture_mode;
  return fake_allocated += (int)bytes, kSuccess;
}
struct handle {
  char bytes[64];
};
int fake_opened = 0, fake_freed = 0, fake_uncached = 0; /* how many */
int hipExtMallocWithFlags(void** memory, unsigned long bytes, unsigned flags) {
  return flags == 3 ? ++fake_uncached, hipMalloc(memory, bytes) : result(kInvalidValue);
}
int hipFree(void* memory) { return result(memory ? (++fake_freed, kSuccess) : kInvalidValue); }
int hipIpcGetMemHandle(struct handle* handle, void* memory) {
  memset(handle, 0, sizeof *handle);
  return memcpy(handle, &memory, sizeof memory), kSuccess;
}
int hipIpcOpenMemHandle(void** memory, struct handle handle, unsigned flags) {
  return flags == 1 ? ++fake_opened, memcpy(memory, &handle, sizeof *memory), kSuccess : result(kInvalidValue);
}
int hipIpcCloseMemHandle(void* memory) { return result(memory ? (--fake_opened, kSuccess) : kInvalidValue); }
int hipStreamCreateWithFlags(void** stream, unsigned flags) {
  if (flags != 1) return result(kInvalidValue);
  return ++fake_streams, *stream = (void*)77, kSuccess;
}
int hipMemsetAsync(void* memory, int value, unsigned long bytes, void* stream) {
  if (stream != (void*)77) return result(kInvalidValue);
  return memset(memory, value, bytes), fake_zeroed = (int)bytes, kSuccess;
}
int hipStreamSynchronize(void* stream) { return fake_waited += stream == (void*)77, kSuccess; }
int hipStreamDestroy(void* stream) { return fake_streams -= stream == (void*)77, kSuccess; }

int hipStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id, void** graph, const void** nodes,
                               unsigned long* count) {
  return result(nodes || count ? kInvalidValue : get_capture_info(stream, status, id, graph));
}
#ifndef FAKE_OLD
int hipUserObjectCreate(void** object, void* data, void (*destroy)(void*), unsigned references, unsigned flags) {
  return result(create_user_object(object, data, destroy, references, flags));
}
int hipGraphRetainUserObject(void* graph, void* object, unsigned references, unsigned flags) {
  return result(retain_user_object(graph, object, references, flags));
}
#endif

int hipModuleLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned lds, void* stream, void** parameters, void** extra) {
  unsigned geometry[7] = {gx, gy, gz, bx, by, bz, lds};
  if (strncmp(last_image, "\177ELF", 4)) return result(kInvalidImage);
  if (!gx || extra[0] != (void*)1 || extra[2] != (void*)2) return result(kInvalidValue);
  fake_launch.function = function, fake_launch.stream = stream, fake_launch.parameters = parameters;
  memcpy(fake_launch.geometry, geometry, sizeof geometry);
  fake_launch.bytes = *(unsigned long long*)extra[3], fake_launch.end = extra[4];
  memcpy(fake_launch.arguments, extra[1], fake_launch.bytes);
  return kSuccess;
}
