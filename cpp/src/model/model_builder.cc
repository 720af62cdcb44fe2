// SPDX-License-Identifier: Apache-2.0

// ModelBuilder, which collects weights until a model is complete, and the accessors of Model.

#include <paceline/model.h>
#include <paceline/version.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/boundary.h"
#include "base/check.h"
#include "base/json.h"
#include "device/cpu_context.h"
#include "device/device_memory.h"
#include "model/decoder_config.h"
#include "model/dummy_weights.h"
#include "model/model_impl.h"
#include "model/weight_copy.h"
#include "model/weight_layout.h"

namespace paceline {
namespace {

constexpr size_t kMissingNamed = 8;  // in the message of finish()

[[nodiscard]] std::string shape_text(std::span<const int64_t> shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) out += concat(i == 0 ? "" : ", ", shape[i]);
  return out + "]";
}

}  // namespace

struct ModelBuilder::Impl {
  Impl(std::string_view config_json, DType weight_dtype, Device device)
      : model(std::make_shared<Model>()) {
    model->device = device;
    if (weight_dtype != DType::kFloat32 && weight_dtype != DType::kBFloat16) {
      throw InvalidArgument(
          concat("weight_dtype is ", dtype_name(weight_dtype), "; allowed: float32, bfloat16"));
    }
    model->config = parse_decoder_config(config_json);
    DecoderWeights& weights = model->weights;
    weights.dtype = weight_dtype;
    Carver counting(weight_dtype, /*base=*/nullptr);
    lay_out(model->config, counting, weights);
    weights.arena =
        DeviceBuffer(device_memory(device), counting.bytes(), "weights of " + model->config.name);
    Carver carving(weight_dtype, weights.arena.data());
    lay_out(model->config, carving, weights);
    PACELINE_CHECK(carving.bytes() == counting.bytes());
    named_weights = carving.take_named_weights();
    for (size_t i = 0; i < named_weights.size(); ++i) by_name.emplace(named_weights[i].name, i);
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
    if (!std::ranges::equal(shape, named.dims())) {
      throw InvalidArgument(concat(quoted(name), " has shape ", shape_text(shape),
                                   "; allowed: ", shape_text(named.dims())));
    }
    const bool is_integer = dtype == DType::kInt32 || dtype == DType::kInt64;
    if (is_integer != (named.dtype == DType::kInt32)) {
      throw InvalidArgument(concat(quoted(name), " is ", dtype_name(dtype), "; allowed: ",
                                   is_integer ? "float32, bfloat16, float16" : "int32, int64"));
    }
    if (dtype == DType::kFloat16 && named.dtype == DType::kBFloat16) {
      throw InvalidArgument(concat(quoted(name),
                                   " is float16 and the weight dtype bfloat16, which "
                                   "would lose 3 bits of each value; use weight dtype float32, or "
                                   "convert to bfloat16 beforehand"));
    }
    return named;
  }

  void put_tokens(const NamedWeight& named, const SourceMatrix& source, DType dtype) {
    const std::vector<int32_t> tokens =
        read_tokens(named.name, source, dtype, model->config.vocab_size);
    const DeviceBuffer& arena = model->weights.arena;
    arena.memory().upload(arena.data() + named.offset, tokens.data(), source.cols * 4);
  }

