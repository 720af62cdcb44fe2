// SPDX-License-Identifier: Apache-2.0
//
// Times the CPU ops: GEMM out of memory ("cold": rotating through several weight matrices) and out
// of cache ("warm": one matrix), products by expert, attention of decode rows, and draws. Usage:
// bench_ops [num_threads [format]]; with a part of a format's name, as in "bench_ops 2 int4", only
// GEMM with the formats that have it. Each figure is the best of several repetitions.
// BENCH_SMALL_PAGES=1 keeps the weights off huge pages.

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/version.h>

#include "base/float_types.h"
#include "device/cpu_context.h"
#include "ops/moe.h"
#include "ops/ops.h"

namespace paceline {
namespace {

double best_seconds(int repetitions, int calls, const std::function<void(int)>& call) {
  double best = 1e30;
  int index = 0;
  for (int r = 0; r < repetitions; ++r) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) call(index++);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    best = std::min(best, elapsed.count() / calls);
  }
  return best;
}

// On huge pages where the system gives them.
std::shared_ptr<std::byte> map_memory(size_t bytes) {
  constexpr size_t kHuge = size_t{2} << 20;
  bytes = (bytes + kHuge - 1) / kHuge * kHuge;
  void* const memory = std::aligned_alloc(kHuge, bytes);
  if (memory == nullptr) throw std::bad_alloc();
  if (std::getenv("BENCH_SMALL_PAGES") == nullptr) madvise(memory, bytes, MADV_HUGEPAGE);
  return {static_cast<std::byte*>(memory), [](std::byte* p) { std::free(p); }};
}

struct BenchFormat {
  const char* name;
  WeightFormat format = WeightFormat::kPlain;
  int32_t scale_rows = 0;
  int32_t scale_cols = 0;  // 0: K
  bool has_exact_scales = false;
};

void bench_gemm(CpuContext& ctx, const BenchFormat& format, int32_t n, int32_t k, int num_matrices,
                int repetitions) {
  constexpr int32_t kMaxRows = 64;
  WeightMatrix matrix = plain_matrix(nullptr, n, k, DType::kBFloat16);
  matrix.format = format.format;
  matrix.scale_rows = format.scale_rows;
  matrix.scale_cols = format.scale_cols == 0 ? k : format.scale_cols;
  matrix.has_exact_scales = format.has_exact_scales;
  matrix.has_zeros = format.format == WeightFormat::kInt4;
  // The scales and zero points of int4 follow each matrix; those of other formats are shared.
  const int64_t matrix_bytes = matrix.has_zeros ? matrix.bytes() : matrix.row_bytes() * n;
  const auto arena = map_memory(static_cast<size_t>(matrix_bytes) * num_matrices);
  std::mt19937 random(1);
  if (format.format == WeightFormat::kPlain) {
    auto* const weights = reinterpret_cast<uint16_t*>(arena.get());
    for (int64_t i = 0; i < matrix_bytes / 2 * num_matrices; ++i) {
      weights[i] = static_cast<uint16_t>(0x3c00u + (random() & 0x80ffu));
    }
  } else {
    auto* const weights = reinterpret_cast<uint8_t*>(arena.get());
    for (int64_t i = 0; i < matrix_bytes * num_matrices; ++i) {
      weights[i] = static_cast<uint8_t>(random() % 0x77);
    }
  }
  for (int i = 0; i < num_matrices && matrix.has_zeros; ++i) {
    std::byte* const scales = arena.get() + i * matrix_bytes + matrix.data_bytes();
    std::fill_n(reinterpret_cast<uint16_t*>(scales), matrix.scales_bytes() / 2, 0x3c00);  // 2^-7
    auto* const zeros = reinterpret_cast<uint8_t*>(scales + matrix.scales_bytes());
    for (int64_t at = 0; at < matrix.zeros_bytes(); ++at) zeros[at] %= 16;
  }
  // Scales of every matrix: 2^-7, as float or as byte.
  const std::vector<float> float_scales(static_cast<size_t>(n) * (k / kNvfp4Columns + 1), 0x1p-7f);
  const std::vector<uint8_t> byte_scales(static_cast<size_t>(n) * (k / kMxfp4Columns), 120);
  matrix.scales = format.format == WeightFormat::kMxfp4
                      ? reinterpret_cast<const std::byte*>(byte_scales.data())
                      : reinterpret_cast<const std::byte*>(float_scales.data());
  std::vector<float> x(static_cast<size_t>(kMaxRows) * static_cast<size_t>(k), 0.25f);
  std::vector<float> y(static_cast<size_t>(kMaxRows) * static_cast<size_t>(n));
  std::printf("\ngemm %s N=%d K=%d, %d matrices cold\n", format.name, n, k, num_matrices);
  std::printf("%6s | %10s %10s %10s | %10s %10s %10s\n", "M", "cold us", "GFLOP/s", "GB/s",
              "warm us", "GFLOP/s", "GB/s");
  for (const int32_t m : {1, 2, 3, 4, 5, 6, 8, 16, 64}) {
    GemmParams p = {.num_rows = &m,
                    .max_rows = kMaxRows,
                    .x = x.data(),
                    .x_stride = k,
                    .weight = matrix,
                    .bias = nullptr,
                    .y = y.data(),
                    .y_stride = n};
    const double flops = 2.0 * m * n * k;
    const auto bytes = static_cast<double>(matrix_bytes);
    double seconds[2];
    for (int warm = 0; warm < 2; ++warm) {
      const int calls = std::max(num_matrices, static_cast<int>(0.02 * 1e11 / flops));
      seconds[warm] = best_seconds(repetitions, std::min(calls, 2000), [&](int i) {
        p.weight.data = arena.get() + (warm == 1 ? 0 : i % num_matrices * matrix_bytes);
        if (matrix.has_zeros) {
          p.weight.scales = p.weight.data + matrix.data_bytes();
          p.weight.zeros =
              reinterpret_cast<const uint8_t*>(p.weight.scales + matrix.scales_bytes());
        }
        gemm(ctx, p);
      });
    }
    std::printf("%6d | %10.1f %10.1f %10.1f | %10.1f %10.1f %10.1f\n", m, seconds[0] * 1e6,
                flops / seconds[0] / 1e9, bytes / seconds[0] / 1e9, seconds[1] * 1e6,
                flops / seconds[1] / 1e9, bytes / seconds[1] / 1e9);
  }
}

