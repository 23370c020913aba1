// Memory budgets: what forward keeps is chosen so that it fits the budget and backward has the
// least extra work. Ops that the user wants recomputed are handled here too, whatever they cost.
#pragma once

#include <map>
#include <vector>

#include "planner/draft.h"
#include "planner/fuse.h"
#include "planner/key.h"
#include "planner/value_set.h"
#include "planner/ways.h"

namespace tandem {

/// For at most this many values with a choice, the chosen set is optimal; above, it is found
/// greedily.
inline constexpr size_t kMostFreeValues = 24;

class BudgetFit {
 public:
  /// `draft`: before anything is chosen.
  BudgetFit(const Description& description, const PlanKey& key,
            const std::vector<OpGroup>& backward_groups, const Draft& draft);

  /// Codes that backward reads; forward computes them if they are kept.
  const Values& codes() const { return codes_; }

  /// Replaces backward by one that gets what it reads within description.memory_budget: a value is
  /// kept, re-emitted by a backward step, or recomputed by a fused forward step. Results of ops
  /// with `recompute` are not kept if there is another way; without a budget everything else stays
  /// as `plan` has it. Cost is the extra bytes that are moved, plus the extra operations, converted
  /// by what the device computes in the time of a byte. Results do not change, because equal steps
  /// compute them.
  ///
  /// `draft.forward` must be fused. Notes the kept values and the choices in `plan`.
  ///
  /// Throws: c10::ValueError, which states the least budget, if the budget is less.
  void fit(Draft& draft, Plan& plan);

 private:
  std::vector<bool> kept_without_budget(const Ways& ways, const BackwardBase& base,
                                        const Plan& plan) const;

  const Description& description_;
  const PlanKey& key_;
  ValueSet never_again_;
  /// Results of ops with `recompute`, and codes of these.
  ValueSet recomputed_;
  Steps whole_;
  Values codes_;
};

}  // namespace tandem
