// SPDX-License-Identifier: Apache-2.0

// Lays the weights of a decoder out in one arena, and copies or draws each into its place. Also the
// small accessors of Model.

#include <paceline/model.h>
#include <paceline/version.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/check.h"
#include "base/float_types.h"
#include "base/json.h"
#include "base/philox.h"
#include "device/cpu_context.h"
#include "device/device_memory.h"
#include "model/decoder_config.h"
#include "model/model_impl.h"
#include "model/weights.h"

namespace paceline {
namespace {

constexpr int64_t kAlignment = 64;
constexpr size_t kMissingNamed = 8;             // in the message of finish()
constexpr int64_t kParallelElements = 1 << 16;  // below, waking threads costs more than the copy

// What fill_dummy gives a weight.
enum class Dummy : uint8_t { kNormal, kNeutralNorm, kOne, kZero, kSpreadTokens };

// Where one named tensor lies in the arena.
struct Slot {
  std::string name;
  std::array<int64_t, 2> shape = {};  // of a vector: the first only
  size_t rank = 0;
  DType dtype = DType::kFloat32;
  Dummy dummy = Dummy::kNormal;
  int64_t offset = 0;
  bool is_optional = false;  // of a model that is complete without it
  bool is_filled = false;

  [[nodiscard]] int64_t elements() const { return rank == 2 ? shape[0] * shape[1] : shape[0]; }
  [[nodiscard]] std::span<const int64_t> dims() const { return std::span(shape).first(rank); }
};

// One tensor of a region: `rows` rows of a matrix, or elements of a vector.
struct Part {
  std::string name;
  int64_t rows;
};

// Hands out aligned regions of the arena in order. Run over the model twice by lay_out's caller,
// first without a base to learn the size and then to set the pointers, so that size and layout
// cannot disagree.
class Carver final {
 public:
  Carver(DType dtype, std::byte* base) : dtype_(dtype), base_(base) {}

  // The rows of all parts, one after the other.
  const std::byte* matrix(const std::vector<Part>& parts, int64_t cols) {
    const int64_t begin = open();
    for (const Part& part : parts) {
      add({.name = part.name, .shape = {part.rows, cols}, .rank = 2, .dtype = dtype_});
    }
    return base_ == nullptr ? nullptr : base_ + begin;
  }
  const float* vector(const std::vector<Part>& parts, Dummy dummy) {
    const int64_t begin = open();
    for (const Part& part : parts) {
      add({.name = part.name, .shape = {part.rows, 0}, .rank = 1, .dummy = dummy});
    }
    return base_ == nullptr ? nullptr : reinterpret_cast<const float*>(base_ + begin);
  }

  const int32_t* tokens(const std::string& name, int64_t count, bool is_optional) {
    const int64_t begin = open();
    add({.name = name,
         .shape = {count, 0},
         .rank = 1,
         .dtype = DType::kInt32,
         .dummy = Dummy::kSpreadTokens,
         .is_optional = is_optional});
    return base_ == nullptr ? nullptr : reinterpret_cast<const int32_t*>(base_ + begin);
  }

  [[nodiscard]] int64_t bytes() const { return bytes_; }
  [[nodiscard]] std::vector<Slot> take_slots() { return std::move(slots_); }

 private:
  int64_t open() { return bytes_ = (bytes_ + kAlignment - 1) / kAlignment * kAlignment; }
  void add(Slot slot) {
    slot.offset = bytes_;
    // No sum overflows: parse_decoder_config bounds the bytes of a whole model.
    bytes_ += checked_mul(slot.elements(), dtype_bytes(slot.dtype));
    slots_.push_back(std::move(slot));
  }

