// A pipeline of operations as a torch::nn::Module.
#pragma once

#include <torch/nn/pimpl.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "tandem/export.h"
#include "tandem/ops.h"
#include "tandem/pipeline_module.h"

namespace tandem {

/// Runs a list of ops as the steps of a plan: fused and, inside an Autocast region, quantized. One
/// autograd node stands for all of them.
///
///   tandem::Sequential mlp({tandem::ops::rms_norm(h), tandem::ops::linear(h, 2 * f),
///                           tandem::ops::swiglu(), tandem::ops::linear(f, h)});
///   at::Tensor y = mlp->forward(x);
///
/// Parameters are named "<position in the list>.<name>", such as "1.weight".
class TANDEM_API SequentialImpl : public PipelineModule {
 public:
  explicit SequentialImpl(const std::vector<Op>& ops, const at::TensorOptions& options = {});

  /// Returns the main output.
  ///
  /// Throws:  c10::ValueError where the list has an extra input or an extra output without a
  ///          channel.
  at::Tensor forward(const at::Tensor& x);
  /// Returns the main output, then the extra outputs in the order of the list. `extra_inputs` has
  /// one tensor for each extra input without a channel, in the order of the list.
  std::vector<at::Tensor> forward(const at::Tensor& x, at::TensorList extra_inputs);
};

/// A shared handle, like the handles of torch::nn.
class Sequential : public torch::nn::ModuleHolder<SequentialImpl> {
 public:
  using torch::nn::ModuleHolder<SequentialImpl>::ModuleHolder;
  using Impl = SequentialImpl;
  explicit Sequential(std::initializer_list<Op> ops, const at::TensorOptions& options = {})
      : ModuleHolder(std::make_shared<SequentialImpl>(std::vector<Op>(ops), options)) {}
};

inline VerifyReport verify(Sequential pipeline, const at::Tensor& x,
                           at::TensorList extra_inputs = {}) {
  return pipeline->verify(x, extra_inputs);
}

/// Returns the instruction sets that the kernels can use on this processor, the best first: "AVX3"
/// (AVX-512), "AVX2", ... The environment variable TANDEM_MAX_CPU_ISA (avx512, avx2 or baseline)
/// excludes better ones.
///
/// Throws:  std::invalid_argument where TANDEM_MAX_CPU_ISA has another value.
TANDEM_API std::vector<std::string> cpu_targets();

}  // namespace tandem
