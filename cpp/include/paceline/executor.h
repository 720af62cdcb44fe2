// SPDX-License-Identifier: Apache-2.0
#pragma once

// The engine takes requests and delivers events. It owns a thread that schedules, launches and
// reads results, and knows nothing of Python. All methods are thread-safe.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <paceline/config.h>
#include <paceline/export.h>
#include <paceline/model.h>
#include <paceline/request.h>

namespace paceline {

// Bytes by purpose. With several ranks, weights, the pool and the workspace are those of all ranks
// together; slabs, groups and blocks are those of one.
struct MemoryReport {
  struct Group {
    std::string owner;  // "target" or "draft"
    // "full", "sliding" or "latent"; of compressed attention "window", "tail" and "compressed"
    std::string kind;
    int32_t window = 0;  // keys that a query sees, its own included; 0 for all
    int32_t num_layers = 0;
    int32_t num_kv_heads = 0;
    int32_t head_dim = 0;            // where there are no keys and values, the width of an entry
    int32_t block_size = 0;          // tokens, or entries of several tokens
    int32_t tokens_per_entry = 0;    // 1 but in compressed groups
    int64_t block_bytes = 0;         // padding included
    int64_t padding_bytes = 0;       // per block, lost to slab alignment
    int64_t held_blocks = 0;         // held by running sequences
    int64_t quarantined_blocks = 0;  // released, but iterations in flight may still use them
  };
  // What one of tensor_parallel_size ranks has. Ranks on the CPU share the weights.
  struct Rank {
    int32_t gpu = -1;  // -1: on the CPU
    int64_t target_weight_bytes = 0;
    int64_t draft_weight_bytes = 0;
    int64_t kv_pool_bytes = 0;
    int64_t workspace_bytes = 0;
    int64_t graph_bytes = 0;
  };
  int64_t target_weight_bytes = 0;
  int64_t draft_weight_bytes = 0;
  int64_t kv_pool_bytes = 0;
  std::string
      kv_cache_rule;  // why the pool has its size: "as given", or the reason for the default
  int64_t kv_slab_bytes = 0;
  int64_t kv_num_slabs = 0;  // one is reserved, for padding rows
  int64_t kv_free_slabs = 0;
  int64_t workspace_bytes = 0;  // the sum of `workspace`
  // By purpose, such as "activations", "logits", "block tables" and, with kStandard or kBlock and
  // sampled drafts, "proposals".
  std::map<std::string, int64_t, std::less<>> workspace;
  int64_t graph_bytes = 0;    // captured programs; 0 on the CPU
  std::vector<Group> groups;  // one per KV group, those of the target first
  std::vector<Rank> ranks;    // one without ranks
};

// Counters since the start or the last reset_stats(), and the load now. The size does not depend on
// what has run.
struct ExecutorStats {
  int64_t num_iterations = 0;
  // Samples that have ended: with a stop token or at their length, with an error, or cancelled.
  int64_t num_finished = 0;
  int64_t num_failed = 0;
  int64_t num_cancelled = 0;
  int64_t num_preemptions = 0;    // running samples that gave their KV blocks back
  int64_t num_prompt_tokens = 0;  // prompt tokens computed, those of recomputed prompts again
  // Prompt tokens whose KV was taken over from another sample or the prefix cache instead of
  // computed.
  int64_t num_shared_tokens = 0;
  // Prompt tokens that the prefix cache was asked for, and those among them that it had.
  int64_t num_prefix_query_tokens = 0;
  int64_t num_prefix_hit_tokens = 0;
  int64_t num_emitted_tokens = 0;  // tokens that events have delivered
  // Verify windows with drafts among those that emitted these tokens, the drafts verified in them,
  // and the drafts accepted. The mean acceptance length is 1 + num_accepted_tokens /
  // num_verify_windows.
  int64_t num_verify_windows = 0;
  int64_t num_draft_tokens = 0;
  int64_t num_accepted_tokens = 0;
  std::vector<int64_t> drafted_per_position;   // [k] number of times that draft i was verified
  std::vector<int64_t> accepted_per_position;  // [k] number of times that draft i was accepted
  // The same three counts by the method that made the drafts: those that the executor has or had.
  // Two of them have counts where prompt lookup stands in front of a model.
  struct Method {
    std::string name;
    int64_t num_verify_windows = 0;
    int64_t num_draft_tokens = 0;
    int64_t num_accepted_tokens = 0;
  };
  std::vector<Method> methods;
  // For a model with a mixture of experts, else 0: mixture layers that ran in its passes, and the
  // experts that had rows in them, added up. Divide the second by the first for the experts that a
  // layer reads.
  int64_t num_target_mixture_layers = 0;
  int64_t num_target_experts_hit = 0;
  int64_t num_draft_mixture_layers = 0;
  int64_t num_draft_experts_hit = 0;
  double host_us = 0;  // host time of all iterations: scheduling, batches, blocks, ring

