// One token for each row of logits: masks, edits and penalties, the filters, the seeded draw, and what is reported of a
// row. Mirrors pagemill_kernels/sampling (arithmetic, randomness, filters, reference), whose tokens these are bit by bit:
// each product and each sum is rounded once, so nothing here may be contracted. Rows share nothing; threads take rows.
#pragma GCC optimize("fp-contract=off")
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "abi.h"
#include "operations.h"
#include "vec.h"

namespace pagemill {
namespace {

constexpr float kReach = 26.0f;
constexpr int32_t kSqrtHalfBits = 0x3f3504f3;
constexpr float kLn2 = 0.6931471805599453f, kLog2e = 1.4426950408889634f;
constexpr int kMassBits = 40, kShareBits = 24;
constexpr int64_t kShortlist = 1024;  // candidates that are put in order at first
constexpr int64_t kBlock = 1024;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline float as_float(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline int32_t as_bits(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float logarithm(float y) {
  const int32_t bits = as_bits(y);
  const int32_t exponent = (bits - kSqrtHalfBits) >> 23;
  const float r = as_float(bits - (exponent << 23)) - 1.0f;
  float series = 0.09226369857788086f;
  series = series * r + -0.14352191984653473f;
  series = series * r + 0.14775051176548004f;
  series = series * r + -0.165620356798172f;
  series = series * r + 0.1997445821762085f;
  series = series * r + -0.2500205934047699f;
  series = series * r + 0.33333641290664673f;
  series = series * r + -0.4999999403953552f;
  series = series * (r * r);
  series = series + r;
  return series + static_cast<float>(exponent) * kLn2;
}

// 2^(x * log2(e) + kMassBits), x > -kReach.
inline float scaled_power(float x) {
  float power = std::max(x, -kReach) * kLog2e;
  const float whole = std::floor(power + 0.5f);
  power = power - whole;
  float series = 0.0013409993844106793f;
  series = series * power + 0.009676036424934864f;
  series = series * power + 0.05550297349691391f;
  series = series * power + 0.2402210682630539f;
  series = series * power + 0.6931472420692444f;
  series = series * power + 1.0000001192092896f;
  return series * as_float((static_cast<int32_t>(whole) + 127 + kMassBits) << 23);
}

inline int64_t mass(float x) { return x > -kReach ? static_cast<int64_t>(scaled_power(x)) : 0; }

inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

inline float gumbel(uint32_t low, uint32_t high, uint32_t token) {
  const uint32_t bits = mix(mix(token * 0x9e3779b1u + low) ^ high);
  float u = static_cast<float>(bits);
  u = u + 0.5f;
  u = u * 0x1p-32f;
  u = std::min(u, 1.0f - 0x1p-24f);
  const float w = 1.0f - u;
  const float exponential = ((w - 1.0f) + u) / w - logarithm(w);
  return -logarithm(exponential);
}

int64_t share_of(int64_t masses, int64_t share) {
  const int64_t low = ((masses & ((int64_t{1} << kShareBits) - 1)) * share) >> kShareBits;
  return std::max((masses >> kShareBits) * share + low, int64_t{1});
}

struct Best {
  float value;
  int64_t token;
  bool finite;
};

// The largest value and its first place. Not finite where there is a NaN, or the largest is none.
Best best_of(const float* row, int64_t size) {
  float best = -kInfinity;
  int64_t from = 0;
  int32_t unordered = 0;
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t stop = std::min(start + kBlock, size);
    float most[16];
    int32_t odd[16] = {};
    std::fill(most, most + 16, -kInfinity);
    int64_t i = start;
    for (; i + 16 <= stop; i += 16)
      for (int lane = 0; lane < 16; ++lane) {
        const float value = row[i + lane];
        most[lane] = value > most[lane] ? value : most[lane];
        odd[lane] |= value != value;
      }
    for (; i < stop; ++i) {
      most[0] = row[i] > most[0] ? row[i] : most[0];
      odd[0] |= row[i] != row[i];
    }
    float block = most[0];
    for (int lane = 0; lane < 16; ++lane) {
      block = std::max(block, most[lane]);
      unordered |= odd[lane];
    }
    if (block > best) best = block, from = start;
  }
  int64_t token = from;
  while (token + 1 < size && row[token] != best) ++token;
  return {best, token, unordered == 0 && std::isfinite(best)};
}

struct Scratch {
  std::vector<float> row, x;
  std::vector<int32_t> tokens;
  std::vector<uint64_t> keys;
};

void change(const SamplingArgs& a, int64_t at, const float* raw, float* row) {
  const int64_t mask = a.mask_of ? a.mask_of[at] : -1;
  if (mask >= 0) {
    const uint32_t* bits = a.masks + mask * a.mask_words;
    for (int64_t i = 0; i < a.vocab_size; ++i) row[i] = bits[i >> 5] >> (i & 31) & 1 ? raw[i] : -kInfinity;
  } else {
    std::memcpy(row, raw, a.vocab_size * sizeof(float));
  }
  if (a.edit_starts)
    for (int64_t i = a.edit_starts[at]; i < a.edit_starts[at + 1]; ++i) row[a.edit_tokens[i]] += a.edit_biases[i];
  const int64_t penalty = a.penalty_of ? a.penalty_of[at] : -1;
  if (penalty < 0) return;
  const float repetition = a.repetition[penalty], frequency = a.frequency[penalty], presence = a.presence[penalty];
  const uint8_t* in_prompt = a.in_prompt + a.count_rows[penalty] * a.vocab_size;
  const int32_t* in_output = a.in_output + a.count_rows[penalty] * a.vocab_size;
  for (int64_t i = 0; i < a.vocab_size; ++i) {
    const float value = row[i], repeated = value > 0 ? value / repetition : value * repetition;
    const int32_t count = in_output[i];
    float changed = (in_prompt[i] != 0) | (count > 0) ? repeated : value;
    changed = changed - frequency * static_cast<float>(count);
    row[i] = changed - presence * static_cast<float>(count > 0);
  }
}

// Tokens that may win, and what is left of their logits; the best has 0.
int64_t candidates(const float* row, int64_t size, float best, float temperature, float min_p, Scratch& s) {
  s.tokens.resize(size + 16);
  s.x.resize(size + 16);
  const float bound = -kReach * temperature * 1.001f - std::numeric_limits<float>::min();
  int64_t found = 0;
  for (int64_t start = 0; start < size; start += 16) {
    const int64_t stop = std::min(start + 16, size);
    int32_t any = 0;
    for (int64_t i = start; i < stop; ++i) any |= row[i] - best >= bound;
    if (!any) continue;
    for (int64_t i = start; i < stop; ++i) {
      s.tokens[found] = static_cast<int32_t>(i);
      s.x[found] = row[i] - best;
      found += row[i] - best >= bound;
    }
  }
  for (int64_t i = 0; i < found; ++i) s.x[i] = s.x[i] / temperature;
  const float least = min_p > 0 ? logarithm(min_p) : -kInfinity;
  int64_t kept = 0;
  for (int64_t i = 0; i < found; ++i) {
    const float x = s.x[i];
    s.tokens[kept] = s.tokens[i];
    s.x[kept] = x;
    kept += (x > -kReach) & (x >= least);
  }
  return kept;
}

// x is at most 0: the more its magnitude, the further behind; among equal ones the lower token comes first.
inline uint64_t key_of(float x, int32_t token) {
  return static_cast<uint64_t>(static_cast<uint32_t>(as_bits(x)) & 0x7fffffffu) << 32 | static_cast<uint32_t>(token);
}

inline float value_of(uint64_t key) { return -as_float(static_cast<int32_t>(key >> 32)); }

// How many of the first `size` keys top_p leaves; they are put in order as far as that takes.
int64_t cut_by_mass(std::vector<uint64_t>& keys, int64_t size, float top_p) {
  int64_t total = 0;
  for (int64_t i = 0; i < size; ++i) total += mass(value_of(keys[i]));
  const int64_t share = static_cast<int64_t>(std::min(top_p, 1.0f) * 0x1p24f);
  const int64_t limit = share_of(total, share);
  int64_t running = 0, start = 0;
  for (int64_t stop = kShortlist; start < size; start = stop, stop *= 8) {
    stop = std::min(stop, size);
    if (stop < size) std::nth_element(keys.begin() + start, keys.begin() + stop, keys.begin() + size);
    std::sort(keys.begin() + start, keys.begin() + stop);
    for (int64_t i = start; i < stop; ++i) {
      if (running >= limit) return std::max(i, int64_t{1});
      running += mass(value_of(keys[i]));
    }
  }
  return size;
}

// Candidates that top_k and top_p leave, of `found`.
int64_t filter(int64_t found, int64_t top_k, float top_p, Scratch& s) {
  if (top_k >= found && top_p >= 1.0f) return found;
  s.keys.resize(found);
  for (int64_t i = 0; i < found; ++i) s.keys[i] = key_of(s.x[i], s.tokens[i]);
  int64_t kept = found;
  if (top_k < found) {
    std::nth_element(s.keys.begin(), s.keys.begin() + top_k, s.keys.end());
    kept = top_k;
  }
  if (top_p < 1.0f) kept = cut_by_mass(s.keys, kept, top_p);
  for (int64_t i = 0; i < kept; ++i) {
    s.tokens[i] = static_cast<int32_t>(s.keys[i]);
    s.x[i] = value_of(s.keys[i]);
  }
  return kept;
}

int64_t draw(const SamplingArgs& a, int64_t at, const float* row, const Best& best, Scratch& s) {
  if (!(best.value > -kInfinity)) return best.token;  // all were forbidden
  int64_t found = candidates(row, a.vocab_size, best.value, a.temperature[at], a.min_p[at], s);
  found = filter(found, a.top_k[at], a.top_p[at], s);
  const uint32_t low = static_cast<uint32_t>(a.keys[at]), high = static_cast<uint32_t>(a.keys[at] >> 32);
  for (int64_t i = 0; i < found; ++i) s.x[i] = s.x[i] + gumbel(low, high, static_cast<uint32_t>(s.tokens[i]));
  int64_t winner = 0;
  for (int64_t i = 1; i < found; ++i)
    if (s.x[i] > s.x[winner] || (s.x[i] == s.x[winner] && s.tokens[i] < s.tokens[winner])) winner = i;
  return found ? s.tokens[winner] : best.token;
}

// The `width` most likely tokens, falling; of equal ones the lower first. Keeps them in order while it reads.
void most_likely(const float* row, int64_t size, int64_t width, float* top, int64_t* tokens) {
  int64_t held = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (held == width && !(row[i] > top[held - 1])) continue;
    int64_t place = held < width ? held++ : width - 1;
    for (; place > 0 && row[i] > top[place - 1]; --place) {
      top[place] = top[place - 1];
      tokens[place] = tokens[place - 1];
    }
    top[place] = row[i];
    tokens[place] = i;
  }
}

void report(const SamplingArgs& a, int64_t place, const float* row, const Best& best, int64_t token) {
  const float chosen = row[token];
  int64_t rank = 1;
  for (int64_t i = 0; i < a.vocab_size; ++i) rank += row[i] > chosen;
  double total = 0;
  for (int64_t start = 0; start < a.vocab_size; start += kBlock) {
    const int64_t stop = std::min(start + kBlock, a.vocab_size);
    Floats sums = zero();
    int64_t i = start;
    for (; i + kLanes <= stop; i += kLanes) sums = sums + exp(load(row + i) - splat(best.value));
    if (i < stop) {
      Floats rest = splat(-kInfinity);
      std::memcpy(&rest, row + i, (stop - i) * sizeof(float));
      sums = sums + exp(rest - splat(best.value));
    }
    for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
  }
  a.ranks[place] = rank;
  a.chosen[place] = chosen;
  a.best[place] = best.value;
  a.log_totals[place] = static_cast<float>(std::log(total));
  const int64_t width = std::min(a.top_width, a.vocab_size);
  if (width > 0) most_likely(row, a.vocab_size, width, a.top + place * a.top_width, a.top_ids + place * a.top_width);
}

void sample_row(const SamplingArgs& a, int64_t at, Scratch& s) {
  const float* raw = a.logits + at * a.vocab_size;
  const Best first = best_of(raw, a.vocab_size);
  Best best = first;
  const float* row = raw;
  const bool changed = (a.mask_of && a.mask_of[at] >= 0) || (a.penalty_of && a.penalty_of[at] >= 0) ||
                       (a.edit_starts && a.edit_starts[at + 1] > a.edit_starts[at]);
  if (changed) {
    s.row.resize(a.vocab_size);
    change(a, at, raw, s.row.data());
    row = s.row.data();
    best = best_of(row, a.vocab_size);
  }
  int64_t token = best.token;
  if (a.temperature && a.temperature[at] > 0 && first.finite) token = draw(a, at, row, best, s);
  a.token_ids[at] = token;
  a.finite[at] = first.finite;
  if (a.penalty_of && a.penalty_of[at] >= 0)
    ++a.in_output[a.count_rows[a.penalty_of[at]] * a.vocab_size + token];
  if (a.report_of && a.report_of[at] >= 0) report(a, a.report_of[at], raw, first, token);
}

}  // namespace
}  // namespace pagemill

extern "C" void pagemill_sample(const pagemill::SamplingArgs* arguments) {
  const pagemill::SamplingArgs& a = *arguments;
  const int threads = static_cast<int>(
      std::min<int64_t>(a.num_rows, pagemill::threads_for(a.num_rows * a.vocab_size, a.num_threads)));
#pragma omp parallel num_threads(threads)
  {
    thread_local pagemill::Scratch scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t at = 0; at < a.num_rows; ++at) pagemill::sample_row(a, at, scratch);
  }
}
