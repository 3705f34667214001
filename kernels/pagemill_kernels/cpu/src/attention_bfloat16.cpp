// Attention in bfloat16, which multiplies two pairs in one instruction, on processors with AVX512_BF16.
//
// Of many query rows lanes are rows, up to 48 of them in three registers: scores, weights and results are transposed. So keys are
// read in place, two inputs of one key broadcast at a time, and a row's maximum and sum are computed lane by lane. Only
// values are rearranged, two tokens adjacent. Queries are rounded once; weights are summed before they are rounded and
// multiplied by the values.
//
// Of few rows, those of a decode, lanes are keys, then columns of the values: keys are transposed, in which they take
// less than queries that leave most lanes empty. Each sum adds the same products in the same order as of many rows, so a
// row's result does not depend on its tile.
#include "attention.h"

#include <algorithm>
#include <cmath>

namespace pagemill {

#ifdef __AVX512BF16__
namespace {

constexpr int kAtOnce = 8;  // keys, or columns of the result, with three registers of rows: 24 sums
constexpr int64_t kFewRows = 8;  // up to here lanes are keys and columns
constexpr int kFewAtOnce = 4;    // of few rows, and panels of keys or of columns: 16 sums

struct alignas(64) Scratch {
  uint16_t query[kMaxHeadDim * kMaxRows];  // [head_dim / 2][rows][2]
  uint16_t values[kSpan * kMaxHeadDim];    // [kSpan / 2][head_dim][2]
  uint16_t weights[kSpan * kMaxRows];      // [kSpan / 2][rows][2]
  uint16_t rounded[kPanel * kMaxHeadDim];  // tokens of a cache that is not in bfloat16
  float scores[kSpan * kMaxRows];          // [kSpan][rows]
  float result[kMaxHeadDim * kMaxRows];    // [head_dim][rows]
  float rows[kMaxRows * kMaxHeadDim];      // queries, then results, in the caller's layout
  float tokens[kPanel * kMaxHeadDim];
  uint32_t keys[kSpan * kMaxHeadDim / 2];  // of few rows: [kSpan / 16][head_dim / 2][16], two inputs of each key
  int32_t positions[kMaxRows];
  float row_max[kMaxRows], row_sum[kMaxRows], shrink[kMaxRows];
};

inline __m512 multiply_add(__m512 sums, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
}

inline __m512i broadcast_pair(const uint16_t* from) { return _mm512_set1_epi32(load_as<int32_t>(from)); }

// Interleaves 32 halves: the first and the seventeenth, the second and the eighteenth, and so on.
inline __m512i side_by_side(__m512i halves) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, halves);
}

// Computes 2^x with a relative error below 3e-6, far below half a step of bfloat16; exact for integers, 0 for -inf. The
// polynomial has the smallest maximum error over [0, 1) of all of degree four.
inline __m512 exp2(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(1.34266847e-2f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.22424733e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.41280205e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.93044845e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);
}

void round_floats(const float* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; i += kPanel)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
}

