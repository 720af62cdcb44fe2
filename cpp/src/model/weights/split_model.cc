// SPDX-License-Identifier: Apache-2.0

// split_model: the weights of a model on the CPU, copied to the memory of several GPUs. Each gets
// an arena of its own, in which the rows of its rank follow each other, so that its kernels know
// nothing of ranks.

#include <paceline/model.h>
#include <paceline/version.h>

#include <algorithm>
#include <map>
#include <string>
#include <thread>
#include <utility>

#include "base/boundary.h"
#include "base/check.h"
#include "base/start_thread.h"
#include "device/cpu_context.h"
#include "device/device_memory.h"
#include "model/weights/model_impl.h"
#include "model/weights/rank_model.h"
#include "model/weights/split_model.h"
#include "model/weights/visit_weights.h"
#include "model/weights/weight_copy.h"
#include "model/weights/weight_layout.h"
#include "model/weights/weight_limit.h"

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

// The elements of a tensor in host memory, as the arena holds them: matrices, each of pieces that
// follow each other in the arena.
struct TensorSource {
  struct Piece {
    const std::byte* from;  // in the first matrix
    int64_t bytes;
  };
  std::vector<Piece> pieces;
  int64_t num_matrices = 1;
  int64_t stride = 0;                // bytes from one matrix to the next
  const std::byte* whole = nullptr;  // without pieces: the whole tensor; null: there is none
  std::vector<float> scales;         // of fp8; then the rest means nothing
};

