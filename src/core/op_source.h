// Definitions that are created from names on demand, and live as long as a user holds them.
#pragma once

#include <functional>
#include <memory>
#include <string_view>

#include "core/op_def.h"
#include "tandem/export.h"

namespace tandem {

/// Creates the definition for a name; null where the source does not know the name.
using OpSource = std::function<std::shared_ptr<const OpKind>(std::string_view name)>;

/// Sets the source of a front with ops of its own. Descriptions and plans hold the created
/// definitions.
TANDEM_API void set_op_source(OpSource source);

/// Returns the op of this name from the source, or a registered op, which needs no holder. Throws
/// as `op_kind` does.
TANDEM_API std::shared_ptr<const OpKind> find_op(std::string_view name);

}  // namespace tandem
