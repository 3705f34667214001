// Low-rank additions of a step's adapters to one product: out += B (A x) for each row's own adapter. Rows are sorted by
// adapter, so that its matrices are read once for all of them, and all adapters of a product are computed in two
// regions, whatever their number. A row's sums do not depend on the other rows: its inputs are added in chunks of a
// fixed size, and these in order.
#include <algorithm>
#include <memory>
#include <vector>

#include "operations.h"
#include "vec.h"

using namespace pagemill;

namespace {

constexpr int64_t kChunk = 1024;  // inputs whose sums one thread makes
constexpr int kTileRows = 4, kTileRanks = 4;  // rows, and vectors of eight ranks, that are summed at a time
constexpr int kPanelVectors = kAdapterPanel / kLanes;

// The rows of one adapter: positions in `Sorted::rows`.
struct Own {
  const AdapterWeights* matrices;
  int64_t begin, end;
  int64_t shrunk;  // where its sums begin
  int64_t chunks;
};

struct Task {
  int32_t own, part;
  int64_t at;  // chunk of inputs, or panel of outputs
};

struct Sorted {
  std::vector<int64_t> rows;
  std::vector<Own> groups;
  std::vector<Task> shrinks, expands;
  int64_t size = 0;  // of all sums

  Sorted(const StepAdapters& adapters, int64_t number, int64_t count, int64_t in, const AdaptedRows& of) {
    std::vector<int64_t> starts(adapters.num_slots + 1);
    const auto matrices = [&](int64_t slot) { return adapters.matrices[slot * adapters.num_linears + number]; };
    const auto slot_of = [&](int64_t r) {
      const int32_t slot = adapters.slots[of.slots ? of.slots[r] / of.divisor : of.first + r];
      return slot >= 0 && matrices(slot) ? slot : -1;
    };
    int64_t adapted = 0;
    for (int64_t r = 0; r < count; ++r)
      if (const int32_t slot = slot_of(r); slot >= 0) ++starts[slot + 1], ++adapted;
    if (!adapted) return;
    for (int64_t slot = 0; slot < adapters.num_slots; ++slot) starts[slot + 1] += starts[slot];
    for (int64_t slot = 0; slot < adapters.num_slots; ++slot)
      if (starts[slot] < starts[slot + 1]) add(*matrices(slot), starts[slot], starts[slot + 1], in);
    rows.resize(adapted);
    for (int64_t r = 0; r < count; ++r)
      if (const int32_t slot = slot_of(r); slot >= 0) rows[starts[slot]++] = r;
  }

  void add(const AdapterWeights& matrices, int64_t begin, int64_t end, int64_t in) {
    const int32_t own = static_cast<int32_t>(groups.size());
    const int64_t chunks = (in + kChunk - 1) / kChunk;
    groups.push_back({&matrices, begin, end, size, chunks});
    size += chunks * (end - begin) * matrices.rank;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) shrinks.push_back({own, 0, chunk});
    for (int32_t p = 0; p < matrices.num_parts; ++p)
      for (int64_t at = 0; at < matrices.parts[p].outputs; at += kAdapterPanel) expands.push_back({own, p, at});
  }
};

// Sums inputs begin to end of some rows times some vectors of ranks.
template <int Rows, int Ranks>
void shrink_tile(const float* const* x, const uint16_t* a, int64_t rank, int64_t begin, int64_t end, float* out) {
  Floats sums[Rows][Ranks] = {};
  for (int64_t i = begin; i < end; ++i) {
    Floats values[Ranks];
    for (int v = 0; v < Ranks; ++v) values[v] = from_bfloat16(load_as<Halves>(a + i * rank + v * kLanes));
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Ranks; ++v) sums[r][v] += splat(x[r][i]) * values[v];
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Ranks; ++v) store(out + r * rank + v * kLanes, sums[r][v]);
}

