// The built-in fusions.
#pragma once

#include <span>

#include "core/fusion.h"
#include "tandem/export.h"

namespace tandem {

/// Those of one pass. Among candidates with as many members the first takes precedence.
TANDEM_API std::span<const Fusion> built_in_fusions(Pass pass);
/// Whether a fusion is one of the table, and none that a user has registered.
bool is_built_in(const Fusion& fusion);

}  // namespace tandem
