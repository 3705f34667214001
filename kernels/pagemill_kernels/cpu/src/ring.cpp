// A ring of messages in memory that processes share: one writer, several readers, each of which reads every message. A
// message larger than a slot is cut into pieces. Counters only grow; a slot is written again once all have read it.
#include "ranks.h"

#include <algorithm>
#include <cstring>

using namespace pagemill;

namespace {

constexpr int64_t kMostReaders = 64;

struct alignas(64) Counter {
  std::atomic<uint64_t> value;
};

struct Slot {
  uint32_t size;
  uint32_t last;  // whether it is a message's last piece
};

struct SharedRing {
  Bell bell;
  std::atomic<uint32_t> closed;
  Counter written;
  Counter read[kMostReaders];
};

}  // namespace

// One end of a ring; mirrored in pagemill_kernels/ranks/ring.py.
struct Ring {
  SharedRing* shared;
  int64_t slots, slot_bytes;  // bytes of a message's piece
  int32_t readers, reader;

  Slot* slot(uint64_t index) const {
    return reinterpret_cast<Slot*>(reinterpret_cast<uint8_t*>(shared + 1) +
                                   static_cast<int64_t>(index % slots) * (slot_bytes + 64));
  }
  uint64_t read_by(int32_t r) const { return shared->read[r].value.load(std::memory_order_acquire); }
  // Whether every reader has left room. Each counter is read once: it may grow between two looks.
  bool has_room(uint64_t index) const {
    for (int32_t r = 0; r < readers; ++r)
      if (index - read_by(r) >= static_cast<uint64_t>(slots)) return false;
    return true;
  }
  int32_t slowest() const {
    int32_t found = 0;
    for (int32_t r = 1; r < readers; ++r)
      if (read_by(r) < read_by(found)) found = r;
    return found;
  }
  bool closed() const { return shared->closed.load(std::memory_order_acquire); }
};

extern "C" {

int64_t pagemill_ring_bytes(int64_t slots, int64_t slot_bytes) {
  return sizeof(SharedRing) + slots * (slot_bytes + 64);
}

// Returns -1 once the message is written, -2 if the ring is closed, else the reader that has not read in time.
int32_t pagemill_ring_write(Ring* ring, const uint8_t* message, int64_t size, int64_t timeout_ms) {
  SharedRing& shared = *ring->shared;
  const auto deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
  int64_t start = 0;
  do {
    const uint64_t index = shared.written.value.load(std::memory_order_relaxed);
    const auto has_room = [&] { return ring->has_room(index); };
    const bool came = has_room() || shared.bell.wait(deadline, [&] { return has_room() || ring->closed(); });
    if (ring->closed()) return -2;
    if (!came) return ring->slowest();
    Slot* slot = ring->slot(index);
    const int64_t here = std::min(ring->slot_bytes, size - start);
    std::memcpy(slot + 1, message + start, here);
    start += here;
    slot->size = static_cast<uint32_t>(here);
    slot->last = start == size;
    shared.written.value.store(index + 1, std::memory_order_release);
    shared.bell.ring();
  } while (start < size);
  return -1;
}

// Points to the next piece; pagemill_ring_done gives it back. Returns 0 at the timeout, 1 for a piece, 2 for the last
// one of a message, 3 if the ring is closed and everything is read.
int32_t pagemill_ring_next(Ring* ring, int64_t timeout_ms, const uint8_t** piece, int64_t* size) {
  SharedRing& shared = *ring->shared;
  const uint64_t index = ring->read_by(ring->reader);
  const auto is_there = [&] { return shared.written.value.load(std::memory_order_acquire) != index; };
  const auto deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
  shared.bell.wait(deadline, [&] { return is_there() || ring->closed(); });
  if (!is_there()) return ring->closed() ? 3 : 0;
  const Slot* slot = ring->slot(index);
  *piece = reinterpret_cast<const uint8_t*>(slot + 1);
  *size = slot->size;
  return slot->last ? 2 : 1;
}

void pagemill_ring_done(Ring* ring) {
  ring->shared->read[ring->reader].value.fetch_add(1, std::memory_order_release);
  ring->shared->bell.ring();
}

void pagemill_ring_close(Ring* ring) {
  ring->shared->closed.store(1, std::memory_order_release);
  ring->shared->bell.ring();
}

}  // extern "C"
