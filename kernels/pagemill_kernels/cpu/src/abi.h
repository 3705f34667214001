// What crosses the border to Python: plain structs and C functions, mirrored in pagemill_kernels/cpu/library.py.
// Raise kAbiVersion with every change here.
#pragma once
#include <cstdint>

namespace pagemill {

constexpr int32_t kAbiVersion = 9;

// The first four are multiplied in float32. The others round what they meet: kDots4 and kDots8 to integers of 16 bits
// (dots.cpp) or, from PackedWeight::bfloat16_rows on, to bfloat16 (bfloat16.cpp), kPairs always to bfloat16.
enum Format : int32_t {
  kFloat32 = 0, kBfloat16 = 1, kCodes8 = 2, kCodes4 = 3, kDots4 = 4, kDots8 = 5, kPairs = 6
};

struct PackedWeight {
  int32_t format;
  int32_t group;        // inputs that share a scale: 16 or 32 (codes only)
  int32_t has_offsets;  // value = code * scale + offset, else code * scale (codes only)
  int32_t bfloat16_rows;  // from this many rows on products are in bfloat16; 0: never
  int64_t out_features;
  int64_t in_features;
  const uint8_t* codes;
  const float* scales;
};

// What lies between an expert's two products; experts.cpp.
enum Gate : int32_t { kGateSilu = 0, kGateClamped = 1 };

// How keys and values lie in the cache; kv_store.h.
enum CacheType : int32_t { kCacheFloat32 = 0, kCacheBfloat16 = 1, kCacheInt8 = 2 };

struct AttentionArgs {
  const float* query;  // [tokens][num_heads][head_dim], tokens query_stride floats apart
  const void* cache;
  const int32_t* block_tables;     // [requests][block_table_stride]
  const int64_t* query_start_loc;  // [requests + 1]
  const int64_t* seq_lens;         // [requests]
  float* out;                      // [tokens][num_heads][head_dim]
  const float* sinks;              // [num_heads]: a score of no key that takes its share of the softmax; null: none
  int64_t query_stride;
  int64_t block_table_stride;
  int64_t num_requests;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;
  int64_t sliding_window;  // 0: none
  float scale;
  int32_t num_threads;
  int32_t cache_type;       // CacheType
  int32_t batch_invariant;  // a token's result depends on nothing but its own context, bit for bit
  int32_t bfloat16;         // tiles of many rows are multiplied in bfloat16, unless the cache is in float32
};

// A decoder layer of Llama's kind; layer.cpp. Absent parts are null.
struct LayerWeights {
  const PackedWeight* qkv;  // queries, keys, values
  const PackedWeight* output;
  const PackedWeight* gate_up;
  const PackedWeight* down;
  const float* qkv_bias;
  const float* output_bias;
  const float* gate_up_bias;
  const float* down_bias;
  const float* attention_norm;
  const float* mlp_norm;
  const float* query_norm;  // [head_dim]
  const float* key_norm;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  float eps;
  float scale;  // of the scores
};

}  // namespace pagemill
