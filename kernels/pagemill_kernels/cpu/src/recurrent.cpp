// Recurrent layers: a short causal convolution, and recurrences over states at block boundaries and logs of the tokens
// since: the gated delta rule and the state-space duality. The formulas are in recurrent/reference.py and state_space.py.
#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "abi.h"
#include "operations.h"
#include "threads.h"
#include "vec.h"

using namespace pagemill;

namespace {

constexpr int64_t kChannels = 512;  // of one task of a convolution
constexpr float kNormEps = 1e-6f;

// out[r][v] = sum over k of x[r][k] * s[k][v], for kRows rows and columns from v on; returns the first that is left.
template <int kRows, int kVectors>
int64_t multiply_columns(const float* x, int64_t inner, const float* s, int64_t columns, int64_t v, float* out) {
  for (; v + kVectors * kWidest <= columns; v += kVectors * kWidest) {
    Widest totals[kRows][kVectors] = {};
    for (int64_t k = 0; k < inner; ++k)
      for (int n = 0; n < kVectors; ++n) {
        const Widest values = load_as<Widest>(s + k * columns + v + n * kWidest);
        for (int r = 0; r < kRows; ++r) totals[r][n] += values * x[r * inner + k];
      }
    for (int r = 0; r < kRows; ++r)
      for (int n = 0; n < kVectors; ++n) std::memcpy(out + r * columns + v + n * kWidest, &totals[r][n], sizeof(Widest));
  }
  return v;
}

// Few rows take many columns at a time, so that a state is read in the order of the memory.
template <int kRows>
void multiply(const float* x, int64_t inner, const float* s, int64_t columns, float* out) {
  constexpr int kMost = kWidest > kLanes ? 8 : 4;
  int64_t v = 0;
  if constexpr (kRows <= 2) v = multiply_columns<kRows, kMost>(x, inner, s, columns, v, out);
  v = multiply_columns<kRows, 2>(x, inner, s, columns, v, out);
  for (; v < columns; ++v)
    for (int r = 0; r < kRows; ++r) {
      float total = 0.0f;
      for (int64_t k = 0; k < inner; ++k) total += x[r * inner + k] * s[k * columns + v];
      out[r * columns + v] = total;
    }
}

void multiply_rows(const float* x, int64_t rows, int64_t inner, const float* s, int64_t columns, float* out) {
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8) multiply<8>(x + r * inner, inner, s, columns, out + r * columns);
  for (; r + 2 <= rows; r += 2) multiply<2>(x + r * inner, inner, s, columns, out + r * columns);
  for (; r < rows; ++r) multiply<1>(x + r * inner, inner, s, columns, out + r * columns);
}

// after[v] = factor * before[v] + sum over i of shares[i] * values[i][v], for columns from v on; returns the first that is
// left.
template <int kVectors>
int64_t fold_columns(const float* before, float factor, const float* shares, const float* const* values, int64_t count,
                     int64_t columns, int64_t v, float* after) {
  for (; v + kVectors * kWidest <= columns; v += kVectors * kWidest) {
    Widest totals[kVectors];
    for (int n = 0; n < kVectors; ++n) totals[n] = load_as<Widest>(before + v + n * kWidest) * factor;
    for (int64_t i = 0; i < count; ++i)
      for (int n = 0; n < kVectors; ++n) totals[n] += load_as<Widest>(values[i] + v + n * kWidest) * shares[i];
    std::memcpy(after + v, totals, sizeof totals);
  }
  return v;
}

// to[k][v] = factors[k * stride] * from[k][v] + sum over i of weights[i] * keys[i][k] * values[i][v]; to may be from.
// shares: room for `count` values.
void fold(const float* from, const float* factors, int64_t stride, const float* weights, const float* const* keys,
          const float* const* values, int64_t count, int64_t inner, int64_t columns, float* shares, float* to) {
  for (int64_t k = 0; k < inner; ++k) {
    const float factor = factors[k * stride];
    const float* before = from + k * columns;
    float* after = to + k * columns;
    for (int64_t i = 0; i < count; ++i) shares[i] = weights[i] * keys[i][k];
    int64_t v = fold_columns<8>(before, factor, shares, values, count, columns, 0, after);
    v = fold_columns<1>(before, factor, shares, values, count, columns, v, after);
    for (; v < columns; ++v) {
      float total = before[v] * factor;
      for (int64_t i = 0; i < count; ++i) total += values[i][v] * shares[i];
      after[v] = total;
    }
  }
}

