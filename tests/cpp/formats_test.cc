// SPDX-License-Identifier: Apache-2.0

// The ways in for models: JSON, safetensors, decoder descriptions, the builder and whole folders.
// Every hostile file must end in ModelFileError; run under ASan and UBSan to see that nothing else
// happens on the way.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <paceline/error.h>
#include <paceline/model.h>
#include <sched.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/float_types.h"
#include "base/json.h"
#include "model/decoder_config.h"
#include "model/model_impl.h"
#include "model/safetensors_file.h"
#include "support/safetensors_writer.h"

namespace paceline {
namespace {

using test::safetensors_bytes;
using test::TemporaryFolder;
using test::write_file;
using test::WrittenTensor;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

// The message of the exception that `step` throws; "" when it throws none.
template <class Error, class Step>
std::string message_of(Step step) {
  try {
    step();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

uint64_t seed_from_env() {
  const char* text = std::getenv("PACELINE_TEST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 20260726;
}

template <class Value>
std::string bytes_of(const std::vector<Value>& values) {
  std::string out(values.size() * sizeof(Value), '\0');
  std::memcpy(out.data(), values.data(), out.size());
  return out;
}

// --- JSON --------------------------------------------------------------------------------------

std::string parse_error(std::string_view text, JsonLimits limits = {}) {
  return message_of<InvalidArgument>([&] { JsonDocument(text, "x.json", limits); });
}

TEST(Json, ReadsEveryKindOfValue) {
  const std::string text =
      R"( {"a": [1, -2, 0, 1.5, 1e3, -0, 9223372036854775807, 9223372036854775808],
          "s": "p\"\\\/\b\f\n\r\t\u00e9\ud83d\udeb4é", "t": true, "f": false, "n": null,
          "o": {}, "l": [ ], "": {"k": [[]]}} )";
  const JsonDocument document(text, "x.json");
  const Json root = document.root();
  EXPECT_EQ(root.size(), 8);
  std::vector<double> numbers;
  for (const Json& number : root.at("a").elements()) numbers.push_back(number.as_double());
  EXPECT_THAT(numbers, ElementsAre(1, -2, 0, 1.5, 1000, 0, 0x1p63, 0x1p63));
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  std::vector<int64_t> integers;
  for (const Json& number : root.at("a").elements()) {
    if (message_of<InvalidArgument>([&] { (void)number.as_int(kMin, kMax); }).empty()) {
      integers.push_back(number.as_int(kMin, kMax));
    }
  }
  EXPECT_THAT(integers, ElementsAre(1, -2, 0, 0, kMax));
  EXPECT_EQ(root.at("s").as_string(), "p\"\\/\b\f\n\r\té🚴é");
  EXPECT_TRUE(root.at("t").as_bool());
  EXPECT_FALSE(root.at("f").as_bool());
  EXPECT_EQ(root.at("n").kind(), JsonKind::kNull);
  EXPECT_EQ(root.at("o").size(), 0);
  EXPECT_EQ(root.at("l").size(), 0);
  EXPECT_FALSE(root.find("zz").has_value());
  EXPECT_EQ(root.at("").at("k").text(), "[[]]");
  EXPECT_EQ(root.at("").text(), R"({"k": [[]]})");
  EXPECT_EQ(root.at("s").text(), R"("p\"\\\/\b\f\n\r\t\u00e9\ud83d\udeb4é")");
  EXPECT_EQ(root.at("f").text(), "false");
  std::string keys;
  for (const auto& [key, value] : root.members()) keys += concat(key, ";");
  EXPECT_EQ(keys, "a;s;t;f;n;o;l;;");
}

TEST(Json, AcceptsWhatTheGrammarAllows) {
  const std::string deepest = std::string(64, '[') + std::string(64, ']');
  for (std::string_view text :
       {"0", "-0.0", "\"\"", "null", "[]", "\t\r\n {} \n", "1E+2", "1e-2", "\"\\u0000\"",
        "\"\\uD834\\uDD1E\"", "\"\x7f\"", "[1,[2,{\"a\":3}]]", "{\"a\":1,\"A\":1}",
        "\"\xf4\x8f\xbf\xbf\"", "\"\xed\x9f\xbf\"", "\"\xef\xbf\xbf\"", deepest.c_str()}) {
    EXPECT_EQ(parse_error(text), "") << text;
  }
}

TEST(Json, RefusesEverythingElse) {
  const std::string too_deep = std::string(65, '[') + std::string(65, ']');
  const std::string very_deep(1 << 20, '[');
  const std::string very_deep_objects = [] {
    std::string out;
    for (int i = 0; i < 100'000; ++i) out += "{\"a\":";
    return out;
  }();
  const std::vector<std::pair<std::string, std::string>> table = {
      {"", "byte 0"},
      {"  ", "byte 2"},
      {"{", "double quotes"},
      {"[", "byte 1"},
      {"[1", "',' or ']'"},
      {"[1,]", "byte 3"},
      {"[,1]", "byte 1"},
      {"[1 2]", "byte 3"},
      {"{\"a\"}", "':'"},
      {"{\"a\":}", "byte 5"},
      {"{\"a\":1,}", "double quotes"},
      {"{a:1}", "double quotes"},
      {"{1:1}", "double quotes"},
      {"{\"a\":1 \"b\":2}", "',' or '}'"},
      {"[1}", "',' or ']'"},
      {"1 1", "more text"},
      {"{}{}", "more text"},
      {"nul", "JSON value"},
      {"True", "JSON value"},
      {"tru", "JSON value"},
      {"NaN", "JSON value"},
      {"Infinity", "JSON value"},
      {"-Infinity", "digit"},
      {"+1", "JSON value"},
      {"-", "digit"},
      {"01", "more text"},
      {"-01", "more text"},
      {"1.", "digit"},
      {".5", "JSON value"},
      {"1e", "digit"},
      {"1e+", "digit"},
      {"0x10", "more text"},
      {"1e999", "double"},
      {"-1e999", "double"},
      {std::string(400, '9'), "double"},
      {"\"", "end of a string"},
      {"\"a", "end of a string"},
      {"\"\\", "after a backslash"},
      {"\"\\x\"", "after a backslash"},
      {"\"\\u12\"", "four hexadecimal"},
      {"\"\\u12g4\"", "four hexadecimal"},
      {"\"\\u+123\"", "four hexadecimal"},
      {"\"\\ud800\"", "surrogate"},
      {"\"\\ud800\\ud800\"", "surrogate"},
      {"\"\\udc00\"", "surrogate"},
      {"\"\n\"", "control character"},
      {std::string("\"\0\"", 3), "control character"},
      {"\"\x80\"", "UTF-8"},
      {"\"\xc0\xaf\"", "UTF-8"},
      {"\"\xe0\x80\x80\"", "UTF-8"},
      {"\"\xed\xa0\x80\"", "UTF-8"},
      {"\"\xf0\x80\x80\x80\"", "UTF-8"},
      {"\"\xf4\x90\x80\x80\"", "UTF-8"},
      {"\"\xff\"", "UTF-8"},
      {"\"\xe2\x82", "UTF-8"},
      {"\xef\xbb\xbf{}", "JSON value"},  // a byte order mark
      {"// note\n1", "JSON value"},
      {"'a'", "JSON value"},
      {too_deep, "byte 64: a deeper level; allowed: at most 64"},
      {very_deep, "deeper"},
      {very_deep_objects, "deeper"},
      {"{\"a\":1,\"b\":2,\"a\":3}", "byte 13: the key 'a' again"},
      {"{\"a\":1,\"\\u0061\":2}", "byte 7: the key 'a' again"},
      {"[{\"\":1,\"\":2}]", "byte 7: the key '' again"},
  };
  for (const auto& [text, expected] : table) {
    const std::string error = parse_error(text);
    EXPECT_THAT(error, HasSubstr(expected)) << text.substr(0, 40);
    EXPECT_THAT(error, HasSubstr("x.json: ")) << text.substr(0, 40);
    EXPECT_LT(error.size(), 400u);
  }
  EXPECT_THAT(parse_error("[1,2,3]", {.max_values = 3}), HasSubstr("more than 3"));
  EXPECT_THAT(parse_error("[1,2,3]", {.max_bytes = 6}), HasSubstr("7 bytes of JSON"));
}

TEST(Json, MessagesNamePathSeenAndAllowed) {
  const std::string text =
      R"({"layers": [{"a": 1}, {"a": {"b.c": "no", "w": 70000, "h": 1.0, "l": [1, 2]}}]})";
  const JsonDocument document(text, "x.json");
  const Json layers = document.root().at("layers");
  const Json a = (*++layers.elements().begin()).at("a");
  EXPECT_EQ(message_of<InvalidArgument>([&] { (void)a.at("w").as_int(1, 9); }),
            "x.json: layers[1].a.w is 70000; allowed: an integer from 1 to 9");
  EXPECT_EQ(message_of<InvalidArgument>([&] { (void)a.at("b.c").as_bool(); }),
            "x.json: layers[1].a['b.c'] is 'no'; allowed: true or false");
  EXPECT_THAT(message_of<InvalidArgument>([&] { (void)a.at("h").as_int(0, 9); }),
              HasSubstr("layers[1].a.h is 1.0; allowed: an integer"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { (void)a.at("l").as_string(); }),
              HasSubstr("is a list of 2; allowed: a string"));
  EXPECT_EQ(message_of<InvalidArgument>([&] { (void)a.at("z"); }),
            "x.json: layers[1].a.z is missing");
  EXPECT_THAT(message_of<InvalidArgument>([&] { (void)document.root().as_double(); }),
              HasSubstr("the top level is an object of 1 keys"));
  constexpr std::array<std::string_view, 2> kKeys = {"w", "h"};
  EXPECT_EQ(message_of<InvalidArgument>([&] { a.check_keys(kKeys); }),
            "x.json: layers[1].a['b.c'] is an unknown key; allowed: w, h");
  EXPECT_EQ(quoted("a\nb\xff\xc3\xa9"), "'a\\x0ab\\xff\xc3\xa9'");
  EXPECT_EQ(quoted("abc\xc3\xa9", 4), "'abc...'");  // never half a character
}

TEST(Json, TakesTimeInProportionToTheText) {
  // A million keys with a long common prefix, and as many values in one list.
  std::string text = "{";
  for (int i = 0; i < 300'000; ++i) text += concat("\"some.long.common.prefix.", i, "\":[],");
  text += "\"l\":[0";
  for (int i = 0; i < 1'000'000; ++i) text += ",0";
  text += "]}";
  const JsonDocument document(text, "x.json");
  EXPECT_EQ(document.root().size(), 300'001);
}

// --- safetensors -------------------------------------------------------------------------------

class Safetensors : public ::testing::Test {
 protected:
  // Opens the file and reads every byte that it hands out.
  void read() {
    const SafetensorsFile file(path_);
    unsigned sum = 0;
    for (std::string_view name : file.names()) {
      const StoredTensor tensor = *file.find(name);
      for (int64_t i = 0; i < tensor.bytes; ++i) sum += static_cast<unsigned>(tensor.data[i]);
    }
    EXPECT_LT(sum, 1u << 31);
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
      EXPECT_EQ(std::memcmp(tensor.data, written.data.data(), written.data.size()), 0);
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
      {R"("dtype":"F32","shape":[2],"data_offsets":[0,9])", "x.data_offsets[1] is 9"},
      {R"("dtype":"F32","shape":[2],"data_offsets":[16,24])", "x.data_offsets[0] is 16"},
      {R"("dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551616])",
       "x.data_offsets[1] is 18446744073709551616"},
      {R"("dtype":"F32","shape":[1],"data_offsets":[0,8])", "span 8 bytes; allowed: 4"},
      {R"("dtype":"F32","shape":[3],"data_offsets":[0,8])", "span 8 bytes; allowed: 12"},
      {R"("dtype":"F32","shape":[1],"data_offsets":[4,8])", "after a hole"},
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
      {"{\"x\":" + std::string(100, '[') + std::string(100, ']') + "}", "deeper level"},
      {"{\"x\":" + std::string(5'000'000, '['), "deeper level"},
  };
  for (const auto& [header, expected] : table) {
    EXPECT_THAT(header_error(header, "12345678"), HasSubstr(expected)) << header.substr(0, 80);
  }
  EXPECT_THAT(header_error("{}", "x"), HasSubstr("end at data offset 0; allowed: 1"));
}

TEST_F(Safetensors, RefusesLyingLengthsAndThingsThatAreNoFile) {
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

  const auto open_path = [&](const std::string& path, bool is_missing) {
    try {
      const SafetensorsFile file(path);
      ADD_FAILURE() << path << " was accepted";
    } catch (const ModelFileError& failure) {
      EXPECT_EQ(failure.is_missing(), is_missing) << failure.what();
      EXPECT_THAT(failure.what(), HasSubstr(path));
    }
  };
  open_path(folder_.file("absent.safetensors"), true);
  open_path(path_ + "/below-a-file", true);
  open_path(folder_.path(), false);
  open_path("/dev/null", false);
  const std::string fifo = folder_.file("fifo");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  open_path(fifo, false);
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
  const uint64_t seed = seed_from_env();
  SCOPED_TRACE(concat("PACELINE_TEST_SEED=", seed));
  std::mt19937_64 random(seed);
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
      // Half of them to a character that means something.
      constexpr std::string_view kAlphabet = "{}[]\",:0123456789-eE.\\u ";
      char& byte = mutant[random() % (8 + length)];
      byte = random() % 2 == 0 ? static_cast<char>(byte ^ (1 << (random() % 8)))
                               : kAlphabet[random() % kAlphabet.size()];
    }
    // In place, as making a new file each time would take ten times as long.
    ASSERT_TRUE(writer.seekp(0).write(mutant.data(), std::ssize(mutant)).flush());
    refused += !message_of<ModelFileError>([&] { read(); }).empty();  // others fail the test
  }
  std::printf("[ seed     ] %llu: %d of %d mutants refused\n",
              static_cast<unsigned long long>(seed), refused, kFlips);
  EXPECT_GT(refused, kFlips / 2);  // flips inside names and metadata leave a valid file
}

// --- Decoder descriptions ----------------------------------------------------------------------

// A description with everything optional in layer 1 and nothing in layer 0. Edits replace the first
// occurrence of a text, and must find it.
struct Edit {
  std::string from;
  std::string to;
};
std::string tiny_config(const std::vector<Edit>& edits = {}) {
  std::string json = R"({
    "format": "paceline-decoder-1", "name": "tiny", "vocab_size": 5, "hidden_size": 6,
    "max_position": 128, "norm_eps": 1e-6, "norm_weight_offset": 1, "embed_scale": 2.5,
    "logit_soft_cap": 30.0, "ties_lm_head": false, "has_post_norms": true,
    "ropes": [{"inv_freq": [1, 0.5], "scale": 1.0}, {"inv_freq": [0.25], "scale": 1.5}],
    "layers": [
      {"attention": {"kind": "full", "window": 0, "num_qo_heads": 4, "num_kv_heads": 2,
         "head_dim": 4, "scale": 0.5, "soft_cap": 0, "rope": 0, "has_qk_norm": false,
         "has_qkv_bias": false, "has_o_bias": false},
       "mlp": {"intermediate": 7, "activation": "silu", "has_bias": false}},
      {"attention": {"kind": "sliding", "window": 9, "num_qo_heads": 3, "num_kv_heads": 1,
         "head_dim": 2, "scale": 0.25, "soft_cap": 50, "rope": 1, "has_qk_norm": true,
         "has_qkv_bias": true, "has_o_bias": true},
       "mlp": {"intermediate": 3, "activation": "gelu_tanh", "has_bias": true}}]})";
  for (const Edit& edit : edits) {
    const size_t at = json.find(edit.from);
    if (at == std::string::npos) throw std::logic_error("no " + edit.from);
    json.replace(at, edit.from.size(), edit.to);
  }
  return json;
}