template <int Ranks>
void shrink_rows(const float* const* x, int64_t rows, const uint16_t* a, int64_t rank, int64_t begin, int64_t end,
                 float* out) {
  int64_t r = 0;
  for (; r + kTileRows <= rows; r += kTileRows) shrink_tile<kTileRows, Ranks>(x + r, a, rank, begin, end, out + r * rank);
  for (; r < rows; ++r) shrink_tile<1, Ranks>(x + r, a, rank, begin, end, out + r * rank);
}

void shrink(const AdapterWeights& m, const float* const* x, int64_t rows, int64_t begin, int64_t end, float* out) {
  const int64_t vectors = m.rank / kLanes;
  int64_t v = 0;
  for (; v + kTileRanks <= vectors; v += kTileRanks)
    shrink_rows<kTileRanks>(x, rows, m.a + v * kLanes, m.rank, begin, end, out + v * kLanes);
  for (; v < vectors; ++v) shrink_rows<1>(x, rows, m.a + v * kLanes, m.rank, begin, end, out + v * kLanes);
}

// Adds a panel of outputs to one row. sums: those of all chunks, `stride` apart.
void expand(const AdapterPart& part, int64_t at, const float* sums, int64_t chunks, int64_t stride, float* out) {
  Floats total[kPanelVectors] = {};
  const uint16_t* b = part.b + at * part.rank;
  for (int64_t k = 0; k < part.rank; ++k, b += kAdapterPanel) {
    float sum = 0.0f;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += sums[chunk * stride + part.first_rank + k];
    for (int v = 0; v < kPanelVectors; ++v) total[v] += splat(sum) * from_bfloat16(load_as<Halves>(b + v * kLanes));
  }
  const int64_t count = std::min<int64_t>(kAdapterPanel, part.outputs - at);
  float* to = out + part.first_output + at;
  int64_t n = 0;
  for (; n + kLanes <= count; n += kLanes) store(to + n, load(to + n) + total[n / kLanes]);
  for (; n < count; ++n) to[n] += total[n / kLanes][n % kLanes];
}

}  // namespace

// number: of the linear layer whose product of x, [count][in], is in out. of: the step's row of each row of x.
extern "C" void pagemill_add_adapters(const StepAdapters* adapters, int64_t number, const float* x, int64_t count,
                                      int64_t in, int64_t x_stride, const AdaptedRows* of, float* out,
                                      int64_t out_stride, int32_t num_threads) {
  const Sorted sorted(*adapters, number, count, in, *of);
  if (sorted.rows.empty()) return;
  const std::unique_ptr<float[]> sums(new float[sorted.size]);
  std::vector<const float*> inputs(sorted.rows.size());
  for (size_t i = 0; i < inputs.size(); ++i) inputs[i] = x + sorted.rows[i] * x_stride;
  const int64_t shrinks = sorted.shrinks.size(), expands = sorted.expands.size();
  for_each(threads_for(sorted.size * std::min(in, kChunk), num_threads), shrinks, [&](int64_t t) {
    const Task& task = sorted.shrinks[t];
    const Own& own = sorted.groups[task.own];
    const int64_t rows = own.end - own.begin;
    shrink(*own.matrices, inputs.data() + own.begin, rows, task.at * kChunk, std::min(in, (task.at + 1) * kChunk),
           sums.get() + own.shrunk + task.at * rows * own.matrices->rank);
  });
  for_each(threads_for(sorted.size * kAdapterPanel * expands / sorted.groups.size(), num_threads), expands,
           [&](int64_t t) {
             const Task& task = sorted.expands[t];
             const Own& own = sorted.groups[task.own];
             const int64_t rows = own.end - own.begin, rank = own.matrices->rank;
             for (int64_t r = 0; r < rows; ++r)
               expand(own.matrices->parts[task.part], task.at, sums.get() + own.shrunk + r * rank, own.chunks,
                      rows * rank, out + sorted.rows[own.begin + r] * out_stride);
           });
}
