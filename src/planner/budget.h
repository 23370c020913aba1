// A memory budget: what forward keeps is chosen so that it fits and backward has the least to do
// for it. And ops that are computed again in backward, whatever that costs.
#pragma once

#include <map>
#include <vector>

#include "planner/draft.h"
#include "planner/fuse.h"
#include "planner/key.h"
#include "planner/value_set.h"
#include "planner/ways.h"

namespace tandem {

/// Up to so many values that may or may not be kept, the choice is the cheapest one; above, it is
/// good.
inline constexpr size_t kMostFreeValues = 24;

class BudgetFit {
 public:
  /// `draft`: as it is before anything is chosen.
  BudgetFit(const Description& description, const PlanKey& key,
            const std::vector<OpGroup>& backward_groups, const Draft& draft);

  /// Codes that backward reads: forward makes them if they are kept.
  const Values& codes() const { return codes_; }

  /// Replaces backward by one that finds what it reads within description.memory_budget: kept,
  /// written again by a step that could do so, or made by steps of forward, as they were fused,
  /// that run again. What ops make that are to be computed again is not kept where there is another
  /// way; without a budget all else stays as `plan` has it. Cost is bytes that are moved more, and
  /// operations that are computed more at what the device computes meanwhile. Numbers stay what
  /// they are: the same steps make them.
  ///
  /// `draft.forward` is fused. Notes in `plan` what is kept, and the choices.
  ///
  /// Throws: c10::ValueError where the budget is less than the least that can be kept, which it
  ///         states.
  void fit(Draft& draft, Plan& plan);

 private:
  std::vector<bool> kept_without_budget(const Ways& ways, const BackwardBase& base,
                                        const Plan& plan) const;

  const Description& description_;
  const PlanKey& key_;
  ValueSet never_again_;
  /// What ops make that are to be computed again, and the codes of that.
  ValueSet recomputed_;
  Steps whole_;
  Values codes_;
};

}  // namespace tandem
