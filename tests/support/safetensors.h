// Reads safetensors files: https://github.com/huggingface/safetensors#format
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace tandem::testing {

/// The tensors of one file, as raw unsigned integers. Throws std::runtime_error where the file or a
/// tensor is not as requested.
class Safetensors {
 public:
  explicit Safetensors(const std::string& path) : path_(path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error(path + ": expected a readable file, got none");
    bytes_.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    uint64_t header_bytes = 0;
    if (bytes_.size() >= sizeof(header_bytes))
      std::memcpy(&header_bytes, bytes_.data(), sizeof(header_bytes));
    if (header_bytes == 0 || header_bytes > bytes_.size() - sizeof(header_bytes)) {
      throw std::runtime_error(path + ": expected a header within " +
                               std::to_string(bytes_.size()) + " bytes, got " +
                               std::to_string(header_bytes) + " bytes of it");
    }
    data_ = sizeof(header_bytes) + header_bytes;
    header_ = nlohmann::json::parse(bytes_.begin() + sizeof(header_bytes),
                                    bytes_.begin() + static_cast<int64_t>(data_));
  }

  const nlohmann::json& metadata() const { return header_.at("__metadata__"); }

  std::vector<size_t> shape(const std::string& name) const {
    return entry(name).at("shape").get<std::vector<size_t>>();
  }

  /// The elements of `name`; T is uint8_t, uint16_t or uint32_t, as stored.
  template <typename T>
  std::vector<T> read(const std::string& name) const {
    const nlohmann::json& tensor = entry(name);
    const std::string wanted = "U" + std::to_string(8 * sizeof(T)), stored = tensor.at("dtype");
    if (stored != wanted)
      throw std::runtime_error(path_ + ": " + name + ": expected " + wanted + ", got " + stored);
    const size_t begin = tensor.at("data_offsets").at(0), end = tensor.at("data_offsets").at(1);
    if (begin > end || data_ + end > bytes_.size() || (end - begin) % sizeof(T) != 0) {
      throw std::runtime_error(path_ + ": " + name + ": expected offsets within the file, got " +
                               std::to_string(begin) + " to " + std::to_string(end));
    }
    std::vector<T> values((end - begin) / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), bytes_.data() + data_ + begin, end - begin);
    return values;
  }

 private:
  const nlohmann::json& entry(const std::string& name) const {
    const auto found = header_.find(name);
    if (found == header_.end())
      throw std::runtime_error(path_ + ": expected a tensor " + name + ", got none");
    return *found;
  }

  std::string path_;
  std::vector<char> bytes_;
  size_t data_ = 0;
  nlohmann::json header_;
};

}  // namespace tandem::testing