// Rows that go to random experts, or all to the same ones.
void bench_experts(CpuContext& ctx, const BenchFormat& format, int32_t num_experts, int32_t n,
                   int32_t k, int repetitions) {
  constexpr int32_t kMaxRows = 256;
  constexpr int32_t kTopK = 4;
  constexpr int kRoutings = 8;
  WeightMatrix matrix = plain_matrix(nullptr, n, k, DType::kBFloat16);
  matrix.format = format.format;
  const int64_t matrix_bytes = matrix.row_bytes() * n;
  const auto arena = map_memory(static_cast<size_t>(matrix_bytes) * num_experts);
  std::fill_n(reinterpret_cast<uint16_t*>(arena.get()), matrix_bytes / 2 * num_experts,
              uint16_t{0x3c21});
  const std::vector<uint8_t> scales(static_cast<size_t>(n) * (k / kMxfp4Columns), 120);
  matrix.data = arena.get();
  matrix.scales = reinterpret_cast<const std::byte*>(scales.data());
  std::vector<float> x(static_cast<size_t>(kMaxRows) * static_cast<size_t>(k), 0.25f);
  std::vector<float> y(static_cast<size_t>(kMaxRows * kTopK) * static_cast<size_t>(n));
  std::printf("\nexpert_gemm %s, %d of %d experts, N=%d K=%d\n%6s %10s | %10s %10s %10s %10s\n",
              format.name, kTopK, num_experts, n, k, "rows", "", "hit", "us", "GFLOP/s", "GB/s");
  for (const int32_t rows : {1, 4, 16, 64, 256}) {
    for (const bool goes_together : {false, true}) {
      std::mt19937 random(2);
      struct Routing {
        std::vector<int32_t> begin, source, place;
      };
      std::vector<Routing> routings(kRoutings);
      double num_hit = 0;
      for (Routing& r : routings) {
        std::vector<int32_t> experts(static_cast<size_t>(num_experts));
        std::iota(experts.begin(), experts.end(), 0);
        std::vector<int32_t> chosen;
        for (int32_t row = 0; row < rows; ++row) {
          if (row == 0 || !goes_together) std::shuffle(experts.begin(), experts.end(), random);
          chosen.insert(chosen.end(), experts.begin(), experts.begin() + kTopK);
        }
        r.begin.resize(static_cast<size_t>(num_experts) + 1);
        r.source.resize(chosen.size());
        r.place.resize(chosen.size());
        int64_t counters[2] = {};
        sort_expert_rows(ctx, {.num_rows = &rows,
                               .max_rows = rows,
                               .experts = chosen.data(),
                               .num_experts = num_experts,
                               .top_k = kTopK,
                               .expert_begin = r.begin.data(),
                               .source_row = r.source.data(),
                               .expert_row = r.place.data(),
                               .counters = counters});
        num_hit += static_cast<double>(counters[0]) / kRoutings;
      }
      const double seconds = best_seconds(repetitions * kRoutings, 1, [&](int i) {
        const Routing& r = routings[static_cast<size_t>(i % kRoutings)];
        expert_gemm(ctx, {.expert_begin = r.begin.data(),
                          .max_rows = rows * kTopK,
                          .x = x.data(),
                          .x_stride = k,
                          .x_rows = r.source.data(),
                          .num_x_rows = rows,
                          .weight = {.first = matrix,
                                     .num_experts = num_experts,
                                     .data_stride = matrix_bytes,
                                     .scales_stride = 0},
                          .bias = nullptr,
                          .y = y.data(),
                          .y_stride = n});
      });
      const double flops = 2.0 * rows * kTopK * n * k;
      std::printf("%6d %10s | %10.1f %10.1f %10.1f %10.1f\n", rows,
                  goes_together ? "together" : "random", num_hit, seconds * 1e6,
                  flops / seconds / 1e9,
                  num_hit * static_cast<double>(matrix_bytes) / seconds / 1e9);
    }
  }
}

