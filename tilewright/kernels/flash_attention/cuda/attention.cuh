// Shared by every attention kernel here: the arguments of a call, visibility of keys, the logit (scale, bias, soft
// cap), dropout, delta, and the gradient of the bias.
//
//   logit[q, k]  soft_cap(scale * Q K^T + bias), kept in units of log 2 (times log2(e)) for exp2
//   visible      lowest <= position(k) - position(q) <= highest, equal segments, and the mask array is true there
//   group        query heads per KV head
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <utility>

#include "tilewright/variant.h"

namespace tilewright::attention {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLowestLse = -16777216.0f;  // LOWEST_LSE in results.py, below which a row has no gradient
constexpr float kHidingBias = -1.7014117331926443e38f;  // HIDING_BIAS in results.py, at or below which a bias masks
constexpr float kLn2 = 0.6931471805599453f;
constexpr int kRangeQueries = 64;  // queries (or keys) that one entry of Ranges covers

// An array [batch, head, row, column] that broadcasts dimensions of size 1: their stride is 0. Strides are in elements.
struct Broadcast {
  const void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0, column = 0;
};

// [batch|1, head|1, tiles, 2]: for each kRangeQueries queries (or keys), the first key (or query) that they may see,
// and the end. Strides are in int32.
struct Ranges {
  const int32_t* data = nullptr;
  int64_t batch = 0, head = 0;
};

enum class BiasType : int32_t { kNone, kFloat, kHalf, kBfloat16 };

// What determines logits and visibility, for use on the device. Pointers are null where the call has no such array.
struct Scores {
  Broadcast bias, mask;
  BiasType bias_type = BiasType::kNone;
  const int32_t* q_rows = nullptr;              // [batch|1, 2, q_length]: segment ids, then positions
  const int32_t* kv_rows = nullptr;             // [batch|1, 2, kv_length]
  Ranges key_ranges, query_ranges;              // query_ranges: backward only
  const uint32_t* dropout_keys = nullptr;       // [batch, heads, 2]: of the generator
  int64_t q_rows_batch = 0, kv_rows_batch = 0;  // batch strides in int32
  int32_t q_length = 0, kv_length = 0, heads = 0, group = 1;
  int32_t lowest = 0, highest = 0;                // visible iff lowest <= key - query <= highest
  float scale = 1, soft_cap = 0, keep_scale = 1;  // soft_cap 0: none; keep_scale: 1 / keep probability
  uint32_t keep_threshold = 0;                    // an element is kept iff its 16 random bits are >= this
};

__device__ inline float to_float(const void* data, int64_t index, BiasType type) {
  switch (type) {
    case BiasType::kHalf: return __half2float(static_cast<const __half*>(data)[index]);
    case BiasType::kBfloat16: return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    default: return static_cast<const float*>(data)[index];
  }
}

// Philox-2x32 with 10 rounds (Salmon et al., SC 2011); the definition is tilewright/kernels/numerics/dropout.py.
__device__ inline uint2 philox2x32(uint32_t key, uint2 counter) {
  constexpr uint32_t kMultiplier = 0xD256D193u, kKeyStep = 0x9E3779B9u;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    counter = make_uint2(__umulhi(counter.x, kMultiplier) ^ key ^ counter.y, counter.x * kMultiplier);
    key += kKeyStep;
  }
  return counter;
}

// Visibility and logits of one query head of one batch element.
struct HeadScores {
  const Scores& scores;
  int batch, head;

  __device__ HeadScores(const Scores& all, int batch_index, int head_index)
      : scores(all), batch(batch_index), head(head_index) {}

  // True if the logit is scale * Q K^T alone.
  __device__ bool plain() const { return scores.bias_type == BiasType::kNone && scores.soft_cap == 0; }

  // True if visibility depends on more than the band.
  __device__ bool by_arrays() const { return scores.q_rows != nullptr || scores.mask.data != nullptr; }

  // Whether a query sees a key; both must be inside their lengths.
  __device__ bool visible(int query, int key) const {
    int64_t difference = key - query;
    if (scores.q_rows != nullptr) {
      const int32_t* q = scores.q_rows + batch * scores.q_rows_batch + query;
      const int32_t* k = scores.kv_rows + batch * scores.kv_rows_batch + key;
      if (q[0] != k[0]) return false;
      difference = int64_t(k[scores.kv_length]) - q[scores.q_length];  // 64 bits: extreme positions see nothing
    }
    if (difference < scores.lowest || difference > scores.highest) return false;
    if (scores.mask.data != nullptr) {
      return static_cast<const uint8_t*>(scores.mask.data)[index(scores.mask, query, key)] != 0;
    }
    return true;
  }

  __device__ int64_t index(const Broadcast& array, int query, int key) const {
    return batch * array.batch + head * array.head + query * array.row + key * array.column;
  }

