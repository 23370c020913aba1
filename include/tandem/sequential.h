// A pipeline of operations as a torch::nn::Module.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "tandem/export.h"
#include "tandem/ops.h"
#include "tandem/recipe.h"
#include "tandem/report.h"

namespace tandem {

class Pipeline;

/// Runs a list of operations as planned, fused and, inside an Autocast region, quantized steps: one
/// autograd node for all of them.
///
///   tandem::Sequential mlp({tandem::ops::rms_norm(h), tandem::ops::linear(h, 2 * f),
///   tandem::ops::swiglu(), tandem::ops::linear(f, h)}); at::Tensor y = mlp->forward(x);
///
/// Parameters are called "<position in the list>.<name>", such as "1.weight". Under a recipe that
/// keeps amaxes an op's module has buffers "recipe_state.forward.scale",
/// "recipe_state.forward.amax_history" and the same of backward.
class TANDEM_API SequentialImpl : public torch::nn::Module {
 public:
  explicit SequentialImpl(const std::vector<Op>& ops, const at::TensorOptions& options = {});
  ~SequentialImpl() override;

  /// The main output. Throws c10::ValueError where an op takes or returns more than one tensor that
  /// is bound to no channel.
  at::Tensor forward(const at::Tensor& x);
  /// The main output, then the extra outputs in list order; `extra_inputs` one per unbound extra
  /// input, in list order.
  std::vector<at::Tensor> forward(const at::Tensor& x, at::TensorList extra_inputs);

  /// The plans of the calls made so far: steps of both directions, what is kept, every fusion made
  /// or refused and why.
  std::string explain(ExplainFormat format = ExplainFormat::text) const;
  /// Bytes that the last call with gradients kept for backward, inputs and parameters aside.
  int64_t saved_bytes() const;
  /// Compares fused with unfused on these tensors: outputs and gradients, for all and for random
  /// subsets of the gradients.
  VerifyReport verify(const at::Tensor& x, at::TensorList extra_inputs = {}) const;

 private:
  std::vector<at::Tensor> parameter_list() const;

  /// The recipe's state, made where it is not there yet.
  std::vector<at::Tensor> state(int64_t history_length) const;

  /// An op with products: the module that keeps the state, and how many slots it has.
  struct StateOwner {
    std::shared_ptr<torch::nn::Module> module;
    int64_t forward, backward;
  };
  std::vector<StateOwner> state_owners_;
  std::unique_ptr<Pipeline> pipeline_;
};

/// A shared handle, as those of torch::nn.
class Sequential : public torch::nn::ModuleHolder<SequentialImpl> {
 public:
  using torch::nn::ModuleHolder<SequentialImpl>::ModuleHolder;
  using Impl = SequentialImpl;
  explicit Sequential(std::initializer_list<Op> ops, const at::TensorOptions& options = {})
      : ModuleHolder(std::make_shared<SequentialImpl>(std::vector<Op>(ops), options)) {}
};

inline VerifyReport verify(const Sequential& pipeline, const at::Tensor& x,
                           at::TensorList extra_inputs = {}) {
  return pipeline->verify(x, extra_inputs);
}

/// Instruction sets that this processor's kernels run with, the best first: "AVX3", "AVX2", ...
TANDEM_API std::vector<std::string> cpu_targets();

}  // namespace tandem