// Lays out what a rank has of a model. The visitor of the rank's weights, which point to the whole
// model before and to the rank's arena afterwards. visit_weights gets the whole configuration.
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
    copy_facts(whole.weight, own.weight);
    biases_[&own.bias] = {.rows = rows, .stride = 0};
    if (!shape.is_owned) {
      lm_head_first_ = rows.empty() ? 0 : rows.front().first;
      return;
    }
    add_tensors(shape.parts, rows, own.weight,
                [&](const auto& add) { add(whole.weight, 1, 0, 0, 0); });
  }

  void experts(ExpertLinears& own, const LinearShape& shape) {
    const ExpertLinears& whole = *whole_.mixtures[next_mixture_++];
    const ExpertLinears view = std::exchange(own, ExpertLinears());
    own.inputs = view.inputs;
    own.outputs = view.outputs;
    const WeightMatrix& first = whole.weight.first;
    const Rows rows = rows_of_rank(first, view.weight.first, view.rows);
    carver_.experts(own, shape_of(shape, rows));
    copy_facts(first, own.weight.first);
    biases_[&own.bias] = {.rows = rows, .stride = first.n};
    const int32_t num_experts = whole.weight.num_experts;
    add_tensors(shape.parts, rows, own.weight.first, [&](const auto& add) {
      if (!shape.is_per_expert) {
        return add(first, num_experts, whole.weight.data_stride, whole.weight.scales_stride,
                   first.zeros_bytes());
      }
      for (int32_t e = 0; e < num_experts; ++e) add(whole.weight.of(e), 1, 0, 0, 0);
    });
  }

  void vector(const float*& own, VectorKind kind, const std::vector<WeightPart>& parts) {
    const auto bias = biases_.find(&own);
    if (bias == biases_.end()) {
      PACELINE_CHECK(parts.size() == 1, parts.front().name, " has ", parts.size(), " parts");
      return whole_copy(own, [&](const float*& to) { carver_.vector(to, kind, parts); });
    }
    const std::byte* const from = whole_.others[next_other_++];
    carver_.vector(own, kind, parts_of(parts, bias->second.rows));
    constexpr int64_t kBytes = sizeof(float);
    add_rows(parts, bias->second.rows, from, kBytes, std::max(parts.front().num_experts, 1),
             bias->second.stride * kBytes);
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

  // Copies every tensor to the arena.
  void copy(const CpuContext& ctx, const DeviceBuffer& arena) {
    const std::vector<NamedWeight> named = carver_.take_named_weights();
    PACELINE_CHECK(named.size() == sources_.size(), named.size(), " tensors have ", sources_.size(),
                   " sources");
    for (size_t i = 0; i < named.size(); ++i) copy_tensor(ctx, named[i], sources_[i], arena);
  }

 private:
  using Rows = std::vector<LinearRange>;  // of the whole matrix, in the order of the rank's
  struct Bias {
    Rows rows;
    int64_t stride;  // elements from one expert's to the next
  };

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

  // What the layout does not say, because it follows from the weights.
  static void copy_facts(const WeightMatrix& whole, WeightMatrix& own) {
    own.scale_dtype = whole.scale_dtype;
    own.has_exact_scales = whole.has_exact_scales;
  }

  // Adds a source for each part: what the rank has of rows of `row_bytes` bytes at `data`.
  void add_rows(const std::vector<WeightPart>& parts, const Rows& rows, const std::byte* data,
                int64_t row_bytes, int64_t num_matrices, int64_t stride) {
    int64_t begin = 0;
    for_parts(parts, rows, [&](const WeightPart& part, const Rows& ranges) {
      TensorSource& source = sources_.emplace_back();
      source.num_matrices = num_matrices;
      source.stride = stride;
      for (const LinearRange& range : ranges) {
        source.pieces.push_back(
            {.from = data + (begin + range.first) * row_bytes, .bytes = range.count * row_bytes});
      }
      begin += part.rows;
    });
  }

  // Adds the sources of a matrix in the order in which Carver adds its tensors.
  // for_matrices(add) calls add(matrix, number of matrices, bytes from one to the next of elements,
  // scales and zero points) for every matrix that has tensors of its own.
  template <class ForMatrices>
  void add_tensors(const std::vector<WeightPart>& parts, const Rows& rows, const WeightMatrix& own,
                   const ForMatrices& for_matrices) {
    for_matrices([&](const WeightMatrix& w, int64_t count, int64_t stride, int64_t, int64_t) {
      add_rows(parts, rows, w.data, w.row_bytes(), count, stride);
    });
    if (own.format == WeightFormat::kFp8) {
      for_matrices([&](const WeightMatrix& w, int64_t count, int64_t, int64_t, int64_t) {
        PACELINE_CHECK(count == 1, "fp8 scales of several experts in one tensor");
        int64_t begin = 0;
        for_parts(parts, rows, [&](const WeightPart& part, const Rows& ranges) {
          PACELINE_CHECK(ranges.size() <= 1, "a rank has rows of ", part.name,
                         " in several places");
          TensorSource& source = sources_.emplace_back();
          for (const LinearRange& range : ranges) {
            source.scales = fp8_scales(w, begin + range.first, range.count, own.scale_rows);
          }
          begin += part.rows;
        });
      });
    } else if (own.format != WeightFormat::kPlain) {
      for_matrices([&](const WeightMatrix& w, int64_t count, int64_t, int64_t stride, int64_t) {
        add_rows(parts, rows, w.scales, w.scales_bytes() / w.n, count, stride);
      });
    }
    if (own.has_zeros) {
      for_matrices([&](const WeightMatrix& w, int64_t count, int64_t, int64_t, int64_t stride) {
        add_rows(parts, rows, reinterpret_cast<const std::byte*>(w.zeros), w.num_scale_cols(),
                 count, stride);
      });
    }
    if (own.has_order) {
      for_matrices([&](const WeightMatrix& w, int64_t, int64_t, int64_t, int64_t) {
        sources_.emplace_back().whole = reinterpret_cast<const std::byte*>(w.order);
      });
    }
  }

  // The scales of rows [first, first + count), in tiles of `scale_rows`.
  [[nodiscard]] static std::vector<float> fp8_scales(const WeightMatrix& w, int64_t first,
                                                     int64_t count, int32_t scale_rows) {
    const auto* const all = reinterpret_cast<const float*>(w.scales);
    const int64_t width = w.num_scale_cols();
    std::vector<float> scales;
    for (int64_t row = first; row < first + count; row += scale_rows) {
      const float* const from = all + row / w.scale_rows * width;
      scales.insert(scales.end(), from, from + width);
    }
    return scales;
  }

  // A weight that every rank has whole, or reads from a place of its own in it.
  template <class T, class Carve>
  void whole_copy(const T*& own, const Carve& carve) {
    const std::byte* const from = whole_.others[next_other_++];
    const int64_t skipped = own - reinterpret_cast<const T*>(from);
    carve(own);
    own = from != nullptr && own != nullptr ? own + skipped : nullptr;
    sources_.emplace_back().whole = from;
  }

  static void copy_tensor(const CpuContext& ctx, const NamedWeight& named,
                          const TensorSource& source, const DeviceBuffer& arena) {
    DeviceMemory& memory = arena.memory();
    std::byte* const to = arena.data() + named.offset;
    if (!source.scales.empty()) {
      return memory.upload(to, source.scales.data(),
                           static_cast<int64_t>(source.scales.size() * sizeof(float)));
    }
    const int64_t item_bytes = dtype_bytes(named.dtype);
    const int64_t bytes = named.elements() * item_bytes;
    if (bytes == 0) return;
    std::vector<std::byte> joined;  // pieces in several places
    const std::byte* from = source.whole;
    int64_t stride = source.stride;
    if (source.pieces.size() == 1) from = source.pieces.front().from;
    if (source.pieces.size() > 1) {
      joined.resize(static_cast<size_t>(bytes));
      std::byte* out = joined.data();
      for (int64_t i = 0; i < source.num_matrices; ++i) {
        for (const TensorSource::Piece& piece : source.pieces) {
          out = std::copy_n(piece.from + i * source.stride, piece.bytes, out);
        }
      }
      from = joined.data();
      stride = bytes / source.num_matrices;
    }
    if (from == nullptr) return;  // an optional one that the model does not have
    if (named.dtype == DType::kInt32) return memory.upload(to, from, bytes);
    const int64_t elements = bytes / source.num_matrices / item_bytes;  // of a matrix
    const int64_t cols = named.packed               ? named.packed->row_bytes / item_bytes
                         : elements % kColumns == 0 ? kColumns
                                                    : elements;
    copy_weight(ctx,
                {.matrix = {.data = from,
                            .rows = elements / cols,
                            .cols = cols,
                            .row_stride = cols,
                            .col_stride = 1},
                 .num_matrices = source.num_matrices,
                 .matrix_stride = stride / item_bytes},
                named.dtype, named, arena);
  }

  static constexpr int64_t kColumns = 1 << 10;  // that a copy may be divided by

  const WholeWeights& whole_;
  Carver carver_;
  size_t next_linear_ = 0;
  size_t next_mixture_ = 0;
  size_t next_other_ = 0;
  int32_t lm_head_first_ = 0;
  std::map<const void*, Bias> biases_;  // by the member that points to it
  std::vector<TensorSource> sources_;   // of the named weights
};

