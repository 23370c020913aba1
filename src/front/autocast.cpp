#include "tandem/autocast.h"

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>

#include "kernel_ops/weights.h"
#include "pipeline/autocast.h"
#include "quantization/recipe.h"

namespace tandem {

Autocast::Autocast(bool enabled, const Recipe& recipe)
    : region_(enter_autocast(enabled ? to_json(recipe).dump() : "null")) {}

Autocast::~Autocast() {
  const bool in_order = exit_autocast(region_);
  try {  // a destructor may not throw
    close_region(region_);
  } catch (const std::exception& error) {
    TORCH_WARN("Autocast: expected to update the state of the recipe, got: ", error.what());
  }
  if (!in_order)
    TORCH_WARN(
        "Autocast: expected the innermost region of this thread to end first, got one that others "
        "were entered in since, or of another thread. Let regions end in reverse order.");
}

void weights_changed() { kernel_ops::weights_changed(); }

}  // namespace tandem