  DType dtype_;
  std::byte* base_;
  int64_t bytes_ = 0;
  std::vector<Slot> slots_;
};

void lay_out_layer(const DecoderConfig& config, size_t index, Carver& carver,
                   LayerWeights& weights) {
  const LayerConfig& layer = config.layers[index];
  const std::string name = concat("layers.", index, ".");
  const AttentionConfig& attention = layer.attention;
  const int64_t hidden = config.hidden;
  const int64_t head_dim = attention.head_dim;
  const int64_t q_size = attention.num_qo_heads * head_dim;
  const int64_t kv_size = attention.num_kv_heads * head_dim;
  const int64_t intermediate = layer.mlp.intermediate;
  const auto norm = [&](const char* which, int64_t size) {
    return carver.vector({{name + which, size}}, Dummy::kNeutralNorm);
  };

  const bool has_attn_norm = index > 0 || !config.drafter || config.drafter->has_attn_norm;
  if (has_attn_norm) weights.attn_norm = norm("attn_norm.weight", hidden);
  const KvInputs inputs = kv_inputs(attention);
  const auto qkv_parts = [&](const char* which) {
    std::vector<Part> parts = {{name + "attn.q" + which, q_size}};
    if (inputs != KvInputs::kNone) parts.push_back({name + "attn.k" + which, kv_size});
    if (inputs == KvInputs::kKeysAndValues) parts.push_back({name + "attn.v" + which, kv_size});
    return parts;
  };
  weights.qkv = carver.matrix(qkv_parts(".weight"), config.qkv_inputs(index));
  if (attention.has_qkv_bias) weights.qkv_bias = carver.vector(qkv_parts(".bias"), Dummy::kZero);
  if (attention.has_qk_norm) {
    weights.q_norm = norm("attn.q_norm.weight", head_dim);
    if (inputs != KvInputs::kNone) weights.k_norm = norm("attn.k_norm.weight", head_dim);
  }
  weights.o = carver.matrix({{name + "attn.o.weight", hidden}}, q_size);
  if (attention.has_o_bias) {
    weights.o_bias = carver.vector({{name + "attn.o.bias", hidden}}, Dummy::kZero);
  }
  if (config.has_post_norms) weights.attn_post_norm = norm("attn_post_norm.weight", hidden);

  weights.mlp_norm = norm("mlp_norm.weight", hidden);
  weights.gate_up = carver.matrix(
      {{name + "mlp.gate.weight", intermediate}, {name + "mlp.up.weight", intermediate}}, hidden);
  weights.down = carver.matrix({{name + "mlp.down.weight", hidden}}, intermediate);
  if (layer.mlp.has_bias) {
    weights.gate_up_bias = carver.vector(
        {{name + "mlp.gate.bias", intermediate}, {name + "mlp.up.bias", intermediate}},
        Dummy::kZero);
    weights.down_bias = carver.vector({{name + "mlp.down.bias", hidden}}, Dummy::kZero);
  }
  if (config.has_post_norms) weights.mlp_post_norm = norm("mlp_post_norm.weight", hidden);

  if (const int64_t size = config.per_layer_inputs.size; size > 0) {
    weights.per_layer_gate = carver.matrix({{name + "per_layer.gate.weight", size}}, hidden);
    weights.per_layer_proj = carver.matrix({{name + "per_layer.proj.weight", hidden}}, size);
    weights.per_layer_norm = norm("per_layer.norm.weight", hidden);
  }
  if (config.has_layer_scale) weights.scale = carver.vector({{name + "scale", 1}}, Dummy::kOne);
}

void lay_out_head(const DecoderConfig& config, Carver& carver, DraftHeadWeights& weights) {
  const DrafterConfig& drafter = *config.drafter;
  const auto norm = [&](const std::string& name, int64_t size) {
    return carver.vector({{name, size}}, Dummy::kNeutralNorm);
  };
  const int64_t fc_width = drafter.fc_width();
  weights.fc = carver.matrix({{"fc.weight", config.hidden}}, fc_width);
  if (drafter.has_fc_bias) {
    weights.fc_bias = carver.vector({{"fc.bias", config.hidden}}, Dummy::kZero);
  }
  if (drafter.norm_before_fc) weights.fc_input_norm = norm("fc_input_norm.weight", fc_width);
  weights.fc_norms.clear();
  for (size_t i = 0; drafter.has_fc_norm && i < drafter.aux_layers.size(); ++i) {
    weights.fc_norms.push_back(norm(concat("fc_norm.", i, ".weight"), drafter.target_hidden));
  }
  if (drafter.kind == DrafterKind::kEagle3) {
    weights.hidden_norm = norm("layers.0.hidden_norm.weight", config.hidden);
  }
  if (drafter.kind == DrafterKind::kGemma4Mtp) {
    weights.feedback = carver.matrix({{"feedback.weight", drafter.target_hidden}}, config.hidden);
  }
  if (const CentroidsConfig& centroids = drafter.centroids; centroids.count > 0) {
    weights.centroids = carver.matrix({{"centroids.weight", centroids.count}}, config.hidden);
    weights.token_ordering =
        carver.tokens("token_ordering", drafter.draft_vocab_size, /*is_optional=*/false);
  } else if (drafter.owns_lm_head) {
    // A head over the whole vocabulary has its rows in the order of the tokens, unless it says
    // otherwise.
    weights.draft_to_target =
        carver.tokens("draft_to_target", drafter.draft_vocab_size,
                      /*is_optional=*/drafter.draft_vocab_size == config.vocab_size);
  }
}

void lay_out(const DecoderConfig& config, Carver& carver, DecoderWeights& weights) {
  const DrafterConfig* drafter = config.drafter ? &*config.drafter : nullptr;
  if (drafter == nullptr || drafter->owns_embedding) {
    weights.embed = carver.matrix({{"embed.weight", config.vocab_size}}, config.hidden);
  }
  if (config.ties_lm_head) {
    weights.lm_head = weights.embed;
  } else if (drafter == nullptr || drafter->owns_lm_head) {
    weights.lm_head = carver.matrix({{"lm_head.weight", config.lm_head_rows()}}, config.hidden);
  }
  if (drafter == nullptr || drafter->has_final_norm) {
    weights.final_norm = carver.vector({{"final_norm.weight", config.hidden}}, Dummy::kNeutralNorm);
  }
  if (const PerLayerInputsConfig& inputs = config.per_layer_inputs; inputs.size > 0) {
    const int64_t width = inputs.size * static_cast<int64_t>(config.layers.size());
    weights.per_layer_embed = carver.matrix({{"per_layer.embed.weight", inputs.vocab_size}}, width);
    weights.per_layer_proj = carver.matrix({{"per_layer.proj.weight", width}}, config.hidden);
    weights.per_layer_norm =
        carver.vector({{"per_layer.norm.weight", inputs.size}}, Dummy::kNeutralNorm);
  }
  weights.layers.resize(config.layers.size());
  for (size_t i = 0; i < config.layers.size(); ++i) {
    lay_out_layer(config, i, carver, weights.layers[i]);
  }
  if (drafter != nullptr) lay_out_head(config, carver, weights.head);
}

[[nodiscard]] std::string shape_text(std::span<const int64_t> shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) out += concat(i == 0 ? "" : ", ", shape[i]);
  return out + "]";
}

// --- Copying ---------------------------------------------------------------------------------

// Branch-free, unlike fp16_to_float, so that it vectorises; the same values.
[[nodiscard]] inline uint32_t fp16_to_float_bits(uint16_t half) {
  constexpr uint32_t kRebias = 112u << 23;  // exponent bias 127 instead of 15
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t normal = (magnitude << 13) + kRebias;
  // 0.5 + mantissa * 2^-24, exactly, less 0.5: never computes with a float32 subnormal, which the
  // host application may have told the processor to flush to zero.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(0x3f000000u + magnitude) - 0.5f);
  uint32_t bits = magnitude < 0x0400u ? subnormal : normal;
  bits = magnitude >= 0x7c00u ? normal + kRebias : bits;  // infinity, NaN
  return bits | (static_cast<uint32_t>(half & 0x8000u) << 16);
}

// A matrix as its owner has it; a vector is one row. Strides in elements. `data` may lie at any
// address, as in a mapped file, so it is only ever read by memcpy.
struct Source {
  const std::byte* data;
  int64_t rows;
  int64_t cols;
  int64_t row_stride;
  int64_t col_stride;
};

// One row, converted in chunks: loops of a fixed length over local arrays vectorise at -O2, and the
// memcpys around them accept any alignment.
template <class In, class Out, class Convert>
void convert_row(const Source& source, int64_t row, std::byte* out, Convert convert) {
  constexpr int64_t kChunk = 512;
  constexpr auto kInBytes = static_cast<int64_t>(sizeof(In));
  constexpr auto kOutBytes = static_cast<int64_t>(sizeof(Out));
  alignas(64) std::array<In, kChunk> from = {};
  alignas(64) std::array<Out, kChunk> to;
  const std::byte* in = source.data + row * source.row_stride * kInBytes;
  for (int64_t begin = 0; begin < source.cols; begin += kChunk) {
    const int64_t count = std::min(kChunk, source.cols - begin);
    if (source.col_stride == 1) {
      std::memcpy(from.data(), in + begin * kInBytes, static_cast<size_t>(count * kInBytes));
    } else {
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(&from[i], in + (begin + i) * source.col_stride * kInBytes, sizeof(In));
      }
    }
    for (int64_t i = 0; i < kChunk; ++i) to[i] = convert(from[i]);
    std::memcpy(out + begin * kOutBytes, to.data(), static_cast<size_t>(count * kOutBytes));
  }
}