float dot(const float* a, const float* b, int64_t size) {
  Floats totals = zero();
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) totals += load(a + i) * load(b + i);
  float total = sum(totals);
  for (; i < size; ++i) total += a[i] * b[i];
  return total;
}

// to += factor * from.
void add(float* to, const float* from, float factor, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(to + i, load(to + i) + load(from + i) * factor);
  for (; i < size; ++i) to[i] += from[i] * factor;
}

// to = from * exp(sums - before), with before null: 0.
void grow(const float* from, const float* sums, const float* before, int64_t size, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    store(to + i, load(from + i) * exp(before ? load(sums + i) - load(before + i) : load(sums + i)));
  for (; i < size; ++i) to[i] = from[i] * std::exp(sums[i] - (before ? before[i] : 0.0f));
}

void normalize(const float* from, int64_t size, float factor, float* to) {
  const float scale = factor / std::sqrt(dot(from, from, size) + kNormEps);
  for (int64_t i = 0; i < size; ++i) to[i] = from[i] * scale;
}

// What a thread needs for one value head of one request.
struct Scratch {
  explicit Scratch(const RecurrenceArgs& a)
      : memory(new float[sizes(a)]), weights(a.block_size, 1.0f), keys(a.block_size), values(a.block_size) {
    float* next = memory.get();
    const auto take = [&next](int64_t size) { return std::exchange(next, next + size); };
    rows = take(2 * a.block_size * a.key_dim);
    read = take(2 * a.block_size * a.value_dim);
    fresh = take(a.block_size * a.value_dim);
    sums = take(a.block_size * a.decay_values);
    steps = take(a.block_size);
    shares = take(a.block_size);
    state = take(a.key_dim * a.value_dim);
    if (a.decay_values == 1) return;
    plain = take(2 * a.block_size * a.key_dim);
    factors = take(2 * a.key_dim);
    std::fill_n(factors, 2 * a.key_dim, 1.0f);
    weighted.resize(a.block_size);
  }

  static int64_t sizes(const RecurrenceArgs& a) {
    const int64_t of_heads = a.block_size * (2 * a.key_dim + 3 * a.value_dim + a.decay_values + 2);
    return of_heads + a.key_dim * a.value_dim + (a.decay_values == 1 ? 0 : 2 * (a.block_size + 1) * a.key_dim);
  }

  std::unique_ptr<float[]> memory;
  std::vector<float> weights;
  float *rows, *read, *fresh, *sums, *steps, *shares, *state;
  float *plain, *factors;  // with decays by channel: queries and keys of new tokens; of the fold; ones
  std::vector<const float*> keys, values, weighted;
};

class Recurrence {
 public:
  Recurrence(const RecurrenceArgs& args, int64_t request) : a(args), request(request) {}

  // Computes a head's outputs, before the norm, and writes its states and what it logs.
  void value_head(int64_t head, Scratch& own) {
    const float* state = a.states + a.sources[request] * a.slot_stride + head * a.key_dim * a.value_dim;
    int64_t write = a.write_starts[request];
    for (int64_t begin = 0; begin < total; begin += a.block_size) {
      const int64_t size = std::min(a.block_size, total - begin);
      by_channel ? channel_group(head, begin, size, state, own) : group(head, begin, size, state, own);
      const int64_t behind = begin / a.block_size + 1;
      if (size == a.block_size && (behind <= folded || begin + size < total)) {
        by_channel ? fold_channels(size, state, own) : fold_heads(size, state, own);
        state = own.state;
        if (write < a.write_starts[request + 1] && a.write_blocks[write] == behind)
          std::copy_n(own.state, a.key_dim * a.value_dim,
                    a.states + a.write_slots[write++] * a.slot_stride + head * a.key_dim * a.value_dim);
      }
      if (!folded) continue;
      // Accepted tokens may be logged and behind the last state. The places they move to are of groups before.
      for (int64_t place = std::max(begin, begin_of_log); place < std::min(begin + size, logged); ++place) {
        float* const from = log_of(place);
        float* const to = log_of(place - begin_of_log);
        std::copy_n(from + log_values_at(head), a.value_dim, to + log_values_at(head));
        std::copy_n(from + log_decay_at(head), a.decay_values, to + log_decay_at(head));
      }
    }
  }

