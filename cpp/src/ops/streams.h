// SPDX-License-Identifier: Apache-2.0
#pragma once

// The ops of a model with several residual streams, under the rules of ops.h. Streams are float32,
// [rows, num_streams, hidden]. Around a branch (attention or MLP) they run as
//
//   mix_streams -> read_streams -> the branch -> write_streams
//
// and join_streams is write_streams of a branch and the first two of the next one.
//
// With S streams, the mix of a row is S * (2 + S) factors: `pre` [S] of what the branch reads,
// `post` [S] of its output, and a matrix C [S, S], whose element [i][j] says how much of stream i
// the new stream j keeps. At the end of a model the mix is `pre` alone.

#include <cstdint>
#include <optional>

#include <paceline/dtype.h>

#include "ops/ops.h"

namespace paceline {

inline constexpr int32_t kMaxStreams = 8;
inline constexpr int32_t kMaxSinkhornIterations = 100;

// The factors of a row's mix; of its end, if it has `pre` alone.
[[nodiscard]] PACELINE_HOST_DEVICE constexpr int32_t mix_width(int32_t num_streams, bool is_end) {
  return is_end ? num_streams : num_streams * (2 + num_streams);
}

// y[s] = x for every stream s; with `adds`, y[s] += x.
struct SpreadStreamsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* x;  // [max_rows, hidden]
  float* y;        // [max_rows, num_streams, hidden]
  int32_t num_streams;
  int32_t hidden;
  bool adds = false;
};
void spread_streams(CpuContext&, const SpreadStreamsParams&);
void spread_streams(CudaContext&, const SpreadStreamsParams&);

// The mix of each row. With f the row of x as a whole and
//   m = (weight f) * rsqrt(mean(f^2) + norm_eps)   [S * (2 + S)]
// it is
//   pre  = sigmoid(m[0, S) * scale[0] + base[0, S)) + eps
//   post = 2 * sigmoid(m[S, 2S) * scale[1] + base[S, 2S))
//   C    = softmax of each row of (m * scale[2] + base)[2S, ...) as [S, S], + eps
// where C is then divided by its column sums + eps, and sinkhorn_iterations - 1 times by its row
// sums + eps and its column sums + eps. At the end of a model only the first line exists. All of
// it is float32.
struct MixStreamsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* x;       // [max_rows, num_streams, hidden]
  const float* weight;  // [mix_width, num_streams * hidden]
  const float* base;    // [mix_width]
  const float* scale;   // [3]; at the end [1]
  float* mix;           // [max_rows, mix_width]
  int32_t num_streams;  // at most kMaxStreams
  int32_t hidden;
  bool is_end;
  int32_t sinkhorn_iterations;  // at least 1; unused at the end
  float norm_eps;
  float eps;
};
void mix_streams(CpuContext&, const MixStreamsParams&);
void mix_streams(CudaContext&, const MixStreamsParams&);

// y = rms_norm(sum over the streams s of pre[s] * x[s]), the sum by fused multiply-adds in the
// order of the streams.
struct ReadStreamsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* x;    // [max_rows, num_streams, hidden]
  const float* mix;  // [max_rows, mix_stride], pre first
  int32_t mix_stride;
  const float* weight;  // [hidden] of the norm
  float eps;            // of the norm
  void* y;              // [max_rows, hidden] y_dtype
  int32_t num_streams;
  int32_t hidden;
  DType y_dtype = DType::kFloat32;
};
void read_streams(CpuContext&, const ReadStreamsParams&);
void read_streams(CudaContext&, const ReadStreamsParams&);

// y = the sum that read_streams norms, with its bits.
struct SumStreamsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* x;    // [max_rows, num_streams, hidden]
  const float* mix;  // [max_rows, mix_stride], pre first
  int32_t mix_stride;
  float* y;  // [max_rows, hidden]
  int32_t num_streams;
  int32_t hidden;
};
void sum_streams(CpuContext&, const SumStreamsParams&);
void sum_streams(CudaContext&, const SumStreamsParams&);

// y[j] = post[j] * x + sum over the streams i of C[i][j] * y[i], in place: the product first, then
// fused multiply-adds in the order of i.
struct WriteStreamsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const void* x;     // [max_rows, hidden] x_dtype, output of the branch
  const float* mix;  // [max_rows, mix_width]
  float* y;          // [max_rows, num_streams, hidden]
  int32_t num_streams;
  int32_t hidden;
  DType x_dtype = DType::kFloat32;
};
void write_streams(CpuContext&, const WriteStreamsParams&);
void write_streams(CudaContext&, const WriteStreamsParams&);

// write_streams, unless there is no branch yet, then mix_streams and read_streams, all of the same
// rows and streams; the mix that is read is the one that has just been made. It replaces the mix of
// the branch that joins.
struct JoinStreamsParams {
  std::optional<WriteStreamsParams> write;
  MixStreamsParams mix;
  ReadStreamsParams read;
};
// Throws InternalError where the parts do not fit each other.
void check_join(const JoinStreamsParams& p);
void join_streams(CpuContext&, const JoinStreamsParams&);
void join_streams(CudaContext&, const JoinStreamsParams&);

// y[i][s] = rms_norm(x[row_index[i]][s]) for every stream s, for a draft head that multiplies each
// stream by the same matrix: *num_stream_rows = *num_rows * num_streams says for how many rows.
struct NormStreamsParams {
  const int32_t* num_rows;  // [1] rows of y
  int32_t max_rows;
  const int32_t* row_index;  // [max_rows] row of x; null: y[i] = norm(x[i])
  const void* x;             // [*, num_streams, hidden] x_dtype
  const float* weight;       // [hidden]
  float eps;
  void* y;  // [max_rows, num_streams, hidden] y_dtype; must not overlap x
  int32_t num_streams;
  int32_t hidden;
  int32_t* num_stream_rows;  // [1] at most max_rows * num_streams
  DType x_dtype = DType::kFloat32;
  DType y_dtype = DType::kFloat32;
};
void norm_streams(CpuContext&, const NormStreamsParams&);
void norm_streams(CudaContext&, const NormStreamsParams&);

// y = (x[0] + x[1] + ...) / num_streams, the sum in the order of the streams.
struct MeanStreamsParams {
  const int32_t* num_rows;  // [1]
  int32_t max_rows;
  const float* x;  // [max_rows, num_streams, hidden]
  void* y;         // [max_rows, hidden] y_dtype, rows y_stride apart
  int64_t y_stride;
  int32_t num_streams;
  int32_t hidden;
  DType y_dtype = DType::kFloat32;
};
void mean_streams(CpuContext&, const MeanStreamsParams&);
void mean_streams(CudaContext&, const MeanStreamsParams&);

}  // namespace paceline
