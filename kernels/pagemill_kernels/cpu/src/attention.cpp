// Paged attention in float32: prefill chunks and decodes of many requests in one call, directly over block tables. On
// request, attention_bfloat16.cpp computes those whose scores are neither capped nor lowered.
//
// The cache contains floats, bfloat16 or 8-bit values (kv_store.h). A work item is one key/value head of one request
// for a tile of query tokens; the query heads that share it are rows of the same tile. Softmax is online (arXiv
// 1805.02867): a running maximum and sum per row, over 64 context tokens at a time. Few tokens sum a score in another
// order than many: a decode, and as many tokens as are proposed behind it, which get the bits of decodes one by one. On
// request all use the order of many, so that a row's result does not depend on its tile.
#include <algorithm>
#include <cmath>
#include <vector>

#include "attention.h"
#include "bfloat16.h"
#include "operations.h"

namespace pagemill {
namespace {

constexpr int64_t kFewTokens = 17, kFewRows = 6;  // up to so many, rows of a token, keys are read in place
constexpr float kMinusInfinity = -INFINITY;

void transpose_keys(const float* keys, int64_t head_dim, float* out) {
  for (int64_t d = 0; d < head_dim; d += kLanes)
    for (int64_t token = 0; token < kPanel; token += kLanes)
      transpose8(keys + token * head_dim + d, head_dim, out + d * kPanel + token, kPanel);
}

// scores[r][t] = query[r] . keys[t] for 16 context tokens, rows kSpan apart; for few rows, where transposing the keys
// would cost more.
template <int Rows>
void score_rows(const float* query, const float* keys, int64_t head_dim, float* scores) {
  for (int64_t token = 0; token < kPanel; token += 4, keys += 4 * head_dim) {
    Floats dots[Rows][4] = {};
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      Floats q[Rows];
      for (int r = 0; r < Rows; ++r) q[r] = load(query + r * head_dim + d);
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) {
        const Floats key = load(keys + t * head_dim + d);
#pragma GCC unroll 3
        for (int r = 0; r < Rows; ++r) dots[r][t] += q[r] * key;
      }
    }
    for (int r = 0; r < Rows; ++r)
      store_sums(scores + r * kSpan + token, dots[r][0], dots[r][1], dots[r][2], dots[r][3]);
  }
}

// result[r] += sum over tokens of scores[r][t] * values[t], for few rows: Vectors * 8 columns at a time.
template <int Rows, int Vectors>
void add_values(const float* scores, const float* values, int64_t depth, int64_t head_dim, float* result) {
  Floats sums[Rows][Vectors];
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v) sums[r][v] = load(result + r * head_dim + v * kLanes);
  for (int64_t token = 0; token < depth; ++token, values += head_dim) {
    Floats weight[Rows];
    for (int r = 0; r < Rows; ++r) weight[r] = splat(scores[r * kSpan + token]);
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      const Floats value = load(values + v * kLanes);
#pragma GCC unroll 3
      for (int r = 0; r < Rows; ++r) sums[r][v] += weight[r] * value;
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v) store(result + r * head_dim + v * kLanes, sums[r][v]);
}

template <int Rows>
void value_rows(const float* scores, const float* values, int64_t depth, int64_t columns, int64_t head_dim,
                float* result) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= columns; d += 4 * kLanes) add_values<Rows, 4>(scores, values + d, depth, head_dim, result + d);
  for (; d < columns; d += kPanel) add_values<Rows, 2>(scores, values + d, depth, head_dim, result + d);
}

void score_all(const float* query, int64_t rows, const float* keys, int64_t head_dim, bool in_place, float* transposed,
               float* scores) {
  if (!in_place) {
    transpose_keys(keys, head_dim, transposed);
    for (int64_t row = 0; row < rows; ++row) std::fill_n(scores + row * kSpan, kPanel, 0.0f);
    return tile(rows, query, head_dim, transposed, kPanel, head_dim, scores, kSpan);
  }
  for (; rows > 0; rows -= 3, query += 3 * head_dim, scores += 3 * kSpan) {
    if (rows >= 3) score_rows<3>(query, keys, head_dim, scores);
    if (rows == 2) score_rows<2>(query, keys, head_dim, scores);
    if (rows == 1) score_rows<1>(query, keys, head_dim, scores);
  }
}

void add_all(const float* scores, int64_t rows, const float* values, int64_t depth, int64_t columns, int64_t head_dim,
             float* result) {
  if (rows > kFewRows) {
    for (int64_t d = 0; d < columns; d += kPanel)
      tile(rows, scores, kSpan, values + d, head_dim, depth, result + d, head_dim);
    return;
  }
  for (; rows > 0; rows -= 3, scores += 3 * kSpan, result += 3 * head_dim) {
    if (rows >= 3) value_rows<3>(scores, values, depth, columns, head_dim, result);
    if (rows == 2) value_rows<2>(scores, values, depth, columns, head_dim, result);
    if (rows == 1) value_rows<1>(scores, values, depth, columns, head_dim, result);
  }
}