// Decode rows of distinct sequences; the cache of a call stays in L2 or L3.
void bench_attention(CpuContext& ctx, int32_t qo_heads, int32_t kv_heads, int32_t head_dim,
                     DType dtype, int repetitions) {
  constexpr int32_t kBlockSize = 16;
  constexpr int32_t kMaxRows = 8;
  constexpr int32_t kMaxBlocks = 2048 / kBlockSize;
  const int64_t part = int64_t{kBlockSize} * kv_heads * head_dim * dtype_bytes(dtype);
  const auto pool = map_memory(static_cast<size_t>(2 * part * kMaxRows * kMaxBlocks));
  std::fill_n(reinterpret_cast<uint16_t*>(pool.get()), part * kMaxRows * kMaxBlocks,
              uint16_t{0x3c00});
  std::vector<int32_t> table(kMaxRows * kMaxBlocks);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
  const int32_t width = (qo_heads + 2 * kv_heads) * head_dim;
  std::vector<float> qkv(static_cast<size_t>(kMaxRows * width), 0.1f);
  std::vector<float> y(static_cast<size_t>(kMaxRows * qo_heads * head_dim));
  std::printf("\npaged_attention heads %d/%d x %d, %s\n%6s %8s | %10s %10s %10s\n", qo_heads,
              kv_heads, head_dim, std::string(dtype_name(dtype)).c_str(), "rows", "keys", "us",
              "GFLOP/s", "KV GB/s");
  for (const int32_t rows : {1, 5}) {
    for (const int32_t keys : {128, 1024}) {
      std::vector<int32_t> slots(kMaxRows);
      std::vector<int32_t> ends(kMaxRows, keys);
      for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int32_t>(i);
      const PagedAttentionParams p = {.num_rows = &rows,
                                      .max_rows = kMaxRows,
                                      .qkv = qkv.data(),
                                      .seq_slot = slots.data(),
                                      .kv_begin = nullptr,
                                      .kv_end = ends.data(),
                                      .block_table = table.data(),
                                      .block_table_stride = kMaxBlocks,
                                      .kv = {.base = pool.get(),
                                             .block_bytes = 2 * part,
                                             .k_offset = 0,
                                             .v_offset = part,
                                             .block_size = kBlockSize,
                                             .dtype = dtype},
                                      .scale = 0.1f,
                                      .soft_cap = 0.0f,
                                      .sinks = nullptr,
                                      .y = y.data(),
                                      .num_qo_heads = qo_heads,
                                      .num_kv_heads = kv_heads,
                                      .head_dim = head_dim};
      const double seconds = best_seconds(repetitions, 50, [&](int) { paged_attention(ctx, p); });
      const double flops = 4.0 * rows * keys * qo_heads * head_dim;
      const double bytes = static_cast<double>(2 * part / kBlockSize) * rows * keys;
      std::printf("%6d %8d | %10.1f %10.1f %10.1f\n", rows, keys, seconds * 1e6,
                  flops / seconds / 1e9, bytes / seconds / 1e9);
    }
  }
}

