// SPDX-License-Identifier: Apache-2.0
#pragma once

// The state of the emulator, for its own files.

#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <cuda_runtime.h>

#include "emulator.h"

namespace paceline::emulator {

inline constexpr uint32_t kWarpSize = 32;
inline constexpr uint32_t kMaxBarriers = 16;  // of a block

enum class Wait : uint8_t { kNone, kWarp, kBlock, kCluster, kEnded };

struct Copy {
  std::byte* to;
  const std::byte* from;
  size_t num_bytes;
  uint32_t group;
};

struct Thread {
  std::jmp_buf at;
  std::byte* stack = nullptr;
  bool has_context = false;  // it continues at `at`; else it begins on its stack
  uint3 index = {};
  uint32_t number = 0;  // in its block
  uint32_t block = 0;   // in its cluster
  Wait wait = Wait::kNone;
  Place place;  // of the call in which it waits
  // Of a collective call.
  Collective collective = Collective::kSync;
  uint32_t mask = 0;
  uint32_t argument = 0;
  uint32_t width = kWarpSize;
  uint64_t value = 0;
  uint64_t result = 0;
  void* compute_argument = nullptr;
  void (*compute)(LaneArguments& lanes) = nullptr;
  std::vector<Copy> copies;
  uint32_t num_groups = 0;  // of copies that have ended
  int32_t barrier = 0;
  uint32_t num_tries = 0;
  bool polls = false;        // has called let_others_run since it ran
  bool has_arrived = false;  // in the cluster, and has not waited yet
  uint32_t arrived_in = 0;   // the phase of the cluster
};

struct Barrier {
  uint32_t num_expected = 0;
  uint32_t num_arrived = 0;
  int32_t num_true = 0;
  Place place;
};

struct Block {
  uint3 index = {};
  Thread* threads = nullptr;
  std::vector<uint32_t> runnable;
  uint32_t num_ended = 0;
  Barrier barriers[kMaxBarriers];
  std::vector<std::byte> shared;  // while another block of the cluster runs
};

struct Machine {
  Options options;
  Counts counts;
  uint64_t random = 0;
  std::map<const void*, Index> clusters;  // of kernels that state them

  const Launch* launch = nullptr;
  std::vector<Thread> threads;
  std::vector<Block> blocks;  // of the cluster that runs
  uint32_t num_threads = 0;   // of a block
  uint32_t cluster_phase = 0;
  uint32_t num_arrived = 0;  // in the cluster's barrier
  uint32_t num_live = 0;     // threads of the cluster
  bool predecessor_runs = false;
  Thread* current = nullptr;
  std::jmp_buf scheduler;
  std::string error;
};

[[nodiscard]] Machine& machine();

[[nodiscard]] std::string text_of(const Place& place);
[[nodiscard]] std::string text_of(const uint3& index);
[[nodiscard]] std::string text_of(const Thread& thread);
[[nodiscard]] bool is_same(const Place& a, const Place& b);

// The calling fiber stops here until the scheduler chooses it again.
void yield();
// The scheduler may choose the thread again.
void wake(Thread& thread);

// --- lanes.cc and barriers.cc --------------------------------------------------------------------

// If all lanes in the mask of `one` have made its collective call or have ended, gives them their
// results, wakes all but the caller, and returns true.
bool complete_collective(Thread& one, bool is_caller);
// Wakes the threads of the cluster if all have arrived.
void complete_cluster_phase();

// --- shared_memory.cc ----------------------------------------------------------------------------

// Fills shared memory with the pattern, for a block that begins.
void fill_shared();
// Copy the current content to the block's copy, and back.
void save_shared(Block& block);
// The thread's copies of groups before `end_group`.
void make_copies(Thread& thread, uint32_t end_group);
void restore_shared(const Block& block);
// Whether nothing was written beyond the dynamic shared memory of the block.
[[nodiscard]] bool kept_to_dynamic_shared();

}  // namespace paceline::emulator
