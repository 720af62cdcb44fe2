// SPDX-License-Identifier: Apache-2.0

// How the drafter changes while requests run: the engine's thread rests between two iterations, and
// the caller's thread exchanges what follows from the drafter.

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "engine/engine.h"
#include "runner/iteration_runner.h"

namespace paceline {
namespace {

void make_room(std::vector<int64_t>& counts, size_t size) {
  if (counts.size() < size) counts.resize(size);
}

}  // namespace

void Engine::for_each_open(const std::function<void(Sequence&)>& visit) {
  const auto visit_all = [&](const Samples& samples) {
    for (const std::unique_ptr<Sequence>& sample : samples) {
      if (sample != nullptr) visit(*sample);
    }
  };
  for (const auto& [id, samples] : requests_) visit_all(samples);
  for (const Samples& samples : incoming_) visit_all(samples);
}

void Engine::update_drafter(const std::function<void()>& body) {
  std::unique_lock lock(mutex_);
  run_held(lock, /*is_between=*/true, [&] {
    body();
    const std::scoped_lock changing(mutex_);
    forgets_prefixes_ = true;
    // Their KV of the drafter is that of both weights. It serves them, but no later sequence.
    for_each_open([](Sequence& sequence) {
      sequence.has_holes |= sequence.phase != Sequence::Phase::kWaiting;
    });
  });
}

void Engine::rest_while(const std::function<void()>& body) {
  std::unique_lock lock(mutex_);
  run_held(lock, /*is_between=*/true, body);
}

double Engine::replace(EngineParts& parts, const std::function<void()>& on_replaced) {
  // What takes memory or time is made before the engine's thread rests.
  const EngineOptions& next = parts.options;
  const int32_t k = next.shape.num_draft_tokens;
  const std::vector<int32_t> buckets = decode_buckets(next.scheduler.max_num_seqs);
  SlabPool pool(*parts.layout);
  if (next.poisons_freed_blocks) {
    pool.set_on_reusable([this](GroupId group, BlockId block) { runner_->poison(group, block); });
  }
  ChunkChooser chunk_chooser = make_chunk_chooser(next);
  DraftSchedule draft_schedule(next.draft_schedule_seed, next.scheduler.draft_lengths);
  std::optional<DraftChooser> chooser;
  if (next.is_adaptive) chooser.emplace(next.scheduler.draft_lengths, buckets);
  const size_t num_groups = parts.layout->groups.size();
  std::vector<PrefixCache::GroupCounts> prefix_counts(num_groups);
  KvUsage usage = {.held_blocks = std::vector<int64_t>(num_groups),
                   .quarantined_blocks = std::vector<int64_t>(num_groups),
                   .cached_blocks = std::vector<int64_t>(num_groups),
                   .prefix_counts = prefix_counts,
                   .free_slabs = pool.num_free_slabs()};

  // Callers that are queueing requests end first, since the engine's thread should not wait for
  // them.
  const std::scoped_lock admission(admission_mutex_);
  std::unique_lock held(mutex_);
  int64_t rest_us = 0;
  run_held(held, /*is_between=*/true, [&] {
    const int64_t start = now_us();
    const std::scoped_lock changing(mutex_);
    const Sequence* longest = nullptr;
    const auto length = [](const Sequence& s) { return std::max(s.prompt_len, s.limit); };
    for_each_open([&](Sequence& sequence) {
      if (longest == nullptr || length(sequence) > length(*longest)) longest = &sequence;
      const auto num_counts = static_cast<size_t>(sequence.wanted_drafts(k));
      SpeculationCounters& counters = sequence.counters;
      make_room(counters.drafted_per_position, num_counts);
      make_room(counters.accepted_per_position, num_counts);
    });
    if (longest != nullptr &&
        !pool.fits_alone(most_blocks(next.scheduler, *parts.layout, length(*longest)))) {
      throw InvalidArgument(concat(
          "request ", longest->id, " of up to ", length(*longest),
          " tokens needs more KV blocks with this drafter than the whole pool of ",
          parts.layout->pool_bytes >> 10,
          " KiB has; the drafter has not changed. Wait until the request has ended, or start the "
          "engine with a larger kv_cache_bytes"));
    }
    statistics_.add_methods(next.methods);
    scheduler_.restart(next.scheduler, pool);
    // Nothing throws from here on.
    std::swap(options_, parts.options);
    std::swap(layout_, parts.layout);
    std::swap(runner_, parts.runner);
    chunk_chooser_ = std::move(chunk_chooser);
    draft_schedule_ = std::move(draft_schedule);
    chooser_ = std::move(chooser);
    prefix_counts_at_reset_ = std::move(prefix_counts);
    usage_ = std::move(usage);
    newest_launched_ = newest_read_ = -1;
    last_num_drafts_ = -1;
    for_each_open([&](Sequence& sequence) { sequence.set_drafter(k, options_.methods); });
    requeues_ = true;
    on_replaced();
    rest_us = now_us() - start;
  });
  return static_cast<double>(rest_us);
}

void Engine::requeue() {
  for (const auto& [id, samples] : requests_) {
    for (const std::unique_ptr<Sequence>& sample : samples) {
      if (sample == nullptr) continue;
      ++sample->epoch;
      sample->emitting_in_flight = 0;
      begin_sample(*sample);
    }
  }
}

}  // namespace paceline