  // The choice of the number of drafts (docs/adaptive.md).
  struct Drafts {
    int32_t num_drafts = 0;      // that an iteration may make
    int64_t num_iterations = 0;  // that made as many
    double us = 0;               // their device time
    // With SpeculativeOptions::adaptive, else 0: what such an iteration is expected to take with as
    // many sequences as decode now (0: not known yet), and tokens that each of them then gets.
    double expected_us = 0;
    double expected_tokens = 0;
  };
  std::vector<Drafts> drafts;  // by number of drafts
  bool is_adaptive = false;
  int32_t num_drafts = 0;  // the choice now; without `adaptive` num_speculative_tokens
  // With `adaptive`: the probability that draft i is accepted if those before it are, from recent
  // windows [k]; and the times that have been measured.
  std::vector<double> expected_acceptance;
  struct Cost {
    int32_t num_seqs =
        0;  // sequences that decode: at most as many, and more than in the cost before
    int32_t num_drafts = 0;
    int32_t num_samples = 0;
    double us = 0;  // median
  };
  std::vector<Cost> costs;

  double uptime_s = 0;      // since the executor started; reset_stats() does not reset it
  int32_t num_running = 0;  // samples that run now
  int32_t num_waiting = 0;  // samples that wait now
  struct KvGroup {
    int64_t held_blocks = 0;         // held by running sequences
    int64_t quarantined_blocks = 0;  // released, but iterations in flight may still use them
    int64_t cached_blocks = 0;       // held by no sequence, but their KV can be taken over
    int64_t hit_blocks = 0;          // blocks that sequences took over from the prefix cache
    int64_t evicted_blocks = 0;      // cached blocks whose KV made room for other blocks
    int64_t max_blocks = 0;          // if the group had the whole pool
  };
  std::vector<KvGroup> kv_groups;  // in the order of MemoryReport::groups
  // Slabs of the pool, without the reserved one; a slab serves one group at a time.
  int64_t kv_num_slabs = 0;
  int64_t kv_free_slabs = 0;
};

// Times and counts of iterations, one entry for each, for the first 65,536 since the start or the
// last reset_stats().
struct IterationTimes {
  std::vector<float> us;                       // device time
  std::vector<float> idle_us;                  // idle time of the device before the iteration
  std::vector<int32_t> num_decoding;           // decoding sequences
  std::vector<int32_t> num_prefill;            // prefilling sequences
  std::vector<int32_t> target_mixture_layers;  // as in ExecutorStats, as all below
  std::vector<int32_t> target_experts_hit;
  std::vector<int32_t> draft_mixture_layers;
  std::vector<int32_t> draft_experts_hit;
};

// All launches of one kernel in one iteration.
struct KernelTime {
  std::string name;  // of a matrix product, with its shape
  int32_t count = 0;
  float total_us = 0;  // timed without overlap, so the kernels' sum exceeds the iteration's time
};

// A size of the KV pool, and the reason for it in one line.
struct KvCacheSize {
  int64_t bytes = 0;
  std::string reason;
};

// The size that an Executor gives its KV pool where options.kv_cache_bytes is 0. On the CPU: enough
// for max_num_seqs sequences of max_model_len tokens, but at most a quarter of free memory; where
// max_model_len is 0, of 4,096 tokens, and for one sequence of the default length. On CUDA: the
// same, as if no layer had a window, but at most 90 % of free memory less 2 GiB for workspace and
// captured graphs, or what options.gpu_memory_utilization leaves. free_bytes: memory that is free
// beside the weights of both models; nullopt: ask the system. Throws OutOfMemory where a GPU has no
// room for a pool.
[[nodiscard]] PACELINE_API KvCacheSize
default_kv_cache_size(const Model& target, const Model* draft, const ExecutorOptions& options,
                      std::optional<int64_t> free_bytes = std::nullopt);

// The options that an Executor chooses by itself for these models on their device, as numbers: the
// KV pool and max_model_len from the memory that is free now, max_num_batched_tokens, and k for a
// drafter that load_model_folder has read. `draft` is null without a drafter.
[[nodiscard]] PACELINE_API ExecutorOptions recommended_options(const Model& target,
                                                               const Model* draft);
[[nodiscard]] PACELINE_API ExecutorOptions recommended_options(const ModelFolder& folder);

// Sampling options for requests to the folder's target: the defaults, with its stop tokens.
[[nodiscard]] PACELINE_API SamplingOptions recommended_sampling(const ModelFolder& folder);

// An engine: the models, the KV pool and the thread that runs requests.
class PACELINE_API Executor {
 public:
  // Called on the constructing thread while programs are captured: `done` of `total` are ready.
  using Progress = std::function<void(int32_t done, int32_t total)>;