// Computes the scores of eight keys, the first of which is `key`. Hides: not every row sees all of them.
template <int Vectors, bool Hides>
void score_keys(const uint16_t* query, const uint16_t* keys, int64_t head_dim, const int32_t* positions, int64_t key,
                int64_t window, int64_t first_key, float* scores, float* row_max) {
  constexpr int64_t kWidth = Vectors * kPanel;
  __m512 sums[kAtOnce][Vectors];
#pragma GCC unroll 8
  for (int i = 0; i < kAtOnce; ++i)
#pragma GCC unroll 3
    for (int v = 0; v < Vectors; ++v) sums[i][v] = _mm512_setzero_ps();
  for (int64_t d = 0; d < head_dim; d += 2, query += 2 * kWidth) {
    __m512i q[Vectors];
#pragma GCC unroll 3
    for (int v = 0; v < Vectors; ++v) q[v] = _mm512_load_si512(query + v * 2 * kPanel);
#pragma GCC unroll 8
    for (int i = 0; i < kAtOnce; ++i) {
      const __m512i pair = broadcast_pair(keys + i * head_dim + d);
#pragma GCC unroll 3
      for (int v = 0; v < Vectors; ++v) sums[i][v] = multiply_add(sums[i][v], q[v], pair);
    }
  }
#pragma GCC unroll 3
  for (int v = 0; v < Vectors; ++v) {
    __m512 most = _mm512_load_ps(row_max + v * kPanel);
#pragma GCC unroll 8
    for (int i = 0; i < kAtOnce; ++i) {
      if (Hides) {
        const __m512i behind = _mm512_sub_epi32(_mm512_load_si512(positions + v * kPanel), _mm512_set1_epi32(key + i));
        const __mmask16 seen = _mm512_cmplt_epu32_mask(behind, _mm512_set1_epi32(window));
        const __mmask16 visible = key + i < first_key ? __mmask16(0) : seen;
        sums[i][v] = _mm512_mask_blend_ps(visible, _mm512_set1_ps(-INFINITY), sums[i][v]);
      }
      most = _mm512_max_ps(sums[i][v], most);
      _mm512_store_ps(scores + i * kWidth + v * kPanel, sums[i][v]);
    }
    _mm512_store_ps(row_max + v * kPanel, most);
  }
}

// Turns `count` tokens' scores into weights relative to the rows' new maxima. before: the previous maxima. factor: the
// scores' scale times log2(e).
template <int Vectors>
void weigh(Scratch& s, const float* before, int64_t count, float factor) {
  constexpr int64_t kWidth = Vectors * kPanel;
  const __m512 scale = _mm512_set1_ps(factor);
  for (int64_t row = 0; row < kWidth; row += kPanel) {
    const __m512 most = _mm512_load_ps(s.row_max + row);
    const __mmask16 sees = _mm512_cmp_ps_mask(most, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
    const __m512 base = _mm512_maskz_mov_ps(sees, most);  // a row that sees nothing yet: all its weights are 0
    const __m512 shrink = exp2(_mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(before + row), base), scale));
    __m512 even = _mm512_mul_ps(_mm512_load_ps(s.row_sum + row), shrink), odd = _mm512_setzero_ps();
    const float* scores = s.scores + row;
    uint16_t* weights = s.weights + 2 * row;
    for (int64_t t = 0; t < count; t += 2, scores += 2 * kWidth, weights += 2 * kWidth) {
      const __m512 a = exp2(_mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(scores), base), scale));
      const __m512 b = exp2(_mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(scores + kWidth), base), scale));
      even = _mm512_add_ps(even, a);
      odd = _mm512_add_ps(odd, b);
      _mm512_store_si512(weights, side_by_side((__m512i)_mm512_cvtne2ps_pbh(b, a)));
    }
    _mm512_store_ps(s.row_sum + row, _mm512_add_ps(even, odd));
    _mm512_store_ps(s.shrink + row, shrink);
  }
}

