// A pipeline as the fronts hold it: a list of ops, its programs by state, its weight workspaces. A
// cache only: nothing here is saved.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "autograd/call.h"
#include "kernel_ops/weights/weights.h"
#include "pipeline/autocast.h"
#include "tandem/export.h"
#include "tandem/report.h"

namespace tandem {

/// What the modules of a pipeline keep for a recipe whose history has so many rows: scale,
/// amax_history and pending, of forward and of backward, of each module in the order that the ops'
/// "state" numbers. Asked for where the recipe has a state.
using StateOf = std::function<std::vector<at::Tensor>(int64_t history_length)>;

/// Arguments::state for a call in the region of this thread: the region's number, then `state`. A
/// recompute has the scales of its forward: those of now are of a later step.
///
/// Throws: c10::ValueError where the region of a recompute is not that of its forward.
TANDEM_API std::vector<at::Tensor> state_in_region(std::vector<at::Tensor> state);

class TANDEM_API Pipeline {
 public:
  /// `ops`: the "ops" array of a description. `required_fusions`: an error with the reason where
  /// one of these is not made.
  /// `memory_budget`: bytes per row that it keeps for backward; nullopt: that of the region.
  explicit Pipeline(std::string ops, std::vector<std::string> required_fusions = {},
                    std::optional<double> memory_budget = std::nullopt);

  /// From the next call on. Other threads must not call it meanwhile. Throws c10::ValueError where
  /// it is negative or not finite.
  void set_memory_budget(std::optional<double> bytes_per_row);
  std::optional<double> memory_budget() const { return memory_budget_; }

  /// From the next call on each quantization says what it does, under this number
  /// (quantization/inspection.h); 0: none does. Other threads must not call it meanwhile.
  void set_watched(int64_t number) { watched_ = number; }

  /// Runs the pipeline on the path that the tensors and the thread's state ask for, under the
  /// thread's recipe.
  ///
  /// Shapes: inputs are the main input and one per unbound extra input; the outputs likewise.
  /// `given`: what user code is given besides tensors; only a direct call passes it on.
  /// Throws: c10::ValueError where tensors do not fit the ops.
  Outputs operator()(at::TensorList inputs, at::TensorList params, bool training,
                     Buffers buffers = {}, const StateOf& state_of = {},
                     const void* given = nullptr);

  /// The same in differentiable torch operations, one after the other: no kernel, fusion, node or
  /// recipe.
  Outputs composite(at::TensorList inputs, at::TensorList params, bool training) const;

  /// Remembers the recipe of a call that goes another way, as operator() does of its own.
  ///
  /// Throws: c10::ValueError where a backward recomputes under another recipe than that of the last
  ///         forward.
  void note_recipe(bool training);

  /// Refuses a call that goes another way where the caller has asked that it writes an argument:
  /// that way writes none.
  ///
  /// Throws: c10::ValueError, unless the call is recorded or on the meta device.
  void check_no_writes(at::TensorList inputs) const;

  /// The program that a call finds by its description where it is not direct; for benchmarks, which
  /// tell what that costs.
  std::shared_ptr<Program> described_program(bool training) {
    const Visit visit(*this);
    return program_of(text_for_op(state(training)));
  }

  /// The description of a state: what tandem::pipeline takes.
  std::string description(bool training, bool fuse = true,
                          const std::vector<std::string>& skipped_fusions = {}) const;

  std::string explain(ExplainFormat format, const StepTimes& times = {}) const;
  /// Bytes that the last call with grad kept for backward, inputs and parameters aside.
  int64_t saved_bytes() const { return saved_bytes_.load(std::memory_order_relaxed); }
  /// The recipe of the last call, as JSON; empty: none.
  std::string last_recipe() const {
    const int64_t number = last_recipe_.load(std::memory_order_relaxed);
    return number == 0 ? std::string() : recipe_text(number);
  }
  /// Whether any call has been made directly, so that `explain` has a plan to tell of. Takes no
  /// lock.
  bool has_run() const;
  /// Names of the fusions that any plan so far has made.
  std::vector<std::string> fusions_made() const;

