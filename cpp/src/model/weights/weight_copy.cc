// SPDX-License-Identifier: Apache-2.0
#include "model/weights/weight_copy.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>

#include "base/check.h"
#include "base/float_types.h"
#include "base/json.h"
#include "model/weights/arena_target.h"

namespace paceline {
namespace {

// Branch-free, unlike fp16_to_float, so that it vectorises; the same values.
[[nodiscard]] inline uint32_t fp16_to_float_bits(uint16_t half) {
  constexpr uint32_t kRebias = 112u << 23;  // exponent bias 127 instead of 15
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t normal = (magnitude << 13) + kRebias;
  // Exactly 0.5 + mantissa * 2^-24, minus 0.5. This never computes with a float32 subnormal, which
  // the host application may have told the processor to flush to zero.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(0x3f000000u + magnitude) - 0.5f);
  uint32_t bits = magnitude < 0x0400u ? subnormal : normal;
  bits = magnitude >= 0x7c00u ? normal + kRebias : bits;  // infinity, NaN
  return bits | (static_cast<uint32_t>(half & 0x8000u) << 16);
}

constexpr int64_t kChunk = 512;  // loops of a fixed length vectorise at -O2

template <class Value>
[[nodiscard]] bool is_aligned(const std::byte* data) {
  return reinterpret_cast<uintptr_t>(data) % alignof(Value) == 0;
}

// Converts contiguous values whose addresses are aligned for their types.
template <class In, class Out, class Convert>
void convert_aligned(const std::byte* in, int64_t count, std::byte* out, Convert convert) {
  const In* __restrict from = reinterpret_cast<const In*>(in);
  Out* __restrict to = reinterpret_cast<Out*>(out);
  for (; count >= kChunk; count -= kChunk, from += kChunk, to += kChunk) {
    for (int64_t i = 0; i < kChunk; ++i) to[i] = convert(from[i]);
  }
  for (int64_t i = 0; i < count; ++i) to[i] = convert(from[i]);
}

// Converts one row in chunks through local arrays; the memcpys around them accept any alignment.
template <class In, class Out, class Convert>
void convert_row(const SourceMatrix& source, int64_t row, std::byte* out, Convert convert) {
  constexpr auto kInBytes = static_cast<int64_t>(sizeof(In));
  constexpr auto kOutBytes = static_cast<int64_t>(sizeof(Out));
  const std::byte* in = source.data + row * source.row_stride * kInBytes;
  if (source.col_stride == 1 && is_aligned<In>(in) && is_aligned<Out>(out)) {
    return convert_aligned<In, Out>(in, source.cols, out, convert);
  }
  alignas(64) std::array<In, kChunk> from = {};
  alignas(64) std::array<Out, kChunk> to;
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

template <class In, class Out, class Convert>
void convert(const CpuContext& ctx, const SourceMatrix& source, std::byte* out,
             Convert convert_one) {
  const int64_t row_bytes = source.cols * static_cast<int64_t>(sizeof(Out));
  for_rows(ctx, source.rows, source.cols, [&](int64_t row) {
    convert_row<In, Out>(source, row, out + row * row_bytes, convert_one);
  });
}

// The bytes that a thread copies at once.
constexpr int64_t kPieceBytes = 256 << 10;

template <class Value>
void copy(const CpuContext& ctx, const SourceMatrix& source, std::byte* out) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Value));
  if (source.col_stride != 1) {
    return convert<Value, Value>(ctx, source, out, [](Value value) { return value; });
  }
  if (source.row_stride == source.cols) {
    const int64_t bytes = source.rows * source.cols * kBytes;
    const auto copy_bytes = [&](int64_t begin, int64_t end) {
      std::memcpy(out + begin, source.data + begin, static_cast<size_t>(end - begin));
    };
    if (bytes <= kPieceBytes) return copy_bytes(0, bytes);
    const int64_t num_pieces = (bytes + kPieceBytes - 1) / kPieceBytes;
    return ctx.for_ranges(num_pieces, /*pieces_per_thread=*/4, [&](int64_t begin, int64_t end) {
      copy_bytes(begin * kPieceBytes, std::min(end * kPieceBytes, bytes));
    });
  }
  for_rows(ctx, source.rows, source.cols, [&](int64_t row) {
    std::memcpy(out + row * source.cols * kBytes, source.data + row * source.row_stride * kBytes,
                static_cast<size_t>(source.cols * kBytes));
  });
}

