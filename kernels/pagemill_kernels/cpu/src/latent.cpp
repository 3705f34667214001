// Attention over a cache of latents (MLA): the matrices from a latent to each head's key and value are multiplied into
// queries and results, so that attention reads one vector per token, whose first values are the value.
//
// The tokens of a step are taken in waves: all heads' latents of a wave stay in the caches, and each head's matrices are
// read once for all of its tokens. A row's result depends only on its own query and context.
#include <algorithm>
#include <vector>

#include "attention.h"
#include "operations.h"

namespace pagemill {
namespace {

constexpr int64_t kWaveRows = 4096;  // heads of a wave's tokens

// Up to kMaxRows tokens of one request; `token`: the first one's index in the step.
struct Tile {
  int64_t request, first_token, num_tokens, token;
};

struct Item {
  const Tile* tile;
  int64_t first_head, num_heads;
};

// Calls body(part, row within it) for the part of B with the row of an output, if the adapter has one.
template <typename Body>
void with_part(const AdapterWeights& m, int64_t output, Body body) {
  for (int64_t p = 0; p < m.num_parts; ++p) {
    const int64_t row = output - m.parts[p].first_output;
    if (row >= 0 && row < m.parts[p].outputs) body(m.parts[p], row);
  }
}

float b_value(const AdapterPart& part, int64_t row, int64_t k) {
  return from_bfloat16(part.b[(row / kAdapterPanel * part.rank + k) * kAdapterPanel + row % kAdapterPanel]);
}

struct Wave {
  const LatentWeights& w;
  const AttentionArgs& args;
  const StepAdapters* adapters;
  const int64_t number;  // of the linear layer from latents to keys and values
  float* latents;        // [tokens][num_heads][width]
  const int64_t first, tokens;
  const int64_t size = args.head_dim, width = padded(size), heads = args.num_heads;
  const int64_t query_size = w.key_dim + w.shared_size;

  const float* query(int64_t token, int64_t head) const {
    return args.query + (first + token) * args.query_stride + head * query_size;
  }
  float* latent(int64_t token, int64_t head) const { return latents + (token * heads + head) * width; }
  float* out(int64_t token, int64_t head) const { return args.out + ((first + token) * heads + head) * w.value_dim; }
  const AdapterWeights* adapter(int64_t token) const {
    const int32_t slot = adapters ? adapters->slots[first + token] : -1;
    return slot < 0 ? nullptr : adapters->matrices[slot * adapters->num_linears + number];
  }

  // Maps the queries of all tokens to latents with the same scores.
  void to_latents(int64_t head) const {
    pagemill_linear(w.keys[head], query(0, head), tokens, args.query_stride, nullptr, latent(0, head), heads * width, 0, 1);
    std::vector<float> sums;
    for (int64_t t = 0; adapters && t < tokens; ++t) {
      const AdapterWeights* m = adapter(t);
      if (!m) continue;
      sums.assign(m->rank, 0.0f);
      for (int64_t d = 0; d < w.key_dim; ++d)
        with_part(*m, head * (w.key_dim + w.value_dim) + d, [&](const AdapterPart& part, int64_t row) {
          for (int64_t k = 0; k < part.rank; ++k) sums[part.first_rank + k] += query(t, head)[d] * b_value(part, row, k);
        });
      for (int64_t i = 0; i < w.latent_size; ++i)
        for (int64_t k = 0; k < m->rank; ++k) latent(t, head)[i] += sums[k] * from_bfloat16(m->a[i * m->rank + k]);
    }
  }

  // Maps attended latents to values.
  void to_values(int64_t head) const {
    pagemill_linear(w.values[head], latent(0, head), tokens, heads * width, nullptr, out(0, head), heads * w.value_dim, 0, 1);
    std::vector<float> sums;
    for (int64_t t = 0; adapters && t < tokens; ++t) {
      const AdapterWeights* m = adapter(t);
      if (!m) continue;
      sums.assign(m->rank, 0.0f);
      for (int64_t i = 0; i < w.latent_size; ++i)
        for (int64_t k = 0; k < m->rank; ++k) sums[k] += latent(t, head)[i] * from_bfloat16(m->a[i * m->rank + k]);
      for (int64_t d = 0; d < w.value_dim; ++d)
        with_part(*m, head * (w.key_dim + w.value_dim) + w.key_dim + d, [&](const AdapterPart& part, int64_t row) {
          for (int64_t k = 0; k < part.rank; ++k) out(t, head)[d] += sums[part.first_rank + k] * b_value(part, row, k);
        });
    }
  }

