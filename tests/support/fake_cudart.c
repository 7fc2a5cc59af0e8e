/* A stand-in for the CUDA runtime with three devices: it logs what it is asked to do and does nothing.

   Device 0 is an H100. Device 1 has less shared memory. A launch on it fails if FAKE_CUDA_FAIL is set. Device 2 is of
   compute capability 7.0. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Error;
typedef struct { unsigned x, y, z; } Dim3;
typedef struct { Dim3 grid, block; size_t shared; void* stream; void* attributes; unsigned count; } LaunchConfig;

static int current = 0;
static struct { const void* handle; const char* name; } kernels[64];
static int kernel_count = 0;

static const char* name_of(const void* handle) {
  for (int i = 0; i < kernel_count; ++i) {
    if (kernels[i].handle == handle) return strstr(kernels[i].name, "to_workspace") ? "to_workspace" : "from_workspace";
  }
  return "?";
}

void** __cudaRegisterFatBinary(void* binary) { return (void**)binary; }
void __cudaRegisterFatBinaryEnd(void** handle) { (void)handle; }
void __cudaUnregisterFatBinary(void** handle) { (void)handle; }
void __cudaInitModule(void** handle) { (void)handle; }
void __cudaRegisterFunction(void** binary, const char* host, char* device, const char* name, int limit, void* tid,
                            void* bid, void* block, void* grid, int* warp) {
  (void)binary, (void)device, (void)limit, (void)tid, (void)bid, (void)block, (void)grid, (void)warp;
  kernels[kernel_count].handle = host;
  kernels[kernel_count++].name = name;
}

Error cudaGetDevice(int* device) { *device = current; return 0; }
Error cudaSetDevice(int device) {
  printf("set_device %d\n", device);
  if (device > 2) return 101;
  current = device;
  return 0;
}
Error cudaDeviceGetAttribute(int* value, int attribute, int device) {
  printf("get_attribute %d of device %d\n", attribute, device);
  switch (attribute) {
    case 75: *value = device == 2 ? 7 : 9; return 0;
    case 76: *value = 0; return 0;
    case 97: *value = device == 0 ? 232448 : 64 * 1024 - 1; return 0;
    case 16: *value = 132; return 0;
  }
  return 1;
}
Error cudaFuncSetAttribute(const void* kernel, int attribute, int value) {
  printf("allow %s %d bytes on device %d\n", name_of(kernel), value, current);
  return attribute == 8 && value <= 232448 ? 0 : 1;
}
Error cudaLaunchKernelExC(const LaunchConfig* config, const void* kernel, void** arguments) {
  (void)arguments;
  printf("launch %s grid %u block %u shared %zu stream %ld on device %d\n", name_of(kernel), config->grid.x,
         config->block.x, config->shared, (long)(intptr_t)config->stream, current);
  return current == 1 && getenv("FAKE_CUDA_FAIL") ? 700 : 0;
}
/* What the stubs of kernels refer to; nothing calls them. */
Error cudaLaunchKernel(const void* kernel, Dim3 grid, Dim3 block, void** arguments, size_t shared, void* stream) {
  (void)kernel, (void)grid, (void)block, (void)arguments, (void)shared, (void)stream;
  return 1;
}
Error __cudaLaunchKernel(void* kernel, Dim3 grid, Dim3 block, void** arguments, size_t shared, void* stream) {
  (void)kernel, (void)grid, (void)block, (void)arguments, (void)shared, (void)stream;
  return 1;
}
Error __cudaGetKernel(void** kernel, const void* handle) { (void)kernel, (void)handle; return 1; }
unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void* stream) {
  (void)grid, (void)block, (void)shared, (void)stream;
  return 1;
}
Error __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared, void* stream) {
  (void)grid, (void)block, (void)shared, (void)stream;
  return 1;
}
Error cudaGetLastError(void) { return 0; }
const char* cudaGetErrorName(Error error) { return error == 700 ? "cudaErrorIllegalAddress" : "cudaErrorOther"; }
const char* cudaGetErrorString(Error error) {
  static char text[32];
  sprintf(text, "error %d", error);
  return text;
}
