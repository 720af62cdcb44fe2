// SPDX-License-Identifier: Apache-2.0
#include <paceline/executor.h>

#include <optional>
#include <utility>

#include "base/boundary.h"
#include "base/check.h"
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

struct Executor::Impl {
  Impl(std::shared_ptr<const Model> target_model, std::shared_ptr<const Model> draft_model,
       const ExecutorOptions& executor_options, const Progress& progress)
      : target(std::move(target_model)),
        draft(std::move(draft_model)),
        target_lease(target.get()),
        draft_lease(draft == target ? nullptr : draft.get()),
        sizes(choose_sizes(executor_options, *target, draft.get(), std::nullopt)),
        options(sizes.options),
        targets(rank_targets(target, options)),
        drafts(rank_drafts(draft, options)),
        layout(plan_layout(options, *targets.front(), draft.get())) {
    std::unique_ptr<Runner> runner = make_runner(targets, drafts, layout, options, progress);
    workspace = runner->workspace_bytes();
    graph_bytes = runner->graph_bytes();
    rank_bytes = runner->rank_bytes();
    engine.emplace(engine_options(options, *target, draft.get()), layout, std::move(runner));
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

  std::shared_ptr<const Model> target;
  std::shared_ptr<const Model> draft;
  ModelLease target_lease;
  ModelLease draft_lease;  // of no model where it is the target
  DefaultSizes sizes;
  const ExecutorOptions& options;  // of sizes
  RankModels targets;
  RankModels drafts;
  KvLayout layout;  // of each rank
  std::map<std::string, int64_t, std::less<>> workspace;
  int64_t graph_bytes = 0;
  std::vector<Runner::RankBytes> rank_bytes;
  std::optional<Engine> engine;
};

std::string Executor::Impl::start_line() const {
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
  const Engine::KvUsage usage = engine->kv_usage();
  MemoryReport report{.target_weight_bytes = model_weight_bytes(*target),
                      .draft_weight_bytes = draft != nullptr ? model_weight_bytes(*draft) : 0,
                      .kv_pool_bytes = layout.pool_bytes * options.tensor_parallel_size,
                      .kv_cache_rule = sizes.kv_cache_rule,
                      .kv_slab_bytes = layout.slab_bytes,
                      .kv_num_slabs = layout.num_slabs,
                      .kv_free_slabs = usage.free_slabs,
                      .workspace = workspace,
                      .graph_bytes = graph_bytes};
  for (const auto& [purpose, bytes] : report.workspace) report.workspace_bytes += bytes;
  for (size_t rank = 0; rank < rank_bytes.size(); ++rank) {
    const bool is_on_gpu = target->device == Device::kCuda;
    const Model* const own_draft = rank < drafts.size() ? drafts[rank].get() : nullptr;
    report.ranks.push_back(
        {.gpu = is_on_gpu ? targets[rank]->gpu : -1,
         .target_weight_bytes = model_weight_bytes(is_on_gpu ? *targets[rank] : *target),
         .draft_weight_bytes = own_draft != nullptr ? model_weight_bytes(*own_draft) : 0,
         .kv_pool_bytes = layout.pool_bytes,
         .workspace_bytes = rank_bytes[rank].workspace,
         .graph_bytes = rank_bytes[rank].graphs});
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
    Progress report;
    if (progress) {
      report = [&](int32_t done, int32_t total) { call_back([&] { progress(done, total); }); };
    }
    impl_ = std::make_unique<Impl>(std::move(target), std::move(draft), options, report);
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
    if (impl_->target->device != Device::kCuda || impl_->options.use_null_device) {
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
    return impl_->target_lease.alone([&] {
      return impl_->draft_lease.alone(
          [&] { return impl_->engine->while_idle([&] { call_back(body); }); });
    });
  });
}
int32_t Executor::vocab_size() const { return impl_->target->config.vocab_size; }
const ExecutorOptions& Executor::options() const { return impl_->options; }

MemoryReport Executor::memory_report() const {
  return at_boundary([&] { return impl_->memory_report(); });
}

}  // namespace paceline
