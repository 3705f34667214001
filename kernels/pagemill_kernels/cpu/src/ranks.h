// Memory that several processes share, for the ranks of one model: waiting, and what ends a group. The layout begins
// with zeros, as a new file in memory is. Only 32- and 64-bit atomics without locks are used.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

namespace pagemill {

using Clock = std::chrono::steady_clock;

constexpr auto kRankSpin = std::chrono::microseconds(50);

// A word that changes with every event, on which waiting processes sleep.
struct Bell {
  std::atomic<uint32_t> word;
  std::atomic<uint32_t> sleepers;

  void ring() {
    word.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst))
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  // Waits until the condition holds, first awake and then asleep. Returns false at the deadline.
  template <typename Condition>
  bool wait(Clock::time_point deadline, Condition condition) {
    const auto awake = Clock::now() + kRankSpin;
    do {
      for (int i = 0; i < 32; ++i) {
        if (condition()) return true;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
      }
    } while (Clock::now() < awake);
    for (;;) {
      sleepers.fetch_add(1, std::memory_order_seq_cst);
      const uint32_t seen = word.load(std::memory_order_seq_cst);
      const bool holds = condition();
      const auto left = deadline - Clock::now();
      if (!holds && left.count() > 0) {
        const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
        const timespec timeout = {static_cast<time_t>(nanoseconds / 1000000000),
                                  static_cast<long>(nanoseconds % 1000000000)};
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &timeout, nullptr, 0);
      }
      sleepers.fetch_sub(1, std::memory_order_seq_cst);
      if (holds) return true;
      if (left.count() <= 0) return condition();
    }
  }
};

}  // namespace pagemill
