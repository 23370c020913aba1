// The base of Tandem's modules: a torch::nn::Module that is one pipeline.
#pragma once

#include <torch/nn/module.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tandem/export.h"
#include "tandem/ops.h"
#include "tandem/report.h"

namespace tandem {

class Pipeline;
struct ScalingBuffers;
struct LeftByBackward;

/// A module that is one pipeline. Under a recipe that keeps amaxes, an op's module has buffers
/// "recipe_state.forward.scale", "recipe_state.forward.amax_history" and the two of
/// "recipe_state.backward". They are float32 in a module of any dtype. The first call under the
/// recipe creates them, or `load` where the archive has them. Several threads may make this call at
/// once; no thread may list the module's parameters or buffers meanwhile.
class TANDEM_API PipelineModule : public torch::nn::Module {
 public:
  ~PipelineModule() override;

  /// Shows the plans of the calls so far: the steps of both directions, kept values, and each
  /// fusion or the reason of its refusal. Calls that write different tensors of the caller have
  /// different plans; then the text shows the plans of calls like the last one.
  std::string explain(ExplainFormat format = ExplainFormat::text,
                      const StepTimes& times = {}) const;
  /// Returns the bytes that the last call with gradients kept for backward, without inputs and
  /// parameters.
  ///
  /// Units:   bytes.
  int64_t saved_bytes() const;
  /// Limits the bytes that a call keeps for backward per row of the main operand, which has
  /// numel(x) / size(-1) rows, from the next call on. nullopt, the initial value, leaves the limit
  /// to the MemoryBudget in force. The results do not depend on the limit. `explain` shows what is
  /// kept, and what backward does instead of keeping the rest. No other thread may call the module
  /// meanwhile.
  ///
  /// Units:   bytes per row.
  /// Throws:  c10::ValueError where the number is negative or not finite. The next call:
  ///          c10::ValueError where its pipeline needs more; the message gives the least budget.
  void set_memory_budget(std::optional<double> bytes_per_row);
  std::optional<double> memory_budget() const;
  /// From the next call on, each quantization reports under this number to the receivers of
  /// quantization/inspection.h. 0, the initial value, turns reports off. No other thread may call
  /// the module meanwhile.
  void set_watched(int64_t number);
  /// Compares the pipeline with and without fusions on these tensors: outputs and gradients, for
  /// all gradients and for random subsets. The gradient of x is always among them. Gradients are
  /// returned instead of added to a main_grad, so that no main_grad changes.
  VerifyReport verify(const at::Tensor& x, at::TensorList extra_inputs = {});

  /// Computes the gradients that the oldest backward left to this call, which are those of weights
  /// of ops from Op::with_delayed_wgrad(), and adds them to `grad()` or to a main_grad. Call it
  /// once for each backward. It does nothing where the module has no such op, or all such weights
  /// are frozen.
  ///
  /// Throws:  c10::Error where no backward came before, and where an operand of these gradients was
  ///          written in place since.
  void backward_dw();

  void load(torch::serialize::InputArchive& archive) override;
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

 protected:
  enum class Names : uint8_t {
    /// Parameters are named "<index in the list>.<name>".
    by_place,
    /// Parameters are named "<name>".
    plain,
  };
  /// Creates the pipeline, and the parameters for which the ops have no tensor. `owners` has for
  /// each op the module of one op that owns the op's recipe state; where an entry is null or
  /// missing, this module owns it.
  PipelineModule(const char* name, const std::vector<Op>& ops, Names names,
                 const at::TensorOptions& options,
                 const std::vector<std::shared_ptr<PipelineModule>>& owners = {});

  /// The only op of `module`, on the module's parameters.
  static const Op& op_of(const PipelineModule& module) { return module.ops_[0]; }

  /// A tensor of the caller that a call writes. `option` names the option of the module's only op
  /// that makes the op write it.
  struct Written {
    const char* option;
    at::Tensor tensor;
  };
  /// Returns the main output, then the extra outputs in the order of the list. `extra_inputs` has
  /// one tensor for each extra input without a channel, in the order of the list.
  std::vector<at::Tensor> run(const at::Tensor& x, at::TensorList extra_inputs,
                              const std::vector<Written>& written = {});

  /// Reads a parameter of this module from the archive.
  ///
  /// Throws:  c10::Error where the archive has no tensor under the parameter's name.
  virtual void read_parameter(torch::serialize::InputArchive& archive, const std::string& parameter,
                              at::Tensor& value);

 private:
  /// Returns the pipeline for calls that write these tensors of the caller; the first such call
  /// creates it.
  Pipeline& pipeline_writing(const std::vector<Written>& written);
  /// Moves weights that one product reads into one memory, behind each other, where they lie apart.
  void bring_together();
  /// Returns the state of the recipe, which the first call creates.
  std::vector<at::Tensor> state(int64_t history_length);

  /// The owner of an op's recipe state: the module `owner`, or else the child `module` under
  /// `name`, or else this module. `slots` counts the quantized tensors of each direction.
  struct StateOwner {
    std::shared_ptr<PipelineModule> owner;
    std::string name;
    std::shared_ptr<torch::nn::Module> module;
    std::array<int64_t, 2> slots;
    std::array<std::shared_ptr<ScalingBuffers>, 2> directions = {};
  };
  /// Creates the state of an owner, with `history_length` rows of history, unless the state exists.
  void make_state(StateOwner& owner, int64_t history_length);
  std::mutex state_mutex_;
  std::vector<StateOwner> state_owners_;
  /// In the order of the pipeline. `to` and `load` replace data in place, so that these stay valid.
  std::vector<at::Tensor> parameters_, main_grads_;
  /// Weights with delayed gradients, and the operands that backward left. Autograd graphs share the
  /// object.
  std::shared_ptr<LeftByBackward> left_;
  std::unique_ptr<Pipeline> pipeline_;
  /// A pipeline for calls that write tensors of the caller, with the options that name the tensors.
  struct Writing {
    std::vector<std::string> options;
    std::unique_ptr<Pipeline> pipeline;
  };
  mutable std::mutex writing_mutex_;
  std::vector<Writing> writing_;
  /// The pipeline of the last call.
  std::atomic<Pipeline*> last_{nullptr};
  int64_t watched_ = 0;
  /// The ops, bound to this module's parameters.
  std::vector<Op> ops_;
  /// The ops without main_grads and delayed gradients, for `verify`; empty where the ops have
  /// neither.
  std::string ops_to_verify_;
};

}  // namespace tandem