// `view`: the rank's configuration, and weights that point to those of the whole model.
[[nodiscard]] std::shared_ptr<Model> copy_rank(const Model& whole, const Model& view, Device device,
                                               DeviceMemory& memory, const CpuContext& ctx) {
  auto model = std::make_shared<Model>();
  model->config = view.config;
  model->device = device;
  model->default_draft_tokens = whole.default_draft_tokens;
  const WholeWeights from(whole);
  const auto carve = [&](RankCarver& carver) {
    static_cast<WeightPointers&>(model->weights) = view.weights;
    visit_weights(whole.config, model->weights, carver);
  };
  RankCarver counting(from, whole.weights.dtype, device, /*base=*/nullptr);
  carve(counting);
  DeviceBuffer& arena = model->weights.arena;
  arena = DeviceBuffer(memory, counting.bytes(), "the weights of " + whole.config.name);
  RankCarver carving(from, whole.weights.dtype, device, arena.data());
  carve(carving);
  PACELINE_CHECK(carving.bytes() == counting.bytes());
  if (whole.config.ties_lm_head) {
    WeightMatrix& lm_head = model->weights.lm_head.weight;
    lm_head.data = model->weights.embed + carving.lm_head_first() * lm_head.row_bytes();
  }
  carving.copy(ctx, arena);
  memory.finish();
  return model;
}

