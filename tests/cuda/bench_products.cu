// SPDX-License-Identifier: Apache-2.0
//
// The products of bench_cuda_ops: plain ones, gates and ups with their activation, products of
// weights with scales, and those by expert.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "cuda/cuda_bench.cuh"
#include "ops/moe.h"
#include "support/expert_arrays.h"
#include "support/op_cases.h"

namespace paceline::testing {
namespace {

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
                                // of one of two ranks
                                {"qwen3-8b/tp2/qkv", 3072, 4096},
                                {"qwen3-8b/tp2/o", 2048, 4096},
                                {"qwen3-8b/tp2/gate_up", 12288, 4096},
                                {"qwen3-8b/tp2/down", 2048, 12288},
                                {"gemma3-27b/qkv", 8192, 5376},
                                {"gemma3-27b/o", 5376, 4096},
                                {"gemma3-27b/gate_up", 43008, 5376},
                                {"gemma3-27b/down", 5376, 21504},
                                {"gemma3-27b/lm_head", 262144, 5376, true},
                                {"gemma3-270m/qkv", 1536, 640},
                                {"gemma3-270m/o", 640, 1024},
                                {"gemma3-270m/gate_up", 4096, 640},
                                {"gemma3-270m/down", 640, 2048},
                                {"gemma3-270m/lm_head", 262144, 640, true},
                                {"gpt-oss-20b/qkv", 5120, 2880},
                                {"gpt-oss-20b/o", 2880, 4096},
                                {"gpt-oss-20b/router", 32, 2880},
                                {"gpt-oss-20b/lm_head", 201088, 2880, true}};
// Products that end in the activation.
constexpr NamedGemm kActivatedGemms[] = {{"qwen3-8b/gate_up", 24576, 4096},
                                         {"qwen3-8b/tp2/gate_up", 12288, 4096}};
constexpr int32_t kGemmRows[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048};
constexpr int32_t kMostRowsInTbs = 64;  // above, arithmetic bounds

// The lines of a product: microseconds, and below them rates.
class Points {
 public:
  void add(Bench& bench, const std::string& name, int32_t rows, double us, double rate) {
    const bool is_bytes = rows <= kMostRowsInTbs;
    bench.record({name, "m=" + std::to_string(rows), us, rate, is_bytes ? "TB/s" : "TFLOP/s"});
    char text[32];
    std::snprintf(text, sizeof(text), "%8.1f", us);
    us_ += text;
    std::snprintf(text, sizeof(text), is_bytes ? "%8.2f" : "%8.0f", rate);
    rates_ += text;
  }
  void print(const char* name, int width) const {
    std::printf("%-*s%s\n%-*s%s\n", width, name, us_.c_str(), width, "", rates_.c_str());
    std::fflush(stdout);
  }

