// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>
#include <unistd.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <paceline/executor.h>
#include <paceline/receipt.h>

#include "bindings.h"
#include "executor/default_options.h"
#include "executor/option_checks.h"
#include "executor_options.h"
#include "messages.h"
#include "report_dicts.h"

namespace paceline::python {
namespace {

// ---- the executor ----------------------------------------------------------------------------

// An Executor that can be closed while other threads call it: new calls are refused, close() waits
// for those under way, then joins. All methods run without the GIL.
//
// A child made by fork() has a copy of the object, but none of the threads that work for it or hold
// its mutex. There it refuses calls, and is neither closed nor freed.
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
    const GilRelease release;
    const Call call(*this);
    return function(*executor_);
  }

  bool is_forked() const { return getpid() != owner_pid_; }

  // The caller has released the GIL.
  void close() {
    if (is_forked()) {
      return;
    }
    std::unique_lock lock(mutex_);
    is_closed_ = true;
    idle_.wait(lock, [this] { return num_calls_ == 0; });
    executor_.reset();
  }

  bool is_closed() const {
    if (is_forked()) {
      return true;
    }
    const std::lock_guard lock(mutex_);
    return is_closed_;
  }

 private:
  // A call under way.
  class Call {
   public:
    explicit Call(PyExecutor& owner) : owner_(owner) {
      if (owner_.is_forked()) {
        throw std::runtime_error(
            "the executor belongs to the process that this one was forked from");
      }
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

  const pid_t owner_pid_ = getpid();
  mutable std::mutex mutex_;
  std::condition_variable idle_;
  int64_t num_calls_ = 0;
  bool is_closed_ = false;
  std::unique_ptr<Executor> executor_;
};

// Deletes without the GIL. Leaks a forked copy, whose destructor would wait for threads that it
// does not have.
struct ExecutorDeleter {
  void operator()(PyExecutor* executor) const {
    if (!executor->is_forked()) {
      GilReleasingDeleter<PyExecutor>()(executor);
    }
  }
};

using ExecutorHolder = std::unique_ptr<PyExecutor, ExecutorDeleter>;

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
  py::class_<PyExecutor, ExecutorHolder>(module, "Executor",
                                         "The engine: requests in, events out, on a thread of "
                                         "its own. All methods are thread-safe and "
                                         "release the GIL.")
      .def(py::init([](const PyModel& target, const PyModel* draft, const py::dict& options,
                       const py::object& progress) {
             if (!progress.is_none() && PyCallable_Check(progress.ptr()) == 0) {
               throw py::value_error("progress is " + shorten(progress) +
                                     "; allowed: None or a callable of (done, total)");
             }
             const ExecutorOptions parsed = options_from_dict(options);
             std::shared_ptr<const Model> target_model = target.model;
             std::shared_ptr<const Model> draft_model = draft == nullptr ? nullptr : draft->model;
             const Executor::Progress report = progress_caller(progress);
             const GilRelease release;
             return ExecutorHolder(
                 new PyExecutor(std::move(target_model), std::move(draft_model), parsed, report));
           }),
           py::arg("target"), py::arg("draft").none(true), py::arg("options"),
           py::arg("progress") = py::none(),
           R"doc(Allocates the KV pool and the workspace and starts the engine's thread.

It runs on the device of the models.

Args:
    target: The target.
    draft: The drafter; None for plain decoding.
    options: Fields of ExecutorOptions, those of its SpeculativeOptions flattened. Absent keys keep
        their default; max_model_len (tokens) has none.
    progress: Called as (done, total) on this thread while programs are captured, which takes time
        on CUDA only. An exception that it raises ends the start and is raised here.

Raises:
    ValueError: An unknown key, or a value that is not allowed.
    NotImplementedError: A combination that does not exist yet.
    paceline.OutOfMemoryError: The pool or the workspace could not be allocated.
    paceline.DeviceError: The device failed.
)doc")
      .def(
          "add_request",
          [](PyExecutor& self, const py::args& prompt, const py::kwargs& sampling) {
            auto request = py::type::of<Request>()(*prompt, **sampling).cast<Request>();
            return self.call(
                [&](Executor& executor) { return executor.add_request(std::move(request)); });
          },
          R"doc(Queues a request.

Args:
    *prompt: The prompt's token ids, as for `Request`.
    **sampling: As for `Request`.

Returns:
    The request's id, or None when the queue is full.

Raises:
    ValueError: A request that can never run; nothing else is affected.
    RuntimeError: The executor is closed.
)doc")
      .def(
          "add_requests",
          [](PyExecutor& self, std::vector<Request> requests, py::list ids) {
            const auto found = self.call(
                [&](Executor& executor) { return executor.add_requests(std::move(requests)); });
            for (const RequestId id : found.value_or(std::vector<RequestId>())) ids.append(id);
            return found.has_value();
          },
          py::arg("requests"), py::arg("ids"),
          R"doc(Queues several requests, and schedules nothing in between.

Args:
    requests: A list of `Request`; all are queued or none.
    ids: A list to which their ids are appended, in order, before this returns. So no id is lost
        when a signal handler raises afterwards.

Returns:
    False when the queue has no room for all of them now.

Raises:
    ValueError: A request can never run; the message says which.
    RuntimeError: The executor is closed.
)doc")
      .def(
          "folder_receipt",
          [](PyExecutor& self, const std::string& folder, const Request& request, int32_t sample,
             const std::vector<int32_t>& token_ids, const std::string& finish_reason,
             bool with_text) {
            return self.call([&](Executor& executor) {
              const ReceiptMaker maker(load_model_folder(folder), executor);
              return maker.make(
                  request, sample, token_ids,
                  finish_reason == "stop" ? FinishReason::kStop : FinishReason::kLength,
                  with_text ? ReceiptForm::kWithText : ReceiptForm::kDigests);
            });
          },
          py::arg("folder"), py::arg("request"), py::arg("sample"), py::arg("token_ids"),
          py::arg("finish_reason"), py::arg("with_text"),
          R"doc(Returns the receipt that a program in C++ makes of an output, as canonical JSON.

Args:
    folder: The folder that `paceline convert` wrote, from which the target of this executor comes.
    request: The request.
    sample: Which of its samples.
    token_ids: All tokens of the sample.
    finish_reason: "stop" or "length".
    with_text: Whether the receipt shows its inputs.
)doc")
      .def(
          "cancel",
          [](PyExecutor& self, RequestId id, std::optional<int32_t> sample) {
            return self.call([&](Executor& executor) { return executor.cancel(id, sample); });
          },
          py::arg("id"), py::arg("sample") = py::none(),
          R"doc(Ends a request, or one of its samples.

An event with "cancelled" follows for each sample that has not ended yet.

Args:
    id: What `add_request` returned.
    sample: Index of the sample; None = all samples.

Returns:
    False if no such sample runs or waits.

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
          py::arg("timeout_ms") = 0, R"doc(Returns the events that have arrived.

Args:
    timeout_ms: Maximum wait for the first event in milliseconds; 0 = do not wait.

Returns:
    Events, those of one request in order; empty if none arrived in time.

Raises:
    RuntimeError: The executor is closed, or the engine has failed with this error.
)doc")
      .def(
          "memory_report",
          [](PyExecutor& self) {
            return memory_report_to_dict(
                self.call([](Executor& executor) { return executor.memory_report(); }));
          },
          R"doc(Reports the memory in use by purpose.

Returns:
    A dict of bytes and counts. "groups" has one dict per KV group, "ranks" one per rank with its
    "gpu" (None on the CPU), and "kv_cache_rule" the reason for the size of the KV pool.
)doc")
      .def(
          "stats",
          [](PyExecutor& self) {
            return stats_to_dict(self.call([](Executor& executor) { return executor.stats(); }));
          },
          R"doc(Returns counters since the start or the last `reset_stats()`, and the load now.

Takes the same time whatever has run.

Returns:
    A dict with the fields of `ExecutorStats`. "kv_groups" has one dict for each group of
    `memory_report()`, and "host_us" is in microseconds. For a target with a mixture of experts,
    "num_target_mixture_layers" counts the mixture layers that ran, and "num_target_experts_hit" adds
    up the experts that had rows in them; the same for a drafter. They are 0 for other models.
)doc")
      .def(
          "iteration_times",
          [](PyExecutor& self) {
            return times_to_dict(
                self.call([](Executor& executor) { return executor.iteration_times(); }));
          },
          R"doc(Returns times and counts of iterations since the start or the last `reset_stats()`.

Returns:
    A dict of lists with one entry for each iteration, for at most 65,536: "us" and "idle_us" are
    microseconds in which the device worked and was idle before; "num_decoding" and "num_prefill"
    count sequences. For models with a mixture of experts, "target_mixture_layers" and
    "target_experts_hit", and the same for "draft", are counts as in `stats()`; else zeros.
)doc")
      .def(
          "reset_stats",
          [](PyExecutor& self) { self.call([](Executor& executor) { executor.reset_stats(); }); },
          "Resets the counters of `stats()` and the times to zero.")
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
    timeout_ms: Maximum wait for such an iteration, in milliseconds.

Returns:
    A list of dicts with `name`, `count` and `total_us`, the longest first; empty if no such
    iteration ran in time. Kernels do not overlap while they are timed, so the sum exceeds the time
    of the iteration.

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
    An empty string, or the violated invariant.
)doc")
      .def(
          "while_idle",
          [](PyExecutor& self, const py::function& body) {
            return self.call([&](Executor& executor) {
              return executor.while_idle([&] {
                const py::gil_scoped_acquire acquire;
                body();
              });
            });
          },
          py::arg("body"), R"doc(Calls a function while the device rests, for `update_models`.

Requests that are added meanwhile wait until it has returned.

Args:
    body: Takes nothing. What it raises is raised here.

Returns:
    0; or, if requests run or wait, their number, and `body` was not called.

Raises:
    ValueError: Another executor uses the model too, or another call is under way.
    RuntimeError: The executor is closed, or has failed with this error.
)doc")
      .def(
          "set_drafter",
          [](PyExecutor& self, const PyModel* draft, const py::dict& options) {
            const SpeculativeOptions speculative = options_from_dict(options).speculative;
            const std::shared_ptr<const Model> model = draft == nullptr ? nullptr : draft->model;
            return self.call(
                [&](Executor& executor) { return executor.set_drafter(model, speculative); });
          },
          py::arg("draft").none(true), py::arg("options"),
          R"doc(Replaces the drafter between two iterations, while requests run.

Args:
    draft: The drafter; None for plain decoding and prompt lookup.
    options: As for `Executor`; only those of speculative decoding count, and the others stay.

Returns:
    For how many microseconds the engine rested between two iterations.

Raises:
    ValueError: An option or the drafter is not allowed, a request would not fit the pool, or
        another call is under way. The drafter so far goes on.
    NotImplementedError: A drafter of the caller, before or after.
    RuntimeError: The executor is closed, or has failed with this error.
)doc")
      .def(
          "update_drafter",
          [](PyExecutor& self, const py::function& body) {
            self.call([&](Executor& executor) {
              executor.update_drafter([&] {
                const py::gil_scoped_acquire acquire;
                body();
              });
            });
          },
          py::arg("body"),
          R"doc(Calls a function between two iterations, for `update_models` of the drafter.

Iterations wait until it has returned.

Args:
    body: Takes nothing. What it raises is raised here.

Raises:
    ValueError: There is no drafter with weights of its own, another executor uses it too, or
        another call is under way.
    RuntimeError: The executor is closed, or has failed with this error.
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
      .def("close", &PyExecutor::close, py::call_guard<GilRelease>(),
           "Cancels what runs and joins the engine's thread. Later calls raise RuntimeError; "
           "closing "
           "twice is fine.")
      .def("__repr__", &executor_repr);

  module.def(
      "check_options",
      [](const py::dict& options, const std::optional<std::string>& method) {
        const std::optional<DraftMethod> known =
            method.has_value() ? draft_method(*method) : std::nullopt;
        if (method.has_value() && !known.has_value()) {
          throw py::value_error("method is " + shorten(py::str(*method)) +
                                "; allowed: a method of speculative_config with a drafter");
        }
        check_options(options_from_dict(options), known.has_value() ? &*known : nullptr);
      },
      py::arg("options"), py::arg("method").none(true),
      R"doc(Checks what an executor checks of its options without models.

Args:
    options: As for `Executor`.
    method: The method of `speculative_config`; None: the drafter's checkpoint will tell it, or there
        is none, and conditions that depend on it are not checked.

Raises:
    ValueError: An option is not allowed, by itself or beside others.
)doc");

  module.def(
      "default_options",
      [](const PyModel& target, const PyModel* draft, const py::dict& options) {
        return options_to_dict(with_defaults(options_from_dict(options), *target.model,
                                             draft == nullptr ? nullptr : draft->model.get()));
      },
      py::arg("target"), py::arg("draft").none(true), py::arg("options"),
      R"doc(Fills in what an executor chooses for options that are 0, except for kv_cache_bytes.

Args:
    target: The target.
    draft: The drafter; None without one.
    options: As for `Executor`. They are not checked.

Returns:
    All options, as `Executor.options` has them.
)doc");
}

}  // namespace paceline::python