// The pairs that put() lets through; float16 to bfloat16 is not one of them.
void convert(const CpuContext& ctx, const SourceMatrix& source, DType from, std::byte* out,
             DType to) {
  if (dtype_bytes(to) == 1) {
    PACELINE_CHECK(from == to, dtype_name(from));
    return copy<uint8_t>(ctx, source, out);
  }
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
    case DType::kUInt8:
    case DType::kFloat8E4M3:
      PACELINE_CHECK(false, dtype_name(from));
  }
}

// The elements that a thread reads at once when it converts them: few enough to stay in its cache.
constexpr int64_t kConvertedElements = 1 << 15;

// The first exception of bodies that run on several threads, which must not throw.
class FirstException {
 public:
  template <class Body>
  void run(const Body& body) noexcept {
    if (has_failed_.load(std::memory_order_relaxed)) return;
    try {
      body();
    } catch (...) {
      const std::scoped_lock lock(mutex_);
      if (exception_ == nullptr) exception_ = std::current_exception();
      has_failed_ = true;
    }
  }
  void rethrow() const {
    if (exception_ != nullptr) std::rethrow_exception(exception_);
  }

 private:
  std::atomic<bool> has_failed_{false};
  std::mutex mutex_;
  std::exception_ptr exception_;
};

// Reads and converts elements [first, first + count) of a tensor.
void read_elements(const CpuContext& ctx, const ModelBuilder::ReadBytes& read, DType from,
                   int64_t first, int64_t count, std::byte* out, DType to) {
  const int64_t in_bytes = dtype_bytes(from);
  const int64_t out_bytes = dtype_bytes(to);
  const int64_t piece_elements = from == to ? kPieceBytes / in_bytes : kConvertedElements;
  FirstException failure;
  const auto read_pieces = [&](int64_t begin, int64_t end) {
    failure.run([&] {
      std::unique_ptr<std::byte[]> buffer;
      if (from != to) {
        const int64_t longest = std::min(piece_elements, count - begin * piece_elements);
        buffer =
            std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(longest * in_bytes));
      }
      for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t element = piece * piece_elements;
        const int64_t length = std::min(piece_elements, count - element);
        std::byte* const target = out + element * out_bytes;
        std::byte* const into = from == to ? target : buffer.get();
        read((first + element) * in_bytes, {into, static_cast<size_t>(length * in_bytes)});
        if (from == to) continue;
        const SourceMatrix row = {
            .data = into, .rows = 1, .cols = length, .row_stride = length, .col_stride = 1};
        convert(CpuContext(), row, from, target, to);
      }
    });
  };
  const int64_t num_pieces = (count + piece_elements - 1) / piece_elements;
  if (count < kParallelElements) {
    read_pieces(0, num_pieces);
  } else {
    ctx.for_ranges(num_pieces, /*pieces_per_thread=*/4, read_pieces);
  }
  failure.rethrow();
}

// Converts a matrix of a tensor to its elements from `first`.
void copy_matrix(const CpuContext& ctx, const SourceMatrix& source, DType from, DType to,
                 int64_t first, const ArenaTarget& target) {
  DeviceMemory& memory = target.memory();
  if (memory.is_host_memory()) return convert(ctx, source, from, target.at(first), to);
  for (int64_t row = 0; row < source.rows;) {
    const std::span<std::byte> staging = memory.staging();
    const int64_t at = first + row * source.cols;
    SourceMatrix piece = source;
    piece.data += row * source.row_stride * dtype_bytes(from);
    piece.rows = std::min(source.rows - row, target.elements_in(staging.size()) / source.cols);
    if (piece.rows > 0) {
      convert(ctx, piece, from, staging.data(), to);
      target.upload_staged(at, piece.rows * source.cols);
      row += piece.rows;
    } else {  // a row longer than the buffer, of an embedding of unheard-of width
      const int64_t row_bytes = source.cols * dtype_bytes(to);
      std::vector<std::byte> whole(static_cast<size_t>(row_bytes));
      piece.rows = 1;
      convert(ctx, piece, from, whole.data(), to);
      memory.upload(target.at(at), whole.data(), row_bytes);
      ++row;
    }
  }
}