  // Attends with some heads of a tile, whose latents become those of the result.
  void attend(const Item& item, AttentionScratch& scratch) const {
    const Tile& tile = *item.tile;
    const int64_t at = tile.token - first, group = item.num_heads, rows = tile.num_tokens * group;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t token = at + row / group, head = item.first_head + row % group;
      const float *plain = latent(token, head), *shared = query(token, head) + w.key_dim;
      float* to = scratch.query + row * width;
      for (int64_t i = 0; i < w.latent_size; ++i) to[i] = plain[i] * args.scale;
      for (int64_t i = 0; i < w.shared_size; ++i) to[w.latent_size + i] = shared[i] * args.scale;
      std::fill(to + size, to + width, 0.0f);
      scratch.row_max[row] = -INFINITY;
      scratch.row_sum[row] = 0.0f;
    }
    attend_rows(args, {tile.request, 0, tile.first_token, tile.num_tokens}, group, scratch);
    for (int64_t row = 0; row < rows; ++row) {
      float* to = latent(at + row / group, item.first_head + row % group);
      const float inverse = 1.0f / scratch.row_sum[row];
      for (int64_t i = 0; i < w.latent_size; ++i) to[i] = scratch.result[row * width + i] * inverse;
    }
  }

  void run(const Tile* begin, const Tile* end) const {
    const int32_t threads = args.num_threads;
    for_each(threads, heads, [&](int64_t head) { to_latents(head); });
    // Each thread has an item where that leaves enough rows for a tile.
    const int64_t share_of = std::max<int64_t>(8, (heads * (end - begin) + threads - 1) / threads);
    std::vector<Item> items;
    for (const Tile* tile = begin; tile < end; ++tile) {
      const int64_t most = std::min(share_of, std::max<int64_t>(1, kMaxRows / tile->num_tokens));
      for (int64_t head = 0; head < heads; head += most) items.push_back({tile, head, std::min(most, heads - head)});
    }
    share(threads, static_cast<int64_t>(items.size()), kSingly, [&](Pieces pieces) {
      AttentionScratch scratch;
      pieces.each([&](int64_t i) { attend(items[i], scratch); });
    });
    for_each(threads, heads, [&](int64_t head) { to_values(head); });
  }
};

}  // namespace
}  // namespace pagemill

using namespace pagemill;

extern "C" {

// arguments: as for pagemill_paged_attention, with queries of key_dim + shared_size values, `out` of value_dim, and
// head_dim = latent_size + shared_size, that of the cache's vectors. adapters: of the step's tokens; null: none. number: of
// the linear layer that `keys` and `values` are made of.
void pagemill_latent_attention(const LatentWeights* weights, const AttentionArgs* arguments,
                               const StepAdapters* adapters, int64_t number) {
  const AttentionArgs& args = *arguments;
  std::vector<Tile> tiles;
  for (int64_t request = 0; request < args.num_requests; ++request) {
    const int64_t start = args.query_start_loc[request], num_tokens = args.query_start_loc[request + 1] - start;
    for (int64_t first = 0; first < num_tokens; first += kMaxRows)
      tiles.push_back({request, first, std::min(kMaxRows, num_tokens - first), start + first});
  }
  thread_local std::vector<float> latents;
  for (size_t begin = 0, end = 0; begin < tiles.size(); begin = end) {
    int64_t tokens = 0;
    while (end < tiles.size() && (end == begin || (tokens + tiles[end].num_tokens) * args.num_heads <= kWaveRows))
      tokens += tiles[end++].num_tokens;
    latents.resize(std::max<size_t>(latents.size(), tokens * args.num_heads * padded(args.head_dim)));
    const Wave wave{*weights, args, adapters, number, latents.data(), tiles[begin].token, tokens};
    wave.run(tiles.data() + begin, tiles.data() + end);
  }
}

// Writes each token's latent and shared key to its slot; slot < 0: none. rows: [tokens][size].
void pagemill_store_latents(const float* rows, int64_t tokens, int64_t size, uint8_t* cache, int32_t cache_type,
                            const int64_t* slots, int64_t block_size, int64_t block_stride, int32_t num_threads) {
  for_each(threads_for(tokens * size, num_threads), tokens, [&](int64_t t) {
    if (slots[t] < 0) return;
    write_token(cache_type, rows + t * size, block_size, size, slots[t] % block_size,
                cache + slots[t] / block_size * block_stride);
  });
}

}  // extern "C"
