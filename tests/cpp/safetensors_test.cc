// SPDX-License-Identifier: Apache-2.0
// safetensors files. Every hostile one must end in ModelFileError; ASan and UBSan check the way
// there.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <paceline/error.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "model/weights/safetensors_file.h"
#include "support/errors.h"
#include "support/safetensors_writer.h"
#include "support/seed.h"

namespace paceline {
namespace {

using test::bytes_of;
using test::safetensors_bytes;
using test::TemporaryFolder;
using test::write_file;
using test::WrittenTensor;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;

class Safetensors : public ::testing::Test {
 protected:
  // Opens the file and reads every byte that it hands out.
  void read() {
    const SafetensorsFile file(path_);
    unsigned sum = 0;
    for (std::string_view name : file.names()) {
      for (const std::byte byte : content(file, *file.find(name))) {
        sum += static_cast<unsigned>(byte);
      }
    }
    EXPECT_LT(sum, 1u << 31);
  }
  static std::vector<std::byte> content(const SafetensorsFile& file, const StoredTensor& tensor) {
    std::vector<std::byte> bytes(static_cast<size_t>(tensor.bytes));
    file.read(tensor, 0, bytes);
    return bytes;
  }
  std::string error(std::string_view bytes) {
    write_file(path_, bytes);
    return message_of<ModelFileError>([&] { read(); });
  }
  std::string header_error(std::string_view header, std::string_view data = "") {
    return error(safetensors_bytes(header, data));
  }

