// Recurrent layers: a short causal convolution, and the gated delta rule over states at block boundaries and logs of the
// tokens since. The formulas are in recurrent/reference.py.
#include <algorithm>
#include <cmath>
#include <vector>

#include "abi.h"
#include "operations.h"
#include "threads.h"
#include "vec.h"

using namespace pagemill;

namespace {

constexpr int64_t kChannels = 512;  // of one task of a convolution
constexpr float kNormEps = 1e-6f;

// out[r][v] = sum over k of x[r][k] * s[k][v], for kRows rows.
template <int kRows>
void multiply(const float* x, int64_t inner, const float* s, int64_t columns, float* out) {
  int64_t v = 0;
  for (; v + 2 * kWidest <= columns; v += 2 * kWidest) {
    Widest left[kRows] = {}, right[kRows] = {};
    for (int64_t k = 0; k < inner; ++k) {
      const Widest a = load_as<Widest>(s + k * columns + v), b = load_as<Widest>(s + k * columns + v + kWidest);
      for (int r = 0; r < kRows; ++r) {
        left[r] += a * x[r * inner + k];
        right[r] += b * x[r * inner + k];
      }
    }
    for (int r = 0; r < kRows; ++r) {
      std::memcpy(out + r * columns + v, &left[r], sizeof(Widest));
      std::memcpy(out + r * columns + v + kWidest, &right[r], sizeof(Widest));
    }
  }
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
}

// to[k][v] = factor * from[k][v] + sum over i of weights[i] * keys[i][k] * values[i][v]; to may be from.
void fold(const float* from, float factor, const float* weights, const float* keys, const float* values, int64_t count,
          int64_t inner, int64_t columns, float* to) {
  for (int64_t k = 0; k < inner; ++k) {
    const float* before = from + k * columns;
    float* after = to + k * columns;
    int64_t v = 0;
    for (; v + kWidest <= columns; v += kWidest) {
      Widest total = load_as<Widest>(before + v) * factor;
      for (int64_t i = 0; i < count; ++i)
        total += load_as<Widest>(values + i * columns + v) * (weights[i] * keys[i * inner + k]);
      std::memcpy(after + v, &total, sizeof total);
    }
    for (; v < columns; ++v) {
      float total = before[v] * factor;
      for (int64_t i = 0; i < count; ++i) total += values[i * columns + v] * (weights[i] * keys[i * inner + k]);
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

void normalize(const float* from, int64_t size, float factor, float* to) {
  const float scale = factor / std::sqrt(dot(from, from, size) + kNormEps);
  for (int64_t i = 0; i < size; ++i) to[i] = from[i] * scale;
}

// What a thread needs for the heads of one key head of one request.
struct Scratch {
  Scratch(const DeltaRuleArgs& a)
      : keys(a.block_size * a.key_dim), queries(a.block_size * a.key_dim), both(2 * a.block_size * a.key_dim),
        read(2 * a.block_size * a.value_dim), values(a.block_size * a.value_dim), sums(a.block_size),
        weights(a.block_size), state(a.key_dim * a.value_dim) {}
  std::vector<float> keys, queries, both, read, values, sums, weights, state;
};

class DeltaRule {
 public:
  DeltaRule(const DeltaRuleArgs& args, Scratch& scratch, int64_t request, int64_t key_head)
      : a(args), own(scratch), request(request), key_head(key_head) {}

  void run() {
    const int64_t repeats = a.num_values / a.num_keys;
    for (int64_t h = key_head * repeats; h < (key_head + 1) * repeats; ++h) value_head(h);
    log_keys();
  }

 private:
  const DeltaRuleArgs& a;
  Scratch& own;
  const int64_t request, key_head;
  const int64_t first = a.starts[request], count = a.starts[request + 1] - first, logged = a.num_logged[request];
  const int64_t total = logged + count;
  const int64_t folded =
      a.write_starts[request + 1] > a.write_starts[request] ? a.write_blocks[a.write_starts[request + 1] - 1] : 0;
  float* const log = a.log + a.rows[request] * a.log_stride;

  const float* token(int64_t place) const { return a.x + (first + place - logged) * a.x_stride; }
  float* log_of(int64_t place) const { return log + place * a.log_values; }
  int64_t log_values_at(int64_t head) const { return a.num_keys * a.key_dim + head * a.value_dim; }
  int64_t log_decay_at(int64_t head) const { return a.num_keys * a.key_dim + a.num_values * a.value_dim + head; }

  float decay_of(int64_t at, int64_t head) const {
    const float step = a.rates[(2 * at + 1) * a.num_values + head] + a.biases[head];
    return a.decays[head] * (step > 20.0f ? step : std::log1p(std::exp(step)));
  }

  // Normalises the values of a head and multiplies them by silu of their gates.
  void gate(const float* gates, float* out) const {
    const int64_t size = a.value_dim;
    const float scale = 1.0f / std::sqrt(dot(out, out, size) / static_cast<float>(size) + a.eps);
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
      const Floats g = load(gates + i);
      store(out + i, load(out + i) * scale * load(a.norm + i) * (g / (1.0f + exp(-g))));
    }
    for (; i < size; ++i) out[i] *= scale * a.norm[i] * (gates[i] / (1.0f + std::exp(-gates[i])));
  }

  void value_head(int64_t head) {
    const float* state = a.states + a.sources[request] * a.slot_stride + head * a.key_dim * a.value_dim;
    int64_t write = a.write_starts[request];
    for (int64_t begin = 0; begin < total; begin += a.block_size) {
      const int64_t size = std::min(a.block_size, total - begin);
      group(head, begin, size, state);
      const int64_t behind = begin / a.block_size + 1;
      if (size < a.block_size || (behind > folded && begin + size == total)) continue;
      for (int64_t i = 0; i < size; ++i) own.weights[i] = std::exp(own.sums[size - 1] - own.sums[i]);
      fold(state, std::exp(own.sums[size - 1]), own.weights.data(), own.keys.data(), own.values.data(), size,
           a.key_dim, a.value_dim, own.state.data());
      state = own.state.data();
      if (write < a.write_starts[request + 1] && a.write_blocks[write] == behind)
        std::copy(own.state.begin(), own.state.end(),
                  a.states + a.write_slots[write++] * a.slot_stride + head * a.key_dim * a.value_dim);
    }
  }

  // Computes the outputs and corrected values of a group's new tokens; leaves keys, values and sums of decays of all.
  void group(int64_t head, int64_t begin, int64_t size, const float* state) {
    const int64_t kd = a.key_dim, vd = a.value_dim, fresh = std::max<int64_t>(0, logged - begin);
    const int64_t known = std::min(fresh, size), news = size - known;
    float* const keys = own.keys.data();
    for (int64_t i = 0; i < size; ++i) {
      const int64_t place = begin + i;
      const float* from = log_of(place);
      float decay;
      if (i < known) {
        std::copy_n(from + key_head * kd, kd, keys + i * kd);
        std::copy_n(from + log_values_at(head), vd, own.values.data() + i * vd);
        decay = from[log_decay_at(head)];
      } else {
        normalize(token(place) + (a.num_keys + key_head) * kd, kd, 1.0f, keys + i * kd);
        normalize(token(place) + key_head * kd, kd, 1.0f / std::sqrt(static_cast<float>(kd)),
                  own.queries.data() + i * kd);
        std::copy_n(keys + i * kd, kd, own.both.data() + (i - known) * kd);
        std::copy_n(own.queries.data() + i * kd, kd, own.both.data() + (news + i - known) * kd);
        decay = decay_of(first + place - logged, head);
      }
      own.sums[i] = decay + (i ? own.sums[i - 1] : 0.0f);
    }
    multiply_rows(own.both.data(), 2 * news, kd, state, vd, own.read.data());
    for (int64_t i = known; i < size; ++i) {
      const int64_t at = first + begin + i - logged;
      const float grown = std::exp(own.sums[i]);
      const float rate = 1.0f / (1.0f + std::exp(-a.rates[2 * at * a.num_values + head]));
      float* const value = own.values.data() + i * vd;
      float* const out = a.out + (at * a.num_values + head) * vd;
      std::copy_n(token(begin + i) + 2 * a.num_keys * kd + head * vd, vd, value);
      add(value, own.read.data() + (i - known) * vd, -grown, vd);
      std::fill_n(out, vd, 0.0f);
      add(out, own.read.data() + (news + i - known) * vd, grown, vd);
      for (int64_t j = 0; j < i; ++j) {
        const float kept = std::exp(own.sums[i] - own.sums[j]);
        add(value, own.values.data() + j * vd, -kept * dot(keys + j * kd, keys + i * kd, kd), vd);
        add(out, own.values.data() + j * vd, kept * dot(keys + j * kd, own.queries.data() + i * kd, kd), vd);
      }
      for (int64_t v = 0; v < vd; ++v) value[v] *= rate;
      add(out, value, dot(keys + i * kd, own.queries.data() + i * kd, kd), vd);
      gate(a.gates + at * a.gate_stride + head * vd, out);
      const int64_t place = begin + i - folded * a.block_size;
      if (place < 0) continue;
      std::copy_n(value, vd, log_of(place) + log_values_at(head));
      log_of(place)[log_decay_at(head)] = decay_of(at, head);
    }
  }

  // Logs the keys of new tokens behind the last state, once no head reads those that were logged before.
  void log_keys() {
    for (int64_t place = std::max(logged, folded * a.block_size); place < total; ++place)
      normalize(token(place) + (a.num_keys + key_head) * a.key_dim, a.key_dim, 1.0f,
                log_of(place - folded * a.block_size) + key_head * a.key_dim);
  }
};

void convolve(const ConvolutionArgs& a, int64_t request, int64_t from, int64_t size) {
  const int64_t before = a.width - 1, first = a.starts[request], count = a.starts[request + 1] - first;
  const int64_t logged = a.num_logged[request];
  float* const inputs = a.inputs + a.rows[request] * before * a.channels;
  const float* kept = logged ? inputs : a.windows + a.sources[request] * a.slot_stride;
  std::vector<float> window(before * size);
  for (int64_t i = 0; i < before; ++i) std::copy_n(kept + i * a.channels + from, size, window.data() + i * size);
  const auto at = [&](int64_t index) {  // of the values before, then those of the step
    return index < before ? window.data() + index * size : a.x + (first + index - before) * a.x_stride + from;
  };
  for (int64_t t = 0; t < count; ++t) {
    float* const out = a.out + (first + t) * a.channels + from;
    int64_t c = 0;
    for (; c + kLanes <= size; c += kLanes) {
      Floats total = a.bias ? load(a.bias + from + c) : zero();
      for (int64_t i = 0; i < a.width; ++i) total += load(at(t + i) + c) * load(a.taps + i * a.channels + from + c);
      store(out + c, a.activated ? total / (1.0f + exp(-total)) : total);
    }
    for (; c < size; ++c) {
      float total = a.bias ? a.bias[from + c] : 0.0f;
      for (int64_t i = 0; i < a.width; ++i) total += at(t + i)[c] * a.taps[i * a.channels + from + c];
      out[c] = a.activated ? total / (1.0f + std::exp(-total)) : total;
    }
  }
  for (int64_t w = a.write_starts[request]; w < a.write_starts[request + 1]; ++w)
    for (int64_t i = 0; i < before; ++i)
      std::copy_n(at(a.write_blocks[w] * a.block_size - logged + i), size,
                  a.windows + a.write_slots[w] * a.slot_stride + i * a.channels + from);
  for (int64_t i = 0; i < before; ++i) std::copy_n(at(count + i), size, inputs + i * a.channels + from);
}

}  // namespace

extern "C" {

// Computes the gated delta rule for all requests of a step; writes states and logs.
void pagemill_delta_rule(const DeltaRuleArgs* args) {
  const DeltaRuleArgs& a = *args;
  const int64_t work = a.starts[a.num_requests] * a.num_values * a.key_dim * a.value_dim;
  share(threads_for(work, a.num_threads), a.num_requests * a.num_keys, kFine, [&](Pieces pieces) {
    Scratch scratch(a);
    pieces.each([&](int64_t item) { DeltaRule(a, scratch, item / a.num_keys, item % a.num_keys).run(); });
  });
}

// Computes the causal convolution of all requests of a step; writes windows and last inputs.
void pagemill_causal_convolution(const ConvolutionArgs* args) {
  const ConvolutionArgs& a = *args;
  const int64_t chunks = (a.channels + kChannels - 1) / kChannels;
  const int64_t work = a.starts[a.num_requests] * a.channels * a.width;
  for_each(threads_for(work, a.num_threads), a.num_requests * chunks, [&](int64_t item) {
    const int64_t from = item % chunks * kChannels;
    convolve(a, item / chunks, from, std::min(kChannels, a.channels - from));
  });
}

}  // extern "C"
