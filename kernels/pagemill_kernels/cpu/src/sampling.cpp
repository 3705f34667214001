// Samples one token for each row of logits: masks, edits and penalties, filters, the seeded draw, and reports. It
// mirrors pagemill_kernels/sampling (arithmetic, randomness, filters, reference) and draws the same tokens: each
// product and each sum is rounded once, so the build must not contract them. Rows share nothing; threads take rows.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "abi.h"
#include "operations.h"
#include "vec.h"

// The columns of pagemill_kernels/sampling: filters.DRAWS and penalties.PENALTIES, in the same order.
#define DRAW_COLUMNS(column) \
  column(float32, temperature) column(int32, top_k) column(int32, top_p) column(float32, min_p)
#define PENALTY_COLUMNS(column) \
  column(float32, repetition_penalty) column(float32, frequency_penalty) column(float32, presence_penalty)

namespace pagemill {

using float32 = float;
using int32 = int32_t;
#define COLUMN(type, name) type name;
struct DrawSettings { DRAW_COLUMNS(COLUMN) };
struct PenaltySettings { PENALTY_COLUMNS(COLUMN) };
#undef COLUMN

namespace {

constexpr float kReach = 26.0f;
constexpr int32_t kSqrtHalfBits = 0x3f3504f3;
constexpr float kLn2 = 0.6931471805599453f, kLog2e = 1.4426950408889634f;
constexpr int kMassBits = 40, kShareBits = 24;
constexpr int64_t kWholeShare = int64_t{1} << kShareBits;
constexpr int64_t kShortlist = 1024;  // candidates that are sorted at first
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

// Computes 2^(x * log2(e) + kMassBits), x > -kReach.
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
  const int64_t low = ((masses & (kWholeShare - 1)) * share) >> kShareBits;
  return std::max((masses >> kShareBits) * share + low, int64_t{1});
}

struct Best {
  float value;
  int64_t token;
  bool finite;
};

inline bool any(Ints lanes) {
#ifdef __AVX2__
  return _mm256_movemask_ps((__m256)lanes) != 0;
#else
  int32_t found = 0;
  for (int lane = 0; lane < kLanes; ++lane) found |= lanes[lane];
  return found != 0;
#endif
}

inline Floats as_floats(Ints bits) { return (Floats)bits; }

// Returns the largest value and its first index. `finite` is false if there is a NaN or the largest value is infinite.
Best best_of(const float* row, int64_t size) {
  float best = -kInfinity;
  int64_t from = 0;
  Ints odd = {};
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t stop = std::min(start + kBlock, size);
    Floats most[4] = {splat(-kInfinity), splat(-kInfinity), splat(-kInfinity), splat(-kInfinity)};
    int64_t i = start;
    for (; i + 4 * kLanes <= stop; i += 4 * kLanes)
      for (int part = 0; part < 4; ++part) {
        const Floats value = load(row + i + part * kLanes);
        most[part] = value > most[part] ? value : most[part];
        odd |= value != value;
      }
    float block = -kInfinity;
    for (; i < stop; ++i) {
      block = row[i] > block ? row[i] : block;
      odd[0] |= row[i] != row[i];
    }
    for (const Floats& part : most)
      for (int lane = 0; lane < kLanes; ++lane) block = std::max(block, part[lane]);
    if (block > best) best = block, from = start;
  }
  int64_t token = from;
  while (token + 1 < size && row[token] != best) ++token;
  return {best, token, !any(odd != 0) && std::isfinite(best)};
}

struct Scratch {
  std::vector<float> row;
  std::vector<uint64_t> keys;
};