  // The logit of a (query, key) pair in units of log 2, without masks; `product` is its element of Q K^T.
  __device__ float logit(float product, int query, int key) const {
    float value = product * scores.scale;
    bool hidden = false;
    if (scores.bias_type != BiasType::kNone) {
      const float bias = to_float(scores.bias.data, index(scores.bias, query, key), scores.bias_type);
      value += bias;
      hidden = bias <= kHidingBias;
    }
    if (scores.soft_cap != 0) value = scores.soft_cap * tanhf(value / scores.soft_cap);
    return hidden ? -INFINITY : value * kLog2e;
  }

  // The derivative of the soft cap, 1 - (logit / soft_cap)^2, from the capped logit in units of log 2. Only of a logit
  // that is not masked: of minus infinity it is infinite.
  __device__ float cap_slope(float logit2) const {
    if (scores.soft_cap == 0) return 1;
    const float ratio = logit2 * (kLn2 / scores.soft_cap);
    return 1 - ratio * ratio;
  }

  __device__ bool drops() const { return scores.dropout_keys != nullptr; }

  __device__ uint2 dropout_key() const {
    const uint32_t* key = scores.dropout_keys + 2 * (int64_t(batch) * scores.heads + head);
    return make_uint2(key[0], key[1]);
  }

  // The keys [first, last) that the queries [start, end) may see, a superset; `first` is a multiple of `block`.
  __device__ int2 keys_for(int start, int end, int block) const {
    return range(scores.key_ranges, start, end, scores.kv_length, scores.lowest, scores.highest, block);
  }

  // The queries [first, last) that may see some of the keys [start, end), a superset; `first` is a multiple of `block`.
  __device__ int2 queries_for(int start, int end, int block) const {
    return range(scores.query_ranges, start, end, scores.q_length, -scores.highest, -scores.lowest, block);
  }

  // Whether the band alone makes every (query, key) pair of the tile visible, so that no masking is needed.
  __device__ bool all_visible(int q_start, int q_end, int kv_start, int kv_end) const {
    return !by_arrays() && kv_start - (q_end - 1) >= scores.lowest && kv_end - 1 - q_start <= scores.highest;
  }

 private:
  __device__ int2 range(const Ranges& ranges, int start, int end, int length, int low, int high, int block) const {
    int first = 0, last = length;
    if (ranges.data != nullptr) {
      const int32_t* entries = ranges.data + batch * ranges.batch + head * ranges.head;
      first = length;
      last = 0;
      for (int tile = start / kRangeQueries; tile * kRangeQueries < end; ++tile) {
        first = min(first, entries[2 * tile]);
        last = max(last, entries[2 * tile + 1]);
      }
    } else if (scores.q_rows == nullptr) {
      first = max(start + low, 0);
      last = min(end + high, length);
    }
    first = max(first, 0) / block * block;
    return make_int2(first, min(max(last, first), length));
  }
};

// The random words of the elements whose row and column are these but for bit 3; `key` is that of their head.
__device__ inline uint2 random_words(uint2 key, int row, int column) {
  const uint32_t r = row, c = column;
  return philox2x32(key.x, make_uint2((r >> 4 << 3) | (r & 7), ((c >> 4 << 3) | (c & 7)) ^ key.y));
}

// Whether dropout keeps one of these elements: bit 3 of the row selects a word, that of the column its half.
__device__ inline bool kept(uint2 words, uint32_t threshold, int row, int column) {
  return (((row & 8) ? words.y : words.x) >> ((column & 8) << 1) & 0xFFFF) >= threshold;
}

// The same for the elements of a row, in the order of their columns: one call of Philox serves columns c and c + 8.
struct KeepColumns {
  uint2 key, words[2];
  uint32_t threshold;
  int rows[2] = {-1, -1}, columns[2] = {-1, -1};  // those of the last call for each place

  __device__ KeepColumns(uint2 head_key, uint32_t keep_from) : key(head_key), words(), threshold(keep_from) {}

  // `place` is 0 or 1 and known when the loop is unrolled, alternating from column to column.
  __device__ bool operator()(int row, int column, int place) {
    if (row != rows[place] || (column & ~8) != columns[place]) {
      rows[place] = row;
      columns[place] = column & ~8;
      words[place] = random_words(key, row, column);
    }
    return kept(words[place], threshold, row, column);
  }
};

// The gradient of the bias, in float32; `data` is null if the call wants none.
struct BiasGradient {
  float* data = nullptr;
  Broadcast at;
  bool shared = false;  // the bias broadcasts, so several logits add to one element by atomics

  __device__ void add(int batch, int head, int query, int key, float gradient) const {
    float* element = data + batch * at.batch + head * at.head + query * at.row + key * at.column;
    if (shared) {
      atomicAdd(element, gradient);
    } else {
      *element = gradient;
    }
  }
};

