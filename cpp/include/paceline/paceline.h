// SPDX-License-Identifier: Apache-2.0
#pragma once

// The C interface, in C99: it opens a folder that `paceline convert` wrote, runs requests of token
// ids with speculative decoding, and returns their tokens as events. docs/embedding.md introduces
// it, and examples/c/main.c is a complete program.
//
// - Functions return a paceline_status. After any status but PACELINE_OK, paceline_last_error()
//   has the message. No C++ exception leaves a function, and a null pointer that is not allowed is
//   PACELINE_INVALID_ARGUMENT.
// - All functions may be called from any thread. Only paceline_close must be the last call that
//   uses an engine.
// - Every structure begins with its size. So a program keeps working with a later library, whose
//   structures have more fields: fields that the program does not know have their default.
// - Pointers in a structure are read during the call that gets the structure, and not kept.

#include <stddef.h>
#include <stdint.h>

#include <paceline/export.h>

#ifdef __cplusplus
extern "C" {
#endif

// The version of the library, such as "0.1.0".
PACELINE_API const char* paceline_version(void);

// The outcome of a call. The errors are those of paceline/error.h.
typedef enum paceline_status {
  PACELINE_OK = 0,
  PACELINE_INVALID_ARGUMENT = 1,  // the caller's mistake
  PACELINE_UNSUPPORTED = 2,       // valid, but not supported by this build or version
  PACELINE_MODEL_FILE_ERROR = 3,  // the folder cannot be read, or its content is not valid
  PACELINE_INTERNAL_ERROR = 4,    // a bug in Paceline
  PACELINE_DEVICE_ERROR = 5,      // the device or the system failed; a running engine is lost
  PACELINE_OUT_OF_MEMORY = 6,
  // Expected outcomes:
  PACELINE_QUEUE_FULL = 7,   // paceline_add: max_waiting_requests requests wait already
  PACELINE_NO_EVENT = 8,     // paceline_poll: no event within the timeout
  PACELINE_NOT_RUNNING = 9,  // paceline_cancel: the request has ended or never existed
} paceline_status;

// The message of this thread's last call that did not return PACELINE_OK, in UTF-8; "" before the
// first. Valid until the thread's next call of a function that returns a status.
PACELINE_API const char* paceline_last_error(void);

// ---- opening and closing -----------------------------------------------------------------------

// A loaded model with its drafter, and the threads that run requests.
typedef struct paceline_engine paceline_engine;

// Fill it with paceline_options_init, then change fields. Every default is 0 or null.
// paceline/config.h explains the fields of the same names further.
typedef struct paceline_options {
  size_t size;         // set by paceline_options_init
  const char* device;  // "cpu" or "cuda"; null: "cuda" if a GPU is usable, otherwise "cpu"
  // In these fields, 0 leaves the choice to the engine.
  int32_t max_model_len;           // largest prompt + output of a request, in tokens; 0: what the
                                   // model supports, if the memory has room for it
  int32_t max_num_seqs;            // largest number of samples that run at the same time; 0 is 64
  int32_t max_num_batched_tokens;  // largest number of rows of one iteration
  // Largest number of prompt tokens of one sample in an iteration; 0: see ExecutorOptions.
  int32_t prefill_chunk_size;
  int32_t block_size;      // tokens per KV block; 0 is 16
  int32_t num_threads;     // CPU threads that run the ops; 0 is all cores
  int64_t kv_cache_bytes;  // size of the KV pool
  // Instead of kv_cache_bytes, on CUDA only: the fraction of the GPU's memory that the engine may
  // use for everything, in (0, 1].
  double gpu_memory_utilization;
  int32_t max_waiting_requests;  // largest number of queued requests; 0 is no bound
  // Seconds of work between lines of figures in the log; 0 is 10, a negative number is off.
  double log_interval_s;
  int32_t num_speculative_tokens;       // drafts per iteration, k; 0 is the folder's default
  int32_t plain_decoding;               // not 0: the engine does not use the folder's drafter
  const char* rejection_sample_method;  // "coupled" (default), "standard" or "block"
  const char* draft_sample_method;      // "probabilistic" (default) or "greedy"
  int32_t draft_proposals;              // tokens that a sampled draft is chosen from; 0 is 64
  // 0 is off; other values need draft_driver "while", except with a block drafter.
  double draft_stop_threshold;
  // Prompt lookup instead of the drafter; both 0: off.
  int32_t prompt_lookup_min, prompt_lookup_max;
  const char* draft_driver;  // "unrolled" (default), "replay", "while" or "eager"
  // Not 0: prompts take over no KV of earlier requests (enable_prefix_caching is false).
  int32_t disable_prefix_caching;
  // Each iteration chooses how many drafts the next one verifies, up to num_speculative_tokens.
  // 0: the default, which is only with "coupled"; positive: yes; negative: no.
  int32_t adaptive_drafts;
  // generated: c_fields
  // The ranks that share the drafter: tensor_parallel_size, so that each rank computes a part of
  // it, or 1, so that each computes all of it. 0 is what takes less time by a count of bytes: where
  // the bytes that a draft step then does not read are more than 24 MiB for each exchange that it
  // makes, the drafter is shared (docs/tensor-parallel.md). On GPUs it must agree with the GpuShare
  // that the drafter was loaded with.
  int32_t draft_tensor_parallel_size;
  // Of models with recurrent layers the prefix cache keeps a state at every multiple of this many
  // tokens, which is a multiple of block_size, and at the ends of prompts and outputs. 0 is 4,096,
  // or the largest multiple of block_size below.
  int32_t state_interval;
  // Ranks that share a model, 1..8 (docs/tensor-parallel.md). On the CPU they are threads, which
  // share num_threads. Each has a GPU of its own on CUDA: in C++ those that the models were loaded
  // or copied to, in C the first ones.
  int32_t tensor_parallel_size;
  // Seconds, up to 86,400, after which an iteration that the device has not completed is a failure
  // of the device, which poll() raises like any other; 0 is off. Longer than the longest iteration.
  // The destructor still waits for the device.
  double hang_timeout_s;
  // end of generated
} paceline_options;

// Sets *options to the defaults. size: sizeof(paceline_options).
PACELINE_API paceline_status paceline_options_init(paceline_options* options, size_t size);

// Loads a folder that `paceline convert` wrote and starts an engine. options may be null, for the
// defaults. Sets *engine, which is null after an error.
PACELINE_API paceline_status paceline_open(const char* folder, const paceline_options* options,
                                           paceline_engine** engine);

// Drops all requests, ends the engine's threads and frees its memory. Null is allowed.
PACELINE_API void paceline_close(paceline_engine* engine);

// ---- requests ----------------------------------------------------------------------------------

// How the tokens of a request are chosen. Fill it with paceline_sampling_init, then change fields.
// docs/sampling.md has the formulas, and paceline/request.h the ranges.
typedef struct paceline_sampling {
  size_t size;                // set by paceline_sampling_init
  double temperature;         // 1; 0 is greedy
  uint64_t seed;              // 0; the output is a function of request and seed
  int32_t max_tokens;         // 16; prompt and output also end at max_model_len
  int32_t min_tokens;         // 0; output tokens before a stop token is allowed
  int32_t num_samples;        // 1; sample i has the output of a request with seed + i
  int32_t ignore_eos;         // 0; not 0: the folder's end-of-sequence ids do not end a sample
  int32_t top_k;              // 0, which is off
  double top_p;               // 1, which is off
  double min_p;               // 0, which is off
  double repetition_penalty;  // 1, which is off
  double presence_penalty;    // 0
  double frequency_penalty;   // 0
  // Arrays, each with its number of elements; a null array has 0.
  const int32_t* stop_token_ids;  // end a sample, beside the folder's end-of-sequence ids
  size_t num_stop_token_ids;
  const int32_t* allowed_token_ids;  // the only tokens that may be drawn; none: all may
  size_t num_allowed_token_ids;
  const int32_t* logit_bias_token_ids;  // tokens whose logits change
  const float* logit_bias_values;       // what is added to them
  size_t num_logit_bias;
  const int32_t* bad_words_token_ids;  // token sequences that the output never completes, joined
  const size_t* bad_words_lengths;     // tokens of each sequence
  size_t num_bad_words;
  // -1, which is num_speculative_tokens of the engine; most drafts that are verified at once, 0 to
  // that number
  int32_t num_speculative_tokens;
  // 0; tokens at the prompt's end that are output of an earlier run of this request, which goes on
  // after them as if it had not been interrupted. Less than the prompt and max_tokens; with 1
  // sample
  int32_t num_resumed_tokens;
  // Null; requests of different salts share no KV. At most 512 bytes; "" is the same as null
  const char* cache_salt;
} paceline_sampling;

// Sets *sampling to the defaults. size: sizeof(paceline_sampling).
PACELINE_API paceline_status paceline_sampling_init(paceline_sampling* sampling, size_t size);

// Queues a request and sets *request_id. sampling may be null, for the defaults. Returns
// PACELINE_QUEUE_FULL if max_waiting_requests are queued, and PACELINE_INVALID_ARGUMENT for a
// request that can never run; other requests are not affected.
PACELINE_API paceline_status paceline_add(paceline_engine* engine, const int32_t* token_ids,
                                          size_t num_token_ids, const paceline_sampling* sampling,
                                          int64_t* request_id);

// Ends sample `sample` of a request, or all of them if it is -1. An event with
// PACELINE_FINISH_CANCELLED follows for each that has not ended. Returns PACELINE_NOT_RUNNING if no
// sample of the request runs or waits.
PACELINE_API paceline_status paceline_cancel(paceline_engine* engine, int64_t request_id,
                                             int32_t sample);

// ---- events ------------------------------------------------------------------------------------

// Why a sample ended.
typedef enum paceline_finish_reason {
  PACELINE_FINISH_NONE = 0,       // it still runs
  PACELINE_FINISH_STOP = 1,       // a stop token was emitted
  PACELINE_FINISH_LENGTH = 2,     // max_tokens or max_model_len was reached
  PACELINE_FINISH_CANCELLED = 3,  // paceline_cancel
  PACELINE_FINISH_ERROR = 4,      // `error` of the event says what happened
} paceline_finish_reason;

// The largest number of tokens of an event.
enum { PACELINE_MAX_EVENT_TOKENS = 32 };

// What one iteration delivers to one sample of a request: the tokens that it emitted, or the end of
// the sample. Events of a sample come in order, and its last one has a finish_reason.
typedef struct paceline_event {
  size_t size;  // set it to sizeof(paceline_event) before the first paceline_poll
  int64_t request_id;
  int32_t sample;  // 0 to num_samples - 1
  paceline_finish_reason finish_reason;
  int32_t num_tokens;
  int32_t token_ids[PACELINE_MAX_EVENT_TOKENS];  // the first num_tokens are set
  // Null without PACELINE_FINISH_ERROR. Valid until this thread's next call that returns a status.
  const char* error;
  // Drafts that the iteration verified, and those of them that it accepted.
  int32_t num_draft_tokens;
  int32_t num_accepted_tokens;
  // The remaining fields are set in the last event of a sample only. Totals of the sample:
  int64_t total_iterations;  // iterations with drafts in which the sample emitted tokens
  int64_t total_draft_tokens;
  int64_t total_accepted_tokens;
  int32_t num_cached_tokens;  // prompt tokens whose KV was taken over instead of computed
  // Microseconds of the steady clock.
  int64_t arrival_us;      // the request was queued
  int64_t first_token_us;  // the first output token was emitted; 0 without one
  int64_t finish_us;       // the sample ended
  // In every event: the method that made its drafts, such as "ngram"; null without drafts. It stays
  // valid.
  const char* drafter;
} paceline_event;

// Sets *event to the next event. Without one it waits up to timeout_ms milliseconds; 0 does not
// wait. Returns PACELINE_NO_EVENT without one. If several threads poll, each event goes to one of
// them. When the engine has failed and all events have been returned, it returns the cause.
PACELINE_API paceline_status paceline_poll(paceline_engine* engine, int32_t timeout_ms,
                                           paceline_event* event);

// ---- receipts ----------------------------------------------------------------------------------

// A sample that has ended, as its events told it.
typedef struct paceline_output {
  size_t size;     // sizeof(paceline_output)
  int32_t sample;  // 0 to num_samples - 1
  // All its tokens. Those that the request has resumed are in the prompt.
  const int32_t* token_ids;
  size_t num_token_ids;
  paceline_finish_reason finish_reason;  // STOP, LENGTH or CANCELLED
  int32_t with_text;  // not 0: the receipt shows the prompt and lists of tokens, not only digests
} paceline_output;

// Sets *receipt to the receipt of an output as one line of JSON (docs/receipts.md), from which
// `paceline verify` replays it. The request is given as to paceline_add; sampling may be null. The
// text is valid until this thread's next call of this function. The first call of an engine
// computes the digest of its weights, about a second for each GB unless the cache has it.
PACELINE_API paceline_status paceline_receipt(paceline_engine* engine, const int32_t* token_ids,
                                              size_t num_token_ids,
                                              const paceline_sampling* sampling,
                                              const paceline_output* output, const char** receipt);

// ---- counters ----------------------------------------------------------------------------------

// Counters since the start, the load now, and sizes. paceline/executor.h explains them further.
typedef struct paceline_engine_stats {
  size_t size;  // set it to sizeof(paceline_engine_stats) before the call
  int64_t num_iterations;
  // Samples that have ended: with a stop token or at their length, with an error, or cancelled.
  int64_t num_finished;
  int64_t num_failed;
  int64_t num_cancelled;
  int64_t num_preemptions;      // running samples that gave their KV blocks back
  int64_t num_prompt_tokens;    // prompt tokens computed, those of recomputed prompts again
  int64_t num_cached_tokens;    // prompt tokens whose KV was taken over instead
  int64_t num_emitted_tokens;   // tokens that events have delivered
  int64_t num_verify_windows;   // verify windows with drafts among those that emitted these tokens
  int64_t num_draft_tokens;     // drafts verified in them
  int64_t num_accepted_tokens;  // verified drafts that were accepted
  int32_t num_running;          // samples that run now
  int32_t num_waiting;          // samples that wait now
  double uptime_s;              // since the engine started
  int64_t weight_bytes;         // of target and drafter
  int64_t workspace_bytes;
  int64_t graph_bytes;    // captured graphs
  int64_t kv_pool_bytes;  // all of the KV pool
  int64_t kv_free_bytes;  // its slabs that no KV group holds
} paceline_engine_stats;

// Fills *stats with the counters of an engine.
PACELINE_API paceline_status paceline_stats(paceline_engine* engine, paceline_engine_stats* stats);

// ---- log ---------------------------------------------------------------------------------------

// How serious a line of the log is.
typedef enum paceline_log_level {
  PACELINE_LOG_INFO = 0,     // facts of the start, and figures of an interval
  PACELINE_LOG_WARNING = 1,  // requests ended with an error, the engine goes on
  PACELINE_LOG_ERROR = 2,    // the engine has failed
} paceline_log_level;

// Receives one line without a newline, in UTF-8, and the user_data given with the callback. Lines
// never contain prompts or outputs. Called on the threads of engines and on those that open them,
// perhaps on several at once.
typedef void (*paceline_log_callback)(paceline_log_level level, const char* line, void* user_data);

// Sends the log of the process to `callback` in place of the former one; null, the default,
// discards it. A call of the former callback may still be under way when this returns.
PACELINE_API paceline_status paceline_set_log_callback(paceline_log_callback callback,
                                                       void* user_data);

#ifdef __cplusplus
}
#endif