  // Logs the keys behind the last state, once no head reads those that were logged before.
  void log_keys(int64_t key_head) const {
    for (int64_t place = folded ? begin_of_log : logged; place < total; ++place) {
      float* const to = log_of(place - begin_of_log) + key_head * a.key_dim;
      place < logged ? void(std::copy_n(log_of(place) + key_head * a.key_dim, a.key_dim, to))
                     : copy_key(place, key_head, to);
    }
  }

 private:
  const RecurrenceArgs& a;
  const int64_t request;
  const int64_t first = a.starts[request], count = a.starts[request + 1] - first, logged = a.num_logged[request];
  const int64_t total = logged + count;
  const int64_t folded =
      a.write_starts[request + 1] > a.write_starts[request] ? a.write_blocks[a.write_starts[request + 1] - 1] : 0;
  const int64_t begin_of_log = folded * a.block_size;  // first place that the log has behind this step
  float* const log = a.log + a.rows[request] * a.log_stride;
  const bool corrected = a.rates != nullptr, by_channel = a.decay_values > 1;

  int64_t token(int64_t place) const { return first + place - logged; }
  float* log_of(int64_t place) const { return log + place * a.log_values; }
  int64_t log_values_at(int64_t head) const { return a.num_keys * a.key_dim + head * a.value_dim; }
  int64_t log_decay_at(int64_t head) const {
    return a.num_keys * a.key_dim + a.num_values * a.value_dim + head * a.decay_values;
  }

  void copy_key(int64_t place, int64_t key_head, float* to) const {
    const float* from = a.keys + token(place) * a.x_stride + key_head * a.key_dim;
    corrected ? normalize(from, a.key_dim, 1.0f, to) : void(std::copy_n(from, a.key_dim, to));
  }

  void copy_query(int64_t place, int64_t key_head, float* to) const {
    const float* from = a.queries + token(place) * a.x_stride + key_head * a.key_dim;
    corrected ? normalize(from, a.key_dim, 1.0f / std::sqrt(static_cast<float>(a.key_dim)), to)
              : void(std::copy_n(from, a.key_dim, to));
  }

  // `index`: of the head and the value that decays.
  float step_of(int64_t at, int64_t index) const {
    const float step = a.steps[at * a.step_stride + index] + a.biases[index];
    return std::min(std::max(step > 20.0f ? step : std::log1p(std::exp(step)), a.least_step), a.most_step);
  }

  float rate_of(int64_t at, int64_t head) const {
    return a.rate_scale / (1.0f + std::exp(-a.rates[at * a.rate_stride + head]));
  }

  void fold_heads(int64_t size, const float* state, Scratch& own) const {
    for (int64_t i = 0; i < size; ++i) own.weights[i] = std::exp(own.sums[size - 1] - own.sums[i]);
    const float factor = std::exp(own.sums[size - 1]);
    fold(state, &factor, 0, own.weights.data(), own.keys.data(), own.values.data(), size, a.key_dim, a.value_dim,
         own.shares, own.state);
  }

