// SPDX-License-Identifier: Apache-2.0
#include "runner/cuda_runner.h"

#include <cuda_runtime_api.h>
#include <paceline/device.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <thread>

#include "base/check.h"
#include "common/describe_device.h"
#include "common/device_calls.h"
#include "common/device_scope.h"
#include "common/kernel_trace.h"
#include "common/status.h"
#include "model/weights/model_impl.h"
#include "runner/cuda_products.h"
#include "runner/dtypes.h"

namespace paceline {
namespace {

using cuda::check;
using cuda::DeviceScope;

constexpr int64_t kWorkspaceBytes = int64_t{256} << 20;
constexpr int32_t kNumCounters = 1 << 17;

// Products round their rows up.
RunnerOptions with_padding(RunnerOptions options) {
  options.iteration.padded_rows = &GemmPlanner::padded_rows;
  return options;
}

}  // namespace

CudaRunner::CudaRunner(std::shared_ptr<const Model> target, std::shared_ptr<const Model> draft,
                       const KvLayout& layout, const CudaRunnerOptions& options)
    : max_in_flight_(options.runner.max_in_flight), gpu_(target->gpu), arena_(cuda_memory(gpu_)) {
  const DeviceScope scope(gpu_);
  const DType dtype = activation_dtype(*target, draft.get());
  check(cudaStreamCreateWithFlags(&stream_.handle, cudaStreamNonBlocking), "cudaStreamCreate");
  context_.stream = stream_.handle;
  cuda::describe_device(context_);
  if (options.shares_gpu) context_.has_early_starts = false;
  context_.workspace = arena_.allocate<std::byte>(kWorkspaceBytes, "kernel workspace");
  context_.workspace_bytes = kWorkspaceBytes;
  context_.counters = arena_.allocate<int32_t>(kNumCounters, "kernel counters");
  context_.num_counters = kNumCounters;
  context_.max_model_len = options.runner.iteration.max_model_len;
  planner_ = std::make_unique<GemmPlanner>(/*uses_library=*/dtype == DType::kBFloat16);
  context_.gemm = planner_.get();

  const RunnerOptions runner_options = with_padding(options.runner);
  runner_ = std::make_unique<IterationRunner<CudaContext, CudaGraph>>(
      context_, cuda_memory(gpu_), arena_, std::move(target), std::move(draft), layout,
      runner_options, dtype);
  plan_products(context_, *planner_, runner_options.iteration.shape, runner_->target(),
                decoder_of(runner_->speculator()));
  warm_up();
  capture(options.on_capture);
  // What another runner's sequences have left in a pool that is handed on is as good.
  if (options.poison_pool && options.runner.kv_pool == nullptr) {
    const DeviceBuffer& pool = runner_->kv_pool();
    check(cudaMemsetAsync(pool.data(), 0xff, static_cast<size_t>(pool.bytes()), context_.stream),
          "poisoning the KV pool");
  }
  cuda::synchronize(context_.stream, "starting the engine");
}

int64_t CudaRunner::count_workspace(const std::shared_ptr<const Model>& target,
                                    const std::shared_ptr<const Model>& draft,
                                    const KvLayout& layout, const RunnerOptions& options) {
  const int64_t counters = int64_t{kNumCounters} * static_cast<int64_t>(sizeof(int32_t));
  return kWorkspaceBytes + counters +
         paceline::count_workspace<CudaContext, CudaGraph>(
             target, draft, layout, with_padding(options), activation_dtype(*target, draft.get()));
}

CudaRunner::~CudaRunner() {
  const DeviceScope scope(gpu_);
  stream_.reset();
  runner_.reset();
  planner_.reset();
}

void CudaRunner::Stream::reset() noexcept {
  if (handle == nullptr) return;
  cudaStreamSynchronize(handle);
  cudaStreamDestroy(handle);
  handle = nullptr;
}

void CudaRunner::synchronize() {
  const DeviceScope scope(gpu_);
  cuda::synchronize(context_.stream, "synchronize");
}

// Runs every op once on zero rows, so that all kernels are loaded before anything is captured or
// timed.
void CudaRunner::warm_up() {
  const BatchShape& shape = runner_->options().shape;
  const Iteration& iteration = runner_->iteration();
  std::vector<IterationExtent> extents;
  for (const int32_t n : decode_buckets(shape.max_seqs)) {
    for (const int32_t num_drafts : runner_->draft_lengths()) {
      extents.push_back(decode_extent(shape, n, num_drafts));
    }
    if (runner_->buffers().kept_hidden.num_tokens > 0) {
      extents.push_back(decode_extent(shape, n, /*num_drafts=*/0, /*has_logit_work=*/true,
                                      /*keeps_hidden=*/true));
    }
  }
  for (int32_t rows = 1; rows < shape.max_verify_rows; rows *= 2) {
    extents.push_back({.num_drafts = shape.num_draft_tokens,
                       .num_seqs = 1,
                       .num_drafting = 1,
                       .num_verify_rows = rows,
                       .num_first_rows = rows + 1,
                       .num_logit_rows = 1,
                       .verify_rows_per_seq = rows,
                       .first_rows_per_seq = rows + 1,
                       .num_forks = 1,
                       .num_block_copies = 1});
  }
  // Ranks draw with other kernels where no logits are processed; see Iteration::draw_ids.
  if (runner_->buffers().activations.ranks.group != nullptr) {
    for (size_t i = 0, count = extents.size(); i < count; ++i) {
      IterationExtent plain = extents[i];
      plain.has_logit_work = false;
      extents.push_back(plain);
    }
  }
  for (const IterationExtent& extent : extents) {
    iteration.begin_prefill(context_, extent);
    iteration.verify(context_, extent);
    if (extent.num_drafts > 0) iteration.first_draft_pass(context_, extent);
    if (iteration.num_draft_steps(extent.num_drafts) > 0) iteration.draft_step(context_, extent);
  }
  cuda::synchronize(context_.stream, "warming up");
}

void CudaRunner::capture(const std::function<void(int32_t done, int32_t total)>& on_capture) {
  const int64_t free_before = cuda_free_bytes(gpu_);
  runner_->capture(decode_buckets(runner_->options().shape.max_seqs), on_capture);
  cuda::synchronize(context_.stream, "capturing graphs");
  graph_bytes_ = std::max<int64_t>(free_before - cuda_free_bytes(gpu_), 0);
}

void CudaRunner::begin_launch(const Batch& batch) {
  PACELINE_CHECK(batch.iteration == launched_ + 1, "iteration ", batch.iteration,
                 " is launched after ", launched_);
  PACELINE_CHECK(launched_ - completed() < max_in_flight_,
                 "more than max_in_flight iterations are in flight");
  launched_ = batch.iteration;
  // The host's writes to the ring become visible before the launch.
  std::atomic_thread_fence(std::memory_order_release);
}

void CudaRunner::launch(const Batch& batch) {
  const DeviceScope scope(gpu_);
  begin_launch(batch);
  runner_->run(batch);
}

std::vector<KernelTime> CudaRunner::launch_traced(const Batch& batch) {
  const DeviceScope scope(gpu_);
  begin_launch(batch);
  const IterationExtent extent =
      decode_extent(runner_->options().shape, batch.counts().num_seqs, batch.num_drafts,
                    batch.has_logit_work, batch.keeps_hidden);
  std::optional<KernelTrace> trace;
  // The events are captured between the kernels, since the host could not enqueue short kernels
  // fast enough.
  const CudaGraph graph = CudaGraph::capture(context_, [&] {
    trace.emplace(context_.stream);
    context_.trace = &*trace;
    runner_->enqueue_decode(extent);
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
  int64_t newest = completed_;
  while (newest < launched_ && runner_->ring().is_complete(newest + 1)) ++newest;
  completed_ = newest;
  return newest;
}

void CudaRunner::abort(std::exception_ptr cause) {
  const std::scoped_lock lock(mutex_);
  if (failure_ == nullptr) failure_ = std::move(cause);
}

void CudaRunner::wait(int64_t iteration) {
  PACELINE_CHECK(iteration <= launched_, "wait for iteration ", iteration,
                 ", but the newest launched one is ", launched_);
  using Clock = std::chrono::steady_clock;
  auto next_query = Clock::now() + std::chrono::milliseconds(1);
  // Another iteration is always queued behind this one, so a slightly late wake-up costs nothing. A
  // query of the driver would cost time.
  const DeviceScope scope(gpu_);
  for (int32_t spins = 0; completed() < iteration; ++spins) {
    if (spins < 200) continue;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    if (Clock::now() < next_query) continue;
    next_query = Clock::now() + std::chrono::milliseconds(1);
    const std::scoped_lock lock(mutex_);
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    const cudaError_t status = cudaStreamQuery(context_.stream);
    if (status != cudaErrorNotReady) check(status, "running an iteration");
  }
}

void CudaRunner::poison(GroupId group, BlockId block) {
  const DeviceScope scope(gpu_);
  const std::span<std::byte> bytes = runner_->kv_block(group, block);
  check(cudaMemsetAsync(bytes.data(), 0xff, bytes.size(), context_.stream), "poisoning a block");
}

}  // namespace paceline