TEST(DecoderConfig, ReadsEveryKey) {
  const DecoderConfig config = parse_decoder_config(tiny_config());
  EXPECT_EQ(config.name, "tiny");
  EXPECT_EQ(config.vocab_size, 5);
  EXPECT_EQ(config.hidden, 6);
  EXPECT_EQ(config.max_position, 128);
  EXPECT_EQ(config.norm_eps, 1e-6f);
  EXPECT_EQ(config.norm_weight_offset, 1);
  EXPECT_EQ(config.embed_scale, 2.5f);
  EXPECT_EQ(config.logit_soft_cap, 30);
  EXPECT_FALSE(config.ties_lm_head);
  EXPECT_TRUE(config.has_post_norms);
  ASSERT_THAT(config.ropes, SizeIs(2));
  EXPECT_THAT(config.ropes[0].inv_freq, ElementsAre(1, 0.5f));
  EXPECT_EQ(config.ropes[1].scale, 1.5f);
  ASSERT_THAT(config.layers, SizeIs(2));
  const AttentionConfig& full = config.layers[0].attention;
  EXPECT_EQ(full.kind, KvKind::kFull);
  EXPECT_EQ(full.window, 0);
  EXPECT_EQ(full.num_qo_heads, 4);
  EXPECT_FALSE(full.has_qk_norm || full.has_qkv_bias || full.has_o_bias);
  const AttentionConfig& sliding = config.layers[1].attention;
  EXPECT_EQ(sliding.kind, KvKind::kSliding);
  EXPECT_EQ(sliding.window, 9);
  EXPECT_EQ(sliding.num_kv_heads, 1);
  EXPECT_EQ(sliding.head_dim, 2);
  EXPECT_EQ(sliding.scale, 0.25f);
  EXPECT_EQ(sliding.soft_cap, 50);
  EXPECT_EQ(sliding.rope, 1);
  EXPECT_TRUE(sliding.has_qk_norm && sliding.has_qkv_bias && sliding.has_o_bias);
  EXPECT_EQ(config.layers[0].mlp.activation, Activation::kSilu);
  EXPECT_EQ(config.layers[1].mlp.activation, Activation::kGeluTanh);
  EXPECT_EQ(config.layers[1].mlp.intermediate, 3);
  EXPECT_TRUE(config.layers[1].mlp.has_bias);
}

