// SPDX-License-Identifier: Apache-2.0
#pragma once

// A model is data: a decoder description (JSON, see docs/model-format.md) and named weights. Two
// ways to fill one: `ModelBuilder::put` tensor by tensor (what Python does), or `load_model_folder`
// on a folder written by `paceline convert`. Both give byte-equal weights.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <paceline/device.h>
#include <paceline/dtype.h>
#include <paceline/export.h>

namespace paceline {

class Model;  // immutable once built; shared by executors

// Places weights under canonical names, converting and copying each value once.
// Not thread-safe.
class PACELINE_API ModelBuilder {
 public:
  // config_json: the canonical decoder configuration. weight_dtype: kFloat32 or kBFloat16, of the
  // matrices (norms and biases are always float32). device: where the weights will lie; executors
  // run there. Throws InvalidArgument naming the key, Unsupported without that device, OutOfMemory
  // with the MiB that are missing.
  ModelBuilder(std::string_view config_json, DType weight_dtype, Device device = Device::kCpu);
  ~ModelBuilder();
  ModelBuilder(ModelBuilder&&) noexcept;
  ModelBuilder& operator=(ModelBuilder&&) noexcept;

  // Copies one tensor. shape: of the tensor as stored; strides: in elements, empty = row-major.
  // Throws InvalidArgument for an unknown name, a second put, or a wrong shape (seen and expected).
  void put(std::string_view name, DType dtype, std::span<const int64_t> shape,
           std::span<const int64_t> strides, const void* data);

  // The same of a row-major tensor that is read piece by piece, as from a file: `read` fills `to`
  // with the tensor's bytes from byte `first` on. It is called from several threads at once, and
  // what it throws ends the put.
  using ReadBytes = std::function<void(int64_t first, std::span<std::byte> to)>;
  void put(std::string_view name, DType dtype, std::span<const int64_t> shape,
           const ReadBytes& read);

  // Names that still have to be put, sorted.
  [[nodiscard]] std::vector<std::string> missing() const;

  // Fills every weight that was not put: matrices and embeddings normal with std 0.02, norms at
  // their neutral value, biases 0. For benches ("load_format: dummy").
  void fill_dummy(uint64_t seed);

  // Throws InvalidArgument listing missing names. The builder is empty afterwards.
  [[nodiscard]] std::shared_ptr<const Model> finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Bytes of all weights of a model, and their dtype name.
[[nodiscard]] PACELINE_API int64_t model_weight_bytes(const Model& model);
[[nodiscard]] PACELINE_API DType model_weight_dtype(const Model& model);
[[nodiscard]] PACELINE_API int32_t model_vocab_size(const Model& model);
[[nodiscard]] PACELINE_API int32_t model_max_position(const Model& model);
[[nodiscard]] PACELINE_API Device model_device(const Model& model);
// A copy of the bytes of the weight arena, for equality tests of the two ways in.
[[nodiscard]] PACELINE_API std::vector<std::byte> model_weight_arena(const Model& model);

// What `paceline convert` wrote: a target, maybe a drafter, and their defaults.
struct ModelFolder {
  std::shared_ptr<const Model> target;
  std::shared_ptr<const Model> draft;   // null without a drafter
  int32_t num_speculative_tokens = 0;   // the folder's default k; 0 without a drafter
  std::vector<int32_t> stop_token_ids;  // the target's end-of-sequence ids
};

// Reads DIR/paceline.json and the safetensors beside it, to a device. Throws ModelFileError naming
// file and key, and what ModelBuilder throws.
[[nodiscard]] PACELINE_API ModelFolder load_model_folder(const std::string& directory,
                                                         Device device = Device::kCpu);

}  // namespace paceline
