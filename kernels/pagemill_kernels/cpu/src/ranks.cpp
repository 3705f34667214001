// Sums and copies between ranks of one machine, over memory that their processes share. Each rank writes into its own
// slot, all meet at one barrier, and each adds the slots in the order of ranks, so that all get the same bits. There
// are two sets of slots: a rank that has arrived at the next barrier no longer reads those of the last one.
#include "ranks.h"

#include <algorithm>
#include <cstring>

namespace pagemill {
namespace {

constexpr int64_t kMostRanks = 64, kReasonBytes = 512;

enum Aborted : uint32_t { kRuns = 0, kEnding = 1, kEnded = 2 };

// What a rank does: read by the other ranks, and by the process that reports which one failed.
struct alignas(64) Status {
  std::atomic<uint32_t> arrived;  // number of barriers that it has reached
  std::atomic<int32_t> layer, cut;
  std::atomic<int64_t> step;
  std::atomic<int64_t> given;  // values of the current gather
  std::atomic<uint32_t> recovered;  // number of failed steps behind which it has begun anew
};

// Values on their way from one rank to another.
struct alignas(64) Mail {
  std::atomic<uint32_t> sent, taken;
};

struct Shared {
  Bell bell;
  std::atomic<uint32_t> aborted;
  std::atomic<uint32_t> lost;  // a rank has ended or is stuck: nothing begins anew
  char reason[kReasonBytes];
  Status status[kMostRanks];
};

}  // namespace
}  // namespace pagemill

using namespace pagemill;

// One rank's end; mirrored in pagemill_kernels/ranks/shared_memory.py.
struct Ranks {
  Shared* shared;
  int64_t capacity;  // values of a slot
  int32_t size, rank;
  int32_t stuck_ms;    // how long others are waited for
  int32_t failed;      // 1: the group has ended; 2: `missing` has not arrived
  int32_t missing;
  uint32_t barriers;

  Mail* mail(int32_t from, int32_t to) const { return reinterpret_cast<Mail*>(shared + 1) + from * size + to; }
  float* slots() const { return reinterpret_cast<float*>(mail(size, 0)); }
  float* slot(int32_t of) const { return slots() + ((barriers & 1) * size + of) * capacity; }
  float* letter(int32_t from, int32_t to) const { return slots() + (2 * size + from * size + to) * capacity; }
  bool ended() const { return shared->aborted.load(std::memory_order_acquire) != kRuns; }

  // Waits for the others. Returns false if the group has ended or one is stuck.
  template <typename Condition>
  bool wait(Condition condition, int32_t from) {
    const auto deadline = Clock::now() + std::chrono::milliseconds(stuck_ms);
    const bool came = shared->bell.wait(deadline, [&] { return condition() || ended(); });
    if (came && !ended()) return true;
    failed = ended() ? 1 : 2;
    missing = from;
    return false;
  }

  bool meet() {
    const uint32_t target = barriers + 1;
    shared->status[rank].arrived.store(target, std::memory_order_release);
    shared->bell.ring();
    for (int32_t r = 0; r < size; ++r) {
      const auto& arrived = shared->status[r].arrived;
      const auto came = [&] { return static_cast<int32_t>(arrived.load(std::memory_order_acquire) - target) >= 0; };
      if (!came() && !wait(came, r)) return false;
    }
    return !ended() || (failed = 1, false);
  }

  void at(int32_t layer, int32_t cut) {
    shared->status[rank].layer.store(layer, std::memory_order_relaxed);
    shared->status[rank].cut.store(cut, std::memory_order_relaxed);
  }

  bool reduce(float* values, int64_t count) {
    if (size == 1) return true;
    for (int64_t start = 0; start < count; start += capacity) {
      const int64_t size_here = std::min(capacity, count - start);
      float* to = values + start;
      std::copy_n(to, size_here, slot(rank));
      if (!meet()) return false;
      const float* first = slot(0);
      const float* second = slot(1);
      for (int64_t i = 0; i < size_here; ++i) to[i] = first[i] + second[i];
      for (int32_t r = 2; r < size; ++r) {
        const float* other = slot(r);
        for (int64_t i = 0; i < size_here; ++i) to[i] += other[i];
      }
      ++barriers;
    }
    return true;
  }
};

