// SPDX-License-Identifier: Apache-2.0
#pragma once

// The weights of ranks that have memory of their own, as on several GPUs: each an arena in which
// the rows of the rank follow each other, so that its kernels know nothing of ranks. What fills
// them has a tensor of the whole model at a time, and every rank takes its rows of it.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <paceline/model.h>

#include "device/device_memory.h"
#include "model/weights/model_impl.h"
#include "model/weights/rank_rows.h"
#include "model/weights/rank_threads.h"
#include "model/weights/weight_copy.h"
#include "model/weights/weight_layout.h"

namespace paceline {

// Where the weights of a rank go.
struct RankMemory {
  DeviceMemory* memory;
  int32_t gpu = 0;  // if the memory is that of one
};

// A tensor of the whole model, as a rank has it: its place in the rank's arena, and its rows.
struct RankTensor {
  NamedWeight named;
  RankRows rows;
};

// Fills the tensor of a rank with its rows of a tensor of the whole model, whose rows are those of
// the arena (source_tensor). `device`: where the source is; from a GPU, rows pass through the host.
void write_rows(const CpuContext& ctx, const RankTensor& tensor, const DeviceBuffer& arena,
                const SourceTensor& source, DType from, Device device);

// The same for a row-major tensor of the canonical shape that `read` gives in pieces: it is called
// with the bytes of the rank's rows only.
void read_rows(const CpuContext& ctx, const RankTensor& tensor, const DeviceBuffer& arena,
               const ModelBuilder::ReadBytes& read, DType from);

// The same for the fp8 scales of the whole tensor, as they lie in an arena of the whole model.
void write_scales(const RankTensor& tensor, const DeviceBuffer& arena,
                  std::span<const float> scales);

// A description with weights that point to where the whole model would lie on a CPU, and to no
// memory: only differences of these addresses mean something.
struct WholeLayout {
  explicit WholeLayout(const DecoderConfig& config, DType dtype);

  Model model;
  std::vector<NamedWeight> named_weights;
};

// The models of all ranks, and how their tensors are filled.
class RankedWeights final {
 public:
  // Lays the weights of every rank out and allocates them. `whole` points to the weights of the
  // whole model, or to a WholeLayout.
  RankedWeights(const Model& whole, Device device, std::span<const RankMemory> memories,
                GpuShare share);
  // To overwrite the weights of `filled`.
  RankedWeights(const Model& whole, const Model& filled);

  // Calls body(rank, context, tensors, arena) for every rank, each on its own thread. `tensors` are
  // in the order of the named weights of the whole model. Rethrows the first exception.
  template <class Body>
  void for_each_rank(const Body& body) {
    threads_.run([&](size_t rank, const CpuContext& ctx) {
      body(rank, ctx, tensors_[rank], models_[rank]->weights.arena);
    });
  }
  // Waits for all copies and frees the staging buffers.
  void finish() {
    threads_.run(
        [&](size_t rank, const CpuContext&) { models_[rank]->weights.arena.memory().finish(); });
  }

  [[nodiscard]] const std::vector<std::shared_ptr<Model>>& models() const { return models_; }
  // The model of all ranks together, which has no weights itself.
  [[nodiscard]] std::shared_ptr<Model> make_model(const Model& whole, Device device,
                                                  GpuShare share) const;

 private:
  RankThreads threads_;
  std::vector<std::shared_ptr<Model>> models_;
  std::vector<std::vector<RankTensor>> tensors_;  // by rank
};

}  // namespace paceline
