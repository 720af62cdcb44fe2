// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <paceline/device.h>
#include <paceline/error.h>
#include <paceline/executor.h>
#include <paceline/log.h>
#include <paceline/model.h>
#include <paceline/paceline.h>
#include <paceline/receipt.h>
#include <paceline/version.h>

#include "base/check.h"
#include "c_api/c_struct.h"
#include "wire/limits.h"

// What the C interface calls an engine.
struct paceline_engine {
  paceline_engine(paceline::ModelFolder model_folder, const paceline::ExecutorOptions& options)
      : folder(std::move(model_folder)), executor(folder.target, folder.draft, options) {}

  paceline::ModelFolder folder;
  paceline::Executor executor;

  std::mutex mutex;  // of the fields below
  std::condition_variable poll_ended;
  bool is_polling = false;                     // a thread waits for events of the executor
  std::vector<paceline::RequestEvent> events;  // the last ones that a thread has got
  size_t num_returned = 0;                     // of these

  std::mutex receipt_mutex;  // of the field below
  std::optional<paceline::ReceiptMaker> receipts;
};

namespace paceline {
namespace {

// ---- errors ------------------------------------------------------------------------------------

std::string& last_error() {
  thread_local std::string message;
  return message;
}

// Leaves an empty message where there is no memory for it.
void set_last_error(const char* message) noexcept {
  try {
    last_error() = message;
  } catch (...) {
    last_error().clear();
  }
}

paceline_status fail(paceline_status status, const char* message) noexcept {
  set_last_error(message);
  return status;
}

// Runs a function of the interface. It returns a status or throws.
template <class Body>
paceline_status guarded(Body body) noexcept {
  try {
    return body();
  } catch (const ModelFileError& error) {
    return fail(PACELINE_MODEL_FILE_ERROR, error.what());
  } catch (const InvalidArgument& error) {
    return fail(PACELINE_INVALID_ARGUMENT, error.what());
  } catch (const Unsupported& error) {
    return fail(PACELINE_UNSUPPORTED, error.what());
  } catch (const DeviceError& error) {
    return fail(PACELINE_DEVICE_ERROR, error.what());
  } catch (const OutOfMemory& error) {
    return fail(PACELINE_OUT_OF_MEMORY, error.what());
  } catch (const std::bad_alloc&) {
    return fail(PACELINE_OUT_OF_MEMORY, "the process is out of memory; free some");
  } catch (const std::exception& error) {
    return fail(PACELINE_INTERNAL_ERROR, error.what());
  } catch (...) {
    return fail(PACELINE_INTERNAL_ERROR, "an exception of unknown type; please report");
  }
}

void check_not_null(const char* name, const void* pointer) {
  if (pointer == nullptr) throw InvalidArgument(concat(name, " is null; give a pointer"));
}

// ---- arguments ---------------------------------------------------------------------------------

template <class Element>
std::vector<Element> read_array(const char* name, const Element* elements, size_t count) {
  if (count == 0) return {};
  if (elements == nullptr) {
    throw InvalidArgument(concat(name, " is null, but has ", count, " elements; give a pointer"));
  }
  return {elements, elements + count};
}

// Finds the enumerator of a name; `names` has them in order. Null is the first.
template <class Value>
Value named(const char* field, const char* given, std::span<const char* const> names) {
  if (given == nullptr) return Value{};
  std::string allowed;
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == std::string_view(given)) return static_cast<Value>(i);
    allowed += concat(allowed.empty() ? "\"" : ", \"", names[i], "\"");
  }
  constexpr size_t kMaxShown = 60;
  std::string_view shown(given);
  const bool is_long = shown.size() > kMaxShown;
  throw InvalidArgument(concat(field, " is \"", shown.substr(0, kMaxShown), is_long ? "..." : "",
                               "\"; allowed: ", allowed));
}

Device read_device(const char* name) {
  if (name == nullptr) return cuda_status().is_usable ? Device::kCuda : Device::kCpu;
  static_assert(static_cast<int>(Device::kCpu) == 0 && static_cast<int>(Device::kCuda) == 1);
  static constexpr std::array<const char*, 2> kNames = {"cpu", "cuda"};
  return named<Device>("device", name, kNames);
}

