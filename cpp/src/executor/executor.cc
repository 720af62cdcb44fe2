// SPDX-License-Identifier: Apache-2.0
#include <paceline/executor.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "base/boundary.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "engine/engine.h"
#include "executor/default_options.h"
#include "executor/default_sizes.h"
#include "executor/kv_cache_size.h"
#include "executor/option_checks.h"
#include "executor/setup.h"
#include "kv/kv_layout.h"
#include "model/weights/model_impl.h"

namespace paceline {

// Counts an executor among those that use a model.
class ModelLease {
 public:
  explicit ModelLease(const Model* model) : model_(model) {
    if (model_ == nullptr) return;
    const std::scoped_lock lock(model_->use.mutex);
    if (model_->use.is_updating) {
      throw InvalidArgument(concat("the weights of ", model_->config.name,
                                   " are being updated; start the executor afterwards"));
    }
    ++model_->use.num_executors;
  }
  ~ModelLease() {
    if (model_ == nullptr) return;
    const std::scoped_lock lock(model_->use.mutex);
    --model_->use.num_executors;
  }
  ModelLease(const ModelLease&) = delete;
  ModelLease& operator=(const ModelLease&) = delete;

  // Runs `body` while no other executor can start to use the model.
  template <class Body>
  auto alone(const Body& body) const {
    if (model_ == nullptr) return body();
    const auto set_updating = [&](bool is_updating) {
      const std::scoped_lock lock(model_->use.mutex);
      const int32_t num_executors = model_->use.num_executors;
      if (is_updating && num_executors > 1) {
        throw InvalidArgument(concat("the weights of ", model_->config.name, " are shared by ",
                                     num_executors,
                                     " engines; allowed: a model that one engine uses alone, so "
                                     "close the others or load it for each"));
      }
      model_->use.is_updating = is_updating;
    };
    set_updating(true);
    try {
      const auto result = body();
      set_updating(false);
      return result;
    } catch (...) {
      set_updating(false);
      throw;
    }
  }

 private:
  const Model* model_;
};

namespace {

// What follows from the drafter, beside what the engine has.
struct Drafting {
  Drafting(const std::shared_ptr<const Model>& target, std::shared_ptr<const Model> draft_model,
           const DefaultSizes& chosen, const RankModels& targets, int64_t least_slab_bytes = 0)
      : draft(std::move(draft_model)),
        lease(draft == target ? nullptr : draft.get()),
        sizes(chosen),
        drafts(rank_drafts(draft, sizes.options)),
        layout(
            plan_layout(sizes.options, *targets.front(), drafts.front().get(), least_slab_bytes)) {}

  // Makes the runner, and notes what it takes.
  [[nodiscard]] std::unique_ptr<Runner> start(const RankModels& targets,
                                              const Executor::Progress& progress,
                                              const Runner::KvPools& pools) {
    std::unique_ptr<Runner> runner =
        make_runner(targets, drafts, layout, sizes.options, progress, pools);
    workspace = runner->workspace_bytes();
    graph_bytes = runner->graph_bytes();
    rank_bytes = runner->rank_bytes();
    kv_pools = runner->shared_kv_pools();
    return runner;
  }

