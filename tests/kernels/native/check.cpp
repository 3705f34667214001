// The kernels beside plain loops in double, for processors on which no Python of ours runs: linked with them, started by
// `make arm64-check` under an emulator. Equality with torch, shape by shape, is what the tests in Python are for.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "../../../kernels/pagemill_kernels/cpu/src/operations.h"

extern "C" {
void pagemill_pack_plain(const void*, int64_t, int64_t, int32_t, void*, int32_t);
void pagemill_pack_codes(const uint8_t*, const float*, const float*, int64_t, int64_t, int32_t, int32_t, uint8_t*, float*,
                         int32_t);
}

using namespace pagemill;

namespace {

int failures = 0;
uint64_t state = 1;

// In -1..1.
float draw() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<float>(static_cast<int32_t>(state >> 32)) / 2147483648.0f;
}

std::vector<float> draws(int64_t count) {
  std::vector<float> values(count);
  for (float& value : values) value = draw();
  return values;
}

void expect_near(const char* what, const float* found, const std::vector<double>& wanted, double tolerance) {
  double worst = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const double off = std::abs(found[i] - wanted[i]) / (1 + std::abs(wanted[i]));
    worst = off <= worst ? worst : off;  // what is not a number is the worst
  }
  const bool holds = worst <= tolerance;
  std::printf("%-34s %s, off by %.1e\n", what, holds ? "holds" : "FAILS", worst);
  failures += !holds;
}

// x W^T + bias
std::vector<double> product(const std::vector<float>& x, int64_t rows, const std::function<double(int64_t, int64_t)>& weight,
                            int64_t outs, int64_t ins, const std::vector<float>& bias) {
  std::vector<double> result;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < outs; ++n) {
      double total = bias[n];
      for (int64_t k = 0; k < ins; ++k) total += x[r * ins + k] * weight(n, k);
      result.push_back(total);
    }
  return result;
}

void check_product(const char* what, const PackedWeight& w, const std::function<double(int64_t, int64_t)>& weight) {
  const std::vector<float> bias = draws(w.out_features);
  for (const int64_t rows : {1, 3, 4, 50}) {
    const std::vector<float> x = draws(rows * w.in_features);
    const std::vector<double> wanted = product(x, rows, weight, w.out_features, w.in_features, bias);
    std::vector<float> first(rows * w.out_features), found(first);
    for (const int32_t threads : {1, 3}) {
      std::vector<float>& out = threads == 1 ? first : found;
      pagemill_linear(&w, x.data(), rows, w.in_features, bias.data(), out.data(), w.out_features, 0, threads);
    }
    char name[64];
    std::snprintf(name, sizeof name, "%s, %d rows", what, static_cast<int>(rows));
    expect_near(name, found.data(), wanted, 1e-4);
    if (std::memcmp(first.data(), found.data(), first.size() * sizeof(float)) != 0)
      ++failures, std::printf("%s: FAILS, other bits on three threads\n", name);
  }
}

void check_plain() {
  const int64_t outs = 100, ins = 96, padded = 112;
  const std::vector<float> weight = draws(outs * ins);
  std::vector<float> packed(padded * ins);
  pagemill_pack_plain(weight.data(), outs, ins, 4, packed.data(), 2);
  const auto* bytes = reinterpret_cast<const uint8_t*>(packed.data());
  check_product("float32", {kFloat32, 0, 0, 0, outs, ins, bytes, nullptr, nullptr, nullptr},
                [&](int64_t n, int64_t k) { return weight[n * ins + k]; });

  std::vector<uint16_t> halves(outs * ins), packed_halves(padded * ins);
  for (size_t i = 0; i < halves.size(); ++i) std::memcpy(&halves[i], reinterpret_cast<const char*>(&weight[i]) + 2, 2);
  pagemill_pack_plain(halves.data(), outs, ins, 2, packed_halves.data(), 2);
  check_product("bfloat16", {kBfloat16, 0, 0, 0, outs, ins, reinterpret_cast<const uint8_t*>(packed_halves.data()), nullptr, nullptr, nullptr},
                [&](int64_t n, int64_t k) {
                  const uint32_t bits = static_cast<uint32_t>(halves[n * ins + k]) << 16;
                  float value;
                  std::memcpy(&value, &bits, sizeof value);
                  return value;
                });
}

void check_codes(const char* what, int32_t format) {
  const int64_t outs = 100, ins = 96, padded = 112, group = 32, groups = ins / group;
  const bool nibbles = format != kCodes8, chosen = format == kFloats4;
  const std::vector<float> table = draws(16);
  std::vector<uint8_t> codes(outs * ins), packed(padded * ins);
  for (uint8_t& code : codes) code = static_cast<uint8_t>(static_cast<int>((draw() + 1) * (nibbles ? 7.9f : 127.0f)));
  const std::vector<float> scales = draws(outs * groups), offsets = draws(outs * groups);
  std::vector<float> packed_scales(padded * groups * 2);
  pagemill_pack_codes(codes.data(), scales.data(), chosen ? nullptr : offsets.data(), outs, ins, format, group,
                      packed.data(), packed_scales.data(), 2);
  check_product(what, {format, group, !chosen, 0, outs, ins, packed.data(), packed_scales.data(), nullptr, table.data()},
                [&](int64_t n, int64_t k) {
                  const int64_t at = n * groups + k / group;
                  const uint8_t code = codes[n * ins + k];
                  if (chosen) return static_cast<double>(table[code]) * scales[at];
                  return (nibbles ? code : static_cast<int8_t>(code)) * static_cast<double>(scales[at]) + offsets[at];
                });
}