  ThreadPool threads{build_info().num_cores};
  CpuContext ctx{.num_threads = build_info().num_cores, .threads = &threads};
  std::shared_ptr<Model> model;
  std::vector<NamedWeight> named_weights;                // in the order of the arena
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
ModelBuilder::~ModelBuilder() = default;
ModelBuilder::ModelBuilder(ModelBuilder&&) noexcept = default;
ModelBuilder& ModelBuilder::operator=(ModelBuilder&&) noexcept = default;

void ModelBuilder::put(std::string_view name, DType dtype, std::span<const int64_t> shape,
                       std::span<const int64_t> strides, const void* data) {
  at_boundary([&] {
    Impl& impl = open(impl_);
    NamedWeight& named = impl.unfilled_weight(name, dtype, shape);
    if (!strides.empty() && strides.size() != shape.size()) {
      throw InvalidArgument(concat(quoted(name), " has ", strides.size(),
                                   " strides; allowed: ", shape.size(), ", or none for row-major"));
    }
    if (data == nullptr) throw InvalidArgument(concat(quoted(name), " has a null data pointer"));
    SourceMatrix source = {.data = static_cast<const std::byte*>(data),
                           .rows = named.rank == 2 ? shape[0] : 1,
                           .cols = shape.back(),
                           .row_stride = shape.back(),
                           .col_stride = 1};
    if (!strides.empty()) {
      source.row_stride = named.rank == 2 ? strides[0] : 0;
      source.col_stride = strides.back();
    }
    if (named.dtype == DType::kInt32) {
      impl.put_tokens(named, source, dtype);
    } else {
      copy_weight(impl.ctx, source, dtype, named, impl.model->weights.arena);
    }
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
    if (named.dtype == DType::kInt32) {
      std::vector<std::byte> bytes(static_cast<size_t>(named.elements() * dtype_bytes(dtype)));
      read(0, bytes);
      const SourceMatrix source = {.data = bytes.data(),
                                   .rows = 1,
                                   .cols = named.elements(),
                                   .row_stride = named.elements(),
                                   .col_stride = 1};
      impl.put_tokens(named, source, dtype);
    } else {
      copy_weight(impl.ctx, read, dtype, named, impl.model->weights.arena);
    }
    named.is_filled = true;
  });
}

std::vector<std::string> ModelBuilder::missing() const {
  return at_boundary([&] {
    std::vector<std::string> names;
    for (const NamedWeight& named : open(impl_).named_weights) {
      if (!named.is_filled && !named.is_optional) names.push_back(named.name);
    }
    std::sort(names.begin(), names.end());
    return names;
  });
}

void ModelBuilder::fill_dummy(uint64_t seed) {
  at_boundary([&] {
    Impl& impl = open(impl_);
    fill_dummy_weights(impl.ctx, seed, impl.named_weights, *impl.model);
  });
}

std::shared_ptr<const Model> ModelBuilder::finish() {
  return at_boundary([&] {
    Impl& impl = open(impl_);
    const std::vector<std::string> names = missing();
    if (!names.empty()) {
      std::string list;
      for (size_t i = 0; i < std::min(names.size(), kMissingNamed); ++i) {
        list += concat(i == 0 ? "" : ", ", names[i]);
      }
      throw InvalidArgument(concat(names.size(), " of ", impl.named_weights.size(), " weights of ",
                                   impl.model->config.name, " are missing: ", list,
                                   names.size() > kMissingNamed ? ", ..." : ""));
    }
    impl.model->weights.arena.memory().finish();
    const auto map = impl.by_name.find("draft_to_target");
    if (map != impl.by_name.end() && !impl.named_weights[map->second].is_filled) {
      impl.model->weights.head.draft_to_target = nullptr;
    }
    std::shared_ptr<const Model> model = std::move(impl.model);
    impl_.reset();
    return model;
  });
}

int64_t model_weight_bytes(const Model& model) { return model.weights.arena.bytes(); }

DType model_weight_dtype(const Model& model) { return model.weights.dtype; }

int32_t model_vocab_size(const Model& model) { return model.config.vocab_size; }

int32_t model_max_position(const Model& model) { return model.config.max_position; }

Device model_device(const Model& model) { return model.device; }

std::vector<std::byte> model_weight_arena(const Model& model) {
  return at_boundary([&] {
    const DeviceBuffer& arena = model.weights.arena;
    std::vector<std::byte> bytes(static_cast<size_t>(arena.bytes()));
    arena.memory().download(bytes.data(), arena.data(), arena.bytes());
    return bytes;
  });
}

}  // namespace paceline
