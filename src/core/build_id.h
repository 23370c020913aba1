// The build of this library, for caches that must not outlive it.
#pragma once

#include <string>

#include "tandem/export.h"

namespace tandem {

/// The linker's build id of libtandem in hexadecimal digits. Every change of code changes it.
TANDEM_API const std::string& build_id();

}  // namespace tandem
