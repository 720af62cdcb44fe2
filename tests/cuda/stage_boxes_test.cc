// SPDX-License-Identifier: Apache-2.0
//
// The boxes of gemm/stage_boxes.h: what a copy engine that follows them brings to the stages of a
// ring, element by element, at every edge of the matrix.

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "gemm/stage_boxes.h"

namespace paceline::cuda {
namespace {

// A matrix whose elements are all different and not zero, which is what arrives beyond it. Gaps
// between rows are an element of their own.
class Matrix {
 public:
  Matrix(int32_t rows, int32_t k, int64_t stride)
      : rows_(rows),
        k_(k),
        stride_(stride),
        data_(static_cast<size_t>((rows - 1) * stride + k), kGap) {
    int32_t next = 1;
    for (int32_t row = 0; row < rows; ++row) {
      for (int32_t column = 0; column < k; ++column) data_[index(row, column)] = next++;
    }
  }

  [[nodiscard]] int32_t arriving(int32_t row, int32_t column) const {
    return row < rows_ && column < k_ ? data_[index(row, column)] : 0;
  }
  // Elements behind the first one; beyond the matrix nothing may be read.
  [[nodiscard]] int32_t read(int64_t element) const {
    return data_.at(static_cast<size_t>(element));
  }

 private:
  static constexpr int32_t kGap = -1;

  [[nodiscard]] size_t index(int32_t row, int32_t column) const {
    return static_cast<size_t>(row * stride_ + column);
  }