  // Runs on the device that holds the weights of the models. `draft` is a draft model or a draft
  // head (docs/model-format.md) for this target; it is null for plain decoding and prompt lookup.
  // Default options work for all models, except that a drafter that was not read from a folder
  // needs num_speculative_tokens.
  // Throws InvalidArgument for an option that is not allowed and for a draft head of another
  // target, Unsupported, OutOfMemory, and DeviceError.
  Executor(std::shared_ptr<const Model> target, std::shared_ptr<const Model> draft,
           const ExecutorOptions& options, const Progress& progress = {});
  // Drops all requests and joins the engine's thread.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Queues a request and returns its id, or nullopt when the queue is full. Throws InvalidArgument
  // for a request that can never run (an empty prompt, an id out of range, a prompt that is too
  // long or needs more than the pool, too many samples); other requests are not affected.
  [[nodiscard]] std::optional<RequestId> add_request(Request request);

  // Queues several requests in this order, all or none. Nothing is scheduled in between, so which
  // requests share an iteration does not depend on the timing of the caller's thread. Throws as
  // add_request does, naming the request, and for more requests than max_waiting_requests. Returns
  // nullopt when the queue has no room for all of them now.
  [[nodiscard]] std::optional<std::vector<RequestId>> add_requests(std::vector<Request> requests);

  // Ends a request, or one of its samples. An event with kCancelled follows for each of these
  // samples that has not ended. Returns false when no sample of the request runs or waits. Throws
  // InvalidArgument for a sample index that the request does not have.
  bool cancel(RequestId request_id, std::optional<int32_t> sample = std::nullopt);

  // Returns the events since the last call. Without one it waits up to timeout_ms milliseconds for
  // the first; 0 does not wait. When the engine has failed and all events have been returned, it
  // rethrows the cause.
  [[nodiscard]] std::vector<RequestEvent> poll(int32_t timeout_ms);

  // The use of memory by purpose.
  [[nodiscard]] MemoryReport memory_report() const;
  // What the engine has done, and its load now.
  [[nodiscard]] ExecutorStats stats() const;
  // The time of each iteration.
  [[nodiscard]] IterationTimes iteration_times() const;
  // Sets the counters of stats() to 0 and forgets the iteration times.
  void reset_stats();

  // Times the kernels of the next iteration without prefill rows, one by one, and returns the times
  // in descending order; empty when no such iteration ran within timeout_ms milliseconds. The
  // iteration's output does not change. Throws Unsupported on the CPU.
  [[nodiscard]] std::vector<KernelTime> trace_iteration(int32_t timeout_ms);

  // Waits until no request runs or waits, then checks every invariant of the block pool. Returns an
  // empty string, or a description of the violation. For tests and self-checks.
  [[nodiscard]] std::string check_integrity();

  // Runs `body` on the calling thread while the device rests, for update_models. Requests that are
  // added meanwhile wait until it has returned. Returns 0; or, without running `body`, the number
  // of requests that run or wait. Rethrows what `body` throws. Throws InvalidArgument while another
  // call of while_idle runs, and for a model that another executor uses too.
  [[nodiscard]] int64_t while_idle(const std::function<void()>& body);

  // Replaces the drafter between two iterations, while requests run. The new one is made ready
  // beside them: its buffers and captured programs need memory beside those so far, which are freed
  // afterwards. The KV pool passes on, so all that runs is then computed again from its known
  // tokens, as after a preemption; outputs do not change by a token. `draft` is null for plain
  // decoding and prompt lookup. `speculative` takes the place of that of the options; the other
  // options stay, but max_num_batched_tokens is chosen anew if it was 0. `progress` as for the
  // constructor. If it throws, the drafter so far goes on: InvalidArgument as the constructor does,
  // for a request that runs or waits and would not fit the pool, for an acceptance method other
  // than kCoupled, with which tokens depend on drafts, before or after, and while another call
  // changes the drafter; Unsupported for a drafter of the caller before or after; OutOfMemory and
  // DeviceError. Returns for how many microseconds the engine rested between two iterations: with
  // several ranks on GPUs also while the new drafter is made ready.
  double set_drafter(std::shared_ptr<const Model> draft, const SpeculativeOptions& speculative,
                     const Progress& progress = {});

  // Runs `body` on the calling thread between two iterations, for an update_models of the drafter
  // alone while requests run. Iterations wait until it has returned. The drafter's KV of the
  // requests that run then comes from both weights, so fewer of their drafts may be accepted.
  // Rethrows what `body` throws. Throws InvalidArgument without a drafter that is a model of its
  // own, if another executor uses it too, while another call changes the drafter, and for an
  // acceptance method other than kCoupled.
  void update_drafter(const std::function<void()>& body);

  // The target's vocabulary size, which is the width of logits.
  [[nodiscard]] int32_t vocab_size() const;
  // As given; a value that was chosen because it was 0 is the one in effect.
  [[nodiscard]] ExecutorOptions options() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace paceline
