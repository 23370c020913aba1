// Plans in words for users: steps of both directions, what is kept, and every fusion that was made
// or refused.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/plan.h"
#include "planner/program.h"
#include "tandem/export.h"
#include "tandem/report.h"

namespace tandem {

struct ExplainedPlan {
  std::shared_ptr<const Plan> plan;
  const Program* program;
  bool training;
  /// The recipe as JSON, or "none".
  std::string recipe;
  /// By value of Plan::kept; empty if no call with grad was made.
  std::vector<int64_t> kept_bytes;
  /// The stamps of the workspaces of Plan::cached_weights, in their order; empty if there are none.
  std::vector<at::Tensor> stamps = {};
};

/// A plan of a program that compiled code has used; what it kept is unknown. `workspaces`: for each
/// call, the workspaces that compiled code passed; those that fit the plan are used.
TANDEM_API ExplainedPlan explained(std::shared_ptr<const Plan> plan, const Program& program,
                                   const std::vector<std::vector<at::Tensor>>& workspaces = {});

/// `saved_bytes`: the bytes that the last call with grad kept; nullopt if a compiler chose.
/// `times`: for pictures. Throws c10::ValueError if no call was made, because a plan depends on its
/// tensors.
TANDEM_API std::string explain(const std::vector<ExplainedPlan>& plans,
                               std::optional<int64_t> saved_bytes, ExplainFormat format,
                               const StepTimes& times = {});

/// Names of the fusions that were made in any of these plans.
TANDEM_API std::vector<std::string> fusions_in(
    const std::vector<std::shared_ptr<const Plan>>& plans);

}  // namespace tandem