// position, last: of a row's token, and of the last token that it attends to.
uint32_t visible_tokens(int64_t position, int64_t last, int64_t start, int64_t window, int64_t first_key) {
  uint32_t visible = 0xffff;
  const int64_t after = start + kPanel - 1 - last;  // tokens of the sixteen that come later
  if (after > 0) visible = after >= kPanel ? 0 : visible >> after;
  const int64_t before = position - window + 1 - start;  // tokens of the sixteen that left the window
  if (window > 0 && before > 0) visible &= before >= kPanel ? 0 : 0xffffu << before;
  if (start < first_key) visible &= first_key - start >= kPanel ? 0 : 0xffffu << (first_key - start);
  return visible & 0xffff;
}

void hide(float* scores, uint32_t visible) {
  for (int i = 0; i < kPanel; ++i)
    if (!(visible >> i & 1)) scores[i] = kMinusInfinity;
}

// Caps scores of `count` context tokens, and lowers them with distance. first: the first one's position, relative to
// that of the row's token. Later tokens are hidden afterwards.
void bend(float* scores, int64_t count, float cap, float slope, int64_t first) {
  alignas(64) static constexpr float kSteps[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t i = 0; i < count; i += kWidest) {
    Widest score = load_as<Widest>(scores + i);
    // tanh(x) equals 1 - 2 / (exp(2 x) + 1).
    if (cap > 0) score = cap - 2.0f * cap / (exp(score * (2.0f / cap)) + 1.0f);
    if (slope != 0) score += (load_as<Widest>(kSteps) + static_cast<float>(first + i)) * slope;
    std::memcpy(scores + i, &score, sizeof score);
  }
}

// Turns the scores of a token at `position` into weights relative to the row's running maximum, and rescales the sums
// so far. scores: of `panels` times 16 context tokens from `start` on.
void softmax_row(float* scores, int64_t panels, int64_t position, int64_t last, int64_t start, int64_t window,
                 int64_t first_key, float* result, int64_t head_dim, float& row_max, float& row_sum) {
  Widest most = splat_widest(kMinusInfinity);
  for (int64_t panel = 0; panel < panels; ++panel) {
    const uint32_t visible = visible_tokens(position, last, start + panel * kPanel, window, first_key);
    if (visible != 0xffff) hide(scores + panel * kPanel, visible);
  }
  for (int64_t i = 0; i < panels * kPanel; i += kWidest) most = max(most, load_as<Widest>(scores + i));
  const float new_max = std::max(row_max, largest(most));
  if (new_max == kMinusInfinity) {
    std::fill_n(scores, panels * kPanel, 0.0f);
    return;
  }
  if (new_max > row_max) {
    const float shrink = row_max == kMinusInfinity ? 0.0f : std::exp(row_max - new_max);
    row_sum *= shrink;
    for (int64_t d = 0; d < head_dim; d += kLanes) store(result + d, load(result + d) * shrink);
    row_max = new_max;
  }
  Widest total = splat_widest(0.0f);
  for (int64_t i = 0; i < panels * kPanel; i += kWidest) {
    const Widest weights = exp(load_as<Widest>(scores + i) - new_max);
    total += weights;
    std::memcpy(scores + i, &weights, sizeof weights);
  }
  row_sum += sum(total);
}

const float* read_heads(int32_t type, const uint8_t* head, int64_t block_size, int64_t head_dim, int64_t first,
                        int64_t count, float* buffer) {
  const int64_t width = padded(head_dim);
  if (width == head_dim) return read_tokens(type, head, block_size, head_dim, first, count, buffer);
  for (int64_t t = 0; t < count; ++t, buffer += width) {
    read_token(type, head, block_size, head_dim, first + t, buffer);
    std::fill(buffer + head_dim, buffer + width, 0.0f);
  }
  return buffer - count * width;
}

bool bends(const AttentionArgs& args) { return args.soft_cap > 0 || args.alibi_slopes; }

// Returns the last token that the token at `position` attends to, in a context of `length` tokens.
int64_t last_visible(const AttentionArgs& args, int64_t position, int64_t length) {
  if (!args.ahead) return position;
  return args.sliding_window > 0 ? std::min(length, position + args.sliding_window) - 1 : length - 1;
}

void attend(const AttentionArgs& args, const WorkItem& item, AttentionScratch& scratch) {
  const int64_t head_dim = args.head_dim, group = args.num_heads / args.num_kv_heads;
  const int64_t width = padded(head_dim), rows = item.num_tokens * group;
  const int64_t query_start = args.query_start_loc[item.request];
  for (int64_t t = 0; t < item.num_tokens; ++t)
    for (int64_t g = 0; g < group; ++g) {
      const int64_t token = query_start + item.first_token + t, row = t * group + g;
      const float* from = args.query + token * args.query_stride + (item.kv_head * group + g) * head_dim;
      float* to = scratch.query + row * width;
      for (int64_t d = 0; d < head_dim; ++d) to[d] = from[d] * args.scale;
      std::fill(to + head_dim, to + width, 0.0f);
      scratch.row_max[row] = args.sinks ? args.sinks[item.kv_head * group + g] : kMinusInfinity;
      scratch.row_sum[row] = args.sinks ? 1.0f : 0.0f;
    }
  attend_rows(args, item, group, scratch);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = query_start + item.first_token + row / group;
    float* out = args.out + (token * args.num_heads + item.kv_head * group + row % group) * head_dim;
    const float inverse = 1.0f / scratch.row_sum[row];
    for (int64_t d = 0; d < head_dim; ++d) out[d] = scratch.result[row * width + d] * inverse;
  }
}

