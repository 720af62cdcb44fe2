// SPDX-License-Identifier: Apache-2.0
//
// Weights of 4 and 8 bits lie packed in the memory of a GPU, as the definition in
// support/packed_weights.h has them: whatever rows are written, and however a model gets its
// tensors. PACELINE_SEED overrides the seed. Skipped without a GPU, unless PACELINE_REQUIRE_GPU=1.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <paceline/model.h>

#include "base/overloaded.h"
#include "device/device_memory.h"
#include "model/weights/model_impl.h"
#include "model/weights/visit_weights.h"
#include "model/weights/weight_layout.h"
#include "support/described_model.h"
#include "support/format_tensors.h"
#include "support/gpu.h"
#include "support/packed_weights.h"
#include "support/seed.h"

namespace paceline::testing {
namespace {

// --- Rows ----------------------------------------------------------------------------------------

constexpr PackedKind kKinds[] = {PackedKind::kFp8,         PackedKind::kMxfp4,
                                 PackedKind::kMxfp4Scales, PackedKind::kInt4,
                                 PackedKind::kInt4Scales,  PackedKind::kNvfp4Scales};

// A random tensor of random matrices, which is written in two pieces.
struct RowsCase {
  PackedKind kind;
  int64_t num_matrices;
  int64_t n;          // rows of a matrix
  int64_t first_row;  // of the tensor in each
  int64_t num_rows;
  int64_t row_bytes;
  int64_t first_piece;  // rows
};

class PackedRows : public GpuTest {
 protected:
  std::vector<uint8_t> random_bytes(int64_t count) {
    std::vector<uint8_t> bytes(static_cast<size_t>(count));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random_() >> 24);
    return bytes;
  }
  // Rows of a kind: random bytes, or normal numbers within the limits of scales of nvfp4.
  std::vector<uint8_t> random_rows(PackedKind kind, int64_t count) {
    std::vector<uint8_t> bytes = random_bytes(count);
    if (kind != PackedKind::kNvfp4Scales) return bytes;
    for (size_t i = 0; i < bytes.size(); i += 4) {
      uint32_t bits = 0;
      std::memcpy(&bits, bytes.data() + i, sizeof(bits));
      bits = (bits & 0x807fffffu) | static_cast<uint32_t>(2 + below(250)) << 23;
      std::memcpy(bytes.data() + i, &bits, sizeof(bits));
    }
    return bytes;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }

  // Whether the pieces change what they should, and nothing between and around the matrices.
  bool is_right(const RowsCase& c) {
    const int64_t matrix_bytes = packed_bytes(c.kind, c.n, c.row_bytes);
    constexpr int64_t kGap = 64;
    const int64_t stride = matrix_bytes + kGap;
    const int64_t all_bytes = kGap + c.num_matrices * stride;
    std::vector<uint8_t> expected = random_bytes(all_bytes);
    const auto matrix = [&](int64_t i) {
      return std::span(expected).subspan(static_cast<size_t>(kGap + i * stride),
                                         static_cast<size_t>(matrix_bytes));
    };
    DeviceMemory& memory = cuda_memory();
    const DeviceBuffer device(memory, all_bytes, "a test");
    memory.upload(device.data(), expected.data(), all_bytes);
    const PackedTensor tensor = {.matrix = device.data() + kGap,
                                 .matrix_stride = stride,
                                 .first_row = c.first_row,
                                 .num_rows = c.num_rows,
                                 .row_bytes = c.row_bytes,
                                 .kind = c.kind};
    const int64_t all_rows = c.num_matrices * c.num_rows;
    const std::vector<uint8_t> rows = random_rows(c.kind, all_rows * c.row_bytes);
    const std::pair<int64_t, int64_t> pieces[] = {{c.first_piece, all_rows - c.first_piece},
                                                  {0, c.first_piece}};
    for (const auto& [first, count] : pieces) {
      if (count == 0) continue;
      const DeviceBuffer from(memory, count * c.row_bytes, "a test");
      memory.upload(from.data(), rows.data() + first * c.row_bytes, from.bytes());
      memory.pack(tensor, first, count, from.data());
      memory.finish();
    }
    for (int64_t row = 0; row < all_rows; ++row) {
      // Columns beyond the last are zero where a row is written.
      std::vector<uint8_t> padded(static_cast<size_t>(
          matrix_bytes / ((c.n + kPackedRows - 1) / kPackedRows) / kPackedRows));
      std::copy_n(rows.begin() + row * c.row_bytes, c.row_bytes, padded.begin());
      pack_into(c.kind, padded, std::ssize(padded), c.first_row + row % c.num_rows,
                matrix(row / c.num_rows));
    }
    std::vector<uint8_t> got(expected.size());
    memory.download(got.data(), device.data(), all_bytes);
    return got == expected;
  }