// Computes result = result * shrink + weights * values, for `count` tokens.
template <int Vectors>
void add_values(Scratch& s, int64_t count, int64_t head_dim) {
  constexpr int64_t kWidth = Vectors * kPanel;
  for (int64_t d = 0; d < head_dim; d += kAtOnce) {
    float* result = s.result + d * kWidth;
    __m512 sums[kAtOnce][Vectors];
#pragma GCC unroll 8
    for (int i = 0; i < kAtOnce; ++i)
#pragma GCC unroll 3
      for (int v = 0; v < Vectors; ++v)
        sums[i][v] =
            _mm512_mul_ps(_mm512_load_ps(result + i * kWidth + v * kPanel), _mm512_load_ps(s.shrink + v * kPanel));
    const uint16_t* weights = s.weights;
    const uint16_t* values = s.values + 2 * d;
    for (int64_t t = 0; t < count; t += 2, weights += 2 * kWidth, values += 2 * head_dim) {
      __m512i w[Vectors];
#pragma GCC unroll 3
      for (int v = 0; v < Vectors; ++v) w[v] = _mm512_load_si512(weights + v * 2 * kPanel);
#pragma GCC unroll 8
      for (int i = 0; i < kAtOnce; ++i) {
        const __m512i pair = broadcast_pair(values + 2 * i);
#pragma GCC unroll 3
        for (int v = 0; v < Vectors; ++v) sums[i][v] = multiply_add(sums[i][v], w[v], pair);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kAtOnce; ++i)
#pragma GCC unroll 3
      for (int v = 0; v < Vectors; ++v) _mm512_store_ps(result + i * kWidth + v * kPanel, sums[i][v]);
  }
}

// The inputs and outputs of one work item.
struct Source {
  const AttentionArgs& args;
  const WorkItem& item;
  int64_t head_dim, group, rows, query_start, first_position, head_size;
  const int32_t* table;
  const uint8_t* cache;

  Source(const AttentionArgs& a, const WorkItem& i)
      : args(a), item(i), head_dim(a.head_dim), group(a.num_heads / a.num_kv_heads), rows(i.num_tokens * group),
        query_start(a.query_start_loc[i.request]) {
    const int64_t num_new = a.query_start_loc[i.request + 1] - query_start;
    first_position = a.seq_lens[i.request] - num_new + i.first_token;
    head_size = head_bytes(a.cache_type, a.block_size, head_dim);
    table = a.block_tables + i.request * a.block_table_stride;
    cache = static_cast<const uint8_t*>(a.cache) + i.kv_head * head_size;
  }

  // Indices in [tokens][num_heads][head_dim].
  int64_t head_of(int64_t row) const { return item.kv_head * group + row % group; }
  int64_t token_of(int64_t row) const { return query_start + item.first_token + row / group; }

  // Returns sixteen tokens from `token` on, of which the first `count` are used; in place if they are bfloat16.
  const uint16_t* read(bool values, int64_t token, int64_t count, Scratch& s) const {
    const Place place = place_of(args, table, cache, token);
    const uint8_t* head = place.head + (values ? args.num_kv_heads * head_size : 0);
    if (args.cache_type == kCacheBfloat16) return reinterpret_cast<const uint16_t*>(head) + place.first * head_dim;
    const float* floats =
        read_tokens(args.cache_type, head, args.block_size, head_dim, place.first, count, s.tokens);
    round_floats(floats, count * head_dim, s.rounded);
    return s.rounded;
  }
};

template <int Vectors>
void load_queries(const Source& from, Scratch& s) {
  constexpr int64_t kWidth = Vectors * kPanel;
  const int64_t head_dim = from.head_dim, pairs = head_dim / 2;
  uint16_t* rounded = reinterpret_cast<uint16_t*>(s.rows);
  for (int64_t row = 0; row < from.rows; ++row)
    round_floats(from.args.query + from.token_of(row) * from.args.query_stride + from.head_of(row) * head_dim, head_dim,
                 rounded + row * head_dim);
  std::fill(rounded + from.rows * head_dim, rounded + kWidth * head_dim, 0);
  for (int64_t row = 0; row < kWidth; row += kLanes)
    for (int64_t pair = 0; pair < pairs; pair += kLanes)
      transpose8(s.rows + row * pairs + pair, pairs, reinterpret_cast<float*>(s.query) + pair * kWidth + row, kWidth);
  for (int64_t row = 0; row < kWidth; ++row)
    s.positions[row] = static_cast<int32_t>(from.first_position + std::min(row, from.rows - 1) / from.group);
}

// Stores pairs of adjacent tokens. Tokens past the end become zero, whatever the cache contains.
void load_values(const Source& from, int64_t start, int64_t count, Scratch& s) {
  const int64_t head_dim = from.head_dim;
  uint16_t* to = s.values;
  for (int64_t panel = 0; panel < count; panel += kPanel) {
    const int64_t tokens = std::min<int64_t>(kPanel, count - panel);
    const uint16_t* values = from.read(true, start + panel, tokens, s);
    for (int64_t t = 0; t < kPanel; t += 2, values += 2 * head_dim)
      for (int64_t d = 0; d < head_dim; d += kPanel, to += 2 * kPanel) {
        const __m256i zero = _mm256_setzero_si256();
        const __m256i even = t < tokens ? load_as<__m256i>(values + d) : zero;
        const __m256i odd = t + 1 < tokens ? load_as<__m256i>(values + head_dim + d) : zero;
        _mm512_store_si512(to, side_by_side(_mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1)));
      }
  }
}

