// SPDX-License-Identifier: Apache-2.0
//
// Barriers of a block and of a cluster.

#include "machine.h"

namespace paceline::emulator {

int32_t wait_for_block(int32_t id, uint32_t num_threads, bool predicate, const Place& place) {
  Machine& m = machine();
  Thread& self = *m.current;
  Block& block = m.blocks[self.block];
  Barrier& barrier = block.barriers[id];
  const uint32_t num_expected = num_threads == 0 ? m.num_threads : num_threads;
  if (barrier.num_arrived == 0) {
    barrier.place = place;
    barrier.num_expected = num_expected;
  } else if (!is_same(barrier.place, place) || barrier.num_expected != num_expected) {
    fail("is at the barrier of " + text_of(place) + ", and others are at that of " +
         text_of(barrier.place));
  }
  self.place = place;
  self.barrier = id;
  self.wait = Wait::kBlock;
  barrier.num_true += predicate ? 1 : 0;
  if (++barrier.num_arrived < num_expected) {
    yield();
    return static_cast<int32_t>(self.result);
  }
  const int32_t num_true = barrier.num_true;
  barrier = {};
  for (uint32_t i = 0; i < m.num_threads; ++i) {
    Thread& thread = block.threads[i];
    if (thread.wait != Wait::kBlock || thread.barrier != id) continue;
    thread.result = static_cast<uint32_t>(num_true);
    if (&thread != &self) wake(thread);
  }
  self.wait = Wait::kNone;
  return num_true;
}

void complete_cluster_phase() {
  Machine& m = machine();
  if (m.num_arrived < m.num_live || m.num_arrived == 0) return;
  m.num_arrived = 0;
  ++m.cluster_phase;
  for (Block& block : m.blocks) {
    for (uint32_t i = 0; i < m.num_threads; ++i) {
      if (block.threads[i].wait == Wait::kCluster) wake(block.threads[i]);
    }
  }
}

void arrive_in_cluster() {
  Machine& m = machine();
  Thread& self = *m.current;
  if (self.has_arrived) fail("arrives at the barrier of its cluster twice");
  self.has_arrived = true;
  self.arrived_in = m.cluster_phase;
  ++m.num_arrived;
  complete_cluster_phase();
}

void wait_for_cluster(const Place& place) {
  Machine& m = machine();
  Thread& self = *m.current;
  if (!self.has_arrived) fail("waits for its cluster without having arrived");
  if (self.arrived_in == m.cluster_phase) {
    self.place = place;
    self.wait = Wait::kCluster;
    yield();
  }
  self.has_arrived = false;
}

}  // namespace paceline::emulator