extern "C" {

int64_t pagemill_ranks_bytes(int64_t size, int64_t capacity) {
  return sizeof(Shared) + size * size * sizeof(Mail) + (2 * size + size * size) * capacity * sizeof(float);
}

void pagemill_ranks_step(Ranks* ranks, int64_t step) {
  ranks->shared->status[ranks->rank].step.store(step, std::memory_order_relaxed);
}

// Writes (barriers, step, layer, cut) of a rank.
void pagemill_ranks_status(const Ranks* ranks, int32_t rank, int64_t* out) {
  const Status& status = ranks->shared->status[rank];
  out[0] = status.arrived.load(), out[1] = status.step.load(), out[2] = status.layer.load(), out[3] = status.cut.load();
}

// Ends what all ranks compute. The first reason counts. lost: for good.
void pagemill_ranks_abort(Ranks* ranks, const char* reason, int32_t lost) {
  Shared& shared = *ranks->shared;
  if (lost) shared.lost.store(1, std::memory_order_release);
  uint32_t runs = kRuns;
  if (shared.aborted.compare_exchange_strong(runs, kEnding)) {
    std::strncpy(shared.reason, reason, kReasonBytes - 1);
    shared.aborted.store(kEnded, std::memory_order_release);
  }
  shared.bell.ring();
}

// Writes the reason, at most `size` bytes; false while there is none.
int32_t pagemill_ranks_reason(const Ranks* ranks, char* out, int64_t size) {
  if (ranks->shared->aborted.load(std::memory_order_acquire) != kEnded) return 0;
  std::strncpy(out, ranks->shared->reason, size - 1);
  return 1;
}

int32_t pagemill_ranks_lost(const Ranks* ranks) { return ranks->shared->lost.load(std::memory_order_acquire); }

// Forgets a failed step. The rank exchanges nothing until pagemill_ranks_reset was called on rank 0.
void pagemill_ranks_recover(Ranks* ranks) {
  ranks->barriers = 0;
  ranks->failed = 0;
  ranks->shared->status[ranks->rank].recovered.fetch_add(1, std::memory_order_release);
  ranks->shared->bell.ring();
}

// On rank 0, behind its own pagemill_ranks_recover: waits until all others have recovered, and lets the group begin
// anew. Returns 0 if the group is lost, or one does not recover in time.
int32_t pagemill_ranks_reset(Ranks* ranks) {
  Shared& shared = *ranks->shared;
  const uint32_t target = shared.status[ranks->rank].recovered.load(std::memory_order_relaxed);
  const auto deadline = Clock::now() + std::chrono::milliseconds(ranks->stuck_ms);
  for (int32_t r = 0; r < ranks->size; ++r) {
    const auto& recovered = shared.status[r].recovered;
    const auto has = [&] { return recovered.load(std::memory_order_acquire) == target; };
    shared.bell.wait(deadline, [&] { return has() || pagemill_ranks_lost(ranks); });
    if (!has() || pagemill_ranks_lost(ranks)) {
      ranks->missing = r;
      return 0;
    }
  }
  for (int32_t r = 0; r < ranks->size; ++r) shared.status[r].arrived.store(0, std::memory_order_relaxed);
  for (int32_t i = 0; i < ranks->size * ranks->size; ++i) {
    ranks->mail(0, 0)[i].sent.store(0, std::memory_order_relaxed);
    ranks->mail(0, 0)[i].taken.store(0, std::memory_order_relaxed);
  }
  std::memset(shared.reason, 0, kReasonBytes);
  shared.aborted.store(kRuns, std::memory_order_release);
  return !pagemill_ranks_lost(ranks);
}

int32_t pagemill_ranks_reduce(Ranks* ranks, float* values, int64_t count, int32_t layer, int32_t cut) {
  ranks->at(layer, cut);
  return ranks->reduce(values, count);
}

// StepHooks::reduce. After a failure the rest of the step is lost; the caller finds it in Ranks::failed.
void pagemill_ranks_hook(void* context, float* values, int64_t count, int32_t layer, int32_t cut) {
  Ranks* ranks = static_cast<Ranks*>(context);
  if (!ranks->failed) pagemill_ranks_reduce(ranks, values, count, layer, cut);
}

// Writes how many values each rank gives.
int32_t pagemill_ranks_counts(Ranks* ranks, int64_t count, int64_t* counts) {
  ranks->shared->status[ranks->rank].given.store(count, std::memory_order_relaxed);
  if (!ranks->meet()) return 0;
  for (int32_t r = 0; r < ranks->size; ++r) counts[r] = ranks->shared->status[r].given.load();
  ++ranks->barriers;
  return 1;
}

// Writes the values of all ranks one behind the other. counts: those of pagemill_ranks_counts.
int32_t pagemill_ranks_gather(Ranks* ranks, const float* values, const int64_t* counts, float* out) {
  const int64_t most = *std::max_element(counts, counts + ranks->size);
  for (int64_t start = 0; start < most; start += ranks->capacity) {
    const auto here = [&](int32_t r) { return std::clamp<int64_t>(counts[r] - start, 0, ranks->capacity); };
    std::copy_n(values + std::min(start, counts[ranks->rank]), here(ranks->rank), ranks->slot(ranks->rank));
    if (!ranks->meet()) return 0;
    float* to = out;
    for (int32_t r = 0; r < ranks->size; to += counts[r], ++r)
      std::copy_n(ranks->slot(r), here(r), to + std::min(start, counts[r]));
    ++ranks->barriers;
  }
  // The next exchange's counts are written only when all have read these.
  if (!ranks->meet()) return 0;
  ++ranks->barriers;
  return 1;
}

int32_t pagemill_ranks_send(Ranks* ranks, const float* values, int64_t count, int32_t to) {
  Mail& mail = *ranks->mail(ranks->rank, to);
  for (int64_t start = 0; start < count; start += ranks->capacity) {
    const uint32_t sent = mail.sent.load(std::memory_order_relaxed);
    if (!ranks->wait([&] { return mail.taken.load(std::memory_order_acquire) == sent; }, to)) return 0;
    std::copy_n(values + start, std::min(ranks->capacity, count - start), ranks->letter(ranks->rank, to));
    mail.sent.store(sent + 1, std::memory_order_release);
    ranks->shared->bell.ring();
  }
  return 1;
}

int32_t pagemill_ranks_receive(Ranks* ranks, float* values, int64_t count, int32_t from) {
  Mail& mail = *ranks->mail(from, ranks->rank);
  for (int64_t start = 0; start < count; start += ranks->capacity) {
    const uint32_t taken = mail.taken.load(std::memory_order_relaxed);
    if (!ranks->wait([&] { return mail.sent.load(std::memory_order_acquire) != taken; }, from)) return 0;
    std::copy_n(ranks->letter(from, ranks->rank), std::min(ranks->capacity, count - start), values + start);
    mail.taken.store(taken + 1, std::memory_order_release);
    ranks->shared->bell.ring();
  }
  return 1;
}

}  // extern "C"
