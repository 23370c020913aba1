// The built-in fusions.
#pragma once

#include <span>

#include "core/fusion.h"
#include "tandem/export.h"

namespace tandem {

/// Those of one pass. Among candidates with as many members the first takes precedence.
TANDEM_API std::span<const Fusion> built_in_fusions(Pass pass);

}  // namespace tandem
