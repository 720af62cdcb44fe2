// SPDX-License-Identifier: Apache-2.0

// Products in float32, of weights of any format, dense and by expert. For tests: a plain kernel.

#include "common/launch.cuh"
#include "common/packed_copies.cuh"
#include "gemm/expert_launch.cuh"
#include "gemm/packed_elements.cuh"

namespace paceline::cuda {
namespace {

struct FloatWeights {
  const std::byte* data;
  int64_t data_stride;  // bytes from expert to expert
  int32_t n;
  int32_t k;
  int32_t scale_cols;  // columns that share a scale
  // kInt4: as in WeightMatrix.
  const uint8_t* zeros;
  int64_t zeros_stride;
  const int32_t* order;
  bool is_float16;
};

// The element of a matrix, times its scale if that is part of the value.
template <WeightFormat format>
__device__ __forceinline__ float weight_value(const std::byte* matrix, const std::byte* scales,
                                              const uint8_t* zeros, const FloatWeights& w,
                                              const ScaleArgs& args, int32_t row, int32_t column) {
  const int64_t at = int64_t{row} * w.k + column;
  if constexpr (format == WeightFormat::kPlain) {
    return reinterpret_cast<const float*>(matrix)[at];
  } else if constexpr (format == WeightFormat::kFp8) {
    const auto bits = static_cast<uint32_t>(reinterpret_cast<const uint8_t*>(matrix)[at]);
    // The bits of the element as those of a float, which thereby has 2^-120 times its value.
    const float value =
        __uint_as_float((bits & 0x80) << 24 | (bits & 0x7f) << 20) * PackedElements<format>::kPower;
    if (args.use != ScaleUse::kValues) return value;
    return value *
           reinterpret_cast<const float*>(
               scales)[int64_t{row >> args.row_shift} * args.columns + column / w.scale_cols];
  } else if constexpr (format == WeightFormat::kInt4) {
    const auto byte = static_cast<int32_t>(reinterpret_cast<const uint8_t*>(matrix)[at / 2]);
    const int32_t code = column % 2 == 0 ? byte & 0xf : byte >> 4;
    const int64_t group = int64_t{row} * args.columns + column / w.scale_cols;
    const uint32_t bits = reinterpret_cast<const uint16_t*>(scales)[group];
    const float scale = w.is_float16 ? half_of<false>(bits) : __uint_as_float(bits << 16);
    const int32_t zero = zeros != nullptr ? zeros[group] : kInt4Zero;
    return __bfloat162float(__float2bfloat16_rn(static_cast<float>(code - zero) * scale));
  } else {
    const auto byte = static_cast<uint32_t>(reinterpret_cast<const uint8_t*>(matrix)[at / 2]);
    const uint32_t bits = column % 2 == 0 ? byte & 0xf : byte >> 4;
    const float value = __uint_as_float((bits & 8) << 28 | (bits & 7) << 22) *
                        PackedElements<WeightFormat::kMxfp4>::kPower;
    if constexpr (format == WeightFormat::kNvfp4) {
      const float scale = reinterpret_cast<const float*>(
          scales)[int64_t{row} * args.columns + column / kNvfp4Columns];
      return __bfloat162float(__float2bfloat16_rn(value * scale));
    }
    const uint32_t scale =
        reinterpret_cast<const uint8_t*>(scales)[int64_t{row} * args.columns + column / 32];
    return value * __uint_as_float(scale == 0 ? 1u << 22 : scale << 23);
  }
}

constexpr int32_t kSide = 16;

// A block computes 16 x 16 outputs; each thread walks K in ascending order with one accumulator.
template <WeightFormat format>
__global__ void float_gemm_kernel(const ExpertRows rows, const FloatWeights w,
                                  const ScaleArgs scales, const float* x, int64_t x_stride,
                                  const int32_t* x_rows, const float* bias, float* y,
                                  int64_t y_stride) {
  __shared__ float x_tile[kSide][kSide];
  __shared__ float w_tile[kSide][kSide + 1];
  if (!rows.delays_successor) let_successor_start();
  wait_for_predecessor();
  const ExpertTile tile = find_tile(rows, kSide);
  if (tile.num_rows == 0) return;
  const auto tx = static_cast<int32_t>(threadIdx.x) % kSide;
  const auto ty = static_cast<int32_t>(threadIdx.x) / kSide;
  const std::byte* const matrix = w.data + tile.expert * w.data_stride;
  const std::byte* const table = scales.scales + tile.expert * scales.expert_stride;
  const uint8_t* const zeros =
      w.zeros != nullptr ? w.zeros + tile.expert * w.zeros_stride : nullptr;
  const int32_t* const order = w.order != nullptr ? w.order + int64_t{tile.expert} * w.k : nullptr;
  const int32_t first_column = tile.column_tile * kSide;
  const int32_t column = first_column + tx;
  const int32_t row = tile.first_row + ty;
  const bool has_row = ty < tile.num_rows;
  const float* const from = x + (has_row && x_rows != nullptr ? x_rows[row] : row) * x_stride;
  const bool has_parts = scales.use == ScaleUse::kRowSums || scales.use == ScaleUse::kTileSums;
  float total = 0;
  float sum = 0;
  for (int32_t k = 0; k < w.k; k += kSide) {
    const bool is_inside = k + tx < w.k;
    const int32_t input = order != nullptr && is_inside ? order[k + tx] : k + tx;
    x_tile[ty][tx] = has_row && is_inside ? from[input] : 0.0f;
    w_tile[ty][tx] =
        first_column + ty < w.n && is_inside
            ? weight_value<format>(matrix, table, zeros, w, scales, first_column + ty, k + tx)
            : 0.0f;
    __syncthreads();
    for (int32_t i = 0; i < kSide; ++i) sum = __fmaf_rn(x_tile[ty][i], w_tile[tx][i], sum);
    __syncthreads();
    const bool ends_part = (k + kSide) % w.scale_cols == 0 || k + kSide >= w.k;
    if (has_parts && ends_part && column < w.n) {
      const float scale = reinterpret_cast<const float*>(
          table)[int64_t{column >> scales.row_shift} * scales.columns + k / w.scale_cols];
      total = __fmaf_rn(scale, sum, total);
      sum = 0;
    }
  }
  if (!has_row || column >= w.n) return;
  if (has_parts) sum = total;
  const float added = bias != nullptr ? bias[int64_t{tile.expert} * w.n + column] : 0.0f;
  y[row * y_stride + column] = sum + added;
}

template <WeightFormat format>
void launch_float_format(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call) {
  const WeightMatrix& w = p.weight.first;
  const ExpertRows rows = expert_rows(p, call, kSide);
  const int64_t blocks =
      max_row_tiles(p.expert_begin != nullptr, p.weight.num_experts, p.max_rows, kSide) *
      rows.column_tiles;
  const FloatWeights weights = {.data = w.data,
                                .data_stride = p.weight.data_stride,
                                .n = w.n,
                                .k = w.k,
                                .scale_cols = format == WeightFormat::kFp8
                                                  ? std::min(w.scale_cols, w.k)
                                              : format == WeightFormat::kInt4 ? w.scale_cols
                                                                              : w.k,
                                .zeros = w.zeros,
                                .zeros_stride = w.zeros_bytes(),
                                .order = w.order,
                                .is_float16 = w.scale_dtype == DType::kFloat16};
  launch(ctx, "gemm_float", &float_gemm_kernel<format>, dim3(static_cast<uint32_t>(blocks)),
         dim3(kSide * kSide), 0, rows, weights, scale_args(p.weight),
         static_cast<const float*>(p.x), p.x_stride, p.x_rows, p.bias, static_cast<float*>(p.y),
         p.y_stride);
}

}  // namespace

void launch_float_gemm(CudaContext& ctx, const ExpertGemmParams& p, const ProductCall& call) {
  switch (p.weight.first.format) {
    case WeightFormat::kPlain:
      return launch_float_format<WeightFormat::kPlain>(ctx, p, call);
    case WeightFormat::kFp8:
      return launch_float_format<WeightFormat::kFp8>(ctx, p, call);
    case WeightFormat::kMxfp4:
      return launch_float_format<WeightFormat::kMxfp4>(ctx, p, call);
    case WeightFormat::kInt4:
      return launch_float_format<WeightFormat::kInt4>(ctx, p, call);
    case WeightFormat::kNvfp4:
      return launch_float_format<WeightFormat::kNvfp4>(ctx, p, call);
  }
}

}  // namespace paceline::cuda
