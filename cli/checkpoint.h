#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "safetensors.h"

namespace tandem::cli {

/// Saves what a run needs to go on: `tensors` in a safetensors file of its own, then `state` in
/// `folder`/checkpoint.json, which names that file with its size and checksum. Replacing the JSON
/// is the moment the checkpoint changes: a crash before leaves the old one whole, since its tensors
/// are deleted only afterwards.
void save_checkpoint(const std::filesystem::path& folder, const std::string& tag,
                     const nlohmann::json& state, const NamedTensors& tensors);

std::filesystem::path checkpoint_path(const std::filesystem::path& folder);

/// The `state` of a checkpoint; its tensors are read by `load_checkpoint_tensors` once the state is
/// known to fit.
///
/// Throws: UserError when there is none, or one that is damaged (test test_damaged_checkpoint).
nlohmann::json load_checkpoint_state(const std::filesystem::path& folder);
NamedTensors load_checkpoint_tensors(const std::filesystem::path& folder,
                                     const nlohmann::json& state);

}  // namespace tandem::cli
