// SPDX-License-Identifier: Apache-2.0
#include "model/weights/rank_weights.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/check.h"
#include "model/weights/rank_model.h"
#include "model/weights/visit_weights.h"

namespace paceline {
namespace {

// Where the whole model has its matrices and its other weights, in the order of visit_weights.
struct WholeWeights {
  std::vector<const Linear*> linears;
  std::vector<const ExpertLinears*> mixtures;
  std::vector<const std::byte*> others;

  explicit WholeWeights(const Model& whole) { visit_weights(whole.config, whole.weights, *this); }

  void linear(const Linear& one, const LinearShape&) { linears.push_back(&one); }
  void experts(const ExpertLinears& all, const LinearShape&) { mixtures.push_back(&all); }
  void vector(const float* data, VectorKind, const std::vector<WeightPart>&) { add(data); }
  void table(const std::byte* data, const WeightPart&, int64_t) { add(data); }
  void floats(const float* data, const WeightPart&, int64_t) { add(data); }
  void tokens(const int32_t* data, const WeightPart&, bool) { add(data); }
  void experts_of_tokens(const int32_t* data, const WeightPart&, int32_t, int32_t) { add(data); }

 private:
  void add(const void* data) { others.push_back(static_cast<const std::byte*>(data)); }
};

// Lays out what a rank has of a model. The visitor of the rank's weights, which point to the whole
// model before and to the rank's arena afterwards. visit_weights gets the whole configuration. A
// tensor without rows for the rank is there all the same, so tensors are those of the whole model.
class RankCarver {
 public:
  // Without a base, only bytes() has a meaning afterwards.
  RankCarver(const WholeWeights& whole, DType dtype, Device device, std::byte* base)
      : whole_(whole), carver_(dtype, device, base) {}

  void linear(Linear& own, const LinearShape& shape) {
    const Linear& whole = *whole_.linears[next_linear_++];
    const Linear view = std::exchange(own, Linear());
    own.inputs = view.inputs;
    own.outputs = view.outputs;
    const Rows rows = rows_of_rank(whole.weight, view.weight, view.rows);
    carver_.linear(own, shape_of(shape, rows));
    own.num_groups = view.num_groups;
    biases_[&own.bias] = rows;
    if (!shape.is_owned) {
      lm_head_first_ = rows.empty() ? 0 : rows.front().first;
      return;
    }
    add_tensors(shape.parts, rows, whole.weight, own.weight, /*num_matrices=*/1);
  }

  void experts(ExpertLinears& own, const LinearShape& shape) {
    const ExpertLinears& whole = *whole_.mixtures[next_mixture_++];
    const ExpertLinears view = std::exchange(own, ExpertLinears());
    own.inputs = view.inputs;
    own.outputs = view.outputs;
    const WeightMatrix& first = whole.weight.first;
    const Rows rows = rows_of_rank(first, view.weight.first, view.rows);
    carver_.experts(own, shape_of(shape, rows));
    biases_[&own.bias] = rows;
    const int32_t num_experts = whole.weight.num_experts;
    if (!shape.is_per_expert) {
      return add_tensors(shape.parts, rows, first, own.weight.first, num_experts);
    }
    for_kinds(own.weight.first, [&](WeightKind kind) {
      for (int32_t e = 0; e < num_experts; ++e) {
        add_tensors_of(kind, shape.parts, rows, first, own.weight.first, /*num_matrices=*/1);
      }
    });
  }

  void vector(const float*& own, VectorKind kind, const std::vector<WeightPart>& parts) {
    const auto bias = biases_.find(&own);
    if (bias == biases_.end()) {
      PACELINE_CHECK(parts.size() == 1, parts.front().name, " has ", parts.size(), " parts");
      return whole_copy(own, [&](const float*& to) { carver_.vector(to, kind, parts); });
    }
    ++next_other_;
    carver_.vector(own, kind, parts_of(parts, bias->second));
    add_rows(parts, bias->second, std::max(parts.front().num_experts, 1));
  }
  void table(const std::byte*& own, const WeightPart& part, int64_t cols) {
    whole_copy(own, [&](const std::byte*& to) { carver_.table(to, part, cols); });
  }
  void floats(const float*& own, const WeightPart& part, int64_t cols) {
    whole_copy(own, [&](const float*& to) { carver_.floats(to, part, cols); });
  }
  void tokens(const int32_t*& own, const WeightPart& part, bool is_optional) {
    whole_copy(own, [&](const int32_t*& to) { carver_.tokens(to, part, is_optional); });
  }
  void experts_of_tokens(const int32_t*& own, const WeightPart& part, int32_t top_k,
                         int32_t num_experts) {
    whole_copy(
        own, [&](const int32_t*& to) { carver_.experts_of_tokens(to, part, top_k, num_experts); });
  }