  TemporaryFolder folder_;
  std::string path_ = folder_.file("m.safetensors");
};

const std::vector<WrittenTensor>& small_tensors() {
  static const std::vector<WrittenTensor> tensors = {
      {"a", "F32", {2, 3}, bytes_of<float>({1, 2, 3, 4, 5, 6})},
      {"b.c", "BF16", {3}, bytes_of<uint16_t>({7, 8, 9})},
      {"scalar", "I64", {}, bytes_of<int64_t>({-5})},
      {"empty", "U8", {0, 4}, ""},
      {"flag", "BOOL", {1}, std::string(1, '\1')},
  };
  return tensors;
}

TEST_F(Safetensors, ReadsAValidFile) {
  for (bool misalign : {false, true}) {
    write_file(path_, safetensors_bytes(small_tensors(), misalign));
    const SafetensorsFile file(path_);
    EXPECT_THAT(file.names(), ElementsAre("a", "b.c", "empty", "flag", "scalar"));
    EXPECT_FALSE(file.find("zz").has_value());
    for (const WrittenTensor& written : small_tensors()) {
      const StoredTensor tensor = file.find(written.name).value();
      EXPECT_EQ(tensor.dtype, written.dtype);
      EXPECT_TRUE(std::ranges::equal(tensor.shape, written.shape));
      ASSERT_EQ(tensor.bytes, static_cast<int64_t>(written.data.size()));
      EXPECT_TRUE(
          std::ranges::equal(content(file, tensor), std::as_bytes(std::span(written.data))));
    }
  }
}

TEST_F(Safetensors, AcceptsEdgesOfTheFormat) {
  EXPECT_EQ(header_error("{}"), "");
  EXPECT_EQ(header_error("{}   "), "");
  EXPECT_EQ(header_error(R"({"__metadata__":{}})"), "");
  EXPECT_EQ(
      header_error(R"({"x":{"dtype":"U8","shape":[1,1,1,1,1,1,1,2],"data_offsets":[0,2]}})", "ab"),
      "");
  // Listed in another order than stored.
  EXPECT_EQ(header_error(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},)"
                         R"("y":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                         "ab"),
            "");
  for (const char* dtype : {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL",
                            "F8_E4M3", "F8_E5M2", "U16", "U32", "U64", "F8_E8M0"}) {
    EXPECT_EQ(header_error(
                  concat(R"({"x":{"dtype":")", dtype, R"(","shape":[0],"data_offsets":[0,0]}})")),
              "")
        << dtype;
  }
}

TEST_F(Safetensors, RefusesHostileHeaders) {
  // Inside {"x":{...}} with 8 bytes of data.
  const std::vector<std::pair<std::string, std::string>> tensor_table = {
      {R"("dtype":"F32","shape":[2])", "x.data_offsets is missing"},
      {R"("dtype":"F32","data_offsets":[0,8])", "x.shape is missing"},
      {R"("shape":[2],"data_offsets":[0,8])", "x.dtype is missing"},
      {R"("dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1)", "x.more is an unknown key"},
      {R"("dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8])", "'dtype' again"},
      {R"("dtype":"F4","shape":[2],"data_offsets":[0,8])", "'F4'; allowed: F64, F32,"},
      {R"("dtype":"f32","shape":[2],"data_offsets":[0,8])", "'f32'; allowed: F64, F32,"},
      {R"("dtype":4,"shape":[2],"data_offsets":[0,8])", "x.dtype is 4; allowed: a string"},
      {R"("dtype":"F32","shape":2,"data_offsets":[0,8])", "x.shape is 2; allowed: a list"},
      {R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])", "x.shape[0] is -2"},
      {R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])", "x.shape[0] is 2.0"},
      {R"("dtype":"F32","shape":["2"],"data_offsets":[0,8])", "x.shape[0] is '2'"},
      {R"("dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,8])", "x.shape[0] is 92"},
      {R"("dtype":"F32","shape":[4611686018427387904,8],"data_offsets":[0,8])", "63 bits"},
      {R"("dtype":"U8","shape":[4611686018427387904,8],"data_offsets":[0,8])", "63 bits"},
      {R"("dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0])", "63 bits"},
      // 2^32 * 2^32 wraps to 0 in 64 bits.
      {R"("dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0])", "63 bits"},
      {R"("dtype":"U8","shape":[1,1,1,1,1,1,1,1,8],"data_offsets":[0,8])", "8 dimensions"},
      {R"("dtype":"F32","shape":[2],"data_offsets":[0])", "x.data_offsets is a list of 1"},
      {R"("dtype":"F32","shape":[2],"data_offsets":[0,8,8])", "x.data_offsets is a list of 3"},
      {R"("dtype":"F32","shape":[2],"data_offsets":8)", "x.data_offsets is 8"},
      {R"("dtype":"F32","shape":[2],"data_offsets":[8,0])", "x.data_offsets[1] is 0"},
      {R"("dtype":"F32","shape":[2],"data_offsets":[-8,0])", "x.data_offsets[0] is -8"},
      {R"("dtype":"F32","shape":[2],"data_offsets":[0,9])",
       "x.data_offsets[1] is 9; allowed: at most 8, where the file ends; it is incomplete"},
      {R"("dtype":"F32","shape":[2],"data_offsets":[16,24])",
       "x.data_offsets[0] is 16; allowed: at most 8, where the file ends; it is incomplete"},
      {R"("dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551616])",
       "x.data_offsets[1] is 18446744073709551616"},
      {R"("dtype":"F32","shape":[1],"data_offsets":[0,8])", "span 8 bytes; allowed: 4"},
      {R"("dtype":"F32","shape":[3],"data_offsets":[0,8])", "span 8 bytes; allowed: 12"},
      {R"("dtype":"F32","shape":[1],"data_offsets":[4,8])", "after a hole"},
      {R"("dtype":"U8","shape":[7],"data_offsets":[1,8])", "begins at data offset 1, after a hole"},
      {R"("dtype":"U8","shape":[7],"data_offsets":[0,7])", "end at data offset 7; allowed: 8"},
      {R"("dtype":"F32","shape":[1],"data_offsets":[0,4])", "end at data offset 4; allowed: 8"},
  };
  for (const auto& [tensor, expected] : tensor_table) {
    const std::string message = header_error(concat("{\"x\":{", tensor, "}}"), "12345678");
    EXPECT_THAT(message, HasSubstr(expected)) << tensor;
    EXPECT_THAT(message, HasSubstr(path_)) << tensor;
  }
  const std::string x = R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  const std::vector<std::pair<std::string, std::string>> table = {
      {"", "begins with ''"},
      {"[]", "begins with '['"},
      {" {}", "begins with ' '"},
      {"{", "invalid JSON"},
      {"{}x", "more text"},
      {"null", "begins with 'n'"},
      {R"({"x":1})", "x is 1; allowed: an object"},
      {R"({"x":[]})", "x is a list of 0; allowed: an object"},
      {R"({"__metadata__":1})", "__metadata__ is 1"},
      {R"({"__metadata__":{"a":1}})", "__metadata__.a is 1; allowed: a string"},
      {concat("{\"x\":", x, ",\"x\":", x, "}"), "the key 'x' again"},
      {concat("{\"x\":", x, ",\"\\u0078\":", x, "}"), "the key 'x' again"},
      {concat("{\"x\":", x, ",\"y\":", x, "}"), "inside another tensor"},
      {concat("{\"x\":", x, R"(,"y":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})"),
       "inside another tensor"},
      // By one byte: an overlap, one tensor inside the other's end, and a hole between them.
      {R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
       R"("y":{"dtype":"U8","shape":[5],"data_offsets":[3,8]}})",
       "'y' begins at data offset 3, inside another tensor; allowed: 4"},
      {R"({"x":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)"
       R"("y":{"dtype":"U8","shape":[1],"data_offsets":[7,8]}})",
       "'y' begins at data offset 7, inside another tensor; allowed: 8"},
      {R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
       R"("y":{"dtype":"U8","shape":[3],"data_offsets":[5,8]}})",
       "'y' begins at data offset 5, after a hole; allowed: 4"},
      {"{\"x\":" + std::string(100, '[') + std::string(100, ']') + "}", "deeper level"},
      {"{\"x\":" + std::string(5'000'000, '['), "deeper level"},
  };
  for (const auto& [header, expected] : table) {
    EXPECT_THAT(header_error(header, "12345678"), HasSubstr(expected)) << header.substr(0, 80);
  }
  EXPECT_THAT(header_error("{}", "x"), HasSubstr("end at data offset 0; allowed: 1"));
}

