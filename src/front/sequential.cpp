#include "tandem/sequential.h"

#include <c10/util/Exception.h>

#include "kernels/targets.h"

namespace tandem {

SequentialImpl::SequentialImpl(const std::vector<Op>& ops, const at::TensorOptions& options)
    : PipelineModule("Sequential", ops, Names::by_place, options) {}

std::vector<at::Tensor> SequentialImpl::forward(const at::Tensor& x, at::TensorList extra_inputs) {
  return run(x, extra_inputs);
}

at::Tensor SequentialImpl::forward(const at::Tensor& x) {
  const auto outputs = run(x, {});
  TORCH_CHECK_VALUE(outputs.size() == 1, "Sequential: expected one output, got ", outputs.size(),
                    ". Call forward(x, extra_inputs), which returns all of them.");
  return outputs[0];
}

std::vector<std::string> cpu_targets() { return kernels::supported_targets(); }

}  // namespace tandem
