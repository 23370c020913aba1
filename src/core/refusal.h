// Refusals: reasons, in words for the user, why something was not done.
#pragma once

#include <optional>
#include <string>

namespace tandem {

/// nullopt where a fusion may be made; else the reason against it, a sentence without a full stop.
using Refusal = std::optional<std::string>;

}  // namespace tandem