TEST_F(Safetensors, RefusesWrongLengthsAndPathsThatAreNoFile) {
  EXPECT_THAT(error(""), HasSubstr("0 bytes"));
  EXPECT_THAT(error("1234567"), HasSubstr("7 bytes"));
  const auto with_length = [](uint64_t length, std::string_view rest) {
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &length, 8);
    return bytes.append(rest);
  };
  for (uint64_t length :
       {uint64_t{3}, uint64_t{1} << 31, uint64_t{1} << 63, ~uint64_t{0}, ~uint64_t{0} - 7}) {
    EXPECT_THAT(error(with_length(length, "{}")), HasSubstr("allowed: at most 2")) << length;
  }
  // 100 MB and 1 byte of header, all there (as a hole in the file).
  write_file(path_, with_length(100'000'001, "{"));
  std::filesystem::resize_file(path_, 8 + 100'000'001);
  EXPECT_THAT(message_of<ModelFileError>([&] { SafetensorsFile file(path_); }),
              HasSubstr("the header length is 100000001 in a file of 100000009 bytes; allowed: at "
                        "most 100000000"));

  const auto open_path = [&](const std::string& path, bool is_missing,
                             const std::string& kind = "") {
    try {
      const SafetensorsFile file(path);
      ADD_FAILURE() << path << " was accepted";
    } catch (const ModelFileError& failure) {
      EXPECT_EQ(failure.is_missing(), is_missing) << failure.what();
      EXPECT_THAT(failure.what(), HasSubstr(path + ": " + kind));
    }
  };
  open_path(folder_.file("absent.safetensors"), true);
  open_path(path_ + "/below-a-file", true);
  open_path(folder_.path(), false, "is a directory; allowed: a regular file");
  open_path("/dev/null", false, "is a device");
  const std::string fifo = folder_.file("fifo");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  open_path(fifo, false, "is a FIFO");
  std::filesystem::create_symlink("/dev/zero", folder_.file("zeros"));
  open_path(folder_.file("zeros"), false);
}

