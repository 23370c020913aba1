// One run of a plan in one direction. Whatever runs a plan does it by a session: the autograd node,
// functions without a module, an op by itself, and verification.
#pragma once

#include <utility>
#include <vector>

#include "autograd/run.h"
#include "executor/executor.h"

namespace tandem {

class Session {
 public:
  /// Holds the values of a plan; none exists yet.
  Session(const Plan& plan, Path path);

  /// Holds the arguments of a call, to run forward. Throws c10::ValueError if they do not fit the
  /// plan.
  Session(const Plan& plan, Path path, const Arguments& arguments);

  /// What backward reads beside kept values.
  struct BackwardArguments {
    /// By output; undefined where there is none.
    at::TensorList gradients;
    /// As Arguments has them.
    at::TensorList workspaces, state;
    const Buffers& buffers;
  };
  /// Holds the arguments of backward, to run these steps. `path`: that of forward, from which
  /// gradients that kernels cannot read lead to the dispatcher. Throws c10::ValueError if a buffer
  /// that the steps mutate is undefined.
  Session(const Plan& plan, Path path, const Steps& backward, const BackwardArguments& arguments);

  const Plan& plan() const { return plan_; }
  Frame& frame() { return frame_; }

  /// Runs all steps of forward, each of which drops the values that no later step reads.
  void run_forward() { tandem::run_forward(frame_, plan_); }
  /// Appends the outputs of forward.
  void hand_out(Outputs& outputs) {
    for (const Value output : plan_.outputs) outputs.push_back(frame_.tensor(output));
  }

  /// Runs a backward program and returns its gradients, of inputs and then of parameters. A kept
  /// value has an index in Plan::kept: `load(value, index)` stores it in the frame ahead of the
  /// first step that reads it, and `release(index)` is called ahead of the last one, so that this
  /// step may write into memory that nothing else holds.
  template <typename Load, typename Release>
  std::vector<at::Tensor> run_backward(const BackwardPlan& backward, const Load& load,
                                       const Release& release) {
    c10::SmallVector<bool, 32> is_loaded(plan_.kept.size());
    const bool check_nan = checks_nan();
    for (const Step& step : backward.steps) {
      for (const Value value : step.reads) {
        if (!exists(value)) continue;
        const int32_t index = plan_.kept_at[index_of(value)];
        if (index >= 0 && !std::exchange(is_loaded[static_cast<size_t>(index)], true))
          load(value, static_cast<size_t>(index));
      }
      for (const Value dead : step.dead)
        if (const int32_t index = plan_.kept_at[index_of(dead)]; index >= 0)
          release(static_cast<size_t>(index));
      run_backward_step(step, check_nan);
    }
    std::vector<at::Tensor> gradients(plan_.gradients.size());
    for (size_t i = 0; i < gradients.size(); ++i)
      if (exists(backward.gradients[i])) gradients[i] = frame_.tensor(backward.gradients[i]);
    return gradients;
  }

  /// Runs a step and drops nothing.
  void run_keeping(Step step);

 private:
  void take_buffers(const Buffers& buffers, const Steps& steps);
  void run_backward_step(const Step& step, bool check_nan);
  static bool checks_nan();

  const Plan& plan_;
  Frame frame_;
};

/// The states that forward or backward of the plan uses. `state`: as Arguments::state.
std::vector<PendingUpdate> used_states(const Plan& plan, at::TensorList state, bool is_backward);

/// The parameters of a call that a cached weight consists of.
std::vector<at::Tensor> pieces_of(const CachedWeight& cached, const Plan& plan,
                                  at::TensorList params);

}  // namespace tandem
