// SPDX-License-Identifier: Apache-2.0

// ModelBuilder, which collects weights until a model is complete, and updates of complete models.

#include <paceline/model.h>
#include <paceline/version.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "base/boundary.h"
#include "base/check.h"
#include "base/json.h"
#include "base/overloaded.h"
#include "device/cpu_context.h"
#include "device/device_memory.h"
#include "device/host_bytes.h"
#include "model/description/decoder_config.h"
#include "model/weights/dummy_weights.h"
#include "model/weights/model_impl.h"
#include "model/weights/rank_model.h"
#include "model/weights/rank_weights.h"
#include "model/weights/split_model.h"
#include "model/weights/visit_weights.h"
#include "model/weights/weight_copy.h"
#include "model/weights/weight_layout.h"
#include "model/weights/weight_limit.h"
#include "model/weights/weight_scales.h"

namespace paceline {
namespace {

constexpr size_t kMissingNamed = 8;  // in the message about missing weights

[[nodiscard]] std::string shape_text(std::span<const int64_t> shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) out += concat(i == 0 ? "" : ", ", shape[i]);
  return out + "]";
}

constexpr std::string_view kTokenMap = "draft_to_target";

// Whether a tensor of a matrix has its rows in groups, [groups, rows of each, columns].
[[nodiscard]] bool has_grouped_rows(const NamedWeight& named, std::span<const int64_t> shape) {
  const std::span<const int64_t> dims = named.dims();
  const bool is_matrix = named.kind == WeightKind::kNumbers || named.kind == WeightKind::kCodes ||
                         named.kind == WeightKind::kFp8Scales;
  return is_matrix && dims.size() == 2 && shape.size() == 3 && shape[0] > 0 &&
         dims[0] % shape[0] == 0 && dims[0] / shape[0] == shape[1] && dims[1] == shape[2];
}

// A tensor of any rank as matrices. The columns are its last axis; the other axes become rows and,
// where those do not follow each other at one distance, matrices. Throws InvalidArgument when that
// is not enough.
[[nodiscard]] SourceTensor source_tensor(const NamedWeight& named, std::span<const int64_t> given,
                                         std::span<const int64_t> strides, const void* data) {
  const std::span<const int64_t> shape = has_grouped_rows(named, given) ? given : named.dims();
  std::vector<int64_t> split_strides;
  if (named.dtype == DType::kUInt8 && named.kind == WeightKind::kCodes && !strides.empty() &&
      strides.size() + 1 == shape.size()) {  // has_joined_blocks
    split_strides.assign(strides.begin(), strides.end() - 1);
    split_strides.push_back(strides.back() * shape.back());
    split_strides.push_back(strides.back());
    strides = split_strides;
  }
  if (!strides.empty() && strides.size() != shape.size()) {
    throw InvalidArgument(concat(quoted(named.name), " has ", strides.size(),
                                 " strides; allowed: ", shape.size(), ", or none for row-major"));
  }
  if (data == nullptr) {
    throw InvalidArgument(concat(quoted(named.name), " has a null data pointer"));
  }
  struct Axis {
    int64_t size = 1;
    int64_t stride = 0;
  };
  std::array<Axis, std::tuple_size_v<decltype(NamedWeight::shape)>> axes;
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0; step *= shape[i]) {
    axes[i] = {shape[i], strides.empty() ? step : strides[i]};
  }
  Axis cols = axes[shape.size() - 1];
  std::array<Axis, axes.size()> outer;
  size_t num_outer = 1;
  for (const Axis& axis : std::span(axes).first(shape.size() - 1)) {
    Axis& last = outer[num_outer - 1];
    if (last.size == 1) {
      last = axis;
    } else if (axis.size > 1 && last.stride == axis.size * axis.stride &&
               named.kind != WeightKind::kTransposed) {
      last = {last.size * axis.size, axis.stride};
    } else if (axis.size > 1 || named.kind == WeightKind::kTransposed) {
      outer[num_outer++] = axis;
    }
  }
  if (num_outer > 2) {
    throw InvalidArgument(concat(quoted(named.name), " of shape ", shape_text(shape),
                                 " has strides ", shape_text(strides),
                                 ", which leave its axes too far apart; copy it to row-major "
                                 "order first"));
  }
  Axis rows = outer[num_outer - 1];
  const Axis matrices = num_outer == 2 ? outer[0] : Axis{};
  if (named.kind == WeightKind::kTransposed) std::swap(rows, cols);
  return {.matrix = {.data = static_cast<const std::byte*>(data),
                     .rows = rows.size,
                     .cols = cols.size,
                     .row_stride = rows.stride,
                     .col_stride = cols.stride},
          .num_matrices = matrices.size,
          .matrix_stride = matrices.stride};
}