 private:
  /// A plan that has served this pipeline; programs are shared with every pipeline of the same ops.
  struct Served {
    std::shared_ptr<const Plan> plan;
    Served* older;
    /// By kept value, of the last call with grad.
    std::vector<std::atomic<int64_t>> kept_bytes;
  };
  /// Whose codes a workspace holds. Whoever uses the workspace holds the weight's memory: no other
  /// weight gets its address meanwhile.
  struct CodedWeight {
    /// Of its pieces, and their strides one behind the other.
    c10::SmallVector<const void*, 4> data = {};
    c10::SmallVector<int64_t, 8> strides = {};
    at::ScalarType dtype = at::kFloat;
    bool operator==(const CodedWeight&) const = default;
  };
  static CodedWeight coded_weight(at::TensorList pieces);
  /// Of the nth weight of plans that read its codes in the directions of `mask`.
  struct HeldWorkspace {
    size_t weight;
    const Quantizer* quantizer;
    GroupMask mask;
    CodedWeight coded;
    kernel_ops::Workspace parts;
  };
  struct State {
    ActiveRecipePtr recipe;
    bool training;
    uint64_t fusions_version;
    int64_t watched;
    std::optional<double> memory_budget;
    std::shared_ptr<Program> program;
    /// Of `recipe`.
    std::vector<HeldWorkspace> workspaces;
    std::atomic<State*> older;
    std::atomic<Served*> newest_served{nullptr};
    std::vector<std::unique_ptr<Served>> served = {};
    /// What tandem::pipeline takes, made once it is asked for.
    std::atomic<const std::string*> text{nullptr};
    std::unique_ptr<const std::string> held_text = {};
  };
  /// A call at work: while there is one, no state that it may see dies.
  class Visit {
   public:
    explicit Visit(const Pipeline& pipeline) : pipeline_(pipeline) { ++pipeline.visits_; }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;
    ~Visit() {
      if (--pipeline_.visits_ == 0 && pipeline_.has_retired_) pipeline_.free_retired();
    }

   private:
    const Pipeline& pipeline_;
  };

  State& state(bool training);
  /// Of calls in this thread.
  std::optional<double> budget_now() const {
    return memory_budget_ ? memory_budget_ : active_memory_budget();
  }
  const std::string& text_for_op(State& state);
  void retire_states(uint64_t fusions_version);
  void free_retired() const;
  /// With the required fusions, where nothing is left out.
  std::string text_of(const ActiveRecipe* recipe, PlanningTerms terms) const;
  /// Null for one of too many plans: `explain` tells of the first ones.
  Served* served(State& state, const std::shared_ptr<const Plan>& plan);
  /// Why the nth weight of plans has no workspace for these codes.
  kernel_ops::CodesWere why_none(size_t weight, const Quantizer& quantizer) const;
  std::vector<at::Tensor> workspaces_for(const Plan& plan, const Arguments& arguments,
                                         State& state);

  std::string ops_;
  std::vector<std::string> required_fusions_;
  int64_t watched_ = 0;
  std::optional<double> memory_budget_;
  bool writes_arguments_;
  std::atomic<State*> newest_{nullptr};
  mutable std::mutex mutex_;
  /// Oldest first.
  std::vector<std::unique_ptr<State>> states_;
  /// States that no later call finds: they die when no call is at work.
  mutable std::vector<std::unique_ptr<State>> retired_;
  mutable std::atomic<bool> has_retired_{false};
  mutable std::atomic<int64_t> visits_{0};
  std::atomic<int64_t> saved_bytes_{0};
  std::atomic<int64_t> last_recipe_{0};
  /// What a recompute may repeat: the last call with grad, and the calls without since the last
  /// recompute.
  struct Calls {
    /// The number of its recipe; 0: none.
    std::atomic<int64_t> with_grad;
    /// That of those without grad, aside from those without a recipe.
    std::atomic<int64_t> under{0};
    /// Whether there were any of these.
    std::atomic<bool> plain{false};
    /// The next call without grad is the first of others.
    std::atomic<bool> are_recomputed{false};
  };
  /// In evaluation and in training: a validation between forward and backward changes nothing.
  std::array<Calls, 2> calls_;
};

}  // namespace tandem
