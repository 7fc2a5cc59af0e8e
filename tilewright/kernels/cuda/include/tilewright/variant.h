// The interface of a kernel variant; generated sources include this before a table's own header.
//
// A variant is a class with three static functions. facts and workspace run on the host and need no GPU.
//
//   static tilewright::Facts facts();
//   static int64_t workspace(const tilewright::Problem&);  // bytes
//   static tilewright::ffi::Error run(cudaStream_t, const tilewright::Device&, const tilewright::Problem&,
//                                     const tilewright::Arguments&);
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace tilewright {

namespace ffi = xla::ffi;

// One int64_t for each field of the variant table; generated.
struct Problem;

// The device of the call. `capability` is 90 for 9.0; `shared_memory` is the most bytes of shared memory that a CTA may
// opt in to; `multiprocessors` is the number of SMs.
struct Device {
  int64_t capability = 0;
  int64_t shared_memory = 0;
  int64_t multiprocessors = 0;
  int ordinal = 0;
};

// What the compiled kernel needs: bytes of shared memory per CTA (static and dynamic), threads per CTA, and the
// alignment in elements that the variant's requirements ask of sizes.
struct Facts {
  int64_t shared_bytes = 0;
  int64_t threads = 0;
  int64_t alignment = 1;
};

// The arrays and attributes of one call. The workspace is the last XLA result, but not counted among the outputs that a
// variant addresses.
struct Arguments {
  ffi::RemainingArgs inputs;
  ffi::RemainingRets outputs;
  ffi::Dictionary attributes;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
};

#define TILEWRIGHT_RETURN_IF_ERROR(expression)                             \
  do {                                                                     \
    if (::xla::ffi::Error tilewright_error = (expression);                 \
        tilewright_error.failure()) {                                      \
      return tilewright_error;                                             \
    }                                                                      \
  } while (false)

// Success, or an internal error with the text of CUDA.
inline ffi::Error check(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return ffi::Error::Success();
  (void)cudaGetLastError();  // clear the error: a later cudaGetLastError would report it again
  return ffi::Error::Internal(std::string(what) + ": " + cudaGetErrorName(code) + ": " + cudaGetErrorString(code));
}

// Arrays. An empty or absent array has a null pointer, whatever address XLA passed.

inline std::optional<ffi::AnyBuffer> input_buffer(const Arguments& arguments, size_t index) {
  auto found = arguments.inputs.get<ffi::AnyBuffer>(index);
  if (!found.has_value()) return std::nullopt;
  return *found;
}

inline std::optional<ffi::AnyBuffer> output_buffer(const Arguments& arguments, size_t index) {
  auto found = arguments.outputs.get<ffi::AnyBuffer>(index);
  if (!found.has_value()) return std::nullopt;
  return **found;
}

inline ffi::Span<const int64_t> shape(const std::optional<ffi::AnyBuffer>& buffer) {
  return buffer ? buffer->dimensions() : ffi::Span<const int64_t>();
}

inline ffi::Span<const int64_t> input_shape(const Arguments& arguments, size_t index) {
  return shape(input_buffer(arguments, index));
}

inline ffi::Span<const int64_t> output_shape(const Arguments& arguments, size_t index) {
  return shape(output_buffer(arguments, index));
}

template <class T>
const T* input(const Arguments& arguments, size_t index) {
  auto buffer = input_buffer(arguments, index);
  if (!buffer || buffer->element_count() == 0) return nullptr;
  return static_cast<const T*>(buffer->untyped_data());
}

template <class T>
T* output(const Arguments& arguments, size_t index) {
  auto buffer = output_buffer(arguments, index);
  if (!buffer || buffer->element_count() == 0) return nullptr;
  return static_cast<T*>(buffer->untyped_data());
}

// Attributes: float, double, int32_t, int64_t, bool, std::string_view, ffi::Span<const int64_t>.

template <class T>
ffi::Error attribute(const Arguments& arguments, std::string_view name, T* value) {
  if (!arguments.attributes.contains(name)) {
    return ffi::Error::InvalidArgument("there is no attribute \"" + std::string(name) + "\"");
  }
  auto found = arguments.attributes.get<T>(name);
  if (!found.has_value()) {
    return ffi::Error::InvalidArgument("attribute \"" + std::string(name) + "\": " + found.error().message());
  }
  *value = *found;
  return ffi::Error::Success();
}

// Devices and launches.

inline constexpr int kMaxDevices = 64;

// Fills `device`. The attributes are queried once per device and cached, because they do not change.
inline ffi::Error describe_device(int ordinal, Device* device) {
  static std::array<std::atomic<int64_t>, 3 * kMaxDevices> known{};  // 0: not queried yet
  constexpr cudaDeviceAttr kAttributes[] = {cudaDevAttrComputeCapabilityMajor, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                            cudaDevAttrMultiProcessorCount};
  int64_t values[3];
  for (int i = 0; i < 3; ++i) {
    const bool kept = 0 <= ordinal && ordinal < kMaxDevices;
    if (kept && (values[i] = known[3 * ordinal + i].load(std::memory_order_relaxed)) != 0) continue;
    int value = 0;
    TILEWRIGHT_RETURN_IF_ERROR(
        check(cudaDeviceGetAttribute(&value, kAttributes[i], ordinal), "cudaDeviceGetAttribute"));
    if (i == 0) {
      int minor = 0;
      TILEWRIGHT_RETURN_IF_ERROR(check(
          cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal), "cudaDeviceGetAttribute"));
      value = 10 * value + minor;
    }
    values[i] = value;
    if (kept) known[3 * ordinal + i].store(value, std::memory_order_relaxed);
  }
  *device = Device{values[0], values[1], values[2], ordinal};
  return ffi::Error::Success();
}