// Loads a folder to a device; with several ranks on GPUs, to the first ones.
ModelFolder load_folder(const char* folder, Device device, const ExecutorOptions& o) {
  if (device != Device::kCuda || o.tensor_parallel_size <= 1) {
    return load_model_folder(folder, device);
  }
  std::vector<int32_t> gpus(static_cast<size_t>(o.tensor_parallel_size));
  std::iota(gpus.begin(), gpus.end(), 0);
  return load_model_folder(folder, gpus, o.speculative.draft_tensor_parallel_size);
}

paceline_options default_options() {
  paceline_options options{};
  options.size = sizeof(options);
  return options;
}

ExecutorOptions executor_options(const paceline_options& given) {
  ExecutorOptions options;
  visit_given(given, options, [](auto value, auto& field) {
    if (value != 0) field = value;  // 0 stands for the default that the field has
  });
  options.enable_prefix_caching = given.disable_prefix_caching == 0;
  if (given.log_interval_s != 0) {
    options.log_interval_s = given.log_interval_s < 0 ? 0 : given.log_interval_s;
  }
  SpeculativeOptions& s = options.speculative;
  // Without the last one, kSynthetic, whose output is meaningless.
  s.rejection_sample_method =
      named<AcceptMethod>("rejection_sample_method", given.rejection_sample_method,
                          std::span(option_names<AcceptMethod>).first(3));
  s.draft_sample_method = named<DraftSampleMethod>("draft_sample_method", given.draft_sample_method,
                                                   option_names<DraftSampleMethod>);
  s.draft_driver =
      named<DraftDriver>("draft_driver", given.draft_driver, option_names<DraftDriver>);
  if (given.adaptive_drafts != 0) s.adaptive = given.adaptive_drafts > 0;
  return options;
}

paceline_sampling default_sampling() {
  const SamplingOptions defaults;
  paceline_sampling sampling{};
  sampling.size = sizeof(sampling);
  sampling.temperature = defaults.temperature;
  sampling.seed = defaults.seed;
  sampling.max_tokens = defaults.max_tokens;
  sampling.min_tokens = defaults.min_tokens;
  sampling.num_samples = Request().num_samples;
  sampling.num_speculative_tokens = Request().num_speculative_tokens;
  sampling.top_k = defaults.top_k;
  sampling.top_p = defaults.top_p;
  sampling.min_p = defaults.min_p;
  sampling.repetition_penalty = defaults.repetition_penalty;
  sampling.presence_penalty = defaults.presence_penalty;
  sampling.frequency_penalty = defaults.frequency_penalty;
  return sampling;
}

// The stop tokens of a request: its own and, unless it ignores them, the folder's.
std::vector<int32_t> stop_token_ids(const paceline_sampling& given, const ModelFolder& folder) {
  std::vector<int32_t> ids =
      read_array("stop_token_ids", given.stop_token_ids, given.num_stop_token_ids);
  if (given.ignore_eos == 0) {
    for (const int32_t id : folder.stop_token_ids) {
      if (std::ranges::find(ids, id) == ids.end()) ids.push_back(id);
    }
  }
  return ids;
}

std::vector<LogitBias> logit_bias(const paceline_sampling& given) {
  const std::vector<int32_t> ids =
      read_array("logit_bias_token_ids", given.logit_bias_token_ids, given.num_logit_bias);
  const std::vector<float> values =
      read_array("logit_bias_values", given.logit_bias_values, given.num_logit_bias);
  std::vector<LogitBias> biases;
  for (size_t i = 0; i < ids.size(); ++i) biases.push_back({.token = ids[i], .bias = values[i]});
  return biases;
}

