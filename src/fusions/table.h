// The built-in fusions.
#pragma once

#include <span>

#include "core/fusion.h"
#include "tandem/export.h"

namespace tandem {

/// Those of one pass, longest patterns first.
TANDEM_API std::span<const Fusion> built_in_fusions(Pass pass);

}  // namespace tandem
