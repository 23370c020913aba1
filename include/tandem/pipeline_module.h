// What the modules of Tandem share: a torch::nn::Module that is one pipeline.
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

/// Under a recipe that keeps amaxes, an op's module has buffers "recipe_state.forward.scale",
/// "recipe_state.forward.amax_history" and the same of backward: float32 whatever dtype the module
/// is given, made by the first call under it or where `load` finds them. Several threads may make
/// that call at once; none may list the module's parameters or buffers meanwhile.
class TANDEM_API PipelineModule : public torch::nn::Module {
 public:
  ~PipelineModule() override;

  /// The plans of the calls made so far: steps of both directions, what is kept, every fusion made
  /// or refused and why. Where calls differ in what they are given to write, those of calls like
  /// the last.
  std::string explain(ExplainFormat format = ExplainFormat::text,
                      const StepTimes& times = {}) const;
  /// Bytes that the last call with gradients kept for backward, inputs and parameters aside.
  int64_t saved_bytes() const;
  /// Keeps at most so many bytes for backward per row of the main input (numel(x) / size(-1) rows),
  /// from the next call on; nullopt, as at first: what the MemoryBudget in force allows. Numbers do
  /// not depend on it. `explain` shows what is kept, and what backward does instead of keeping the
  /// rest. No other thread may call the module meanwhile.
  ///
  /// Throws: c10::ValueError where it is negative or not finite; the next call, where the pipeline
  ///         cannot do with so little: with the least that it needs.
  void set_memory_budget(std::optional<double> bytes_per_row);
  std::optional<double> memory_budget() const;
  /// From the next call on each quantization says what it does, under this number, to whoever takes
  /// that (quantization/inspection.h); 0, as at first: none does. No other thread may call the
  /// module meanwhile.
  void set_watched(int64_t number);
  /// Compares fused with unfused on these tensors: outputs and gradients, for all and for random
  /// subsets of the gradients, that of x included whether it asks for one or not. Gradients that go
  /// into a main_grad are returned here, and no main_grad is written.
  VerifyReport verify(const at::Tensor& x, at::TensorList extra_inputs = {});

  /// Computes the gradients that the oldest backward has left of weights whose op is
  /// Op::with_delayed_wgrad(), and adds them to `grad()`, or to their main_grad: one call for each
  /// backward. Does nothing where there is no such op, or where all of these weights are frozen.
  ///
  /// Throws: c10::Error where there was no backward; where an input that they are computed from was
  ///         written in place since.
  void backward_dw();

  void load(torch::serialize::InputArchive& archive) override;
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

 protected:
  enum class Names : uint8_t {
    /// Of the parameters of an op: "<place in the list>.<name>".
    by_place,
    /// "<name>".
    plain,
  };
  /// Makes the parameters that no other module has, and the pipeline. `owners`: by place in the
  /// list, modules of one op whose recipe state is that of this op too; null, or none at all: this
  /// module's own.
  PipelineModule(const char* name, const std::vector<Op>& ops, Names names,
                 const at::TensorOptions& options,
                 const std::vector<std::shared_ptr<PipelineModule>>& owners = {});

  /// The op of a module of one, on the module's parameters.
  static const Op& op_of(const PipelineModule& module) { return module.ops_[0]; }

  /// A tensor of the caller that a call writes: the option of the only op that says so.
  struct Written {
    const char* option;
    at::Tensor tensor;
  };
  /// The main output, then the extra outputs in list order; `extra_inputs` one per unbound extra
  /// input, in list order.
  std::vector<at::Tensor> run(const at::Tensor& x, at::TensorList extra_inputs,
                              const std::vector<Written>& written = {});

  /// Gives a parameter of this module what the archive has under its name. Throws c10::Error where
  /// it has nothing.
  virtual void read_parameter(torch::serialize::InputArchive& archive, const std::string& parameter,
                              at::Tensor& value);

 private:
  /// The pipeline of calls that write such tensors, made by the first of them.
  Pipeline& pipeline_writing(const std::vector<Written>& written);
  /// Puts weights that run as one product, and lie apart, behind each other in one memory.
  void bring_together();
  /// The recipe's state, made where it is not there yet.
  std::vector<at::Tensor> state(int64_t history_length);

  /// Of an op with products: who keeps the state, or the module that it is registered with, this
  /// one where both are null, and how many slots each direction has.
  struct StateOwner {
    std::shared_ptr<PipelineModule> owner;
    std::string name;
    std::shared_ptr<torch::nn::Module> module;
    std::array<int64_t, 2> slots;
    std::array<std::shared_ptr<ScalingBuffers>, 2> directions = {};
  };
  /// Makes the state of an owner where it is not there yet, with so many rows of history.
  void make_state(StateOwner& owner, int64_t history_length);
  std::mutex state_mutex_;
  std::vector<StateOwner> state_owners_;
  /// As the pipeline takes them. Whoever replaces what one holds (`to`, `load`) does so in place.
  std::vector<at::Tensor> parameters_, main_grads_;
  /// Weights whose gradients come later, and what backward has left of them, which graphs share.
  std::shared_ptr<LeftByBackward> left_;
  std::unique_ptr<Pipeline> pipeline_;
  /// Of calls that write tensors of the caller, with the options that say which.
  struct Writing {
    std::vector<std::string> options;
    std::unique_ptr<Pipeline> pipeline;
  };
  mutable std::mutex writing_mutex_;
  std::vector<Writing> writing_;
  /// That of the last call.
  std::atomic<Pipeline*> last_{nullptr};
  int64_t watched_ = 0;
  /// On the parameters.
  std::vector<Op> ops_;
  /// The ops without main_grads, for `verify`; empty where there are none.
  std::string ops_to_verify_;
};

}  // namespace tandem
