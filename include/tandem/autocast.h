// Regions in which a recipe, or a memory budget, is in force.
#pragma once

#include <memory>
#include <optional>

#include "tandem/export.h"
#include "tandem/recipe.h"

namespace tandem {

struct Region;

/// While one of these lives, the products of this thread's pipelines run under a recipe (emulated
/// on a CPU). A weight is quantized once until it changes. Regions nest; `enabled = false`
/// switches quantization off inside. One that is destroyed before one that was made inside it, or
/// in another thread, ends all the same, with a warning: the others stay in force until they end.
///
///   { tandem::Autocast fp8(true, tandem::Float8CurrentScaling{}); y = model->forward(x); }
class TANDEM_API Autocast {
 public:
  explicit Autocast(bool enabled = true, const Recipe& recipe = Float8CurrentScaling{});
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  std::shared_ptr<Region> region_;
};

/// While one of these lives, pipelines of this thread that have no budget of their own
/// (PipelineModule::set_memory_budget) keep at most so many bytes for backward per row of their
/// main input; nullopt: no limit inside. Nests with Autocast regions, and ends like them.
///
///   { tandem::MemoryBudget budget(2048); loss = model->forward(x).sum(); }
///
/// Throws: c10::ValueError where it is negative or not finite; a call inside, where its pipeline
///         cannot do with so little: with the least that it needs.
class TANDEM_API MemoryBudget {
 public:
  explicit MemoryBudget(std::optional<double> bytes_per_row);
  ~MemoryBudget();
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

 private:
  std::shared_ptr<Region> region_;
};

/// To be called after weights on an accelerator were written inside a region in a way that moves no
/// version counter, such as through `.data`. On the CPU their bytes are compared.
TANDEM_API void weights_changed();

}  // namespace tandem