  int32_t rows_;
  int32_t k_;
  int64_t stride_;
  std::vector<int32_t> data_;
};

// What a tensor map must be for the copy engine (cuTensorMapEncodeTiled).
template <size_t kRank>
void expect_valid(const StageBoxes<kRank>& boxes) {
  for (const uint32_t elements : boxes.box) {
    EXPECT_GE(elements, 1u);
    EXPECT_LE(elements, 256u);
  }
  for (const uint64_t elements : boxes.extent) EXPECT_GE(elements, 1u);
  for (const uint64_t bytes : boxes.pitch) {
    EXPECT_EQ(bytes % 16, 0u);
    EXPECT_LT(bytes, uint64_t{1} << 40);
  }
}

// Copies the box at `first` to `to`, densely and with the innermost dimension first; what lies
// beyond an extent arrives as zeros. Returns where the copy ends.
template <int64_t kElementBytes = 2, class From, size_t kRank>
int32_t* copy_box(const StageBoxes<kRank>& boxes, const From& from,
                  const std::array<int32_t, kRank>& first, int32_t* to) {
  std::array<uint32_t, kRank> at = {};
  for (;;) {
    bool is_inside = true;
    int64_t byte = 0;
    for (size_t d = 0; d < kRank; ++d) {
      const int64_t place = first[d] + int64_t{at[d]};
      is_inside = is_inside && place < static_cast<int64_t>(boxes.extent[d]);
      byte += place * (d == 0 ? kElementBytes : static_cast<int64_t>(boxes.pitch[d - 1]));
    }
    *to++ = is_inside ? from.read(byte / kElementBytes) : 0;
    size_t d = 0;
    while (d < kRank && ++at[d] == boxes.box[d]) at[d++] = 0;
    if (d == kRank) return to;
  }
}

// Fills the stages of all of K as StageCopies::request does. `first`: of a copy at a place.
template <size_t kRank, class First>
std::vector<int32_t> filled(const StageBoxes<kRank>& boxes, const Matrix& from, int32_t num_stages,
                            int32_t stage_steps, int32_t step_rows, const First& first) {
  constexpr int32_t kUntouched = -2;
  const auto copy_steps = static_cast<int32_t>(boxes.box[kRank - 1]);
  const size_t step_elements = static_cast<size_t>(step_rows) * 64;
  std::vector<int32_t> ring(static_cast<size_t>(num_stages * stage_steps) * step_elements,
                            kUntouched);
  for (int32_t stage = 0; stage < num_stages; ++stage) {
    for (int32_t step = 0; step < stage_steps; step += copy_steps) {
      const int32_t of_k = stage * stage_steps + step;
      int32_t* const to = ring.data() + static_cast<size_t>(of_k) * step_elements;
      int32_t* const end = copy_box(boxes, from, first(step_place(of_k, copy_steps)), to);
      // The bytes of a copy are those of its steps, also where it lies beyond the matrix.
      EXPECT_EQ(end - to, static_cast<ptrdiff_t>(step_elements) * copy_steps);
    }
  }
  return ring;
}

int32_t num_stages_of(int32_t k, int32_t stage_steps) {
  const int32_t columns = stage_steps * kStepColumns;
  return (k + columns - 1) / columns;
}

// One step, whole and not; stages that K fills, and those of which it leaves a part.
constexpr int32_t kColumns[] = {8, 56, 64, 72, 128, 136, 192, 200, 256, 320, 328, 640};
constexpr int32_t kStageSteps[] = {1, 2, 4};
// Rows of a matrix, and of a box.
constexpr std::pair<int32_t, int32_t> kRows[] = {{1, 8},   {8, 8},   {9, 16},  {40, 16},
                                                 {97, 24}, {64, 56}, {130, 64}};

TEST(StageBoxes, OneCopyBringsAStageOfWholeSteps) {
  for (const int32_t steps : kStageSteps) {
    EXPECT_EQ(copied_steps(64, steps), steps);
    EXPECT_EQ(copied_steps(4096, steps), steps);
    EXPECT_EQ(copied_steps(192, steps), steps);
    EXPECT_EQ(copied_steps(72, steps), 1);
    EXPECT_EQ(copied_steps(8, steps), 1);
  }
}

TEST(StageBoxes, RowsArriveStepByStepAndZerosBeyond) {
  for (const int32_t k : kColumns) {
    for (const int32_t steps : kStageSteps) {
      for (const auto& [rows, box_rows] : kRows) {
        for (const int32_t padding : {0, 8}) {
          SCOPED_TRACE(::testing::Message() << "k " << k << ", steps " << steps << ", rows " << rows
                                            << " by " << box_rows << ", padding " << padding);
          const Matrix matrix(rows, k, k + padding);
          const auto boxes = row_boxes(rows, k, k + padding, box_rows, copied_steps(k, steps));
          expect_valid(boxes);
          EXPECT_EQ(boxes.box[0], 64u);  // rows of 128 bytes, for the swizzle
          const int32_t num_stages = num_stages_of(k, steps);
          for (int32_t first_row = 0; first_row < rows; first_row += box_rows) {
            const auto ring = filled(boxes, matrix, num_stages, steps, box_rows, [&](StepPlace at) {
              return std::array<int32_t, 3>{at.column, first_row, at.step};
            });
            std::vector<int32_t> expected;
            for (int32_t step = 0; step < num_stages * steps; ++step) {
              for (int32_t row = 0; row < box_rows; ++row) {
                for (int32_t column = 0; column < 64; ++column) {
                  expected.push_back(matrix.arriving(first_row + row, step * 64 + column));
                }
              }
            }
            ASSERT_EQ(ring, expected) << "first row " << first_row;
          }
        }
      }
    }
  }
}

TEST(StageBoxes, PairsArriveAsHalvesOfEachStep) {
  for (const int32_t k : kColumns) {
    for (const int32_t steps : kStageSteps) {
      for (const auto& [rows, box_rows] : kRows) {
        SCOPED_TRACE(::testing::Message() << "k " << k << ", steps " << steps << ", rows " << rows
                                          << " by " << box_rows);
        const Matrix both(2 * rows, k, k);
        const auto boxes = pair_boxes(rows, k, box_rows, copied_steps(k, steps));
        expect_valid(boxes);
        EXPECT_EQ(boxes.box[0], 64u);
        const int32_t num_stages = num_stages_of(k, steps);
        for (int32_t first_row = 0; first_row < rows; first_row += box_rows) {
          const auto ring = filled(boxes, both, num_stages, steps, 2 * box_rows, [&](StepPlace at) {
            return std::array<int32_t, 4>{at.column, first_row, 0, at.step};
          });
          std::vector<int32_t> expected;
          for (int32_t step = 0; step < num_stages * steps; ++step) {
            for (const int32_t first_of_matrix : {0, rows}) {
              for (int32_t row = first_row; row < first_row + box_rows; ++row) {
                for (int32_t column = 0; column < 64; ++column) {
                  // Rows beyond the gates are not the first ups.
                  expected.push_back(
                      row < rows ? both.arriving(first_of_matrix + row, step * 64 + column) : 0);
                }
              }
            }
          }
          ASSERT_EQ(ring, expected) << "first row " << first_row;
        }
      }
    }
  }
}

// Packed matrices whose words are all different and not zero.
class PackedWords {
 public:
  explicit PackedWords(int64_t bytes) : data_(static_cast<size_t>(bytes / kPackedWordBytes)) {
    std::iota(data_.begin(), data_.end(), 1);
  }
  // Beyond the matrices nothing may be read.
  [[nodiscard]] int32_t read(int64_t word) const { return data_.at(static_cast<size_t>(word)); }

