// The built-in fusions.
#pragma once

#include <span>

#include "core/fusion.h"
#include "tandem/export.h"

namespace tandem {

/// Returns the fusions of one pass. Among candidates with equally many members, the first takes
/// precedence.
TANDEM_API std::span<const Fusion> built_in_fusions(Pass pass);
/// Whether a fusion is built in, and not registered by a user.
bool is_built_in(const Fusion& fusion);

}  // namespace tandem
