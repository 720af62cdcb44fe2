// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ranks compute one pass together: each has a part of a model, and they exchange what they have
// computed (ops/gather.h). On the CPU they are threads of one process, which meet here. On GPUs
// kernels meet, in memory that is allocated here (cuda/gather/gather.cu).

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"
#include "device/device_memory.h"
#include "device/rank_share.h"

namespace paceline {

// What kernels of ranks exchange with, by rank: memory of its GPU, to which the others write.
struct GpuExchange {
  static constexpr int64_t kPacketsAPlace = 1 << 16;
  static constexpr int32_t kMaxBlocks = 64;
  struct State {
    uint64_t num_exchanges;
    uint32_t num_begun_blocks;  // of the exchange that runs: those that know its number
  };

  std::byte* packets[kMaxRanks] = {};   // [2, kPacketsAPlace] packets of 16 bytes
  std::byte* segments[kMaxRanks] = {};  // [2, segment_bytes]
  uint64_t* arrivals[kMaxRanks] = {};   // [kMaxBlocks, kMaxRanks]
  State* states[kMaxRanks] = {};        // [1], which only the rank itself reads
  int64_t segment_bytes = 0;
  // Memory of the host.
  int32_t* has_failed = nullptr;  // [1] 1 ends every wait
  int32_t* waits_for = nullptr;   // [kMaxRanks] 1 + the rank that a rank waits long for, or 0
};

class RankGroup {
 public:
  // Ranks on the CPU. `row_bytes`: of the longest row that is exchanged. A rank waits for the
  // others for at most `timeout_s` seconds; 0: until the group fails.
  RankGroup(int32_t num_ranks, int64_t row_bytes, double timeout_s);
  // Ranks on GPUs, in the memory of each, which all others can write. They wait until the group
  // fails.
  RankGroup(std::span<DeviceMemory* const> memories, int64_t row_bytes);
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  [[nodiscard]] int32_t num_ranks() const { return static_cast<int32_t>(ranks_.size()); }

  // Memory for one exchange, which all ranks write before they meet, and read afterwards. There are
  // two such places, used by turns: no rank can write to one of them again before all have met once
  // more, so one meeting an exchange is enough. Called by the rank's thread.
  [[nodiscard]] std::byte* place(int32_t rank);
  [[nodiscard]] int64_t place_bytes() const { return place_bytes_; }
  // Bytes that all ranks together exchange with.
  [[nodiscard]] int64_t bytes() const { return bytes_; }
  // Only of ranks on GPUs.
  [[nodiscard]] const GpuExchange& gpu_exchange() const { return gpu_; }

  // Blocks until all ranks have called this as often as `rank` has. Called by the rank's thread.
  // Throws DeviceError when the group fails, and fails it when a rank does not come in time.
  void meet(int32_t rank);

  // Ends the group: every rank that waits or comes later throws a DeviceError with the rank and the
  // cause of the first call. Later calls do nothing. Not even want of memory throws: then the cause
  // is missing.
  void fail(int32_t rank, const std::exception_ptr& cause) noexcept;
  // Called once, by the thread that fails the group. Must not throw. Set it before the ranks run.
  void set_on_failure(std::function<void()> on_failure) { on_failure_ = std::move(on_failure); }
  [[nodiscard]] bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }
  // "rank 1 of 2: why"; empty if the group has not failed.
  [[nodiscard]] std::string failure() const;
  // Which ranks the others wait for, as a sentence's part; empty if all have met as often.
  [[nodiscard]] std::string awaited() const;

 private:
  void await(int32_t rank, int32_t peer, uint64_t meetings);

  struct alignas(64) Rank {
    std::atomic<uint64_t> meetings{0};
  };
  std::vector<Rank> ranks_;
  int64_t place_bytes_;
  double timeout_s_;
  int32_t num_spins_;
  AlignedBuffer places_;
  GpuExchange gpu_;
  std::vector<DeviceBuffer> gpu_buffers_;
  DeviceMemory* first_memory_ = nullptr;  // of ranks on GPUs
  int64_t bytes_ = 0;
  std::function<void()> on_failure_;
  std::atomic<bool> has_failed_{false};
  mutable std::mutex mutex_;
  std::string failure_;
};

// A rank of a group; without a group, the only one.
struct RankHandle {
  RankGroup* group = nullptr;
  int32_t rank = 0;
};

}  // namespace paceline
