#include "tandem/recipe.h"

#include <nlohmann/json.hpp>

#include "kernel_ops/weights.h"
#include "pipeline/autocast.h"
#include "quantization/recipe.h"

namespace tandem {

Autocast::Autocast(bool enabled, const Float8CurrentScaling& recipe) {
  enter_autocast(enabled ? to_json(recipe).dump() : "null");
}

Autocast::~Autocast() { exit_autocast(); }

void weights_changed() { kernel_ops::weights_changed(); }

}  // namespace tandem