// tiny_config with what only Gemma 4 has: layer 0 without a v projection, and a third layer that
// reads the KV of the second.
std::string shared_config(const std::vector<Edit>& edits = {}) {
  std::vector<Edit> all = {
      {"\"ropes\": [",
       "\"has_layer_scale\": true, \"per_layer_inputs\": {\"size\": 4, \"vocab_size\": 9, "
       "\"embed_scale\": 2, \"proj_scale\": 0.5, \"scale\": 0.75, \"activation\": "
       "\"gelu_tanh\"}, \"ropes\": ["},
      {"\"has_o_bias\": false}", "\"has_o_bias\": false, \"has_v_norm\": true, \"k_eq_v\": true}"},
      {"\"has_bias\": true}}]}",
       "\"has_bias\": true}}, {\"attention\": {\"kind\": \"sliding\", \"window\": 9, "
       "\"num_qo_heads\": 2, \"num_kv_heads\": 1, \"head_dim\": 2, \"scale\": 0.25, \"soft_cap\": "
       "0, "
       "\"rope\": 1, \"has_qk_norm\": true, \"has_qkv_bias\": true, \"has_o_bias\": false, "
       "\"kv_source\": 1}, \"mlp\": {\"intermediate\": 3, \"activation\": \"silu\", "
       "\"has_bias\": false}}]}"}};
  all.insert(all.end(), edits.begin(), edits.end());
  return tiny_config(all);
}

TEST(DecoderConfig, ReadsOptionalKeys) {
  const DecoderConfig plain = parse_decoder_config(tiny_config());
  EXPECT_FALSE(plain.has_layer_scale);
  EXPECT_EQ(plain.per_layer_inputs.size, 0);
  EXPECT_EQ(plain.layers[0].attention.kv_source, -1);
  EXPECT_EQ(kv_inputs(plain.layers[0].attention), KvInputs::kKeysAndValues);
  EXPECT_EQ(qkv_rows(plain.layers[0].attention), 32);

  const DecoderConfig config = parse_decoder_config(shared_config());
  EXPECT_TRUE(config.has_layer_scale);
  EXPECT_EQ(config.per_layer_inputs.size, 4);
  EXPECT_EQ(config.per_layer_inputs.vocab_size, 9);
  EXPECT_EQ(config.per_layer_inputs.embed_scale, 2);
  EXPECT_EQ(config.per_layer_inputs.proj_scale, 0.5f);
  EXPECT_EQ(config.per_layer_inputs.scale, 0.75f);
  EXPECT_EQ(config.per_layer_inputs.activation, Activation::kGeluTanh);
  ASSERT_THAT(config.layers, SizeIs(3));
  const AttentionConfig& full = config.layers[0].attention;
  EXPECT_TRUE(full.has_v_norm && full.k_eq_v);
  EXPECT_EQ(kv_inputs(full), KvInputs::kKeys);
  EXPECT_EQ(qkv_rows(full), 24);
  const AttentionConfig& reader = config.layers[2].attention;
  EXPECT_EQ(reader.kv_source, 1);
  EXPECT_EQ(kv_inputs(reader), KvInputs::kNone);
  EXPECT_EQ(qkv_rows(reader), 4);
}

TEST(DecoderConfig, RefusesReadersAndInputsThatCannotBe) {
  const std::vector<std::pair<Edit, std::string>> table = {
      {{"\"kv_source\": 1", "\"kv_source\": 2"},
       "layers[2].attention.kv_source is 2; allowed: an integer from 0 to 1"},
      {{"\"kv_source\": 1", "\"kv_source\": 0"},
       "kv_source is 0; allowed: a layer of the same kind"},
      {{"\"kv_source\": 1", "\"kv_source\": 1, \"k_eq_v\": true"},
       "layers[2].attention.k_eq_v is true; allowed: false where there is a kv_source"},
      {{"\"k_eq_v\": true", "\"kv_source\": 0"},
       "layers[0].attention.kv_source is 0; allowed: no such key in the first layer"},
      {{"\"k_eq_v\": true", "\"k_eq_v\": 1"}, "layers[0].attention.k_eq_v is 1"},
      {{"\"size\": 4", "\"size\": 0"}, "per_layer_inputs.size is 0"},
      {{"\"size\": 4, ", ""}, "per_layer_inputs.size is missing"},
      {{"\"proj_scale\": 0.5", "\"proj_scale\": -1"}, "per_layer_inputs.proj_scale is -1"},
      {{"\"embed_scale\": 2,", "\"embed_scale\": 2, \"x\": 1,"},
       "per_layer_inputs.x is an unknown"},
  };
  for (const auto& [edit, expected] : table) {
    const std::string message =
        message_of<InvalidArgument>([&] { (void)parse_decoder_config(shared_config({edit})); });
    EXPECT_THAT(message, HasSubstr(expected)) << edit.from << " -> " << edit.to;
  }
}