// Whether a tensor of the elements of mxfp4 has the bytes of a row without an axis for blocks.
[[nodiscard]] bool has_joined_blocks(const NamedWeight& named, std::span<const int64_t> shape) {
  const std::span<const int64_t> dims = named.dims();
  if (named.kind != WeightKind::kCodes || named.dtype != DType::kUInt8) return false;
  const size_t rank = dims.size() - 1;
  return shape.size() == rank && std::ranges::equal(shape.first(rank - 1), dims.first(rank - 1)) &&
         shape.back() == dims[rank - 1] * dims[rank];
}

// Whether CheckedValues has what is written of a tensor, byte for byte.
[[nodiscard]] bool has_int4_bytes(const NamedWeight& named) {
  return named.kind == WeightKind::kInt4Scales || named.kind == WeightKind::kInt4Zeros ||
         named.kind == WeightKind::kInt4Order;
}

// The dtypes that a tensor may be stored in.
[[nodiscard]] std::span<const DType> stored_dtypes(const NamedWeight& named) {
  static constexpr std::array kNumbers = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  static constexpr std::array kIntegers = {DType::kInt32, DType::kInt64};
  static constexpr std::array kHalves = {DType::kBFloat16, DType::kFloat16};
  static constexpr std::array kScales = {DType::kFloat32, DType::kBFloat16, DType::kUInt8};
  switch (named.kind) {
    case WeightKind::kNumbers:
    case WeightKind::kTransposed:
      return kNumbers;
    case WeightKind::kIds:
    case WeightKind::kInt4Order:
      return kIntegers;
    case WeightKind::kInt4Scales:
      return kHalves;
    case WeightKind::kCodes:
    case WeightKind::kInt4Codes:
    case WeightKind::kInt4Zeros:
    case WeightKind::kMxfp4Scales:
    case WeightKind::kNvfp4Scales:
      return {&named.dtype, 1};
    case WeightKind::kFp8Scales:
      return kScales;
  }
  return {};
}

// What a tensor holds besides numbers that are copied as they are, converted and checked.
struct CheckedValues {
  std::vector<int32_t> ids;      // kIds
  std::vector<float> scales;     // kFp8Scales, as they lie in the arena
  std::vector<std::byte> bytes;  // the same, where has_int4_bytes
};

}  // namespace

struct ModelBuilder::Impl {
  static void check_dtype(DType weight_dtype) {
    if (weight_dtype == DType::kFloat32 || weight_dtype == DType::kBFloat16) return;
    throw InvalidArgument(
        concat("weight_dtype is ", dtype_name(weight_dtype), "; allowed: float32, bfloat16"));
  }

