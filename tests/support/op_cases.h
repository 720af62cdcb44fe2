// SPDX-License-Identifier: Apache-2.0
#pragma once

// One table of op cases for the tests that compare backends and for the microbenchmarks. A case
// makes an OpInstance from a seed: the arrays that an op reads and writes, and a call of the op for
// each backend, on the addresses at which the caller has placed those arrays. Random values of a
// row depend on the row's identity, not on its index, so a row can be computed again in another
// batch and must have the same bits.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <ostream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <paceline/config.h>

#include "device/cpu_context.h"
#include "device/cuda_context.h"
#include "ops/ops.h"
#include "support/weight_spec.h"

namespace paceline::testing {

enum class Element : uint8_t { kF32, kBf16, kU8, kI32, kI64, kU64 };
[[nodiscard]] int64_t element_bytes(Element element);
[[nodiscard]] constexpr bool is_float(Element element) {
  return element == Element::kF32 || element == Element::kBf16;
}
[[nodiscard]] constexpr Element element_of(DType dtype) {
  return dtype == DType::kFloat32 ? Element::kF32 : Element::kBf16;
}

enum class Role : uint8_t {
  kInput,   // must come out as it went in
  kOutput,  // poisoned before the op; what the CPU leaves poisoned must stay so
  kInOut,   // what the CPU leaves as it was must stay so, bit for bit
};
enum class Compare : uint8_t {
  kNear,  // by rms_bound, and element by element
  kExact,
  kByCase,  // by OpInstance::check
};

using Handle = int32_t;  // of an array of an instance
inline constexpr Handle kNoArray = -1;

struct OpArray {
  std::string name;
  Role role = Role::kInput;
  Element cpu = Element::kF32;   // what the CPU op sees and
  Element cuda = Element::kF32;  // what the CUDA op sees: activations differ, all else is the same
  int64_t count = 0;             // elements
  int64_t row_length = 0;        // elements from one row to the next; 0: not made of rows
  Compare compare = Compare::kNear;
  double rms_bound = 0;  // of kNear: ||out - ref|| / ||ref||
  // Row of this array that belongs to row i of the op; empty: i itself.
  std::vector<int64_t> row_at = {};
  int64_t num_ignored = 0;                  // the first elements, which are not compared
  bool is_constant = false;                 // the same for all rows that a case is made for
  std::function<void(float*)> values = {};  // writes all of a float array
  std::vector<std::byte> bits = {};         // all of an integer array
  // What the CUDA op sees instead of an integer array, where that is laid out otherwise.
  std::function<std::vector<std::byte>()> cuda_bits = {};
  int64_t num_cuda_bytes = 0;  // of cuda_bits
};
// Bytes of the array as the CUDA op sees it.
[[nodiscard]] int64_t cuda_bytes(const OpArray& array);

// The array's first content as a backend sees it. Floats that a GPU holds as bfloat16 are rounded
// to it for the CPU too.
[[nodiscard]] std::vector<std::byte> initial_bytes(const OpArray& array, bool is_cuda);
// Element `index` of raw bytes.
[[nodiscard]] double float_at(Element element, const std::byte* bytes, int64_t index);

class Addresses {
 public:
  explicit Addresses(std::vector<std::byte*> at) : at_(std::move(at)) {}
  template <class T>
  [[nodiscard]] T* get(Handle handle) const {
    return handle == kNoArray ? nullptr : reinterpret_cast<T*>(at_[static_cast<size_t>(handle)]);
  }
  [[nodiscard]] std::byte* raw(Handle handle) const { return get<std::byte>(handle); }
  void set(Handle handle, std::byte* to) { at_[static_cast<size_t>(handle)] = to; }

 private:
  std::vector<std::byte*> at_;
};

using ArrayBytes = std::vector<std::vector<std::byte>>;  // of every array of an instance

struct OpInstance {
  std::vector<OpArray> arrays;
  int32_t num_rows = 0;       // that are computed
  int32_t max_model_len = 0;  // for the context
  int32_t num_compared = 0;   // draws at a temperature, for the share of equal ones
  std::function<void(CpuContext&, const Addresses&)> run_cpu;
  std::function<void(CudaContext&, const Addresses&)> run_cuda;
  // For arrays marked kByCase: the error, or an empty string. `num_different` counts draws that
  // differ within the tolerance.
  std::function<std::string(const ArrayBytes& cpu, const ArrayBytes& cuda, int64_t* num_different)>
      check;