TEST(ModelBuilder, AsksOnlyForWhatALayerHas) {
  ModelBuilder builder(shared_config(), DType::kFloat32);
  const std::vector<std::string> names = builder.missing();
  const auto has = [&](const char* name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  EXPECT_TRUE(has("layers.0.attn.k.weight") && !has("layers.0.attn.v.weight"));
  EXPECT_TRUE(has("layers.2.attn.q.weight") && has("layers.2.attn.q.bias"));
  for (const char* absent : {"layers.2.attn.k.weight", "layers.2.attn.v.weight",
                             "layers.2.attn.k.bias", "layers.2.attn.k_norm.weight"}) {
    EXPECT_FALSE(has(absent)) << absent;
  }
  EXPECT_TRUE(has("layers.2.attn.q_norm.weight"));
  for (const char* present :
       {"per_layer.embed.weight", "per_layer.proj.weight", "per_layer.norm.weight",
        "layers.1.per_layer.gate.weight", "layers.1.per_layer.proj.weight",
        "layers.1.per_layer.norm.weight", "layers.1.scale"}) {
    EXPECT_TRUE(has(present)) << present;
  }
  const std::vector<float> table(9 * 12, 1.0f);
  builder.put("per_layer.embed.weight", DType::kFloat32, std::vector<int64_t>{9, 12}, {},
              table.data());
  builder.fill_dummy(1);
  const auto model = builder.finish();
  EXPECT_EQ(*model->weights.layers[2].scale, 1.0f);  // neutral
  EXPECT_EQ(model->weights.layers[2].k_norm, nullptr);
  EXPECT_EQ(model->weights.layers[2].per_layer_norm[0], 0.0f);  // neutral where norms add 1
}

TEST(DecoderConfig, RefusesWhatIsOutOfRange) {
  const std::string many_layers = [] {
    std::string layer = tiny_config();
    layer = layer.substr(layer.find("{\"attention\""));
    layer = layer.substr(0, layer.find("}},") + 2);
    std::string list;
    for (int i = 0; i < 4096; ++i) list += layer + ",";
    return list;
  }();
  const std::vector<std::pair<Edit, std::string>> table = {
      {{"paceline-decoder-1", "paceline-decoder-2"}, "format is 'paceline-decoder-2'"},
      {{"\"tiny\"", "\"\""}, "name is ''"},
      {{"\"tiny\"", "7"}, "name is 7; allowed: a string"},
      {{"\"vocab_size\": 5,", ""}, "vocab_size is missing"},
      {{"\"vocab_size\": 5", "\"vocab_size\": 0"}, "vocab_size is 0; allowed: an integer from 1"},
      {{"\"vocab_size\": 5", "\"vocab_size\": 4294967297"}, "vocab_size is 4294967297"},
      {{"\"vocab_size\": 5", "\"vocab_size\": 5.0"}, "vocab_size is 5.0"},
      {{"\"vocab_size\"", "\"vocab\""}, "vocab is an unknown key; allowed: format, name,"},
      {{"\"hidden_size\": 6", "\"hidden_size\": 1048577"}, "hidden_size is 1048577"},
      {{"\"hidden_size\": 6", "\"hidden_size\": -1"}, "hidden_size is -1"},
      {{"128", "1073741825"}, "max_position is 1073741825"},
      {{"1e-6", "0"}, "norm_eps is 0; allowed: a number above 0"},
      {{"1e-6", "1e-60"}, "norm_eps is 1e-60"},
      {{"1e-6", "1e39"}, "norm_eps is 1e39"},
      {{"1e-6", "\"1e-6\""}, "norm_eps is '1e-6'; allowed: a number"},
      {{"\"norm_weight_offset\": 1", "\"norm_weight_offset\": 0.5"}, "norm_weight_offset is 0.5"},
      {{"2.5", "1e300"}, "embed_scale is 1e300"},
      {{"30.0", "-1"}, "logit_soft_cap is -1"},
      {{"\"ties_lm_head\": false", "\"ties_lm_head\": 0"}, "ties_lm_head is 0; allowed: true or"},
      {{"[1, 0.5]", "[1, 0.5, 1]"}, "layers[0].attention.rope is 0; allowed: a rope with 2"},
      {{"[1, 0.5]", "[]"}, "ropes[0].inv_freq is a list of 0"},
      {{"[1, 0.5]", "[1, 1e30]"}, "ropes[0].inv_freq[1] is 1e30"},
      {{"[1, 0.5]", "[1, -1]"}, "ropes[0].inv_freq[1] is -1"},
      {{"\"scale\": 1.0}", "\"scale\": 0}"}, "ropes[0].scale is 0"},
      {{"\"scale\": 1.0}", "\"scale\": 1.0, \"x\": 1}"}, "ropes[0].x is an unknown key"},
      {{"\"full\"", "\"linear\""}, "layers[0].attention.kind is 'linear'; allowed: 'full', 's"},
      {{"\"window\": 0", "\"window\": 4"}, "layers[0].attention.window is 4; allowed: 0"},
      {{"\"window\": 9", "\"window\": 0"}, "layers[1].attention.window is 0; allowed: an integer"},
      {{"\"num_qo_heads\": 4", "\"num_qo_heads\": 5"}, "num_kv_heads is 2; allowed: divisors"},
      {{"\"num_kv_heads\": 2", "\"num_kv_heads\": 0"}, "layers[0].attention.num_kv_heads is 0"},
      {{"\"num_kv_heads\": 2", "\"num_kv_heads\": 8"}, "layers[0].attention.num_kv_heads is 8"},
      {{"\"head_dim\": 4", "\"head_dim\": 3"}, "head_dim is 3; allowed: an even number"},
      {{"\"head_dim\": 4", "\"head_dim\": 8"}, "rope is 0; allowed: a rope with 4"},
      {{"\"scale\": 0.5", "\"scale\": -0.5"}, "layers[0].attention.scale is -0.5"},
      {{"\"soft_cap\": 50", "\"soft_cap\": -50"}, "layers[1].attention.soft_cap is -50"},
      {{"\"rope\": 1", "\"rope\": 2"}, "layers[1].attention.rope is 2; allowed: an integer from"},
      {{"\"rope\": 1", "\"rope\": -1"}, "layers[1].attention.rope is -1"},
      {{"\"has_qk_norm\": true", "\"has_qk_norm\": null"}, "has_qk_norm is null"},
      {{"\"silu\"", "\"relu\""}, "layers[0].mlp.activation is 'relu'; allowed: 'silu'"},
      {{"\"intermediate\": 3", "\"intermediate\": 0"}, "layers[1].mlp.intermediate is 0"},
      {{"\"layers\": [", "\"layers\": [" + many_layers}, "layers is a list of 4098"},
      {{"\"layers\": [", "\"layers\": [], \"extra\": ["}, "extra is an unknown key"},
  };
  for (const auto& [edit, expected] : table) {
    const std::string message =
        message_of<InvalidArgument>([&] { (void)parse_decoder_config(tiny_config({edit})); });
    EXPECT_THAT(message, HasSubstr(expected)) << edit.from << " -> " << edit.to.substr(0, 40);
    EXPECT_THAT(message, HasSubstr("decoder config: "));
  }
  for (std::string_view text : {"", "[]", "{}", "{\"layers\": []}"}) {
    EXPECT_THROW((void)parse_decoder_config(text), InvalidArgument) << text;
  }
}

TEST(DecoderConfig, RefusesWeightsThatOverflowBytes) {
  const std::string config = tiny_config();
  const size_t begin = config.find("{\"attention\"");
  std::string layer = config.substr(begin, config.find("}},", begin) + 2 - begin);
  const auto edit = [&](std::string_view from, std::string_view to) {
    layer.replace(layer.find(from), from.size(), to);
  };
  edit("\"num_qo_heads\": 4", "\"num_qo_heads\": 4096");
  edit("\"num_kv_heads\": 2", "\"num_kv_heads\": 4096");
  edit("\"head_dim\": 4", "\"head_dim\": 4096");
  edit("\"intermediate\": 7", "\"intermediate\": 16777216");
  std::string frequencies = "1";
  for (int i = 1; i < 2048; ++i) frequencies += ",1";
  std::string layers = layer;
  for (int i = 1; i < 4096; ++i) layers += "," + layer;
  std::string json = config.substr(0, config.find("\"ropes\"")) + "\"ropes\": [{\"inv_freq\": [" +
                     frequencies + "], \"scale\": 1}], \"layers\": [" + layers + "]}";
  json.replace(json.find("\"hidden_size\": 6"), 16, "\"hidden_size\": 1048576");
  EXPECT_THAT(message_of<InvalidArgument>([&] { (void)parse_decoder_config(json); }),
              HasSubstr("the weights take more than"));
}

// --- Builder -----------------------------------------------------------------------------------

// Every tensor of tiny_config by the table of docs/model-format.md, written out by hand.
const std::map<std::string, std::vector<int64_t>>& tiny_shapes() {
  static const std::map<std::string, std::vector<int64_t>> shapes = {
      {"embed.weight", {5, 6}},
      {"lm_head.weight", {5, 6}},
      {"final_norm.weight", {6}},
      {"layers.0.attn_norm.weight", {6}},
      {"layers.0.attn_post_norm.weight", {6}},
      {"layers.0.attn.q.weight", {16, 6}},
      {"layers.0.attn.k.weight", {8, 6}},
      {"layers.0.attn.v.weight", {8, 6}},
      {"layers.0.attn.o.weight", {6, 16}},
      {"layers.0.mlp_norm.weight", {6}},
      {"layers.0.mlp_post_norm.weight", {6}},
      {"layers.0.mlp.gate.weight", {7, 6}},
      {"layers.0.mlp.up.weight", {7, 6}},
      {"layers.0.mlp.down.weight", {6, 7}},
      {"layers.1.attn_norm.weight", {6}},
      {"layers.1.attn_post_norm.weight", {6}},
      {"layers.1.attn.q.weight", {6, 6}},
      {"layers.1.attn.q.bias", {6}},
      {"layers.1.attn.k.weight", {2, 6}},
      {"layers.1.attn.k.bias", {2}},
      {"layers.1.attn.v.weight", {2, 6}},
      {"layers.1.attn.v.bias", {2}},
      {"layers.1.attn.o.weight", {6, 6}},
      {"layers.1.attn.o.bias", {6}},
      {"layers.1.attn.q_norm.weight", {2}},
      {"layers.1.attn.k_norm.weight", {2}},
      {"layers.1.mlp_norm.weight", {6}},
      {"layers.1.mlp_post_norm.weight", {6}},
      {"layers.1.mlp.gate.weight", {3, 6}},
      {"layers.1.mlp.gate.bias", {3}},
      {"layers.1.mlp.up.weight", {3, 6}},
      {"layers.1.mlp.up.bias", {3}},
      {"layers.1.mlp.down.weight", {6, 3}},
      {"layers.1.mlp.down.bias", {6}},
  };
  return shapes;
}

int64_t product(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// Distinct values that bfloat16 and float16 hold exactly: quarters up to 64 are 8 bits long.
std::map<std::string, std::vector<float>> tiny_values() {
  std::map<std::string, std::vector<float>> values;
  int which = 0;
  for (const auto& [name, shape] : tiny_shapes()) {
    std::vector<float>& tensor = values[name];
    for (int64_t i = 0; i < product(shape); ++i) {
      tensor.push_back(static_cast<float>((i * 7 + which * 31) % 255 - 127) / 4);
    }
    ++which;
  }
  return values;
}

uint16_t float_to_fp16_exact(float value) {  // for values that float16 holds as a normal number
  const auto bits = std::bit_cast<uint32_t>(value);
  if (value == 0) return static_cast<uint16_t>(bits >> 16);
  return static_cast<uint16_t>(((bits >> 16) & 0x8000u) |
                               ((((bits & 0x7fffffffu) >> 13) - (112u << 10)) & 0x7fffu));
}

std::string encode(const std::vector<float>& values, DType dtype) {
  if (dtype == DType::kFloat32) return bytes_of(values);
  std::vector<uint16_t> halves;
  for (float value : values) {
    halves.push_back(dtype == DType::kBFloat16 ? float_to_bf16(value) : float_to_fp16_exact(value));
  }
  return bytes_of(halves);
}

std::shared_ptr<const Model> build_tiny(DType stored, DType weights) {
  ModelBuilder builder(tiny_config(), weights);
  for (const auto& [name, values] : tiny_values()) {
    builder.put(name, stored, tiny_shapes().at(name), {}, encode(values, stored).data());
  }
  return builder.finish();
}

// Compares a matrix of the model with the tensors whose rows it holds.
void expect_rows(const std::byte* weight, DType dtype, const std::vector<std::string>& names) {
  ASSERT_NE(weight, nullptr);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(weight) % 64, 0u);
  std::string expected;
  for (const std::string& name : names) expected += encode(tiny_values().at(name), dtype);
  EXPECT_EQ(std::string_view(reinterpret_cast<const char*>(weight), expected.size()), expected)
      << names[0];
}
void expect_vector(const float* weight, const std::vector<std::string>& names) {
  expect_rows(reinterpret_cast<const std::byte*>(weight), DType::kFloat32, names);
}

TEST(ModelBuilder, PlacesEveryTensorForEveryPairOfDtypes) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (DType stored : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      if (dtype == DType::kBFloat16 && stored == DType::kFloat16) continue;
      SCOPED_TRACE(concat(dtype_name(stored), " to ", dtype_name(dtype)));
      const std::shared_ptr<const Model> model = build_tiny(stored, dtype);
      const DecoderWeights& weights = model->weights;
      EXPECT_EQ(model_weight_dtype(*model), dtype);
      EXPECT_EQ(model_vocab_size(*model), 5);
      EXPECT_EQ(model_max_position(*model), 128);
      EXPECT_EQ(model_weight_bytes(*model),
                static_cast<int64_t>(model_weight_arena(*model).size()));
      expect_rows(weights.embed, dtype, {"embed.weight"});
      expect_rows(weights.lm_head, dtype, {"lm_head.weight"});
      expect_vector(weights.final_norm, {"final_norm.weight"});
      for (int i : {0, 1}) {
        const LayerWeights& layer = weights.layers[i];
        const auto name = [&](const char* rest) { return concat("layers.", i, ".", rest); };
        expect_vector(layer.attn_norm, {name("attn_norm.weight")});
        expect_rows(layer.qkv, dtype,
                    {name("attn.q.weight"), name("attn.k.weight"), name("attn.v.weight")});
        expect_rows(layer.o, dtype, {name("attn.o.weight")});
        expect_vector(layer.attn_post_norm, {name("attn_post_norm.weight")});
        expect_vector(layer.mlp_norm, {name("mlp_norm.weight")});
        expect_rows(layer.gate_up, dtype, {name("mlp.gate.weight"), name("mlp.up.weight")});
        expect_rows(layer.down, dtype, {name("mlp.down.weight")});
        expect_vector(layer.mlp_post_norm, {name("mlp_post_norm.weight")});
        if (i == 0) {
          for (const float* absent : {layer.qkv_bias, layer.q_norm, layer.k_norm, layer.o_bias,
                                      layer.gate_up_bias, layer.down_bias}) {
            EXPECT_EQ(absent, nullptr);
          }
        } else {
          expect_vector(layer.qkv_bias,
                        {name("attn.q.bias"), name("attn.k.bias"), name("attn.v.bias")});
          expect_vector(layer.q_norm, {name("attn.q_norm.weight")});
          expect_vector(layer.k_norm, {name("attn.k_norm.weight")});
          expect_vector(layer.o_bias, {name("attn.o.bias")});
          expect_vector(layer.gate_up_bias, {name("mlp.gate.bias"), name("mlp.up.bias")});
          expect_vector(layer.down_bias, {name("mlp.down.bias")});
        }
      }
    }
  }
}

