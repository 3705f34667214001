// Sums and copies between ranks of one machine, over memory that their processes share. Each rank writes into its own
// slot, all members of its stage meet at one barrier, and each adds their slots in the order of ranks, so that all get
// the same bits. There are two sets of slots: a rank that has arrived at the next barrier no longer reads those of the
// last one. Stages pass hidden states by letters, of which each rank has one on its way.
#include "ranks.h"

#include <algorithm>
#include <cstring>

namespace pagemill {
namespace {

constexpr int64_t kMostRanks = 64, kReasonBytes = 512;
// A rank that waits looks so often, in the time for which others are waited for, whether these come further: a process
// that was stopped itself and goes on has counted one look, not the time.
constexpr int32_t kLooks = 20;

// Places outside of the layers' call, as numbers of a layer; mirrored in pagemill_kernels/ranks/places.py.
enum Place : int32_t { kSum = -1, kLogits = -2, kSend = -3, kReceive = -4 };

enum Aborted : uint32_t { kRuns = 0, kEnding = 1, kEnded = 2 };

// What a rank does: read by the other ranks, and by the process that reports which one failed.
struct alignas(64) Status {
  std::atomic<uint32_t> arrived;  // number of barriers that it has reached
  std::atomic<int32_t> layer, cut;
  std::atomic<int64_t> step;
  std::atomic<int64_t> given;  // values of the current gather
  std::atomic<uint32_t> recovered;  // number of failed steps behind which it has begun anew
  std::atomic<uint32_t> progress;   // number of cuts that it has reached
  std::atomic<int32_t> waits_for;   // the rank that it waits for + 1, or 0
};

// Values on their way from one rank to another.
struct alignas(64) Mail {
  std::atomic<uint32_t> sent, taken;
  std::atomic<int32_t> to;
};

struct Shared {
  Bell bell;
  std::atomic<uint32_t> aborted;
  std::atomic<int64_t> failed_step;  // the first one that failed: the steps before it can still be finished
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
  int64_t step;
  int64_t waited_ns;  // how long this rank has waited for others
  int32_t size, rank;
  int32_t first, members;  // the ranks of its stage, which add their sums
  int32_t stuck_ms;        // how long others are waited for
  int32_t failed;          // 1: the group has ended; 2: `missing` has not arrived
  int32_t missing;
  uint32_t barriers;

  Status& status() const { return shared->status[rank]; }
  Mail& mail(int32_t from) const { return reinterpret_cast<Mail*>(shared + 1)[from]; }
  float* slots() const { return reinterpret_cast<float*>(&mail(size)); }
  float* slot(int32_t of) const { return slots() + ((barriers & 1) * size + first + of) * capacity; }
  float* letter(int32_t from) const { return slots() + ((members > 1 ? 2 * size : 0) + from) * capacity; }
  bool ended() const {
    if (shared->lost.load(std::memory_order_acquire)) return true;
    return shared->aborted.load(std::memory_order_acquire) == kEnded &&
           step >= shared->failed_step.load(std::memory_order_relaxed);
  }
  bool has_arrived(int32_t member, uint32_t target) const {
    const auto& arrived = shared->status[first + member].arrived;
    return static_cast<int32_t>(arrived.load(std::memory_order_acquire) - target) >= 0;
  }

  // The rank that keeps `from` waiting, if it waits itself.
  int32_t cause_of(int32_t from) const {
    for (int32_t hops = 0; hops < size; ++hops) {
      const int32_t next = shared->status[from].waits_for.load(std::memory_order_relaxed);
      if (!next || next - 1 == rank) break;
      from = next - 1;
    }
    return from;
  }

  // Waits for others. absent: returns the first rank that has not come, or -1. Returns false if the group has ended, or
  // one is stuck: it has come to no further cut for `stuck_ms`, while this rank has waited.
  template <typename Absent>
  bool wait(Absent absent) {
    const auto is_over = [&] { return absent() < 0 || ended(); };
    if (is_over()) return came(absent);  // the usual case, without a look at all ranks
    const auto since = Clock::now();
    const bool has_come = keep_waiting(absent, is_over);
    waited_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - since).count();
    return has_come;
  }

