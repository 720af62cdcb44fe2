// SPDX-License-Identifier: Apache-2.0
//
// Times the CUDA ops at the shapes of models: GEMM with weights from memory (rotating through
// copies that L2 cannot hold), attention over caches from memory, and the latency of the small ops.
// Every figure is the median of several replays of a graph of at least 20 launches, so that the
// host and the clock's resolution do not matter; launches overlap as they do in an iteration.
//
// Usage: bench_cuda_ops [--filter SUBSTRING] [--rows LIST] [--json FILE] [--table]. --table times
// the row-wise cases of the op table, at 16 rows, instead. Filters match names such as
// "gemm/qwen3-8b/qkv". With --rows 4,256 products have these numbers of rows, for a profiler.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/cuda_bench.cuh"
#include "support/cuda_fixture.h"
#include "support/op_cases.h"
#include "support/op_cases_compressed.h"
#include "support/op_cases_latent.h"
#include "support/op_cases_markov.h"
#include "support/op_cases_moe.h"
#include "support/op_cases_streams.h"
#include "support/seed.h"

namespace paceline::testing {
namespace {

// --- attention -----------------------------------------------------------------------------------

struct NamedAttention {
  const char* name;
  AttentionSpec spec;
};
const NamedAttention kAttentions[] = {
    {"qwen3-8b", {.num_qo_heads = 32, .num_kv_heads = 8, .head_dim = 128}},
    {"gemma3-27b", {.num_qo_heads = 32, .num_kv_heads = 16, .head_dim = 128, .window = 1024}},
    {"gemma3-270m", {.num_qo_heads = 4, .num_kv_heads = 1, .head_dim = 256, .window = 512}},
    {"gpt-oss", {.num_qo_heads = 64, .num_kv_heads = 8, .head_dim = 64, .has_sinks = true}},
    {"gpt-oss-w128",
     {.num_qo_heads = 64, .num_kv_heads = 8, .head_dim = 64, .window = 128, .has_sinks = true}}};
constexpr int32_t kContexts[] = {256, 768, 4096};

void bench_attention(Bench& bench) {
  bool has_header = false;
  for (const auto& [model, spec] : kAttentions) {
    const std::string name = std::string("attention/") + model;
    if (!bench.wants(name)) continue;
    if (!has_header) {
      std::printf(
          "\nattention, bfloat16, cold caches: us and TB/s of visible keys and values\n"
          "%-14s%6s%6s",
          "context", "seqs", "rows");
      for (const int32_t context : kContexts) std::printf("%10d        ", context);
      std::printf("\n");
      has_header = true;
    }
    for (const int32_t num_seqs : {1, 16, 64}) {
      for (const int32_t rows : {1, 4}) {
        std::printf("%-14s%6d%6d", model, num_seqs, rows);
        for (const int32_t context : kContexts) {
          AttentionBatch batch{.max_model_len = 8192};
          for (int32_t i = 0; i < num_seqs; ++i) batch.sequences.push_back({i, context, rows, 0});
          const double us = bench.cold_us(make_attention(spec, batch, 1), "pool");
          const int32_t visible =
              spec.window == 0 ? context : std::min(context, spec.window + rows - 1);
          const double bytes = 4.0 * num_seqs * visible * spec.num_kv_heads * spec.head_dim;
          const double rate = bytes / us * 1e-6;
          bench.record({name,
                        "seqs=" + std::to_string(num_seqs) + " rows=" + std::to_string(rows) +
                            " context=" + std::to_string(context),
                        us, rate, "TB/s"});
          std::printf("%10.1f%8.2f", us, rate);
        }
        std::printf("\n");
        std::fflush(stdout);
      }
    }
  }
}

// Prompts and chunks of prompts.
void bench_prefill(Bench& bench) {
  constexpr NamedAttention kSpecs[] = {
      {"qwen3-8b", {.num_qo_heads = 32, .num_kv_heads = 8, .head_dim = 128}},
      {"gemma3-27b", {.num_qo_heads = 32, .num_kv_heads = 16, .head_dim = 128}},
      {"gemma3-27b-w1024",
       {.num_qo_heads = 32, .num_kv_heads = 16, .head_dim = 128, .window = 1024}},
      {"gemma3-4b", {.num_qo_heads = 8, .num_kv_heads = 4, .head_dim = 256}},
      {"gpt-oss", {.num_qo_heads = 64, .num_kv_heads = 8, .head_dim = 64, .has_sinks = true}}};
  struct Load {
    int32_t num_seqs;
    int32_t rows;     // of each sequence,
    int32_t context;  // the last ones of so many
  };
  constexpr Load kLoads[] = {{1, 64, 4096},   {1, 128, 128},    {1, 256, 256},   {1, 256, 8192},
                             {1, 512, 512},   {1, 1024, 1024},  {4, 512, 1024},  {1, 2048, 2048},
                             {1, 2048, 8192}, {1, 2048, 32768}, {1, 8192, 32768}};
  bool has_header = false;
  for (const auto& [model, spec] : kSpecs) {
    const std::string name = std::string("prefill/") + model;
    if (!bench.wants(name)) continue;
    if (!has_header) {
      std::printf(
          "\nattention of prompts, bfloat16: us and TFLOP/s of visible keys\n"
          "%-18s%6s%8s%10s\n",
          "", "seqs", "rows", "context");
      has_header = true;
    }
    for (const auto& [num_seqs, rows, context] : kLoads) {
      AttentionBatch batch{.max_model_len = 40960};
      for (int32_t i = 0; i < num_seqs; ++i) batch.sequences.push_back({i, context, rows, 0});
      const double us = bench.cold_us(make_attention(spec, batch, 1), "pool");
      double visible = 0;
      for (int32_t end = context - rows + 1; end <= context; ++end) {
        visible += spec.window == 0 ? end : std::min(end, spec.window);
      }
      const double flops = 4.0 * num_seqs * visible * spec.num_qo_heads * spec.head_dim;
      const double rate = flops / us * 1e-6;
      bench.record({name,
                    "seqs=" + std::to_string(num_seqs) + " rows=" + std::to_string(rows) +
                        " context=" + std::to_string(context),
                    us, rate, "TFLOP/s"});
      std::printf("%-18s%6d%8d%10d%12.1f%8.1f\n", model, num_seqs, rows, context, us, rate);
      std::fflush(stdout);
    }
  }
}

// --- latent attention ----------------------------------------------------------------------------

// GLM-4.7-Flash has 20 heads: four rows are 80 queries against one stream of entries. With 16 heads
// they are 64.
constexpr int32_t kLatentHeads[] = {20, 16};
constexpr int32_t kLatentContexts[] = {512, 1024, 8192};

void bench_latent_attention(Bench& bench) {
  struct Load {
    int32_t num_seqs;
    int32_t rows;  // of each sequence, the last ones of the context
  };
  // Draft steps and verify windows; at the end a prompt.
  constexpr Load kLoads[] = {{1, 1}, {1, 4}, {16, 1}, {16, 4}, {64, 1}, {64, 4}, {1, 512}};
  bool has_header = false;
  for (const int32_t heads : kLatentHeads) {
    const std::string name = "latent/attention/" + std::to_string(heads);
    if (!bench.wants(name)) continue;
    if (!has_header) {
      std::printf(
          "\nlatent attention, bfloat16, cold caches: MB of visible entries, us, TB/s\n"
          "%-8s%6s%6s%9s",
          "heads", "seqs", "rows", "queries");
      for (const int32_t context : kLatentContexts) std::printf("%18d        ", context);
      std::printf("\n");
      has_header = true;
    }
    const AttentionSpec spec = {.num_qo_heads = heads,
                                .num_kv_heads = 1,
                                .head_dim = 576,
                                .kv_inputs = KvInputs::kNone,
                                .value_dim = 512};
    for (const auto& [num_seqs, rows] : kLoads) {
      std::printf("%-8d%6d%6d%9d", heads, num_seqs, rows, rows * heads);
      for (const int32_t context : kLatentContexts) {
        AttentionBatch batch{.max_model_len = 16384};
        for (int32_t i = 0; i < num_seqs; ++i) batch.sequences.push_back({i, context, rows, 0});
        const double us = bench.cold_us(make_attention(spec, batch, 1), "pool");
        const double bytes = 2.0 * num_seqs * context * spec.head_dim;
        const double rate = bytes / us * 1e-6;
        bench.record({name,
                      "seqs=" + std::to_string(num_seqs) + " rows=" + std::to_string(rows) +
                          " context=" + std::to_string(context),
                      us, rate, "TB/s"});
        std::printf("%9.1f%10.1f%7.2f", bytes * 1e-6, us, rate);
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
}

// --- small ops -----------------------------------------------------------------------------------

void bench_small_ops(Bench& bench) {
  using Make = std::function<OpInstance(const Rows&)>;
  const auto norm = [](NormKind kind) {
    return
        [kind](const Rows& rows) { return make_rms_norm({.hidden = 4096, .kind = kind}, rows, 1); };
  };
  const auto draw_at = [](float temperature) {
    return [temperature](const Rows& rows) {
      return make_draw({.vocab_limit = 151936, .temperature = temperature}, rows, 1);
    };
  };
  // A draft of DSpark on Qwen3-8B, whose weights fit no cache.
  const auto draft_at = [](float temperature) {
    return [temperature](const Rows& rows) {
      return make_chain({.rank = 256,
                         .draw = {.vocab_limit = 151936, .temperature = temperature},
                         .is_alone = true},
                        rows, 1);
    };
  };
  const auto adjust_of = [](AdjustKind kind) {
    return [kind](const Rows& rows) {
      return make_adjust({.vocab_size = 151936, .kind = kind}, rows, 1);
    };
  };
  // Truncation is in place, so each timed run first copies the logits in.
  const auto truncate_of = [](TruncateKind kind) {
    return [kind](const Rows& rows) {
      return make_truncate(
          {.vocab_limit = 151936, .kind = kind, .copies_logits = kind != TruncateKind::kNone}, rows,
          1);
    };
  };
  // The products over the heads of GLM-4.7-Flash, before latent attention and behind it.
  const LatentSpec latent = {.num_heads = 20,
                             .qk_nope_head_dim = 192,
                             .qk_rope_head_dim = 64,
                             .v_head_dim = 256,
                             .kv_lora_rank = 512,
                             .q_width = 768};
  // DeepSeek-V4-Flash, at a context of 32k; rows are verify windows of four.
  const WindowEntrySpec v4_heads = {
      .num_heads = 64, .head_dim = 512, .rope_head_dim = 64, .q_width = 1024};
  const auto v4_rotate = [v4_heads](bool is_inverse) {
    return [v4_heads, is_inverse](const Rows& rows) {
      WindowEntrySpec spec = v4_heads;
      spec.has_norm = !is_inverse;
      spec.is_inverse = is_inverse;
      return make_rotate_heads(spec, rows, 1);
    };
  };
  const auto v4_compress = [](bool overlaps) {
    return [overlaps](const Rows& rows) {
      return make_compress({.dim = 512,
                            .index_dim = overlaps ? 128 : 0,
                            .rope_head_dim = 64,
                            .tokens_per_entry = overlaps ? 4 : 128,
                            .overlaps = overlaps},
                           rows, 1);
    };
  };
  const EntriesSpec v4_index = {.num_heads = 64,
                                .head_dim = 128,
                                .num_entries = 8192,
                                .top_k = 512,
                                .rows_per_seq = 4,
                                .sees_all = true};
  const auto v4_attention = [](int32_t num_entries, int32_t top_k) {
    return [num_entries, top_k](const Rows& rows) {
      return make_compressed_attention({.num_heads = 64,
                                        .head_dim = 512,
                                        .num_entries = std::max(num_entries, 1),
                                        .top_k = top_k,
                                        .has_entries = num_entries > 0,
                                        .sees_all = true},
                                       rows, 1);
    };
  };
  const StreamsSpec v4_streams = {.num_streams = 4, .hidden = 4096, .adds = true};
  // Of the places of rows that each choose four experts.
  const auto swiglu_of_experts = [](const Rows& rows) {
    return make_gated(
        {.intermediate = 2880, .activation = Activation::kSwigluOai, .is_interleaved = true},
        first_rows(4 * rows.claimed, 4 * rows.max_rows), 1);
  };
  // Of GPT-OSS 20B and 120B, with its product.
  const auto router_of = [](int32_t num_experts) {
    return [num_experts](const Rows& rows) {
      return make_router({.num_experts = num_experts, .top_k = 4, .k = 2880}, rows, 1);
    };
  };
  const std::pair<const char*, Make> ops[] = {
      {"embed/4096", [](const Rows& rows) { return make_embed({4096, 1000}, rows, 1); }},
      {"rms_norm/4096/plain", norm(NormKind::kPlain)},
      {"rms_norm/4096/residual", norm(NormKind::kResidual)},
      {"rms_norm/4096/x_weight", norm(NormKind::kResidualXWeight)},
      {"gated/12288", [](const Rows& rows) { return make_gated({12288}, rows, 1); }},
      {"rope/32x8x128", [](const Rows& rows) { return make_rope({32, 8, 128}, rows, 1); }},
      {"gather/4096", [](const Rows& rows) { return make_gather({4096}, rows, 1); }},
      {"soft_cap/151936", [](const Rows& rows) { return make_soft_cap({151936}, rows, 1); }},
      {"draw/151936/greedy", draw_at(0.0f)},
      {"draw/151936/t1", draw_at(1.0f)},
      {"markov_draft/256x151936/greedy", draft_at(0.0f)},
      {"markov_draft/256x151936/t1", draft_at(1.0f)},
      {"adjust/151936/none", adjust_of(AdjustKind::kNone)},
      {"adjust/151936/penalties", adjust_of(AdjustKind::kPenalties)},
      {"copy/151936",
       [](const Rows& rows) {
         return make_copy({.width = 151936, .y_dtype = DType::kFloat32}, rows, 1);
       }},
      {"truncate/151936/none", truncate_of(TruncateKind::kNone)},
      {"copy+truncate/151936/top_k", truncate_of(TruncateKind::kTopK)},
      {"copy+truncate/151936/top_p", truncate_of(TruncateKind::kTopP)},
      {"copy+truncate/151936/min_p", truncate_of(TruncateKind::kMinP)},
      {"copy+truncate/151936/both", truncate_of(TruncateKind::kTopKTopP)},
      {"logprobs/151936/20",
       [](const Rows& rows) { return make_prompt_logprobs({.vocab_size = 151936}, rows, 1); }},
      {"clusters_select/2048",
       [](const Rows& rows) { return make_select_clusters({2048, 32}, rows, 1); }},
      {"clusters_logits/256",
       [](const Rows& rows) { return make_cluster_logits({256, 2048, 128, 32}, rows, 1); }},
      // The router's choice in GPT-OSS 20B and 120B, and the ends of an expert's MLP.
      {"route/4of32", [](const Rows& rows) { return make_route({32, 4}, rows, 1); }},
      {"route/4of128", [](const Rows& rows) { return make_route({128, 4}, rows, 1); }},
      {"sort/4of32", [](const Rows& rows) { return make_sort({32, 4}, rows, 1); }},
      {"sort/4of128", [](const Rows& rows) { return make_sort({128, 4}, rows, 1); }},
      {"route_and_sort/4of32",
       [](const Rows& rows) { return make_route_and_sort({32, 4}, rows, 1); }},
      {"route_and_sort/4of128",
       [](const Rows& rows) { return make_route_and_sort({128, 4}, rows, 1); }},
      {"router/4of32", router_of(32)},
      {"router/4of128", router_of(128)},
      {"gated_swiglu_oai/4x2880", swiglu_of_experts},
      {"combine/4x2880", [](const Rows& rows) { return make_combine({2880, 4}, rows, 1); }},
      {"combine_and_norm/4x2880",
       [](const Rows& rows) { return make_combine_and_norm({2880, 4}, rows, 1); }},
      {"v4/join_streams", [=](const Rows& rows) { return make_join_streams(v4_streams, rows, 1); }},
      {"v4/append_window_entries",
       [=](const Rows& rows) { return make_append_window_entries(v4_heads, rows, 1); }},
      {"v4/rotate_heads", v4_rotate(false)},
      {"v4/rotate_heads/inverse", v4_rotate(true)},
      {"v4/append_tail", [](const Rows& rows) { return make_append_tail({.dim = 2560}, rows, 1); }},
      {"v4/compress/4", v4_compress(true)},
      {"v4/compress/128", v4_compress(false)},
      {"v4/index_scores/8192",
       [=](const Rows& rows) { return make_index_scores(v4_index, rows, 1); }},
      {"v4/choose_entries/8192",
       [=](const Rows& rows) { return make_choose_entries(v4_index, rows, 1); }},
      {"v4/attention/window", v4_attention(0, 0)},
      {"v4/attention/512of8192", v4_attention(8192, 512)},
      {"v4/attention/256", v4_attention(256, 0)},
      {"v4/route",
       [](const Rows& rows) {
         return make_route({.num_experts = 256, .top_k = 6, .rule = RouterRule::kSqrtSoftplus},
                           rows, 1);
       }},
      {"latent/append", [=](const Rows& rows) { return make_append_latents(latent, rows, 1); }},
      {"latent/absorb_queries",
       [=](const Rows& rows) { return make_absorb_queries(latent, rows, 1); }},
      {"latent/project_values",
       [=](const Rows& rows) { return make_project_values(latent, rows, 1); }}};
  constexpr int32_t kRows[] = {1, 4, 16, 64, 128, 256};
  bool has_header = false;
  for (const auto& [name, make] : ops) {
    if (!bench.wants(name)) continue;
    if (!has_header) {
      std::printf("\nsmall ops, bfloat16, us a launch\n%-26s", "rows");
      for (const int32_t rows : kRows) std::printf("%10d", rows);
      std::printf("\n");
      has_header = true;
    }
    std::printf("%-26s", name);
    for (const int32_t rows : kRows) {
      const double us = bench.warm_us(make(first_rows(rows, rows)));
      bench.record({name, "rows=" + std::to_string(rows), us});
      std::printf("%10.2f", us);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

void bench_table(Bench& bench) {
  for (const RowWiseCase& c : row_wise_cases()) {
    if (!bench.wants(c.name)) continue;
    const double us = bench.warm_us(c.make(first_rows(16, 16), base_seed()));
    bench.record({c.name, "rows=16", us});
    std::printf("%-56s%10.2f us\n", c.name.c_str(), us);
  }
}

void write_json(const Bench& bench, const char* path) {
  FILE* const file = std::fopen(path, "w");
  if (file == nullptr) throw std::runtime_error(std::string("cannot write ") + path);
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, 0), "properties");
  std::fprintf(file, "{\"device\": \"%s\", \"results\": [", properties.name);
  const char* separator = "\n";
  for (const Record& r : bench.records()) {
    std::fprintf(file, "%s  {\"name\": \"%s\", \"point\": \"%s\", \"us\": %.3f", separator,
                 r.name.c_str(), r.point.c_str(), r.us);
    if (r.rate > 0) std::fprintf(file, ", \"rate\": %.4f, \"unit\": \"%s\"", r.rate, r.unit);
    std::fprintf(file, "}");
    separator = ",\n";
  }
  std::fprintf(file, "\n]}\n");
  std::fclose(file);
}

// The numbers of a list such as "4,256". Throws std::invalid_argument.
std::vector<int32_t> parse_rows(const std::string& list) {
  std::vector<int32_t> rows;
  std::istringstream stream(list);
  for (std::string number; std::getline(stream, number, ',');) rows.push_back(std::stoi(number));
  return rows;
}

int run(int argc, char** argv) {
  std::string filter;
  std::vector<int32_t> rows;
  const char* json = nullptr;
  bool is_table = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view option = argv[i];
    if (option == "--table") {
      is_table = true;
    } else if (option == "--filter" && i + 1 < argc) {
      filter = argv[++i];
    } else if (option == "--rows" && i + 1 < argc) {
      rows = parse_rows(argv[++i]);
    } else if (option == "--json" && i + 1 < argc) {
      json = argv[++i];
    } else {
      std::fprintf(stderr, "usage: %s [--filter SUBSTRING] [--rows LIST] [--json FILE] [--table]\n",
                   argv[0]);
      return 2;
    }
  }
  const std::string missing = cuda_status().reason;
  if (!missing.empty()) {
    std::fprintf(stderr, "bench_cuda_ops: %s\n", missing.c_str());
    return 1;
  }
  Bench bench(filter, rows);
  if (is_table) {
    bench_table(bench);
  } else {
    bench_products(bench);
    bench_attention(bench);
    bench_prefill(bench);
    bench_latent_attention(bench);
    bench_recurrent(bench);
    bench_small_ops(bench);
  }
  if (json != nullptr) write_json(bench, json);
  return 0;
}

}  // namespace
}  // namespace paceline::testing

int main(int argc, char** argv) {
  try {
    return paceline::testing::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_cuda_ops: %s\n", error.what());
    return 1;
  }
}