void check_norm() {
  const int64_t rows = 70, size = 100;
  const std::vector<float> x = draws(rows * size), weight = draws(size);
  std::vector<float> found(rows * size);
  std::vector<double> wanted;
  pagemill_rms_norm(x.data(), rows, size, 1, size, weight.data(), 1e-5f, found.data(), size, 0, 3);
  for (int64_t r = 0; r < rows; ++r) {
    double squares = 0;
    for (int64_t i = 0; i < size; ++i) squares += x[r * size + i] * static_cast<double>(x[r * size + i]);
    for (int64_t i = 0; i < size; ++i)
      wanted.push_back(x[r * size + i] / std::sqrt(squares / size + 1e-5) * weight[i]);
  }
  expect_near("rms norm", found.data(), wanted, 1e-5);
}

void check_activation() {
  const int64_t rows = 5, size = 37;
  const std::vector<float> x = draws(rows * 2 * size);
  std::vector<float> found(rows * size);
  std::vector<double> wanted;
  pagemill_activate(x.data(), rows, size, kSilu, 1, 0, found.data(), 2);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < size; ++i) {
      const double gate = x[r * 2 * size + i];
      wanted.push_back(gate / (1 + std::exp(-gate)) * x[r * 2 * size + size + i]);
    }
  expect_near("gated silu", found.data(), wanted, 1e-5);
}

// One prompt of 40 tokens, causal, over a cache in float32 whose blocks lie in another order: keys and values go in by
// rope_and_store without a rotation.
void check_attention() {
  const int64_t tokens = 40, heads = 4, kv_heads = 2, dim = 32, block = 16, width = heads + 2 * kv_heads;
  std::vector<float> qkv = draws(tokens * width * dim), found(tokens * heads * dim);
  std::vector<float> cache(4 * 2 * kv_heads * block * dim);
  const std::vector<int32_t> table = {2, 0, 3};
  std::vector<int64_t> slots;
  for (int64_t t = 0; t < tokens; ++t) slots.push_back(table[t / block] * block + t % block);
  pagemill_rope_and_store(qkv.data(), tokens, heads, kv_heads, dim, nullptr, nullptr,
                          reinterpret_cast<uint8_t*>(cache.data()), kCacheFloat32, slots.data(), block,
                          2 * kv_heads * block * dim * 4, 2);
  const std::vector<int64_t> starts = {0, tokens}, lens = {tokens};
  AttentionArgs args = {};
  args.query = qkv.data(), args.query_stride = width * dim, args.cache = cache.data(), args.out = found.data();
  args.block_tables = table.data(), args.block_table_stride = 3, args.query_start_loc = starts.data();
  args.seq_lens = lens.data(), args.num_requests = 1, args.num_heads = heads, args.num_kv_heads = kv_heads;
  args.block_stride = 2 * kv_heads * block * dim * 4;
  args.head_dim = dim, args.block_size = block, args.scale = 0.2f, args.num_threads = 3, args.cache_type = kCacheFloat32;
  pagemill_paged_attention(&args);
  std::vector<double> wanted;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < heads; ++h) {
      const auto row = [&](int64_t at, int64_t head) { return qkv.data() + (at * width + head) * dim; };
      const int64_t kv = h / (heads / kv_heads);
      std::vector<double> sums(dim);
      double total = 0;
      for (int64_t s = 0; s <= t; ++s) {
        double score = 0;
        for (int64_t d = 0; d < dim; ++d) score += row(t, h)[d] * static_cast<double>(row(s, heads + kv)[d]);
        const double weight = std::exp(score * 0.2f);
        total += weight;
        for (int64_t d = 0; d < dim; ++d) sums[d] += weight * row(s, heads + kv_heads + kv)[d];
      }
      for (const double sum : sums) wanted.push_back(sum / total);
    }
  expect_near("paged attention", found.data(), wanted, 1e-5);
}

void check_sampling() {
  const int64_t rows = 3, vocab = 1003;
  const std::vector<float> logits = draws(rows * vocab);
  std::vector<int64_t> tokens(rows);
  std::vector<uint8_t> finite(rows);
  SamplingArgs args = {};
  args.logits = logits.data(), args.num_rows = rows, args.vocab_size = vocab, args.num_threads = 2;
  args.token_ids = tokens.data(), args.finite = finite.data();
  pagemill_sample(&args);
  bool holds = true;
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = logits.data() + r * vocab;
    holds = holds && finite[r] && tokens[r] == std::max_element(row, row + vocab) - row;
  }
  std::printf("%-34s %s\n", "best tokens", holds ? "holds" : "FAILS");
  failures += !holds;
}

}  // namespace

int main() {
  check_plain();
  check_codes("codes of 4 bits", kCodes4);
  check_codes("floats of 4 bits", kFloats4);
  check_codes("codes of 8 bits", kCodes8);
  check_norm();
  check_activation();
  check_attention();
  check_sampling();
  return failures != 0;
}