void change(const SamplingArgs& a, int64_t at, const float* raw, float* row) {
  const int64_t mask = a.mask_of ? a.mask_of[at] : -1;
  if (mask >= 0) {
    const uint32_t* bits = a.masks + mask * a.mask_words;
    for (int64_t start = 0; start < a.vocab_size; start += 32) {
      const uint32_t word = bits[start >> 5];
      const int count = static_cast<int>(std::min<int64_t>(32, a.vocab_size - start));
      for (int i = 0; i < count; ++i) row[start + i] = word >> i & 1 ? raw[start + i] : -kInfinity;
    }
  } else {
    std::memcpy(row, raw, a.vocab_size * sizeof(float));
  }
  if (a.edit_starts)
    for (int64_t i = a.edit_starts[at]; i < a.edit_starts[at + 1]; ++i) row[a.edit_tokens[i]] += a.edit_biases[i];
  const int64_t penalty = a.penalty_of ? a.penalty_of[at] : -1;
  if (penalty < 0) return;
  const PenaltySettings& settings = a.penalties[penalty];
  const float repetition = settings.repetition_penalty, frequency = settings.frequency_penalty;
  const float presence = settings.presence_penalty;
  const uint8_t* in_prompt = a.in_prompt + a.count_rows[penalty] * a.vocab_size;
  const int32_t* in_output = a.in_output + a.count_rows[penalty] * a.vocab_size;
  for (int64_t i = 0; i < a.vocab_size; ++i) {
    const float value = row[i], repeated = value > 0 ? value / repetition : value * repetition;
    const int32_t count = in_output[i];
    float changed = ((in_prompt[i] != 0) | (count > 0)) ? repeated : value;
    changed = changed - frequency * static_cast<float>(count);
    row[i] = changed - presence * static_cast<float>(count > 0);
  }
}

// Keys order tokens by likelihood: x is at most 0, so a larger magnitude comes later; of equal ones the lower token is
// first.
inline uint64_t key_of(float x, int32_t token) {
  return static_cast<uint64_t>(static_cast<uint32_t>(as_bits(x)) & 0x7fffffffu) << 32 | static_cast<uint32_t>(token);
}

inline float value_of(uint64_t key) { return -as_float(static_cast<int32_t>(key >> 32)); }

// A row's logits in a draw: x = (logit - best) / temperature, of which those below `least` are dropped.
struct Scaled {
  const float* row;
  int64_t size;
  float best, temperature, least;

  float at(int64_t i) const { return (row[i] - best) / temperature; }
  Floats lanes(int64_t i) const { return (load(row + i) - splat(best)) / splat(temperature); }
  bool stays(float x) const { return x > -kReach && x >= least; }
};

inline Floats floor_of(Floats value) {
  const Floats whole = to_floats(__builtin_convertvector(value, Ints));
  return whole > value ? whole - splat(1.0f) : whole;
}

// Computes `scaled_power` without its fraction.
inline Floats masses(Floats x) {
  Floats power = (x < splat(-kReach) ? splat(-kReach) : x) * splat(kLog2e);
  const Floats whole = floor_of(power + splat(0.5f));
  power = power - whole;
  Floats series = splat(0.0013409993844106793f);
  series = series * power + splat(0.009676036424934864f);
  series = series * power + splat(0.05550297349691391f);
  series = series * power + splat(0.2402210682630539f);
  series = series * power + splat(0.6931472420692444f);
  series = series * power + splat(1.0000001192092896f);
  const Floats scale = as_floats((__builtin_convertvector(whole, Ints) + (127 + kMassBits)) << 23);
  const Floats mass = series * scale;
  return mass < splat(0x1p23f) ? floor_of(mass < splat(0x1p23f) ? mass : zero()) : mass;  // larger ones are integers
}

int64_t total_mass(const Scaled& s) {
  typedef double Doubles __attribute__((vector_size(64)));
  int64_t total = 0, i = 0;
  while (i + kLanes <= s.size) {
    Doubles sums = {};  // exact for so few masses
    const int64_t stop = std::min(i + kBlock, s.size - s.size % kLanes);
    for (; i < stop; i += kLanes) {
      const Floats x = s.lanes(i);
      const Ints stays = (x > splat(-kReach)) & (x >= splat(s.least));
      sums += __builtin_convertvector(stays ? masses(x) : zero(), Doubles);
    }
    for (int lane = 0; lane < kLanes; ++lane) total += static_cast<int64_t>(sums[lane]);
  }
  for (; i < s.size; ++i) total += s.stays(s.at(i)) ? mass(s.at(i)) : 0;
  return total;
}