  void fold_channels(int64_t size, const float* state, Scratch& own) const {
    const int64_t kd = a.key_dim;
    const float* const last = own.sums + (size - 1) * kd;
    for (int64_t i = 0; i < size; ++i) {
      grow(own.keys[i], last, own.sums + i * kd, kd, own.rows + i * kd);
      own.weighted[i] = own.rows + i * kd;
    }
    grow(own.factors + kd, last, nullptr, kd, own.factors);
    fold(state, own.factors, 1, own.weights.data(), own.weighted.data(), own.values.data(), size, kd,
         a.value_dim, own.shares, own.state);
  }

  // Is `group` with decays by channel, which are multiplied into queries and keys.
  void channel_group(int64_t head, int64_t begin, int64_t size, const float* state, Scratch& own) {
    const int64_t kd = a.key_dim, vd = a.value_dim, first_channel = head * kd;
    const int64_t known = std::min(std::max<int64_t>(0, logged - begin), size), news = size - known;
    float* const queries = own.plain;
    float* const keys = queries + a.block_size * kd;
    for (int64_t i = 0; i < size; ++i) {
      const int64_t place = begin + i;
      float* const sums = own.sums + i * kd;
      if (i < known) {
        own.keys[i] = log_of(place) + first_channel;
        own.values[i] = log_of(place) + log_values_at(head);
        std::copy_n(log_of(place) + log_decay_at(head), kd, sums);
      } else {
        copy_query(place, head, queries + i * kd);
        copy_key(place, head, keys + i * kd);
        own.keys[i] = keys + i * kd;
        own.values[i] = own.fresh + i * vd;
        for (int64_t d = 0; d < kd; ++d) sums[d] = a.decays[head] * step_of(token(place), first_channel + d);
        if (place >= begin_of_log)
          std::copy_n(sums, kd, log_of(place - begin_of_log) + log_decay_at(head));
      }
      if (i) add(sums, sums - kd, 1.0f, kd);
      if (i < known) continue;
      grow(queries + i * kd, sums, nullptr, kd, own.rows + (i - known) * kd);
      grow(keys + i * kd, sums, nullptr, kd, own.rows + (news + i - known) * kd);
    }
    multiply_rows(own.rows, 2 * news, kd, state, vd, own.read);
    float* const kept = own.rows;
    for (int64_t i = known; i < size; ++i) {
      const int64_t at = token(begin + i);
      const float* const query = queries + i * kd;
      float* const value = own.fresh + i * vd;
      float* const out = a.out + (at * a.num_values + head) * vd;
      std::copy_n(a.values + at * a.x_stride + head * vd, vd, value);
      std::copy_n(own.read + (i - known) * vd, vd, out);
      add(value, own.read + (news + i - known) * vd, -1.0f, vd);
      for (int64_t j = 0; j < i; ++j) {
        grow(own.keys[j], own.sums + i * kd, own.sums + j * kd, kd, kept);
        add(value, own.values[j], -dot(kept, own.keys[i], kd), vd);
        add(out, own.values[j], dot(kept, query, kd), vd);
      }
      const float rate = rate_of(at, head);
      for (int64_t v = 0; v < vd; ++v) value[v] *= rate;
      add(out, value, dot(own.keys[i], query, kd), vd);
      const int64_t place = begin + i - begin_of_log;
      if (place >= 0) std::copy_n(value, vd, log_of(place) + log_values_at(head));
    }
  }

