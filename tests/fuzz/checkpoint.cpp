// Checkpoints of `tandem train`: every folder is read or refused with a UserError.
//
// An input is the JSON document, a zero byte, a byte of choices and the tensors' file. Checksums
// are made right where the choices say so: damage that they find is found at once.
#include "train/checkpoint.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "program/errors.h"
#include "program/files.h"
#include "train/safetensors.h"
#include "train/train_options.h"

namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using namespace tandem::apps;

constexpr const char* kTensorsName = "checkpoint-fuzz.safetensors";
constexpr std::string_view kChecksumKey = "\n \"fnv1a64\": \"";
constexpr size_t kDigits = 16;

void write(const fs::path& path, std::string_view content) {
  std::ofstream(path, std::ios::binary)
      .write(content.data(), static_cast<std::streamsize>(content.size()));
}

std::string checksum_of(std::string_view content) {
  Checksum checksum;
  checksum.add(content);
  return checksum.hex();
}

/// `text` as a document that names `tensors` as they are, with its own checksum.
std::string made_right(const std::string& text, std::string_view tensors) {
  json document = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!document.is_object()) return text;
  document["tensors"] = {
      {"file", kTensorsName}, {"bytes", tensors.size()}, {"fnv1a64", checksum_of(tensors)}};
  document["fnv1a64"] = std::string(kDigits, '0');
  std::string right =
      document.dump(1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace) + "\n";
  if (const size_t key = right.find(kChecksumKey); key != std::string::npos)
    right.replace(key + kChecksumKey.size(), kDigits, checksum_of(right));
  return right;
}

template <typename Read>
void read_or_refuse(Read&& read) {
  try {
    read();
  } catch (const UserError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const fs::path folder = [] {
    std::string name = (fs::temp_directory_path() / "tandem-fuzz-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) std::abort();
    return fs::path(name);
  }();
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t end = std::min(input.find('\0'), size);
  std::string text(input.substr(0, end));
  const std::string_view rest = input.substr(std::min(end + 1, size));
  const std::string_view tensors = rest.substr(std::min<size_t>(1, rest.size()));
  if (!rest.empty() && (rest[0] & 1) == 0) text = made_right(text, tensors);
  write(folder / "checkpoint.json", text);
  write(folder / kTensorsName, tensors);
  read_or_refuse([&] { read_safetensors(folder / kTensorsName); });
  read_or_refuse([&] {
    const json state = load_checkpoint_state(folder);
    read_or_refuse([&] { load_checkpoint_tensors(folder, state); });
    if (state.contains("configuration")) with_configuration({}, state["configuration"], {});
  });
  return 0;
}