// Collects the keys of the candidates with x > -reach.
void gather(const Scaled& s, float reach, std::vector<uint64_t>& keys) {
  keys.clear();
  const float bound = -reach * s.temperature * 1.001f - std::numeric_limits<float>::min();
  const auto take = [&](int64_t i) {
    const float x = s.at(i);
    if (x > -reach && s.stays(x)) keys.push_back(key_of(x, static_cast<int32_t>(i)));
  };
  int64_t i = 0;
  for (; i + kLanes <= s.size; i += kLanes) {
    if (!any(load(s.row + i) - splat(s.best) >= splat(bound))) continue;
    for (int lane = 0; lane < kLanes; ++lane) take(i + lane);
  }
  for (; i < s.size; ++i) take(i);
}

// Returns how many of the first `size` keys are needed to reach the mass `limit`, -1 if they do not reach it. The keys
// are sorted only as far as necessary.
int64_t cut_by_mass(std::vector<uint64_t>& keys, int64_t size, int64_t limit) {
  int64_t running = 0, start = 0;
  for (int64_t stop = kShortlist; start < size; start = stop, stop *= 8) {
    stop = std::min(stop, size);
    if (stop < size) std::nth_element(keys.begin() + start, keys.begin() + stop, keys.begin() + size);
    std::sort(keys.begin() + start, keys.begin() + stop);
    for (int64_t i = start; i < stop; ++i) {
      running += mass(value_of(keys[i]));
      if (running >= limit) return i + 1;
    }
  }
  return -1;
}

// Collects the keys of the tokens that pass top_k and top_p. Most rows are decided among few tokens near the best one.
void filter(const Scaled& s, int64_t top_k, int64_t share, std::vector<uint64_t>& keys) {
  const bool by_count = top_k < s.size, by_mass = share < kWholeShare;
  int64_t total = by_count || !by_mass ? 0 : total_mass(s);
  for (const float reach : {4.0f, 10.0f, kReach}) {
    gather(s, reach, keys);
    int64_t kept = static_cast<int64_t>(keys.size());
    if (by_count && kept < top_k && reach < kReach) continue;
    if (by_count && kept > top_k) {
      std::nth_element(keys.begin(), keys.begin() + top_k, keys.end());
      kept = top_k;
    }
    if (by_mass) {
      if (by_count) {
        total = 0;
        for (int64_t i = 0; i < kept; ++i) total += mass(value_of(keys[i]));
      }
      const int64_t cut = cut_by_mass(keys, kept, share_of(total, share));
      if (cut < 0 && reach < kReach) continue;
      kept = cut < 0 ? kept : cut;
    }
    keys.resize(kept);
    return;
  }
}

struct Winner {
  float sum;
  int64_t token;

  void meet(float x, int64_t i, uint64_t key) {
    const float noisy =
        x + gumbel(static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(i));
    if (noisy > sum || (noisy == sum && i < token)) sum = noisy, token = i;
  }
};

