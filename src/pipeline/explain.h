// Plans for people: steps of both directions, what is kept, every fusion made and every one refused.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/plan.h"
#include "planner/program.h"
#include "tandem/report.h"

namespace tandem {

struct ExplainedPlan {
  std::shared_ptr<const Plan> plan;
  const Program* program;
  bool training;
  std::string recipe;  ///< as JSON, or "none"
  std::vector<int64_t>
      kept_bytes;  ///< by entry of Plan::kept; empty where no call with grad was made
};

/// `saved_bytes`: kept by the last call with grad. Throws c10::ValueError where no call has been made yet: a plan depends on its tensors.
std::string explain(const std::vector<ExplainedPlan>& plans, int64_t saved_bytes,
                    ExplainFormat format);

}  // namespace tandem
