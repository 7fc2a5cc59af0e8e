// What attention kernels in CUDA C++ do to a logit, run on the host: visibility, bias, soft cap, dropout, tile bounds.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

using std::max;
using std::min;

// What the device has and these functions name, but the host never runs.
static const uint3 threadIdx{}, blockIdx{};
static const dim3 blockDim;
static float __shfl_xor_sync(unsigned, float, int) { return NAN; }
static void atomicAdd(float* to, float what) { *to += what; }

static uint32_t __umulhi(uint32_t one, uint32_t other) { return uint64_t(one) * other >> 32; }

#include "tilewright/variant.h"

// Of a table's fields, those that are read on the way.
struct tilewright::Problem {
  int64_t batch, heads, kv_heads, q_length, kv_length, head_dim, value_dim, lowest, highest;
};

#include "attention.cuh"

using namespace tilewright::attention;

extern "C" {

struct Call {
  int32_t batch, heads, q_length, kv_length, lowest, highest;
  float scale, soft_cap;
  uint32_t keep_threshold;
  int32_t q_rows_batch, kv_rows_batch, key_ranges_batch, key_ranges_head, query_ranges_batch, query_ranges_head;
  const int32_t *q_rows, *kv_rows, *key_ranges, *query_ranges;
  const float* bias;     // [batch, heads, q, kv]
  const uint8_t* mask;   // [batch, heads, q, kv]
  const uint32_t* keys;  // [batch, heads, 2]
};

static Scores scores_of(const Call& call) {
  const int64_t rows = call.kv_length, heads = call.q_length * rows, elements = call.heads * heads;
  Scores scores;
  if (call.bias != nullptr) {
    scores.bias_type = BiasType::kFloat;
    scores.bias = {call.bias, elements, heads, rows, 1};
  }
  if (call.mask != nullptr) scores.mask = {call.mask, elements, heads, rows, 1};
  scores.q_rows = call.q_rows;
  scores.kv_rows = call.kv_rows;
  scores.key_ranges = {call.key_ranges, call.key_ranges_batch, call.key_ranges_head};
  scores.query_ranges = {call.query_ranges, call.query_ranges_batch, call.query_ranges_head};
  scores.dropout_keys = call.keys;
  scores.q_rows_batch = call.q_rows_batch;
  scores.kv_rows_batch = call.kv_rows_batch;
  scores.q_length = call.q_length;
  scores.kv_length = call.kv_length;
  scores.heads = call.heads;
  scores.lowest = call.lowest;
  scores.highest = call.highest;
  scores.scale = call.scale;
  scores.soft_cap = call.soft_cap;
  scores.keep_threshold = call.keep_threshold;
  return scores;
}

// Every array [batch, heads, q, kv]; `kept` and `kept_in_order` only where the call drops.
void elements(const Call& call, const float* products, uint8_t* visible, float* logits, float* slopes, uint8_t* kept_at,
              uint8_t* kept_in_order) {
  const Scores scores = scores_of(call);
  int64_t i = 0;
  for (int batch = 0; batch < call.batch; ++batch) {
    for (int head = 0; head < call.heads; ++head) {
      const HeadScores of_head(scores, batch, head);
      const uint2 key = of_head.drops() ? of_head.dropout_key() : make_uint2(0, 0);
      KeepColumns in_order(key, scores.keep_threshold);
      for (int query = 0; query < call.q_length; ++query) {
        for (int column = 0; column < call.kv_length; ++column, ++i) {
          visible[i] = of_head.visible(query, column);
          logits[i] = of_head.logit(products[i], query, column);
          slopes[i] = of_head.cap_slope(logits[i]);
          if (!of_head.drops()) continue;
          kept_at[i] = kept(random_words(key, query, column), scores.keep_threshold, query, column);
          kept_in_order[i] = in_order(query, column, column % 2);
        }
      }
    }
  }
}

// For each batch element, head and tile of `tile` queries: the keys that it visits; or of keys, the queries.
void bounds(const Call& call, int tile, int block, int of_queries, int32_t* found) {
  const Scores scores = scores_of(call);
  const int length = of_queries ? call.q_length : call.kv_length;
  for (int batch = 0; batch < call.batch; ++batch) {
    for (int head = 0; head < call.heads; ++head) {
      const HeadScores of_head(scores, batch, head);
      for (int start = 0; start < length; start += tile) {
        const int end = min(start + tile, length);
        const int2 range = of_queries ? of_head.keys_for(start, end, block) : of_head.queries_for(start, end, block);
        *found++ = range.x;
        *found++ = range.y;
      }
    }
  }
}
}
