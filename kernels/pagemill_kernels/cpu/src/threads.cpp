// The thread pool behind threads.h. A decode step of a small model is hundreds of regions of some ten microseconds, so
// a waiting thread spins first and then sleeps: cores may be shared with other work, and idle engines must not use any
// time. For the same reason no thread waits for one that has not woken up: the caller takes over its part.
#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <new>

namespace pagemill {
namespace {

constexpr int kMostThreads = 256;
constexpr auto kSpin = std::chrono::microseconds(100);  // longer than most gaps between two regions of a step

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns whether the condition became true within kSpin.
template <typename Condition>
bool spin_until(Condition condition) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (condition()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  while (word.load(std::memory_order_acquire) == value)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

enum State : uint32_t {
  kIdle,     // awake and waiting for work
  kAsleep,   // asleep and waiting for work; must be woken
  kOffered,  // has work that it has not begun; the caller may take the work back
  kRunning,
  kAwaited,  // runs, and the caller sleeps until it is done
};

struct alignas(64) Worker {
  std::atomic<uint32_t> state{kIdle};
};

struct Pool {
  std::atomic<bool> busy{false};  // one region at a time
  int size = 1;                   // existing threads, including the caller; the first worker's number is 1
  bool exhausted = false;         // the system cannot create more threads
  Worker workers[kMostThreads];
  Part parts[kMostThreads];
  // The current region; written before work is offered.
  int threads = 0;
  Work work = nullptr;
  void* context = nullptr;
};

Pool pool;
// A child of fork() has none of the threads, and may have inherited a region that never ends.
const int child_starts_anew = pthread_atfork(nullptr, nullptr, [] { new (&pool) Pool; });

void run_worker(int number) {
  std::atomic<uint32_t>& state = pool.workers[number].state;
  for (;;) {
    if (!spin_until([&] { return state.load(std::memory_order_relaxed) == kOffered; })) {
      uint32_t idle = kIdle;
      if (state.compare_exchange_strong(idle, kAsleep)) sleep_while(state, kAsleep);
    }
    uint32_t offered = kOffered;
    if (!state.compare_exchange_strong(offered, kRunning, std::memory_order_acquire)) continue;
    pool.work(pool.context, Pieces(pool.parts, pool.threads, number));
    if (state.exchange(kIdle, std::memory_order_release) == kAwaited) wake(state);
  }
}

void* thread_main(void* number) {
  run_worker(static_cast<int>(reinterpret_cast<intptr_t>(number)));
  return nullptr;
}

// Creates threads until there are `threads`, or as many as possible.
void grow(int threads) {
  if (pool.size >= threads || pool.exhausted) return;
  // Signals are left to the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_attr_t detached;
  pthread_attr_init(&detached);
  pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  for (; pool.size < threads; ++pool.size) {
    pthread_t thread;
    if (pthread_create(&thread, &detached, thread_main, reinterpret_cast<void*>(intptr_t{pool.size})) != 0) {
      pool.exhausted = true;
      break;
    }
    pthread_setname_np(thread, "pagemill-cpu");
  }
  pthread_attr_destroy(&detached);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void split(Part* parts, int threads, int64_t items, int64_t pieces) {
  for (int t = 0; t < threads; ++t) {
    const int64_t begin = items * t / threads, end = items * (t + 1) / threads;
    parts[t].next.store(begin, std::memory_order_relaxed);
    parts[t].end = end;
    parts[t].step = std::max<int64_t>(1, (end - begin + pieces - 1) / pieces);
  }
}

void offer(Worker& worker) {
  if (worker.state.exchange(kOffered) == kAsleep) wake(worker.state);
}

// Returns once the worker no longer uses the region.
void settle(Worker& worker) {
  uint32_t seen = kOffered;
  if (worker.state.compare_exchange_strong(seen, kIdle)) return;
  if (spin_until([&] { return worker.state.load(std::memory_order_acquire) == kIdle; })) return;
  uint32_t running = kRunning;
  if (worker.state.compare_exchange_strong(running, kAwaited)) sleep_while(worker.state, kAwaited);
}

void run_alone(int64_t items, Work work, void* context) {
  Part all;
  split(&all, 1, items, 1);
  work(context, Pieces(&all, 1, 0));
}

}  // namespace

void share_items(int threads, int64_t items, int64_t pieces, Work work, void* context) {
  threads = static_cast<int>(std::min<int64_t>({threads, items, kMostThreads}));
  if (threads <= 1) return run_alone(items, work, context);
  // If another thread's region is running, or this is inside one, this thread does all the work.
  if (pool.busy.exchange(true, std::memory_order_acquire)) return run_alone(items, work, context);
  grow(threads);
  threads = std::min(threads, pool.size);
  split(pool.parts, threads, items, pieces);
  pool.threads = threads;
  pool.work = work;
  pool.context = context;
  for (int t = 1; t < threads; ++t) offer(pool.workers[t]);
  work(context, Pieces(pool.parts, threads, 0));
  for (int t = 1; t < threads; ++t) settle(pool.workers[t]);
  pool.busy.store(false, std::memory_order_release);
}

}  // namespace pagemill
