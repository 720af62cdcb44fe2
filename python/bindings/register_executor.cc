// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <paceline/executor.h>

#include "bindings.h"
#include "executor_options.h"

namespace paceline::python {
namespace {

py::dict memory_report_to_dict(const MemoryReport& report) {
  py::list groups;
  for (const MemoryReport::Group& group : report.groups) {
    py::dict entry;
    entry["owner"] = group.owner;
    entry["kind"] = group.kind;
    entry["window"] = group.window;
    entry["num_layers"] = group.num_layers;
    entry["num_kv_heads"] = group.num_kv_heads;
    entry["head_dim"] = group.head_dim;
    entry["block_size"] = group.block_size;
    entry["block_bytes"] = group.block_bytes;
    entry["padding_bytes"] = group.padding_bytes;
    entry["held_blocks"] = group.held_blocks;
    entry["quarantined_blocks"] = group.quarantined_blocks;
    groups.append(std::move(entry));
  }
  py::dict dict;
  dict["target_weight_bytes"] = report.target_weight_bytes;
  dict["draft_weight_bytes"] = report.draft_weight_bytes;
  dict["kv_pool_bytes"] = report.kv_pool_bytes;
  dict["kv_slab_bytes"] = report.kv_slab_bytes;
  dict["kv_num_slabs"] = report.kv_num_slabs;
  dict["kv_free_slabs"] = report.kv_free_slabs;
  dict["workspace_bytes"] = report.workspace_bytes;
  dict["graph_bytes"] = report.graph_bytes;
  dict["groups"] = std::move(groups);
  return dict;
}

py::dict stats_to_dict(const ExecutorStats& stats) {
  py::dict dict;
  dict["num_iterations"] = stats.num_iterations;
  dict["num_preemptions"] = stats.num_preemptions;
  dict["num_shared_tokens"] = stats.num_shared_tokens;
  dict["num_emitted_tokens"] = stats.num_emitted_tokens;
  dict["num_draft_tokens"] = stats.num_draft_tokens;
  dict["num_accepted_tokens"] = stats.num_accepted_tokens;
  dict["num_running"] = stats.num_running;
  dict["num_waiting"] = stats.num_waiting;
  dict["host_us"] = stats.host_us;
  dict["iteration_us"] = stats.iteration_us;
  dict["iteration_idle_us"] = stats.iteration_idle_us;
  dict["iteration_num_decoding"] = stats.iteration_num_decoding;
  dict["iteration_num_prefill"] = stats.iteration_num_prefill;
  return dict;
}

// ---- the executor ----------------------------------------------------------------------------

// An Executor that can be closed while other threads call it: new calls are refused, close() waits
// for those under way, then joins. All methods run without the GIL.
class PyExecutor {
 public:
  PyExecutor(std::shared_ptr<const Model> target, std::shared_ptr<const Model> draft,
             const ExecutorOptions& options, const Executor::Progress& progress)
      : executor_(
            std::make_unique<Executor>(std::move(target), std::move(draft), options, progress)) {}

  ~PyExecutor() { close(); }

  PyExecutor(const PyExecutor&) = delete;
  PyExecutor& operator=(const PyExecutor&) = delete;

  template <class Function>
  auto call(Function function) {
    py::gil_scoped_release release;
    const Call call(*this);
    return function(*executor_);
  }

  // The caller has released the GIL.
  void close() {
    std::unique_lock lock(mutex_);
    is_closed_ = true;
    idle_.wait(lock, [this] { return num_calls_ == 0; });
    executor_.reset();
  }

  bool is_closed() const {
    const std::lock_guard lock(mutex_);
    return is_closed_;
  }