// Calls body(row) for every row, on several threads when there is enough to do.
template <class Body>
void for_rows(const CpuContext& ctx, int64_t rows, int64_t row_elements, const Body& body) {
  if (rows * row_elements < kParallelElements) {
    for (int64_t row = 0; row < rows; ++row) body(row);
    return;
  }
  ctx.for_ranges(rows, /*pieces_per_thread=*/4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

template <class In, class Out, class Convert>
void convert(const CpuContext& ctx, const Source& source, std::byte* out, Convert convert_one) {
  const int64_t row_bytes = source.cols * static_cast<int64_t>(sizeof(Out));
  for_rows(ctx, source.rows, source.cols, [&](int64_t row) {
    convert_row<In, Out>(source, row, out + row * row_bytes, convert_one);
  });
}

template <class Value>
void copy(const CpuContext& ctx, const Source& source, std::byte* out) {
  if (source.col_stride != 1) {
    convert<Value, Value>(ctx, source, out, [](Value value) { return value; });
    return;
  }
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Value));
  for_rows(ctx, source.rows, source.cols, [&](int64_t row) {
    std::memcpy(out + row * source.cols * kBytes, source.data + row * source.row_stride * kBytes,
                static_cast<size_t>(source.cols * kBytes));
  });
}

// The pairs that put() lets through; float16 to bfloat16 is not one of them.
void convert(const CpuContext& ctx, const Source& source, DType from, std::byte* out, DType to) {
  if (to == DType::kBFloat16) {
    PACELINE_CHECK(from != DType::kFloat16);
    if (from == DType::kBFloat16) return copy<uint16_t>(ctx, source, out);
    return convert<uint32_t, uint16_t>(
        ctx, source, out, [](uint32_t bits) { return float_to_bf16(std::bit_cast<float>(bits)); });
  }
  PACELINE_CHECK(to == DType::kFloat32);
  switch (from) {
    case DType::kFloat32:
      return copy<uint32_t>(ctx, source, out);
    case DType::kBFloat16:
      return convert<uint16_t, uint32_t>(
          ctx, source, out, [](uint16_t bits) { return static_cast<uint32_t>(bits) << 16; });
    case DType::kFloat16:  // a lambda, because a call through a pointer would not vectorise
      return convert<uint16_t, uint32_t>(ctx, source, out,
                                         [](uint16_t bits) { return fp16_to_float_bits(bits); });
    case DType::kInt32:
    case DType::kInt64:
      PACELINE_CHECK(false, "integers are no weights");
  }
}

