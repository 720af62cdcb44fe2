// SPDX-License-Identifier: Apache-2.0
#pragma once

// Options of an Executor. Plain data, but for a drafter of the caller: the Executor refuses a value
// that is not allowed with InvalidArgument and never adjusts one.

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>

#include <paceline/guide.h>

namespace paceline {

// The rule that accepts drafts.
enum class AcceptMethod : uint8_t {
  // Accepts a draft while it equals the target's own draw with the same noise. The output is bit
  // for bit that of plain decoding.
  kCoupled,
  // Rejection sampling: accepts a draft with probability min(1, p / q), where p and q are its
  // probabilities under target and drafter, and samples from the residual distribution after the
  // first rejection. The output follows the target's distribution; which tokens a seed gives
  // depends on the drafts.
  kStandard,
  // Block verification (Sun et al., 2024): rejection sampling that judges the drafts of a verify
  // window together. It accepts at least as many drafts on average as kStandard.
  kBlock,
  // Does all the work of kCoupled, then overrides the verdict so that the mean acceptance length
  // is `synthetic_acceptance_length`. For benches with dummy weights; the output is meaningless.
  kSynthetic,
};

// How a drafter chooses its drafts.
enum class DraftSampleMethod : uint8_t {
  kProbabilistic,  // at the request's temperature
  kGreedy,         // each draft is the drafter's most likely token
};

// How the draft steps of an iteration are run. All drivers give identical bits.
enum class DraftDriver : uint8_t {
  kUnrolled,  // the program of the whole iteration contains k-1 copies of the step
  kReplay,    // the host launches the program of one step k-1 times
  kWhile,     // the device repeats the program of one step while a sequence still drafts
  kEager,     // no program is captured; for debugging, and the reference in tests
};

// The position of the queries of a drafter whose position stays fixed while it drafts (Gemma 4
// MTP). The keys that it reads are the same for both.
enum class DraftPosition : uint8_t {
  kLast,  // of the last token that has KV, one before the newest
  kNext,  // of the newest token
};

// The structs, limits and lists below come from python/paceline/options.toml, where each option is
// written once (CONTRIBUTING.md, "Add an option").

// generated: structs
struct SpeculativeOptions {
  // A drafter of the caller, instead of a model or prompt lookup; null: none. The method is
  // "custom" then. Each verify window waits until the host has read the last result and called it,
  // so it is for research. With kStandard and kBlock it needs DraftSampleMethod::kGreedy.
  std::shared_ptr<HostDrafter> drafter;
  // k, drafts per iteration: 1..16. 0 is plain decoding; with a drafter that load_model_folder has
  // read, it is the folder's default.
  int32_t num_speculative_tokens = 0;
  // The rule that accepts drafts.
  AcceptMethod rejection_sample_method = AcceptMethod::kCoupled;
  // Mean tokens per iteration, bonus token included: in [1, k+1] with kSynthetic, otherwise 0.
  double synthetic_acceptance_length = 0;
  // How drafts are chosen. kGreedy is allowed with kStandard and kBlock only. With these two
  // methods prompt lookup needs it, because its drafts have no distribution to be sampled from.
  DraftSampleMethod draft_sample_method = DraftSampleMethod::kProbabilistic;
  // Prompt lookup. The drafts are the k tokens that followed the earlier occurrence of a sequence's
  // last n tokens, for the largest n in [prompt_lookup_min, prompt_lookup_max] with such an
  // occurrence. Without a drafter the method is "ngram". Beside a model, whose drafts these replace
  // where there are any, it needs kCoupled. Both 0: off; otherwise 1 <= prompt_lookup_min <=
  // prompt_lookup_max.
  int32_t prompt_lookup_min = 0;
  // See prompt_lookup_min; at most 256. A longer n-gram would seldom match and never help.
  int32_t prompt_lookup_max = 0;
  // The ranks that share the drafter: tensor_parallel_size, so that each rank computes a part of
  // it, or 1, so that each computes all of it. 0 is what takes less time by a count of bytes: where
  // the bytes that a draft step then does not read are more than 24 MiB for each exchange that it
  // makes, the drafter is shared (docs/tensor-parallel.md). On GPUs it must agree with the GpuShare
  // that the drafter was loaded with.
  int32_t draft_tensor_parallel_size = 0;
  // How draft steps are run.
  DraftDriver draft_driver = DraftDriver::kUnrolled;
  // Drafting ends for a sequence after a draft whose probability is below this threshold or, with a
  // confidence head, before a draft whose estimated probability of acceptance is below it. The
  // former is the softmax of the drafter's logits at temperature 1, truncated by the request's
  // top_k, top_p and min_p. 0 is off; other values in (0, 1) need DraftDriver::kWhile, except with
  // a block drafter, which has no draft steps.
  double draft_stop_threshold = 0;
  // Allowed only with a drafter whose position stays fixed (Gemma 4 MTP), and kLast there if not
  // given.
  std::optional<DraftPosition> draft_position;
  // The number of most likely tokens of the drafter that a sampled draft is chosen from: 1..256, or
  // 0 for 64. Other values than 0 are allowed only with kStandard or kBlock and kProbabilistic
  // drafts.
  int32_t draft_proposals = 0;
  // Each iteration chooses how many drafts the next one verifies, from 0 to num_speculative_tokens,
  // by the times of iterations and the acceptance that it has measured (docs/adaptive.md). With
  // false, num_speculative_tokens is used. Not given: true with kCoupled, whose output does not
  // depend on the choice, otherwise false. With kStandard and kBlock, true makes seeded output
  // depend on times. It must not be true without a drafter, with `drafter`, and with
  // use_null_device; not given is false there.
  std::optional<bool> adaptive;
};

struct ExecutorOptions {
  // Largest length of prompt + output of one request, in tokens: 1 to the positions of the target,
  // and to those of a draft model. 0 is the positions of the target, or of a draft model that has
  // fewer, but at least 4,096; where a sequence of that length does not fit the KV pool or the
  // memory beside it, it is the largest multiple of block_size that does, with a line in the log.
  // With compressed attention that has an indexer (DeepSeek-V4) it is at most 4,096.
  int32_t max_model_len = 0;
  // Largest number of samples that run at the same time, 1..1024.
  int32_t max_num_seqs = 64;
  // Largest number of rows of one iteration, from max_num_seqs * (k+1) to 524,288; 0 is 2,048, or
  // max_num_seqs * (k+1) if that is more.
  int32_t max_num_batched_tokens = 0;
  // Largest number of prompt tokens of one sample in one iteration, up to 524,288; 0 is
  // max_num_batched_tokens, but while other samples decode, the prompt tokens of all together are
  // limited so that an iteration takes about 2.75 times as long as one without, by measured times
  // (with `standard` and `block` acceptance 384 tokens).
  int32_t prefill_chunk_size = 0;
  // Largest number of queued requests; 0 is no bound.
  int32_t max_waiting_requests = 0;
  // Size of the KV pool of all groups, in bytes, of each rank; 0 is the size that
  // default_kv_cache_size() gives.
  int64_t kv_cache_bytes = 0;
  // Instead of kv_cache_bytes, on CUDA only: the fraction of the GPU's memory that the engine may
  // use for the weights of both models, the workspace, captured graphs and the KV pool together, in
  // (0, 1]. The pool takes what the others leave, but never more than all sequences can use. 0 is
  // not given.
  double gpu_memory_utilization = 0;
  // Tokens per KV block, 1..256.
  int32_t block_size = 16;
  // A request that begins with the tokens of an earlier one takes over their KV, where the pool
  // still has it, instead of computing it. The output is the same.
  bool enable_prefix_caching = true;
  // Of models with recurrent layers the prefix cache keeps a state at every multiple of this many
  // tokens, which is a multiple of block_size, and at the ends of prompts and outputs. 0 is 4,096,
  // or the largest multiple of block_size below.
  int32_t state_interval = 0;
  // CPU threads that run the ops, 1..1024; 0 is all cores.
  int32_t num_threads = 0;
  // Ranks that share a model, 1..8 (docs/tensor-parallel.md). On the CPU they are threads, which
  // share num_threads. Each has a GPU of its own on CUDA: in C++ those that the models were loaded
  // or copied to, in C the first ones.
  int32_t tensor_parallel_size = 1;
  // Largest number of most probable tokens whose logprobs a request may ask for, 0..64. With 0 no
  // request may ask for logprobs, and no memory is reserved for them.
  int32_t max_logprobs = 0;
  // How tokens are drafted and accepted.
  SpeculativeOptions speculative;
  // Seconds of work, up to 86,400, after which the engine sends the next line of figures to the log
  // sink (log.h); 0 is off.
  double log_interval_s = 10;
  // Seconds, up to 86,400, after which an iteration that the device has not completed is a failure
  // of the device, which poll() raises like any other; 0 is off. Longer than the longest iteration.
  // The destructor still waits for the device.
  double hang_timeout_s = 0;
  // For tests, 0..2, on the CPU only. With n > 0 the device runs iteration i only after iteration
  // i+n has been launched, or when the engine waits for i.
  int32_t device_lateness = 0;
  // For tests: before each of its stages (plan, launch, read) the engine's thread sleeps for a
  // random time of at most this, in microseconds, 0..1,000,000.
  int32_t host_delay_max_us = 0;
  // For tests: not 0 makes the number of drafts of each iteration, and that of prompt rows beside
  // decoding sequences, pseudorandom functions of this seed, whatever `adaptive` and
  // `prefill_chunk_size` say.
  uint64_t draft_schedule_seed = 0;
  // For benches of the host side: no op runs, every sequence emits token 0, and no draft is
  // accepted.
  bool use_null_device = false;
  // For tests: the device fills a KV block with NaN as soon as it may be reused, so that a stale
  // read becomes visible.
  bool poison_freed_blocks = false;
};
// end of generated

// The names of the enumerators above, in their order. Static, so that the library exports none.
template <class Enum>
static constexpr std::array<const char*, 0> option_names = {};
// generated: names
template <>
constexpr std::array<const char*, 4> option_names<AcceptMethod> = {
    "coupled",
    "standard",
    "block",
    "synthetic",
};
template <>
constexpr std::array<const char*, 2> option_names<DraftSampleMethod> = {
    "probabilistic",
    "greedy",
};
template <>
constexpr std::array<const char*, 4> option_names<DraftDriver> = {
    "unrolled",
    "replay",
    "while",
    "eager",
};
template <>
constexpr std::array<const char*, 2> option_names<DraftPosition> = {
    "last",
    "next",
};
// end of generated

// An upper bound that is not allowed itself.
struct Below {
  double value = 0;
};

// The largest values of options, by name.
namespace largest {
// generated: largest
inline constexpr int32_t num_speculative_tokens = 16;
inline constexpr int32_t prompt_lookup_min = 256;
inline constexpr int32_t prompt_lookup_max = 256;
inline constexpr int32_t draft_tensor_parallel_size = 8;
inline constexpr int32_t draft_proposals = 256;
inline constexpr int32_t max_num_seqs = 1024;
inline constexpr int32_t max_num_batched_tokens = 524288;
inline constexpr int32_t prefill_chunk_size = 524288;
inline constexpr int32_t max_waiting_requests = 1073741824;
inline constexpr int32_t block_size = 256;
inline constexpr int32_t state_interval = 1073741824;
inline constexpr int32_t num_threads = 1024;
inline constexpr int32_t tensor_parallel_size = 8;
inline constexpr int32_t max_logprobs = 64;
inline constexpr double log_interval_s = 86400;
inline constexpr double hang_timeout_s = 86400;
inline constexpr int32_t device_lateness = 2;
inline constexpr int32_t host_delay_max_us = 1000000;
// end of generated
}  // namespace largest

// Call visit(name, member) for each option; with its smallest and its largest value if these do not
// depend on other options or the model: visit(name, member, low, high). The binding reads and
// writes options by these functions, and the Executor checks them.
// generated: visit
template <class Options, class Visit>
  requires std::is_same_v<std::remove_const_t<Options>, SpeculativeOptions>
void visit_options(Options& o, const Visit& visit) {
  visit("drafter", o.drafter);
  visit("num_speculative_tokens", o.num_speculative_tokens, 0, largest::num_speculative_tokens);
  visit("rejection_sample_method", o.rejection_sample_method);
  visit("synthetic_acceptance_length", o.synthetic_acceptance_length);
  visit("draft_sample_method", o.draft_sample_method);
  visit("prompt_lookup_min", o.prompt_lookup_min, 0, largest::prompt_lookup_min);
  visit("prompt_lookup_max", o.prompt_lookup_max, 0, largest::prompt_lookup_max);
  visit("draft_tensor_parallel_size", o.draft_tensor_parallel_size, 0,
        largest::draft_tensor_parallel_size);
  visit("draft_driver", o.draft_driver);
  visit("draft_stop_threshold", o.draft_stop_threshold, 0, Below{1});
  visit("draft_position", o.draft_position);
  visit("draft_proposals", o.draft_proposals, 0, largest::draft_proposals);
  visit("adaptive", o.adaptive);
}

template <class Options, class Visit>
  requires std::is_same_v<std::remove_const_t<Options>, ExecutorOptions>
void visit_options(Options& o, const Visit& visit) {
  visit("max_model_len", o.max_model_len);
  visit("max_num_seqs", o.max_num_seqs, 1, largest::max_num_seqs);
  visit("max_num_batched_tokens", o.max_num_batched_tokens, 0, largest::max_num_batched_tokens);
  visit("prefill_chunk_size", o.prefill_chunk_size, 0, largest::prefill_chunk_size);
  visit("max_waiting_requests", o.max_waiting_requests, 0, largest::max_waiting_requests);
  visit("kv_cache_bytes", o.kv_cache_bytes);
  visit("gpu_memory_utilization", o.gpu_memory_utilization);
  visit("block_size", o.block_size, 1, largest::block_size);
  visit("enable_prefix_caching", o.enable_prefix_caching);
  visit("state_interval", o.state_interval);
  visit("num_threads", o.num_threads, 0, largest::num_threads);
  visit("tensor_parallel_size", o.tensor_parallel_size, 1, largest::tensor_parallel_size);
  visit("max_logprobs", o.max_logprobs, 0, largest::max_logprobs);
  visit_options(o.speculative, visit);
  visit("log_interval_s", o.log_interval_s, 0, largest::log_interval_s);
  visit("hang_timeout_s", o.hang_timeout_s, 0, largest::hang_timeout_s);
  visit("device_lateness", o.device_lateness, 0, largest::device_lateness);
  visit("host_delay_max_us", o.host_delay_max_us, 0, largest::host_delay_max_us);
  visit("draft_schedule_seed", o.draft_schedule_seed);
  visit("use_null_device", o.use_null_device);
  visit("poison_freed_blocks", o.poison_freed_blocks);
}
// end of generated

// Calls visit(name, member, reason, methods) for each option that only some methods accept: why
// others do not, for a message, and the names of these methods.
// generated: methods
template <class Visit>
void visit_methods(const SpeculativeOptions& o, const Visit& visit) {
  visit("drafter", o.drafter, "", "'custom'");
  visit("prompt_lookup_min", o.prompt_lookup_min, "",
        "'ngram', 'draft_model', 'eagle', 'eagle3', 'mtp', 'gemma4_mtp', 'dflash', 'dflash2', "
        "'dspark'");
  visit("prompt_lookup_max", o.prompt_lookup_max, "",
        "'ngram', 'draft_model', 'eagle', 'eagle3', 'mtp', 'gemma4_mtp', 'dflash', 'dflash2', "
        "'dspark'");
  visit("draft_tensor_parallel_size", o.draft_tensor_parallel_size, "which has no model",
        "'draft_model', 'eagle', 'eagle3', 'mtp', 'gemma4_mtp', 'dflash', 'dflash2', 'dspark'");
  visit("draft_stop_threshold", o.draft_stop_threshold, "whose drafts have no probability",
        "'draft_model', 'eagle', 'eagle3', 'mtp', 'gemma4_mtp', 'dflash', 'dflash2', 'dspark'");
  visit("draft_position", o.draft_position, "whose drafts have one position each", "'gemma4_mtp'");
  visit("draft_proposals", o.draft_proposals, "whose drafts have no distribution",
        "'draft_model', 'eagle', 'eagle3', 'mtp', 'gemma4_mtp', 'dflash', 'dflash2', 'dspark'");
}
// end of generated

// Calls visit(value, member) for each option that a structure of the C interface has by its name,
// with 0 for the default.
// generated: given
template <class Given, class Visit>
void visit_given(const Given& given, ExecutorOptions& o, const Visit& visit) {
  visit(given.max_model_len, o.max_model_len);
  visit(given.max_num_seqs, o.max_num_seqs);
  visit(given.max_num_batched_tokens, o.max_num_batched_tokens);
  visit(given.prefill_chunk_size, o.prefill_chunk_size);
  visit(given.max_waiting_requests, o.max_waiting_requests);
  visit(given.kv_cache_bytes, o.kv_cache_bytes);
  visit(given.gpu_memory_utilization, o.gpu_memory_utilization);
  visit(given.block_size, o.block_size);
  visit(given.state_interval, o.state_interval);
  visit(given.num_threads, o.num_threads);
  visit(given.tensor_parallel_size, o.tensor_parallel_size);
  visit(given.hang_timeout_s, o.hang_timeout_s);
  visit(given.num_speculative_tokens, o.speculative.num_speculative_tokens);
  visit(given.prompt_lookup_min, o.speculative.prompt_lookup_min);
  visit(given.prompt_lookup_max, o.speculative.prompt_lookup_max);
  visit(given.draft_tensor_parallel_size, o.speculative.draft_tensor_parallel_size);
  visit(given.draft_stop_threshold, o.speculative.draft_stop_threshold);
  visit(given.draft_proposals, o.speculative.draft_proposals);
}
// end of generated

}  // namespace paceline
