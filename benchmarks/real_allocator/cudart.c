/* A CUDA runtime and driver without CUDA, for libc10_cuda.so of torch 2.13: addresses are handed out, bytes are counted.
   STUB_CAPACITY is what the device gives, STUB_TOTAL what it says it has. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static uint64_t next_address = 0x700000000000ull, in_use, last_error;
static uint64_t capacity(void) { return strtoull(getenv("STUB_CAPACITY"), 0, 10); }
static uint64_t total(void) { return strtoull(getenv("STUB_TOTAL"), 0, 10); }
#define REGIONS 65536
uint64_t stub_region[REGIONS], stub_size[REGIONS];
int stub_regions;
static uint64_t region(uint64_t size, uint64_t alignment) {
  uint64_t a = (next_address + alignment - 1) / alignment * alignment;
  next_address = a + size;
  stub_region[stub_regions] = a;
  stub_size[stub_regions++] = size;
  return a;
}
int cudaMalloc(void** p, size_t n) {
  if (in_use + n > capacity()) { last_error = 2; return 2; }
  in_use += n;
  *p = (void*)region(n, 2 << 20);
  return 0;
}
int cudaFree(void* p) {
  for (int i = 0; i < stub_regions; i++)
    if (stub_region[i] == (uint64_t)p) { in_use -= stub_size[i]; return 0; }
  abort();
}
int cudaMemGetInfo(size_t* f, size_t* t) { *t = total(); *f = capacity() - in_use; return 0; }
int cudaGetDevice(int* d) { *d = 0; return 0; }
int cudaGetDeviceCount(int* n) { *n = 1; return 0; }
int cudaGetLastError(void) { int e = last_error; last_error = 0; return e; }
int cudaGetDeviceProperties(char* p, int d) { *(uint64_t*)(p + 288) = total(); return 0; }
int cudaDriverGetVersion(int* v) { *v = 13000; return 0; }
const char* cudaGetErrorString(int e) { return "stub error"; }
const char* cudaGetErrorName(int e) { return "stub error"; }
int cudaStreamIsCapturing(void* s, int* status) { *status = 0; return 0; }
int cuMemAddressReserve(uint64_t* p, size_t n, size_t a, uint64_t at, uint64_t flags) { *p = region(n, 2 << 20); return 0; }
int cuMemCreate(uint64_t* h, size_t n, void* prop, uint64_t flags) {
  if (in_use + n > capacity()) return 2;
  in_use += n; *h = n; return 0;
}
int cuMemRelease(uint64_t h) { in_use -= h; return 0; }
int cuDeviceGetAttribute(int* v, int a, int d) { *v = 0; return 0; }
int cuGetErrorString(int e, const char** s) { *s = "stub error"; return 0; }
static int fine(void) { return 0; }
int cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned v, uint64_t flags, int* result) {
  *f = dlsym(RTLD_DEFAULT, name);
  if (!*f) *f = (void*)fine;
  *result = 0;
  return 0;
}

/* What the allocator may call, and need do nothing here. */
#define FINE(name) int name(void) { return 0; }
FINE(cudaDeviceCanAccessPeer)
FINE(cudaDeviceEnablePeerAccess)
FINE(cudaDeviceGetDefaultMemPool)
FINE(cudaDeviceGetStreamPriorityRange)
FINE(cudaDeviceSynchronize)
FINE(cudaEventCreateWithFlags)
FINE(cudaEventDestroy)
FINE(cudaEventElapsedTime)
FINE(cudaEventQuery)
FINE(cudaEventRecord)
FINE(cudaEventSynchronize)
FINE(cudaFreeAsync)
FINE(cudaGraphNodeGetDependencies)
FINE(cudaIpcCloseMemHandle)
FINE(cudaIpcGetMemHandle)
FINE(cudaIpcOpenMemHandle)
FINE(cudaMallocAsync)
FINE(cudaMemPoolGetAttribute)
FINE(cudaMemPoolSetAccess)
FINE(cudaMemPoolSetAttribute)
FINE(cudaMemPoolTrimTo)
FINE(cudaMemcpy)
FINE(cudaMemcpyAsync)
FINE(cudaMemcpyPeerAsync)
FINE(cudaSetDevice)
FINE(cudaStreamCreateWithPriority)
FINE(cudaStreamGetCaptureInfo)
FINE(cudaStreamQuery)
FINE(cudaStreamSynchronize)
FINE(cudaStreamWaitEvent)
FINE(cudaThreadExchangeStreamCaptureMode)
