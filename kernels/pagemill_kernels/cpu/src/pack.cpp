// Packs row-major weights into the panel layouts that linear.cpp describes. It runs once, at load. Rows past the last
// output are zero, so that a partial panel computes nothing wrong.
#include <algorithm>
#include <cstring>

#include "abi.h"
#include "codes.h"
#include "threads.h"

namespace pagemill {
namespace {

int64_t num_panels(int64_t out_features) { return (out_features + kPanel - 1) / kPanel; }

template <typename Element>
void pack_plain(const Element* weight, int64_t out_features, int64_t in_features, Element* packed, int num_threads) {
  for_each(num_threads, num_panels(out_features), [&](int64_t panel) {
    Element* to = packed + panel * in_features * kPanel;
    for (int64_t n = 0; n < kPanel; ++n) {
      const int64_t row = panel * kPanel + n;
      for (int64_t k = 0; k < in_features; ++k)
        to[k * kPanel + n] = row < out_features ? weight[row * in_features + k] : Element{};
    }
  });
}

// Stores neighbouring inputs in pairs; a last odd input is paired with zeros.
void pack_pairs(const uint16_t* weight, int64_t out_features, int64_t in_features, uint16_t* packed, int num_threads) {
  const int64_t panel_size = pairs_in(in_features) * 2 * kPanel;
  for_each(num_threads, num_panels(out_features), [&](int64_t panel) {
    uint16_t* to = packed + panel * panel_size;
    std::memset(to, 0, panel_size * sizeof *to);
    for (int64_t n = 0; n < std::min<int64_t>(kPanel, out_features - panel * kPanel); ++n) {
      const uint16_t* row = weight + (panel * kPanel + n) * in_features;
      for (int64_t k = 0; k < in_features; ++k) to[pair_place(k, n)] = row[k];
    }
  });
}

struct Codes {
  const uint8_t* codes;
  const float* scales;
  const float* offsets;
  int64_t out_features, in_features, group;
};

template <int32_t Code>
void pack_codes(const Codes& from, uint8_t* packed, float* packed_scales, int num_threads) {
  const int64_t num_groups = from.in_features / from.group, bytes = group_bytes(Code, from.group);
  const int64_t scale_floats = from.offsets ? 2 * kPanel : kPanel;
  std::memset(packed, 0, num_panels(from.out_features) * num_groups * bytes);
  std::memset(packed_scales, 0, num_panels(from.out_features) * num_groups * scale_floats * sizeof(float));
  for_each(num_threads, num_panels(from.out_features), [&](int64_t panel) {
    const int64_t real = std::min<int64_t>(kPanel, from.out_features - panel * kPanel);
    for (int64_t g = 0; g < num_groups; ++g) {
      uint8_t* to = packed + (panel * num_groups + g) * bytes;
      float* scale = packed_scales + (panel * num_groups + g) * scale_floats;
      for (int64_t n = 0; n < real; ++n) {
        const int64_t row = panel * kPanel + n;
        scale[n] = from.scales[row * num_groups + g];
        if (from.offsets) scale[kPanel + n] = from.offsets[row * num_groups + g];
        const uint8_t* codes = from.codes + row * from.in_features + g * from.group;
        for (int64_t k = 0; k < from.group; ++k) {
          const Place place = place_of<Code>(k, n);
          to[place.byte] |= place.high ? codes[k] << 4 : codes[k];
        }
      }
    }
  });
}

constexpr int kBlock = 32;  // inputs of a stored block

#ifdef __aarch64__
using Half = __fp16;  // GCC 12 has the other name for x86 only
#else
using Half = _Float16;
#endif

float half_at(const uint8_t* at) {
  Half value;
  std::memcpy(&value, at, sizeof value);
  return static_cast<float>(value);
}

// Packs one group of 16 rows from stored values, in the layout of codes.h. With four bits, the low halves of 16 bytes
// are the first 16 values, the high halves the rest.
template <int32_t Code>
void pack_group(const uint8_t* const codes[kPanel], uint8_t* to);

template <>
void pack_group<kCodes4>(const uint8_t* const codes[kPanel], uint8_t* to) {
  for (int k = 0; k < kBlock / 4; ++k) {
    for (int n = 0; n < kPanel; ++n) {
      const uint8_t first = codes[n][2 * k], second = codes[n][2 * k + 1];
      to[k * kPanel + n] = static_cast<uint8_t>((first & 15) | second << 4);
      to[(k + kBlock / 4) * kPanel + n] = static_cast<uint8_t>(first >> 4 | (second & 0xF0));
    }
  }
}

template <>
void pack_group<kDots4>(const uint8_t* const codes[kPanel], uint8_t* to) {
  constexpr uint32_t kLow = 0x0F0F0F0F;
  for (int quad = 0; quad < kBlock / 8; ++quad) {
    for (int n = 0; n < kLanes; ++n) {
      const uint32_t a = load_as<uint32_t>(codes[n] + 4 * quad), b = load_as<uint32_t>(codes[n + kLanes] + 4 * quad);
      const uint32_t first = (a & kLow) | (b & kLow) << 4, second = (a >> 4 & kLow) | (b & ~kLow);
      std::memcpy(to + quad * 2 * kPanel + n * 4, &first, 4);
      std::memcpy(to + (quad + kBlock / 8) * 2 * kPanel + n * 4, &second, 4);
    }
  }
}

template <>
void pack_group<kCodes8>(const uint8_t* const codes[kPanel], uint8_t* to) {
  for (int k = 0; k < kBlock; ++k)
    for (int n = 0; n < kPanel; ++n) to[k * kPanel + n] = codes[n][k];
}

template <>
void pack_group<kDots8>(const uint8_t* const codes[kPanel], uint8_t* to) {
  for (int quad = 0; quad < kBlock / 4; ++quad)
    for (int n = 0; n < kPanel; ++n) std::memcpy(to + quad * 4 * kPanel + n * 4, codes[n] + 4 * quad, 4);
}

template <int32_t Code>
void pack_blocks(const uint8_t* blocks, int64_t out_features, int64_t in_features, bool stored_offsets, uint8_t* packed,
                 float* packed_scales, int num_threads) {
  constexpr bool kOffsets = in_nibbles(Code);
  constexpr int64_t kScaleFloats = kOffsets ? 2 * kPanel : kPanel;
  const int64_t num_groups = in_features / kBlock, bytes = group_bytes(Code, kBlock);
  const int64_t head_bytes = stored_offsets ? 4 : 2, block_bytes = head_bytes + kBlock / (kOffsets ? 2 : 1);
  static const uint8_t nothing[4 + kBlock] = {};
  for_each(num_threads, num_panels(out_features), [&](int64_t panel) {
    for (int64_t g = 0; g < num_groups; ++g) {
      const uint8_t* codes[kPanel];
      float* scale = packed_scales + (panel * num_groups + g) * kScaleFloats;
      for (int64_t n = 0; n < kPanel; ++n) {
        const int64_t row = panel * kPanel + n;
        const uint8_t* block = row < out_features ? blocks + (row * num_groups + g) * block_bytes : nothing;
        codes[n] = block + head_bytes;
        scale[n] = half_at(block);
        if (kOffsets) scale[kPanel + n] = stored_offsets ? half_at(block + 2) : -8.0f * scale[n];
      }
      pack_group<Code>(codes, packed + (panel * num_groups + g) * bytes);
    }
  });
}

template <int32_t Code>
void gather_codes(const PackedWeight& w, int64_t id, float* out) {
  const int64_t panel = id / kPanel, n = id % kPanel;
  const int64_t num_groups = w.in_features / w.group, bytes = group_bytes(Code, w.group);
  const int64_t scale_floats = w.has_offsets ? 2 * kPanel : kPanel;
  for (int64_t g = 0; g < num_groups; ++g, out += w.group) {
    const float* scale = w.scales + (panel * num_groups + g) * scale_floats;
    const float offset = w.has_offsets ? scale[kPanel + n] : 0.0f;
    const uint8_t* codes = w.codes + (panel * num_groups + g) * bytes;
    for (int64_t k = 0; k < w.group; ++k) {
      const Place place = place_of<Code>(k, n);
      const uint8_t byte = codes[place.byte];
      const int code = !in_nibbles(Code) ? static_cast<int8_t>(byte) : place.high ? byte >> 4 : byte & 15;
      const float value = Code == kFloats8 ? from_e4m3(byte) : Code == kFloats4 ? w.table[code] : static_cast<float>(code);
      out[k] = value * scale[n] + offset;
    }
  }
}

void gather_plain(const PackedWeight& w, int64_t id, float* out) {
  const int64_t panel = id / kPanel, n = id % kPanel;
  for (int64_t k = 0; k < w.in_features; ++k) {
    const int64_t at = (panel * w.in_features + k) * kPanel + n;
    const uint32_t bits = w.format == kFloat32 ? reinterpret_cast<const uint32_t*>(w.codes)[at]
                                               : uint32_t{reinterpret_cast<const uint16_t*>(w.codes)[at]} << 16;
    std::memcpy(out + k, &bits, sizeof bits);
  }
}

void gather_pairs(const PackedWeight& w, int64_t id, float* out) {
  const uint16_t* panel = reinterpret_cast<const uint16_t*>(w.codes) + id / kPanel * pairs_in(w.in_features) * 2 * kPanel;
  for (int64_t k = 0; k < w.in_features; ++k) out[k] = load_one(panel + pair_place(k, id % kPanel));
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

// weight: [out_features][in_features] of bfloat16. packed: kPairs.
void pagemill_pack_pairs(const uint16_t* weight, int64_t out_features, int64_t in_features, uint16_t* packed,
                         int32_t num_threads) {
  pack_pairs(weight, out_features, in_features, packed, num_threads);
}

// codes: [out_features][in_features], one byte per value (signed integers or e4m3 for 8 bits, 0 to 15 for 4 bits).
// scales, offsets: [out_features][in_features / group]; offsets may be null, except for 4-bit integers.
void pagemill_pack_codes(const uint8_t* codes, const float* scales, const float* offsets, int64_t out_features,
                         int64_t in_features, int32_t format, int32_t group, uint8_t* packed, float* packed_scales,
                         int32_t num_threads) {
  const Codes from{codes, scales, offsets, out_features, in_features, group};
  switch (format) {
    case kCodes8: return pack_codes<kCodes8>(from, packed, packed_scales, num_threads);
    case kCodes4: return pack_codes<kCodes4>(from, packed, packed_scales, num_threads);
    case kDots4: return pack_codes<kDots4>(from, packed, packed_scales, num_threads);
    case kDots8: return pack_codes<kDots8>(from, packed, packed_scales, num_threads);
    case kFloats8: return pack_codes<kFloats8>(from, packed, packed_scales, num_threads);
    case kFloats4: return pack_codes<kFloats4>(from, packed, packed_scales, num_threads);
  }
}

// Packs blocks like pagemill_pack_codes packs the same values, scales and offsets. blocks: [out_features][in_features /
// 32] of a float16 scale, a float16 offset if stored_offsets, then 32 values (signed for 8 bits; 4 bits: see
// pack_group). Four bits without a stored offset have the offset -8 scales.
void pagemill_pack_blocks(const uint8_t* blocks, int64_t out_features, int64_t in_features, int32_t format,
                          int32_t stored_offsets, uint8_t* packed, float* packed_scales, int32_t num_threads) {
  const auto pack = format == kCodes8   ? pack_blocks<kCodes8>
                    : format == kCodes4 ? pack_blocks<kCodes4>
                    : format == kDots8  ? pack_blocks<kDots8>
                                        : pack_blocks<kDots4>;
  pack(blocks, out_features, in_features, stored_offsets != 0, packed, packed_scales, num_threads);
}

// Computes out[i] = row ids[i] of the weight, as floats in the order of its columns, for embeddings that share their
// matrix with the head.
void pagemill_gather_rows(const PackedWeight* weight, const int64_t* ids, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i, out += weight->in_features) {
    switch (weight->format) {
      case kCodes8: gather_codes<kCodes8>(*weight, ids[i], out); break;
      case kCodes4: gather_codes<kCodes4>(*weight, ids[i], out); break;
      case kDots4: gather_codes<kDots4>(*weight, ids[i], out); break;
      case kDots8: gather_codes<kDots8>(*weight, ids[i], out); break;
      case kFloats8: gather_codes<kFloats8>(*weight, ids[i], out); break;
      case kFloats4: gather_codes<kFloats4>(*weight, ids[i], out); break;
      case kPairs: gather_pairs(*weight, ids[i], out); break;
      default: gather_plain(*weight, ids[i], out);
    }
  }
}

int32_t pagemill_abi_version() { return kAbiVersion; }

}  // extern "C"
