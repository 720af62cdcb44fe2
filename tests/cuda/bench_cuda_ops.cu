// SPDX-License-Identifier: Apache-2.0
//
// Times the CUDA ops at the shapes of models: GEMM with weights from memory (rotating through
// copies that L2 cannot hold), attention over caches from memory, and the latency of the small ops.
// Every figure is the median of several replays of a graph of at least 20 launches, so that the
// host and the clock's resolution do not matter; launches overlap as they do in an iteration.
//
// Usage: bench_cuda_ops [--filter SUBSTRING] [--json FILE] [--table]. --table times the row-wise
// cases of the op table, at 16 rows, instead. Filters match names such as "gemm/qwen3-8b/qkv".

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/cuda_fixture.h"
#include "support/op_cases.h"
#include "support/op_cases_moe.h"
#include "support/seed.h"

namespace paceline::testing {
namespace {

constexpr int64_t kColdBytes = int64_t{400} << 20;  // a rotation; eight times the L2 of an H200
constexpr int kMinLaunches = 20;
constexpr int kMaxCopies = 320;
constexpr int kReplays = 5;

// Random bits give the power draw, and so the clock, of real weights.
__global__ void fill_random_bf16(uint16_t* to, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    uint64_t z = static_cast<uint64_t>(i) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z ^= z >> 31;
    // Sign and mantissa are random, the exponent is one of four: 2^-7 .. 2^-4.
    to[i] = static_cast<uint16_t>((z & 0x807f) | (0x3c00 + (z >> 20 & 3) * 0x80));
  }
}

struct Record {
  std::string name;   // "gemm/qwen3-8b/qkv"
  std::string point;  // "m=16"
  double us = 0;
  double rate = 0;
  const char* unit = "";
};

class Bench {
 public:
  explicit Bench(std::string filter) : filter_(std::move(filter)) {}

  [[nodiscard]] bool wants(const std::string& name) const {
    return name.find(filter_) != std::string::npos;
  }
  const std::vector<Record>& records() const { return records_; }
  void record(Record r) { records_.push_back(std::move(r)); }

  // At least `bytes` of random bfloat16, which are small numbers when read as float32. A larger
  // request replaces the buffer.
  std::byte* arena(int64_t bytes) {
    if (arena_.size() < bytes) {
      arena_ = DeviceVector<std::byte>();
      arena_ = DeviceVector<std::byte>(bytes);
      fill_random_bf16<<<2048, 256>>>(reinterpret_cast<uint16_t*>(arena_.data()), bytes / 2);
      check_cuda(cudaDeviceSynchronize(), "fill");
    }
    return arena_.data();
  }

  // Microseconds per call of enqueue(i), i = 0, 1, ... `launches` - 1, in one graph.
  double median_us(int launches, const std::function<void(int)>& enqueue) {
    enqueue(0);  // keeps the setup of the first call out of the graph
    ctx_.synchronize();
    const CapturedGraph graph(ctx_, [&] {
      for (int i = 0; i < launches; ++i) enqueue(i);
    });
    cudaEvent_t start = nullptr;
    cudaEvent_t stop = nullptr;
    check_cuda(cudaEventCreate(&start), "event");
    check_cuda(cudaEventCreate(&stop), "event");
    graph.launch();
    std::vector<double> times;
    for (int i = 0; i < kReplays; ++i) {
      check_cuda(cudaEventRecord(start, ctx_.stream()), "event");
      graph.launch();
      check_cuda(cudaEventRecord(stop, ctx_.stream()), "event");
      check_cuda(cudaEventSynchronize(stop), "replay");
      float ms = 0;
      check_cuda(cudaEventElapsedTime(&ms, start, stop), "event");
      times.push_back(1e3 * ms / launches);
    }
    cudaEventDestroy(start);
    cudaEventDestroy(stop);
    std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
    return times[kReplays / 2];
  }

  // Times the instance with the array `rotated` at one of several cold addresses.
  double cold_us(const OpInstance& op, const char* rotated) {
    const Handle handle = op.find(rotated);
    const OpArray& array = op.arrays[static_cast<size_t>(handle)];
    const int64_t bytes = (array.count * element_bytes(array.cuda) + 255) / 256 * 256;
    const int copies =
        static_cast<int>(std::clamp<int64_t>((kColdBytes + bytes - 1) / bytes, 1, kMaxCopies));
    std::byte* const at = arena(bytes * copies);
    OpInstance rest = op;  // owns all arrays but the rotated one
    rest.arrays[static_cast<size_t>(handle)].count = 0;
    const DeviceInstance device(rest, nullptr, /*has_values=*/false);
    Addresses addresses = device.addresses();
    for (size_t i = 0; i < op.arrays.size(); ++i) {
      if (!is_float(rest.arrays[i].cuda) || rest.arrays[i].count == 0) continue;
      const int64_t halves = rest.arrays[i].count * element_bytes(rest.arrays[i].cuda) / 2;
      fill_random_bf16<<<256, 256>>>(addresses.get<uint16_t>(static_cast<Handle>(i)), halves);
    }
    check_cuda(cudaDeviceSynchronize(), "fill");
    return median_us(std::max(copies, kMinLaunches), [&](int i) {
      addresses.set(handle, at + i % copies * bytes);
      device.enqueue(ctx_, addresses);
    });
  }

