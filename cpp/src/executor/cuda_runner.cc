// SPDX-License-Identifier: Apache-2.0
#include "executor/cuda_runner.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <thread>

#include "base/check.h"
#include "batch/iteration_inputs.h"
#include "common/device_calls.h"
#include "common/kernel_trace.h"
#include "common/status.h"
#include "wire/batch_shape.h"
#include "wire/blocks.h"
#include "wire/sequence_result.h"

namespace paceline {
namespace {

using cuda::check;

constexpr int64_t kWorkspaceBytes = int64_t{256} << 20;
constexpr int32_t kNumCounters = 1 << 17;

// Activations have the dtype of the weights, so target and drafter must agree on it.
DType activation_dtype(const Model& target, const Model* draft) {
  const DType dtype = target.weights.dtype;
  if (draft != nullptr && draft->weights.dtype != dtype) {
    throw Unsupported(concat("target weights are ", dtype_name(dtype), " and the drafter's ",
                             dtype_name(draft->weights.dtype),
                             "; on a GPU both must be the same: set dtype for both"));
  }
  return dtype;
}

int64_t free_device_bytes() {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
  return static_cast<int64_t>(free_bytes);
}

}  // namespace

std::vector<int32_t> decode_buckets(int32_t max_seqs) {
  // Close together where a batch is small, for there one more row in sixteen is a good part of it.
  std::vector<int32_t> buckets;
  for (int32_t n = 1; n < max_seqs; n += n < 4 ? 1 : n < 16 ? 4 : n < 64 ? 8 : n < 256 ? 32 : 128) {
    buckets.push_back(n);
  }
  buckets.push_back(max_seqs);
  return buckets;
}

CudaRunner::CudaRunner(std::shared_ptr<const Model> target, std::shared_ptr<const Model> draft,
                       const KvLayout& layout, const CudaRunnerOptions& options)
    : layout_(layout),
      options_(options),
      arena_(cuda_memory()),
      pool_(cuda_memory(), layout.pool_bytes, "the KV pool"),
      target_model_(std::move(target)),
      draft_model_(std::move(draft)),
      num_seqs_(static_cast<size_t>(options.max_in_flight) + 1) {
  const DType dtype = activation_dtype(*target_model_, draft_model_.get());
  check(cudaStreamCreateWithFlags(&stream_.handle, cudaStreamNonBlocking), "cudaStreamCreate");
  context_.stream = stream_.handle;
  context_.num_sms = cuda_status().num_sms;
  context_.workspace = arena_.allocate<std::byte>(kWorkspaceBytes, "kernel workspace");
  context_.workspace_bytes = kWorkspaceBytes;
  context_.counters = arena_.allocate<int32_t>(kNumCounters, "kernel counters");
  context_.num_counters = kNumCounters;
  context_.max_model_len = options.iteration.max_model_len;
  planner_ = std::make_unique<GemmPlanner>(/*uses_library=*/dtype == DType::kBFloat16);
  context_.gemm = planner_.get();

  options_.iteration.padded_rows = &GemmPlanner::padded_rows;
  buffers_ =
      allocate_iteration_buffers(arena_, options_.iteration, layout, target_model_->config,
                                 draft_model_ != nullptr ? &draft_model_->config : nullptr, dtype);
  buffers_.kv_pool = pool_.data();
  const int32_t max_len = options.iteration.max_model_len;
  target_ = std::make_unique<Decoder>(target_model_, layout, KvOwner::kTarget, pool_.data(),
                                      max_len, arena_);
  speculator_ =
      make_speculator(draft_model_, options.iteration.ngram, options.iteration.draft_position,
                      *target_, layout, pool_.data(), max_len, arena_);
  iteration_ =
      std::make_unique<Iteration>(options_.iteration, layout_, *target_, speculator_, buffers_);
  ring_ = std::make_unique<IterationRing>(options.iteration.shape, layout, max_len,
                                          target_->config().vocab_size, options.max_in_flight + 1,
                                          arena_);
  plan_products();
  warm_up();
  if (options.driver != DraftDriver::kEager) capture();
  if (options.poison_pool) {
    check(cudaMemsetAsync(pool_.data(), 0xff, static_cast<size_t>(pool_.bytes()), context_.stream),
          "poisoning the KV pool");
  }
  cuda::synchronize(context_.stream, "starting the engine");
}

CudaRunner::Stream::~Stream() {
  if (handle == nullptr) return;
  cudaStreamSynchronize(handle);
  cudaStreamDestroy(handle);
}

void CudaRunner::synchronize() { cuda::synchronize(context_.stream, "synchronize"); }

// Lets the library compete for every product with many rows, of decode buckets and of prefill.
void CudaRunner::plan_products() {
  const BatchShape& shape = options_.iteration.shape;
  struct Products {  // of one shape
    int32_t n;
    int32_t k;
    DType y_dtype;
    int32_t max_rows;
    std::vector<const void*> weights;
  };
  std::vector<Products> all;
  const auto add = [&](const std::byte* weight, int64_t n, int64_t k, int32_t max_rows,
                       DType y_dtype) {
    auto found = std::find_if(all.begin(), all.end(), [&](const Products& p) {
      return p.n == n && p.k == k && p.y_dtype == y_dtype;
    });
    if (found == all.end()) {
      found = all.insert(found, {.n = static_cast<int32_t>(n),
                                 .k = static_cast<int32_t>(k),
                                 .y_dtype = y_dtype,
                                 .max_rows = 0,
                                 .weights = {}});
    }
    found->max_rows = std::max(found->max_rows, max_rows);
    found->weights.push_back(weight);
  };
  const auto add_all = [&](const Decoder& decoder, int32_t max_rows, int32_t max_logit_rows) {
    const DecoderWeights& weights = decoder.weights();
    if (weights.dtype != DType::kBFloat16) return;
    const DecoderConfig& c = decoder.config();
    const int64_t per_layer = c.per_layer_inputs.size;
    for (size_t layer = 0; layer < c.layers.size(); ++layer) {
      const AttentionConfig& a = c.layers[layer].attention;
      const MlpConfig& m = c.layers[layer].mlp;
      const LayerWeights& w = weights.layers[layer];
      const int64_t q = int64_t{a.num_qo_heads} * a.head_dim;
      add(w.qkv, qkv_rows(a), c.qkv_inputs(layer), max_rows, DType::kBFloat16);
      add(w.o, c.hidden, q, max_rows, DType::kBFloat16);
      add(w.gate_up, 2 * int64_t{m.intermediate}, c.hidden, max_rows, DType::kBFloat16);
      add(w.down, c.hidden, m.intermediate, max_rows, DType::kBFloat16);
      if (per_layer > 0) {
        add(w.per_layer_gate, per_layer, c.hidden, max_rows, DType::kBFloat16);
        add(w.per_layer_proj, c.hidden, per_layer, max_rows, DType::kBFloat16);
      }
    }
    if (per_layer > 0) {
      add(weights.per_layer_proj, per_layer * static_cast<int64_t>(c.layers.size()), c.hidden,
          max_rows, DType::kBFloat16);
    }
    const DraftHeadWeights& head = weights.head;
    if (c.drafter) add(head.fc, c.hidden, c.drafter->fc_width(), max_rows, DType::kFloat32);
    if (head.centroids != nullptr) {
      add(head.centroids, c.drafter->centroids.count, c.hidden, max_logit_rows, DType::kFloat32);
    } else {
      add(decoder.lm_head(), c.lm_head_rows(), c.hidden, max_logit_rows, DType::kFloat32);
    }
    if (head.feedback != nullptr) {
      add(head.feedback, c.drafter->target_hidden, c.hidden, max_logit_rows, DType::kFloat32);
    }
  };
  add_all(*target_, shape.max_verify_rows, shape.max_logit_rows);
  if (const Decoder* drafter = decoder_of(speculator_)) {
    add_all(*drafter, shape.max_verify_rows + shape.max_seqs, shape.max_seqs);
  }
  for (const Products& p : all) {
    planner_->admit(context_, p.max_rows, p.weights, p.n, p.k, p.y_dtype);
  }
}

// Runs every op once on no rows, so that all kernels are loaded before anything is captured or
// timed.
void CudaRunner::warm_up() {
  const BatchShape& shape = options_.iteration.shape;
  std::vector<IterationExtent> extents;
  for (const int32_t n : decode_buckets(shape.max_seqs)) extents.push_back(decode_extent(shape, n));
  for (int32_t rows = 1; rows < shape.max_verify_rows; rows *= 2) {
    extents.push_back({.num_seqs = 1,
                       .num_drafting = 1,
                       .num_verify_rows = rows,
                       .num_first_rows = rows + 1,
                       .num_logit_rows = 1,
                       .verify_rows_per_seq = rows,
                       .first_rows_per_seq = rows + 1,
                       .num_forks = 1,
                       .num_block_copies = 1});
  }
  for (const IterationExtent& extent : extents) {
    iteration_->begin_prefill(context_, extent);
    iteration_->verify(context_, extent);
    iteration_->first_draft_pass(context_, extent);
    if (iteration_->num_draft_steps() > 0) iteration_->draft_step(context_, extent);
  }
  cuda::synchronize(context_.stream, "warming up");
}

void CudaRunner::enqueue_begin() {
  ring_->enqueue_begin(context_, buffers_.staged, buffers_.sequences, buffers_.sampling,
                       buffers_.block_tables.data(),
                       static_cast<int32_t>(buffers_.block_tables.size()));
}

void CudaRunner::enqueue_end() {
  ring_->enqueue_end(context_, buffers_.staged, buffers_.sampling, buffers_.results,
                     buffers_.logprobs.entries);
}

CudaRunner::Programs CudaRunner::capture_programs(const IterationExtent& extent) {
  const int32_t num_steps = iteration_->num_draft_steps();
  Programs programs;
  const auto until_first_draft = [&] {
    enqueue_begin();
    iteration_->verify(context_, extent);
    iteration_->first_draft_pass(context_, extent);
  };
  const auto step = [&] { iteration_->draft_step(context_, extent); };
  const auto all_steps = [&] {
    for (int32_t i = 0; i < num_steps; ++i) step();
  };
  const auto nothing = [] {};
  const auto end = [&] { enqueue_end(); };
  const bool has_steps = num_steps > 0;
  switch (has_steps ? options_.driver : DraftDriver::kUnrolled) {
    case DraftDriver::kUnrolled:
      programs.decode = CudaGraph::capture(context_, [&] {
        until_first_draft();
        all_steps();
        end();
      });
      if (has_steps) programs.draft_steps = CudaGraph::capture(context_, all_steps);
      break;
    case DraftDriver::kReplay:
      programs.decode = CudaGraph::capture(context_, until_first_draft);
      programs.draft_steps = CudaGraph::capture(context_, step);
      break;
    case DraftDriver::kWhile: {
      const int32_t* keep_drafting = buffers_.draft_stop.keep_drafting;
      programs.decode =
          CudaGraph::capture_while(context_, until_first_draft, step, end, keep_drafting);
      programs.draft_steps =
          CudaGraph::capture_while(context_, nothing, step, nothing, keep_drafting);
      break;
    }
    case DraftDriver::kEager:
      break;
  }
  return programs;
}

void CudaRunner::capture() {
  const int64_t free_before = free_device_bytes();
  const std::vector<int32_t> sizes = decode_buckets(options_.iteration.shape.max_seqs);
  const auto total = static_cast<int32_t>(sizes.size());
  for (int32_t i = 0; i < total; ++i) {
    if (options_.on_capture) options_.on_capture(i, total);
    const int32_t num_seqs = sizes[static_cast<size_t>(i)];
    const auto programs = [&](bool has_logit_work) {
      return capture_programs(decode_extent(options_.iteration.shape, num_seqs, has_logit_work));
    };
    buckets_.push_back({.num_seqs = num_seqs, .plain = programs(false), .full = programs(true)});
  }
  if (options_.on_capture) options_.on_capture(total, total);
  cuda::synchronize(context_.stream, "capturing graphs");
  graph_bytes_ = std::max<int64_t>(free_before - free_device_bytes(), 0);
}

const CudaRunner::Bucket& CudaRunner::bucket_of(int32_t num_seqs) const {
  const auto found =
      std::lower_bound(buckets_.begin(), buckets_.end(), num_seqs,
                       [](const Bucket& bucket, int32_t n) { return bucket.num_seqs < n; });
  PACELINE_CHECK(found != buckets_.end(), num_seqs, " sequences");
  return *found;
}

void CudaRunner::copy_scores(const IterationInputs& inputs) {
  const int64_t vocab = target_->config().vocab_size;
  for (const ScoreCopy& copy : inputs.score_copies) {
    // Into pageable memory: the host waits here. Scoring prompts is evaluation, not serving.
    ++cuda::device_calls().num_synchronizations;
    check(cudaMemcpyAsync(copy.destination->data() + copy.destination_row * vocab,
                          buffers_.logits + copy.first_logit_row * vocab,
                          static_cast<size_t>(copy.num_rows * vocab) * sizeof(float),
                          cudaMemcpyDeviceToHost, context_.stream),
          "copying logits");
  }
}

void CudaRunner::run_draft_steps(const IterationExtent& extent) {
  const int32_t num_steps = iteration_->num_draft_steps();
  if (num_steps == 0) return;
  if (options_.driver == DraftDriver::kEager) {
    for (int32_t i = 0; i < num_steps; ++i) iteration_->draft_step(context_, extent);
    return;
  }
  const CudaGraph& steps =
      bucket_of(extent.num_drafting).programs(extent.has_logit_work).draft_steps;
  const int32_t num_launches = options_.driver == DraftDriver::kReplay ? num_steps : 1;
  for (int32_t i = 0; i < num_launches; ++i) steps.launch(context_);
}

void CudaRunner::run_eagerly(const IterationInputs& inputs) {
  const IterationExtent extent = extent_of(inputs);
  enqueue_begin();
  if (inputs.has_prefill) iteration_->begin_prefill(context_, extent);
  iteration_->verify(context_, extent);
  copy_scores(inputs);  // before the drafter takes the logits buffer
  if (inputs.num_first_rows > 0 || inputs.num_drafting > 0) {
    iteration_->first_draft_pass(context_, extent);
    if (inputs.num_drafting > 0) run_draft_steps(extent);
  }
  enqueue_end();
}

void CudaRunner::begin_launch(const IterationInputs& inputs) {
  PACELINE_CHECK(inputs.iteration == launched_ + 1, "iteration ", inputs.iteration, " after ",
                 launched_);
  PACELINE_CHECK(launched_ - completed() < options_.max_in_flight, "too many in flight");
  launched_ = inputs.iteration;
  num_seqs_[static_cast<size_t>(launched_) % num_seqs_.size()] = inputs.num_seqs;
  ring_->write(inputs);
}

void CudaRunner::launch(const IterationInputs& inputs) {
  begin_launch(inputs);
  if (inputs.has_prefill || options_.driver == DraftDriver::kEager) {
    run_eagerly(inputs);
    return;
  }
  const Bucket& bucket = bucket_of(inputs.num_seqs);
  bucket.programs(inputs.has_logit_work).decode.launch(context_);
  if (options_.driver == DraftDriver::kReplay && iteration_->num_draft_steps() > 0) {
    run_draft_steps(
        decode_extent(options_.iteration.shape, bucket.num_seqs, inputs.has_logit_work));
    enqueue_end();
  }
}

std::vector<KernelTime> CudaRunner::launch_traced(const IterationInputs& inputs) {
  begin_launch(inputs);
  const IterationExtent extent =
      decode_extent(options_.iteration.shape, inputs.num_seqs, inputs.has_logit_work);
  std::optional<KernelTrace> trace;
  // Captured with the events in between, since the host could not enqueue short kernels fast
  // enough.
  const CudaGraph graph = CudaGraph::capture(context_, [&] {
    trace.emplace(context_.stream);
    context_.trace = &*trace;
    enqueue_begin();
    iteration_->verify(context_, extent);
    iteration_->first_draft_pass(context_, extent);
    for (int32_t i = 0; i < iteration_->num_draft_steps(); ++i) {
      iteration_->draft_step(context_, extent);
    }
    enqueue_end();
    context_.trace = nullptr;
  });
  graph.launch(context_);
  cuda::synchronize(context_.stream, "a traced iteration");
  std::map<std::string, KernelTime> by_name;
  for (const auto& [name, us] : trace->times()) {
    KernelTime& time = by_name[name];
    time.name = name;
    ++time.count;
    time.total_us += us;
  }
  std::vector<KernelTime> times;
  for (const auto& [name, time] : by_name) times.push_back(time);
  std::sort(times.begin(), times.end(),
            [](const KernelTime& a, const KernelTime& b) { return a.total_us > b.total_us; });
  return times;
}

int64_t CudaRunner::completed() {
  while (completed_ < launched_ && ring_->is_complete(completed_ + 1)) ++completed_;
  return completed_;
}

void CudaRunner::wait(int64_t iteration) {
  PACELINE_CHECK(iteration <= launched_, "waits for ", iteration, ", launched ", launched_);
  using Clock = std::chrono::steady_clock;
  auto next_query = Clock::now() + std::chrono::milliseconds(1);
  // One iteration is always queued behind the one awaited, so waking up a little late costs
  // nothing, while asking the driver would.
  for (int32_t spins = 0; completed() < iteration; ++spins) {
    if (spins < 200) continue;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    if (Clock::now() < next_query) continue;
    next_query = Clock::now() + std::chrono::milliseconds(1);
    const cudaError_t status = cudaStreamQuery(context_.stream);
    if (status != cudaErrorNotReady) check(status, "running an iteration");
  }
}

std::span<const SequenceResult> CudaRunner::results(int64_t iteration) {
  return {ring_->results(iteration),
          static_cast<size_t>(num_seqs_[static_cast<size_t>(iteration) % num_seqs_.size()])};
}

std::span<const TokenLogprob> CudaRunner::logprobs(int64_t iteration) {
  const BatchShape& shape = options_.iteration.shape;
  if (shape.max_logprobs == 0) return {};
  const auto count =
      static_cast<size_t>(shape.max_logit_rows) * static_cast<size_t>(1 + shape.max_logprobs);
  return {ring_->logprobs(iteration), count};
}

Runner::Timing CudaRunner::timing(int64_t iteration) {
  const CompletionRecord& outcome = ring_->outcome(iteration);
  Timing timing{.us = static_cast<float>(outcome.end_ns - outcome.begin_ns) * 1e-3f};
  if (iteration > 0) {
    const uint64_t last_end_ns = ring_->outcome(iteration - 1).end_ns;
    timing.idle_us = static_cast<float>(outcome.begin_ns - last_end_ns) * 1e-3f;
  }
  return timing;
}

void CudaRunner::poison(GroupId group, BlockId block) {
  const int64_t bytes = layout_.groups[group].block_bytes;
  check(cudaMemsetAsync(pool_.data() + block * bytes, 0xff, static_cast<size_t>(bytes),
                        context_.stream),
        "poisoning a block");
}

}  // namespace paceline