  std::mt19937_64 random_{base_seed()};
};

TEST_F(PackedRows, AreThoseOfTheDefinitionAtEveryShape) {
  TRACE_SEED();
  int64_t num_wrong = 0;
  for (const PackedKind kind : kKinds) {
    for (int64_t n = 1; n <= 70; ++n) {
      // Columns 32 to 320; rows of fp8 also have lengths that are no multiple of 16 bytes.
      for (int64_t i = 1; i <= 10; ++i) {
        const int64_t row_bytes = kind == PackedKind::kFp8          ? (i % 4 == 0 ? 31 * i : 32 * i)
                                  : has_two_a_byte(kind)            ? 16 * i
                                  : kind == PackedKind::kInt4Scales ? 2 * i
                                  : kind == PackedKind::kNvfp4Scales ? 8 * i
                                                                     : i;
        RowsCase c = {.kind = kind,
                      .num_matrices = 1 + below(3),
                      .n = n,
                      .first_row = below(n),
                      .row_bytes = row_bytes};
        if (i % 3 == 0) c.first_row = 0;
        c.num_rows = i % 3 == 0 ? n : 1 + below(n - c.first_row);
        c.first_piece = i % 2 == 0 ? 0 : below(c.num_matrices * c.num_rows);
        if (is_right(c)) continue;
        ++num_wrong;
        ADD_FAILURE() << "kind " << static_cast<int>(kind) << ", " << c.num_matrices
                      << " matrices of " << n << " rows, rows " << c.first_row << " to "
                      << c.first_row + c.num_rows << " of " << row_bytes << " bytes, the first "
                      << c.first_piece << " last";
        ASSERT_LT(num_wrong, 5);
      }
    }
  }
}

// Rows of several blocks: of a kernel's chunk and an odd rest.
TEST_F(PackedRows, MayBeLong) {
  TRACE_SEED();
  for (const PackedKind kind : kKinds) {
    for (const int64_t row_bytes : {128, 144, 512, 1040, 1440, 4096, 5776}) {
      EXPECT_TRUE(is_right({kind, 2, 50, 7, 40, row_bytes, 23})) << row_bytes;
      EXPECT_TRUE(is_right({kind, 3, 33, 0, 33, row_bytes, 40})) << row_bytes;
    }
  }
  for (const int64_t row_bytes : {90, 91, 127, 129, 385, 1441}) {
    EXPECT_TRUE(is_right({PackedKind::kMxfp4Scales, 4, 48, 16, 32, row_bytes, 32})) << row_bytes;
    EXPECT_TRUE(is_right({PackedKind::kFp8, 1, 48, 5, 30, row_bytes, 9})) << row_bytes;
    EXPECT_TRUE(is_right({PackedKind::kInt4Scales, 2, 48, 5, 30, 2 * row_bytes, 9})) << row_bytes;
  }
}

// --- Models --------------------------------------------------------------------------------------

std::vector<NamedWeight> layout_of(const Model& model, Device device) {
  DecoderWeights weights;
  Carver carver(model.weights.dtype, device, /*base=*/nullptr);
  lay_out(model.config, carver, weights);
  return carver.take_named_weights();
}

// The arena that a model has on a GPU, from that of the same model on the CPU. Padding is zero.
std::vector<std::byte> arena_on_gpu(const Model& on_cpu, int64_t bytes) {
  const std::vector<std::byte> arena = model_weight_arena(on_cpu);
  const std::vector<NamedWeight> here = layout_of(on_cpu, Device::kCpu);
  const std::vector<NamedWeight> there = layout_of(on_cpu, Device::kCuda);
  std::vector<std::byte> out(static_cast<size_t>(bytes));
  for (size_t i = 0; i < here.size(); ++i) {
    const std::byte* const from = arena.data() + here[i].offset;
    std::byte* const to = out.data() + there[i].offset;
    if (!there[i].packed) {
      const int64_t size = here[i].arena_elements() * dtype_bytes(here[i].dtype);
      std::memcpy(to, from, static_cast<size_t>(size));
      continue;
    }
    const PackedTensor& packed = *there[i].packed;
    const int64_t matrix_bytes = packed.num_rows * packed.row_bytes;
    const int64_t num_matrices = here[i].elements() * dtype_bytes(here[i].dtype) / matrix_bytes;
    for (int64_t matrix = 0; matrix < num_matrices; ++matrix) {
      const auto* const rows = reinterpret_cast<const uint8_t*>(from) + matrix * matrix_bytes;
      auto* const tiles = reinterpret_cast<uint8_t*>(to) + matrix * packed.matrix_stride;
      const auto room = reinterpret_cast<uint8_t*>(out.data() + out.size()) - tiles;
      pack_into(packed.kind, {rows, static_cast<size_t>(matrix_bytes)}, packed.row_bytes,
                packed.first_row, {tiles, static_cast<size_t>(room)});
    }
  }
  return out;
}

// The matrices of products; one that is no expert's as that of one expert.
std::vector<ExpertMatrices> matrices_of(const Model& model) {
  std::vector<ExpertMatrices> all;
  const auto add = [&](const Linear& linear, const LinearShape&) {
    all.push_back({.first = linear.weight, .num_experts = 1});
  };
  const auto add_experts = [&](const ExpertLinears& experts, const LinearShape&) {
    all.push_back(experts.weight);
  };
  for_each_linear(model.config, model.weights, Overloaded{add, add_experts});
  return all;
}

// Every matrix with scales is that of the CPU, packed as a whole.
void expect_packed_matrices(const Model& on_gpu, const Model& on_cpu) {
  const std::vector<ExpertMatrices> from = matrices_of(on_cpu);
  const std::vector<ExpertMatrices> to = matrices_of(on_gpu);
  int32_t num_packed = 0;
  const auto expect_equal = [&](PackedKind kind, const std::byte* rows, int64_t bytes,
                                int64_t row_bytes, const std::byte* tiles) {
    const std::vector<uint8_t> expected = packed(
        kind, {reinterpret_cast<const uint8_t*>(rows), static_cast<size_t>(bytes)}, row_bytes);
    std::vector<uint8_t> got(expected.size());
    cuda_memory().download(got.data(), tiles, std::ssize(got));
    EXPECT_TRUE(got == expected);
    ++num_packed;
  };
  for (size_t i = 0; i < from.size(); ++i) {
    const WeightMatrix& cpu = from[i].first;
    const WeightMatrix& gpu = to[i].first;
    if (cpu.format == WeightFormat::kPlain) continue;
    const PackedKind scale_kind = cpu.format == WeightFormat::kInt4    ? PackedKind::kInt4Scales
                                  : cpu.format == WeightFormat::kNvfp4 ? PackedKind::kNvfp4Scales
                                                                       : PackedKind::kMxfp4Scales;
    EXPECT_TRUE(gpu.is_packed());
    for (int32_t e = 0; e < from[i].num_experts; ++e) {
      const WeightMatrix its_cpu = from[i].of(e);
      const WeightMatrix its_gpu = to[i].of(e);
      expect_equal(packed_kind(cpu.format), its_cpu.data, cpu.data_bytes(), cpu.row_bytes(),
                   its_gpu.data);
      if (cpu.format == WeightFormat::kFp8) continue;
      expect_equal(scale_kind, its_cpu.scales, cpu.scales_bytes(), cpu.scales_bytes() / cpu.n,
                   its_gpu.scales);
      if (!cpu.has_zeros) continue;
      expect_equal(PackedKind::kMxfp4Scales, reinterpret_cast<const std::byte*>(its_cpu.zeros),
                   cpu.zeros_bytes(), cpu.num_scale_cols(),
                   reinterpret_cast<const std::byte*>(its_gpu.zeros));
    }
  }
  EXPECT_GE(num_packed, 6 * 2 * 2);  // the elements and scales of six experts' two matrices
}

std::shared_ptr<const Model> on_cpu(const std::string& json, const FormatTensors& tensors,
                                    DType dtype = DType::kBFloat16) {
  ModelBuilder builder(json, dtype);
  put_all(builder, tensors);
  return builder.finish();
}

void expect_packed(const Model& on_gpu, const Model& on_cpu, const std::string& what) {
  const std::vector<std::byte> got = model_weight_arena(on_gpu);
  EXPECT_TRUE(got == arena_on_gpu(on_cpu, std::ssize(got))) << what;
}

// Tensors in memory of the GPU.
class DeviceTensors {
 public:
  // With strides: every element is followed by two others.
  DeviceTensors(const FormatTensors& tensors, bool is_apart) {
    for (const auto& [name, t] : tensors) {
      const int64_t step = is_apart ? 3 : 1;
      const int64_t size = dtype_bytes(t.dtype);
      std::string bytes(t.bytes.size() * static_cast<size_t>(step), '\x55');
      for (int64_t i = 0; i < std::ssize(t.bytes) / size; ++i) {
        std::memcpy(bytes.data() + i * step * size, t.bytes.data() + i * size,
                    static_cast<size_t>(size));
      }
      DeviceBuffer& buffer = buffers_.emplace_back(cuda_memory(), std::ssize(bytes), "a test");
      cuda_memory().upload(buffer.data(), bytes.data(), buffer.bytes());
      std::vector<int64_t> strides(t.shape.size());
      int64_t stride = step;
      for (size_t axis = t.shape.size(); axis-- > 0; stride *= t.shape[axis]) {
        strides[axis] = stride;
      }
      named.push_back({.name = name,
                       .dtype = t.dtype,
                       .shape = t.shape,
                       .strides = strides,
                       .data = buffer.data(),
                       .device = Device::kCuda});
    }
  }