  template <typename Absent, typename Over>
  bool keep_waiting(Absent absent, Over is_over) {
    const auto look = std::chrono::milliseconds(std::max(stuck_ms / kLooks, 1));
    const auto deadline = [&] { return Clock::now() + look; };
    // The rank that keeps all waiting, and how often it was found where it was. That counts anew for another one, which
    // may have waited itself until then.
    int32_t cause = -1, looks = 0;
    uint32_t progress = 0;
    for (;;) {
      const int32_t from = absent();
      // It stays between two looks: others follow it at any time.
      if (from >= 0) status().waits_for.store(from + 1, std::memory_order_relaxed);
      if (shared->bell.wait(deadline(), is_over)) return came(absent);
      if (from < 0) continue;
      const int32_t found = cause_of(from);
      const uint32_t its_progress = shared->status[found].progress.load(std::memory_order_relaxed);
      looks = found == cause && its_progress == progress ? looks + 1 : 0;
      cause = found, progress = its_progress;
      if (looks < kLooks) continue;
      missing = cause;
      return failed = 2, false;
    }
  }

  template <typename Absent>
  bool came(Absent absent) {
    status().waits_for.store(0, std::memory_order_relaxed);
    if (absent() < 0 && !ended()) return true;
    failed = 1;
    return false;
  }

  bool meet() {
    const uint32_t target = barriers + 1;
    status().arrived.store(target, std::memory_order_release);
    shared->bell.ring();
    return wait([&] {
      for (int32_t m = 0; m < members; ++m)
        if (!has_arrived(m, target)) return first + m;
      return -1;
    });
  }

  void at(int32_t layer, int32_t cut) {
    status().layer.store(layer, std::memory_order_relaxed);
    status().cut.store(cut, std::memory_order_relaxed);
    status().progress.fetch_add(1, std::memory_order_release);
  }

