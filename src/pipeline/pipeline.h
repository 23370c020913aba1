// A pipeline as the fronts hold it: a list of ops with its programs and weight workspaces. It is a
// cache only; nothing here is saved.
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

/// Returns the state that the modules of a pipeline keep for a recipe whose history has so many
/// rows: scale, amax_history and pending, of forward and backward, for each module in the order of
/// the ops' "state". Called only if the recipe has a state.
using StateOf = std::function<std::vector<at::Tensor>(int64_t history_length)>;

/// Arguments::state for a call in this thread's region: the region's number, then `state`. A
/// recompute gets the scales of its forward, because the current ones belong to a later step.
///
/// Throws: c10::ValueError if a recompute runs in a region other than that of its forward.
TANDEM_API std::vector<at::Tensor> state_in_region(std::vector<at::Tensor> state);

class TANDEM_API Pipeline {
 public:
  /// `ops`: the "ops" array of a description. `required_fusions`: calls throw, with the reason, if
  /// one of these is not made. `memory_budget`: bytes per row to keep for backward; nullopt: the
  /// region's budget.
  explicit Pipeline(std::string ops, std::vector<std::string> required_fusions = {},
                    std::optional<double> memory_budget = std::nullopt);

  /// Sets the budget for later calls. Other threads must not call the pipeline meanwhile. Throws
  /// c10::ValueError if the budget is negative or not finite.
  void set_memory_budget(std::optional<double> bytes_per_row);
  std::optional<double> memory_budget() const { return memory_budget_; }

  /// In later calls each quantization reports what it loses, under this number
  /// (quantization/inspection.h); 0: none does. Other threads must not call the pipeline meanwhile.
  void set_watched(int64_t number) { watched_ = number; }

  /// Runs the pipeline under the thread's recipe, on the path that the tensors and the thread's
  /// state demand.
  ///
  /// Shapes: inputs are the main input and one per unbound extra input; outputs likewise.
  /// `given`: arguments of user code other than tensors; only a direct call passes them on.
  /// Throws: c10::ValueError if tensors do not fit the ops.
  Outputs operator()(at::TensorList inputs, at::TensorList params, bool training,
                     Buffers buffers = {}, const StateOf& state_of = {},
                     const void* given = nullptr);

  /// Runs the ops as differentiable torch operations, one after the other: without kernels,
  /// fusions, a node or a recipe.
  Outputs composite(at::TensorList inputs, at::TensorList params, bool training) const;

  /// Notes the recipe of a call that does not use operator(), which notes its own.
  ///
  /// Throws: c10::ValueError if backward recomputes under another recipe than that of the last
  ///         forward.
  void note_recipe(bool training);

  /// Refuses a call that does not use operator() if an op must write into an argument: only
  /// operator() does.
  ///
  /// Throws: c10::ValueError, unless the call is recorded or on the meta device.
  void check_no_writes(at::TensorList inputs) const;

  /// The program that a call which is not direct finds by its description; benchmarks measure the
  /// cost of that.
  std::shared_ptr<Program> described_program(bool training) {
    const Visit visit(*this);
    return program_of(text_for_op(state(training)));
  }

  /// The description in a state, as tandem::pipeline takes it.
  std::string description(bool training, bool fuse = true,
                          const std::vector<std::string>& skipped_fusions = {}) const;

  std::string explain(ExplainFormat format, const StepTimes& times = {}) const;
  /// Bytes that the last call with grad kept for backward, without inputs and parameters.
  int64_t saved_bytes() const { return saved_bytes_.load(std::memory_order_relaxed); }
  /// The recipe of the last call as JSON; empty: none.
  std::string last_recipe() const {
    const int64_t number = last_recipe_.load(std::memory_order_relaxed);
    return number == 0 ? std::string() : recipe_text(number);
  }
  /// Whether any direct call was made, so that `explain` has a plan. Takes no lock.
  bool has_run() const;
  /// Names of the fusions that were made in any plan so far.
  std::vector<std::string> fusions_made() const;

 private:
  /// A plan that has served this pipeline. Programs are shared by all pipelines with equal ops.
  struct Served {
    std::shared_ptr<const Plan> plan;
    Served* older;
    /// By kept value: bytes in the last call with grad.
    std::vector<std::atomic<int64_t>> kept_bytes;
  };
  /// The weight whose codes a workspace holds. While a call uses the workspace it holds the
  /// weight's memory, so no other weight can have its address.
  struct CodedWeight {
    /// The addresses of its pieces, and their strides one after the other.
    c10::SmallVector<const void*, 4> data = {};
    c10::SmallVector<int64_t, 8> strides = {};
    at::ScalarType dtype = at::kFloat;
    bool operator==(const CodedWeight&) const = default;
  };
  static CodedWeight coded_weight(at::TensorList pieces);
  /// The workspace of a plan's weight with this index, for plans that read its codes in the
  /// directions of `mask`.
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
    /// The workspaces under `recipe`.
    std::vector<HeldWorkspace> workspaces;
    std::atomic<State*> older;
    std::atomic<Served*> newest_served{nullptr};
    std::vector<std::unique_ptr<Served>> served = {};
    /// The description for tandem::pipeline, written at first use.
    std::atomic<const std::string*> text{nullptr};
    std::unique_ptr<const std::string> held_text = {};
  };
  /// A running call. While there is one, no state that it may see is destroyed.
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
  /// The memory budget of calls in this thread.
  std::optional<double> budget_now() const {
    return memory_budget_ ? memory_budget_ : active_memory_budget();
  }
  const std::string& text_for_op(State& state);
  void retire_states(uint64_t fusions_version);
  void free_retired() const;
  /// The description. It includes the required fusions unless fusions are left out.
  std::string text_of(const ActiveRecipe* recipe, PlanningTerms terms) const;
  /// Null if there are too many plans: `explain` shows the first ones.
  Served* served(State& state, const std::shared_ptr<const Plan>& plan);
  /// Why the weight has no workspace for these codes. `weight`: its index among a plan's cached
  /// weights.
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
  /// The oldest state is first.
  std::vector<std::unique_ptr<State>> states_;
  /// States that no later call can find. They are destroyed when no call runs.
  mutable std::vector<std::unique_ptr<State>> retired_;
  mutable std::atomic<bool> has_retired_{false};
  mutable std::atomic<int64_t> visits_{0};
  std::atomic<int64_t> saved_bytes_{0};
  std::atomic<int64_t> last_recipe_{0};
  /// Recipes under which a checkpoint may recompute: that of the last call with grad, and those of
  /// the calls without grad since the last recompute.
  struct Calls {
    /// The number of the recipe of the last call with grad; 0: none.
    std::atomic<int64_t> with_grad;
    /// The number of the recipe of the calls without grad, ignoring calls without a recipe.
    std::atomic<int64_t> under{0};
    /// Whether any call without grad had no recipe.
    std::atomic<bool> plain{false};
    /// Whether a recompute has happened, so that the next call without grad starts a new count.
    std::atomic<bool> are_recomputed{false};
  };
  /// For evaluation and for training: a validation between forward and backward changes nothing.
  std::array<Calls, 2> calls_;
};

}  // namespace tandem
