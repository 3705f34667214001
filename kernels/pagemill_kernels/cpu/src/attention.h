// Shared by attention in float32 (attention.cpp) and in bfloat16 (attention_bfloat16.cpp): work items and the addresses
// of their keys and values.
#pragma once
#include "abi.h"
#include "kv_store.h"
#include "tile.h"

namespace pagemill {

constexpr int64_t kMaxRows = 48;  // of an item: query tokens times the heads that share a key/value head
constexpr int64_t kMaxHeadDim = 576;  // that of DeepSeek-V3's latents
constexpr int64_t kSpan = 4 * kPanel;  // context tokens between two updates of a row's maximum

// One key/value head of one request for a tile of query tokens.
struct WorkItem {
  int64_t request, kv_head, first_token, num_tokens;
};

// What one thread needs for an item's rows, whose heads are padded with zeros.
struct AttentionScratch {
  alignas(64) float query[kMaxRows * kMaxHeadDim];
  alignas(64) float result[kMaxRows * kMaxHeadDim];
  alignas(64) float keys[kMaxHeadDim * kPanel];    // transposed: [head_dim][16]
  alignas(64) float tokens[kPanel * kMaxHeadDim];  // keys, then values, of 16 tokens of a cache not in float32
  alignas(64) float scores[kMaxRows * kSpan];
  float row_max[kMaxRows];
  float row_sum[kMaxRows];
};

struct Place {
  const uint8_t* head;  // start of the block's keys of the item's head
  int64_t first;        // index of the token in the block
};

inline Place place_of(const AttentionArgs& args, const int32_t* table, const uint8_t* cache, int64_t token) {
  return {cache + table[token / args.block_size] * args.block_stride, token % args.block_size};
}

// The size that heads have in scratch memory; the values behind them are zero.
inline int64_t padded(int64_t head_dim) { return (head_dim + kPanel - 1) / kPanel * kPanel; }

// Attends with the item's rows, `group` of each token: their queries, times the scale, maxima and sums are in scratch,
// where the result lies afterwards, to be divided by the sums.
void attend_rows(const AttentionArgs& args, const WorkItem& item, int64_t group, AttentionScratch& scratch);

// Attends with queries, keys, values and weights in bfloat16, sums and softmax in float32. Requires has_bfloat16().
void attend_bfloat16(const AttentionArgs& args, const WorkItem& item);

}  // namespace pagemill