// Draws among all candidates. Noise is at most -log(u) with the uniform number u: if that is too little to win, by an
// upper bound of 2^t (linear between powers of two, raised by a thousandth), no logarithm is computed. `first` is the id
// of the first token.
void meet_all(const Scaled& s, int64_t first, uint64_t key, Winner& winner) {
  const Words low = Words{} + static_cast<uint32_t>(key), high = Words{} + static_cast<uint32_t>(key >> 32);
  Words tokens = Words{0, 1, 2, 3, 4, 5, 6, 7} + static_cast<uint32_t>(first);
  const auto mixed = [](Words x) {
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    return x ^ (x >> 16);
  };
  int64_t i = 0;
  for (; i + kLanes <= s.size; i += kLanes, tokens += kLanes) {
    const Floats x = s.lanes(i);
    const Ints stays = (x > splat(-kReach)) & (x >= splat(s.least));
    const Words bits = mixed(mixed(tokens * 0x9e3779b1u + low) ^ high);
    const Floats uniform = to_floats((Ints)(bits >> 8)) * splat(0x1p-24f);
    const Floats t = (x - splat(winner.sum)) * splat(kLog2e);
    const Floats clipped = t < splat(-60.0f) ? splat(-60.0f) : t;
    const Floats power = as_floats(__builtin_convertvector((clipped + splat(127.0f)) * splat(0x1p23f), Ints));
    const Ints wins = stays & (uniform < power * splat(1.001f) + splat(0x1p-22f));
    if (!any(wins)) continue;
    for (int lane = 0; lane < kLanes; ++lane)
      if (wins[lane]) winner.meet(x[lane], first + i + lane, key);
  }
  for (; i < s.size; ++i)
    if (s.stays(s.at(i))) winner.meet(s.at(i), first + i, key);
}

int64_t draw(const SamplingArgs& a, int64_t at, const float* row, const Best& best, std::vector<uint64_t>& keys) {
  if (!(best.value > -kInfinity)) return best.token;  // all tokens were forbidden
  const DrawSettings& settings = a.draws[at];
  Scaled scaled{row, a.vocab_size, best.value, settings.temperature, settings.min_p};
  Winner winner{-kInfinity, best.token};
  winner.meet(0.0f, best.token, a.keys[at]);
  if (settings.top_k >= a.vocab_size && settings.top_p >= kWholeShare) {
    meet_all(scaled, 0, a.keys[at], winner);
    return winner.token;
  }
  filter(scaled, settings.top_k, settings.top_p, keys);
  for (const uint64_t key : keys) winner.meet(value_of(key), static_cast<uint32_t>(key), a.keys[at]);
  return winner.token;
}

// Returns the `width` most likely tokens, descending, of equal ones the lower first. It keeps them sorted while it
// reads.
void most_likely(const float* row, int64_t size, int64_t width, float* top, int64_t* tokens) {
  int64_t held = 0;
  const auto meet = [&](int64_t i) {
    if (held == width && !(row[i] > top[held - 1])) return;
    int64_t place = held < width ? held++ : width - 1;
    for (; place > 0 && row[i] > top[place - 1]; --place) {
      top[place] = top[place - 1];
      tokens[place] = tokens[place - 1];
    }
    top[place] = row[i];
    tokens[place] = i;
  };
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    if (held == width && !any(load(row + i) > splat(top[held - 1]))) continue;
    for (int lane = 0; lane < kLanes; ++lane) meet(i + lane);
  }
  for (; i < size; ++i) meet(i);
}

void report(const SamplingArgs& a, int64_t place, const float* row, const Best& best, int64_t token) {
  const float chosen = row[token];
  int32_t rank = 1;
  for (int64_t i = 0; i < a.vocab_size; ++i) rank += row[i] > chosen;
  // Masses are integers, so that ranks which divide the vocabulary add up the same total.
  const double total = static_cast<double>(total_mass(Scaled{row, a.vocab_size, best.value, 1.0f, -kInfinity}));
  a.ranks[place] = rank;
  a.chosen[place] = chosen;
  a.best[place] = best.value;
  a.log_totals[place] = static_cast<float>(std::log(total * 0x1p-40));
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
  if (a.draws && a.draws[at].temperature > 0 && first.finite) token = draw(a, at, row, best, s.keys);
  a.token_ids[at] = token;
  a.finite[at] = first.finite;
  if (a.penalty_of && a.penalty_of[at] >= 0)
    ++a.in_output[a.count_rows[a.penalty_of[at]] * a.vocab_size + token];
  if (a.report_of && a.report_of[at] >= 0) report(a, a.report_of[at], raw, first, token);
}