  Handle add(OpArray array) {
    arrays.push_back(std::move(array));
    return static_cast<Handle>(arrays.size()) - 1;
  }
  [[nodiscard]] Handle find(std::string_view name) const;
  // `call` takes either context.
  template <class Call>
  void set_run(const Call& call) {
    run_cpu = call;
    run_cuda = call;
  }
};

// The dtype of activations on the backend of `Ctx`.
template <class Ctx>
[[nodiscard]] constexpr DType activation_dtype(const Ctx&, DType on_cuda) {
  return std::is_same_v<Ctx, CpuContext> ? DType::kFloat32 : on_cuda;
}

// Rows of a call: the identities of the computed rows, the value of num_rows (which may exceed
// max_rows) and the capacity.
struct Rows {
  std::vector<int64_t> ids;
  int32_t claimed = 0;
  int32_t max_rows = 0;
};
inline constexpr int64_t kMaxRowId = 1024;  // exclusive
// Identities 0, 1, ... of `num_rows` rows.
[[nodiscard]] Rows first_rows(int32_t num_rows, int32_t max_rows);

// --- shapes ------------------------------------------------------------------------------------

struct GemmSpec {
  int32_t n = 0;
  int32_t k = 0;
  WeightSpec weight = {};  // x has its dtype
  DType y_dtype = DType::kBFloat16;
  bool has_bias = false;
  int32_t x_padding = 0;
  int32_t y_padding = 0;
  int32_t num_groups = 1;
};
struct EmbedSpec {
  int32_t hidden = 0;
  int32_t vocab_size = 0;
  DType dtype = DType::kBFloat16;
};
enum class NormKind : uint8_t {
  kPlain,
  kInPlace,
  kResidual,
  kResidualXWeight,
  kResidualOnly,
  kResidualXWeightOnly,
  kCopy,           // no weight: y is x
  kResidualCopy,   // with an x_weight, but y is the sum as it is
  kResidualScale,  // with an x_weight, the sum scaled before it is normalised
  kResidualScaleOnly
};
struct RmsNormSpec {
  int32_t hidden = 0;
  NormKind kind = NormKind::kPlain;
  DType x_dtype = DType::kBFloat16;
  DType y_dtype = DType::kBFloat16;
  int32_t x_padding = 0;
  int32_t y_padding = 0;
};
struct GatedSpec {
  int32_t intermediate = 0;
  Activation activation = Activation::kSilu;
  DType dtype = DType::kBFloat16;
  int32_t up_stride = 0;  // 0: up follows gate
  bool is_interleaved = false;
};
// gate and up, and the activation.
struct ActivatedGemmSpec {
  int32_t intermediate = 0;
  int32_t k = 0;
  Activation activation = Activation::kSilu;
  WeightSpec weight = {};  // x and y have its dtype
  bool has_bias = false;
  bool activates_alone = false;  // by an op of its own, after the product
};
struct PerLayerSpec {
  int32_t num_layers = 0;
  int32_t size = 0;
  DType dtype = DType::kBFloat16;
  DType table_dtype = DType::kBFloat16;
};
struct RopeSpec {
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t block_size = 16;
  DType dtype = DType::kBFloat16;  // of qkv and of the cache
  bool has_norms = true;
  KvInputs kv_inputs = KvInputs::kKeysAndValues;
  bool has_v_norm = false;
  int32_t position_offset = 0;
};
struct ListSpec {
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t block_size = 16;
  int32_t window = 0;
  DType dtype = DType::kBFloat16;
  KvInputs kv_inputs = KvInputs::kKeysAndValues;
  bool has_sinks = false;
};
struct GatherSpec {
  int32_t hidden = 0;
};
struct CopySpec {
  int32_t width = 0;
  DType x_dtype = DType::kFloat32;
  DType y_dtype = DType::kBFloat16;
  int32_t x_padding = 0;
  int32_t y_padding = 0;
  bool has_index = false;
};
struct SoftCapSpec {
  int32_t n = 0;
  float cap = 30.0f;
};
enum class LogitKind : uint8_t {
  kPlain,
  kTies,
  kHoles,
  kPeaked,
  kInfinite,
  kTiny,
  kHalves,  // 21 logits whose softmax at temperature 1 / log 2 is 1/2, 1/4, ..., 2^-20, 2^-20
};
struct DrawSpec {
  int32_t vocab_limit = 0;
  int32_t padding = 0;       // logits_stride - vocab_limit; the padding is +inf
  float temperature = 0.0f;  // below 0: 0, 0.3, 1 and 2 in turn
  LogitKind logits = LogitKind::kPlain;
  bool has_probabilities = false;
  bool is_mapped = false;      // ids are rows of a draft vocabulary; some have no token
  bool has_row_maps = false;   // with is_mapped: each row has its own order of tokens
  int32_t steps_ahead = 0;     // 0: not given
  bool has_own_noise = false;  // its own stream and salts, and rows of logits in reverse order
};
// kTies has equal scores, among them -0 and 0.
struct SelectClustersSpec {
  int32_t num_clusters = 0;
  int32_t top = 0;
  LogitKind scores = LogitKind::kPlain;
};
// Every row is its own sequence, with a window of drafts before the row.
enum class AdjustKind : uint8_t {
  kMixed,      // all kinds in turn; some rows adjust nothing, some are inert
  kPenalties,  // of every row
  kNone
};
struct AdjustSpec {
  int32_t vocab_size = 0;
  int32_t padding = 0;  // logits_stride - vocab_size
  AdjustKind kind = AdjustKind::kMixed;
};
enum class TruncateKind : uint8_t {
  kMixed,
  kTopK,
  kTopP,
  kMinP,
  kTopKTopP,
  kNone,
  kReached,  // with kHalves: a top_p that sums of probabilities equal, or just miss
};
struct TruncateSpec {
  int32_t vocab_limit = 0;
  int32_t padding = 0;  // logits_stride - vocab_limit; the padding is +inf
  TruncateKind kind = TruncateKind::kMixed;
  LogitKind logits = LogitKind::kPlain;
  bool copies_logits = false;  // first, so that the op can be timed repeatedly
};
// Some rows want no logprobs or are inert; others want those of 0 to max_logprobs tokens.
struct LogprobSpec {
  int32_t vocab_size = 0;
  int32_t padding = 0;  // logits_stride - vocab_size; the padding is +inf
  LogitKind logits = LogitKind::kPlain;
  int32_t max_logprobs = 20;
  bool all_change = false;  // acceptance overwrites logits of all sequences
};
// Every row drafts for its own sequence; some rows are inert.
struct ProposalsSpec {
  int32_t vocab_limit = 0;
  int32_t padding = 0;  // logits_stride - vocab_limit; the padding is +inf
  int32_t per_draft = 0;
  int32_t draft_step = 0;  // 0: not given
  LogitKind logits = LogitKind::kPlain;
  bool is_mapped = false;     // ids are rows of a draft vocabulary; some have no token
  bool has_row_maps = false;  // with is_mapped: each row has its own map
};
struct SoftmaxSumsSpec {
  int32_t vocab_limit = 0;
  int32_t padding = 0;  // logits_stride - vocab_limit; the padding is +inf
  LogitKind logits = LogitKind::kPlain;
};
// Every row is a sequence with a window of drafts. Its softmax weights are computed first.
struct RejectSpec {
  int32_t vocab_size = 0;
  int32_t num_draft_tokens = 0;
  int32_t per_draft = 0;  // 0: drafts are greedy, with q = 1
  AcceptMethod method = AcceptMethod::kStandard;
  LogitKind logits = LogitKind::kPlain;
  bool has_unknown_ids = false;  // some drafts and proposals are beyond the vocabulary
};
struct ClusterLogitsSpec {
  int32_t hidden = 0;
  int32_t num_clusters = 0;
  int32_t cluster_size = 0;
  int32_t top = 0;
  DType x_dtype = DType::kBFloat16;
  DType weight_dtype = DType::kBFloat16;
};

[[nodiscard]] OpInstance make_gemm(const GemmSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_embed(const EmbedSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_rms_norm(const RmsNormSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_gated(const GatedSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_activated_gemm(const ActivatedGemmSpec& spec, const Rows& rows,
                                             uint64_t seed);
[[nodiscard]] OpInstance make_per_layer(const PerLayerSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_rope(const RopeSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_list_attention(const ListSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_gather(const GatherSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_copy(const CopySpec& spec, const Rows& rows, uint64_t seed);
struct AddRowsSpec {
  int32_t n;
};
[[nodiscard]] OpInstance make_add_rows(const AddRowsSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_soft_cap(const SoftCapSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_draw(const DrawSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_adjust(const AdjustSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_truncate(const TruncateSpec& spec, const Rows& rows, uint64_t seed);
// A row is a sequence with a window of three rows; every other one has its raw logits saved.
[[nodiscard]] OpInstance make_emitted_logprobs(const LogprobSpec& spec, const Rows& rows,
                                               uint64_t seed);
// A row is one of a prompt.
[[nodiscard]] OpInstance make_prompt_logprobs(const LogprobSpec& spec, const Rows& rows,
                                              uint64_t seed);
[[nodiscard]] OpInstance make_save_raw_logits(const LogprobSpec& spec, const Rows& rows,
                                              uint64_t seed);
[[nodiscard]] OpInstance make_select_clusters(const SelectClustersSpec& spec, const Rows& rows,
                                              uint64_t seed);
[[nodiscard]] OpInstance make_proposals(const ProposalsSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_softmax_sums(const SoftmaxSumsSpec& spec, const Rows& rows,
                                           uint64_t seed);
[[nodiscard]] OpInstance make_reject(const RejectSpec& spec, const Rows& rows, uint64_t seed);
[[nodiscard]] OpInstance make_cluster_logits(const ClusterLogitsSpec& spec, const Rows& rows,
                                             uint64_t seed);

struct AttentionSpec {
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t block_size = 16;
  int32_t window = 0;  // 0: none
  float soft_cap = 0.0f;
  bool has_sinks = false;
  DType dtype = DType::kBFloat16;  // of qkv, and of the cache but for the last field
  KvInputs kv_inputs = KvInputs::kKeysAndValues;
  bool has_bf16_cache = false;  // beside a qkv of float32
  // Latent attention: a value is this many of the first elements of its key; 0: keys and values are
  // two things. With kv_inputs kNone and one KV head.
  int32_t value_dim = 0;
};
// Rows at positions [length - num_rows, length) of sequence `id`, then inert ones.
struct AttentionSequence {
  int64_t id = 0;
  int32_t length = 0;
  int32_t num_rows = 0;
  int32_t num_inert = 0;
};
struct AttentionBatch {
  std::vector<AttentionSequence> sequences;
  int32_t extra_rows = 0;          // max_rows beyond the rows there are
  int32_t extra_seqs = 0;          // max_seqs beyond the sequences there are
  int32_t extra_rows_per_seq = 0;  // max_rows_per_seq beyond the longest
  int32_t max_model_len = 0;       // 0: the longest sequence
  // Multiprocessors that a GPU plans for; 0: those it has. On few of them, short prompts and few
  // heads are enough for the prefill kernel.
  int32_t num_sms = 0;
};
// y has one row for each row of the batch, in order.
[[nodiscard]] OpInstance make_attention(const AttentionSpec& spec, const AttentionBatch& batch,
                                        uint64_t seed);

// Ops on sequences and metadata; everything in them is compared exactly.
enum class StateOp : uint8_t {
  kAssembleVerifyRows,
  kAssembleFirstRows,
  kAccept,
  kAcceptSynthetic,
  kAcceptJudged,
  kBuildMetadata,
  kDraftSteps,
  kDraftBlocks,
  kProposeNgram,
  kCountTokens
};
// Whose rows kAssembleFirstRows and kDraftSteps make.
enum class DraftedBy : uint8_t {
  kModel,  // a draft model's: the newest tokens
  kHead,   // a draft head's: the rows of the verify pass
  kFixed,  // those of a draft head that stays at the last position with KV
};
struct StateSpec {
  int32_t max_seqs = 0;
  int32_t num_seqs = 0;
  int32_t num_draft_tokens = 0;
  int32_t block_size = 16;
  bool stops_early = false;  // of kDraftSteps
  DraftedBy drafted_by = DraftedBy::kModel;
  int32_t spread = 1;  // distance between the ids of the few tokens in use
};
[[nodiscard]] OpInstance make_state(StateOp op, const StateSpec& spec, uint64_t seed);

// --- the table ---------------------------------------------------------------------------------

// An op whose rows are independent.
struct RowWiseCase {
  std::string name;  // op, then shape, e.g. "gemm_n33_k72_bf16"
  std::function<OpInstance(const Rows& rows, uint64_t seed)> make;
  bool is_invariance_case = false;  // also run for every batch size
  int32_t roomy_rows = 0;           // not 0: also run with a capacity of this many rows
  int32_t num_in_room = 21;         // rows in use at that capacity
};
[[nodiscard]] const std::vector<RowWiseCase>& row_wise_cases();

struct OpCase {
  std::string name;
  std::function<OpInstance(uint64_t seed)> make;
};
// All cases: the row-wise cases in several batches, attention, and the ops on state.
[[nodiscard]] const std::vector<OpCase>& op_cases();

// How gtest shows them.
inline void PrintTo(const RowWiseCase& c, std::ostream* out) { *out << c.name; }
inline void PrintTo(const OpCase& c, std::ostream* out) { *out << c.name; }

// The cases of op_cases_attention.cc and so on, for op_cases().
[[nodiscard]] std::vector<OpCase> attention_op_cases();
[[nodiscard]] std::vector<OpCase> state_op_cases();
[[nodiscard]] std::vector<OpCase> fork_op_cases();

// --- randomness --------------------------------------------------------------------------------

// Random numbers from a seed and a purpose, the same on every machine.
class Stream {
 public:
  Stream(uint64_t seed, uint64_t purpose, uint64_t id = 0, uint64_t sub_id = 0)
      : state_(mix(mix(mix(mix(seed) + purpose) + id) + sub_id)) {}
  uint64_t next() {
    state_ += 0x9E3779B97F4A7C15u;
    return mix(state_);
  }
  // In [0, n).
  int32_t below(int32_t n) {
    return static_cast<int32_t>((next() >> 32) % static_cast<uint64_t>(n));
  }
  bool one_in(int32_t n) { return below(n) == 0; }
  // Approximately normal with mean 0 and variance 1: the sum of four uniform numbers.
  float normal() {
    const uint64_t bits = next();
    const int64_t sum = static_cast<int64_t>((bits & 0xffff) + (bits >> 16 & 0xffff) +
                                             (bits >> 32 & 0xffff) + (bits >> 48));
    return static_cast<float>(sum - 131070) * (1.7320508f / 65536.0f);
  }
  void fill(float* to, int64_t n, float scale = 1.0f) {
    for (int64_t i = 0; i < n; ++i) to[i] = scale * normal();
  }

 private:
  static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  uint64_t state_;
};

template <class T>
void shuffle(std::vector<T>& values, Stream& stream) {
  for (size_t i = values.size(); i > 1; --i) {
    std::swap(values[i - 1], values[static_cast<size_t>(stream.below(static_cast<int32_t>(i)))]);
  }
}

// --- arrays, for the builders ------------------------------------------------------------------

template <class T>
[[nodiscard]] OpArray int_array(std::string name, Role role, const std::vector<T>& values) {
  OpArray array{.name = std::move(name), .role = role};
  array.cpu = array.cuda = std::is_same_v<T, int32_t>   ? Element::kI32
                           : std::is_same_v<T, int64_t> ? Element::kI64
                           : std::is_same_v<T, uint8_t> ? Element::kU8
                                                        : Element::kU64;
  array.count = static_cast<int64_t>(values.size());
  array.compare = Compare::kExact;
  const auto* const bytes = reinterpret_cast<const std::byte*>(values.data());
  array.bits.assign(bytes, bytes + values.size() * sizeof(T));
  return array;
}
// Poisoned; `cpu` and `cuda` are equal for what is no activation.
[[nodiscard]] OpArray output_array(std::string name, Element cpu, Element cuda, int64_t count,
                                   int64_t row_length);
// An intermediate result, which is compared only by what follows from it.
[[nodiscard]] OpArray intermediate_array(std::string name, Element cuda, int64_t count);
[[nodiscard]] OpArray float_array(std::string name, Element cpu, Element cuda, int64_t count,
                                  std::function<void(float*)> values);

}  // namespace paceline::testing
