// From row-major weights to the panel layouts that linear.cpp describes. Runs once, at load. Rows past the last output
// are zero, so that a partial panel computes nothing wrong.
#include <omp.h>

#include <cstring>

#include "abi.h"
#include "tile.h"

namespace pagemill {
namespace {

int64_t num_panels(int64_t out_features) { return (out_features + kPanel - 1) / kPanel; }

template <typename Element>
void pack_plain(const Element* weight, int64_t out_features, int64_t in_features, Element* packed, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
  for (int64_t panel = 0; panel < num_panels(out_features); ++panel) {
    Element* to = packed + panel * in_features * kPanel;
    for (int64_t n = 0; n < kPanel; ++n) {
      const int64_t row = panel * kPanel + n;
      for (int64_t k = 0; k < in_features; ++k)
        to[k * kPanel + n] = row < out_features ? weight[row * in_features + k] : Element{};
    }
  }
}

constexpr int kGroup = 32;

float half_at(const uint8_t* at) {
  _Float16 value;
  std::memcpy(&value, at, sizeof value);
  return static_cast<float>(value);
}

// One group of 16 rows from blocks of 4-bit codes: the low halves of 16 bytes are the first 16 codes, the high halves
// the rest. Packed: two neighbouring codes of a row to a byte, the rows side by side.
inline void pack_group4(const uint8_t* const codes[kPanel], uint8_t* to) {
  for (int k = 0; k < kGroup / 4; ++k) {
    for (int n = 0; n < kPanel; ++n) {
      const uint8_t first = codes[n][2 * k], second = codes[n][2 * k + 1];
      to[k * kPanel + n] = static_cast<uint8_t>((first & 15) | second << 4);
      to[(k + kGroup / 4) * kPanel + n] = static_cast<uint8_t>(first >> 4 | (second & 0xF0));
    }
  }
}

inline void pack_group8(const uint8_t* const codes[kPanel], uint8_t* to) {
  for (int k = 0; k < kGroup; ++k)
    for (int n = 0; n < kPanel; ++n) to[k * kPanel + n] = codes[n][k];
}

}  // namespace
}  // namespace pagemill

using namespace pagemill;

