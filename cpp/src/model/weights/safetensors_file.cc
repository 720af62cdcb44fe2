// SPDX-License-Identifier: Apache-2.0
#include "model/weights/safetensors_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "base/check.h"
#include "base/json.h"

namespace paceline {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = 100'000'000;  // as the reference implementation
constexpr int64_t kMaxTensors = 1'000'000;
constexpr int64_t kMaxRank = 8;
// A tensor of rank 8 takes 17 keys and values.
constexpr uint32_t kMaxHeaderValues = 20 * kMaxTensors;

struct ElementType {
  std::string_view name;
  int64_t bytes;
};
constexpr std::array<ElementType, 16> kElementTypes = {{
    {"F64", 8},
    {"F32", 4},
    {"F16", 2},
    {"BF16", 2},
    {"I64", 8},
    {"I32", 4},
    {"I16", 2},
    {"I8", 1},
    {"U8", 1},
    {"BOOL", 1},
    {"F8_E4M3", 1},
    {"F8_E5M2", 1},
    {"U16", 2},
    {"U32", 4},
    {"U64", 8},
    {"F8_E8M0", 1},
}};

[[nodiscard]] ElementType element_type(const Json& dtype) {
  const std::string_view name = dtype.as_string();
  for (const ElementType& type : kElementTypes) {
    if (type.name == name) return type;
  }
  std::string allowed;
  for (const ElementType& type : kElementTypes) {
    allowed += concat(allowed.empty() ? "" : ", ", type.name);
  }
  dtype.refuse(allowed);
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path) {
  try {
    read_header();
  } catch (const ModelFileError&) {
    throw;
  } catch (const InvalidArgument& error) {  // from the JSON reader, which also names the file
    throw ModelFileError(error.what());
  }
}

void SafetensorsFile::read_header() {
  const std::string& where = file_.path();
  const auto fail = [&](const std::string& seen, const std::string& allowed) {
    throw ModelFileError(concat(where, ": ", seen, "; allowed: ", allowed));
  };
  if (file_.bytes() < kLengthBytes) {
    fail(concat("the file has ", file_.bytes(), " bytes"),
         concat("a safetensors file, which begins with a header length of ", kLengthBytes,
                " bytes"));
  }
  uint64_t length = 0;
  file_.read(0, std::as_writable_bytes(std::span(&length, 1)));
  const int64_t most = std::min(kMaxHeaderBytes, file_.bytes() - kLengthBytes);
  if (length > static_cast<uint64_t>(most)) {
    fail(concat("the header length is ", length, " in a file of ", file_.bytes(), " bytes"),
         concat("at most ", most));
  }
  const auto header_bytes = static_cast<int64_t>(length);
  std::string header(length, '\0');
  file_.read(kLengthBytes, std::as_writable_bytes(std::span(header)));
  if (!header.starts_with('{')) {
    fail(concat("the header begins with ", quoted(std::string_view(header).substr(0, 1))), "'{'");
  }
  const JsonDocument document(header, concat(where, ": header"),
                              {.max_bytes = kMaxHeaderBytes, .max_values = kMaxHeaderValues});
  const Json root = document.root();
  if (root.size() > kMaxTensors + 1) {
    fail(concat("the header has ", root.size(), " entries"), concat("at most ", kMaxTensors));
  }

  const int64_t data_begin = kLengthBytes + header_bytes;
  const int64_t data_bytes = file_.bytes() - data_begin;
  entries_.reserve(static_cast<size_t>(root.size()));
  for (const auto& [name, tensor] : root.members()) {
    if (name == "__metadata__") {
      for (const auto& [key, value] : tensor.members()) (void)value.as_string();
      continue;
    }
    constexpr std::array<std::string_view, 3> kKeys = {"dtype", "shape", "data_offsets"};
    tensor.check_keys(kKeys);
    const ElementType type = element_type(tensor.at("dtype"));

    const Json shape = tensor.at("shape");
    const size_t first_dim = dims_.size();
    int64_t bytes = type.bytes;
    for (const Json& dim : shape.elements()) {
      dims_.push_back(dim.as_int(0, std::numeric_limits<int64_t>::max()));
      if (__builtin_mul_overflow(bytes, dims_.back(), &bytes)) {
        dim.refuse("sizes whose product in bytes fits into 63 bits");
      }
    }
    if (shape.size() > kMaxRank) shape.refuse(concat("at most ", kMaxRank, " dimensions"));

    const Json offsets = tensor.at("data_offsets");
    if (offsets.kind() != JsonKind::kList || offsets.size() != 2) {
      offsets.refuse("a list of 2: begin and end in the data section");
    }
    const auto read_offset = [&](const Json& offset, int64_t low) {
      const int64_t value = offset.as_int(low, std::numeric_limits<int64_t>::max());
      if (value > data_bytes) {
        offset.refuse(concat("at most ", data_bytes,
                             ", where the file ends; it is incomplete, so fetch it again"));
      }
      return value;
    };
    auto offset = offsets.elements().begin();
    const int64_t begin = read_offset(*offset, 0);
    const int64_t end = read_offset(*++offset, begin);
    if (end - begin != bytes) {
      fail(concat(quoted(name), ": data_offsets span ", end - begin, " bytes"),
           concat(bytes, ", which its dtype and shape take"));
    }
    entries_.push_back({std::string(name), type.name, first_dim, dims_.size() - first_dim,
                        data_begin + begin, data_begin + end});
  }
  if (static_cast<int64_t>(entries_.size()) > kMaxTensors) {
    fail(concat("the file has ", entries_.size(), " tensors"), concat("at most ", kMaxTensors));
  }

  // Tensors must tile the data section, as in the reference implementation.
  std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  int64_t covered = data_begin;
  for (const Entry& entry : entries_) {
    if (entry.begin != covered) {
      fail(concat(quoted(entry.name), " begins at data offset ", entry.begin - data_begin,
                  entry.begin < covered ? ", inside another tensor" : ", after a hole"),
           concat(covered - data_begin, ", where the tensor before it ends"));
    }
    covered = entry.end;
  }
  if (covered != file_.bytes()) {
    fail(concat("the tensors end at data offset ", covered - data_begin),
         concat(data_bytes, ", the end of the file"));
  }
  std::sort(entries_.begin(), entries_.end(),
            [](const Entry& a, const Entry& b) { return a.name < b.name; });
}

std::vector<std::string_view> SafetensorsFile::names() const {
  std::vector<std::string_view> names;
  names.reserve(entries_.size());
  for (const Entry& entry : entries_) names.emplace_back(entry.name);
  return names;
}

std::optional<StoredTensor> SafetensorsFile::find(std::string_view name) const {
  const auto entry =
      std::lower_bound(entries_.begin(), entries_.end(), name,
                       [](const Entry& a, std::string_view wanted) { return a.name < wanted; });
  if (entry == entries_.end() || entry->name != name) return std::nullopt;
  return StoredTensor{entry->dtype, std::span(dims_).subspan(entry->first_dim, entry->rank),
                      entry->begin, entry->end - entry->begin};
}

void SafetensorsFile::read(const StoredTensor& tensor, int64_t first,
                           std::span<std::byte> to) const {
  PACELINE_CHECK(first >= 0 && first + static_cast<int64_t>(to.size()) <= tensor.bytes, "bytes ",
                 first, " + ", to.size(), " of ", tensor.bytes);
  file_.read(tensor.begin + first, to);
}

}  // namespace paceline