TEST(ModelBuilder, TiesTheHeadAndDropsPostNorms) {
  ModelBuilder builder(tiny_config({{"\"ties_lm_head\": false", "\"ties_lm_head\": true"},
                                    {"\"has_post_norms\": true", "\"has_post_norms\": false"}}),
                       DType::kFloat32);
  EXPECT_THAT(builder.missing(), SizeIs(tiny_shapes().size() - 5));
  builder.fill_dummy(1);
  const auto model = builder.finish();
  EXPECT_EQ(model->weights.lm_head, model->weights.embed);
  EXPECT_EQ(model->weights.layers[1].attn_post_norm, nullptr);
  EXPECT_EQ(model->weights.layers[1].mlp_post_norm, nullptr);
}

TEST(ModelBuilder, HonoursStrides) {
  // Every element at its place in a larger array: rows reversed, columns spread, or transposed;
  // vectors reversed.
  const auto expected = build_tiny(DType::kFloat32, DType::kFloat32);
  struct Strides {
    int64_t row;
    int64_t col;
  };
  for (int variant : {0, 1, 2}) {
    for (DType stored : {DType::kFloat32, DType::kBFloat16}) {
      ModelBuilder builder(tiny_config(), DType::kFloat32);
      for (const auto& [name, values] : tiny_values()) {
        const std::vector<int64_t>& shape = tiny_shapes().at(name);
        const int64_t rows = shape.size() == 2 ? shape[0] : 1;
        const int64_t cols = shape.back();
        const Strides strides = variant == 0   ? Strides{cols + 3, 1}
                                : variant == 1 ? Strides{1, rows}
                                               : Strides{-cols * 2, -2};
        const int64_t origin = variant == 2 ? (rows - 1) * cols * 2 + (cols - 1) * 2 : 0;
        std::vector<float> spread(static_cast<size_t>(rows * (cols + 3) * 2), 1e9f);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < cols; ++c) {
            spread[static_cast<size_t>(origin + r * strides.row + c * strides.col)] =
                values[static_cast<size_t>(r * cols + c)];
          }
        }
        const std::string data = "x" + encode(spread, stored);  // at an odd address, too
        const std::vector<int64_t> given = shape.size() == 2
                                               ? std::vector<int64_t>{strides.row, strides.col}
                                               : std::vector<int64_t>{strides.col};
        builder.put(name, stored, shape, given, data.data() + 1 + origin * dtype_bytes(stored));
      }
      const auto model = builder.finish();
      EXPECT_TRUE(std::ranges::equal(model_weight_arena(*model), model_weight_arena(*expected)))
          << "variant " << variant << " " << dtype_name(stored);
    }
  }
}