template <int Vectors>
void store_results(const Source& from, Scratch& s) {
  constexpr int64_t kWidth = Vectors * kPanel;
  const int64_t head_dim = from.head_dim;
  for (int64_t row = 0; row < kWidth; row += kLanes)
    for (int64_t d = 0; d < head_dim; d += kLanes)
      transpose8(s.result + d * kWidth + row, kWidth, s.rows + row * head_dim + d, head_dim);
  for (int64_t row = 0; row < from.rows; ++row) {
    float* out = from.args.out + (from.token_of(row) * from.args.num_heads + from.head_of(row)) * head_dim;
    const Floats inverse = splat(1.0f / s.row_sum[row]);
    for (int64_t d = 0; d < head_dim; d += kLanes) store(out + d, load(s.rows + row * head_dim + d) * inverse);
  }
}

template <int Vectors>
void attend_rows(const Source& from, Scratch& s) {
  constexpr int64_t kWidth = Vectors * kPanel;
  const AttentionArgs& args = from.args;
  const int64_t head_dim = from.head_dim, first = from.first_position, end = first + from.item.num_tokens;
  const int64_t window = args.sliding_window > 0 ? std::min<int64_t>(args.sliding_window, INT32_MAX) : INT32_MAX;
  const int64_t window_start = std::max<int64_t>(0, first - window + 1);
  const float factor = args.scale * 1.44269504f;

  load_queries<Vectors>(from, s);
  std::fill_n(s.row_max, kWidth, -INFINITY);
  std::fill_n(s.row_sum, kWidth, args.sinks ? 1.0f : 0.0f);
  // Maxima are those of unscaled scores.
  for (int64_t row = 0; args.sinks && row < from.rows; ++row) s.row_max[row] = args.sinks[from.head_of(row)] / args.scale;
  std::fill_n(s.result, kWidth * head_dim, 0.0f);
  for (int64_t start = window_start / kSpan * kSpan; start < end; start += kSpan) {
    const int64_t depth = std::min<int64_t>(kSpan, end - start), padded = (depth + kPanel - 1) / kPanel * kPanel;
    alignas(64) float before[kWidth];
    std::copy_n(s.row_max, kWidth, before);
    const uint16_t* keys = nullptr;
    for (int64_t t = 0; t < padded; t += kAtOnce, keys += kAtOnce * head_dim) {
      if (t % kPanel == 0) keys = from.read(false, start + t, kPanel, s);
      const int64_t key = start + t;
      const bool all_see = key + kAtOnce - 1 <= first && key > end - 1 - window && key >= args.first_key;
      const auto score = all_see ? score_keys<Vectors, false> : score_keys<Vectors, true>;
      score(s.query, keys, head_dim, s.positions, key, window, args.first_key, s.scores + t * kWidth, s.row_max);
    }
    load_values(from, start, depth, s);
    weigh<Vectors>(s, before, padded, factor);
    add_values<Vectors>(s, padded, head_dim);
  }
  store_results<Vectors>(from, s);
}

// Computes the scores of `Panels` times sixteen keys for `Rows` rows, whose queries are [rows][head_dim].
template <int Rows, int Panels>
void score_few(const uint16_t* query, const uint32_t* keys, int64_t head_dim, float* scores) {
  __m512 sums[Rows][Panels];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) sums[r][p] = _mm512_setzero_ps();
  for (int64_t pair = 0; pair < head_dim / 2; ++pair, keys += kPanel) {
    __m512i k[Panels];
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) k[p] = _mm512_load_si512(keys + p * head_dim / 2 * kPanel);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const __m512i q = broadcast_pair(query + r * head_dim + 2 * pair);
#pragma GCC unroll 4
      for (int p = 0; p < Panels; ++p) sums[r][p] = multiply_add(sums[r][p], q, k[p]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) _mm512_store_ps(scores + r * kSpan + p * kPanel, sums[r][p]);
}