std::vector<std::vector<int32_t>> bad_words(const paceline_sampling& given) {
  const std::vector<size_t> lengths =
      read_array("bad_words_lengths", given.bad_words_lengths, given.num_bad_words);
  if (!lengths.empty()) check_not_null("bad_words_token_ids", given.bad_words_token_ids);
  std::vector<std::vector<int32_t>> words;
  const int32_t* next = given.bad_words_token_ids;
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] > static_cast<size_t>(kMaxBadWordTokens)) {
      throw InvalidArgument(concat("bad_words_lengths[", i, "] is ", lengths[i], "; allowed: 1 to ",
                                   kMaxBadWordTokens));
    }
    words.emplace_back(next, next + lengths[i]);
    next += lengths[i];
  }
  return words;
}

SamplingOptions sampling_options(const paceline_sampling& given, const ModelFolder& folder) {
  return {.temperature = given.temperature,
          .seed = given.seed,
          .max_tokens = given.max_tokens,
          .stop_token_ids = stop_token_ids(given, folder),
          .min_tokens = given.min_tokens,
          .logit_bias = logit_bias(given),
          .repetition_penalty = given.repetition_penalty,
          .presence_penalty = given.presence_penalty,
          .frequency_penalty = given.frequency_penalty,
          .bad_words = bad_words(given),
          .allowed_token_ids =
              read_array("allowed_token_ids", given.allowed_token_ids, given.num_allowed_token_ids),
          .top_k = given.top_k,
          .top_p = given.top_p,
          .min_p = given.min_p};
}

Request read_request(const ModelFolder& folder, const int32_t* token_ids, size_t num_token_ids,
                     const paceline_sampling* sampling) {
  paceline_sampling given = default_sampling();
  if (sampling != nullptr) given = read_struct("paceline_sampling", *sampling, given);
  Request request;
  request.prompt = read_array("token_ids", token_ids, num_token_ids);
  request.sampling = sampling_options(given, folder);
  request.num_samples = given.num_samples;
  request.num_speculative_tokens = given.num_speculative_tokens;
  request.num_resumed_tokens = given.num_resumed_tokens;
  if (given.cache_salt != nullptr) request.cache_salt = given.cache_salt;
  return request;
}

// ---- events and log -----------------------------------------------------------------------------

static_assert(PACELINE_FINISH_NONE == static_cast<int>(FinishReason::kNone));
static_assert(PACELINE_FINISH_STOP == static_cast<int>(FinishReason::kStop));
static_assert(PACELINE_FINISH_LENGTH == static_cast<int>(FinishReason::kLength));
static_assert(PACELINE_FINISH_CANCELLED == static_cast<int>(FinishReason::kCancelled));
static_assert(PACELINE_FINISH_ERROR == static_cast<int>(FinishReason::kError));
// An iteration emits the accepted drafts and one token more.
static_assert(kMaxDraftTokens + 1 <= PACELINE_MAX_EVENT_TOKENS);

static_assert(PACELINE_LOG_INFO == static_cast<int>(LogLevel::kInfo));
static_assert(PACELINE_LOG_WARNING == static_cast<int>(LogLevel::kWarning));
static_assert(PACELINE_LOG_ERROR == static_cast<int>(LogLevel::kError));

// The fields that every caller must have: tokens, finish reason and error.
constexpr size_t kEventBytes = offsetof(paceline_event, error) + sizeof(paceline_event::error);

paceline_event c_event(const RequestEvent& event) {
  PACELINE_CHECK(event.token_ids.size() <= PACELINE_MAX_EVENT_TOKENS, "an event has ",
                 event.token_ids.size(), " tokens");
  paceline_event to{};
  to.request_id = event.request_id;
  to.sample = event.sample;
  to.finish_reason = static_cast<paceline_finish_reason>(event.finish_reason);
  to.num_tokens = static_cast<int32_t>(event.token_ids.size());
  std::ranges::copy(event.token_ids, to.token_ids);
  if (event.finish_reason == FinishReason::kError) {
    set_last_error(event.error.c_str());
    to.error = last_error().c_str();
  }
  to.num_draft_tokens = event.num_drafted;
  to.num_accepted_tokens = event.num_accepted;
  to.total_iterations = event.counters.num_iterations;
  to.total_draft_tokens = event.counters.num_draft_tokens;
  to.total_accepted_tokens = event.counters.num_accepted_tokens;
  to.num_cached_tokens = event.num_cached_tokens;
  to.arrival_us = event.arrival_us;
  to.first_token_us = event.first_token_us;
  to.finish_us = event.finish_us;
  to.drafter = event.drafter.empty() ? nullptr : event.drafter.data();  // ends with a null
  return to;
}

