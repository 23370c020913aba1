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

/// Runs a list of operations as planned, fused and, inside an Autocast region, quantized steps: one
/// autograd node for all of them.
///
///   tandem::Sequential mlp({tandem::ops::rms_norm(h), tandem::ops::linear(h, 2 * f),
///   tandem::ops::swiglu(), tandem::ops::linear(f, h)}); at::Tensor y = mlp->forward(x);
///
/// Parameters are called "<position in the list>.<name>", such as "1.weight".
class TANDEM_API SequentialImpl : public PipelineModule {
 public:
  explicit SequentialImpl(const std::vector<Op>& ops, const at::TensorOptions& options = {});

  /// The main output. Throws c10::ValueError where an op takes or returns more than one tensor that
  /// is bound to no channel.
  at::Tensor forward(const at::Tensor& x);
  /// The main output, then the extra outputs in list order; `extra_inputs` one per unbound extra
  /// input, in list order.
  std::vector<at::Tensor> forward(const at::Tensor& x, at::TensorList extra_inputs);
};

/// A shared handle, as those of torch::nn.
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

/// Instruction sets that this processor's kernels run with, the best first: "AVX3" (AVX-512),
/// "AVX2", ..., none above TANDEM_MAX_CPU_ISA (avx512, avx2 or baseline) where that is set.
///
/// Throws: std::invalid_argument where it is set to something else.
TANDEM_API std::vector<std::string> cpu_targets();

}  // namespace tandem
