// SPDX-License-Identifier: Apache-2.0
#include "report_dicts.h"

#include <pybind11/stl.h>

#include <utility>

namespace paceline::python {

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
    entry["tokens_per_entry"] = group.tokens_per_entry;
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
  dict["kv_cache_rule"] = report.kv_cache_rule;
  dict["kv_slab_bytes"] = report.kv_slab_bytes;
  dict["kv_num_slabs"] = report.kv_num_slabs;
  dict["kv_free_slabs"] = report.kv_free_slabs;
  dict["workspace_bytes"] = report.workspace_bytes;
  py::dict workspace;
  for (const auto& [purpose, bytes] : report.workspace) workspace[purpose.c_str()] = bytes;
  dict["workspace"] = std::move(workspace);
  dict["graph_bytes"] = report.graph_bytes;
  dict["groups"] = std::move(groups);
  py::list ranks;
  for (const MemoryReport::Rank& rank : report.ranks) {
    py::dict entry;
    entry["gpu"] = rank.gpu < 0 ? py::object(py::none()) : py::object(py::int_(rank.gpu));
    entry["target_weight_bytes"] = rank.target_weight_bytes;
    entry["draft_weight_bytes"] = rank.draft_weight_bytes;
    entry["kv_pool_bytes"] = rank.kv_pool_bytes;
    entry["workspace_bytes"] = rank.workspace_bytes;
    entry["graph_bytes"] = rank.graph_bytes;
    ranks.append(std::move(entry));
  }
  dict["ranks"] = std::move(ranks);
  return dict;
}

py::dict stats_to_dict(const ExecutorStats& stats) {
  py::dict dict;
  dict["num_iterations"] = stats.num_iterations;
  dict["num_finished"] = stats.num_finished;
  dict["num_failed"] = stats.num_failed;
  dict["num_cancelled"] = stats.num_cancelled;
  dict["num_preemptions"] = stats.num_preemptions;
  dict["num_prompt_tokens"] = stats.num_prompt_tokens;
  dict["num_shared_tokens"] = stats.num_shared_tokens;
  dict["num_prefix_query_tokens"] = stats.num_prefix_query_tokens;
  dict["num_prefix_hit_tokens"] = stats.num_prefix_hit_tokens;
  dict["num_emitted_tokens"] = stats.num_emitted_tokens;
  dict["num_verify_windows"] = stats.num_verify_windows;
  dict["num_draft_tokens"] = stats.num_draft_tokens;
  dict["num_accepted_tokens"] = stats.num_accepted_tokens;
  dict["drafted_per_position"] = stats.drafted_per_position;
  dict["accepted_per_position"] = stats.accepted_per_position;
  py::dict methods;
  for (const ExecutorStats::Method& method : stats.methods) {
    methods[py::str(method.name)] =
        py::dict(py::arg("num_drafts") = method.num_verify_windows,
                 py::arg("num_draft_tokens") = method.num_draft_tokens,
                 py::arg("num_accepted_tokens") = method.num_accepted_tokens);
  }
  dict["methods"] = std::move(methods);
  dict["num_target_mixture_layers"] = stats.num_target_mixture_layers;
  dict["num_target_experts_hit"] = stats.num_target_experts_hit;
  dict["num_draft_mixture_layers"] = stats.num_draft_mixture_layers;
  dict["num_draft_experts_hit"] = stats.num_draft_experts_hit;
  dict["host_us"] = stats.host_us;
  dict["uptime_s"] = stats.uptime_s;
  dict["num_running"] = stats.num_running;
  dict["num_waiting"] = stats.num_waiting;
  py::list groups;
  for (const ExecutorStats::KvGroup& group : stats.kv_groups) {
    py::dict entry;
    entry["held_blocks"] = group.held_blocks;
    entry["quarantined_blocks"] = group.quarantined_blocks;
    entry["cached_blocks"] = group.cached_blocks;
    entry["hit_blocks"] = group.hit_blocks;
    entry["evicted_blocks"] = group.evicted_blocks;
    entry["max_blocks"] = group.max_blocks;
    groups.append(std::move(entry));
  }
  dict["kv_groups"] = std::move(groups);
  py::list drafts;
  for (const ExecutorStats::Drafts& of : stats.drafts) {
    py::dict entry;
    entry["num_drafts"] = of.num_drafts;
    entry["num_iterations"] = of.num_iterations;
    entry["us"] = of.us;
    entry["expected_us"] = of.expected_us;
    entry["expected_tokens"] = of.expected_tokens;
    drafts.append(std::move(entry));
  }
  dict["drafts"] = std::move(drafts);
  dict["is_adaptive"] = stats.is_adaptive;
  dict["num_drafts"] = stats.num_drafts;
  dict["expected_acceptance"] = stats.expected_acceptance;
  py::list costs;
  for (const ExecutorStats::Cost& of : stats.costs) {
    py::dict entry;
    entry["num_seqs"] = of.num_seqs;
    entry["num_drafts"] = of.num_drafts;
    entry["num_samples"] = of.num_samples;
    entry["us"] = of.us;
    costs.append(std::move(entry));
  }
  dict["costs"] = std::move(costs);
  dict["kv_num_slabs"] = stats.kv_num_slabs;
  dict["kv_free_slabs"] = stats.kv_free_slabs;
  return dict;
}

py::dict times_to_dict(const IterationTimes& times) {
  py::dict dict;
  dict["us"] = times.us;
  dict["idle_us"] = times.idle_us;
  dict["num_decoding"] = times.num_decoding;
  dict["num_prefill"] = times.num_prefill;
  dict["target_mixture_layers"] = times.target_mixture_layers;
  dict["target_experts_hit"] = times.target_experts_hit;
  dict["draft_mixture_layers"] = times.draft_mixture_layers;
  dict["draft_experts_hit"] = times.draft_experts_hit;
  return dict;
}

}  // namespace paceline::python
