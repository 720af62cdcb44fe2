// SPDX-License-Identifier: Apache-2.0

// Takes weights in, one by one, until a model is complete. Also the small accessors of Model.

#include <paceline/model.h>
#include <paceline/version.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

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
    slots = carving.take_slots();
    for (size_t i = 0; i < slots.size(); ++i) by_name.emplace(slots[i].name, i);
  }

  // The place of a tensor that may be put now; InvalidArgument if it may not.
  [[nodiscard]] Slot& empty_slot(std::string_view name, DType dtype,
                                 std::span<const int64_t> shape) {
    const auto found = by_name.find(name);
    if (found == by_name.end()) {
      throw InvalidArgument(concat("no weight is named ", quoted(name), " in a ",
                                   model->config.name, " of ", model->config.layers.size(),
                                   " layers; allowed: the ", slots.size(),
                                   " names that its config asks for (docs/model-format.md)"));
    }
    Slot& slot = slots[found->second];
    if (slot.is_filled) throw InvalidArgument(concat(quoted(name), " is put twice; allowed: once"));
    if (!std::ranges::equal(shape, slot.dims())) {
      throw InvalidArgument(concat(quoted(name), " has shape ", shape_text(shape),
                                   "; allowed: ", shape_text(slot.dims())));
    }
    const bool is_integer = dtype == DType::kInt32 || dtype == DType::kInt64;
    if (is_integer != (slot.dtype == DType::kInt32)) {
      throw InvalidArgument(concat(quoted(name), " is ", dtype_name(dtype), "; allowed: ",
                                   is_integer ? "float32, bfloat16, float16" : "int32, int64"));
    }
    if (dtype == DType::kFloat16 && slot.dtype == DType::kBFloat16) {
      throw InvalidArgument(concat(quoted(name),
                                   " is float16 and the weight dtype bfloat16, which "
                                   "would lose 3 bits of each value; use weight dtype float32, or "
                                   "convert to bfloat16 beforehand"));
    }
    return slot;
  }

  void put_tokens(const Slot& slot, const Source& source, DType dtype) {
    const std::vector<int32_t> tokens =
        read_tokens(slot.name, source, dtype, model->config.vocab_size);
    const DeviceBuffer& arena = model->weights.arena;
    arena.memory().upload(arena.data() + slot.offset, tokens.data(), source.cols * 4);
  }

  ThreadPool threads{build_info().num_cores};
  CpuContext ctx{.num_threads = build_info().num_cores, .threads = &threads};
  std::shared_ptr<Model> model;
  std::vector<Slot> slots;                               // in the order of the arena
  std::unordered_map<std::string_view, size_t> by_name;  // views into slots
};

namespace {

// A builder that is finished or moved from holds nothing.
template <class Impl>
[[nodiscard]] Impl& open(const std::unique_ptr<Impl>& impl) {
  if (impl == nullptr) {
    throw InvalidArgument("this ModelBuilder is finished; make another for another model");
  }
  return *impl;
}

}  // namespace

ModelBuilder::ModelBuilder(std::string_view config_json, DType weight_dtype, Device device)
    : impl_(std::make_unique<Impl>(config_json, weight_dtype, device)) {}
ModelBuilder::~ModelBuilder() = default;
ModelBuilder::ModelBuilder(ModelBuilder&&) noexcept = default;
ModelBuilder& ModelBuilder::operator=(ModelBuilder&&) noexcept = default;

void ModelBuilder::put(std::string_view name, DType dtype, std::span<const int64_t> shape,
                       std::span<const int64_t> strides, const void* data) {
  Impl& impl = open(impl_);
  Slot& slot = impl.empty_slot(name, dtype, shape);
  if (!strides.empty() && strides.size() != shape.size()) {
    throw InvalidArgument(concat(quoted(name), " has ", strides.size(),
                                 " strides; allowed: ", shape.size(), ", or none for row-major"));
  }
  if (data == nullptr) throw InvalidArgument(concat(quoted(name), " has a null data pointer"));
  Source source = {.data = static_cast<const std::byte*>(data),
                   .rows = slot.rank == 2 ? shape[0] : 1,
                   .cols = shape.back(),
                   .row_stride = shape.back(),
                   .col_stride = 1};
  if (!strides.empty()) {
    source.row_stride = slot.rank == 2 ? strides[0] : 0;
    source.col_stride = strides.back();
  }
  if (slot.dtype == DType::kInt32) {
    impl.put_tokens(slot, source, dtype);
  } else {
    place(impl.ctx, source, dtype, slot, impl.model->weights.arena);
  }
  slot.is_filled = true;
}

void ModelBuilder::put(std::string_view name, DType dtype, std::span<const int64_t> shape,
                       const ReadBytes& read) {
  Impl& impl = open(impl_);
  Slot& slot = impl.empty_slot(name, dtype, shape);
  if (slot.dtype == DType::kInt32) {
    std::vector<std::byte> bytes(static_cast<size_t>(slot.elements() * dtype_bytes(dtype)));
    read(0, bytes);
    const Source source = {.data = bytes.data(),
                           .rows = 1,
                           .cols = slot.elements(),
                           .row_stride = slot.elements(),
                           .col_stride = 1};
    impl.put_tokens(slot, source, dtype);
  } else {
    place(impl.ctx, read, dtype, slot, impl.model->weights.arena);
  }
  slot.is_filled = true;
}

std::vector<std::string> ModelBuilder::missing() const {
  std::vector<std::string> names;
  for (const Slot& slot : open(impl_).slots) {
    if (!slot.is_filled && !slot.is_optional) names.push_back(slot.name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

void ModelBuilder::fill_dummy(uint64_t seed) {
  Impl& impl = open(impl_);
  fill_dummy_weights(impl.ctx, seed, impl.slots, *impl.model);
}

std::shared_ptr<const Model> ModelBuilder::finish() {
  Impl& impl = open(impl_);
  const std::vector<std::string> names = missing();
  if (!names.empty()) {
    std::string list;
    for (size_t i = 0; i < std::min(names.size(), kMissingNamed); ++i) {
      list += concat(i == 0 ? "" : ", ", names[i]);
    }
    throw InvalidArgument(concat(names.size(), " of ", impl.slots.size(), " weights of ",
                                 impl.model->config.name, " are missing: ", list,
                                 names.size() > kMissingNamed ? ", ..." : ""));
  }
  impl.model->weights.arena.memory().finish();
  const auto map = impl.by_name.find("draft_to_target");
  if (map != impl.by_name.end() && !impl.slots[map->second].is_filled) {
    impl.model->weights.head.draft_to_target = nullptr;
  }
  std::shared_ptr<const Model> model = std::move(impl.model);
  impl_.reset();
  return model;
}

int64_t model_weight_bytes(const Model& model) { return model.weights.arena.bytes(); }

DType model_weight_dtype(const Model& model) { return model.weights.dtype; }

int32_t model_vocab_size(const Model& model) { return model.config.vocab_size; }

int32_t model_max_position(const Model& model) { return model.config.max_position; }

Device model_device(const Model& model) { return model.device; }

std::vector<std::byte> model_weight_arena(const Model& model) {
  const DeviceBuffer& arena = model.weights.arena;
  std::vector<std::byte> bytes(static_cast<size_t>(arena.bytes()));
  arena.memory().download(bytes.data(), arena.data(), arena.bytes());
  return bytes;
}

}  // namespace paceline