// Converts a matrix of a tensor, which is in memory of the arena's device, to its elements from
// `first`.
void convert_on_device(const SourceMatrix& source, DType from, DType to, int64_t first,
                       const ArenaTarget& target) {
  DeviceMemory& memory = target.memory();
  const int64_t most =
      target.is_packed() ? target.elements_in(memory.scratch().size()) / source.cols : source.rows;
  SourceMatrix piece = source;
  for (int64_t row = 0; row < source.rows; row += piece.rows) {
    piece.data = source.data + row * source.row_stride * dtype_bytes(from);
    piece.rows = std::min(source.rows - row, most);
    target.write(first + row * source.cols, piece.rows * source.cols,
                 [&](std::byte* out) { memory.convert(out, to, piece, from); });
  }
}

// Calls body(matrix, its first element) for every matrix of a tensor.
template <class Body>
void for_matrices(const SourceTensor& source, DType from, const Body& body) {
  const SourceMatrix& first = source.matrix;
  for (int64_t i = 0; i < source.num_matrices; ++i) {
    SourceMatrix matrix = first;
    matrix.data += i * source.matrix_stride * dtype_bytes(from);
    body(matrix, i * first.rows * first.cols);
  }
}

}  // namespace

std::vector<int32_t> read_ids(const NamedWeight& named, const SourceMatrix& source, DType dtype,
                              int32_t vocab_size) {
  const bool is_of_experts = named.num_experts > 0;
  const int32_t limit = is_of_experts ? named.num_experts : vocab_size;
  const int64_t row_ids = named.dims().back();
  std::vector<int32_t> ids;
  ids.reserve(static_cast<size_t>(source.rows * source.cols));
  std::vector<int64_t> last_index(static_cast<size_t>(limit), -1);  // of each id
  for (int64_t i = 0; i < source.rows * source.cols; ++i) {
    const int64_t element =
        i / source.cols * source.row_stride + i % source.cols * source.col_stride;
    const std::byte* from = source.data + element * dtype_bytes(dtype);
    int64_t id = 0;
    if (dtype == DType::kInt64) {
      std::memcpy(&id, from, sizeof(id));
    } else {
      int32_t narrow = 0;
      std::memcpy(&narrow, from, sizeof(narrow));
      id = narrow;
    }
    const auto place = [&](int64_t index) {
      return named.rank == 1 ? concat("[", index, "]")
                             : concat("[", index / row_ids, ", ", index % row_ids, "]");
    };
    if (id < 0 || id >= limit) {
      throw InvalidArgument(
          concat(quoted(named.name), place(i), " is ", id, "; allowed: 0 to ", limit - 1,
                 is_of_experts ? " (experts)" : " (tokens of the target, not offsets)"));
    }
    // Two rows of an lm_head with one token would share their noise, so their draw would not follow
    // the softmax. A row of experts has them all at once.
    int64_t& last = last_index[static_cast<size_t>(id)];
    if (last >= i / row_ids * row_ids) {
      throw InvalidArgument(concat(quoted(named.name), place(last), " and ", place(i), " are both ",
                                   id, "; allowed: each ",
                                   is_of_experts ? "expert once in a row" : "token once"));
    }
    last = i;
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

void copy_weight(const CpuContext& ctx, const SourceTensor& source, DType from,
                 const NamedWeight& named, const DeviceBuffer& arena) {
  const ArenaTarget target(named, arena);
  for_matrices(source, from, [&](const SourceMatrix& matrix, int64_t first) {
    copy_matrix(ctx, matrix, from, named.dtype, first, target);
  });
}

void copy_rows(const CpuContext& ctx, const SourceMatrix& source, DType from,
               const NamedWeight& named, const DeviceBuffer& arena, int64_t first) {
  copy_matrix(ctx, source, from, named.dtype, first, ArenaTarget(named, arena));
}

SourceMatrix download_matrix(const SourceMatrix& source, DType dtype,
                             std::vector<std::byte>& bytes) {
  // All elements between the first and the last in memory.
  const int64_t rows = (source.rows - 1) * source.row_stride;
  const int64_t cols = (source.cols - 1) * source.col_stride;
  const int64_t first = std::min<int64_t>(rows, 0) + std::min<int64_t>(cols, 0);
  const int64_t last = std::max<int64_t>(rows, 0) + std::max<int64_t>(cols, 0);
  bytes.resize(static_cast<size_t>((last - first + 1) * dtype_bytes(dtype)));
  device_memory(Device::kCuda)
      .download(bytes.data(), source.data + first * dtype_bytes(dtype),
                static_cast<int64_t>(bytes.size()));
  SourceMatrix host = source;
  host.data = bytes.data() - first * dtype_bytes(dtype);
  return host;
}

void copy_elements(const CpuContext& ctx, const std::byte* elements, const NamedWeight& named,
                   const DeviceBuffer& arena) {
  if (!named.packed) {
    return arena.memory().upload(arena.data() + named.offset, elements,
                                 named.elements() * dtype_bytes(named.dtype));
  }
  const int64_t cols = named.dims().back();
  const SourceTensor source = {.matrix = {.data = elements,
                                          .rows = named.elements() / cols,
                                          .cols = cols,
                                          .row_stride = cols,
                                          .col_stride = 1}};
  copy_weight(ctx, source, named.dtype, named, arena);
}

void copy_device_weight(const CpuContext& ctx, const SourceTensor& source, DType from,
                        const NamedWeight& named, const DeviceBuffer& arena) {
  const ArenaTarget target(named, arena);
  for_matrices(source, from, [&](const SourceMatrix& matrix, int64_t first) {
    if (!arena.memory().is_host_memory()) {
      return convert_on_device(matrix, from, named.dtype, first, target);
    }
    std::vector<std::byte> bytes;
    copy_matrix(ctx, download_matrix(matrix, from, bytes), from, named.dtype, first, target);
  });
}

void copy_weight(const CpuContext& ctx, const ModelBuilder::ReadBytes& read, DType from,
                 const NamedWeight& named, const DeviceBuffer& arena) {
  const ArenaTarget target(named, arena);
  DeviceMemory& memory = target.memory();
  const int64_t elements = named.elements();
  if (named.kind == WeightKind::kTransposed) {
    // One expert at a time: its matrix is read whole and then transposed.
    const int64_t rows = named.shape[2];
    const int64_t cols = named.shape[1];
    const auto bytes = static_cast<size_t>(rows * cols * dtype_bytes(from));
    const auto matrix = std::make_unique_for_overwrite<std::byte[]>(bytes);
    for (int64_t expert = 0; expert < named.shape[0]; ++expert) {
      const int64_t first = expert * rows * cols;
      read_elements(ctx, read, from, first, rows * cols, matrix.get(), from);
      copy_matrix(
          ctx,
          {.data = matrix.get(), .rows = rows, .cols = cols, .row_stride = 1, .col_stride = rows},
          from, named.dtype, first, target);
    }
    return;
  }
  if (memory.is_host_memory()) {
    return read_elements(ctx, read, from, /*first=*/0, elements, target.at(0), named.dtype);
  }
  for (int64_t first = 0; first < elements;) {
    const std::span<std::byte> staging = memory.staging();
    const int64_t count = std::min(elements - first, target.elements_in(staging.size()));
    read_elements(ctx, read, from, first, count, staging.data(), named.dtype);
    target.upload_staged(first, count);
    first += count;
  }
}

}  // namespace paceline
