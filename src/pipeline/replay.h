// Runs plans step by step and keeps every value: an unfused plan as the reference, and the fused
// steps of another plan on the reference's values.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "autograd/session.h"
#include "core/call.h"
#include "core/plan.h"

namespace tandem {

/// The values of an unfused run. A copy continues where the original stands.
class Replay : public Session {
 public:
  Replay(const Plan& plan, const Arguments& arguments) : Session(plan, Path::direct, arguments) {}

  /// Runs steps. Before a step that runs user code, it notes the state of `generator`.
  void run(const Steps& steps, at::Generator& generator);

  bool has(Value value);
  /// The generator's state when the step that covers `part` began; undefined if no user code ran.
  at::Tensor generator_state(const Part& part) const;

 private:
  std::map<Part, at::Tensor> generator_states_;
};

/// A wrong result of a fused step.
struct WrongStep {
  /// The fusion's name; empty if nothing is wrong.
  std::string fusion;
  std::string text;
  Step step;
};

/// Compares the steps of a fused plan with the unfused ones, and derives how far values may be
/// apart when both plans run as a whole.
class StepCheck : private Session {
 public:
  StepCheck(const Plan& fused, int64_t& comparisons)
      : Session(fused, Path::direct), bounds_(fused.types.size()), comparisons_(comparisons) {}

  /// Runs the fused steps among `steps` on the values of `reference`, which has run `unfused`, and
  /// compares what they write.
  WrongStep check(const Steps& steps, const Steps& unfused, Replay& reference,
                  at::Generator& generator);

  /// A bound of a value's distance from the unfused value: relative, and in norm if it depends on
  /// codes that may differ; 0: bitwise equal.
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

  std::vector<Bound> bounds_;
  int64_t& comparisons_;
};

}  // namespace tandem