// Computes result = result * shrink + weights * values of `Rows` rows and `Vectors` times sixteen columns.
template <int Rows, int Vectors>
void add_few_values(const uint16_t* weights, const uint16_t* values, int64_t count, int64_t head_dim,
                    const float* shrink, float* result) {
  __m512 sums[Rows][Vectors];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v)
      sums[r][v] = _mm512_mul_ps(_mm512_load_ps(result + r * head_dim + v * kPanel), _mm512_set1_ps(shrink[r]));
  for (int64_t t = 0; t < count; t += 2, values += 2 * head_dim) {
    __m512i pairs[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) pairs[v] = _mm512_load_si512(values + v * 2 * kPanel);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const __m512i weight = broadcast_pair(weights + r * kSpan + t);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sums[r][v] = multiply_add(sums[r][v], weight, pairs[v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) _mm512_store_ps(result + r * head_dim + v * kPanel, sums[r][v]);
}

// Scores, weights and values of a span for `Rows` rows from `row` on.
template <int Rows>
void attend_few_rows(const Source& from, Scratch& s, int64_t row, int64_t start, int64_t panels, float factor) {
  const AttentionArgs& args = from.args;
  const int64_t head_dim = from.head_dim, count = panels * kPanel;
  const int64_t window = args.sliding_window > 0 ? std::min<int64_t>(args.sliding_window, INT32_MAX) : INT32_MAX;
  const uint16_t* query = s.query + row * head_dim;
  float* scores = s.scores + row * kSpan;
  if (panels == kFewAtOnce) {
    score_few<Rows, kFewAtOnce>(query, s.keys, head_dim, scores);
  } else {
    for (int64_t p = 0; p < panels; ++p)
      score_few<Rows, 1>(query, s.keys + p * head_dim / 2 * kPanel, head_dim, scores + p * kPanel);
  }
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512 scale = _mm512_set1_ps(factor);
  for (int r = 0; r < Rows; ++r, scores += kSpan) {
    const int64_t position = s.positions[row + r];
    const bool sees_all = start + count - 1 <= position && start > position - window && start >= args.first_key;
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (int64_t t = 0; t < count; t += kPanel) {
      __m512 each = _mm512_load_ps(scores + t);
      if (!sees_all) {
        const __m512i key = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int32_t>(start + t)), lanes);
        const __m512i behind = _mm512_sub_epi32(_mm512_set1_epi32(static_cast<int32_t>(position)), key);
        const __mmask16 visible = _mm512_cmplt_epu32_mask(behind, _mm512_set1_epi32(window)) &
                                  _mm512_cmpge_epi32_mask(key, _mm512_set1_epi32(args.first_key));
        each = _mm512_mask_blend_ps(visible, _mm512_set1_ps(-INFINITY), each);
        _mm512_store_ps(scores + t, each);
      }
      most = _mm512_max_ps(each, most);
    }
    const float before = s.row_max[row + r], now = std::max(before, _mm512_reduce_max_ps(most));
    const float base = now == -INFINITY ? 0.0f : now;  // a row that sees nothing yet: all its weights are 0
    const float shrink = _mm512_cvtss_f32(exp2(_mm512_set1_ps((before - base) * factor)));
    for (int64_t t = 0; t < count; t += kPanel)
      _mm512_store_ps(scores + t, exp2(_mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(scores + t), _mm512_set1_ps(base)), scale)));
    __m128 even = _mm_set_ss(s.row_sum[row + r] * shrink), odd = _mm_setzero_ps();
    for (int64_t t = 0; t < count; t += 2) {
      even = _mm_add_ss(even, _mm_load_ss(scores + t));
      odd = _mm_add_ss(odd, _mm_load_ss(scores + t + 1));
    }
    round_floats(scores, count, s.weights + (row + r) * kSpan);
    s.row_max[row + r] = now;
    s.row_sum[row + r] = _mm_cvtss_f32(_mm_add_ss(even, odd));
    s.shrink[row + r] = shrink;
  }
  const uint16_t* weights = s.weights + row * kSpan;
  float* result = s.result + row * head_dim;
  int64_t d = 0;
  for (; d + kFewAtOnce * kPanel <= head_dim; d += kFewAtOnce * kPanel)
    add_few_values<Rows, kFewAtOnce>(weights, s.values + 2 * d, count, head_dim, s.shrink + row, result + d);
  for (; d < head_dim; d += kPanel)
    add_few_values<Rows, 1>(weights, s.values + 2 * d, count, head_dim, s.shrink + row, result + d);
}