// Whether scores are summed in the order of few rows. It follows from what a request computes, not from its tiles.
bool reads_in_place(const AttentionArgs& args, int64_t request) {
  const int64_t num_tokens = args.query_start_loc[request + 1] - args.query_start_loc[request];
  return args.batch_invariant == 0 && num_tokens <= kFewTokens && args.num_heads <= kFewRows * args.num_kv_heads;
}

}  // namespace

void attend_rows(const AttentionArgs& args, const WorkItem& item, int64_t group, AttentionScratch& scratch) {
  const int64_t head_dim = args.head_dim, width = padded(head_dim), rows = item.num_tokens * group;
  const int64_t query_start = args.query_start_loc[item.request], length = args.seq_lens[item.request];
  const int64_t first_position = length - (args.query_start_loc[item.request + 1] - query_start) + item.first_token;
  const int64_t end = last_visible(args, first_position + item.num_tokens - 1, length) + 1;
  const int64_t window_start = args.sliding_window > 0 ? std::max<int64_t>(0, first_position - args.sliding_window + 1) : 0;
  const int32_t* table = args.block_tables + item.request * args.block_table_stride;
  const int64_t head_size = head_bytes(args.cache_type, args.block_size, head_dim);
  const uint8_t* cache = static_cast<const uint8_t*>(args.cache) + item.kv_head * head_size;
  const bool in_place = reads_in_place(args, item.request);
  const int64_t values_at = args.value_size ? 0 : args.num_kv_heads * head_size;
  const int64_t columns = args.value_size ? padded(args.value_size) : width;
  std::fill_n(scratch.result, rows * width, 0.0f);

  for (int64_t start = window_start / kSpan * kSpan; start < end; start += kSpan) {
    // Tokens past the end were never written for this request: their weight is zero, and their bytes may be anything.
    const int64_t depth = std::min<int64_t>(kSpan, end - start), panels = (depth + kPanel - 1) / kPanel;
    for (int64_t panel = 0; panel < panels; ++panel) {
      const Place place = place_of(args, table, cache, start + panel * kPanel);
      const float* keys =
          read_heads(args.cache_type, place.head, args.block_size, head_dim, place.first, kPanel, scratch.tokens);
      score_all(scratch.query, rows, keys, width, in_place, scratch.keys, scratch.scores + panel * kPanel);
    }
    for (int64_t row = 0; bends(args) && row < rows; ++row)
      bend(scratch.scores + row * kSpan, panels * kPanel, args.soft_cap,
           args.alibi_slopes ? args.alibi_slopes[item.kv_head * group + row % group] : 0.0f,
           start - first_position - row / group);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = first_position + row / group, last = last_visible(args, position, length);
      softmax_row(scratch.scores + row * kSpan, panels, position, last, start, args.sliding_window, args.first_key,
                  scratch.result + row * width, columns, scratch.row_max[row], scratch.row_sum[row]);
    }
    for (int64_t panel = 0; panel < panels; ++panel) {
      const Place place = place_of(args, table, cache, start + panel * kPanel);
      const int64_t count = std::min<int64_t>(kPanel, depth - panel * kPanel);
      const float* values = read_heads(args.cache_type, place.head + values_at, args.block_size, head_dim, place.first,
                                       count, scratch.tokens);
      add_all(scratch.scores + panel * kPanel, rows, values, count, columns, width, scratch.result);
    }
  }
}

}  // namespace pagemill

using namespace pagemill;

// head_dim: at most 576. block_size: a multiple of 16. num_heads / num_kv_heads: at most 48.
extern "C" void pagemill_paged_attention(const AttentionArgs* arguments) {
  const AttentionArgs& args = *arguments;
  const int64_t group = args.num_heads / args.num_kv_heads;
  const int64_t tile_tokens = kMaxRows / group;
  const bool rounds = args.bfloat16 != 0 && args.head_dim % kPanel == 0 && !bends(args) && !args.ahead &&
                      args.cache_type != kCacheFloat32 && has_bfloat16();
  std::vector<WorkItem> items;
  for (int64_t request = 0; request < args.num_requests; ++request) {
    const int64_t num_tokens = args.query_start_loc[request + 1] - args.query_start_loc[request];
    for (int64_t first = 0; first < num_tokens; first += tile_tokens)
      for (int64_t head = 0; head < args.num_kv_heads; ++head)
        items.push_back({request, head, first, std::min(tile_tokens, num_tokens - first)});
  }
  share(args.num_threads, static_cast<int64_t>(items.size()), kSingly, [&](Pieces pieces) {
    AttentionScratch scratch;
    pieces.each([&](int64_t i) {
      if (rounds)
        attend_bfloat16(args, items[i]);
      else
        attend(args, items[i], scratch);
    });
  });
}