// Computes what rank 0 needs of a part of the vocabulary to draw from all of it: the winner of a row whose tokens may all
// be drawn, or the likeliest candidates of one with filters.
void part_of_row(const PartArgs& a, int64_t at, std::vector<uint64_t>& keys) {
  const float* row = a.logits + at * a.num_tokens;
  const DrawSettings& settings = a.draws[at];
  const Scaled scaled{row, a.num_tokens, a.best[at], settings.temperature, settings.min_p};
  a.sums[at] = -kInfinity, a.token_ids[at] = a.first, a.masses[at] = 0, a.counts[at] = 0;
  if (settings.top_k >= a.vocab_size && settings.top_p >= kWholeShare) {
    const int64_t own = best_of(row, a.num_tokens).token;
    if (!scaled.stays(scaled.at(own))) return;
    Winner winner{-kInfinity, a.first + own};
    winner.meet(scaled.at(own), a.first + own, a.keys[at]);
    meet_all(scaled, a.first, a.keys[at], winner);
    a.sums[at] = winner.sum, a.token_ids[at] = winner.token;
    return;
  }
  if (settings.top_k >= a.vocab_size) a.masses[at] = total_mass(scaled);
  for (const float reach : {4.0f, 10.0f, kReach}) {
    gather(scaled, reach, keys);
    if (static_cast<int64_t>(keys.size()) >= a.width) break;
  }
  const int64_t count = std::min(static_cast<int64_t>(keys.size()), a.width);
  if (count < static_cast<int64_t>(keys.size())) std::nth_element(keys.begin(), keys.begin() + count, keys.end());
  std::sort(keys.begin(), keys.begin() + count);
  for (int64_t i = 0; i < count; ++i) a.candidates[at * a.width + i] = keys[i] + static_cast<uint64_t>(a.first);
  a.counts[at] = count;
}

// Calls `work` with each row and the thread's memory, on as many threads as the work is worth.
template <typename Work>
void each_row(int64_t num_rows, int64_t num_tokens, int32_t num_threads, Work work) {
  const int threads = static_cast<int>(std::min<int64_t>(num_rows, threads_for(num_rows * num_tokens, num_threads)));
  share(threads, num_rows, kSingly, [&](Pieces pieces) {
    thread_local Scratch scratch;
    pieces.each([&](int64_t at) { work(at, scratch); });
  });
}

}  // namespace
}  // namespace pagemill

// Describes the columns of this library, so that one of other sources is not used: sampling/native.py.
extern "C" const char* pagemill_sampling_columns() {
#define TEXT(type, name) #type " " #name "\n"
  return DRAW_COLUMNS(TEXT) "\n" PENALTY_COLUMNS(TEXT);
#undef TEXT
}

extern "C" void pagemill_sample(const pagemill::SamplingArgs* arguments) {
  const pagemill::SamplingArgs& a = *arguments;
  pagemill::each_row(a.num_rows, a.vocab_size, a.num_threads,
                     [&](int64_t at, pagemill::Scratch& scratch) { pagemill::sample_row(a, at, scratch); });
}

// Computes the reports of rows with given tokens: row i is report i.
extern "C" void pagemill_report(const pagemill::SamplingArgs* arguments) {
  const pagemill::SamplingArgs& a = *arguments;
  pagemill::each_row(a.num_rows, a.vocab_size, a.num_threads, [&](int64_t at, pagemill::Scratch&) {
    const float* row = a.logits + at * a.vocab_size;
    pagemill::report(a, at, row, pagemill::best_of(row, a.vocab_size), a.token_ids[at]);
  });
}

extern "C" void pagemill_sample_part(const pagemill::PartArgs* arguments) {
  const pagemill::PartArgs& a = *arguments;
  pagemill::each_row(a.num_rows, a.num_tokens, a.num_threads,
                     [&](int64_t at, pagemill::Scratch& scratch) { pagemill::part_of_row(a, at, scratch.keys); });
}
