#pragma once

#include <memory>

#include "pipeline/pipeline.h"
#include "pipeline_syntax.h"

namespace tandem::cli {

/// The ops of a workload as a user of libtorch would write them, one function after the other, with
/// the workload's parameters: `tandem bench` compares with it. Quantize does nothing here. An op
/// without a libtorch function runs in its composite form.
class PlainPipeline {
 public:
  explicit PlainPipeline(const Workload& workload);

  /// The main output, then extra outputs.
  std::vector<at::Tensor> forward(const at::Tensor& x, at::TensorList extra_inputs) const;

 private:
  struct BoundOp {
    OpText text;
    at::Tensor weight, bias;
    std::vector<at::Tensor> parameters;
    /// The function of an activation or gated unit.
    std::string activation;
    /// The composite form of an op without a libtorch function.
    std::shared_ptr<Pipeline> composite;
  };

  at::Tensor apply(const BoundOp& op, const at::Tensor& x) const;

  std::vector<BoundOp> ops_;
};

}  // namespace tandem::cli
