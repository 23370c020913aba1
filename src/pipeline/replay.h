// Plans run step by step, every value kept: the unfused ones as the reference, the fused steps of
// another one on its values.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "autograd/run.h"
#include "core/call.h"
#include "core/plan.h"

namespace tandem {

/// The values of an unfused run. A copy goes on from where the original is.
class Replay {
 public:
  /// `inputs`, `params`: the arguments of the plan.
  Replay(const Plan& plan, const Arguments& arguments);

  const Plan& plan() const { return plan_; }
  Frame& frame() { return frame_; }
  /// Runs steps; of one that runs user code, the state of `generator` before it is kept.
  void run(const Steps& steps, at::Generator& generator);

  bool has(Value value);
  /// The generator's state when the step that covers `part` began; undefined where no user code
  /// ran.
  at::Tensor generator_state(const Part& part) const;

 private:
  const Plan& plan_;
  Frame frame_;
  std::map<Part, at::Tensor> generator_states_;
};

/// What a fused step does wrong.
struct WrongStep {
  /// The fusion's name; empty where nothing is wrong.
  std::string fusion;
  std::string text;
  Step step;
};

/// Compares a fused plan's steps with the unfused ones, and knows afterwards how far apart the
/// values may be where both run as a whole.
class StepCheck {
 public:
  StepCheck(const Plan& fused, int64_t& comparisons);

  /// Runs those of `steps` that `unfused` has not, on the values of `reference`, which has run
  /// `unfused`.
  WrongStep check(const Steps& steps, const Steps& unfused, Replay& reference,
                  at::Generator& generator);

  /// Bound of a value's distance from the unfused one: relative, in norm where codes that may
  /// differ lie before it; 0: the same bits.
  struct Bound {
    double relative = 0;
    bool in_norm = false;
  };
  const Bound& bound(Value value) const { return bounds_[index_of(value)]; }

 private:
  bool provide(Value value, Replay& reference);
  std::string compare(const Step& step, size_t write, const Steps& members, Replay& reference,
                      bool& is_same);
  bool holds_tensor(Value value);
  at::Tensor scale_of(const Step& step, Value value, const Steps& members, Replay& reference);
  at::Tensor in_float32(Value value, const Steps& members, Replay& reference);
  void carry_bounds(const Step& step, bool is_same, double tolerance);

  Frame frame_;
  std::vector<Bound> bounds_;
  int64_t& comparisons_;
};

}  // namespace tandem
