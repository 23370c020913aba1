#include "checkpoint.h"

#include <nlohmann/json.hpp>

#include "errors.h"
#include "files.h"

namespace tandem::cli {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr const char* kFormat = "tandem train checkpoint 1";
constexpr const char* kPrefix = "checkpoint-";
constexpr const char* kSuffix = ".safetensors";

[[noreturn]] void refuse_damaged(const fs::path& path, const std::string& expected,
                                 const std::string& got) {
  throw UserError("expected " + expected + " in " + path.string() + ", got " + got +
                  ". Restore the file from a copy, or start again without --resume.");
}

/// Checkpoint tensors that no JSON names any more.
void remove_other_tensors(const fs::path& folder, const fs::path& current) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    const bool ours = name.starts_with(kPrefix) &&
                      (name.ends_with(kSuffix) || name.ends_with(std::string(kSuffix) + ".tmp"));
    if (ours && entry.path().filename() != current) fs::remove(entry.path(), error);
  }
}

}  // namespace

fs::path checkpoint_path(const fs::path& folder) { return folder / "checkpoint.json"; }

void save_checkpoint(const fs::path& folder, const std::string& tag, const json& state,
                     const NamedTensors& tensors) {
  std::string name = kPrefix + tag + kSuffix;  // never the file that the present JSON names
  for (int again = 2; fs::exists(folder / name); ++again)
    name = kPrefix + tag + "-" + std::to_string(again) + kSuffix;
  const FileDigest digest = write_safetensors(folder / name, tensors);
  json document = state;
  document["format"] = kFormat;
  document["tensors"] = {{"file", name}, {"bytes", digest.bytes}, {"fnv1a64", digest.checksum}};
  write_file(checkpoint_path(folder), document.dump(1) + "\n");
  remove_other_tensors(folder, name);
}

json load_checkpoint_state(const fs::path& folder) {
  const fs::path path = checkpoint_path(folder);
  const std::string text =
      read_file(path, "a checkpoint",
                "Pass the --out folder of the run to go on with, or leave out --resume.");
  json state = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (state.is_discarded())
    refuse_damaged(path, "a JSON document", std::to_string(text.size()) + " bytes that are none");
  const bool known = state.is_object() && state.value("format", json()) == kFormat;
  if (!known)
    refuse_damaged(path, "\"format\": \"" + std::string(kFormat) + "\"", "another document");
  return state;
}

NamedTensors load_checkpoint_tensors(const fs::path& folder, const json& state) try {
  const json& tensors = state.at("tensors");
  const FileDigest digest{tensors.at("bytes").get<int64_t>(),
                          tensors.at("fnv1a64").get<std::string>()};
  return read_safetensors(folder / fs::path(tensors.at("file").get<std::string>()).filename(),
                          &digest);
} catch (const json::exception& error) {
  refuse_damaged(checkpoint_path(folder), "file, bytes and fnv1a64 under \"tensors\"",
                 error.what());
}

}  // namespace tandem::cli