  Impl(std::string_view config_json, DType weight_dtype, Device device)
      : model(std::make_shared<Model>()) {
    model->device = device;
    check_dtype(weight_dtype);
    model->config = parse_decoder_config(config_json);
    check_weight_bytes(model->config);
    DecoderWeights& weights = model->weights;
    weights.dtype = weight_dtype;
    Carver counting(weight_dtype, device, /*base=*/nullptr);
    lay_out(model->config, counting, weights);
    if (device == Device::kCuda) check_on_gpu(model->config);
    const std::string purpose = "the weights of " + model->config.name;
    if (device == Device::kCpu) check_fits(counting.bytes(), purpose, host_bytes());
    weights.arena = DeviceBuffer(device_memory(device), counting.bytes(), purpose);
    Carver carving(weight_dtype, device, weights.arena.data());
    lay_out(model->config, carving, weights);
    PACELINE_CHECK(carving.bytes() == counting.bytes());
    named_weights = carving.take_named_weights();
    for (size_t i = 0; i < named_weights.size(); ++i) by_name.emplace(named_weights[i].name, i);
  }

  // The same for ranks that have memory of their own.
  Impl(std::string_view config_json, DType weight_dtype, Device device,
       std::span<const RankMemory> memories, GpuShare share) {
    check_dtype(weight_dtype);
    const DecoderConfig config = parse_decoder_config(config_json);
    check_weight_bytes(config);
    WholeLayout whole(config, weight_dtype);
    if (device == Device::kCuda) check_on_gpu(config);
    if (share == GpuShare::kPart) {
      check_ranks(whole.model, static_cast<int32_t>(memories.size()));
    }
    ranks = std::make_unique<RankedWeights>(whole.model, device, memories, share);
    model = ranks->make_model(whole.model, device, share);
    named_weights = std::move(whole.named_weights);
    for (size_t i = 0; i < named_weights.size(); ++i) by_name.emplace(named_weights[i].name, i);
  }

  // Fills the weights of an existing model again.
  explicit Impl(std::shared_ptr<Model> filled) : model(std::move(filled)) {
    if (!model->ranks.empty()) {
      WholeLayout whole(model->config, model->weights.dtype);
      ranks = std::make_unique<RankedWeights>(whole.model, *model);
      named_weights = std::move(whole.named_weights);
      for (size_t i = 0; i < named_weights.size(); ++i) by_name.emplace(named_weights[i].name, i);
      return;
    }
    DecoderWeights layout;  // its pointers, without a base, are of no use
    Carver carving(model->weights.dtype, model->device, /*base=*/nullptr);
    lay_out(model->config, carving, layout);
    PACELINE_CHECK(carving.bytes() == model->weights.arena.bytes());
    named_weights = carving.take_named_weights();
    for (size_t i = 0; i < named_weights.size(); ++i) by_name.emplace(named_weights[i].name, i);
  }

  [[nodiscard]] bool is_filled(std::string_view name) const {
    const auto found = by_name.find(name);
    return found != by_name.end() && named_weights[found->second].is_filled;
  }

