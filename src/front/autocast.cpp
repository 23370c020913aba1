#include "tandem/autocast.h"

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>

#include "kernel_ops/weights/weights.h"
#include "pipeline/autocast.h"
#include "quantization/recipe.h"

namespace tandem {

Autocast::Autocast(bool enabled, const Recipe& recipe)
    : region_(enter_autocast(enabled ? to_json(recipe).dump() : "null")) {}

namespace {
/// Ends a region. A destructor calls this function, so it must not throw.
void leave(const RegionPtr& region, const char* what) {
  const bool in_order = exit_autocast(region);
  try {
    close_region(region);
  } catch (const std::exception& error) {
    TORCH_WARN(what, ": expected to update the state of the recipe, got: ", error.what());
  }
  if (!in_order)
    TORCH_WARN(what,
               ": expected the innermost region of this thread to end first, got one that others "
               "were entered in since, or of another thread. Let regions end in reverse order.");
}
}  // namespace

Autocast::~Autocast() { leave(region_, "Autocast"); }

MemoryBudget::MemoryBudget(std::optional<double> bytes_per_row)
    : region_(enter_memory_budget(bytes_per_row)) {}

MemoryBudget::~MemoryBudget() { leave(region_, "MemoryBudget"); }

void weights_changed() { kernel_ops::weights_changed(); }

}  // namespace tandem