// The next event; nullopt without one. One thread at a time takes events from the executor, so that
// those of a sample stay in order.
std::optional<RequestEvent> next_event(paceline_engine& engine, int32_t timeout_ms) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
  std::unique_lock lock(engine.mutex);
  const auto may_poll = [&] { return !engine.is_polling; };
  if (!engine.poll_ended.wait_until(lock, deadline, may_poll)) return std::nullopt;
  if (engine.num_returned == engine.events.size()) {
    engine.is_polling = true;
    lock.unlock();
    const auto rest = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    std::vector<RequestEvent> polled;
    std::exception_ptr failure;
    try {
      polled = engine.executor.poll(static_cast<int32_t>(std::max<int64_t>(rest, 0)));
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    engine.is_polling = false;
    engine.poll_ended.notify_all();
    if (failure != nullptr) std::rethrow_exception(failure);
    engine.events = std::move(polled);
    engine.num_returned = 0;
  }
  if (engine.num_returned == engine.events.size()) return std::nullopt;
  return std::move(engine.events[engine.num_returned++]);
}

}  // namespace
}  // namespace paceline

// ---- the interface -----------------------------------------------------------------------------

using namespace paceline;  // NOLINT: the functions below are the library's

const char* paceline_version() { return version(); }

const char* paceline_last_error() { return last_error().c_str(); }

paceline_status paceline_options_init(paceline_options* options, size_t size) {
  return guarded([&] {
    check_not_null("options", options);
    write_struct("paceline_options", default_options(), size, *options);
    return PACELINE_OK;
  });
}

paceline_status paceline_sampling_init(paceline_sampling* sampling, size_t size) {
  return guarded([&] {
    check_not_null("sampling", sampling);
    write_struct("paceline_sampling", default_sampling(), size, *sampling);
    return PACELINE_OK;
  });
}

paceline_status paceline_open(const char* folder, const paceline_options* options,
                              paceline_engine** engine) {
  return guarded([&] {
    check_not_null("engine", engine);
    *engine = nullptr;
    check_not_null("folder", folder);
    paceline_options given = default_options();
    if (options != nullptr) given = read_struct("paceline_options", *options, given);
    const ExecutorOptions executor = executor_options(given);
    const Device device = read_device(given.device);
    ModelFolder loaded = load_folder(folder, device, executor);
    const bool looks_up = given.prompt_lookup_min != 0 || given.prompt_lookup_max != 0;
    if (given.plain_decoding != 0 || looks_up) loaded.draft = nullptr;
    *engine = new paceline_engine(std::move(loaded), executor);
    return PACELINE_OK;
  });
}

void paceline_close(paceline_engine* engine) { delete engine; }

paceline_status paceline_add(paceline_engine* engine, const int32_t* token_ids,
                             size_t num_token_ids, const paceline_sampling* sampling,
                             int64_t* request_id) {
  return guarded([&] {
    check_not_null("engine", engine);
    check_not_null("token_ids", token_ids);
    check_not_null("request_id", request_id);
    const std::optional<RequestId> id = engine->executor.add_request(
        read_request(engine->folder, token_ids, num_token_ids, sampling));
    if (!id.has_value()) {
      return fail(PACELINE_QUEUE_FULL,
                  "the queue is full; poll events, then add the request again");
    }
    *request_id = *id;
    return PACELINE_OK;
  });
}

paceline_status paceline_cancel(paceline_engine* engine, int64_t request_id, int32_t sample) {
  return guarded([&] {
    check_not_null("engine", engine);
    const std::optional<int32_t> which = sample == -1 ? std::nullopt : std::optional(sample);
    if (engine->executor.cancel(request_id, which)) return PACELINE_OK;
    return fail(PACELINE_NOT_RUNNING, "no sample of the request runs or waits");
  });
}

