// Plans for people: steps of both directions, what is kept, every fusion made and every one
// refused.
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
  /// As JSON, or "none".
  std::string recipe;
  /// By value of Plan::kept; empty where no call with grad was made.
  std::vector<int64_t> kept_bytes;
  /// Of the workspaces of Plan::cached_weights, in their order; empty where nobody has them.
  std::vector<at::Tensor> stamps = {};
};

/// A plan of a program that has served compiled code, of which nobody knows what it kept.
/// `workspaces`: what such code was given for the codes of weights, by call; those that fit the
/// plan count.
TANDEM_API ExplainedPlan explained(std::shared_ptr<const Plan> plan, const Program& program,
                                   const std::vector<std::vector<at::Tensor>>& workspaces = {});

/// `saved_bytes`: kept by the last call with grad; none where a compiler chooses. Throws
/// c10::ValueError where no call has been made yet: a plan depends on its tensors. `times`: for
/// pictures.
TANDEM_API std::string explain(const std::vector<ExplainedPlan>& plans,
                               std::optional<int64_t> saved_bytes, ExplainFormat format,
                               const StepTimes& times = {});

/// Names of the fusions that any of these plans has made.
TANDEM_API std::vector<std::string> fusions_in(
    const std::vector<std::shared_ptr<const Plan>>& plans);

}  // namespace tandem