// A model whose embedding is [65536, 1].
std::string wide_config() {
  return tiny_config({{"\"vocab_size\": 5", "\"vocab_size\": 65536"},
                      {"\"hidden_size\": 6", "\"hidden_size\": 1"}});
}

TEST(ModelBuilder, ConvertsEveryHalfAndRoundsToNearestEven) {
  const std::vector<int64_t> shape = {65536, 1};
  std::vector<uint16_t> halves(65536);
  std::iota(halves.begin(), halves.end(), uint16_t{0});
  const auto embedding = [&](DType stored, DType weights, const void* data) {
    ModelBuilder builder(wide_config(), weights);
    builder.put("embed.weight", stored, shape, {}, data);
    builder.fill_dummy(0);
    const auto model = builder.finish();
    const auto* begin = reinterpret_cast<const char*>(model->weights.embed);
    return std::string(begin, static_cast<size_t>(65536 * dtype_bytes(weights)));
  };
  std::vector<uint32_t> from_fp16;
  std::vector<uint32_t> from_bf16;
  std::vector<uint32_t> odd_floats;
  std::vector<uint16_t> rounded;
  for (uint32_t i = 0; i < 65536; ++i) {
    from_fp16.push_back(std::bit_cast<uint32_t>(fp16_to_float(static_cast<uint16_t>(i))));
    from_bf16.push_back(i << 16);
    // Every upper half with a lower half below, at and above the middle.
    constexpr std::array<uint32_t, 4> kLower = {0x7fffu, 0x8000u, 0x8001u, 0x0001u};
    odd_floats.push_back(i << 16 | kLower[i / 2 % 4]);
    rounded.push_back(float_to_bf16(std::bit_cast<float>(odd_floats.back())));
  }
  EXPECT_EQ(embedding(DType::kFloat16, DType::kFloat32, halves.data()), bytes_of(from_fp16));
  EXPECT_EQ(embedding(DType::kBFloat16, DType::kFloat32, halves.data()), bytes_of(from_bf16));
  EXPECT_EQ(embedding(DType::kFloat32, DType::kBFloat16, odd_floats.data()), bytes_of(rounded));
  // Independent of float_types.h: 1 + 2^-8 is a tie and goes to even, 1 + 3 * 2^-8 as well.
  EXPECT_EQ(float_to_bf16(1 + 0x1p-8f), 0x3f80);
  EXPECT_EQ(float_to_bf16(1 + 3 * 0x1p-8f), 0x3f82);
  EXPECT_EQ(float_to_bf16(1 + 0x1.01p-8f), 0x3f81);
  EXPECT_EQ(fp16_to_float(0x0001), 0x1p-24f);
  EXPECT_EQ(fp16_to_float(0x7bff), 65504.0f);
  EXPECT_TRUE(std::isinf(fp16_to_float(0xfc00)));
}