  double warm_us(const OpInstance& op) {
    const DeviceInstance device(op);
    return median_us(2 * kMinLaunches, [&](int) { device.enqueue(ctx_); });
  }

 private:
  std::string filter_;
  CudaTestContext& ctx_ = cuda_test_context();
  DeviceVector<std::byte> arena_;
  std::vector<Record> records_;
};

// --- gemm ----------------------------------------------------------------------------------------

struct NamedGemm {
  const char* name;
  int32_t n;
  int32_t k;
  bool is_lm_head = false;
};
constexpr NamedGemm kGemms[] = {{"qwen3-8b/qkv", 6144, 4096},
                                {"qwen3-8b/o", 4096, 4096},
                                {"qwen3-8b/gate_up", 24576, 4096},
                                {"qwen3-8b/down", 4096, 12288},
                                {"qwen3-8b/lm_head", 151936, 4096, true},
                                {"gemma3-27b/qkv", 8192, 5376},
                                {"gemma3-27b/o", 5376, 4096},
                                {"gemma3-27b/gate_up", 43008, 5376},
                                {"gemma3-27b/down", 5376, 21504},
                                {"gemma3-27b/lm_head", 262144, 5376, true},
                                {"gemma3-270m/qkv", 1536, 640},
                                {"gemma3-270m/o", 640, 1024},
                                {"gemma3-270m/gate_up", 4096, 640},
                                {"gemma3-270m/down", 640, 2048},
                                {"gemma3-270m/lm_head", 262144, 640, true}};
constexpr int32_t kGemmRows[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048};
constexpr int32_t kMostRowsInTbs = 64;  // above, arithmetic bounds

void bench_gemms(Bench& bench) {
  bool has_header = false;
  for (const NamedGemm& shape : kGemms) {
    const std::string name = std::string("gemm/") + shape.name;
    if (!bench.wants(name)) continue;
    if (!has_header) {
      std::printf(
          "gemm, bfloat16, cold weights; below us: TB/s of weights to %d rows, then "
          "TFLOP/s\n%-20s",
          kMostRowsInTbs, "rows");
      for (const int32_t m : kGemmRows) std::printf("%8d", m);
      std::printf("\n");
      has_header = true;
    }
    std::string us_line;
    std::string rate_line;
    for (const int32_t m : kGemmRows) {
      if (shape.is_lm_head && m > 256) continue;  // no batch has that many logit rows
      const GemmSpec spec{.n = shape.n,
                          .k = shape.k,
                          .y_dtype = shape.is_lm_head ? DType::kFloat32 : DType::kBFloat16};
      const double us = bench.cold_us(make_gemm(spec, first_rows(m, m), 1), "weight");
      const bool is_bytes = m <= kMostRowsInTbs;
      const double elements = static_cast<double>(shape.n) * shape.k;
      const double rate = (is_bytes ? 2.0 * elements : 2.0 * elements * m) / us * 1e-6;
      bench.record({name, "m=" + std::to_string(m), us, rate, is_bytes ? "TB/s" : "TFLOP/s"});
      char text[32];
      std::snprintf(text, sizeof(text), "%8.1f", us);
      us_line += text;
      std::snprintf(text, sizeof(text), is_bytes ? "%8.2f" : "%8.0f", rate);
      rate_line += text;
    }
    std::printf("%-20s%s\n%-20s%s\n", shape.name, us_line.c_str(), "", rate_line.c_str());
    std::fflush(stdout);
  }
}

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
          const double bytes =
              4.0 * num_seqs * visible * spec.num_kv_heads * spec.head_dim;  // 2 B, K and V
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
  // Of the places of rows that each choose four experts.
  const auto swiglu_of_experts = [](const Rows& rows) {
    return make_gated(
        {.intermediate = 2880, .activation = Activation::kSwigluOai, .is_interleaved = true},
        first_rows(4 * rows.claimed, 4 * rows.max_rows), 1);
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
      {"gated_swiglu_oai/4x2880", swiglu_of_experts},
      {"combine/4x2880", [](const Rows& rows) { return make_combine({2880, 4}, rows, 1); }}};
  constexpr int32_t kRows[] = {1, 4, 64, 256};
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

int run(int argc, char** argv) {
  std::string filter;
  const char* json = nullptr;
  bool is_table = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view option = argv[i];
    if (option == "--table") {
      is_table = true;
    } else if (option == "--filter" && i + 1 < argc) {
      filter = argv[++i];
    } else if (option == "--json" && i + 1 < argc) {
      json = argv[++i];
    } else {
      std::fprintf(stderr, "usage: %s [--filter SUBSTRING] [--json FILE] [--table]\n", argv[0]);
      return 2;
    }
  }
  const std::string missing = cuda_status().reason;
  if (!missing.empty()) {
    std::fprintf(stderr, "bench_cuda_ops: %s\n", missing.c_str());
    return 1;
  }
  Bench bench(filter);
  if (is_table) {
    bench_table(bench);
  } else {
    bench_gemms(bench);
    bench_attention(bench);
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