// Stores two inputs of sixteen keys adjacent, for each panel of the span.
void load_keys(const Source& from, int64_t start, int64_t panels, Scratch& s) {
  const int64_t pairs = from.head_dim / 2;
  for (int64_t p = 0; p < panels; ++p) {
    const float* keys = reinterpret_cast<const float*>(from.read(false, start + p * kPanel, kPanel, s));
    float* to = reinterpret_cast<float*>(s.keys) + p * pairs * kPanel;
    for (int64_t key = 0; key < kPanel; key += kLanes)
      for (int64_t pair = 0; pair < pairs; pair += kLanes)
        transpose8(keys + key * pairs + pair, pairs, to + pair * kPanel + key, kPanel);
  }
}

void attend_few(const Source& from, Scratch& s) {
  constexpr void (*kKernels[])(const Source&, Scratch&, int64_t, int64_t, int64_t, float) = {
      attend_few_rows<1>, attend_few_rows<2>, attend_few_rows<3>, attend_few_rows<4>};
  const AttentionArgs& args = from.args;
  const int64_t head_dim = from.head_dim, first = from.first_position, end = first + from.item.num_tokens;
  const int64_t window_start = args.sliding_window > 0 ? std::max<int64_t>(0, first - args.sliding_window + 1) : 0;
  for (int64_t row = 0; row < from.rows; ++row) {
    round_floats(from.args.query + from.token_of(row) * args.query_stride + from.head_of(row) * head_dim, head_dim,
                 s.query + row * head_dim);
    s.positions[row] = static_cast<int32_t>(first + row / from.group);
    s.row_max[row] = args.sinks ? args.sinks[from.head_of(row)] / args.scale : -INFINITY;
    s.row_sum[row] = args.sinks ? 1.0f : 0.0f;
  }
  std::fill_n(s.result, from.rows * head_dim, 0.0f);
  for (int64_t start = window_start / kSpan * kSpan; start < end; start += kSpan) {
    const int64_t depth = std::min<int64_t>(kSpan, end - start), panels = (depth + kPanel - 1) / kPanel;
    load_keys(from, start, panels, s);
    load_values(from, start, depth, s);
    for (int64_t row = 0; row < from.rows; row += kFewAtOnce)
      kKernels[std::min<int64_t>(kFewAtOnce, from.rows - row) - 1](from, s, row, start, panels, args.scale * 1.44269504f);
  }
  for (int64_t row = 0; row < from.rows; ++row) {
    float* out = args.out + (from.token_of(row) * args.num_heads + from.head_of(row)) * head_dim;
    const Floats inverse = splat(1.0f / s.row_sum[row]);
    for (int64_t d = 0; d < head_dim; d += kLanes) store(out + d, load(s.result + row * head_dim + d) * inverse);
  }
}

}  // namespace

void attend_bfloat16(const AttentionArgs& args, const WorkItem& item) {
  thread_local Scratch scratch;
  const Source from(args, item);
  if (from.rows <= kFewRows) return attend_few(from, scratch);
  constexpr void (*kKernels[])(const Source&, Scratch&) = {attend_rows<1>, attend_rows<2>, attend_rows<3>};
  kKernels[(from.rows - 1) / kPanel](from, scratch);
}

#else

void attend_bfloat16(const AttentionArgs&, const WorkItem&) {}

#endif

}  // namespace pagemill