TEST_F(Safetensors, AFileThatShrinksIsAnError) {
  const std::string bytes = safetensors_bytes(small_tensors());
  for (size_t length = 0; length < bytes.size(); length += 3) {
    write_file(path_, bytes);
    const SafetensorsFile file(path_);
    std::filesystem::resize_file(path_, length);
    size_t num_errors = 0;
    for (std::string_view name : file.names()) {
      const StoredTensor tensor = *file.find(name);
      const std::string message = message_of<ModelFileError>([&] { (void)content(file, tensor); });
      const bool is_cut =
          tensor.bytes > 0 && tensor.begin + tensor.bytes > static_cast<int64_t>(length);
      EXPECT_EQ(!message.empty(), is_cut) << name << " of a file cut to " << length;
      if (!is_cut) continue;
      ++num_errors;
      EXPECT_THAT(message, HasSubstr(concat(path_, ": byte ",
                                            std::max(tensor.begin, static_cast<int64_t>(length)),
                                            " is missing")));
      EXPECT_THAT(message, HasSubstr(std::to_string(bytes.size()) + " bytes when it was opened"));
    }
    EXPECT_GT(num_errors, 0U);
  }
}

TEST_F(Safetensors, RefusesMoreThanAMillionTensors) {
  std::string header = "{";
  for (int i = 0; i <= 1'000'000; ++i) {
    header +=
        concat(i == 0 ? "" : ",", '"', i, R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})");
  }
  EXPECT_THAT(header_error(header + "}"), HasSubstr("allowed: at most 1000000"));
}

TEST_F(Safetensors, RefusesTruncationAtEveryByte) {
  const std::string bytes = safetensors_bytes(small_tensors());
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_NE(error(std::string_view(bytes).substr(0, length)), "") << length;
  }
  EXPECT_EQ(error(bytes), "");
  EXPECT_NE(error(bytes + "x"), "");
}

TEST_F(Safetensors, SurvivesRandomByteFlips) {
  TRACE_SEED();
  std::mt19937_64 random(testing::base_seed());
  const std::string bytes = safetensors_bytes(small_tensors());
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  constexpr int kFlips = 20'000;
  int refused = 0;
  write_file(path_, bytes);
  std::fstream writer(path_, std::ios::binary | std::ios::in | std::ios::out);
  for (int i = 0; i < kFlips; ++i) {
    std::string mutant = bytes;
    const int num_flips = 1 + static_cast<int>(random() % 3);
    for (int flip = 0; flip < num_flips; ++flip) {
      // Half of them to a character of the JSON syntax.
      constexpr std::string_view kAlphabet = "{}[]\",:0123456789-eE.\\u ";
      char& byte = mutant[random() % (8 + length)];
      byte = random() % 2 == 0 ? static_cast<char>(byte ^ (1 << (random() % 8)))
                               : kAlphabet[random() % kAlphabet.size()];
    }
    // In place, as making a new file each time would take ten times as long.
    ASSERT_TRUE(writer.seekp(0).write(mutant.data(), std::ssize(mutant)).flush());
    refused += !message_of<ModelFileError>([&] { read(); }).empty();  // others fail the test
  }
  std::printf("%d of %d mutants refused\n", refused, kFlips);
  EXPECT_GT(refused, kFlips / 2);  // flips inside names and metadata leave a valid file
}

}  // namespace
}  // namespace paceline
