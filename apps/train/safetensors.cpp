#include "safetensors.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "program/errors.h"
#include "program/files.h"

namespace tandem::apps {

namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

using nlohmann::json;

constexpr size_t kLengthBytes = 8;

constexpr std::array<std::pair<at::ScalarType, std::string_view>, 6> kDtypes{{
    {at::kFloat, "F32"},
    {at::kBFloat16, "BF16"},
    {at::kHalf, "F16"},
    {at::kDouble, "F64"},
    {at::kLong, "I64"},
    {at::kByte, "U8"},
}};

std::string_view bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

/// Reads the parts of one file. Each failure says which part of the format was expected.
class Reader {
 public:
  Reader(const std::filesystem::path& path, std::string content)
      : path_(path), content_(std::move(content)) {}

  NamedTensors tensors() const {
    const json header = read_header();
    NamedTensors read;
    for (const auto& [name, entry] : header.items()) {
      if (name != "__metadata__") read.push_back({name, read_tensor(name, entry)});
    }
    return read;
  }

 private:
  [[noreturn]] void refuse(const std::string& expected, const std::string& got) const {
    throw UserError(
        "expected " + expected + " in " + path_.string() + ", got " + got +
        ". The file is damaged: restore it from a copy, or start again without --resume.");
  }

  size_t data_begin() const { return kLengthBytes + header_bytes(); }

  size_t header_bytes() const {
    uint64_t length = 0;
    if (content_.size() < kLengthBytes)
      refuse("8 bytes of header length", std::to_string(content_.size()) + " bytes");
    std::memcpy(&length, content_.data(), kLengthBytes);
    if (length > content_.size() - kLengthBytes) {
      refuse("a header of " + std::to_string(length) + " bytes",
             std::to_string(content_.size() - kLengthBytes));
    }
    return static_cast<size_t>(length);
  }

  json read_header() const {
    const std::string_view text = std::string_view(content_).substr(kLengthBytes, header_bytes());
    json header = parse_document(text);
    if (!header.is_object()) refuse("a JSON object as header", "something else");
    return header;
  }

  /// Values that are no integers are refused instead of converted; a number of 2^63 or more is
  /// negative here.
  std::vector<int64_t> integers(const std::string& name, const json& entry,
                                const char* field) const {
    const json& listed = entry.at(field);
    if (!listed.is_array() || !std::all_of(listed.begin(), listed.end(), [](const json& number) {
          return number.is_number_integer();
        }))
      refuse("integers as " + std::string(field) + " of " + name, listed.dump().substr(0, 200));
    return listed.get<std::vector<int64_t>>();
  }

  at::Tensor read_tensor(const std::string& name, const json& entry) const try {
    const auto dtype = entry.at("dtype").get<std::string>();
    const std::vector<int64_t> shape = integers(name, entry, "shape");
    const std::vector<int64_t> offsets = integers(name, entry, "data_offsets");
    const auto known = std::find_if(kDtypes.begin(), kDtypes.end(),
                                    [&](const auto& d) { return d.second == dtype; });
    if (known == kDtypes.end()) refuse("a known dtype for " + name, dtype);

    const size_t available = content_.size() - data_begin();
    size_t bytes = c10::elementSize(known->first);
    int64_t stride = 1;  // also for a tensor without elements
    for (const int64_t extent : shape) {
      if (extent < 0 || (extent > 0 && bytes > available / static_cast<size_t>(extent)) ||
          __builtin_mul_overflow(stride, std::max<int64_t>(extent, 1), &stride)) {
        refuse("a shape of " + name + " that fits in " + std::to_string(available) + " bytes",
               entry.at("shape").dump().substr(0, 200));
      }
      bytes *= static_cast<size_t>(extent);
    }
    if (offsets.size() != 2 || offsets[0] < 0 || offsets[0] > offsets[1] ||
        static_cast<size_t>(offsets[1]) > available ||
        static_cast<size_t>(offsets[1] - offsets[0]) != bytes) {
      refuse(std::to_string(bytes) + " bytes of data for " + name,
             "offsets " + entry.at("data_offsets").dump().substr(0, 200) + " of " +
                 std::to_string(available));
    }
    at::Tensor tensor = at::empty(shape, known->first);
    if (bytes > 0)
      std::memcpy(tensor.mutable_data_ptr(), content_.data() + data_begin() + offsets[0], bytes);
    return tensor;
  } catch (const json::exception&) {
    refuse("dtype, shape and data_offsets of " + name, entry.dump().substr(0, 200));
  }

  const std::filesystem::path& path_;
  std::string content_;
};

}  // namespace

void write_safetensors(AtomicFile& file, const NamedTensors& tensors) {
  json header = json::object();
  std::vector<at::Tensor> contiguous;
  size_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    const at::ScalarType dtype = tensor.scalar_type();
    const auto known = std::find_if(kDtypes.begin(), kDtypes.end(),
                                    [&](const auto& d) { return d.first == dtype; });
    TORCH_INTERNAL_ASSERT(known != kDtypes.end(), "safetensors has no name for ", dtype);
    contiguous.push_back(tensor.detach().contiguous());
    header[name] = {{"dtype", known->second},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {offset, offset + tensor.nbytes()}}};
    offset += tensor.nbytes();
  }
  std::string text = header.dump();
  text.append((kLengthBytes - text.size() % kLengthBytes) % kLengthBytes,
              ' ');  // data starts aligned
  const uint64_t length = text.size();

  file.write({reinterpret_cast<const char*>(&length), sizeof length});
  file.write(text);
  for (const at::Tensor& tensor : contiguous) file.write(bytes_of(tensor));
}

NamedTensors read_safetensors(const std::filesystem::path& path, const FileDigest* expected) {
  std::string content =
      read_file(path, "a safetensors file", "Restore it, or start again without --resume.");
  if (expected) {
    FileDigest found;
    found.add(content);
    if (found != *expected) {
      throw UserError(
          "expected " + path.string() + " with " + std::to_string(expected->bytes) +
          " bytes and checksum " + expected->checksum.hex() + ", got " +
          std::to_string(found.bytes) + " bytes and " + found.checksum.hex() +
          ". The file is damaged: restore it from a copy, or start again without --resume.");
    }
  }
  return Reader(path, std::move(content)).tensors();
}

}  // namespace tandem::apps