paceline_status paceline_poll(paceline_engine* engine, int32_t timeout_ms, paceline_event* event) {
  return guarded([&] {
    check_not_null("engine", engine);
    check_not_null("event", event);
    check_struct_size("paceline_event", event->size, kEventBytes);
    if (timeout_ms < 0) {
      throw InvalidArgument(concat("timeout_ms is ", timeout_ms, "; allowed: 0 or more"));
    }
    const std::optional<RequestEvent> next = next_event(*engine, timeout_ms);
    if (!next.has_value()) return fail(PACELINE_NO_EVENT, "no event within the timeout");
    write_struct("paceline_event", c_event(*next), event->size, *event);
    return PACELINE_OK;
  });
}

paceline_status paceline_receipt(paceline_engine* engine, const int32_t* token_ids,
                                 size_t num_token_ids, const paceline_sampling* sampling,
                                 const paceline_output* output, const char** receipt) {
  return guarded([&] {
    check_not_null("engine", engine);
    check_not_null("token_ids", token_ids);
    check_not_null("output", output);
    check_not_null("receipt", receipt);
    *receipt = nullptr;
    const paceline_output given = read_struct("paceline_output", *output, paceline_output{});
    const Request request = read_request(engine->folder, token_ids, num_token_ids, sampling);
    const ReceiptMaker& maker = [&]() -> const ReceiptMaker& {
      const std::scoped_lock lock(engine->receipt_mutex);
      if (!engine->receipts.has_value()) engine->receipts.emplace(engine->folder, engine->executor);
      return *engine->receipts;
    }();
    thread_local std::string text;
    text =
        maker.make(request, given.sample,
                   read_array("token_ids of paceline_output", given.token_ids, given.num_token_ids),
                   static_cast<FinishReason>(given.finish_reason),
                   given.with_text != 0 ? ReceiptForm::kWithText : ReceiptForm::kDigests);
    *receipt = text.c_str();
    return PACELINE_OK;
  });
}

paceline_status paceline_stats(paceline_engine* engine, paceline_engine_stats* stats) {
  return guarded([&] {
    check_not_null("engine", engine);
    check_not_null("stats", stats);
    const ExecutorStats counters = engine->executor.stats();
    const MemoryReport memory = engine->executor.memory_report();
    const paceline_engine_stats all = {
        .size = stats->size,
        .num_iterations = counters.num_iterations,
        .num_finished = counters.num_finished,
        .num_failed = counters.num_failed,
        .num_cancelled = counters.num_cancelled,
        .num_preemptions = counters.num_preemptions,
        .num_prompt_tokens = counters.num_prompt_tokens,
        .num_cached_tokens = counters.num_shared_tokens,
        .num_emitted_tokens = counters.num_emitted_tokens,
        .num_verify_windows = counters.num_verify_windows,
        .num_draft_tokens = counters.num_draft_tokens,
        .num_accepted_tokens = counters.num_accepted_tokens,
        .num_running = counters.num_running,
        .num_waiting = counters.num_waiting,
        .uptime_s = counters.uptime_s,
        .weight_bytes = memory.target_weight_bytes + memory.draft_weight_bytes,
        .workspace_bytes = memory.workspace_bytes,
        .graph_bytes = memory.graph_bytes,
        .kv_pool_bytes = memory.kv_pool_bytes,
        .kv_free_bytes = memory.kv_free_slabs * memory.kv_slab_bytes};
    write_struct("paceline_engine_stats", all, stats->size, *stats);
    return PACELINE_OK;
  });
}

paceline_status paceline_set_log_callback(paceline_log_callback callback, void* user_data) {
  return guarded([&] {
    if (callback == nullptr) {
      set_log_sink({});
    } else {
      set_log_sink([callback, user_data](LogLevel level, std::string_view line) {
        const std::string text(line);  // ends with a null
        callback(static_cast<paceline_log_level>(level), text.c_str(), user_data);
      });
    }
    return PACELINE_OK;
  });
}