void check_gpus(std::span<const int32_t> gpus) {
  if (gpus.empty() || gpus.size() > size_t{kMaxRanks}) {
    throw InvalidArgument(concat("gpus has ", gpus.size(), " numbers; allowed: 1 to ", kMaxRanks));
  }
  for (size_t i = 0; i < gpus.size(); ++i) {
    if (std::find(gpus.begin(), gpus.begin() + static_cast<ptrdiff_t>(i), gpus[i]) ==
        gpus.begin() + static_cast<ptrdiff_t>(i)) {
      continue;
    }
    throw InvalidArgument(
        concat("gpus has ", gpus[i], " twice; allowed: a GPU of its own for each rank"));
  }
}

}  // namespace

std::shared_ptr<const Model> split_over(const Model& whole, Device device,
                                        std::span<const RankMemory> memories, GpuShare share) {
  const auto num_ranks = static_cast<int32_t>(memories.size());
  auto model = std::make_shared<Model>();
  model->config = whole.config;
  model->device = device;
  model->default_draft_tokens = whole.default_draft_tokens;
  // For shapes; without memory.
  Carver carver(whole.weights.dtype, Device::kCpu, /*base=*/nullptr);
  model->weights.dtype = whole.weights.dtype;
  lay_out(model->config, carver, model->weights);
  if (device == Device::kCuda) check_on_gpu(model->config, model->weights);
  if (share == GpuShare::kPart) check_ranks(whole, num_ranks);
  model->share = share;
  model->ranks.resize(memories.size());
  std::vector<std::exception_ptr> failures(memories.size());
  const auto copy = [&](int32_t rank) {
    const auto i = static_cast<size_t>(rank);
    try {
      const int32_t num_threads = std::max(build_info().num_cores / num_ranks, 1);
      ThreadPool threads(num_threads);
      const CpuContext ctx = {.num_threads = num_threads, .threads = &threads};
      const auto copy_of = [&](const Model& view) {
        const auto own = copy_rank(whole, view, device, *memories[i].memory, ctx);
        own->gpu = memories[i].gpu;
        model->ranks[i] = own;
      };
      if (share == GpuShare::kPart && num_ranks > 1) {
        copy_of(*rank_model(whole, {.rank = rank, .num_ranks = num_ranks}));
      } else {
        copy_of(whole);
      }
    } catch (...) {
      failures[i] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (int32_t rank = 1; rank < num_ranks; ++rank) {
    threads.push_back(start_thread("the thread that loads a GPU", [&, rank] { copy(rank); }));
  }
  copy(0);
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure != nullptr) std::rethrow_exception(failure);
  }
  return model;
}

std::shared_ptr<const Model> split_over_gpus(const Model& whole, std::span<const int32_t> gpus,
                                             GpuShare share) {
  connect_gpus(gpus);
  std::vector<RankMemory> memories;
  for (const int32_t gpu : gpus) memories.push_back({.memory = &cuda_memory(gpu), .gpu = gpu});
  return split_over(whole, Device::kCuda, memories, share);
}

std::shared_ptr<const Model> split_model(const std::shared_ptr<const Model>& model,
                                         std::span<const int32_t> gpus, GpuShare share) {
  return at_boundary([&] {
    if (model == nullptr) throw InvalidArgument("model is null; give a model");
    if (model->device != Device::kCpu) {
      throw InvalidArgument(concat("the model ", model->config.name, " is on device ",
                                   device_name(model->device), "; allowed: a model on the CPU"));
    }
    check_gpus(gpus);
    return split_over_gpus(*model, gpus, share);
  });
}

}  // namespace paceline