  [[nodiscard]] int64_t bytes() const { return carver_.bytes(); }
  // The first row of an lm_head that lies over the embedding table.
  [[nodiscard]] int32_t lm_head_first() const { return lm_head_first_; }

  [[nodiscard]] std::vector<RankTensor> take_tensors() {
    std::vector<NamedWeight> named = carver_.take_named_weights();
    PACELINE_CHECK(named.size() == rows_.size(), named.size(), " tensors have the rows of ",
                   rows_.size());
    std::vector<RankTensor> tensors;
    tensors.reserve(named.size());
    for (size_t i = 0; i < named.size(); ++i) {
      tensors.push_back({.named = std::move(named[i]), .rows = std::move(rows_[i])});
    }
    return tensors;
  }

 private:
  using Rows = std::vector<LinearRange>;  // of the whole matrix, in the order of the rank's

  // `view` has the rank's number of rows and points to the first one, or `rows` has all of them.
  [[nodiscard]] static Rows rows_of_rank(const WeightMatrix& whole, const WeightMatrix& view,
                                         const Rows& rows) {
    const bool is_there = whole.data != nullptr;
    const auto first =
        is_there ? static_cast<int32_t>((view.data - whole.data) / whole.row_bytes()) : 0;
    if (rows.empty()) return {{.first = first, .count = view.n}};
    Rows shifted = rows;
    for (LinearRange& range : shifted) range.first += first;
    return shifted;
  }

  // Calls f(part, ranges) with the rows that the rank has of each part, which count from the part's
  // first one.
  template <class Function>
  static void for_parts(const std::vector<WeightPart>& parts, const Rows& rows, const Function& f) {
    int64_t begin = 0;
    for (const WeightPart& part : parts) {
      const int64_t end = begin + part.rows;
      Rows own;
      for (const LinearRange& range : rows) {
        const int64_t from = std::max<int64_t>(begin, range.first);
        const int64_t to = std::min<int64_t>(end, range.first + range.count);
        if (from >= to) continue;
        if (!own.empty() && own.back().first + own.back().count == from - begin) {
          own.back().count += static_cast<int32_t>(to - from);
        } else {
          own.push_back({.first = static_cast<int32_t>(from - begin),
                         .count = static_cast<int32_t>(to - from)});
        }
      }
      f(part, own);
      begin = end;
    }
  }

  // The parts of the rank's matrix.
  [[nodiscard]] static std::vector<WeightPart> parts_of(const std::vector<WeightPart>& parts,
                                                        const Rows& rows) {
    std::vector<WeightPart> all;
    for_parts(parts, rows, [&](const WeightPart& part, const Rows& ranges) {
      WeightPart& own = all.emplace_back(part);
      own.rows = 0;
      for (const LinearRange& range : ranges) own.rows += range.count;
      own.first_row = ranges.empty() ? 0 : ranges.front().first;
    });
    return all;
  }
  [[nodiscard]] static LinearShape shape_of(const LinearShape& whole, const Rows& rows) {
    LinearShape shape = whole;
    shape.parts = parts_of(whole.parts, rows);
    return shape;
  }

  // Adds the rank's rows of each part of num_matrices matrices in one tensor.
  void add_rows(const std::vector<WeightPart>& parts, const Rows& rows, int64_t num_matrices) {
    for_parts(parts, rows, [&](const WeightPart& part, const Rows& ranges) {
      rows_.push_back({.is_whole = ranges.size() == 1 && ranges.front().count == part.rows,
                       .ranges = ranges,
                       .num_matrices = num_matrices,
                       .rows_each = part.rows});
    });
  }