 private:
  // A call under way.
  class Call {
   public:
    explicit Call(PyExecutor& owner) : owner_(owner) {
      const std::lock_guard lock(owner_.mutex_);
      if (owner_.is_closed_) {
        throw std::runtime_error("the executor is closed");
      }
      ++owner_.num_calls_;
    }
    ~Call() {
      const std::lock_guard lock(owner_.mutex_);
      if (--owner_.num_calls_ == 0) {
        owner_.idle_.notify_all();
      }
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    PyExecutor& owner_;
  };

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  int64_t num_calls_ = 0;
  bool is_closed_ = false;
  std::unique_ptr<Executor> executor_;
};

// Calls back into Python from a constructor that runs without the GIL. Copies hold no reference, so
// that the library may copy and drop them without the GIL; `callback` outlives the constructor.
// What the callback raises leaves the constructor.
Executor::Progress progress_caller(py::handle callback) {
  if (callback.is_none()) {
    return {};
  }
  return [callback](int32_t done, int32_t total) {
    const py::gil_scoped_acquire acquire;
    callback(done, total);
  };
}

std::string executor_repr(PyExecutor& self) {
  if (self.is_closed()) {
    return "<paceline._core.Executor, closed>";
  }
  const ExecutorOptions options = self.call([](Executor& executor) { return executor.options(); });
  std::ostringstream out;
  out << "<paceline._core.Executor, max_model_len=" << options.max_model_len
      << ", max_num_seqs=" << options.max_num_seqs << ", block_size=" << options.block_size
      << ", kv_cache_bytes=" << options.kv_cache_bytes
      << ", num_speculative_tokens=" << options.speculative.num_speculative_tokens << ">";
  return out.str();
}

}  // namespace

void register_executor(py::module_& module) {
  py::class_<PyExecutor, Holder<PyExecutor>>(module, "Executor",
                                             "The engine: requests in, events out, on a thread of "
                                             "its own. All methods are thread-safe and "
                                             "release the GIL.")
      .def(py::init([](const PyModel& target, const PyModel* draft, const py::dict& options,
                       const py::object& progress) {
             if (!progress.is_none() && PyCallable_Check(progress.ptr()) == 0) {
               throw py::value_error("progress is " + py::repr(progress).cast<std::string>() +
                                     "; allowed: None or a callable of (done, total)");
             }
             const ExecutorOptions parsed = options_from_dict(options);
             std::shared_ptr<const Model> target_model = target.model;
             std::shared_ptr<const Model> draft_model = draft == nullptr ? nullptr : draft->model;
             const Executor::Progress report = progress_caller(progress);
             py::gil_scoped_release release;
             return Holder<PyExecutor>(
                 new PyExecutor(std::move(target_model), std::move(draft_model), parsed, report));
           }),
           py::arg("target"), py::arg("draft").none(true), py::arg("options"),
           py::arg("progress") = py::none(),
           R"doc(Allocates the KV pool and the workspace and starts the engine's thread.

It runs on the device that the models lie on.

Args:
    target: The model whose output is wanted.
    draft: The drafter; None for plain decoding.
    options: Fields of ExecutorOptions, those of its SpeculativeOptions flattened. Absent keys keep
        their default; max_model_len (tokens) and kv_cache_bytes have none.
    progress: Called as (done, total) on this thread while programs are captured, which only CUDA
        takes time for. What it raises ends the start and is raised here.

Raises:
    ValueError: An unknown key, or a value that is not allowed.
    NotImplementedError: A combination that does not exist yet.
    paceline.OutOfMemoryError: The pool or the workspace could not be allocated.
    paceline.DeviceError: The device failed.
)doc")
      .def(
          "add_request",
          [](PyExecutor& self, std::vector<int32_t> prompt, double temperature, uint64_t seed,
             int32_t max_tokens, std::vector<int32_t> stop_token_ids, bool score_prompt,
             int32_t top_k, double top_p, double min_p, double repetition_penalty,
             double presence_penalty, double frequency_penalty, int32_t min_tokens,
             const std::vector<std::pair<int32_t, float>>& logit_bias,
             std::vector<std::vector<int32_t>> bad_words, std::vector<int32_t> allowed_token_ids,
             int32_t logprobs, int32_t prompt_logprobs, int32_t num_samples) {
            Request request;
            request.prompt = std::move(prompt);
            request.sampling.temperature = temperature;
            request.sampling.seed = seed;
            request.sampling.max_tokens = max_tokens;
            request.sampling.stop_token_ids = std::move(stop_token_ids);
            request.sampling.top_k = top_k;
            request.sampling.top_p = top_p;
            request.sampling.min_p = min_p;
            request.sampling.repetition_penalty = repetition_penalty;
            request.sampling.presence_penalty = presence_penalty;
            request.sampling.frequency_penalty = frequency_penalty;
            request.sampling.min_tokens = min_tokens;
            for (const auto& [token, bias] : logit_bias) {
              request.sampling.logit_bias.push_back({.token = token, .bias = bias});
            }
            request.sampling.bad_words = std::move(bad_words);
            request.sampling.allowed_token_ids = std::move(allowed_token_ids);
            request.sampling.logprobs = logprobs;
            request.sampling.prompt_logprobs = prompt_logprobs;
            request.score_prompt = score_prompt;
            request.num_samples = num_samples;
            return self.call(
                [&](Executor& executor) { return executor.add_request(std::move(request)); });
          },
          py::arg("prompt"), py::kw_only(), py::arg("temperature") = 1.0, py::arg("seed") = 0,
          py::arg("max_tokens") = 16, py::arg("stop_token_ids") = std::vector<int32_t>{},
          py::arg("score_prompt") = false, py::arg("top_k") = 0, py::arg("top_p") = 1.0,
          py::arg("min_p") = 0.0, py::arg("repetition_penalty") = 1.0,
          py::arg("presence_penalty") = 0.0, py::arg("frequency_penalty") = 0.0,
          py::arg("min_tokens") = 0,
          py::arg("logit_bias") = std::vector<std::pair<int32_t, float>>{},
          py::arg("bad_words") = std::vector<std::vector<int32_t>>{},
          py::arg("allowed_token_ids") = std::vector<int32_t>{}, py::arg("logprobs") = -1,
          py::arg("prompt_logprobs") = -1, py::arg("num_samples") = 1, R"doc(Queues a request.

Args:
    prompt: Token ids, at least one, each in [0, vocab_size).
    temperature: 0 = greedy; up to 1e6.
    seed: Same seed, same output, whatever else runs.
    max_tokens: Most tokens to emit, >= 1; prompt and output together are capped by max_model_len.
    stop_token_ids: At most 8; a stop token is emitted, then the request ends.
    score_prompt: Instead of generating, return the target's logits of every prompt position.
    top_k: Only the most probable so many tokens; 0 = all.
    top_p: Of those, the fewest that make up this probability; in (0, 1], 1 = all.
    min_p: Of those, the ones at least this many times as probable as the best; in [0, 1], 0 = all.
    repetition_penalty: Logits of tokens in the prompt or output are divided by it where positive,
        multiplied where negative; > 0, 1 = off.
    presence_penalty: Taken off the logits of tokens in the output.
    frequency_penalty: The same, times how often they are there.
    min_tokens: Stop tokens are ruled out for the first so many output tokens; at most max_tokens.
    logit_bias: (token, bias) pairs, added first; at most 1024, each token once.
    bad_words: Sequences of tokens that are never completed; at most 128, of 1024 tokens in all.
    allowed_token_ids: Everything else is ruled out; empty: nothing is.
    logprobs: Of every emitted token, and of the most probable so many at its place, from the
        target's logits before all of the above; at most the option max_logprobs, -1 = none.
    prompt_logprobs: The same of the prompt's tokens, but for the first.
    num_samples: Independent outputs, 1 to 128; sample i draws with seed + i, modulo 2**64.

Returns:
    The request's id, or None when the queue is full.

Raises:
    ValueError: A request that can never run; nothing else is affected.
    RuntimeError: The executor is closed.
)doc")
      .def(
          "cancel",
          [](PyExecutor& self, RequestId id, std::optional<int32_t> sample) {
            return self.call([&](Executor& executor) { return executor.cancel(id, sample); });
          },
          py::arg("id"), py::arg("sample") = py::none(),
          R"doc(Ends a request, or one of its samples.

An event with "cancelled" follows for each sample that had not already ended.

Args:
    id: What `add_request` returned.
    sample: Which; None = all.

Returns:
    False when no sample of such a request runs or waits.

Raises:
    ValueError: A sample that the request never had.
)doc")
      .def(
          "poll",
          [](PyExecutor& self, int32_t timeout_ms) {
            std::vector<RequestEvent> events;
            int32_t vocab_size = 0;
            self.call([&](Executor& executor) {
              events = executor.poll(timeout_ms);
              vocab_size = executor.vocab_size();
            });
            py::list result;
            for (RequestEvent& event : events) {
              result.append(py::cast(PyRequestEvent{std::move(event), vocab_size}));
            }
            return result;
          },
          py::arg("timeout_ms") = 0, R"doc(Takes the events there are.

Args:
    timeout_ms: Longest wait for the first event in milliseconds; 0 = do not wait.

Returns:
    Events, those of one request in order; empty when none came in time.

Raises:
    RuntimeError: The executor is closed. The cause, if the engine has failed.
)doc")
      .def(
          "memory_report",
          [](PyExecutor& self) {
            return memory_report_to_dict(
                self.call([](Executor& executor) { return executor.memory_report(); }));
          },
          R"doc(Bytes by purpose.

Returns:
    A dict of bytes and counts; "groups" has one dict a KV group.
)doc")
      .def(
          "stats",
          [](PyExecutor& self) {
            return stats_to_dict(self.call([](Executor& executor) { return executor.stats(); }));
          },
          R"doc(Counters and times since start or the last `reset_stats()`.

Returns:
    A dict; durations in microseconds.
)doc")
      .def(
          "reset_stats",
          [](PyExecutor& self) { self.call([](Executor& executor) { executor.reset_stats(); }); },
          "Sets all of `stats()` back to zero.")
      .def(
          "trace_iteration",
          [](PyExecutor& self, int32_t timeout_ms) {
            const std::vector<KernelTime> times =
                self.call([&](Executor& executor) { return executor.trace_iteration(timeout_ms); });
            py::list rows;
            for (const KernelTime& time : times) {
              py::dict row;
              row["name"] = time.name;
              row["count"] = time.count;
              row["total_us"] = time.total_us;
              rows.append(row);
            }
            return rows;
          },
          py::arg("timeout_ms") = 5000,
          R"doc(Times the kernels of the next iteration without prefill rows, one by one.

Args:
    timeout_ms: How long to wait for such an iteration.

Returns:
    A list of dicts with `name`, `count` and `total_us`, the longest first; empty when no such
    iteration came in time. Kernels do not overlap while they are timed, so the sum exceeds what
    the iteration takes.

Raises:
    NotImplementedError: The device is not cuda.
)doc")
      .def(
          "check_integrity",
          [](PyExecutor& self) {
            return self.call([](Executor& executor) { return executor.check_integrity(); });
          },
          R"doc(Blocks until nothing runs or waits, then checks every invariant of the block pool.

Returns:
    An empty string, or what is broken.
)doc")
      .def_property_readonly(
          "vocab_size",
          [](PyExecutor& self) {
            return self.call([](Executor& executor) { return executor.vocab_size(); });
          },
          "The target's vocabulary size.")
      .def_property_readonly(
          "options",
          [](PyExecutor& self) {
            return options_to_dict(
                self.call([](Executor& executor) { return executor.options(); }));
          },
          "The options in effect, as a dict.")
      .def("close", &PyExecutor::close, py::call_guard<py::gil_scoped_release>(),
           "Cancels what runs and joins the engine's thread. Later calls raise RuntimeError; "
           "closing "
           "twice is fine.")
      .def("__repr__", &executor_repr);
}

}  // namespace paceline::python
