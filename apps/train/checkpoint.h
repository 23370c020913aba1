#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "out_folder.h"
#include "safetensors.h"

namespace tandem::apps {

inline constexpr const char* kCheckpointName = "checkpoint.json";

/// Saves what a run needs to continue: `tensors` in a safetensors file, then `state` in
/// checkpoint.json, which names that file with its size and checksum and carries a checksum of
/// itself. The checkpoint changes when the JSON is replaced: a crash before leaves the old one
/// whole, because its tensors are deleted only afterwards.
void save_checkpoint(OutFolder& out, const std::string& tag, const nlohmann::json& state,
                     const NamedTensors& tensors);

/// The `state` of a checkpoint. Call `load_checkpoint_tensors` once the state is known to fit.
///
/// Throws: UserError if there is no checkpoint, or if it is damaged (tests
///         test_damaged_checkpoint, test_random_damage_is_refused).
nlohmann::json load_checkpoint_state(const std::filesystem::path& folder);
NamedTensors load_checkpoint_tensors(const std::filesystem::path& folder,
                                     const nlohmann::json& state);

}  // namespace tandem::apps
