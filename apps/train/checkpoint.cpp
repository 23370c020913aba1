#include "checkpoint.h"

#include <nlohmann/json.hpp>
#include <optional>

#include "program/errors.h"
#include "program/files.h"

namespace tandem::apps {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr const char* kCheckpointFormat = "tandem train checkpoint 2";
constexpr const char* kPrefix = "checkpoint-";
constexpr const char* kSuffix = ".safetensors";

/// The document's key of its own checksum: a key of the outermost object, indented by one. It
/// cannot occur in a string, because JSON strings contain no newline.
constexpr const char* kChecksum = "fnv1a64";
constexpr std::string_view kChecksumKey = "\n \"fnv1a64\": \"";

[[noreturn]] void refuse_damaged(const fs::path& path, const std::string& expected,
                                 const std::string& got) {
  throw UserError(
      "expected " + expected + " in " + path.string() + ", got " + got +
      ". Restore the file from a copy, or move it away and start again without --resume.");
}

/// The position of the checksum's first digit in `text`, or npos.
size_t checksum_position(std::string_view text) {
  const size_t key = text.find(kChecksumKey);
  if (key == std::string_view::npos) return key;
  const size_t position = key + kChecksumKey.size();
  const bool whole = Checksum::of_hex(text.substr(position, Checksum::kDigits)).has_value();
  return whole ? position : std::string_view::npos;
}

/// The checksum of `text`, with the digits at `position` taken as zeros.
std::string checksum_without(std::string_view text, size_t position) {
  Checksum checksum;
  checksum.add(text.substr(0, position));
  checksum.add(std::string(Checksum::kDigits, '0'));
  checksum.add(text.substr(position + Checksum::kDigits));
  return checksum.hex();
}

}  // namespace

void save_checkpoint(OutFolder& out, const std::string& tag, const json& state,
                     const NamedTensors& tensors) {
  std::string name = kPrefix + tag + kSuffix;  // never the file that the current JSON names
  for (int again = 2; fs::exists(fs::symlink_status(out.path() / name)); ++again)
    name = kPrefix + tag + "-" + std::to_string(again) + kSuffix;
  AtomicFile data = out.begin(name);
  write_safetensors(data, tensors);
  out.commit(data);
  json document = state;
  document["format"] = kCheckpointFormat;
  document["tensors"] = data.digest();
  document["tensors"]["file"] = name;
  document[kChecksum] = std::string(Checksum::kDigits, '0');
  std::string text = document.dump(1) + "\n";
  const size_t position = checksum_position(text);
  text.replace(position, Checksum::kDigits, checksum_without(text, position));
  AtomicFile file = out.begin(kCheckpointName);
  file.write(text);
  out.commit(file);
  out.remove_others(kPrefix, name);
}

json load_checkpoint_state(const fs::path& folder) {
  const fs::path path = folder / kCheckpointName;
  const std::string text =
      read_file(path, "a checkpoint",
                "Pass the --out folder of the run to go on with, or leave out --resume.");
  const size_t position = checksum_position(text);
  if (position == std::string::npos)
    refuse_damaged(path, "a checksum", std::to_string(text.size()) + " bytes without it");
  const std::string found = checksum_without(text, position),
                    named = text.substr(position, Checksum::kDigits);
  if (found != named) refuse_damaged(path, "a document with checksum " + named, found);
  json state = parse_document(text);
  const bool known = state.is_object() && state.value("format", json()) == kCheckpointFormat;
  if (!known)
    refuse_damaged(path, "\"format\": \"" + std::string(kCheckpointFormat) + "\"",
                   "another document");
  return state;
}

NamedTensors load_checkpoint_tensors(const fs::path& folder, const json& state) {
  const json tensors = state.value("tensors", json());
  const std::optional<FileDigest> digest = digest_of_json(tensors);
  const json file = digest ? tensors.value("file", json()) : json();
  if (!file.is_string())
    refuse_damaged(folder / kCheckpointName, "file, bytes and fnv1a64 under \"tensors\"",
                   tensors.dump().substr(0, 200));
  return read_safetensors(folder / fs::path(file.get<std::string>()).filename(), &*digest);
}

}  // namespace tandem::apps