void bench_draw(CpuContext& ctx, int32_t vocab, int repetitions) {
  constexpr int32_t kMaxRows = 5;
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  std::vector<float> logits(static_cast<size_t>(kMaxRows * vocab));
  for (float& logit : logits) logit = normal(random);
  const std::vector<int32_t> rows_of = {0, 1, 2, 3, 4};
  const std::vector<uint64_t> seeds = {1, 2, 3, 4, 5};
  std::vector<int32_t> tokens(kMaxRows);
  std::printf("\ndraw, vocabulary %d\n%6s %12s | %10s\n", vocab, "rows", "temperature", "us");
  for (const int32_t rows : {1, 5}) {
    for (const float temperature : {0.0f, 1.0f}) {
      const std::vector<float> temperatures(kMaxRows, temperature);
      const double seconds = best_seconds(repetitions, 20, [&](int) {
        draw(ctx, {.num_rows = &rows,
                   .max_rows = kMaxRows,
                   .logits = logits.data(),
                   .logits_stride = vocab,
                   .vocab_limit = vocab,
                   .row_index = rows_of.data(),
                   .seq_slot = rows_of.data(),
                   .positions = rows_of.data(),
                   .seeds = seeds.data(),
                   .temperatures = temperatures.data(),
                   .tokens = tokens.data()});
      });
      std::printf("%6d %12.1f | %10.1f\n", rows, double{temperature}, seconds * 1e6);
    }
  }
}

}  // namespace
}  // namespace paceline

int main(int argc, char** argv) {
  const int num_threads = argc > 1 ? std::atoi(argv[1]) : 2;
  paceline::ThreadPool threads(num_threads);
  paceline::CpuContext ctx{.num_threads = num_threads, .threads = &threads};
  std::printf("threads %d, read bandwidth %.1f GB/s\n", ctx.num_threads,
              paceline::measure_read_bandwidth(ctx.num_threads) / 1e9);
  const std::string_view only = argc > 2 ? argv[2] : "";
  const auto is_chosen = [&](const paceline::BenchFormat& format) {
    return std::string_view(format.name).find(only) != std::string_view::npos;
  };
  const paceline::BenchFormat bf16 = {"bf16"};
  if (is_chosen(bf16)) paceline::bench_gemm(ctx, bf16, 4096, 4096, 6, 5);
  using paceline::WeightFormat;
  for (const paceline::BenchFormat& format :
       {paceline::BenchFormat{"mxfp4", WeightFormat::kMxfp4},
        {"nvfp4", WeightFormat::kNvfp4, 1, paceline::kNvfp4Columns},
        {"fp8, 128x128 powers of two", WeightFormat::kFp8, 128, 128, true},
        {"fp8, a scale a row", WeightFormat::kFp8, 1},
        {"fp8, 128x128", WeightFormat::kFp8, 128, 128},
        {"int4, groups of 32, zero points", WeightFormat::kInt4, 1, 32},
        {"int4, groups of 128, zero points", WeightFormat::kInt4, 1, 128},
        {"int4, a scale a row, zero points", WeightFormat::kInt4, 1}}) {
    if (is_chosen(format)) paceline::bench_gemm(ctx, format, 4096, 4096, 12, 5);
  }
  if (!only.empty()) return 0;
  paceline::bench_experts(ctx, bf16, 32, 2880, 2880, 3);
  paceline::bench_experts(ctx, {"mxfp4", WeightFormat::kMxfp4}, 32, 2880, 2880, 3);
  paceline::bench_gemm(ctx, bf16, 256, 256, 1, 5);
  paceline::bench_gemm(ctx, bf16, 1536, 256, 1, 5);
  paceline::bench_attention(ctx, 32, 8, 128, paceline::DType::kBFloat16, 5);
  paceline::bench_attention(ctx, 4, 2, 64, paceline::DType::kFloat32, 5);
  paceline::bench_draw(ctx, 151936, 5);
  return 0;
}