  std::shared_ptr<const Model> draft;
  ModelLease lease;  // of no model where it is the target
  DefaultSizes sizes;
  RankModels drafts;
  KvLayout layout;  // of each rank
  std::map<std::string, int64_t, std::less<>> workspace;
  int64_t graph_bytes = 0;
  std::vector<Runner::RankBytes> rank_bytes;
  Runner::KvPools kv_pools;  // by rank; empty: they cannot be handed on
};

Executor::Progress reported(const Executor::Progress& progress) {
  if (!progress) return {};
  return [&progress](int32_t done, int32_t total) { call_back([&] { progress(done, total); }); };
}

void check_is_alone(const std::unique_lock<std::mutex>& changing) {
  if (changing.owns_lock()) return;
  throw InvalidArgument("the drafter is being changed by another call; wait until it has ended");
}

// `which`: the drafter, for the message.
void check_is_coupled(const ExecutorOptions& o, const char* which) {
  if (o.speculative.num_speculative_tokens == 0) return;
  if (o.speculative.rejection_sample_method == AcceptMethod::kCoupled) return;
  throw InvalidArgument(
      concat("rejection_sample_method of the ", which,
             " drafter is not \"coupled\"; allowed for changes while requests run: \"coupled\", "
             "with which no token depends on the drafts. Start another engine instead"));
}

void check_switch(const ExecutorOptions& former, const ExecutorOptions& next) {
  check_is_coupled(former, "present");
  check_is_coupled(next, "new");
  if (former.speculative.drafter != nullptr || next.speculative.drafter != nullptr) {
    throw Unsupported(
        "a drafter of the caller (method \"custom\") cannot be set or replaced while the engine "
        "runs; allowed: the other methods");
  }
}

// While the new runner warms up, its padding rows write to the null blocks of its layout, beside
// sequences that run with the former one. So these must lie in the former's reserved slab.
void check_padding(const KvLayout& former, const KvLayout& next) {
  int64_t most = 0;
  for (const KvGroup& group : next.groups) most = std::max(most, group.block_bytes);
  if (most <= former.slab_bytes) return;
  throw Unsupported(concat("a KV block of the new layout has ", most, " bytes, more than the ",
                           former.slab_bytes,
                           " of a slab of the pool; start an engine with this drafter"));
}

}  // namespace

struct Executor::Impl {
  Impl(std::shared_ptr<const Model> target_model, std::shared_ptr<const Model> draft_model,
       const ExecutorOptions& executor_options, const Progress& progress)
      : given(executor_options), target(std::move(target_model)), target_lease(target.get()) {
    const DefaultSizes sizes = choose_sizes(given, *target, draft_model.get(), std::nullopt);
    const ExecutorOptions& options = sizes.options;
    targets = rank_targets(target, options);
    drafting = std::make_shared<Drafting>(target, std::move(draft_model), sizes, targets);
    std::unique_ptr<Runner> runner = drafting->start(targets, progress, {});
    engine.emplace(engine_options(options, *target, drafting->draft.get()), drafting->layout,
                   std::move(runner));
    if (options.gpu_memory_utilization > 0) {
      check_gpu_memory_use(options, cuda_status().total_bytes * options.tensor_parallel_size,
                           memory_report());
    }
    log_made(LogLevel::kInfo, [&] { return start_line(); });
    if (sizes.is_shortened) {
      log_made(LogLevel::kWarning, [&] {
        return concat("max_model_len is ", options.max_model_len,
                      " by default: ", sizes.model_len_rule,
                      ". Set max_model_len to choose it yourself");
      });
    }
  }

  // What the engine runs with.
  [[nodiscard]] std::string start_line() const;

  [[nodiscard]] MemoryReport memory_report();

  [[nodiscard]] std::shared_ptr<Drafting> current() const {
    const std::scoped_lock lock(mutex);
    return drafting;
  }
  double set_drafter(std::shared_ptr<const Model> draft, const SpeculativeOptions& speculative,
                     const Progress& progress);
  void update_drafter(const std::function<void()>& body);