// Token ids of either width, each a token of the vocabulary.
[[nodiscard]] std::vector<int32_t> read_tokens(std::string_view name, const Source& source,
                                               DType dtype, int32_t vocab_size) {
  std::vector<int32_t> tokens;
  tokens.reserve(static_cast<size_t>(source.cols));
  std::vector<int64_t> place_of(static_cast<size_t>(vocab_size), -1);
  for (int64_t i = 0; i < source.cols; ++i) {
    const std::byte* from = source.data + i * source.col_stride * dtype_bytes(dtype);
    int64_t token = 0;
    if (dtype == DType::kInt64) {
      std::memcpy(&token, from, sizeof(token));
    } else {
      int32_t narrow = 0;
      std::memcpy(&narrow, from, sizeof(narrow));
      token = narrow;
    }
    if (token < 0 || token >= vocab_size) {
      throw InvalidArgument(concat(quoted(name), "[", i, "] is ", token, "; allowed: 0 to ",
                                   vocab_size - 1, " (tokens of the target, not offsets)"));
    }
    // Two rows with one token would share their noise, and their law would not be that of a draw.
    int64_t& place = place_of[static_cast<size_t>(token)];
    if (place >= 0) {
      throw InvalidArgument(concat(quoted(name), "[", place, "] and [", i, "] are both ", token,
                                   "; allowed: each token once"));
    }
    place = i;
    tokens.push_back(static_cast<int32_t>(token));
  }
  return tokens;
}

