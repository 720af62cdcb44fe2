// SPDX-License-Identifier: Apache-2.0
#include "executor/cpu_runner.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "base/check.h"
#include "batch/iteration_inputs.h"
#include "sample/sampling_reset.h"
#include "wire/batch_shape.h"
#include "wire/blocks.h"
#include "wire/limits.h"
#include "wire/sequence_result.h"
#include "wire/sequence_state.h"
#include "wire/staged_inputs.h"

namespace paceline {
namespace {

void fill_nan(std::byte* data, int64_t bytes) {
  // All bits set is a NaN in float32 and in bfloat16 alike.
  std::fill_n(data, bytes, std::byte{0xff});
}

}  // namespace

CpuRunner::CpuRunner(std::shared_ptr<const Model> target, std::shared_ptr<const Model> draft,
                     const KvLayout& layout, const CpuRunnerOptions& options)
    : layout_(layout),
      options_(options),
      extent_(full_extent(options.iteration.shape)),
      threads_(options.num_threads),
      context_{.num_threads = options.num_threads, .threads = &threads_},
      pool_(layout.pool_bytes, "the KV pool"),
      ring_(options.max_in_flight + 1) {
  if (options.poison_pool) fill_nan(pool_.data(), pool_.bytes());
  const int32_t max_len = options.iteration.max_model_len;
  buffers_ =
      allocate_iteration_buffers(arena_, options.iteration, layout, target->config,
                                 draft != nullptr ? &draft->config : nullptr, DType::kFloat32);
  buffers_.kv_pool = pool_.data();
  target_ = std::make_unique<Decoder>(std::move(target), layout, KvOwner::kTarget, pool_.data(),
                                      max_len, arena_);
  speculator_ =
      make_speculator(std::move(draft), options.iteration.ngram, options.iteration.draft_position,
                      *target_, layout, pool_.data(), max_len, arena_);
  iteration_ =
      std::make_unique<Iteration>(options.iteration, layout_, *target_, speculator_, buffers_);
  const BatchShape& shape = options.iteration.shape;
  for (RingEntry& slot : ring_) {
    slot.results.resize(shape.max_seqs);
    if (shape.max_logprobs > 0) {
      slot.logprobs.resize(static_cast<size_t>(shape.max_logit_rows) *
                           static_cast<size_t>(1 + shape.max_logprobs));
    }
  }
  if (options.driver != DraftDriver::kEager) capture();
  thread_ = std::thread([this] { device_loop(); });
}

CpuRunner::~CpuRunner() {
  {
    const std::scoped_lock lock(mutex_);
    stops_ = true;
  }
  wake_device_.notify_all();
  thread_.join();
}

void CpuRunner::capture() {
  context_.capturing = &draft_step_program_;
  iteration_->draft_step(context_, extent_);
  context_.capturing = &decode_program_;
  iteration_->verify(context_, extent_);
  iteration_->first_draft_pass(context_, extent_);
  context_.capturing = nullptr;
  if (options_.driver == DraftDriver::kUnrolled) {
    for (int32_t step = 0; step < iteration_->num_draft_steps(); ++step) {
      decode_program_.append(draft_step_program_);
    }
  }
}

void CpuRunner::upload(const IterationInputs& in) {
  const StagedInputs& s = buffers_.staged;
  const SequenceState& q = buffers_.sequences;
  *s.num_seqs = in.num_seqs;
  *s.num_drafting = in.num_drafting;
  *s.num_verify_rows = in.num_verify_rows;
  *s.num_first_rows = in.num_first_rows;
  *s.num_logit_rows = in.num_logit_rows;
  *s.num_all_logit_rows = in.num_logit_rows + in.num_prompt_rows;
  std::copy_n(in.seq_slot.begin(), in.num_seqs, s.seq_slot);
  std::copy_n(in.kind.begin(), in.num_seqs, s.kind);
  std::copy_n(in.prefill_start.begin(), in.num_seqs, s.prefill_start);
  std::copy_n(in.next_token.begin(), in.num_seqs, s.next_token);
  std::copy_n(in.verify_indptr.begin(), in.num_seqs + 1, s.verify_indptr);
  std::copy_n(in.first_indptr.begin(), in.num_seqs + 1, s.first_indptr);
  std::copy_n(in.logit_indptr.begin(), in.num_seqs + 1, s.logit_indptr);
  std::copy_n(in.logit_rows.begin(), in.num_logit_rows + in.num_prompt_rows, s.logit_rows);
  std::copy_n(in.prompt_targets.begin(), in.num_prompt_rows, s.prompt_targets);
  if (in.has_prefill) {
    std::copy_n(in.prefill_tokens.begin(), in.num_verify_rows, s.prefill_tokens);
  }
  *s.num_resets = static_cast<int32_t>(in.resets.size());
  for (size_t i = 0; i < in.resets.size(); ++i) {
    const SequenceReset& reset = in.resets[i];
    s.reset_seq_slots[i] = reset.seq_slot;
    reset_sampling(buffers_.sampling, reset, in.lists.data() + reset.first_list_word,
                   /*worker=*/0, /*num_workers=*/1);
    q.known_len[reset.seq_slot] = 0;
    q.limit[reset.seq_slot] = reset.limit;
    q.is_active[reset.seq_slot] = 1;
    q.seed[reset.seq_slot] = reset.seed;
    q.temperature[reset.seq_slot] = reset.temperature;
    q.num_stop_ids[reset.seq_slot] = reset.num_stop_ids;
    std::copy_n(reset.stop_ids, kMaxStopIds, q.stop_ids + int64_t{reset.seq_slot} * kMaxStopIds);
    q.draft_len[reset.seq_slot] = 0;
  }
  *s.num_forks = static_cast<int32_t>(in.forks.size());
  std::copy(in.forks.begin(), in.forks.end(), s.forks);
  *s.num_block_copies = static_cast<int32_t>(in.block_copies.size());
  std::copy(in.block_copies.begin(), in.block_copies.end(), s.block_copies);
  for (const TableWrite& write : in.table_writes) {
    const BlockTable& table = buffers_.block_tables[write.group];
    table.blocks[write.seq_slot * table.stride + write.index] = write.block;
  }
}

void CpuRunner::copy_scores(const IterationInputs& inputs) const {
  const int64_t vocab = target_->config().vocab_size;
  for (const ScoreCopy& copy : inputs.score_copies) {
    std::copy_n(buffers_.logits + copy.first_logit_row * vocab, copy.num_rows * vocab,
                copy.destination->begin() + copy.destination_row * vocab);
  }
}

void CpuRunner::copy_logprobs(const IterationInputs& inputs, std::vector<TokenLogprob>& to) const {
  const BatchShape& shape = options_.iteration.shape;
  if (shape.max_logprobs == 0) return;
  const int64_t num_rows = inputs.num_logit_rows + inputs.num_prompt_rows;
  std::copy_n(buffers_.logprobs.entries, num_rows * (1 + shape.max_logprobs), to.begin());
}

void CpuRunner::run_draft_step() {
  if (options_.driver == DraftDriver::kEager) {
    iteration_->draft_step(context_, extent_);
  } else {
    draft_step_program_.replay(context_);
  }
}

void CpuRunner::run_draft_steps() {
  if (options_.driver == DraftDriver::kWhile) {
    if (iteration_->num_draft_steps() == 0) return;
    while (*buffers_.draft_stop.keep_drafting != 0) run_draft_step();
    return;
  }
  for (int32_t step = 0; step < iteration_->num_draft_steps(); ++step) run_draft_step();
}

void CpuRunner::execute(const IterationInputs& inputs) {
  if (inputs.has_prefill || options_.driver == DraftDriver::kEager) {
    if (inputs.has_prefill) iteration_->begin_prefill(context_, extent_);
    iteration_->verify(context_, extent_);
    copy_scores(inputs);  // before the drafter takes the logits buffer
    if (inputs.num_first_rows == 0 && inputs.num_drafting == 0) return;
    iteration_->first_draft_pass(context_, extent_);
    if (inputs.num_drafting > 0) run_draft_steps();
    return;
  }
  decode_program_.replay(context_);
  if (options_.driver != DraftDriver::kUnrolled) run_draft_steps();
}

void CpuRunner::run_now(const IterationInputs& inputs) {
  upload(inputs);
  execute(inputs);
}

void CpuRunner::launch(const IterationInputs& inputs) {
  {
    const std::scoped_lock lock(mutex_);
    PACELINE_CHECK(inputs.iteration == launched_ + 1, "iteration ", inputs.iteration, " after ",
                   launched_);
    PACELINE_CHECK(launched_ - completed_ < options_.max_in_flight, "too many in flight");
    launched_ = inputs.iteration;
    ring_entry(launched_).inputs = &inputs;
  }
  wake_device_.notify_one();
}

void CpuRunner::device_loop() {
  using Clock = std::chrono::steady_clock;
  auto last_end = Clock::now();
  std::unique_lock lock(mutex_);
  const auto may_run = [&] {
    const int64_t next = completed_ + 1;
    return next <= launched_ && failure_ == nullptr &&
           (next + options_.lateness <= launched_ || next <= awaited_);
  };
  for (;;) {
    wake_device_.wait(lock, [&] { return stops_ || may_run(); });
    if (stops_) return;
    RingEntry& slot = ring_entry(completed_ + 1);
    lock.unlock();
    std::exception_ptr failure;
    const auto start = Clock::now();
    try {
      run_now(*slot.inputs);
      std::copy_n(buffers_.results, slot.inputs->num_seqs, slot.results.begin());
      copy_logprobs(*slot.inputs, slot.logprobs);
    } catch (...) {
      failure = std::current_exception();
    }
    const auto end = Clock::now();
    slot.timing = {.us = std::chrono::duration<float, std::micro>(end - start).count(),
                   .idle_us = std::chrono::duration<float, std::micro>(start - last_end).count()};
    last_end = end;
    lock.lock();
    failure_ = failure;
    if (failure_ == nullptr) ++completed_;
    wake_host_.notify_all();
  }
}

void CpuRunner::wait(int64_t iteration) {
  std::unique_lock lock(mutex_);
  PACELINE_CHECK(iteration <= launched_, "waits for ", iteration, ", launched ", launched_);
  if (iteration > awaited_) {
    awaited_ = iteration;
    wake_device_.notify_one();
  }
  wake_host_.wait(lock, [&] { return completed_ >= iteration || failure_ != nullptr; });
  if (completed_ < iteration) std::rethrow_exception(failure_);
}

int64_t CpuRunner::completed() {
  const std::scoped_lock lock(mutex_);
  return completed_;
}

std::span<const SequenceResult> CpuRunner::results(int64_t iteration) {
  const RingEntry& slot = ring_entry(iteration);
  return {slot.results.data(), static_cast<size_t>(slot.inputs->num_seqs)};
}

std::span<const TokenLogprob> CpuRunner::logprobs(int64_t iteration) {
  return ring_entry(iteration).logprobs;
}

Runner::Timing CpuRunner::timing(int64_t iteration) { return ring_entry(iteration).timing; }

void CpuRunner::poison(GroupId group, BlockId block) {
  const int64_t bytes = layout_.groups[group].block_bytes;
  fill_nan(pool_.data() + block * bytes, bytes);
}

}  // namespace paceline
