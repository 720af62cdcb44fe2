// SPDX-License-Identifier: Apache-2.0
#include "runner/ranked_runner.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "wire/staged_inputs.h"

namespace paceline {
namespace {

// Copies the used elements of all arrays.
void copy_inputs(const StagedInputs& from, const StagedInputs& to) {
  *to.counts = *from.counts;
  const auto copy = [&](auto array, int32_t, auto count, int32_t extra) {
    std::copy_n(from.*array, from.counts->*count + extra, to.*array);
  };
  visit_staged_arrays({}, copy);
  visit_ring_arrays({}, copy);
}

[[nodiscard]] bool are_equal(const SequenceResult& a, const SequenceResult& b) {
  return a.emitted_len == b.emitted_len && a.accepted_len == b.accepted_len &&
         a.drafted_len == b.drafted_len && a.discarded_len == b.discarded_len &&
         a.outcome == b.outcome && std::equal(a.tokens, a.tokens + a.emitted_len, b.tokens);
}

}  // namespace

RankedRunner::RankedRunner(std::unique_ptr<RankGroup> group, int32_t max_in_flight,
                           const MakeRank& make_rank)
    : group_(std::move(group)),
      batches_(static_cast<size_t>(group_->num_ranks()) - 1,
               std::vector<Batch>(static_cast<size_t>(max_in_flight) + 1)) {
  for (int32_t rank = 0; rank < group_->num_ranks(); ++rank) {
    runners_.push_back(make_rank({.group = group_.get(), .rank = rank}));
  }
  group_->set_on_failure([this] {
    std::exception_ptr cause;
    try {
      throw DeviceError(group_->failure());
    } catch (...) {
      cause = std::current_exception();
    }
    abort(std::move(cause));
  });
}

RankedRunner::~RankedRunner() {
  // After an error a rank may be in an iteration that another one does not begin any more.
  group_->fail(0, std::make_exception_ptr(DeviceError("the engine ends")));
}

void RankedRunner::launch(const Batch& batch) {
  for (size_t rank = 1; rank < runners_.size(); ++rank) {
    std::vector<Batch>& of_rank = batches_[rank - 1];
    Batch& own = of_rank[static_cast<size_t>(batch.iteration) % of_rank.size()];
    own = batch;
    // Rank 0 copies what requests ask for. The passes of all ranks are the same.
    own.score_copies.clear();
    for (HiddenCopy& copy : own.hidden_copies) copy.destination.data = nullptr;
    runners_[rank]->bind(own);
    copy_inputs(batch.inputs, own.inputs);
    runners_[rank]->launch(own);
  }
  first().launch(batch);
}

void RankedRunner::release(int64_t iteration) {
  for (const auto& runner : runners_) runner->release(iteration);
}

void RankedRunner::abort(std::exception_ptr cause) {
  for (const auto& runner : runners_) runner->abort(cause);
}

std::string RankedRunner::delay_cause() const {
  const std::string awaited = group_->awaited();
  return awaited.empty() ? awaited : concat(", the others wait for ", awaited);
}

void RankedRunner::wait(int64_t iteration) {
  // A rank that is late on purpose starts only now, and the others need it.
  release(iteration);
  for (const auto& runner : runners_) runner->wait(iteration);
  check_results(iteration);
}

void RankedRunner::check_results(int64_t iteration) {
  const std::span<const SequenceResult> expected = first().results(iteration);
  for (size_t rank = 1; rank < runners_.size(); ++rank) {
    const std::span<const SequenceResult> results = runners_[rank]->results(iteration);
    PACELINE_CHECK(std::ranges::equal(expected, results, are_equal), "ranks 0 and ", rank, " of ",
                   runners_.size(), " have drawn different tokens in iteration ", iteration);
  }
}

int64_t RankedRunner::completed() {
  int64_t least = first().completed();
  for (const auto& runner : runners_) least = std::min(least, runner->completed());
  return least;
}

void RankedRunner::poison(GroupId group, BlockId block) {
  for (const auto& runner : runners_) runner->poison(group, block);
}

std::map<std::string, int64_t, std::less<>> RankedRunner::workspace_bytes() const {
  std::map<std::string, int64_t, std::less<>> all;
  for (const auto& runner : runners_) {
    for (const auto& [purpose, bytes] : runner->workspace_bytes()) all[purpose] += bytes;
  }
  all["exchange of ranks"] = group_->bytes();
  return all;
}

int64_t RankedRunner::graph_bytes() const {
  int64_t bytes = 0;
  for (const auto& runner : runners_) bytes += runner->graph_bytes();
  return bytes;
}

}  // namespace paceline
