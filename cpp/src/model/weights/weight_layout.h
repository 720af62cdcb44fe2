// SPDX-License-Identifier: Apache-2.0
#pragma once

// The layout of a decoder's weights in their arena, tensor by tensor, without their values.

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <paceline/device.h>
#include <paceline/dtype.h>

#include "device/packed_tiles.h"
#include "model/description/decoder_config.h"
#include "model/weights/visit_weights.h"
#include "model/weights/weights.h"

namespace paceline {

inline constexpr int64_t kWeightAlignment = 64;  // bytes, of every region of the arena

// The values that fill_dummy gives a weight.
enum class DummyKind : uint8_t { kNormal, kNeutralNorm, kOne, kZero, kSpreadIds, kCycledIds };

// How the elements of a tensor are stored in the arena.
enum class WeightKind : uint8_t {
  kNumbers,      // row-major, converted to `dtype`
  kIds,          // of tokens or experts
  kTransposed,   // numbers, [experts, cols, rows] in the tensor and [experts, rows, cols] here
  kCodes,        // elements of fp8, mxfp4 or nvfp4, byte for byte
  kMxfp4Scales,  // byte for byte; 255 means NaN
  kNvfp4Scales,  // float32, byte for byte
  // Numbers, [rows, cols]: the first rows of scales in the tensor come `repeats` times each, until
  // there are `arena_rows`.
  kFp8Scales,
  kInt4Codes,   // byte for byte
  kInt4Scales,  // as they are stored: float16 or bfloat16
  kInt4Zeros,   // byte for byte; 0 to 15
  kInt4Order,   // the inputs of the columns of a matrix
};

// One tensor of the canonical names, and its location in the arena.
struct NamedWeight {
  std::string name;
  std::array<int64_t, 4> shape = {};  // the first `rank`
  size_t rank = 0;
  DType dtype = DType::kFloat32;  // in the arena
  WeightKind kind = WeightKind::kNumbers;
  DummyKind dummy = DummyKind::kNormal;
  int64_t offset = 0;  // bytes from the start of the arena; of a packed tensor, of its first matrix
  // Where the rows of a packed tensor go; `matrix` is null. Absent if the tensor is not packed.
  std::optional<PackedTensor> packed = {};
  bool is_optional = false;  // the model is complete without it
  bool is_filled = false;
  int32_t num_experts = 0;          // kIds: ids are below this; 0: ids of tokens
  int64_t repeats = 1;              // kFp8Scales
  int64_t arena_rows = 0;           // kFp8Scales
  bool has_exact_scales = false;    // kFp8Scales, once filled (are_exact_scales)
  bool needs_exact_scales = false;  // kFp8Scales
  bool needs_finite = false;        // kNumbers: WeightPart::needs_finite
  // kInt4Scales: in the arena, known once they are filled.
  std::optional<DType> scale_dtype = {};

  [[nodiscard]] int64_t elements() const {
    int64_t count = 1;
    for (const int64_t size : dims()) count *= size;
    return count;
  }
  // Elements in the arena, if they are not packed.
  [[nodiscard]] int64_t arena_elements() const {
    return kind == WeightKind::kFp8Scales ? arena_rows * scale_cols() : elements();
  }
  // kFp8Scales: the scales of a row.
  [[nodiscard]] int64_t scale_cols() const { return rank == 2 ? shape[1] : 1; }
  [[nodiscard]] std::span<const int64_t> dims() const { return std::span(shape).first(rank); }
};

// Hands out aligned regions of the arena in the order in which visit_weights visits. The caller of
// lay_out runs it twice: first without a base to learn the size, then with one to set the pointers.
// Size and layout thus cannot disagree.
class Carver final {
 public:
  Carver(DType dtype, Device device, std::byte* base)
      : dtype_(dtype), device_(device), base_(base) {}

  // The rows of all parts follow each other.
  void linear(Linear& linear, const LinearShape& shape);
  void experts(ExpertLinears& experts, const LinearShape& shape);
  void vector(const float*& vector, VectorKind kind, const std::vector<WeightPart>& parts);
  void table(const std::byte*& table, const WeightPart& part, int64_t cols);
  void floats(const float*& matrix, const WeightPart& part, int64_t cols);
  void tokens(const int32_t*& tokens, const WeightPart& part, bool is_optional);
  void experts_of_tokens(const int32_t*& table, const WeightPart& part, int32_t top_k,
                         int32_t num_experts);

  [[nodiscard]] int64_t bytes() const { return bytes_; }
  [[nodiscard]] std::vector<NamedWeight> take_named_weights() { return std::move(named_weights_); }

 private:
  // Begins a region, after all others or at `begin`. Its address is null without a base.
  const std::byte* open();
  const std::byte* open_at(int64_t begin);
  // Ends the region at `bytes`, where what is in it is packed or room follows it.
  void close(bool has_rest, int64_t bytes);
  // begin: of the place, if the tensor is packed.
  void add(NamedWeight named, int64_t begin = 0);
  void add_matrix(const WeightPart& part, int64_t cols);

  // Where rows go in a region of packed matrices.
  struct Place {
    int64_t begin = 0;          // bytes from the region to the first matrix
    int64_t first_row = 0;      // in each matrix
    int64_t matrix_stride = 0;  // bytes from one matrix to the next
  };
  // Calls add_part(part, its place) for the parts of a matrix.
  template <class AddPart>
  static void for_parts(const LinearShape& shape, Place place, const AddPart& add_part);
  void add_elements(const WeightPart& part, const LinearShape& shape, const WeightMatrix& matrix,
                    const Place& place);
  void add_scales(const WeightPart& part, const WeightMatrix& matrix, const MatrixFormat& format,
                  const Place& place);
  // The scales of a part of an int4 matrix, or its zero points.
  void add_int4(const WeightPart& part, const WeightMatrix& matrix, WeightKind kind,
                const Place& place);
  // The order of the columns of an int4 matrix, or of those of num_experts matrices.
  void add_order(const std::string& name, int64_t cols, int32_t num_experts);

  DType dtype_;
  Device device_;
  std::byte* base_;
  int64_t bytes_ = 0;
  int64_t region_ = 0;  // where the last region begins
  // Where the room after the experts' matrices begins; the key is the experts' name.
  struct Room {
    int64_t data = 0;
    int64_t scales = 0;
    int64_t zeros = 0;
    int64_t order = 0;
  };
  std::map<std::string, Room> rooms_;
  std::vector<NamedWeight> named_weights_;
};

// Carves regions for all weights of the decoder and sets the pointers of `weights`.
void lay_out(const DecoderConfig& config, Carver& carver, DecoderWeights& weights);

}  // namespace paceline