// Makes a device the current one during the guard's lifetime.
class DeviceGuard {
 public:
  explicit DeviceGuard(int ordinal) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != ordinal) {
      error_ = cudaSetDevice(ordinal);
      changed_ = error_ == cudaSuccess;
    }
  }
  ~DeviceGuard() {
    if (changed_) (void)cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_ = cudaSuccess;
};

// Opts a kernel in to dynamic shared memory beyond the default limit of 48 KB, once per kernel and device.
template <auto kernel>
ffi::Error allow_shared_memory(int64_t bytes) {
  static std::array<std::atomic<int64_t>, kMaxDevices> allowed{};
  if (bytes <= 48 * 1024) return ffi::Error::Success();
  int ordinal = 0;
  TILEWRIGHT_RETURN_IF_ERROR(check(cudaGetDevice(&ordinal), "cudaGetDevice"));
  const bool kept = 0 <= ordinal && ordinal < kMaxDevices;
  if (kept && allowed[ordinal].load(std::memory_order_relaxed) >= bytes) return ffi::Error::Success();
  TILEWRIGHT_RETURN_IF_ERROR(check(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(bytes)),
      "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)"));
  if (kept) allowed[ordinal].store(bytes, std::memory_order_relaxed);
  return ffi::Error::Success();
}

// Launches `kernel` in thread block clusters. A cluster of one CTA is an ordinary launch, which needs no compute
// capability 9.0.
template <auto kernel, class... A>
ffi::Error launch_clusters(dim3 cluster, dim3 grid, dim3 block, int64_t shared_bytes, cudaStream_t stream,
                           const A&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return ffi::Error::Success();  // CUDA rejects an empty grid
  TILEWRIGHT_RETURN_IF_ERROR(allow_shared_memory<kernel>(shared_bytes));
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  if (cluster.x * cluster.y * cluster.z > 1) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster.x;
    attribute.val.clusterDim.y = cluster.y;
    attribute.val.clusterDim.z = cluster.z;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  return check(cudaLaunchKernelEx(&config, kernel, args...), "cudaLaunchKernelEx");
}

template <auto kernel, class... A>
ffi::Error launch(dim3 grid, dim3 block, int64_t shared_bytes, cudaStream_t stream, const A&... args) {
  return launch_clusters<kernel>(dim3(1, 1, 1), grid, block, shared_bytes, stream, args...);
}

// One variant in the table of a shared object; generated.
struct Entry {
  const char* name = nullptr;
  int64_t lowest_capability = 0;
  int64_t highest_capability = 0;                                               // exclusive
  const char* (*unmet)(const Problem&, const Device&, const Facts&) = nullptr;  // the first requirement that fails
  Facts (*facts)() = nullptr;
  int64_t (*workspace)(const Problem&) = nullptr;
  ffi::Error (*run)(cudaStream_t, const Device&, const Problem&, const Arguments&) = nullptr;
};

template <class Class>
constexpr Entry entry(const char* name, int64_t lowest, int64_t highest,
                      const char* (*unmet)(const Problem&, const Device&, const Facts&)) {
  return Entry{name, lowest, highest, unmet, &Class::facts, &Class::workspace, &Class::run};
}

}  // namespace tilewright