extern "C" {

// weight: [out_features][in_features] of 4-byte floats or 2-byte bfloat16.
void pagemill_pack_plain(const void* weight, int64_t out_features, int64_t in_features, int32_t element_bytes,
                         void* packed, int32_t num_threads) {
  if (element_bytes == 4)
    pack_plain(static_cast<const uint32_t*>(weight), out_features, in_features, static_cast<uint32_t*>(packed),
               num_threads);
  else
    pack_plain(static_cast<const uint16_t*>(weight), out_features, in_features, static_cast<uint16_t*>(packed),
               num_threads);
}

// codes: [out_features][in_features], one byte a code (signed for 8 bits, 0 to 15 for 4 bits).
// scales, offsets: [out_features][in_features / group]; offsets may be null. 4-bit codes: groups of 32 with offsets.
void pagemill_pack_codes(const uint8_t* codes, const float* scales, const float* offsets, int64_t out_features,
                         int64_t in_features, int32_t bits, int32_t group, uint8_t* packed, float* packed_scales,
                         int32_t num_threads) {
  const int64_t num_groups = in_features / group;
  const int64_t group_bytes = group * kPanel * bits / 8, scale_floats = offsets ? 2 * kPanel : kPanel;
#pragma omp parallel for schedule(static) num_threads(num_threads)
  for (int64_t panel = 0; panel < num_panels(out_features); ++panel) {
    for (int64_t g = 0; g < num_groups; ++g) {
      uint8_t* to = packed + (panel * num_groups + g) * group_bytes;
      float* scale = packed_scales + (panel * num_groups + g) * scale_floats;
      for (int64_t n = 0; n < kPanel; ++n) {
        const int64_t row = panel * kPanel + n;
        const bool real = row < out_features;
        scale[n] = real ? scales[row * num_groups + g] : 0.0f;
        if (offsets) scale[kPanel + n] = real ? offsets[row * num_groups + g] : 0.0f;
        const uint8_t* from = codes + row * in_features + g * group;
        if (bits == 8) {
          for (int k = 0; k < group; ++k) to[k * kPanel + n] = real ? from[k] : 0;
        } else {
          for (int k = 0; k < group / 2; ++k) to[k * kPanel + n] = real ? from[2 * k] | from[2 * k + 1] << 4 : 0;
        }
      }
    }
  }
}

// blocks: [out_features][in_features / 32] of a float16 scale, a float16 offset if stored_offsets, then 32 codes (signed
// for 8 bits; 4 bits: see pack_group4). Four bits without a stored offset count from -8. The result is pagemill_pack_codes's
// of the same codes, scales and offsets.
void pagemill_pack_blocks(const uint8_t* blocks, int64_t out_features, int64_t in_features, int32_t bits,
                          int32_t stored_offsets, uint8_t* packed, float* packed_scales, int32_t num_threads) {
  const int64_t num_groups = in_features / kGroup, group_bytes = kGroup * kPanel * bits / 8;
  const int64_t head_bytes = stored_offsets ? 4 : 2, block_bytes = head_bytes + kGroup * bits / 8;
  const bool has_offsets = bits == 4;
  const int64_t scale_floats = has_offsets ? 2 * kPanel : kPanel;
  static const uint8_t nothing[4 + kGroup] = {};
#pragma omp parallel for schedule(static) num_threads(num_threads)
  for (int64_t panel = 0; panel < num_panels(out_features); ++panel) {
    for (int64_t g = 0; g < num_groups; ++g) {
      const uint8_t* codes[kPanel];
      float* scale = packed_scales + (panel * num_groups + g) * scale_floats;
      for (int64_t n = 0; n < kPanel; ++n) {
        const int64_t row = panel * kPanel + n;
        const uint8_t* block = row < out_features ? blocks + (row * num_groups + g) * block_bytes : nothing;
        codes[n] = block + head_bytes;
        scale[n] = half_at(block);
        if (has_offsets) scale[kPanel + n] = stored_offsets ? half_at(block + 2) : -8.0f * scale[n];
      }
      uint8_t* to = packed + (panel * num_groups + g) * group_bytes;
      if (bits == 4)
        pack_group4(codes, to);
      else
        pack_group8(codes, to);
    }
  }
}

// out[i] = row ids[i] of the weight, as floats. For embeddings that share their matrix with the head.
void pagemill_gather_rows(const PackedWeight* weight, const int64_t* ids, int64_t count, float* out) {
  const PackedWeight& w = *weight;
  const int64_t group = w.group, scale_floats = w.has_offsets ? 2 * kPanel : kPanel;
  for (int64_t i = 0; i < count; ++i, out += w.in_features) {
    const int64_t panel = ids[i] / kPanel, n = ids[i] % kPanel;
    if (w.format == kFloat32 || w.format == kBfloat16) {
      for (int64_t k = 0; k < w.in_features; ++k) {
        const int64_t at = (panel * w.in_features + k) * kPanel + n;
        const uint32_t bits = w.format == kFloat32 ? reinterpret_cast<const uint32_t*>(w.codes)[at]
                                                   : uint32_t{reinterpret_cast<const uint16_t*>(w.codes)[at]} << 16;
        std::memcpy(out + k, &bits, sizeof bits);
      }
      continue;
    }
    const int64_t num_groups = w.in_features / group;
    for (int64_t g = 0; g < num_groups; ++g) {
      const float* scale = w.scales + (panel * num_groups + g) * scale_floats;
      const uint8_t* codes = w.codes + (panel * num_groups + g) * group * kPanel / (w.format == kCodes4 ? 2 : 1);
      for (int64_t k = 0; k < group; ++k) {
        float code;
        if (w.format == kCodes8) {
          code = static_cast<int8_t>(codes[k * kPanel + n]);
        } else {
          const uint8_t pair = codes[k / 2 * kPanel + n];
          code = k % 2 == 0 ? pair & 15 : pair >> 4;
        }
        out[g * group + k] = code * scale[n] + (w.has_offsets ? scale[kPanel + n] : 0.0f);
      }
    }
  }
}

int32_t pagemill_abi_version() { return kAbiVersion; }

}  // extern "C"