// Converts a tensor into its place: at once in the host's memory, else by way of the staging
// buffer.
void place(const CpuContext& ctx, const Source& source, DType from, const Slot& slot,
           const DeviceBuffer& arena) {
  std::byte* to = arena.data() + slot.offset;
  DeviceMemory& memory = arena.memory();
  if (memory.is_host_memory()) return convert(ctx, source, from, to, slot.dtype);
  const int64_t row_bytes = source.cols * dtype_bytes(slot.dtype);
  for (int64_t row = 0; row < source.rows;) {
    const std::span<std::byte> staging = memory.staging();
    const auto capacity = static_cast<int64_t>(staging.size());
    Source piece = source;
    if (row_bytes <= capacity) {
      piece.rows = std::min(source.rows - row, capacity / row_bytes);
      piece.data += row * source.row_stride * dtype_bytes(from);
      convert(ctx, piece, from, staging.data(), slot.dtype);
      memory.upload_staged(to + row * row_bytes, piece.rows * row_bytes);
      row += piece.rows;
    } else {  // a row longer than the buffer, of an embedding of unheard-of width
      std::vector<std::byte> whole(static_cast<size_t>(row_bytes));
      piece.rows = 1;
      piece.data += row * source.row_stride * dtype_bytes(from);
      convert(ctx, piece, from, whole.data(), slot.dtype);
      memory.upload(to + row * row_bytes, whole.data(), row_bytes);
      ++row;
    }
  }
}

// --- Dummy weights ---------------------------------------------------------------------------

constexpr float kDummyStd = 0.02f;
constexpr int64_t kQuantiles = 1 << 16;

// The middle of each of 2^16 equally likely slices of a normal distribution. A draw is then a look
// up by 16 random bits: no logarithm, no cosine, and a 27B model takes seconds.
[[nodiscard]] std::vector<float> normal_quantiles(float std) {
  std::vector<float> quantiles(kQuantiles);
  const double norm = 1 / std::sqrt(2 * std::acos(-1.0));
  double z = -4.5;  // left of the first
  for (int64_t i = 0; i < kQuantiles / 2; ++i) {
    const double p = (static_cast<double>(i) + 0.5) / kQuantiles;
    // Newton's method from the slice before: the distribution function is convex here, so that
    // every step after the first comes down to the root without passing it.
    for (int step = 0; step < 8; ++step) {
      z -= (0.5 * std::erfc(-z / std::sqrt(2.0)) - p) / (norm * std::exp(-z * z / 2));
    }
    quantiles[i] = static_cast<float>(z) * std;
    quantiles[kQuantiles - 1 - i] = -quantiles[i];
  }
  return quantiles;
}

// Elements are a function of (seed, salt, index) alone, so any split over threads gives the same.
template <class Value>
void draw(const CpuContext& ctx, const std::vector<Value>& quantiles, uint64_t seed, uint32_t salt,
          int64_t elements, std::byte* out) {
  constexpr int64_t kPerBlock = 8;  // 128 random bits
  const int64_t num_blocks = (elements + kPerBlock - 1) / kPerBlock;
  for_rows(ctx, num_blocks, kPerBlock, [&](int64_t block) {
    const NoiseKey key = {.seed = seed,
                          .stream = NoiseStream::kSynthetic,
                          .position = static_cast<uint32_t>(block >> 32),
                          .salt = salt};
    std::array<Value, kPerBlock> values;
    size_t at = 0;
    for (uint32_t word : philox(key, static_cast<uint32_t>(block))) {
      values[at++] = quantiles[word & 0xffffu];
      values[at++] = quantiles[word >> 16];
    }
    const int64_t begin = block * kPerBlock;
    std::memcpy(out + begin * static_cast<int64_t>(sizeof(Value)), values.data(),
                static_cast<size_t>(std::min(kPerBlock, elements - begin)) * sizeof(Value));
  });
}