  // The names of the weights without which the model is not complete, sorted.
  [[nodiscard]] std::vector<std::string> missing() const {
    std::vector<std::string> names;
    for (const NamedWeight& named : named_weights) {
      if (!named.is_filled && !named.is_optional) names.push_back(named.name);
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  // Throws InvalidArgument listing missing weights.
  void check_complete() const {
    const std::vector<std::string> names = missing();
    if (names.empty()) return;
    std::string list;
    for (size_t i = 0; i < std::min(names.size(), kMissingNamed); ++i) {
      list += concat(i == 0 ? "" : ", ", names[i]);
    }
    throw InvalidArgument(concat(names.size(), " of ", named_weights.size(), " weights of ",
                                 model->config.name, " are missing: ", list,
                                 names.size() > kMissingNamed ? ", ..." : ""));
  }

  // The weight that a tensor of this name, dtype and shape fills. Throws InvalidArgument when it
  // may not be put.
  [[nodiscard]] NamedWeight& unfilled_weight(std::string_view name, DType dtype,
                                             std::span<const int64_t> shape) {
    const auto found = by_name.find(name);
    if (found == by_name.end()) {
      throw InvalidArgument(concat("no weight is named ", quoted(name), " in a ",
                                   model->config.name, " of ", model->config.layers.size(),
                                   " layers; allowed: the ", named_weights.size(),
                                   " names that its config asks for (docs/model-format.md)"));
    }
    NamedWeight& named = named_weights[found->second];
    if (named.is_filled)
      throw InvalidArgument(concat(quoted(name), " is put twice; allowed: once"));
    if (!std::ranges::equal(shape, named.dims()) && !has_joined_blocks(named, shape) &&
        !has_grouped_rows(named, shape)) {
      throw InvalidArgument(concat(quoted(name), " has shape ", shape_text(shape),
                                   "; allowed: ", shape_text(named.dims())));
    }
    const std::span<const DType> allowed = stored_dtypes(named);
    if (std::ranges::find(allowed, dtype) == allowed.end()) {
      std::string list;
      for (const DType one : allowed) list += concat(list.empty() ? "" : ", ", dtype_name(one));
      throw InvalidArgument(concat(quoted(name), " is ", dtype_name(dtype), "; allowed: ", list));
    }
    if (dtype == DType::kFloat16 && named.dtype == DType::kBFloat16 &&
        named.kind != WeightKind::kInt4Scales) {
      throw InvalidArgument(concat(quoted(name),
                                   " is float16 and the weight dtype bfloat16, which "
                                   "would lose 3 bits of each value; use weight dtype float32, or "
                                   "convert to bfloat16 beforehand"));
    }
    return named;
  }

  // Checks the values of a tensor that unfilled_weight has accepted.
  [[nodiscard]] CheckedValues checked_values(NamedWeight& named, const SourceTensor& source,
                                             DType dtype, Device device) const {
    CheckedValues values;  // ids are one matrix
    const bool is_int4 = has_int4_bytes(named);
    if (!is_int4 && named.kind != WeightKind::kIds && named.kind != WeightKind::kMxfp4Scales &&
        named.kind != WeightKind::kNvfp4Scales && named.kind != WeightKind::kFp8Scales &&
        !named.needs_finite) {
      return values;
    }
    if (named.kind == WeightKind::kFp8Scales) {
      values.scales.resize(static_cast<size_t>(named.arena_elements()));
    }
    if (is_int4) {
      values.bytes.resize(static_cast<size_t>(named.elements() * dtype_bytes(named.dtype)));
      if (named.kind == WeightKind::kInt4Scales) named.scale_dtype = dtype;
    }
    for (int64_t i = 0; i < source.num_matrices; ++i) {
      std::vector<std::byte> bytes;
      SourceMatrix matrix = source.matrix;
      const int64_t first = i * matrix.rows * matrix.cols;
      matrix.data += i * source.matrix_stride * dtype_bytes(dtype);
      if (device != Device::kCpu) matrix = download_matrix(matrix, dtype, bytes);
      if (named.kind == WeightKind::kIds) {
        values.ids = read_ids(named, matrix, dtype, model->config.vocab_size);
      } else if (is_int4) {
        read_int4_bytes(named, first, matrix, dtype, values.bytes);
      } else if (named.kind == WeightKind::kMxfp4Scales) {
        check_mxfp4_scales(named, first, matrix);
      } else if (named.kind == WeightKind::kNvfp4Scales) {
        check_nvfp4_scales(named, first, matrix);
      } else if (named.needs_finite) {
        check_finite(named, first, matrix, dtype);
      } else {
        read_fp8_scales(named, first, matrix, dtype, values.scales);
      }
    }
    named.has_exact_scales =
        named.kind == WeightKind::kFp8Scales && are_exact_scales(values.scales);
    return values;
  }

  // Calls write(context, tensor, arena) for every rank.
  template <class Write>
  void for_each_rank(const NamedWeight& named, const Write& write) {
    const auto index = static_cast<size_t>(&named - named_weights.data());
    ranks->for_each_rank([&](size_t, const CpuContext& its, const std::vector<RankTensor>& tensors,
                             const DeviceBuffer& arena) { write(its, tensors[index], arena); });
  }

  void write(const NamedWeight& named, const SourceTensor& source, DType dtype, Device device,
             const CheckedValues& values) {
    if (ranks != nullptr) {
      return for_each_rank(
          named, [&](const CpuContext& its, const RankTensor& tensor, const DeviceBuffer& arena) {
            write_to_rank(its, tensor, arena, source, dtype, device, values);
          });
    }
    const DeviceBuffer& arena = model->weights.arena;
    const auto upload = [&](const auto& elements) {
      arena.memory().upload(arena.data() + named.offset, elements.data(),
                            static_cast<int64_t>(elements.size() * sizeof(elements[0])));
    };
    if (named.kind == WeightKind::kIds) {
      upload(values.ids);
    } else if (named.kind == WeightKind::kFp8Scales) {
      upload(values.scales);
    } else if (has_int4_bytes(named)) {
      copy_elements(ctx, values.bytes.data(), named, arena);
    } else if (device == Device::kCpu) {
      copy_weight(ctx, source, dtype, named, arena);
    } else {
      copy_device_weight(ctx, source, dtype, named, arena);
    }
  }

  static void write_to_rank(const CpuContext& its, const RankTensor& tensor,
                            const DeviceBuffer& arena, const SourceTensor& source, DType dtype,
                            Device device, const CheckedValues& values) {
    const NamedWeight& named = tensor.named;
    if (named.kind == WeightKind::kIds) {
      arena.memory().upload(arena.data() + named.offset, values.ids.data(),
                            static_cast<int64_t>(values.ids.size() * sizeof(int32_t)));
    } else if (named.kind == WeightKind::kFp8Scales) {
      write_scales(tensor, arena, values.scales);
    } else if (named.kind == WeightKind::kInt4Order) {
      copy_elements(its, values.bytes.data(), named, arena);
    } else if (has_int4_bytes(named)) {
      const int64_t cols = named.dims().back();
      const SourceMatrix rows = {
          .data = values.bytes.data(),
          .rows = static_cast<int64_t>(values.bytes.size()) / (cols * dtype_bytes(named.dtype)),
          .cols = cols,
          .row_stride = cols,
          .col_stride = 1};
      write_rows(its, tensor, arena, {.matrix = rows}, named.dtype, Device::kCpu);
    } else {
      write_rows(its, tensor, arena, source, dtype, device);
    }
  }

  // The same for a row-major tensor that is read in pieces. Values that are checked are read whole;
  // of others, ranks read only the rows that they have.
  void read(NamedWeight& named, DType dtype, const ReadBytes& read_bytes) {
    const DeviceBuffer& arena = model->weights.arena;
    if (named.kind == WeightKind::kIds || named.kind == WeightKind::kFp8Scales ||
        named.kind == WeightKind::kNvfp4Scales || has_int4_bytes(named) || named.needs_finite) {
      std::vector<std::byte> bytes(static_cast<size_t>(named.elements() * dtype_bytes(dtype)));
      read_bytes(0, bytes);
      const SourceTensor source = source_tensor(named, named.dims(), /*strides=*/{}, bytes.data());
      const CheckedValues values = checked_values(named, source, dtype, Device::kCpu);
      return write(named, source, dtype, Device::kCpu, values);
    }
    const auto checked_read = [&](int64_t first, std::span<std::byte> to) {
      read_bytes(first, to);
      if (named.kind == WeightKind::kMxfp4Scales) check_mxfp4_scales(named, first, to);
    };
    if (ranks == nullptr) return copy_weight(ctx, checked_read, dtype, named, arena);
    for_each_rank(named, [&](const CpuContext& its, const RankTensor& tensor,
                             const DeviceBuffer& rank_arena) {
      read_rows(its, tensor, rank_arena, checked_read, dtype);
    });
  }

  // Calls f(matrix, name of its first scales, whether all of its scales are exact) for every matrix
  // of fp8 weights but those of experts.
  template <class Function>
  void for_each_fp8_matrix(DecoderWeights& weights, const Function& f) {
    const auto visit = [&](Linear& linear, const LinearShape& shape) {
      if (linear.weight.format != WeightFormat::kFp8) return;
      const auto is_exact = [&](const WeightPart& part) {
        return named_weights[by_name.at(part.name + ".scales")].has_exact_scales;
      };
      f(linear.weight, shape.parts.front().name + ".scales",
        std::ranges::all_of(shape.parts, is_exact));
    };
    // The scales of experts count as inexact.
    const auto skip = [](const ExpertLinears&, const LinearShape&) {};
    for_each_linear(model->config, weights, Overloaded{visit, skip});
  }

  // Calls f(matrix, dtype of its scales) for every int4 matrix. Throws InvalidArgument where parts
  // or experts of a matrix have scales of two dtypes.
  template <class Function>
  void for_each_int4_matrix(DecoderWeights& weights, const Function& f) {
    const auto visit = [&](WeightMatrix& matrix, const LinearShape& shape) {
      if (matrix.format != WeightFormat::kInt4) return;
      const NamedWeight* first = nullptr;
      const auto check = [&](const std::string& name) {
        const NamedWeight& named = named_weights[by_name.at(name + ".scales")];
        if (first == nullptr) first = &named;
        if (named.scale_dtype == first->scale_dtype) return;
        throw InvalidArgument(concat(quoted(named.name), " is ", dtype_name(*named.scale_dtype),
                                     ", but ", quoted(first->name), " of the same matrix is ",
                                     dtype_name(*first->scale_dtype),
                                     "; allowed: one dtype for both"));
      };
      for (const WeightPart& part : shape.parts) {
        if (!shape.is_per_expert) check(part.name);
        for (int32_t e = 0; shape.is_per_expert && e < shape.num_experts(); ++e) {
          check(concat(part.name, ".", e));
        }
      }
      f(matrix, *first);
    };
    for_each_linear(
        model->config, weights,
        Overloaded{
            [&](Linear& one, const LinearShape& shape) { visit(one.weight, shape); },
            [&](ExpertLinears& all, const LinearShape& shape) { visit(all.weight.first, shape); }});
  }

  // The weights of the model, or those of each rank.
  [[nodiscard]] std::vector<DecoderWeights*> all_weights() const {
    if (ranks == nullptr) return {&model->weights};
    std::vector<DecoderWeights*> all;
    for (const auto& rank : ranks->models()) all.push_back(&rank->weights);
    return all;
  }

  void fill_dummy(uint64_t seed) {
    if (ranks == nullptr) {
      return fill_dummy_weights(ctx, seed, model->config, named_weights, model->weights.arena);
    }
    std::vector<NamedWeight> filled;  // those of the first rank
    ranks->for_each_rank([&](size_t rank, const CpuContext& its,
                             const std::vector<RankTensor>& tensors, const DeviceBuffer& arena) {
      std::vector<NamedWeight> named;
      std::vector<RankRows> rows;
      for (size_t i = 0; i < tensors.size(); ++i) {
        named.push_back(tensors[i].named);
        named.back().is_filled = named_weights[i].is_filled;
        rows.push_back(tensors[i].rows);
      }
      fill_dummy_weights(its, seed, model->config, named, arena, rows);
      if (rank == 0) filled = std::move(named);
    });
    for (size_t i = 0; i < named_weights.size(); ++i) {
      if (named_weights[i].is_filled) continue;
      named_weights[i].is_filled = filled[i].is_filled;
      named_weights[i].has_exact_scales = filled[i].has_exact_scales;
      named_weights[i].scale_dtype = filled[i].scale_dtype;
    }
  }

  // Allocates the memory through which packed weights pass.
  void prepare_packing() {
    const auto has_packed = [](const NamedWeight& named) { return named.packed.has_value(); };
    if (ranks == nullptr) {
      if (std::ranges::any_of(named_weights, has_packed)) {
        (void)model->weights.arena.memory().scratch();
      }
      return;
    }
    ranks->for_each_rank([&](size_t, const CpuContext&, const std::vector<RankTensor>& tensors,
                             const DeviceBuffer& arena) {
      if (std::ranges::any_of(tensors, has_packed, &RankTensor::named)) {
        (void)arena.memory().scratch();
      }
    });
  }

  // Waits for all copies.
  void finish_copies() {
    if (ranks != nullptr) return ranks->finish();
    model->weights.arena.memory().finish();
  }

  ThreadPool threads{build_info().num_cores};
  CpuContext ctx{.num_threads = build_info().num_cores, .threads = &threads};
  std::shared_ptr<Model> model;
  std::unique_ptr<RankedWeights> ranks;                  // null: the model has its weights itself
  std::vector<NamedWeight> named_weights;                // in the order of visit_weights
  std::unordered_map<std::string_view, size_t> by_name;  // views into named_weights
};

namespace {

// The content of a builder. Throws InvalidArgument when it is finished or moved from.
template <class Impl>
[[nodiscard]] Impl& open(const std::unique_ptr<Impl>& impl) {
  if (impl == nullptr) {
    throw InvalidArgument("this ModelBuilder is finished; make another for another model");
  }
  return *impl;
}

}  // namespace

ModelBuilder::ModelBuilder(std::string_view config_json, DType weight_dtype, Device device)
    : impl_(
          at_boundary([&] { return std::make_unique<Impl>(config_json, weight_dtype, device); })) {}
ModelBuilder::ModelBuilder(std::string_view config_json, DType weight_dtype,
                           std::span<const int32_t> gpus, GpuShare share)
    : impl_(at_boundary([&] {
        check_gpus(gpus);
        return std::make_unique<Impl>(config_json, weight_dtype, Device::kCuda, memories_of(gpus),
                                      share);
      })) {}
ModelBuilder::ModelBuilder(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ModelBuilder builder_over(std::string_view config_json, DType weight_dtype, Device device,
                          std::span<const RankMemory> memories, GpuShare share) {
  return ModelBuilder(
      std::make_unique<ModelBuilder::Impl>(config_json, weight_dtype, device, memories, share));
}
ModelBuilder::~ModelBuilder() = default;
ModelBuilder::ModelBuilder(ModelBuilder&&) noexcept = default;
ModelBuilder& ModelBuilder::operator=(ModelBuilder&&) noexcept = default;

void ModelBuilder::put(std::string_view name, DType dtype, std::span<const int64_t> shape,
                       std::span<const int64_t> strides, const void* data, Device source) {
  at_boundary([&] {
    Impl& impl = open(impl_);
    NamedWeight& named = impl.unfilled_weight(name, dtype, shape);
    const SourceTensor tensor = source_tensor(named, shape, strides, data);
    const CheckedValues values = impl.checked_values(named, tensor, dtype, source);
    impl.write(named, tensor, dtype, source, values);
    named.is_filled = true;
  });
}

void ModelBuilder::put(std::string_view name, DType dtype, std::span<const int64_t> shape,
                       const ReadBytes& callers_read) {
  at_boundary([&] {
    const auto read = [&](int64_t first, std::span<std::byte> to) {
      call_back([&] { callers_read(first, to); });
    };
    Impl& impl = open(impl_);
    NamedWeight& named = impl.unfilled_weight(name, dtype, shape);
    impl.read(named, dtype, read);
    named.is_filled = true;
  });
}

std::vector<std::string> ModelBuilder::missing() const {
  return at_boundary([&] { return open(impl_).missing(); });
}

void ModelBuilder::fill_dummy(uint64_t seed) {
  at_boundary([&] { open(impl_).fill_dummy(seed); });
}

std::shared_ptr<const Model> ModelBuilder::finish() {
  return at_boundary([&] {
    Impl& impl = open(impl_);
    impl.check_complete();
    for (DecoderWeights* const weights : impl.all_weights()) {
      impl.for_each_fp8_matrix(*weights, [](WeightMatrix& matrix, const std::string&,
                                            bool is_exact) { matrix.has_exact_scales = is_exact; });
      impl.for_each_int4_matrix(*weights, [](WeightMatrix& matrix, const NamedWeight& scales) {
        matrix.scale_dtype = *scales.scale_dtype;
      });
      if (!impl.is_filled(kTokenMap)) weights->head.draft_to_target = nullptr;
    }
    impl.finish_copies();
    std::shared_ptr<const Model> model = std::move(impl.model);
    impl_.reset();
    return model;
  });
}

void update_models(std::span<const ModelUpdate> updates) {
  at_boundary([&] {
    struct Write {
      ModelBuilder::Impl* impl;
      const NamedWeight* named;
      SourceTensor source;
      const NamedTensor* tensor;
      CheckedValues values;
    };
    std::vector<std::unique_ptr<ModelBuilder::Impl>> impls;
    std::vector<Write> writes;
    for (const ModelUpdate& update : updates) {
      if (update.model == nullptr) throw InvalidArgument("model is null; give a model");
      impls.push_back(
          std::make_unique<ModelBuilder::Impl>(std::const_pointer_cast<Model>(update.model)));
      ModelBuilder::Impl& impl = *impls.back();
      for (const NamedTensor& t : update.tensors) {
        NamedWeight& named = impl.unfilled_weight(t.name, t.dtype, t.shape);
        named.is_filled = true;
        const SourceTensor source = source_tensor(named, t.shape, t.strides, t.data);
        writes.push_back({.impl = &impl,
                          .named = &named,
                          .source = source,
                          .tensor = &t,
                          .values = impl.checked_values(named, source, t.dtype, t.device)});
      }
      impl.check_complete();
      DecoderWeights& loaded = *impl.all_weights().front();
      const bool has_map = loaded.head.draft_to_target != nullptr;
      if (has_map != impl.is_filled(kTokenMap)) {
        throw InvalidArgument(concat(quoted(kTokenMap), has_map ? " is missing" : " is given",
                                     ", but the model was loaded ", has_map ? "with" : "without",
                                     " it; allowed: an update of the same form"));
      }
      // Captured graphs have the products of the scales that were loaded.
      impl.for_each_fp8_matrix(
          loaded, [](const WeightMatrix& matrix, const std::string& name, bool is_exact) {
            if (matrix.has_exact_scales == is_exact) return;
            throw InvalidArgument(concat(quoted(name), is_exact ? " has" : " does not have",
                                         " only powers of two as scales, but the model was loaded ",
                                         is_exact ? "with others" : "with such",
                                         "; allowed: an update of the same form"));
          });
      impl.for_each_int4_matrix(loaded, [](WeightMatrix& matrix, const NamedWeight& scales) {
        if (matrix.scale_dtype == *scales.scale_dtype) return;
        throw InvalidArgument(concat(quoted(scales.name), " is ", dtype_name(*scales.scale_dtype),
                                     ", but the model was loaded with ",
                                     dtype_name(matrix.scale_dtype),
                                     "; allowed: an update of the same form"));
      });
    }
    // After the first write nothing fails for want of memory.
    for (const auto& impl : impls) impl->prepare_packing();
    for (const ModelUpdate& update : updates) {
      const std::scoped_lock lock(update.model->use.mutex);
      ++update.model->use.num_updates;
    }
    for (const Write& write : writes) {
      write.impl->write(*write.named, write.source, write.tensor->dtype, write.tensor->device,
                        write.values);
    }
    for (const auto& impl : impls) impl->finish_copies();
  });
}

}  // namespace paceline
