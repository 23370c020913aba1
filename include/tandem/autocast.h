// Regions in which a recipe, or a memory budget, is in force.
#pragma once

#include <memory>
#include <optional>

#include "tandem/export.h"
#include "tandem/recipe.h"

namespace tandem {

struct Region;

/// While an Autocast lives, the products of this thread's pipelines run under a recipe, emulated on
/// a CPU. A weight is quantized once until it changes. Regions nest; `enabled = false` switches
/// quantization off inside. A region that is destroyed before an inner region, or in another
/// thread, ends with a warning; the other regions stay in force until they end.
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

/// While a MemoryBudget lives, the pipelines of this thread without a budget of their own
/// (PipelineModule::set_memory_budget) keep at most this many bytes for backward per row of their
/// main operand; nullopt: no limit inside. Budgets nest with Autocast regions, and end as these do.
///
///   { tandem::MemoryBudget budget(2048); loss = model->forward(x).sum(); }
///
/// Throws:  the constructor: c10::ValueError where the number is negative or not finite. A call
///          inside: c10::ValueError where its pipeline needs more; the message gives the least
///          budget.
class TANDEM_API MemoryBudget {
 public:
  explicit MemoryBudget(std::optional<double> bytes_per_row);
  ~MemoryBudget();
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

 private:
  std::shared_ptr<Region> region_;
};

/// Has cached codes of weights on an accelerator recomputed. Call it after a write inside a region
/// that moves no version counter, such as through `.data`. On the CPU the bytes of weights are
/// compared.
TANDEM_API void weights_changed();

}  // namespace tandem