void fill(float value, int64_t elements, std::byte* out, DeviceMemory& memory) {
  const std::vector<float> values(static_cast<size_t>(elements), value);
  memory.upload(out, values.data(), elements * static_cast<int64_t>(sizeof(value)));
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
  const auto found = impl.by_name.find(name);
  if (found == impl.by_name.end()) {
    throw InvalidArgument(concat("no weight is named ", quoted(name), " in a ",
                                 impl.model->config.name, " of ", impl.model->config.layers.size(),
                                 " layers; allowed: the ", impl.slots.size(),
                                 " names that its config asks for (docs/model-format.md)"));
  }
  Slot& slot = impl.slots[found->second];
  if (slot.is_filled) throw InvalidArgument(concat(quoted(name), " is put twice; allowed: once"));
  if (!std::ranges::equal(shape, slot.dims())) {
    throw InvalidArgument(concat(quoted(name), " has shape ", shape_text(shape),
                                 "; allowed: ", shape_text(slot.dims())));
  }
  if (!strides.empty() && strides.size() != shape.size()) {
    throw InvalidArgument(concat(quoted(name), " has ", strides.size(),
                                 " strides; allowed: ", shape.size(), ", or none for row-major"));
  }
  if (data == nullptr) throw InvalidArgument(concat(quoted(name), " has a null data pointer"));
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
  Source source = {.data = static_cast<const std::byte*>(data),
                   .rows = slot.rank == 2 ? shape[0] : 1,
                   .cols = shape.back(),
                   .row_stride = shape.back(),
                   .col_stride = 1};
  if (!strides.empty()) {
    source.row_stride = slot.rank == 2 ? strides[0] : 0;
    source.col_stride = strides.back();
  }
  if (is_integer) {
    const std::vector<int32_t> tokens =
        read_tokens(name, source, dtype, impl.model->config.vocab_size);
    const DeviceBuffer& arena = impl.model->weights.arena;
    arena.memory().upload(arena.data() + slot.offset, tokens.data(), source.cols * 4);
  } else {
    place(impl.ctx, source, dtype, slot, impl.model->weights.arena);
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
  const std::vector<float> quantiles = normal_quantiles(kDummyStd);
  std::vector<uint16_t> bf16_quantiles(quantiles.size());
  std::transform(quantiles.begin(), quantiles.end(), bf16_quantiles.begin(), float_to_bf16);
  for (size_t i = 0; i < impl.slots.size(); ++i) {
    Slot& slot = impl.slots[i];
    if (slot.is_filled || slot.is_optional) continue;
    std::byte* out = impl.model->weights.arena.data() + slot.offset;
    DeviceMemory& memory = impl.model->weights.arena.memory();
    const bool is_bf16 = slot.dtype == DType::kBFloat16;
    const auto salt = static_cast<uint32_t>(i);
    switch (slot.dummy) {
      case Dummy::kNormal:
        if (!memory.is_host_memory()) {
          const void* table = is_bf16 ? static_cast<const void*>(bf16_quantiles.data())
                                      : static_cast<const void*>(quantiles.data());
          memory.fill_from_quantiles(out, slot.elements(), slot.dtype, seed, salt, table);
        } else if (is_bf16) {
          draw(impl.ctx, bf16_quantiles, seed, salt, slot.elements(), out);
        } else {
          draw(impl.ctx, quantiles, seed, salt, slot.elements(), out);
        }
        break;
      case Dummy::kNeutralNorm:
        fill(1 - impl.model->config.norm_weight_offset, slot.elements(), out, memory);
        break;
      case Dummy::kOne:
        fill(1, slot.elements(), out, memory);
        break;
      case Dummy::kZero:
        fill(0, slot.elements(), out, memory);
        break;
      case Dummy::kSpreadTokens: {
        std::vector<int32_t> tokens(static_cast<size_t>(slot.elements()));
        for (size_t token = 0; token < tokens.size(); ++token) {
          tokens[token] = static_cast<int32_t>(static_cast<int64_t>(token) *
                                               impl.model->config.vocab_size / slot.elements());
        }
        memory.upload(out, tokens.data(), slot.elements() * 4);
        break;
      }
    }
    slot.is_filled = true;
  }
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
