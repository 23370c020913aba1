#include "pipeline/autocast.h"

#include <c10/util/Exception.h>

#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <vector>

#include "kernel_ops/weights.h"
#include "quantization/recipe.h"

namespace tandem {

namespace {

std::vector<const ActiveRecipe*>& regions() {
  thread_local std::vector<const ActiveRecipe*> regions;
  return regions;
}

const ActiveRecipe* interned(const std::string& json) {
  const auto recipe = recipe_from_json(nlohmann::json::parse(json));
  if (!recipe) return nullptr;
  static auto& mutex = *new std::mutex;
  static auto& recipes = *new std::map<std::string, std::unique_ptr<ActiveRecipe>>;
  const std::string canonical = to_json(*recipe).dump();
  const std::lock_guard<std::mutex> lock(mutex);
  auto& entry = recipes[canonical];
  if (!entry) entry = std::make_unique<ActiveRecipe>(ActiveRecipe{canonical});
  return entry.get();
}

}  // namespace

const ActiveRecipe* active_recipe() { return regions().empty() ? nullptr : regions().back(); }

void enter_autocast(const std::string& json) {
  regions().push_back(interned(json));
  kernel_ops::enter_region();
}

void exit_autocast() {
  TORCH_INTERNAL_ASSERT(!regions().empty(), "autocast: a region was left that was not entered");
  regions().pop_back();
  kernel_ops::exit_region();
}

}  // namespace tandem