  bool reduce(float* values, int64_t count) {
    if (members == 1) return !ended() || (failed = 1, false);
    for (int64_t start = 0; start < count; start += capacity) {
      const int64_t size_here = std::min(capacity, count - start);
      float* to = values + start;
      std::copy_n(to, size_here, slot(rank - first));
      if (!meet()) return false;
      const float* first = slot(0);
      const float* second = slot(1);
      for (int64_t i = 0; i < size_here; ++i) to[i] = first[i] + second[i];
      for (int32_t r = 2; r < members; ++r) {
        const float* other = slot(r);
        for (int64_t i = 0; i < size_here; ++i) to[i] += other[i];
      }
      ++barriers;
    }
    return true;
  }
};

extern "C" {

// members: the ranks of a stage.
int64_t pagemill_ranks_bytes(int64_t size, int64_t members, int64_t capacity) {
  const int64_t slots = (members > 1 ? 2 * size : 0) + (members < size ? size : 0);
  return sizeof(Shared) + size * sizeof(Mail) + slots * capacity * sizeof(float);
}

void pagemill_ranks_step(Ranks* ranks, int64_t step) {
  ranks->step = step;
  ranks->status().step.store(step, std::memory_order_relaxed);
}

// Records where the rank is.
void pagemill_ranks_at(Ranks* ranks, int32_t layer, int32_t cut) { ranks->at(layer, cut); }

// Writes (barriers, step, layer, cut) of a rank.
void pagemill_ranks_status(const Ranks* ranks, int32_t rank, int64_t* out) {
  const Status& status = ranks->shared->status[rank];
  out[0] = status.arrived.load(), out[1] = status.step.load(), out[2] = status.layer.load(), out[3] = status.cut.load();
}

// Ends what all ranks compute from the step on that this rank is at. The first reason counts. lost: for good.
void pagemill_ranks_abort(Ranks* ranks, const char* reason, int32_t lost) {
  Shared& shared = *ranks->shared;
  if (lost) shared.lost.store(1, std::memory_order_release);
  uint32_t runs = kRuns;
  if (shared.aborted.compare_exchange_strong(runs, kEnding)) {
    std::strncpy(shared.reason, reason, kReasonBytes - 1);
    shared.failed_step.store(ranks->step, std::memory_order_relaxed);
    shared.aborted.store(kEnded, std::memory_order_release);
  } else if (runs == kEnded) {
    int64_t before = shared.failed_step.load(std::memory_order_relaxed);
    while (ranks->step < before && !shared.failed_step.compare_exchange_weak(before, ranks->step)) {
    }
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
  for (int32_t r = 0; r < ranks->size; ++r) {
    shared.status[r].arrived.store(0, std::memory_order_relaxed);
    ranks->mail(r).sent.store(0, std::memory_order_relaxed);
    ranks->mail(r).taken.store(0, std::memory_order_relaxed);
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

// Waits until all members have come to a place.
int32_t pagemill_ranks_meet(Ranks* ranks, int32_t place) {
  ranks->at(place, place);
  if (!ranks->meet()) return 0;
  ++ranks->barriers;
  return 1;
}

// Writes how many values each member gives.
int32_t pagemill_ranks_counts(Ranks* ranks, int64_t count, int64_t* counts) {
  ranks->status().given.store(count, std::memory_order_relaxed);
  if (!pagemill_ranks_meet(ranks, kLogits)) return 0;
  for (int32_t m = 0; m < ranks->members; ++m) counts[m] = ranks->shared->status[ranks->first + m].given.load();
  return 1;
}

// Writes the values of all members one behind the other. counts: those of pagemill_ranks_counts.
int32_t pagemill_ranks_gather(Ranks* ranks, const float* values, const int64_t* counts, float* out) {
  const int64_t most = *std::max_element(counts, counts + ranks->members);
  const int32_t own = ranks->rank - ranks->first;
  if (ranks->members == 1) return std::copy_n(values, most, out), 1;
  for (int64_t start = 0; start < most; start += ranks->capacity) {
    const auto here = [&](int32_t m) { return std::clamp<int64_t>(counts[m] - start, 0, ranks->capacity); };
    std::copy_n(values + std::min(start, counts[own]), here(own), ranks->slot(own));
    if (!ranks->meet()) return 0;
    float* to = out;
    for (int32_t m = 0; m < ranks->members; to += counts[m], ++m)
      std::copy_n(ranks->slot(m), here(m), to + std::min(start, counts[m]));
    ++ranks->barriers;
  }
  // The next exchange's counts are written only when all have read these.
  if (!ranks->meet()) return 0;
  ++ranks->barriers;
  return 1;
}

int32_t pagemill_ranks_send(Ranks* ranks, const float* values, int64_t count, int32_t to) {
  Mail& mail = ranks->mail(ranks->rank);
  ranks->at(kSend, to);
  for (int64_t start = 0; start < count; start += ranks->capacity) {
    const uint32_t sent = mail.sent.load(std::memory_order_relaxed);
    const auto is_taken = [&] { return mail.taken.load(std::memory_order_acquire) == sent; };
    if (!ranks->wait([&] { return is_taken() ? -1 : mail.to.load(std::memory_order_relaxed); })) return 0;
    std::copy_n(values + start, std::min(ranks->capacity, count - start), ranks->letter(ranks->rank));
    mail.to.store(to, std::memory_order_relaxed);
    mail.sent.store(sent + 1, std::memory_order_release);
    ranks->shared->bell.ring();
  }
  return 1;
}

int32_t pagemill_ranks_receive(Ranks* ranks, float* values, int64_t count, int32_t from) {
  Mail& mail = ranks->mail(from);
  ranks->at(kReceive, from);
  for (int64_t start = 0; start < count; start += ranks->capacity) {
    const uint32_t taken = mail.taken.load(std::memory_order_relaxed);
    const auto is_there = [&] {
      return mail.sent.load(std::memory_order_acquire) != taken && mail.to.load(std::memory_order_relaxed) == ranks->rank;
    };
    if (!ranks->wait([&] { return is_there() ? -1 : from; })) return 0;
    std::copy_n(ranks->letter(from), std::min(ranks->capacity, count - start), values + start);
    mail.taken.store(taken + 1, std::memory_order_release);
    ranks->shared->bell.ring();
  }
  return 1;
}

}  // extern "C"
