// Why something was not done, in words for the user.
#pragma once

#include <optional>
#include <string>

namespace tandem {

/// Nothing where a fusion may be made; else the reason why not, a sentence without a full stop.
using Refusal = std::optional<std::string>;

}  // namespace tandem