  // Computes the outputs and the values of a group's new tokens; leaves keys, values and sums of decays of all.
  void group(int64_t head, int64_t begin, int64_t size, const float* state, Scratch& own) {
    const int64_t kd = a.key_dim, vd = a.value_dim, key_head = head / (a.num_values / a.num_keys);
    const int64_t known = std::min(std::max<int64_t>(0, logged - begin), size), news = size - known;
    for (int64_t i = 0; i < size; ++i) {
      const int64_t place = begin + i;
      float decay;
      if (i < known) {
        own.keys[i] = log_of(place) + key_head * kd;
        own.values[i] = log_of(place) + log_values_at(head);
        decay = log_of(place)[log_decay_at(head)];
      } else {
        copy_query(place, key_head, own.rows + (i - known) * kd);
        copy_key(place, key_head, own.rows + (news + i - known) * kd);
        own.keys[i] = own.rows + (news + i - known) * kd;
        own.values[i] = own.fresh + i * vd;
        own.steps[i] = step_of(token(place), head);
        decay = a.decays[head] * own.steps[i];
      }
      own.sums[i] = decay + (i ? own.sums[i - 1] : 0.0f);
    }
    multiply_rows(own.rows, (1 + corrected) * news, kd, state, vd, own.read);
    for (int64_t i = known; i < size; ++i) {
      const int64_t at = token(begin + i);
      const float grown = std::exp(own.sums[i]);
      const float* const query = own.rows + (i - known) * kd;
      const float* const given = a.values + at * a.x_stride + head * vd;
      float* const value = own.fresh + i * vd;
      float* const out = a.out + (at * a.num_values + head) * vd;
      std::copy_n(given, vd, value);
      std::fill_n(out, vd, 0.0f);
      add(out, own.read + (i - known) * vd, grown, vd);
      if (corrected) add(value, own.read + (news + i - known) * vd, -grown, vd);
      for (int64_t j = 0; j < i; ++j) {
        const float kept = std::exp(own.sums[i] - own.sums[j]);
        if (corrected) add(value, own.values[j], -kept * dot(own.keys[j], own.keys[i], kd), vd);
        add(out, own.values[j], kept * dot(own.keys[j], query, kd), vd);
      }
      const float rate = corrected ? rate_of(at, head) : own.steps[i];
      for (int64_t v = 0; v < vd; ++v) value[v] *= rate;
      add(out, value, dot(own.keys[i], query, kd), vd);
      if (a.skips) add(out, given, a.skips[head], vd);
      const int64_t place = begin + i - begin_of_log;
      if (place < 0) continue;
      std::copy_n(value, vd, log_of(place) + log_values_at(head));
      log_of(place)[log_decay_at(head)] = a.decays[head] * own.steps[i];
    }
  }
};

// Normalises the outputs of a token that have one norm, and multiplies them by silu or the sigmoid of their gates,
// before or behind.
void gate(const RecurrenceArgs& a, int64_t at, int64_t part) {
  const int64_t size = a.norm_size;
  float* const out = a.out + at * a.num_values * a.value_dim + part * size;
  const float* const gates = a.gates + at * a.gate_stride + part * size;
  const auto multiply_by_gates = [&] {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
      const Floats g = load(gates + i), over = a.sigmoid_gates ? zero() + 1.0f : g;
      store(out + i, load(out + i) * (over / (1.0f + exp(-g))));
    }
    for (; i < size; ++i) out[i] *= (a.sigmoid_gates ? 1.0f : gates[i]) / (1.0f + std::exp(-gates[i]));
  };
  if (a.gates_first) multiply_by_gates();
  if (a.norm) {
    const float* const weights = a.norm + part * a.norm_stride;
    const float scale = 1.0f / std::sqrt(dot(out, out, size) / static_cast<float>(size) + a.eps);
    for (int64_t i = 0; i < size; ++i) out[i] *= scale * weights[i];
  }
  if (!a.gates_first) multiply_by_gates();
}

template <typename Vector>
int64_t convolve_columns(const ConvolutionArgs& a, const float* const* read, int64_t from, int64_t size, int64_t c,
                         float* out) {
  constexpr int64_t kSize = sizeof(Vector) / sizeof(float);
  const float* const taps = a.taps + from;
  for (; c + kSize <= size; c += kSize) {
    Vector total = a.bias ? load_as<Vector>(a.bias + from + c) : Vector{};
    for (int64_t i = 0; i < a.width; ++i) total += load_as<Vector>(read[i] + c) * load_as<Vector>(taps + i * a.channels + c);
    const Vector result = a.activated ? total / (1.0f + exp(-total)) : total;
    std::memcpy(out + c, &result, sizeof result);
  }
  return c;
}

