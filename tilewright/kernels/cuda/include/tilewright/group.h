// The C interface of a group's shared object. Generated sources include this last, after they define `kEntries`, the
// table of variants, whose last row is a terminator without a name.
#pragma once

#include <exception>
#include <string>

#include "tilewright/variant.h"

#define TILEWRIGHT_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t kEntryCount = static_cast<int64_t>(sizeof(kEntries) / sizeof(kEntries[0])) - 1;

const tilewright::Entry* find_entry(std::string_view name) {
  for (int64_t i = 0; i < kEntryCount; ++i) {
    if (name == kEntries[i].name) return &kEntries[i];
  }
  return nullptr;
}

xla::ffi::Error refuse(const std::string& what) { return xla::ffi::Error::InvalidArgument("tilewright: " + what); }

// Repeats the checks that Python made: the program may have been lowered elsewhere, for another device.
xla::ffi::Error check_call(const tilewright::Entry& entry, const tilewright::Problem& problem,
                           const tilewright::Device& device) {
  if (device.capability < entry.lowest_capability || device.capability >= entry.highest_capability) {
    return refuse(std::string(entry.name) + " is not for compute capability " + std::to_string(device.capability / 10) +
                  "." + std::to_string(device.capability % 10));
  }
  if (const char* unmet = entry.unmet(problem, device, entry.facts())) {
    return refuse(std::string(entry.name) + ": " + unmet + " (" + problem.describe() + ")");
  }
  return xla::ffi::Error::Success();
}

xla::ffi::Error call_variant(cudaStream_t stream, int32_t ordinal, xla::ffi::RemainingArgs inputs,
                             xla::ffi::RemainingRets outputs, xla::ffi::Dictionary attributes) {
  tilewright::Arguments arguments{inputs, outputs, attributes};
  std::string_view name;
  TILEWRIGHT_RETURN_IF_ERROR(tilewright::attribute(arguments, "variant", &name));
  const tilewright::Entry* entry = find_entry(name);
  if (entry == nullptr) return refuse("there is no variant \"" + std::string(name) + "\" in this group");

  xla::ffi::Span<const int64_t> fields;
  TILEWRIGHT_RETURN_IF_ERROR(tilewright::attribute(arguments, "problem", &fields));
  if (fields.size() != tilewright::Problem::kFieldCount) {
    return refuse("a problem has " + std::to_string(tilewright::Problem::kFieldCount) + " fields, not " +
                  std::to_string(fields.size()));
  }
  const tilewright::Problem problem = tilewright::Problem::unpack(fields.begin());

  // XLA runs the devices of a process from several threads and does not promise which device is current.
  tilewright::DeviceGuard guard(ordinal);
  TILEWRIGHT_RETURN_IF_ERROR(tilewright::check(guard.error(), "cudaSetDevice"));
  tilewright::Device device;
  TILEWRIGHT_RETURN_IF_ERROR(tilewright::describe_device(ordinal, &device));
  TILEWRIGHT_RETURN_IF_ERROR(check_call(*entry, problem, device));

  // The last XLA result is the workspace of the call.
  const int64_t needed = entry->workspace(problem);
  auto workspace = outputs.size() == 0 ? std::nullopt : tilewright::output_buffer(arguments, outputs.size() - 1);
  if (!workspace || static_cast<int64_t>(workspace->size_bytes()) < needed) {
    return refuse(std::string(entry->name) + " needs a workspace of " + std::to_string(needed) +
                  " bytes as its last result");
  }
  arguments.workspace = needed > 0 ? workspace->untyped_data() : nullptr;
  arguments.workspace_bytes = needed;
  try {
    return entry->run(stream, device, problem, arguments);
  } catch (const std::exception& error) {
    return xla::ffi::Error::Internal(std::string("tilewright: ") + entry->name + ": " + error.what());
  }
}

}  // namespace

TILEWRIGHT_EXPORT int64_t tilewright_abi() { return 1; }

TILEWRIGHT_EXPORT int64_t tilewright_variant_count() { return kEntryCount; }

TILEWRIGHT_EXPORT const char* tilewright_variant_name(int64_t index) {
  return 0 <= index && index < kEntryCount ? kEntries[index].name : nullptr;
}

// out: shared memory in bytes, threads, alignment in elements.
TILEWRIGHT_EXPORT void tilewright_facts(int64_t index, int64_t* out) {
  const tilewright::Facts facts = kEntries[index].facts();
  out[0] = facts.shared_bytes;
  out[1] = facts.threads;
  out[2] = facts.alignment;
}

// Bytes of the workspace; `problem` has Problem::kFieldCount fields.
TILEWRIGHT_EXPORT int64_t tilewright_workspace(int64_t index, const int64_t* problem) {
  return kEntries[index].workspace(tilewright::Problem::unpack(problem));
}

// Declared here with its visibility, because the macro below sets none.
TILEWRIGHT_EXPORT XLA_FFI_Error* tilewright_call(XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(tilewright_call, call_variant,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