  // Calls f(kind) for the kinds of tensors of a matrix, in the order in which Carver adds them.
  // kNumbers and kMxfp4Scales stand for all elements and for all scales of rows.
  template <class Function>
  static void for_kinds(const WeightMatrix& own, const Function& f) {
    f(WeightKind::kNumbers);
    if (own.format == WeightFormat::kFp8) {
      f(WeightKind::kFp8Scales);
    } else if (own.format != WeightFormat::kPlain) {
      f(WeightKind::kMxfp4Scales);
    }
    if (own.has_zeros) f(WeightKind::kInt4Zeros);
    if (own.has_order) f(WeightKind::kInt4Order);
  }
  void add_tensors(const std::vector<WeightPart>& parts, const Rows& rows,
                   const WeightMatrix& whole, const WeightMatrix& own, int64_t num_matrices) {
    for_kinds(
        own, [&](WeightKind kind) { add_tensors_of(kind, parts, rows, whole, own, num_matrices); });
  }
  void add_tensors_of(WeightKind kind, const std::vector<WeightPart>& parts, const Rows& rows,
                      const WeightMatrix& whole, const WeightMatrix& own, int64_t num_matrices) {
    if (kind == WeightKind::kInt4Order) {
      rows_.emplace_back();
      return;
    }
    const size_t first = rows_.size();
    add_rows(parts, rows, num_matrices);
    if (kind != WeightKind::kFp8Scales) return;
    PACELINE_CHECK(num_matrices == 1, "fp8 scales of several experts in one tensor");
    for (size_t i = first; i < rows_.size(); ++i) {
      PACELINE_CHECK(rows_[i].ranges.size() <= 1, "a rank has rows of ", parts[i - first].name,
                     " in several places");
      rows_[i].whole_scale_rows = whole.scale_rows;
      rows_[i].scale_rows = own.scale_rows;
    }
  }

  // A weight that every rank has whole, or reads from a place of its own in it.
  template <class T, class Carve>
  void whole_copy(const T*& own, const Carve& carve) {
    const std::byte* const from = whole_.others[next_other_++];
    const int64_t skipped = own - reinterpret_cast<const T*>(from);
    carve(own);
    own = from != nullptr && own != nullptr ? own + skipped : nullptr;
    rows_.emplace_back();
  }