 private:
  std::string us_;
  std::string rates_;
};

OpInstance make_plain(const NamedGemm& shape, const Rows& rows) {
  const GemmSpec spec{
      .n = shape.n, .k = shape.k, .y_dtype = shape.is_lm_head ? DType::kFloat32 : DType::kBFloat16};
  return make_gemm(spec, rows, 1);
}

OpInstance make_activated(const NamedGemm& shape, const Rows& rows) {
  return make_activated_gemm({.intermediate = shape.n / 2, .k = shape.k}, rows, 1);
}

// op: its name, with which those of the products begin.
void bench_gemms(Bench& bench, const char* op, std::span<const NamedGemm> shapes,
                 OpInstance (*make)(const NamedGemm&, const Rows&)) {
  bool has_header = false;
  for (const NamedGemm& shape : shapes) {
    const std::string name = concat(op, "/", shape.name);
    if (!bench.wants(name)) continue;
    if (!has_header) {
      std::printf(
          "%s, bfloat16, cold weights; below us: TB/s of weights to %d rows, then "
          "TFLOP/s\n%-20s",
          op, kMostRowsInTbs, "rows");
      for (const int32_t m : bench.rows_or(kGemmRows)) std::printf("%8d", m);
      std::printf("\n");
      has_header = true;
    }
    Points points;
    for (const int32_t m : bench.rows_or(kGemmRows)) {
      if (shape.is_lm_head && m > 256) continue;  // no batch has that many logit rows
      const double us = bench.cold_us(make(shape, first_rows(m, m)), "weight");
      const bool is_bytes = m <= kMostRowsInTbs;
      const double elements = static_cast<double>(shape.n) * shape.k;
      const double rate = (is_bytes ? 2.0 * elements : 2.0 * elements * m) / us * 1e-6;
      points.add(bench, name, m, us, rate);
    }
    points.print(shape.name, 20);
  }
}

// --- Weights with scales, and experts ------------------------------------------------------------

struct ScaledProduct {
  const char* name;
  WeightFormat format;
  int32_t n;
  int32_t k;
  // kFp8: 128 for tiles of 128 rows, 0 for a scale a row; kInt4: the columns of a group, which has
  // a scale in float16 and a zero point
  int32_t scale_cols = 0;
  int32_t num_experts = 0;  // 0: one matrix, a product of `gemm`
  bool is_gathered = false;
  bool has_shared = false;        // one more expert with all rows
  bool has_exact_scales = false;  // kFp8: powers of two, part of the values
};
constexpr int32_t kTopK = 4;
constexpr WeightFormat kMxfp4 = WeightFormat::kMxfp4;
constexpr WeightFormat kFp8 = WeightFormat::kFp8;
constexpr WeightFormat kInt4 = WeightFormat::kInt4;
constexpr WeightFormat kNvfp4 = WeightFormat::kNvfp4;
constexpr ScaledProduct kScaledProducts[] = {
    {"gemm/qwen3-8b-fp8/qkv", kFp8, 6144, 4096, 128},
    {"gemm/qwen3-8b-fp8/o", kFp8, 4096, 4096, 128},
    {"gemm/qwen3-8b-fp8/gate_up", kFp8, 24576, 4096, 128},
    {"gemm/qwen3-8b-fp8/down", kFp8, 4096, 12288, 128},
    {"gemm/qwen3-8b-int4/qkv", kInt4, 6144, 4096, 128},
    {"gemm/qwen3-8b-int4/o", kInt4, 4096, 4096, 128},
    {"gemm/qwen3-8b-int4/gate_up", kInt4, 24576, 4096, 128},
    {"gemm/qwen3-8b-int4/down", kInt4, 4096, 12288, 128},
    {"gemm/qwen3-8b-nvfp4/qkv", kNvfp4, 6144, 4096},
    {"gemm/qwen3-8b-nvfp4/o", kNvfp4, 4096, 4096},
    {"gemm/qwen3-8b-nvfp4/gate_up", kNvfp4, 24576, 4096},
    {"gemm/qwen3-8b-nvfp4/down", kNvfp4, 4096, 12288},
    {"expert_gemm/qwen3-30b-a3b-int4/gate_up", kInt4, 1536, 2048, 128, 128, true},
    {"expert_gemm/qwen3-30b-a3b-int4/down", kInt4, 2048, 768, 128, 128},
    {"gemm/llama-3-8b-fp8/gate_up", kFp8, 28672, 4096},
    {"gemm/llama-3-8b-fp8/down", kFp8, 4096, 14336},
    {.name = "gemm/deepseek-v4/o_groups",
     .format = kFp8,
     .n = 8192,
     .k = 4096,
     .scale_cols = 128,
     .has_exact_scales = true},
    {.name = "gemm/deepseek-v4/o",
     .format = kFp8,
     .n = 4096,
     .k = 8192,
     .scale_cols = 128,
     .has_exact_scales = true},
    {.name = "gemm/deepseek-v4/shared",
     .format = kFp8,
     .n = 4096,
     .k = 4096,
     .scale_cols = 128,
     .has_exact_scales = true},
    {.name = "gemm/deepseek-v4/q_and_kv",
     .format = kFp8,
     .n = 1536,
     .k = 4096,
     .scale_cols = 128,
     .has_exact_scales = true},
    {"expert_gemm/gpt-oss-20b/gate_up", kMxfp4, 5760, 2880, 0, 32, true},
    {"expert_gemm/gpt-oss-20b/down", kMxfp4, 2880, 2880, 0, 32},
    {"expert_gemm/gpt-oss-120b/gate_up", kMxfp4, 5760, 2880, 0, 128, true},
    {"expert_gemm/gpt-oss-120b/down", kMxfp4, 2880, 2880, 0, 128},
    {"expert_gemm/glm-4.7-flash/gate_up", WeightFormat::kPlain, 3072, 2048, 0, 64, true},
    {"expert_gemm/glm-4.7-flash/down", WeightFormat::kPlain, 2048, 1536, 0, 64},
    // Its shared expert among the others, and alone.
    {"expert_gemm/glm-4.7-flash/joined_gate_up", WeightFormat::kPlain, 3072, 2048, 0, 64, true,
     true},
    {"expert_gemm/glm-4.7-flash/joined_down", WeightFormat::kPlain, 2048, 1536, 0, 64, false, true},
    {"gemm/glm-4.7-flash/shared_gate_up", WeightFormat::kPlain, 3072, 2048},
    {"gemm/glm-4.7-flash/shared_down", WeightFormat::kPlain, 2048, 1536}};

// An instance to time: all arrays but the integers keep what the bench fills them with.
struct TimedProduct {
  OpInstance op;
  int64_t bytes = 0;         // of the weights and scales of matrices that have rows
  int64_t weight_bytes = 0;  // of these, without scales
  int64_t rows = 0;          // of y
};

TimedProduct make_timed(const ScaledProduct& s, int32_t m) {
  TimedProduct timed;
  OpInstance& op = timed.op;
  const bool is_mixture = s.num_experts > 0;
  // Any bits are weights, packed or not.
  WeightMatrix w = {.n = s.n,
                    .k = s.k,
                    .dtype = DType::kBFloat16,
                    .format = s.format,
                    .layout = layout_on(Device::kCuda, s.format, DType::kBFloat16)};
  if (s.format == WeightFormat::kFp8) {
    w.scale_rows = s.scale_cols == 0 ? 1 : 128;
    w.scale_cols = s.scale_cols == 0 ? s.k : s.scale_cols;
    w.has_exact_scales = s.has_exact_scales;
  }
  if (s.format == WeightFormat::kInt4) {
    w.scale_rows = 1;
    w.scale_cols = s.scale_cols;
    w.scale_dtype = DType::kFloat16;
    w.has_zeros = true;
  }
  if (s.format == WeightFormat::kNvfp4) {
    w.scale_rows = 1;
    w.scale_cols = kNvfp4Columns;
  }
  const int32_t num_matrices = std::max(s.num_experts, 1) + (s.has_shared ? 1 : 0);
  const int64_t matrix_bytes = w.data_bytes();
  const int64_t scale_bytes = w.scales_bytes();
  const int64_t zero_bytes = w.zeros_bytes();
  const Rows batch = first_rows(m, m);
  const ExpertRows routed =
      is_mixture ? expert_rows_of(Routed::kRandom, s.num_experts, kTopK, batch, 1, s.has_shared)
                 : ExpertRows{.expert_begin = {0, m}};
  timed.rows = routed.expert_begin.back();
  int32_t hit = 0;
  for (int32_t e = 0; e < num_matrices; ++e) {
    if (routed.expert_begin[e + 1] > routed.expert_begin[e]) ++hit;
  }
  timed.weight_bytes = hit * matrix_bytes;
  timed.bytes = timed.weight_bytes + hit * (scale_bytes + zero_bytes);

  const Handle begin = op.add(int_array("expert_begin", Role::kInput, routed.expert_begin));
  const Handle num_rows = op.add(int_array<int32_t>("num_rows", Role::kInput, {m}));
  const Handle x_rows =
      s.is_gathered ? op.add(int_array("x_rows", Role::kInput, routed.source_row)) : kNoArray;
  const auto add = [&](const char* name, Role role, Element element, int64_t count) {
    return op.add({.name = name, .role = role, .cpu = element, .cuda = element, .count = count});
  };
  const int64_t x_count = s.is_gathered ? m : timed.rows;
  const Handle x = add("x", Role::kInput, Element::kBf16, x_count * s.k);
  // The bench rotates it, so that it needs no content here.
  const Handle weight = add("weight", Role::kInput, Element::kU8, num_matrices * matrix_bytes);
  const Handle scales =
      scale_bytes == 0 ? kNoArray
      : s.format == WeightFormat::kMxfp4 || s.format == WeightFormat::kInt4
          ? op.add(int_array("scales", Role::kInput,
                             std::vector<uint8_t>(static_cast<size_t>(num_matrices * scale_bytes),
                                                  uint8_t{120})))
          : add("scales", Role::kInput, Element::kF32, num_matrices * scale_bytes / 4);
  const Handle zeros =
      zero_bytes == 0
          ? kNoArray
          : op.add(int_array(
                "zeros", Role::kInput,
                std::vector<uint8_t>(static_cast<size_t>(num_matrices * zero_bytes), uint8_t{8})));
  const Handle y = add("y", Role::kOutput, Element::kBf16, timed.rows * s.n);
  op.run_cuda = [=, rows = timed.rows](CudaContext& ctx, const Addresses& at) {
    WeightMatrix matrix = w;
    matrix.data = at.raw(weight);
    matrix.scales = at.raw(scales);
    matrix.zeros = at.get<uint8_t>(zeros);
    if (!is_mixture) {
      gemm(ctx, {.num_rows = at.get<int32_t>(num_rows),
                 .max_rows = m,
                 .x = at.raw(x),
                 .x_stride = s.k,
                 .weight = matrix,
                 .bias = nullptr,
                 .y = at.raw(y),
                 .y_stride = s.n,
                 .x_dtype = DType::kBFloat16,
                 .y_dtype = DType::kBFloat16});
      return;
    }
    expert_gemm(ctx, {.expert_begin = at.get<int32_t>(begin),
                      .max_rows = static_cast<int32_t>(rows),
                      .x = at.raw(x),
                      .x_stride = s.k,
                      .x_rows = at.get<int32_t>(x_rows),
                      .num_x_rows = static_cast<int32_t>(x_count),
                      .weight = {.first = matrix,
                                 .num_experts = num_matrices,
                                 .data_stride = matrix_bytes,
                                 .scales_stride = scale_bytes},
                      .bias = nullptr,
                      .y = at.raw(y),
                      .y_stride = s.n,
                      .x_dtype = DType::kBFloat16,
                      .y_dtype = DType::kBFloat16});
  };
  return timed;
}

void bench_scaled(Bench& bench) {
  bool has_header = false;
  for (const ScaledProduct& s : kScaledProducts) {
    if (!bench.wants(s.name)) continue;
    if (!has_header) {
      std::printf(
          "\nweights with scales, and experts, cold (scales are not); below us: TB/s of the "
          "weights and\nscales that rows need to %d rows, then TFLOP/s. By expert: of rows of a "
          "pass, the best %d of\nrandom experts\n%-32s",
          kMostRowsInTbs, kTopK, "rows");
      for (const int32_t m : bench.rows_or(kGemmRows)) std::printf("%8d", m);
      std::printf("\n");
      has_header = true;
    }
    Points points;
    for (const int32_t m : bench.rows_or(kGemmRows)) {
      const TimedProduct timed = make_timed(s, m);
      const double us = bench.cold_us(timed.op, "weight", timed.weight_bytes);
      const bool is_bytes = m <= kMostRowsInTbs;
      const double flops = 2.0 * s.n * s.k * static_cast<double>(timed.rows);
      const double rate = (is_bytes ? static_cast<double>(timed.bytes) : flops) / us * 1e-6;
      points.add(bench, s.name, m, us, rate);
    }
    points.print(s.name, 32);
  }
}

}  // namespace

void bench_products(Bench& bench) {
  bench_gemms(bench, "gemm", kGemms, make_plain);
  bench_gemms(bench, "activated_gemm", kActivatedGemms, make_activated);
  bench_scaled(bench);
}

}  // namespace paceline::testing
