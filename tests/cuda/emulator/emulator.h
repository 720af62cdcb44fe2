// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs CUDA kernels on the CPU, compiled by the host compiler with the headers of include/ in place
// of the CUDA toolkit's. A thread of a block is a fiber; all of them run on one thread of the
// system, and a fiber runs until it has to wait for others. Blocks run one after another (those of
// a cluster take turns). A random choice with a seed selects the next block and the next fiber.
//
// A launch fails, with a message that says which kernel threads wait where, if
//   - a barrier is not reached by all threads that it is for, or lanes of a warp make different
//     collective calls or name different lanes;
//   - the threads of a block reach a barrier at different places of the source;
//   - a block writes to shared memory beyond what the launch asked for.
// An access to memory beyond the end of a GuardedMemory ends the process with a message.
//
// Shared memory is thread_local memory of the host, which the linker puts into one range
// (first_shared.cc, last_shared.cc). It is filled with a pattern before each block. For each block
// of a cluster a copy is kept, which is restored before the block runs on.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <source_location>
#include <string>

namespace paceline::emulator {

struct Index {
  uint32_t x = 1, y = 1, z = 1;
  [[nodiscard]] uint64_t volume() const { return uint64_t{x} * y * z; }
};

struct Launch {
  const void* kernel = nullptr;
  std::function<void()> run_thread;  // calls the kernel with its arguments
  Index grid, block, cluster;
  size_t dynamic_shared_bytes = 0;
};

inline constexpr size_t kMaxDynamicSharedBytes = 227 << 10;  // of a block, on sm_90

// The value of what is undefined: NaN in every float format, and the greatest of comparable keys.
inline constexpr uint64_t kUndefined = 0xfff1bad0fff1bad0u;

// --- for tests -----------------------------------------------------------------------------------

struct Options {
  uint64_t seed = 0;
  uint64_t pattern = kUndefined;                     // fills shared memory
  bool runs = true;                                  // false: launches are counted and do nothing
  size_t max_shared_bytes = kMaxDynamicSharedBytes;  // dynamic ones of a block
  // What a predecessor does that runs until a thread waits for it: called before the threads of a
  // cluster start, and when the first of them waits. May be empty.
  std::function<void()> predecessor_runs = {};
  std::function<void()> predecessor_ends = {};
};
void set_options(const Options& options);
[[nodiscard]] size_t max_shared_bytes();

struct Counts {
  int64_t threads = 0;
  std::set<const void*> kernels;
};
// Since the last call.
[[nodiscard]] Counts take_counts();

// --- for the stand-ins of include/ ---------------------------------------------------------------

// Runs all blocks. Returns an error message, empty after success.
[[nodiscard]] std::string run(const Launch& launch);

// The number of blocks of a cluster, for a kernel whose source states it: the host compiler ignores
// __cluster_dims__, but launches of such kernels ask for their occupancy with a grid of one
// cluster.
void set_cluster(const void* kernel, const Index& cluster);

using Place = std::source_location;

enum class Collective : uint8_t {
  kSync,
  kShuffle,
  kShuffleUp,
  kShuffleDown,
  kShuffleXor,
  kBallot,
  kAny,
  kAll,
  kMatchAny,
  kAdd,
  kMin,
  kMax,
  kMinSigned,
  kMaxSigned,
  kAnd,
  kOr,
  kXor,
  kCompute,  // of compute_together
};
// A collective call of the lanes of `mask`; returns this lane's result. `argument` is the lane of a
// shuffle, `width` its width. A value from a lane that does not take part is kUndefined.
uint64_t run_collective(Collective collective, uint32_t mask, uint64_t value, uint32_t argument,
                        uint32_t width, const Place& place);
// Calls `compute` once, with the arguments of all lanes of the warp, when all have called this.
using LaneArguments = void* const[32];
void compute_together(void* argument, void (*compute)(LaneArguments& lanes), const Place& place);

// Barrier `id` of the block, for `num_threads` of them (0: all). Returns the number of threads
// whose predicate was true.
int32_t wait_for_block(int32_t id, uint32_t num_threads, bool predicate, const Place& place);

// For a thread that polls memory. Fails if it is called too often, because nothing changes.
void let_others_run(const Place& place);

// A copy that is made when the thread waits for the group of copies that it belongs to.
void copy_later(void* to, const void* from, size_t num_bytes);  // null `from`: zeros
void end_copy_group();
void wait_for_copies(uint32_t num_pending);  // waits until at most num_pending groups are left

// With a predecessor that runs, the copies that the thread has asked for are made first: they may
// have been asked for too early.
void wait_for_predecessor();

void arrive_in_cluster();
void wait_for_cluster(const Place& place);
// The address of a shared variable of another block of the cluster.
void* shared_of_block(const void* shared, int32_t rank);

// 32 bit addresses of shared memory.
uint32_t shared_address(const void* shared);
void* shared_pointer(uint32_t address, size_t num_bytes);

// Reports an error of the calling kernel thread and ends the launch.
[[noreturn]] void fail(std::string message);

}  // namespace paceline::emulator