  const WholeWeights& whole_;
  Carver carver_;
  size_t next_linear_ = 0;
  size_t next_mixture_ = 0;
  size_t next_other_ = 0;
  int32_t lm_head_first_ = 0;
  std::map<const void*, Rows> biases_;  // by the member that points to it
  std::vector<RankRows> rows_;          // of the named weights
};

// The model of a rank without weights, and what it has of the whole one.
[[nodiscard]] std::shared_ptr<const Model> view_of(const Model& whole, GpuShare share,
                                                   const RankShare& rank) {
  if (share == GpuShare::kPart && rank.num_ranks > 1) return rank_model(whole, rank);
  auto view = std::make_shared<Model>();
  view->config = whole.config;
  static_cast<WeightPointers&>(view->weights) = whole.weights;
  return view;
}

// Lays out `model`, whose weights point to those of the whole one. Without a base, only bytes() and
// the tensors of the carver mean something afterwards.
[[nodiscard]] RankCarver carve(const Model& whole, const WholeWeights& from, const Model& view,
                               Device device, std::byte* base, DecoderWeights& weights) {
  static_cast<WeightPointers&>(weights) = view.weights;
  RankCarver carver(from, whole.weights.dtype, device, base);
  visit_weights(whole.config, weights, carver);
  return carver;
}

// A tensor that has one element for each row as matrices of one column.
[[nodiscard]] SourceTensor with_rows(const RankRows& rows, const SourceTensor& source) {
  const SourceMatrix& matrix = source.matrix;
  if (source.num_matrices * matrix.rows >= rows.num_matrices * rows.rows_each) return source;
  PACELINE_CHECK(
      source.num_matrices == 1 && matrix.rows == rows.num_matrices && matrix.cols == rows.rows_each,
      matrix.rows, " x ", matrix.cols, " elements of ", rows.rows_each, " rows");
  return {.matrix = {.data = matrix.data,
                     .rows = matrix.cols,
                     .cols = 1,
                     .row_stride = matrix.col_stride,
                     .col_stride = 1},
          .num_matrices = matrix.rows,
          .matrix_stride = matrix.row_stride};
}

// Calls f(matrix, first, count, to) for the rank's rows of a tensor: `count` rows of a matrix of
// `source` from `first` on are the elements of the rank's tensor from `to` on.
template <class Function>
void for_pieces(const RankRows& rows, const SourceTensor& source, const Function& f) {
  const SourceMatrix& matrix = source.matrix;
  // Those of mxfp4 have a row for each block of a row.
  const int64_t rows_a_row =
      source.num_matrices * matrix.rows / std::max<int64_t>(rows.num_matrices * rows.rows_each, 1);
  int64_t to = 0;
  for (int64_t i = 0; i < rows.num_matrices; ++i) {
    for (const LinearRange& range : rows.ranges) {
      int64_t row = (i * rows.rows_each + range.first) * rows_a_row;
      const int64_t end = row + range.count * rows_a_row;
      while (row < end) {
        const int64_t first = row % matrix.rows;
        const int64_t count = std::min(matrix.rows - first, end - row);
        f(row / matrix.rows, first, count, to);
        to += count * matrix.cols;
        row += count;
      }
    }
  }
}

constexpr std::uintptr_t kNowhere = size_t{1} << 20;  // an address that is aligned for everything

}  // namespace

void write_rows(const CpuContext& ctx, const RankTensor& tensor, const DeviceBuffer& arena,
                const SourceTensor& source, DType from, Device device) {
  const NamedWeight& named = tensor.named;
  if (tensor.rows.is_whole && device == Device::kCpu) {
    return copy_weight(ctx, source, from, named, arena);
  }
  RankRows rows = tensor.rows;
  if (rows.ranges.empty() && rows.is_whole) {  // of one matrix
    rows.rows_each = source.num_matrices * source.matrix.rows;
    rows.ranges = {{.first = 0, .count = static_cast<int32_t>(rows.rows_each)}};
  }
  const SourceTensor all = with_rows(rows, source);
  for_pieces(rows, all, [&](int64_t i, int64_t first, int64_t count, int64_t to) {
    SourceMatrix piece = all.matrix;
    piece.data += (i * all.matrix_stride + first * piece.row_stride) * dtype_bytes(from);
    piece.rows = count;
    std::vector<std::byte> bytes;
    if (device != Device::kCpu) piece = download_matrix(piece, from, bytes);
    copy_rows(ctx, piece, from, named, arena, to);
  });
}

void read_rows(const CpuContext& ctx, const RankTensor& tensor, const DeviceBuffer& arena,
               const ModelBuilder::ReadBytes& read, DType from) {
  const NamedWeight& named = tensor.named;
  const RankRows& rows = tensor.rows;
  if (rows.is_whole) return copy_weight(ctx, read, from, named, arena);
  const int64_t num_rows = rows.num_rows();
  if (num_rows == 0) return;
  // The tensor is lines of equal length, of which the rank has the same pieces each: lines are
  // matrices, and columns of rows where these are transposed.
  const int64_t line_rows = rows.num_matrices * num_rows;
  const int64_t row_elements =
      named.kind == WeightKind::kTransposed ? 1 : named.elements() / line_rows;
  const int64_t row_bytes = row_elements * dtype_bytes(from);
  const int64_t line_bytes = rows.rows_each * row_bytes;
  const int64_t own_bytes = num_rows * row_bytes;  // of a line
  const auto read_own = [&](int64_t first, std::span<std::byte> to) {
    while (!to.empty()) {
      int64_t at = first % own_bytes;
      int64_t begin = first / own_bytes * line_bytes;
      int64_t bytes = 0;
      for (const LinearRange& range : rows.ranges) {
        bytes = range.count * row_bytes - at;
        if (bytes > 0) {
          begin += range.first * row_bytes + at;
          break;
        }
        at -= range.count * row_bytes;
      }
      bytes = std::min(bytes, static_cast<int64_t>(to.size()));
      read(begin, to.first(static_cast<size_t>(bytes)));
      to = to.subspan(static_cast<size_t>(bytes));
      first += bytes;
    }
  };
  copy_weight(ctx, read_own, from, named, arena);
}

void write_scales(const RankTensor& tensor, const DeviceBuffer& arena,
                  std::span<const float> scales) {
  const RankRows& rows = tensor.rows;
  const auto width = static_cast<size_t>(tensor.named.scale_cols());
  std::vector<float> own;
  for (const LinearRange& range : rows.ranges) {
    for (int32_t row = range.first; row < range.first + range.count; row += rows.scale_rows) {
      const std::span<const float> from =
          scales.subspan(static_cast<size_t>(row / rows.whole_scale_rows) * width, width);
      own.insert(own.end(), from.begin(), from.end());
    }
  }
  if (own.empty()) return;
  arena.memory().upload(arena.data() + tensor.named.offset, own.data(),
                        static_cast<int64_t>(own.size() * sizeof(float)));
}

WholeLayout::WholeLayout(const DecoderConfig& config, DType dtype) {
  model.config = config;
  model.weights.dtype = dtype;
  Carver carver(dtype, Device::kCpu, reinterpret_cast<std::byte*>(kNowhere));
  lay_out(model.config, carver, model.weights);
  named_weights = carver.take_named_weights();
}

RankedWeights::RankedWeights(const Model& whole, Device device,
                             std::span<const RankMemory> memories, GpuShare share)
    : threads_(static_cast<int32_t>(memories.size())),
      models_(memories.size()),
      tensors_(memories.size()) {
  const auto num_ranks = static_cast<int32_t>(memories.size());
  const WholeWeights from(whole);
  threads_.run([&](size_t rank, const CpuContext&) {
    const RankShare its = {.rank = static_cast<int32_t>(rank), .num_ranks = num_ranks};
    const std::shared_ptr<const Model> view = view_of(whole, share, its);
    auto model = std::make_shared<Model>();
    model->config = view->config;
    model->device = device;
    model->gpu = memories[rank].gpu;
    model->default_draft_tokens = whole.default_draft_tokens;
    DecoderWeights& weights = model->weights;
    const int64_t bytes = carve(whole, from, *view, device, /*base=*/nullptr, weights).bytes();
    weights.arena =
        DeviceBuffer(*memories[rank].memory, bytes, "the weights of " + whole.config.name);
    RankCarver carver = carve(whole, from, *view, device, weights.arena.data(), weights);
    PACELINE_CHECK(carver.bytes() == bytes);
    if (whole.config.ties_lm_head) {
      WeightMatrix& lm_head = weights.lm_head.weight;
      lm_head.data = weights.embed + carver.lm_head_first() * lm_head.row_bytes();
    }
    tensors_[rank] = carver.take_tensors();
    models_[rank] = std::move(model);
  });
}

RankedWeights::RankedWeights(const Model& whole, const Model& filled)
    : threads_(static_cast<int32_t>(filled.ranks.size())), tensors_(filled.ranks.size()) {
  for (const auto& rank : filled.ranks) models_.push_back(std::const_pointer_cast<Model>(rank));
  const auto num_ranks = static_cast<int32_t>(models_.size());
  const WholeWeights from(whole);
  threads_.run([&](size_t rank, const CpuContext&) {
    const RankShare its = {.rank = static_cast<int32_t>(rank), .num_ranks = num_ranks};
    const std::shared_ptr<const Model> view = view_of(whole, filled.share, its);
    DecoderWeights layout;  // its pointers, without a base, are of no use
    RankCarver carver = carve(whole, from, *view, filled.device, /*base=*/nullptr, layout);
    PACELINE_CHECK(carver.bytes() == models_[rank]->weights.arena.bytes());
    tensors_[rank] = carver.take_tensors();
  });
}

std::shared_ptr<Model> RankedWeights::make_model(const Model& whole, Device device,
                                                 GpuShare share) const {
  auto model = std::make_shared<Model>();
  model->config = whole.config;
  model->device = device;
  model->default_draft_tokens = whole.default_draft_tokens;
  model->share = share;
  Carver carver(whole.weights.dtype, Device::kCpu, /*base=*/nullptr);  // for shapes
  model->weights.dtype = whole.weights.dtype;
  lay_out(model->config, carver, model->weights);
  model->ranks.assign(models_.begin(), models_.end());
  return model;
}

}  // namespace paceline