  std::vector<NamedTensor> named;

 private:
  std::vector<DeviceBuffer> buffers_;
};

class PackedModel : public GpuTest {};

// The tensors of a mixture's experts, then those of every expert; then int4, or nvfp4, in place of
// all formats.
class PackedTensors : public GpuTest, public ::testing::WithParamInterface<const char*> {
 protected:
  [[nodiscard]] std::string json() const {
    const std::string which = GetParam();
    return which == "together" ? mixture_config()
           : which == "int4"   ? int4_config()
           : which == "nvfp4"  ? nvfp4_config()
                               : deepseek_config();
  }
};

TEST_P(PackedTensors, EveryWayOfPuttingGivesTheSameBytes) {
  const std::string json = this->json();
  const FormatTensors tensors = format_tensors(json, 1);
  const auto expected = on_cpu(json, tensors);
  const auto builder_on_gpu = [&] { return ModelBuilder(json, DType::kBFloat16, Device::kCuda); };
  {
    ModelBuilder put = builder_on_gpu();
    put_all(put, tensors);
    const auto model = put.finish();
    expect_packed(*model, *expected, "put");
    expect_packed_matrices(*model, *expected);
  }
  {
    ModelBuilder read = builder_on_gpu();
    for (const auto& [name, t] : tensors) {
      read.put(name, t.dtype, t.shape, [&](int64_t first, std::span<std::byte> to) {
        std::memcpy(to.data(), t.bytes.data() + first, to.size());
      });
    }
    expect_packed(*read.finish(), *expected, "read");
  }
  for (const bool is_apart : {false, true}) {
    const DeviceTensors on_gpu(tensors, is_apart);
    ModelBuilder put = builder_on_gpu();
    for (const NamedTensor& t : on_gpu.named) {
      put.put(t.name, t.dtype, t.shape, t.strides, t.data, t.device);
    }
    expect_packed(*put.finish(), *expected, is_apart ? "strided in GPU memory" : "in GPU memory");
  }
}

INSTANTIATE_TEST_SUITE_P(Experts, PackedTensors,
                         ::testing::Values("together", "one_by_one", "int4", "nvfp4"),
                         [](const auto& info) { return info.param; });

TEST_F(PackedModel, Float32StaysRowMajor) {
  for (const std::string& json : {mixture_config(), int4_config(), nvfp4_config()}) {
    const FormatTensors tensors = format_tensors(json, 2);
    ModelBuilder builder(json, DType::kFloat32, Device::kCuda);
    put_all(builder, tensors);
    EXPECT_TRUE(model_weight_arena(*builder.finish()) ==
                model_weight_arena(*on_cpu(json, tensors, DType::kFloat32)));
  }
}

// Dummy weights are those of the CPU.
TEST_F(PackedModel, DummyWeightsAreEqual) {
  for (const std::string& json : {mixture_config(), int4_config(), nvfp4_config()}) {
    const auto dummy_on = [&](Device device) {
      ModelBuilder builder(json, DType::kBFloat16, device);
      builder.fill_dummy(7);
      return builder.finish();
    };
    expect_packed(*dummy_on(Device::kCuda), *dummy_on(Device::kCpu), "dummy");
  }
}

// Tensors beyond the staging memory are written in pieces.
TEST_F(PackedModel, TensorsMayBeLarge) {
  std::string json = mixture_config();
  apply_edit(json, {R"("intermediate": 96)", R"("intermediate": 40000)"});
  const auto expected = [&] {
    ModelBuilder builder(json, DType::kBFloat16);
    builder.fill_dummy(3);
    return builder.finish();
  }();
  const std::vector<std::byte> arena = model_weight_arena(*expected);
  ModelBuilder read(json, DType::kBFloat16, Device::kCuda);
  ModelBuilder dummy(json, DType::kBFloat16, Device::kCuda);
  ModelBuilder from_gpu(json, DType::kBFloat16, Device::kCuda);
  int64_t largest = 0;
  for (const NamedWeight& named : layout_of(*expected, Device::kCpu)) {
    if (named.kind != WeightKind::kCodes && named.kind != WeightKind::kMxfp4Scales) continue;
    const std::vector<int64_t> shape(named.dims().begin(), named.dims().end());
    const std::byte* const from = arena.data() + named.offset;
    largest = std::max(largest, named.elements());
    read.put(named.name, named.dtype, shape, [&](int64_t first, std::span<std::byte> to) {
      std::memcpy(to.data(), from + first, to.size());
    });
    const DeviceBuffer copy(cuda_memory(), named.elements(), "a test");
    cuda_memory().upload(copy.data(), from, copy.bytes());
    from_gpu.put(named.name, named.dtype, shape, {}, copy.data(), Device::kCuda);
  }
  EXPECT_GT(largest, std::ssize(cuda_memory().scratch()));
  for (ModelBuilder* const builder : {&read, &dummy, &from_gpu}) {
    builder->fill_dummy(3);
    expect_packed(*builder->finish(), *expected, builder == &read ? "read" : "other");
  }
}

// An update writes every tensor again, from host memory or that of the GPU.
TEST_F(PackedModel, UpdatesEqualANewModel) {
  for (const std::string& json : {mixture_config(), int4_config(), nvfp4_config()}) {
    const FormatTensors before = format_tensors(json, 4);
    const FormatTensors after = format_tensors(json, 5);
    const auto expected = on_cpu(json, after);
    const DeviceTensors on_gpu(after, /*is_apart=*/false);
    std::vector<NamedTensor> on_host;
    for (const auto& [name, t] : after) {
      on_host.push_back({.name = name, .dtype = t.dtype, .shape = t.shape, .data = t.bytes.data()});
    }
    for (const std::vector<NamedTensor>& tensors : {on_host, on_gpu.named}) {
      ModelBuilder builder(json, DType::kBFloat16, Device::kCuda);
      put_all(builder, before);
      const auto model = builder.finish();
      expect_packed(*model, *on_cpu(json, before), "before");
      update_models(std::vector<ModelUpdate>{{.model = model, .tensors = tensors}});
      expect_packed(*model, *expected, "after");
    }
  }
}

}  // namespace
}  // namespace paceline::testing