// Computes, one warp per row, (delta, lse2): delta = rowsum(dO * O) - dlse, and lse in units of log 2. A row that sees
// no key, or has a lower lse than kLowestLse, gets (0, +inf), so that P = exp2(logit2 - lse2) is 0.
template <class Element>
__global__ void row_terms(const Element* out, const Element* d_out, const float* lse, const float* d_lse, float2* terms,
                          int q_length, int heads, int value_dim, int64_t rows) {
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;  // [batch, query, head]
  if (row >= rows) return;
  float total = 0;
  for (int i = threadIdx.x; i < value_dim; i += 32) {
    total += float(out[row * value_dim + i]) * float(d_out[row * value_dim + i]);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(~0u, total, distance);
  if (threadIdx.x == 0) {
    const int64_t head = row % heads, query = row / heads % q_length, batch = row / heads / q_length;
    const int64_t at = (batch * heads + head) * q_length + query;
    const bool has_gradient = !(lse[at] < kLowestLse);
    if (d_lse != nullptr) total -= d_lse[at];
    terms[at] = has_gradient ? make_float2(total, lse[at] * kLog2e) : make_float2(0, INFINITY);
  }
}

// Host side.

inline bool is_there(const Arguments& arguments, size_t index) {
  return index < arguments.inputs.size() && input<char>(arguments, index) != nullptr;
}

inline Broadcast broadcast(const ffi::AnyBuffer& buffer) {
  const auto shape = buffer.dimensions();
  Broadcast array;
  array.data = buffer.untyped_data();
  int64_t stride = 1;
  int64_t* strides[4] = {&array.batch, &array.head, &array.row, &array.column};
  for (int axis = 3; axis >= 0; --axis) {
    *strides[axis] = shape[axis] == 1 ? 0 : stride;
    stride *= shape[axis];
  }
  return array;
}

// The positions of the arrays of `Scores` among a call's inputs.
struct ScoreInputs {
  size_t bias, q_rows, kv_rows, mask, key_ranges, query_ranges, dropout_keys;
};
constexpr size_t kAbsent = ~size_t{0};
constexpr ScoreInputs kForwardInputs{3, 4, 5, 6, 7, kAbsent, 9};
constexpr ScoreInputs kBackwardInputs{7, 8, 9, 10, 13, 11, 12};

inline ffi::Error read_scores(const Problem& problem, const Arguments& arguments, const ScoreInputs& at, Scores* out) {
  Scores scores;
  scores.q_length = int32_t(problem.q_length);
  scores.kv_length = int32_t(problem.kv_length);
  scores.heads = int32_t(problem.heads);
  scores.group = int32_t(problem.heads / problem.kv_heads);
  scores.lowest = int32_t(problem.lowest);
  scores.highest = int32_t(problem.highest);
  int64_t threshold = 0;
  TILEWRIGHT_RETURN_IF_ERROR(attribute(arguments, "scale", &scores.scale));
  TILEWRIGHT_RETURN_IF_ERROR(attribute(arguments, "soft_cap", &scores.soft_cap));
  TILEWRIGHT_RETURN_IF_ERROR(attribute(arguments, "keep_scale", &scores.keep_scale));
  TILEWRIGHT_RETURN_IF_ERROR(attribute(arguments, "keep_threshold", &threshold));
  scores.keep_threshold = uint32_t(threshold);
  auto buffer = [&](size_t index) { return *input_buffer(arguments, index); };
  if (is_there(arguments, at.bias)) {
    switch (buffer(at.bias).element_type()) {
      case ffi::DataType::F32: scores.bias_type = BiasType::kFloat; break;
      case ffi::DataType::F16: scores.bias_type = BiasType::kHalf; break;
      case ffi::DataType::BF16: scores.bias_type = BiasType::kBfloat16; break;
      default: return ffi::Error::InvalidArgument("a bias must be float32, float16 or bfloat16");
    }
    scores.bias = broadcast(buffer(at.bias));
  }
  if (is_there(arguments, at.mask)) scores.mask = broadcast(buffer(at.mask));
  if (is_there(arguments, at.q_rows)) {
    auto q_rows = buffer(at.q_rows), kv_rows = buffer(at.kv_rows);
    scores.q_rows = static_cast<const int32_t*>(q_rows.untyped_data());
    scores.kv_rows = static_cast<const int32_t*>(kv_rows.untyped_data());
    scores.q_rows_batch = q_rows.dimensions()[0] == 1 ? 0 : 2 * problem.q_length;
    scores.kv_rows_batch = kv_rows.dimensions()[0] == 1 ? 0 : 2 * problem.kv_length;
  }
  for (auto [index, ranges] : {std::pair{at.key_ranges, &scores.key_ranges}, {at.query_ranges, &scores.query_ranges}}) {
    if (!is_there(arguments, index)) continue;
    const auto array = buffer(index);
    const auto shape = array.dimensions();
    ranges->data = static_cast<const int32_t*>(array.untyped_data());
    ranges->head = shape[1] == 1 ? 0 : 2 * shape[2];
    ranges->batch = shape[0] == 1 ? 0 : 2 * shape[2] * shape[1];
  }
  if (is_there(arguments, at.dropout_keys)) {
    scores.dropout_keys = static_cast<const uint32_t*>(buffer(at.dropout_keys).untyped_data());
  }
  *out = scores;
  return ffi::Error::Success();
}

// Finds the bias gradient among a call's outputs and zeroes it, because tiles without a visible pair are never visited,
// and broadcast elements are added to.
inline ffi::Error start_bias_gradient(const Problem& problem, const Arguments& arguments, size_t index,
                                      cudaStream_t stream, BiasGradient* out) {
  BiasGradient gradient;
  gradient.data = output<float>(arguments, index);
  if (gradient.data != nullptr) {
    const ffi::AnyBuffer buffer = *output_buffer(arguments, index);
    gradient.at = broadcast(buffer);
    gradient.shared =
        int64_t(buffer.element_count()) != problem.batch * problem.heads * problem.q_length * problem.kv_length;
    TILEWRIGHT_RETURN_IF_ERROR(
        check(cudaMemsetAsync(gradient.data, 0, buffer.size_bytes(), stream), "clearing the gradient of the bias"));
  }
  *out = gradient;
  return ffi::Error::Success();
}

// Arguments that forward and backward share. query, key, value are contiguous [batch, length, heads, dim].
template <class Element>
struct CommonArrays {
  const Element *query, *key, *value;
  int32_t head_dim, value_dim, heads, kv_heads;
  Scores scores;
};

template <class Element>
struct ForwardArrays : CommonArrays<Element> {
  // Null, or one logit per query head that joins the softmax without a value.
  const float* sinks;
  Element* out;
  float* lse;
};

template <class Element>
struct BackwardArrays : CommonArrays<Element> {
  const Element* d_out;
  Element *d_query, *d_key, *d_value;
  BiasGradient d_bias;
};

template <class Element>
ffi::Error read_common(const Problem& problem, const Arguments& arguments, const ScoreInputs& at,
                       CommonArrays<Element>* out) {
  TILEWRIGHT_RETURN_IF_ERROR(read_scores(problem, arguments, at, &out->scores));
  out->query = input<Element>(arguments, 0);
  out->key = input<Element>(arguments, 1);
  out->value = input<Element>(arguments, 2);
  out->head_dim = int32_t(problem.head_dim);
  out->value_dim = int32_t(problem.value_dim);
  out->heads = int32_t(problem.heads);
  out->kv_heads = int32_t(problem.kv_heads);
  return ffi::Error::Success();
}

template <class Element>
ffi::Error read_forward(const Problem& problem, const Arguments& arguments, ForwardArrays<Element>* out) {
  out->sinks = input<float>(arguments, 8);
  out->out = output<Element>(arguments, 0);
  out->lse = output<float>(arguments, 1);
  return read_common<Element>(problem, arguments, kForwardInputs, out);
}

// Reads the arguments of a backward call, and zeroes the bias gradient if there is one.
template <class Element>
ffi::Error start_backward(const Problem& problem, const Arguments& arguments, cudaStream_t stream,
                          BackwardArrays<Element>* out) {
  out->d_out = input<Element>(arguments, 5);
  out->d_query = output<Element>(arguments, 0);
  out->d_key = output<Element>(arguments, 1);
  out->d_value = output<Element>(arguments, 2);
  TILEWRIGHT_RETURN_IF_ERROR(read_common<Element>(problem, arguments, kBackwardInputs, out));
  return start_bias_gradient(problem, arguments, 3, stream, &out->d_bias);
}

// Computes delta and lse2 of a backward call; inputs 3 to 6 are out, lse, d_out and d_lse.
template <class Element>
ffi::Error start_row_terms(const Problem& problem, const Arguments& arguments, cudaStream_t stream, float2* terms) {
  constexpr int kRows = 8;
  const int64_t rows = problem.batch * problem.q_length * problem.heads;
  return launch<row_terms<Element>>(dim3((rows + kRows - 1) / kRows), dim3(32, kRows), 0, stream,
                                    input<Element>(arguments, 3), input<Element>(arguments, 5),
                                    input<float>(arguments, 4), input<float>(arguments, 6), terms,
                                    int(problem.q_length), int(problem.heads), int(problem.value_dim), rows);
}

}  // namespace tilewright::attention