TEST(ModelBuilder, RefusesMistakes) {
  ModelBuilder builder(tiny_config(), DType::kBFloat16);
  const std::vector<float> data(100);
  const auto put = [&](std::string_view name, std::vector<int64_t> shape,
                       std::vector<int64_t> strides = {}, DType dtype = DType::kFloat32) {
    return message_of<InvalidArgument>(
        [&] { builder.put(name, dtype, shape, strides, data.data()); });
  };
  EXPECT_THAT(put("layers.2.attn.q.weight", {6, 6}), HasSubstr("no weight is named 'layers.2."));
  EXPECT_THAT(put("layers.0.attn.q.bias", {16}), HasSubstr("no weight is named"));
  EXPECT_THAT(put(std::string(5000, '\n'), {6}), HasSubstr("..."));
  EXPECT_THAT(put("embed.weight", {6, 5}), HasSubstr("has shape [6, 5]; allowed: [5, 6]"));
  EXPECT_THAT(put("embed.weight", {30}), HasSubstr("has shape [30]; allowed: [5, 6]"));
  EXPECT_THAT(put("embed.weight", {}), HasSubstr("has shape []; allowed: [5, 6]"));
  EXPECT_THAT(put("embed.weight", {5, 6, 1}), HasSubstr("allowed: [5, 6]"));
  EXPECT_THAT(put("embed.weight", {5, 6}, {6}), HasSubstr("has 1 strides; allowed: 2"));
  EXPECT_THAT(put("embed.weight", {5, 6}, {}, DType::kFloat16), HasSubstr("float32"));
  EXPECT_EQ(put("final_norm.weight", {6}, {}, DType::kFloat16), "");  // norms are float32
  EXPECT_EQ(put("embed.weight", {5, 6}), "");
  EXPECT_THAT(put("embed.weight", {5, 6}), HasSubstr("'embed.weight' is put twice"));
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                builder.put("lm_head.weight", DType::kFloat32, std::vector<int64_t>{5, 6}, {},
                            nullptr);
              }),
              HasSubstr("null data"));
  EXPECT_THROW(ModelBuilder(tiny_config(), DType::kFloat16), InvalidArgument);
}

TEST(ModelBuilder, ListsWhatIsMissingAndEndsEmpty) {
  ModelBuilder builder(tiny_config(), DType::kFloat32);
  std::vector<std::string> names;
  for (const auto& [name, shape] : tiny_shapes()) names.push_back(name);  // a map: sorted
  EXPECT_EQ(builder.missing(), names);
  const std::vector<float> zeros(100);
  builder.put("embed.weight", DType::kFloat32, tiny_shapes().at("embed.weight"), {}, zeros.data());
  const std::string message = message_of<InvalidArgument>([&] { (void)builder.finish(); });
  EXPECT_THAT(message, HasSubstr("33 of 34 weights of tiny are missing: final_norm.weight, "));
  EXPECT_EQ(std::count(message.begin(), message.end(), ','), 8);  // 8 names and "..."
  EXPECT_THAT(message, Not(HasSubstr("embed")));
  for (const auto& [name, shape] : tiny_shapes()) {
    if (name != "embed.weight") builder.put(name, DType::kFloat32, shape, {}, zeros.data());
  }
  EXPECT_THAT(builder.missing(), SizeIs(0));
  EXPECT_NE(builder.finish(), nullptr);
  EXPECT_THROW((void)builder.finish(), InvalidArgument);
  EXPECT_THROW((void)builder.missing(), InvalidArgument);
  EXPECT_THROW(builder.fill_dummy(0), InvalidArgument);
}

// --- Dummy weights -----------------------------------------------------------------------------

TEST(DummyWeights, AreNormalAndNeutral) {
  const std::string json = tiny_config({{"\"vocab_size\": 5", "\"vocab_size\": 50001"},
                                        {"\"hidden_size\": 6", "\"hidden_size\": 31"}});
  ModelBuilder builder(json, DType::kFloat32);
  builder.fill_dummy(7);
  const auto model = builder.finish();
  const auto* embed = reinterpret_cast<const float*>(model->weights.embed);
  const int64_t count = 50001 * 31;
  std::array<double, 5> moments = {};
  double lag = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double z = embed[i] / 0.02;
    for (int power = 1; power <= 4; ++power) moments[power] += std::pow(z, power) / count;
    if (i + 1 < count) lag += z * (embed[i + 1] / 0.02) / count;
  }
  // Bounds: five standard errors of 1.55 million draws.
  EXPECT_NEAR(moments[1], 0, 0.004);
  EXPECT_NEAR(moments[2], 1, 0.006);
  EXPECT_NEAR(moments[3], 0, 0.016);
  EXPECT_NEAR(moments[4], 3, 0.04);
  EXPECT_NEAR(lag, 0, 0.004);
  const auto [least, most] = std::minmax_element(embed, embed + count);
  EXPECT_LT(*least, -0.08f);
  EXPECT_GT(*most, 0.08f);
  EXPECT_NE(std::memcmp(model->weights.embed, model->weights.lm_head, 4096), 0);

  const LayerWeights& layer = model->weights.layers[1];
  for (const float* norm : {model->weights.final_norm, layer.attn_norm, layer.mlp_post_norm}) {
    EXPECT_TRUE(std::all_of(norm, norm + 31, [](float w) { return w == 0; }));  // (1 + 0)
  }
  EXPECT_TRUE(std::all_of(layer.qkv_bias, layer.qkv_bias + 10, [](float b) { return b == 0; }));
  ModelBuilder plain(tiny_config({{"\"norm_weight_offset\": 1", "\"norm_weight_offset\": 0"}}),
                     DType::kBFloat16);
  plain.fill_dummy(7);
  EXPECT_EQ(plain.finish()->weights.final_norm[0], 1);
}

TEST(DummyWeights, DependOnTheSeedAndNotOnThreads) {
  const std::string json = tiny_config({{"\"vocab_size\": 5", "\"vocab_size\": 30001"}});
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    // The builder uses as many threads as the process may run on cores.
    const auto arena = [&](uint64_t seed, bool on_one_core) {
      cpu_set_t before;
      sched_getaffinity(0, sizeof(before), &before);
      if (on_one_core) {
        cpu_set_t one_core;
        CPU_ZERO(&one_core);
        CPU_SET(sched_getcpu(), &one_core);
        sched_setaffinity(0, sizeof(one_core), &one_core);
      }
      ModelBuilder builder(json, dtype);
      builder.fill_dummy(seed);
      const auto model = builder.finish();
      sched_setaffinity(0, sizeof(before), &before);
      const auto bytes = model_weight_arena(*model);
      return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    };
    const std::string one = arena(3, /*on_one_core=*/true);
    EXPECT_TRUE(one == arena(3, false));
    EXPECT_FALSE(one == arena(4, false));
    EXPECT_FALSE(one == arena(3 + (uint64_t{1} << 40), false));
  }
}

TEST(DummyWeights, LeaveWhatWasPut) {
  ModelBuilder builder(tiny_config(), DType::kFloat32);
  const std::string name = "layers.0.attn.k.weight";
  builder.put(name, DType::kFloat32, tiny_shapes().at(name), {}, tiny_values().at(name).data());
  builder.fill_dummy(0);
  const auto model = builder.finish();
  const auto* qkv = reinterpret_cast<const float*>(model->weights.layers[0].qkv);
  EXPECT_EQ(std::memcmp(qkv + 16 * 6, tiny_values().at(name).data(), 8 * 6 * 4), 0);
  EXPECT_LT(std::abs(qkv[16 * 6 - 1]), 0.1f);
  EXPECT_NE(qkv[16 * 6 - 1], 0);
  EXPECT_NE(qkv[24 * 6], 0);
}

// --- Folders -----------------------------------------------------------------------------------

