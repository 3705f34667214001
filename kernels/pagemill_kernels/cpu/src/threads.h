// Threads that share the work of one operation: the caller and the pool of threads.cpp. Results do not depend on which
// thread computed what.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

namespace pagemill {

struct Range {
  int64_t begin, end;
};

// One thread's part of the items. Threads that have finished their own part take pieces from others' parts.
struct alignas(64) Part {
  std::atomic<int64_t> next;
  int64_t end, step;
};

// The work of one thread of a region: pieces of its own part, then of others'.
class Pieces {
 public:
  Pieces(Part* parts, int threads, int thread) : parts_(parts), threads_(threads), thread_(thread) {}

  // Returns false once no piece is left.
  bool next(Range& range) {
    for (; visited_ < threads_; ++visited_) {
      Part& part = parts_[(thread_ + visited_) % threads_];
      if (part.next.load(std::memory_order_relaxed) >= part.end) continue;
      range.begin = part.next.fetch_add(part.step, std::memory_order_relaxed);
      if (range.begin >= part.end) continue;
      range.end = std::min(range.begin + part.step, part.end);
      return true;
    }
    return false;
  }

  // Calls body(item) for each remaining item.
  template <typename Body>
  void each(Body&& body) {
    for (Range range; next(range);)
      for (int64_t item = range.begin; item < range.end; ++item) body(item);
  }

 private:
  Part* parts_;
  int threads_, thread_, visited_ = 0;
};

using Work = void (*)(void* context, Pieces pieces);

// How finely parts are divided. Whole: a thread's preparation for its items costs more than an uneven share.
enum Cut : int64_t { kWhole = 1, kFine = 8, kSingly = 1 << 30 };

// Defined in threads.cpp: calls `work` once on each thread that starts in time, and returns when all items are done.
void share_items(int threads, int64_t items, int64_t pieces, Work work, void* context);

// Calls body(Pieces), which takes ranges of 0..items until none is left, on up to `threads` threads.
template <typename Body>
void share(int threads, int64_t items, Cut cut, Body body) {
  share_items(threads, items, cut, [](void* context, Pieces pieces) { (*static_cast<Body*>(context))(pieces); }, &body);
}

// Calls body(item) for each of 0..items.
template <typename Body>
void for_each(int threads, int64_t items, Body body) {
  share(threads, items, kFine, [&](Pieces pieces) { pieces.each(body); });
}

}  // namespace pagemill