  const ExecutorOptions given;
  const std::shared_ptr<const Model> target;
  ModelLease target_lease;
  RankModels targets;
  std::mutex changes;        // held while the drafter changes
  mutable std::mutex mutex;  // of `drafting`, and of what it and the engine say of each other
  std::shared_ptr<Drafting> drafting;
  std::optional<Engine> engine;
};

double Executor::Impl::set_drafter(std::shared_ptr<const Model> draft,
                                   const SpeculativeOptions& speculative,
                                   const Progress& progress) {
  const std::unique_lock changing(changes, std::try_to_lock);
  check_is_alone(changing);
  const std::shared_ptr<Drafting> former = current();
  ExecutorOptions options = given;
  options.speculative = speculative;
  // The pool and the lengths of requests stay.
  options.max_model_len = former->sizes.options.max_model_len;
  options.kv_cache_bytes =
      former->kv_pools.empty() ? former->layout.pool_bytes : former->kv_pools.front()->bytes();
  options.gpu_memory_utilization = 0;
  check_switch(former->sizes.options, options);
  check_options(with_defaults(options, *target, draft.get()), *target, draft.get());
  DefaultSizes sizes = choose_sizes(options, *target, draft.get(), std::nullopt);
  sizes.kv_cache_rule = former->sizes.kv_cache_rule;
  // Slabs do not shrink, so that a drafter with large blocks can come back (check_padding).
  const auto next = std::make_shared<Drafting>(target, std::move(draft), sizes, targets,
                                               former->layout.slab_bytes);
  if (target->device == Device::kCuda) check_padding(former->layout, next->layout);
  EngineParts parts = {.options = engine_options(sizes.options, *target, next->draft.get()),
                       .layout = &next->layout};
  double rest_us = 0;
  // Beside iterations on several GPUs, kernels of another runner could keep those from starting
  // that others wait for, and so could the end of memory. So the engine rests meanwhile.
  const auto at_rest = [&](const std::function<void()>& step) {
    if (target->device != Device::kCuda || targets.size() == 1) return step();
    const int64_t begin = now_us();
    engine->rest_while(step);
    rest_us += static_cast<double>(now_us() - begin);
  };
  at_rest([&] { parts.runner = next->start(targets, progress, former->kv_pools); });
  std::exception_ptr failure;
  try {
    const std::scoped_lock lock(mutex);
    rest_us += engine->replace(parts, [&] { drafting = next; });
  } catch (...) {
    failure = std::current_exception();
  }
  at_rest([&] { parts.runner.reset(); });  // the former one, or the new one where it is refused
  if (failure != nullptr) std::rethrow_exception(failure);
  log_made(LogLevel::kInfo, [&] {
    return concat("The drafter has changed: k = ", sizes.options.speculative.num_speculative_tokens,
                  "; the engine rested for ", rest_us * 1e-3, " ms");
  });
  return rest_us;
}

void Executor::Impl::update_drafter(const std::function<void()>& body) {
  const std::unique_lock changing(changes, std::try_to_lock);
  check_is_alone(changing);
  const std::shared_ptr<Drafting> now = current();
  if (now->draft == nullptr || now->draft == target) {
    throw InvalidArgument(
        now->draft == nullptr
            ? "there is no drafter with weights; allowed: an executor with a drafter"
            : "the drafter is the target itself, whose weights change only in while_idle");
  }
  check_is_coupled(now->sizes.options, "present");
  now->lease.alone([&] {
    engine->update_drafter(body);
    return 0;
  });
}

std::string Executor::Impl::start_line() const {
  const DefaultSizes& sizes = drafting->sizes;
  const ExecutorOptions& options = sizes.options;
  const KvLayout& layout = drafting->layout;
  const int64_t graph_bytes = drafting->graph_bytes;
  const auto mib = [](int64_t bytes) { return bytes >> 20; };
  const std::string graphs =
      graph_bytes > 0 ? concat(", ", mib(graph_bytes), " MiB of captured graphs") : std::string();
  // A length that is shortened has a line of its own.
  const bool has_rule = !sizes.model_len_rule.empty() && !sizes.is_shortened;
  const std::string rule = has_rule ? concat(" (", sizes.model_len_rule, ")") : std::string();
  const int32_t num_ranks = options.tensor_parallel_size;
  const std::string ranks = num_ranks > 1 ? concat(" with ", num_ranks, " ranks") : std::string();
  return concat("The engine has started on ", device_name(target->device), ranks, ": ",
                options.max_num_seqs, " samples of up to ", options.max_model_len, " tokens", rule,
                ", k = ", options.speculative.num_speculative_tokens, "; a KV pool of ",
                mib(layout.pool_bytes), num_ranks > 1 ? " MiB a rank (" : " MiB (",
                sizes.kv_cache_rule, ")", graphs);
}

MemoryReport Executor::Impl::memory_report() {
  const std::scoped_lock lock(mutex);
  const Engine::KvUsage usage = engine->kv_usage();
  const DefaultSizes& sizes = drafting->sizes;
  const KvLayout& layout = drafting->layout;
  const RankModels& drafts = drafting->drafts;
  const Model* const draft = drafting->draft.get();
  MemoryReport report{.target_weight_bytes = model_weight_bytes(*target),
                      .draft_weight_bytes = draft != nullptr ? model_weight_bytes(*draft) : 0,
                      .kv_pool_bytes = layout.pool_bytes * sizes.options.tensor_parallel_size,
                      .kv_cache_rule = sizes.kv_cache_rule,
                      .kv_slab_bytes = layout.slab_bytes,
                      .kv_num_slabs = layout.num_slabs,
                      .kv_free_slabs = usage.free_slabs,
                      .workspace = drafting->workspace,
                      .graph_bytes = drafting->graph_bytes};
  for (const auto& [purpose, bytes] : report.workspace) report.workspace_bytes += bytes;
  for (size_t rank = 0; rank < drafting->rank_bytes.size(); ++rank) {
    const bool is_on_gpu = target->device == Device::kCuda;
    const Model* const own_draft = is_on_gpu ? drafts[rank].get() : draft;
    report.ranks.push_back(
        {.gpu = is_on_gpu ? targets[rank]->gpu : -1,
         .target_weight_bytes = model_weight_bytes(is_on_gpu ? *targets[rank] : *target),
         .draft_weight_bytes = own_draft != nullptr ? model_weight_bytes(*own_draft) : 0,
         .kv_pool_bytes = layout.pool_bytes,
         .workspace_bytes = drafting->rank_bytes[rank].workspace,
         .graph_bytes = drafting->rank_bytes[rank].graphs});
  }
  for (size_t g = 0; g < layout.groups.size(); ++g) {
    const KvGroup& group = layout.groups[g];
    report.groups.push_back({.owner = std::string(kv_owner_name(group.owner)),
                             .kind = std::string(kv_kind_name(group.kind)),
                             .window = kv_window(group.kind),
                             .num_layers = static_cast<int32_t>(group.layers.size()),
                             .num_kv_heads = group.num_kv_heads,
                             .head_dim = group.head_dim,
                             .block_size = group.block_size,
                             .tokens_per_entry = tokens_per_entry(group.kind),
                             .block_bytes = group.block_bytes,
                             .padding_bytes = group.block_bytes - group.content_bytes,
                             .held_blocks = usage.held_blocks[g],
                             .quarantined_blocks = usage.quarantined_blocks[g]});
  }
  return report;
}

Executor::Executor(std::shared_ptr<const Model> target, std::shared_ptr<const Model> draft,
                   const ExecutorOptions& options, const Progress& progress) {
  at_boundary([&] {
    if (target == nullptr) throw InvalidArgument("target is null; give a model");
    const ExecutorOptions all = with_defaults(options, *target, draft.get());
    check_options(all, *target, draft.get());
    impl_ =
        std::make_unique<Impl>(std::move(target), std::move(draft), options, reported(progress));
  });
}

Executor::~Executor() = default;

std::optional<RequestId> Executor::add_request(Request request) {
  return at_boundary([&] { return impl_->engine->add_request(std::move(request)); });
}
std::optional<std::vector<RequestId>> Executor::add_requests(std::vector<Request> requests) {
  return at_boundary([&] { return impl_->engine->add_requests(std::move(requests)); });
}
bool Executor::cancel(RequestId request_id, std::optional<int32_t> sample) {
  return at_boundary([&] { return impl_->engine->cancel(request_id, sample); });
}
std::vector<RequestEvent> Executor::poll(int32_t timeout_ms) {
  return at_boundary([&] { return impl_->engine->poll(timeout_ms); });
}
ExecutorStats Executor::stats() const {
  return at_boundary([&] { return impl_->engine->stats(); });
}
std::vector<KernelTime> Executor::trace_iteration(int32_t timeout_ms) {
  return at_boundary([&] {
    if (impl_->target->device != Device::kCuda || impl_->given.use_null_device) {
      throw Unsupported("kernels are timed on device cuda only");
    }
    return impl_->engine->trace_iteration(timeout_ms);
  });
}
IterationTimes Executor::iteration_times() const {
  return at_boundary([&] { return impl_->engine->iteration_times(); });
}
void Executor::reset_stats() {
  at_boundary([&] { impl_->engine->reset_stats(); });
}
std::string Executor::check_integrity() {
  return at_boundary([&] { return impl_->engine->check_integrity(); });
}
int64_t Executor::while_idle(const std::function<void()>& body) {
  return at_boundary([&] {
    const std::shared_ptr<Drafting> drafting = impl_->current();
    return impl_->target_lease.alone([&] {
      return drafting->lease.alone(
          [&] { return impl_->engine->while_idle([&] { call_back(body); }); });
    });
  });
}
int32_t Executor::vocab_size() const { return impl_->target->config.vocab_size; }
ExecutorOptions Executor::options() const { return impl_->current()->sizes.options; }

double Executor::set_drafter(std::shared_ptr<const Model> draft,
                             const SpeculativeOptions& speculative, const Progress& progress) {
  return at_boundary(
      [&] { return impl_->set_drafter(std::move(draft), speculative, reported(progress)); });
}
void Executor::update_drafter(const std::function<void()>& body) {
  at_boundary([&] { impl_->update_drafter([&] { call_back(body); }); });
}

MemoryReport Executor::memory_report() const {
  return at_boundary([&] { return impl_->memory_report(); });
}

}  // namespace paceline
