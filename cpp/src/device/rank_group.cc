// SPDX-License-Identifier: Apache-2.0
#include "device/rank_group.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <thread>

#include <paceline/error.h>
#include <paceline/version.h>

#include "base/check.h"

namespace paceline {
namespace {

// Ranks usually arrive within microseconds of each other. Where each has a core, a rank first
// spins, and it sleeps only when another is late.
constexpr int32_t kSpins = 4000;
// Ten times as many keep a core from the rank that is late: where another process takes half of it,
// ranks_test then takes 99 s instead of 60.
constexpr int32_t kYields = 200;
constexpr std::chrono::microseconds kNap{50};

// Rows are exchanged in steps that fit a place, so that memory does not grow with the batch.
constexpr int64_t kLeastPlaceBytes = int64_t{1} << 20;

constexpr int64_t kLeastSegmentBytes = int64_t{8} << 20;
constexpr int64_t kHostBytes = (1 + kMaxRanks) * int64_t{sizeof(int32_t)};

constexpr int64_t kPlaceAlignment = 64;

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

RankGroup::RankGroup(int32_t num_ranks, int64_t row_bytes, double timeout_s)
    : ranks_(static_cast<size_t>(num_ranks)),
      place_bytes_((std::max(row_bytes, kLeastPlaceBytes) + kPlaceAlignment - 1) / kPlaceAlignment *
                   kPlaceAlignment),
      timeout_s_(timeout_s),
      num_spins_(num_ranks <= build_info().num_cores ? kSpins : 0),
      places_(2 * place_bytes_, "the exchange of ranks"),
      bytes_(places_.bytes()) {
  PACELINE_CHECK(num_ranks >= 1, "num_ranks = ", num_ranks);
}

RankGroup::RankGroup(std::span<DeviceMemory* const> memories, int64_t row_bytes)
    : ranks_(memories.size()), place_bytes_(0), timeout_s_(0), num_spins_(0) {
  constexpr int64_t kPacketBytes = 16;
  constexpr int64_t kFlags = int64_t{GpuExchange::kMaxBlocks} * kMaxRanks;
  gpu_.segment_bytes = (std::max(row_bytes, kLeastSegmentBytes) + kPlaceAlignment - 1) /
                       kPlaceAlignment * kPlaceAlignment;
  for (size_t rank = 0; rank < memories.size(); ++rank) {
    const auto allocate = [&](int64_t bytes) {
      bytes_ += bytes;
      return gpu_buffers_.emplace_back(*memories[rank], bytes, "the exchange of ranks").data();
    };
    gpu_.packets[rank] = allocate(2 * GpuExchange::kPacketsAPlace * kPacketBytes);
    gpu_.segments[rank] = allocate(2 * gpu_.segment_bytes);
    gpu_.arrivals[rank] = reinterpret_cast<uint64_t*>(allocate(kFlags * int64_t{sizeof(uint64_t)}));
    gpu_.states[rank] =
        reinterpret_cast<GpuExchange::State*>(allocate(int64_t{sizeof(GpuExchange::State)}));
  }
  first_memory_ = memories.front();
  gpu_.has_failed = reinterpret_cast<int32_t*>(
      first_memory_->allocate_shared(kHostBytes, "the exchange of ranks"));
  gpu_.waits_for = gpu_.has_failed + 1;
}

RankGroup::~RankGroup() {
  if (first_memory_ == nullptr) return;
  first_memory_->release_shared(reinterpret_cast<std::byte*>(gpu_.has_failed), kHostBytes);
}

std::byte* RankGroup::place(int32_t rank) {
  const uint64_t meetings =
      ranks_[static_cast<size_t>(rank)].meetings.load(std::memory_order_relaxed);
  return places_.data() + static_cast<int64_t>(meetings % 2) * place_bytes_;
}

void RankGroup::meet(int32_t rank) {
  const uint64_t meetings =
      ranks_[static_cast<size_t>(rank)].meetings.fetch_add(1, std::memory_order_acq_rel) + 1;
  for (int32_t peer = 0; peer < num_ranks(); ++peer) await(rank, peer, meetings);
}

void RankGroup::await(int32_t rank, int32_t peer, uint64_t meetings) {
  const std::atomic<uint64_t>& of_peer = ranks_[static_cast<size_t>(peer)].meetings;
  const auto has_come = [&] { return of_peer.load(std::memory_order_acquire) >= meetings; };
  for (int32_t i = 0; i < num_spins_; ++i) {
    if (has_come()) return;
    pause_briefly();
  }
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  for (int32_t i = 0; !has_come(); ++i) {
    if (has_failed()) throw DeviceError(failure());
    if (i < kYields) {
      std::this_thread::yield();
      continue;
    }
    const std::chrono::duration<double> waited = Clock::now() - begin;
    if (timeout_s_ > 0 && waited.count() > timeout_s_) {
      fail(peer, std::make_exception_ptr(DeviceError(concat(
                     "it has not come to an exchange for ", waited.count(), " s, in which rank ",
                     rank, " waits (hang_timeout_s is ", timeout_s_, ")"))));
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }
}

void RankGroup::fail(int32_t rank, const std::exception_ptr& cause) noexcept {
  {
    const std::scoped_lock lock(mutex_);
    if (has_failed()) return;
    try {
      failure_ = concat("rank ", rank, " of ", num_ranks(), ": ", message_of(cause));
    } catch (const std::bad_alloc&) {
      failure_.clear();
    }
    has_failed_.store(true, std::memory_order_release);
    if (gpu_.has_failed != nullptr) {
      std::atomic_ref(*gpu_.has_failed).store(1, std::memory_order_relaxed);
    }
  }
  if (on_failure_) on_failure_();
}

std::string RankGroup::failure() const {
  const std::scoped_lock lock(mutex_);
  if (has_failed() && failure_.empty()) return "a rank failed, and memory is short";
  return failure_;
}

std::string RankGroup::awaited() const {
  std::vector<bool> is_late(ranks_.size());
  if (gpu_.waits_for != nullptr) {
    // A rank that another one waits for, and that does not wait itself.
    const auto waits_for = [&](size_t rank) {
      return std::atomic_ref(gpu_.waits_for[rank]).load(std::memory_order_relaxed);
    };
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      const int32_t peer = waits_for(rank) - 1;
      if (peer >= 0 && waits_for(static_cast<size_t>(peer)) == 0) is_late.at(peer) = true;
    }
  } else {
    std::vector<uint64_t> meetings;
    for (const Rank& rank : ranks_) meetings.push_back(rank.meetings.load());
    const uint64_t most = std::ranges::max(meetings);
    for (size_t rank = 0; rank < meetings.size(); ++rank) is_late[rank] = meetings[rank] < most;
  }
  std::string late;
  for (size_t rank = 0; rank < is_late.size(); ++rank) {
    if (is_late[rank]) late += concat(late.empty() ? "rank " : " and rank ", rank);
  }
  return late.empty() ? late : concat(late, " of ", num_ranks());
}

}  // namespace paceline
