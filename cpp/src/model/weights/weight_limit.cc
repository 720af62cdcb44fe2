// SPDX-License-Identifier: Apache-2.0
#include "model/weights/weight_limit.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/check.h"
#include "base/json.h"
#include "model/weights/visit_weights.h"

namespace paceline {
namespace {

// Adds up what it visits.
class ByteLimit {
 public:
  explicit ByteLimit(const DecoderConfig& config) : config_(config) {}

  void linear(const Linear&, const LinearShape& shape) {
    if (shape.is_owned) add_matrices(1, shape);
  }
  void experts(const ExpertLinears&, const LinearShape& shape) {
    add_matrices(shape.num_experts(), shape);
  }
  void vector(const float*, VectorKind, const std::vector<WeightPart>& parts) {
    for (const WeightPart& part : parts) add(part.rows, std::max(part.num_experts, 1));
  }
  void table(const std::byte*, const WeightPart& part, int64_t cols) { add(part.rows, cols); }
  void floats(const float*, const WeightPart& part, int64_t cols) { add(part.rows, cols); }
  void tokens(const int32_t*, const WeightPart& part, bool) { add(part.rows, 1); }
  void experts_of_tokens(const int32_t*, const WeightPart& part, int32_t top_k, int32_t) {
    add(part.rows, top_k);
  }

 private:
  void add_matrices(int64_t count, const LinearShape& shape) {
    int64_t rows = shape.num_rows();
    int64_t cols = shape.cols;
    if (shape.format.format != WeightFormat::kPlain) {
      rows = (rows + kPackedRows - 1) / kPackedRows * kPackedRows;
      cols = (cols + kPackedColumns - 1) / kPackedColumns * kPackedColumns;
    }
    add(checked_mul(count, rows), cols);
  }
  void add(int64_t rows, int64_t cols) {
    constexpr int64_t kMaxBytes = int64_t{1} << 60;
    const int64_t bytes = checked_mul(checked_mul(rows, cols), 4);
    if (bytes > kMaxBytes - total_) {
      throw InvalidArgument(concat("decoder config: layers is a list of ", config_.layers.size(),
                                   ", hidden_size is ", config_.hidden, " and vocab_size is ",
                                   config_.vocab_size, ": the weights take more than ", kMaxBytes,
                                   " bytes; allowed: smaller sizes or fewer layers"));
    }
    total_ += bytes;
  }

  const DecoderConfig& config_;
  int64_t total_ = 0;
};

}  // namespace

void check_weight_bytes(const DecoderConfig& config) {
  DecoderWeights no_weights;
  size_weights(config, no_weights);
  ByteLimit limit(config);
  visit_weights(config, no_weights, limit);
}

void check_on_gpu(const DecoderConfig& config) {
  for (size_t layer = 0; layer < config.layers.size(); ++layer) {
    const std::string why =
        std::visit([](const auto& attention) { return attention.unsupported_on_gpu(); },
                   config.layers[layer].attention);
    if (!why.empty()) throw Unsupported(concat("layer ", layer, " of ", config.name, " has ", why));
  }
}

}  // namespace paceline