 private:
  std::vector<int32_t> data_;
};

// A stage has two tiles of 64 columns of each row tile; where the tiles of K are odd, the last one
// has zeros. So have row tiles behind the last one of a matrix, also where the next matrix begins
// there, or within this one.
TEST(StageBoxes, PackedWeightsArriveRowTileByRowTile) {
  for (const int32_t tile_bytes : {512, 1024}) {
    for (const int32_t tile_columns : {1, 2, 3, 45}) {
      for (const int32_t row_tiles : {1, 4, 5, 8, 11}) {
        // Row tiles from one matrix to the next: they overlap, follow each other, or have a gap.
        for (const int32_t shift : {1, row_tiles, row_tiles + 1}) {
          for (const int32_t num_experts : {1, 3}) {
            for (const int32_t box_row_tiles : {4, 8}) {
              SCOPED_TRACE(::testing::Message()
                           << "tiles of " << tile_bytes << " bytes, " << tile_columns << " by "
                           << row_tiles << ", " << num_experts << " experts by " << shift
                           << ", boxes of " << box_row_tiles);
              const int64_t row_bytes = int64_t{tile_columns} * tile_bytes;
              const int64_t stride = shift * row_bytes;
              const int32_t box_bytes = 2 * tile_bytes;
              const PackedWords words((num_experts - 1) * stride + row_tiles * row_bytes);
              // A matrix alone may have any stride.
              const auto boxes =
                  packed_boxes(row_tiles, row_bytes, num_experts, num_experts > 1 ? stride : 0,
                               box_row_tiles, box_bytes);
              expect_valid(boxes);
              const int64_t box_words = box_bytes / kPackedWordBytes;
              const int64_t row_words = row_bytes / kPackedWordBytes;
              for (int32_t expert = 0; expert < num_experts; ++expert) {
                for (int32_t first = 0; first < row_tiles; first += box_row_tiles) {
                  for (int64_t word = 0; word < row_words; word += box_words) {
                    std::vector<int32_t> copied(static_cast<size_t>(box_row_tiles * box_words));
                    copy_box<kPackedWordBytes>(
                        boxes, words,
                        std::array<int32_t, 3>{static_cast<int32_t>(word), first, expert},
                        copied.data());
                    std::vector<int32_t> expected;
                    for (int32_t tile = first; tile < first + box_row_tiles; ++tile) {
                      for (int64_t i = word; i < word + box_words; ++i) {
                        const int64_t at =
                            (expert * stride + tile * row_bytes) / kPackedWordBytes + i;
                        expected.push_back(tile < row_tiles && i < row_words ? words.read(at) : 0);
                      }
                    }
                    ASSERT_EQ(copied, expected) << "expert " << expert << ", row tile " << first;
                  }
                }
              }
            }
          }
        }
      }
    }
  }
}

// Strides of the largest matrices: gate and up of 65,536 rows each by 32,768 columns.
TEST(StageBoxes, PitchesOfLargeMatrices) {
  const auto boxes = pair_boxes(65536, 32768, 32, copied_steps(32768, 2));
  expect_valid(boxes);
  EXPECT_EQ(boxes.pitch, (std::array<uint64_t, 3>{65536, uint64_t{1} << 32, 128}));
  EXPECT_EQ(boxes.extent, (std::array<uint64_t, 4>{64, 65536, 2, 512}));
  EXPECT_EQ(boxes.box, (std::array<uint32_t, 4>{64, 32, 2, 2}));
}

}  // namespace
}  // namespace paceline::cuda
