// The layout of one head's tokens of one block in the paged cache: [block_size][head_dim] floats, bfloat16 or 8-bit
// values; 8-bit values are followed by a float32 scale for each token. One layer's cache is [blocks][2 * kv_heads] of
// these, keys before values, blocks a stride apart. fused.cpp writes, attention.cpp reads.
#pragma once
#include <algorithm>
#include <cmath>

#include "abi.h"
#include "vec.h"

namespace pagemill {

inline int64_t head_bytes(int32_t type, int64_t block_size, int64_t head_dim) {
  switch (type) {
    case kCacheBfloat16: return block_size * head_dim * 2;
    case kCacheInt8: return block_size * (head_dim + 4);
    default: return block_size * head_dim * 4;
  }
}

// Returns `count` tokens from `first` on as floats, in place if they are floats. head_dim: a multiple of 8.
inline const float* read_tokens(int32_t type, const uint8_t* head, int64_t block_size, int64_t head_dim, int64_t first,
                                int64_t count, float* buffer) {
  if (type == kCacheFloat32) return reinterpret_cast<const float*>(head) + first * head_dim;
  if (type == kCacheBfloat16) {
    const uint8_t* from = head + first * head_dim * 2;
    int64_t i = 0;
#ifdef __AVX512F__
    for (; i + 2 * kLanes <= count * head_dim; i += 2 * kLanes)
      _mm512_storeu_si512(buffer + i, _mm512_slli_epi32(_mm512_cvtepu16_epi32(load_as<__m256i>(from + i * 2)), 16));
#endif
    for (; i < count * head_dim; i += kLanes) store(buffer + i, from_bfloat16(load_as<Halves>(from + i * 2)));
    return buffer;
  }
  const uint8_t* codes = head + first * head_dim;
  const uint8_t* scales = head + block_size * head_dim + first * 4;
  for (int64_t t = 0; t < count; ++t) {
    const Floats scale = splat(load_as<float>(scales + t * 4));
    for (int64_t d = 0; d < head_dim; d += kLanes)
      store(buffer + t * head_dim + d, from_signed_bytes(load_as<SignedBytes>(codes + t * head_dim + d)) * scale);
  }
  return buffer;
}

// Reads one token into `out`. head_dim: any.
inline void read_token(int32_t type, const uint8_t* head, int64_t block_size, int64_t head_dim, int64_t token,
                       float* out) {
  if (type == kCacheFloat32) {
    std::memcpy(out, head + token * head_dim * 4, head_dim * sizeof(float));
  } else if (type == kCacheBfloat16) {
    for (int64_t d = 0; d < head_dim; ++d)
      out[d] = from_bfloat16(load_as<uint16_t>(head + (token * head_dim + d) * 2));
  } else {
    const float scale = load_as<float>(head + block_size * head_dim + token * 4);
    for (int64_t d = 0; d < head_dim; ++d) out[d] = load_as<int8_t>(head + token * head_dim + d) * scale;
  }
}

// Quantizes one token; the largest magnitude becomes 127. Values that are not finite make the scale so, and all
// quantized values zero.
inline void write_codes(const float* from, int64_t head_dim, uint8_t* codes, uint8_t* scale_at) {
  float largest = 0.0f, fault = 0.0f;
  for (int64_t d = 0; d < head_dim; ++d) {
    largest = std::max(largest, std::fabs(from[d]));
    fault += from[d] * 0.0f;
  }
  const float scale = largest / 127.0f + fault;
  std::memcpy(scale_at, &scale, sizeof scale);
  const bool usable = scale > 0.0f;
  for (int64_t d = 0; d < head_dim; ++d)
    codes[d] = static_cast<uint8_t>(static_cast<int8_t>(usable ? std::nearbyint(from[d] / scale) : 0.0f));
}

// Writes one token of one head. head: start of the head's part of the block.
inline void write_token(int32_t type, const float* from, int64_t block_size, int64_t head_dim, int64_t token,
                        uint8_t* head) {
  if (type == kCacheFloat32) {
    std::memcpy(head + token * head_dim * 4, from, head_dim * sizeof(float));
  } else if (type == kCacheBfloat16) {
    for (int64_t d = 0; d < head_dim; ++d) {
      const uint16_t half = to_bfloat16(from[d]);
      std::memcpy(head + (token * head_dim + d) * 2, &half, sizeof half);
    }
  } else {
    write_codes(from, head_dim, head + token * head_dim, head + block_size * head_dim + token * 4);
  }
}

}  // namespace pagemill