// Computes a token's channels from..from + size. read: the values that each tap multiplies.
void convolve_token(const ConvolutionArgs& a, const float* const* read, int64_t from, int64_t size, float* out) {
  int64_t c = convolve_columns<Widest>(a, read, from, size, 0, out);
  c = convolve_columns<Floats>(a, read, from, size, c, out);
  for (; c < size; ++c) {
    float total = a.bias ? a.bias[from + c] : 0.0f;
    for (int64_t i = 0; i < a.width; ++i) total += read[i][c] * a.taps[i * a.channels + from + c];
    out[c] = a.activated ? total / (1.0f + std::exp(-total)) : total;
  }
}

void convolve(const ConvolutionArgs& a, int64_t request, int64_t from, int64_t size) {
  const int64_t before = a.width - 1, first = a.starts[request], count = a.starts[request + 1] - first;
  const int64_t logged = a.num_logged[request];
  const int64_t accepted = a.num_accepted ? a.num_accepted[request] : 0;
  const int64_t proposed = a.num_proposed ? a.num_proposed[request] : 0;
  float* const inputs = a.inputs + a.rows[request] * a.input_stride;
  const float* kept = logged ? inputs : a.windows + a.sources[request] * a.slot_stride;
  std::vector<float> window((accepted + before) * size);
  for (int64_t i = 0; i < accepted + before; ++i)
    std::copy_n(kept + i * a.channels + from, size, window.data() + i * size);
  const auto at = [&](int64_t index) {  // of the values before, from -accepted on, then those of the step
    return index < before ? window.data() + (accepted + index) * size
                          : a.x + (first + index - before) * a.x_stride + from;
  };
  std::vector<const float*> read(a.width);
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t i = 0; i < a.width; ++i) read[i] = at(t + i);
    convolve_token(a, read.data(), from, size, a.out + (first + t) * a.channels + from);
  }
  for (int64_t w = a.write_starts[request]; w < a.write_starts[request + 1]; ++w)
    for (int64_t i = 0; i < before; ++i)
      std::copy_n(at(a.write_blocks[w] * a.block_size - logged + i), size,
                  a.windows + a.write_slots[w] * a.slot_stride + i * a.channels + from);
  for (int64_t i = 0; i < before + proposed; ++i)
    std::copy_n(at(count - proposed + i), size, inputs + i * a.channels + from);
}

}  // namespace

extern "C" {

// Computes a recurrence for all requests of a step; writes states and logs.
void pagemill_recurrence(const RecurrenceArgs* args) {
  const RecurrenceArgs& a = *args;
  const int64_t num_tokens = a.starts[a.num_requests], parts = a.num_values * a.value_dim / a.norm_size;
  const int threads = threads_for(num_tokens * a.num_values * a.key_dim * a.value_dim, a.num_threads);
  share(threads, a.num_requests * a.num_values, kFine, [&](Pieces pieces) {
    Scratch scratch(a);
    pieces.each([&](int64_t item) {
      Recurrence(a, item / a.num_values).value_head(item % a.num_values, scratch);
    });
  });
  const int64_t num_keys = a.num_requests * a.num_keys, num_gated = a.gates ? num_tokens * parts : 0;
  for_each(threads, num_keys + num_gated, [&](int64_t item) {
    if (item < num_keys)
      Recurrence(a, item / a.num_keys).log_keys(item % a.num_keys);
    else
      gate(a, (item - num_keys) / parts, (item - num_keys) % parts);
  });
}

// Computes the causal convolution of all requests of a step; writes windows and last inputs.
void pagemill_causal_convolution(const ConvolutionArgs* args) {
  const ConvolutionArgs& a = *args;
  const int64_t chunks = (a.channels + kChannels - 1) / kChannels;
  // An activation takes about as long as eight taps, and values kept of each request are moved.
  const int64_t work = a.starts[a.num_requests] * a.channels * (a.width + (a.activated ? 8 : 0));
  for_each(threads_for(work, a.num_threads), a.num_requests * chunks, [&](int64_t item) {
    const int64_t from = item % chunks * kChannels;
    convolve(a, item / chunks, from, std::min(kChannels, a.channels - from));
  });
}

}  // extern "C"
