// SPDX-License-Identifier: Apache-2.0
#pragma once

// The engine: requests in, events out. Owns its own thread, which schedules, launches and reads
// results; nothing in here knows of Python. All methods are thread-safe.

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

// Bytes by purpose; `groups` has one entry a KV group.
struct MemoryReport {
  struct Group {
    std::string owner;   // "target" or "draft"
    std::string kind;    // "full" or "sliding"
    int32_t window = 0;  // tokens; 0 for full
    int32_t num_layers = 0;
    int32_t num_kv_heads = 0;
    int32_t head_dim = 0;
    int32_t block_size = 0;     // tokens
    int64_t block_bytes = 0;    // as allocated
    int64_t padding_bytes = 0;  // of block_bytes, lost to slab alignment
    int64_t held_blocks = 0;
    int64_t quarantined_blocks = 0;
  };
  int64_t target_weight_bytes = 0;
  int64_t draft_weight_bytes = 0;
  int64_t kv_pool_bytes = 0;
  std::string
      kv_cache_rule;  // why the pool has its size: "as given", or the reason for the default
  int64_t kv_slab_bytes = 0;
  int64_t kv_num_slabs = 0;
  int64_t kv_free_slabs = 0;
  int64_t workspace_bytes = 0;  // all that follow
  // By purpose: "activations", "logits", "block tables", "proposals" (of drafts that "standard" or
  // "block" draw) and so on.
  std::map<std::string, int64_t, std::less<>> workspace;
  int64_t graph_bytes = 0;  // captured programs; CUDA only
  std::vector<Group> groups;
};

// Since start, or since the last reset_stats().
struct ExecutorStats {
  int64_t num_iterations = 0;
  int64_t num_preemptions = 0;
  int64_t num_shared_tokens = 0;   // of prompts that a sample took over from another of its request
  int64_t num_emitted_tokens = 0;  // that events deliver; the next two are of the same iterations
  int64_t num_draft_tokens = 0;
  int64_t num_accepted_tokens = 0;
  int32_t num_running = 0;  // samples
  int32_t num_waiting = 0;
  double host_us = 0;               // host work of all iterations: schedule, batch, blocks, ring
  std::vector<float> iteration_us;  // device time of each iteration, the first 65,536
  std::vector<float> iteration_idle_us;  // for how long the device stood idle before each of those
  std::vector<int32_t> iteration_num_decoding;  // decoding sequences of each of those
  std::vector<int32_t> iteration_num_prefill;   // prefilling sequences of each of those
};

// Launches of one kernel in one iteration.
struct KernelTime {
  std::string name;  // with the shape, for products
  int32_t count = 0;
  float total_us = 0;  // each timed by itself: no overlap, so the sum exceeds the iteration
};

// A size of the KV pool, and the reason for it in one line.
struct KvCacheSize {
  int64_t bytes = 0;
  std::string reason;
};

// The size that an Executor gives its KV pool where options.kv_cache_bytes is 0. On the CPU: enough
// for max_num_seqs sequences of max_model_len tokens, but at most a quarter of free memory. On
// CUDA: the same, as if no layer had a window, but at most 90 % of free memory less 2 GiB for
// workspace and captured graphs. free_bytes: memory that is free beside the weights of both models;
// nullopt: ask the system. Throws OutOfMemory where a GPU has no room for a pool.
[[nodiscard]] PACELINE_API KvCacheSize
default_kv_cache_size(const Model& target, const Model* draft, const ExecutorOptions& options,
                      std::optional<int64_t> free_bytes = std::nullopt);

class PACELINE_API Executor {
 public:
  // Called on the constructing thread while programs are captured, with how many there are.
  using Progress = std::function<void(int32_t done, int32_t total)>;

  // Runs on the device that the models lie on. draft, a decoder or a head (docs/model-format.md)
  // for this target, may be null when options.speculative asks for no drafts or for prompt lookup.
  // Throws InvalidArgument (an option, a head of another target), Unsupported, OutOfMemory,
  // DeviceError.
  Executor(std::shared_ptr<const Model> target, std::shared_ptr<const Model> draft,
           const ExecutorOptions& options, const Progress& progress = {});
  // Cancels what runs and joins the thread.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Queues a request and returns its id. Throws InvalidArgument for a request that can never run
  // (empty prompt, id out of range, too long, larger than the pool, more samples than there can
  // be): nothing else is affected. Returns nullopt when the queue is full.
  [[nodiscard]] std::optional<RequestId> add_request(Request request);

  // Queues several, in this order, with nothing scheduled in between: what runs beside what does
  // not depend on when the caller's thread gets to run. All or none: throws as add_request does,
  // saying which request, and where they are more than max_waiting_requests; returns nullopt when
  // the queue has no room for all now.
  [[nodiscard]] std::optional<std::vector<RequestId>> add_requests(std::vector<Request> requests);

  // Ends a request, or one of its samples; an event with kCancelled follows for each sample that
  // had not already ended. False: no sample of such a request runs or waits. Throws InvalidArgument
  // for a sample that the request never had.
  bool cancel(RequestId id, std::optional<int32_t> sample = std::nullopt);

  // Takes the events there are, waiting up to timeout_ms for the first (0: do not wait). Rethrows
  // the cause if the engine has failed.
  [[nodiscard]] std::vector<RequestEvent> poll(int32_t timeout_ms);

  [[nodiscard]] MemoryReport memory_report() const;
  [[nodiscard]] ExecutorStats stats() const;
  void reset_stats();

  // Runs the next iteration without prefill rows kernel by kernel and returns their times, the
  // longest first; empty when there was no such iteration within timeout_ms. Its output is that of
  // any other iteration. Throws Unsupported on the CPU.
  [[nodiscard]] std::vector<KernelTime> trace_iteration(int32_t timeout_ms);

  // Blocks until nothing runs or waits, then checks every invariant of the block pool; returns an
  // empty string, or what is broken. For tests and idle self-checks.
  [[nodiscard]] std::string check_integrity();

  // The target's vocabulary size: width of logits.
  [[nodiscard]] int32_t vocab_size() const;
  // As given; where kv_cache_bytes was 0, with the bytes that were chosen.
  [[nodiscard]] const ExecutorOptions& options() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace paceline