class Folder : public ::testing::Test {
 protected:
  static std::string weights(DType stored, bool misalign = false) {
    const std::string dtype = stored == DType::kFloat32    ? "F32"
                              : stored == DType::kBFloat16 ? "BF16"
                                                           : "F16";
    std::vector<WrittenTensor> tensors;
    for (const auto& [name, values] : tiny_values()) {
      tensors.push_back({name, dtype, tiny_shapes().at(name), encode(values, stored)});
    }
    return safetensors_bytes(tensors, misalign);
  }
  static std::string part(std::string_view file, std::string_view dtype = "float32") {
    return concat(R"({"weights": ")", file, R"(", "dtype": ")", dtype, R"(", "config": )",
                  tiny_config(), "}");
  }
  static std::string alone(std::string_view target, std::string_view rest = "") {
    return concat(R"({"format": "paceline-folder-1", "stop_token_ids": [0, 4], "target": )", target,
                  rest, "}");
  }
  void describe(std::string_view json) { write_file(folder_.file("paceline.json"), json); }
  std::string error() {
    return message_of<ModelFileError>([&] { (void)load_model_folder(folder_.path()); });
  }

  TemporaryFolder folder_;
};

TEST_F(Folder, GivesTheSameBytesAsPut) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (DType stored : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      if (dtype == DType::kBFloat16 && stored == DType::kFloat16) continue;
      for (bool misalign : {false, true}) {
        write_file(folder_.file("target.safetensors"), weights(stored, misalign));
        describe(alone(part("target.safetensors", dtype_name(dtype))));
        const ModelFolder folder = load_model_folder(folder_.path());
        const auto expected = build_tiny(stored, dtype);
        EXPECT_TRUE(
            std::ranges::equal(model_weight_arena(*folder.target), model_weight_arena(*expected)));
        EXPECT_EQ(folder.draft, nullptr);
        EXPECT_EQ(folder.num_speculative_tokens, 0);
        EXPECT_THAT(folder.stop_token_ids, ElementsAre(0, 4));
      }
    }
  }
}

TEST_F(Folder, ReadsADrafterAndLinksInside) {
  write_file(folder_.file("t"), weights(DType::kFloat32));
  std::filesystem::create_symlink("t", folder_.file("link"));
  describe(alone(part("t"), R"(, "num_speculative_tokens": 4, "draft": )" + part("link")));
  const ModelFolder folder = load_model_folder(folder_.path() + "/");
  ASSERT_NE(folder.draft, nullptr);
  EXPECT_EQ(folder.num_speculative_tokens, 4);
  EXPECT_TRUE(
      std::ranges::equal(model_weight_arena(*folder.target), model_weight_arena(*folder.draft)));
}

TEST_F(Folder, RefusesHostileDescriptions) {
  write_file(folder_.file("t"), weights(DType::kFloat32));
  write_file(folder_.file("half"), weights(DType::kFloat16));
  const TemporaryFolder elsewhere;
  write_file(elsewhere.file("t"), weights(DType::kFloat32));
  std::filesystem::create_symlink(elsewhere.file("t"), folder_.file("out"));
  std::filesystem::create_symlink("loop", folder_.file("loop"));
  std::filesystem::create_directory(folder_.file("d"));
  write_file(folder_.file("integers"),
             safetensors_bytes({{"embed.weight", "I8", {5, 6}, std::string(30, '\0')}}));
  write_file(folder_.file("few"),
             safetensors_bytes({{"final_norm.weight", "F32", {6}, std::string(24, '\0')}}));
  write_file(folder_.file("more"), safetensors_bytes({{"x", "F32", {1}, "1234"}}));
  write_file(folder_.file("shape"),
             safetensors_bytes({{"embed.weight", "F32", {6, 5}, std::string(120, '\0')}}));
  const std::string draft = R"(, "draft": )" + part("t");
  const std::vector<std::pair<std::string, std::string>> table = {
      {"", "byte 0"},
      {"[]", "the top level is a list"},
      {"{}", "format is missing"},
      {"{\"format\": \"paceline-folder-1\", \"target\": " + part("t") + "}", "stop_token_ids is m"},
      {alone("1"), "target is 1; allowed: an object"},
      {alone("{}"), "target.weights is missing"},
      {alone(part("t"), R"(, "x": 1)"), "x is an unknown key; allowed: format, target,"},
      {alone(part("t"), R"(, "num_speculative_tokens": 3)"), "no such key without a draft"},
      {alone(part("t"), draft), "num_speculative_tokens is missing"},
      {alone(part("t"), draft + R"(, "num_speculative_tokens": 17)"), "is 17; allowed: an integer"},
      {alone(part("t"), draft + R"(, "num_speculative_tokens": 0)"), "is 0; allowed: an integer"},
      {alone(part("t", "float16")), "target.dtype is 'float16'; allowed: 'float32', 'bfloat16'"},
      {alone(part("half", "bfloat16")), "use weight dtype float32"},
      {alone(part("")), "target.weights is ''; allowed: the plain name"},
      {alone(part(".")), "target.weights is '.'; allowed: the plain name"},
      {alone(part("..")), "target.weights is '..'; allowed: the plain name"},
      {alone(part("../t")), "target.weights is '../t'"},
      {alone(part("d/t")), "target.weights is 'd/t'"},
      {alone(part(elsewhere.file("t"))), "allowed: the plain name"},
      {alone(part("t\\u0000")), "target.weights is 't\\x00'; allowed: the plain name"},
      {alone(part("out")), "outside of"},
      {alone(part("loop")), "/loop: "},
      {alone(part("d")), "is a directory"},
      {alone(part("paceline.json")), "the header length is"},
      {alone(part("integers")), "'embed.weight' has dtype I8; allowed: F32, BF16, F16"},
      {alone(part("few")), "33 of 34 weights of tiny are missing"},
      {alone(part("more")), "no weight is named 'x'"},
      {alone(part("shape")), "has shape [6, 5]; allowed: [5, 6]"},
  };
  for (const auto& [json, expected] : table) {
    describe(json);
    const std::string message = error();
    EXPECT_THAT(message, HasSubstr(expected)) << json.substr(0, 120);
    EXPECT_THAT(message, HasSubstr(folder_.path())) << json.substr(0, 120);
  }
  std::string json = alone(part("t"));
  json.replace(json.find("[0, 4]"), 6, "[0, 5]");
  describe(json);
  EXPECT_THAT(error(), HasSubstr("stop_token_ids[1] is 5; allowed: an integer from 0 to 4"));
  json = alone(part("t"));
  json.replace(json.find("\"window\": 9"), 11, "\"window\": 0");
  describe(json);
  EXPECT_THAT(error(), HasSubstr("paceline.json: target.config: decoder config: layers[1].att"));
}

TEST_F(Folder, SaysWhenSomethingIsMissing) {
  const auto is_missing = [](const std::string& path) {
    try {
      (void)load_model_folder(path);
    } catch (const ModelFileError& failure) {
      return failure.is_missing();
    }
    return false;
  };
  EXPECT_TRUE(is_missing(folder_.path()));
  EXPECT_TRUE(is_missing(folder_.file("no-folder")));
  EXPECT_THAT(error(), HasSubstr("paceline convert"));
  describe(alone(part("t")));
  EXPECT_TRUE(is_missing(folder_.path()));
  EXPECT_THAT(error(), HasSubstr("/t: "));
  write_file(folder_.file("t"), "");
  EXPECT_FALSE(is_missing(folder_.path()));
}

}  // namespace
}  // namespace paceline
