// Plans for tests: ops by name, steps as text, runs with outputs and gradients.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "autograd/run.h"
#include "core/plan.h"
#include "planner/description.h"
#include "planner/key.h"
#include "support/tensors.h"

namespace tandem::testing {

/// Ops by name, each with its further fields as JSON behind it: "reshape {\"options\": {\"shape\":
/// [-1]}}". Parameters are numbered in order unless "params" says otherwise.
using Ops = std::vector<std::string>;

/// An op whose extra output goes to a channel alone, and one that adds what the channel holds.
std::string to_channel(const std::string& channel = "r");
std::string from_channel(const std::string& channel = "r");
/// An op that writes its sum into the extra input.
inline const std::string kAddInPlace = R"(add_extra_input {"in_place": true})";

/// The "ops" array of a description.
std::string ops_json(const Ops& ops);
/// A description; `fields` are the other ones, as JSON.
std::string description_of(const Ops& ops, const std::string& fields = "{}");

/// A plan for these tensors, made anew.
class Planned {
 public:
  Planned(const Ops& ops, Tensors inputs, Tensors params, const std::string& fields = "{}",
          PlanKey::Call call = {.grad_mode = true});

  const Plan& plan() const { return *plan_; }
  const std::shared_ptr<const Plan>& shared_plan() const { return plan_; }
  /// One line per step: "kind: reads -> writes".
  std::string forward() const;
  std::string backward() const;
  /// For gradients given and asked for as the mask says.
  std::string backward(const BackwardMask& mask) const;
  std::vector<std::string> kept() const;
  std::vector<std::string> outputs() const;
  /// "fusion at place: reason", "made" where it was; of both directions.
  std::vector<std::string> decisions() const;
  std::string name(Value value) const;

 private:
  std::string text_of(const Steps& steps) const;
  std::shared_ptr<const Description> description_;
  std::shared_ptr<const Plan> plan_;
};

/// What one call and its backward left behind.
struct RunResult {
  Tensors outputs,
      /// Gradients of the inputs, then of the parameters; undefined where none is required.
      gradients;
  int64_t saved_bytes = 0;
};

/// Runs a description on a path and differentiates a fixed combination of its outputs.
RunResult run(const Ops& ops, const Tensors& inputs, const Tensors& params,
              const std::string& fields = "{}", Path path = Path::direct);

/// Outputs and gradients of the fused program are those of the unfused one, called directly and
/// through the dispatcher; so are the bytes that it keeps.
::testing::AssertionResult fused_equals_unfused(const Ops& ops, const Tensors& inputs,
                                                const Tensors& params,
                                                const std::string& fields = "{}");

/// `fields` without the fusions whose name contains `text`: smaller ones, or none, cover what these
/// would.
std::string fields_without(const std::string& text, const Ops& ops, const Tensors& inputs,
                           const Tensors& params, const std::string& fields = "{}");

/// Outputs and gradients have the bits that they have without the fusions whose name contains
/// `text`.
::testing::AssertionResult has_bits_without(const std::string& text, const Ops& ops,
                                            const Tensors& inputs, const Tensors& params,
                                            const std::string& fields = "{}");

/// A function of inputs, then parameters, for `gradients_match`.
std::function<Tensors(const Tensors&)> function_of(const Ops& ops, size_t inputs = 1,
                                                   const std::string& fields = "{}");

}  // namespace tandem::testing
