// Linear layers of groups of rows, the experts of a mixture, as a module with the arguments and
// parameter names of transformer_engine.pytorch.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tandem/export.h"
#include "tandem/modules.h"

namespace tandem {

struct GroupedLinearOptions {
  bool bias = true;
  /// The biases are not added but returned.
  bool return_bias = false;
  /// Of each weight.
  Init init_method = init::normal(0.023);
  /// Each rank holds its share of each weight; what ranks exchange is up to who calls, as in
  /// TransformerEngine.
  TensorParallel tensor_parallel = {};
  /// One parameter "weight" [num_gemms, out_features, in_features], one "bias" [num_gemms,
  /// out_features], instead of one for each group.
  bool single_grouped_weight = false, single_grouped_bias = false;
  /// Of all weights, or of none.
  MainGrads main_grads = {};
  /// Backward leaves the gradients of weights to `backward_dw()` of the module.
  bool delay_wgrad_compute = false;
};

/// The rows of each group.
struct TANDEM_API GroupSplits {
  GroupSplits(at::Tensor counted) : rows(std::move(counted)) {}  // NOLINT: as Python's
  GroupSplits(const std::vector<int64_t>& counted);              // NOLINT
  GroupSplits(std::initializer_list<int64_t> counted)
      : GroupSplits(std::vector<int64_t>(counted)) {}
  /// Integers [num_gemms], whose sum is at most the rows of x.
  at::Tensor rows;
};

/// What a call is given beside x and the rows of each group.
struct GroupedLinearCall {
  /// Of a step of several micro-batches: the codes of weights are made in the first, and taken in
  /// the others as they are; nullopt: they are made where a weight has changed.
  std::optional<bool> is_first_microbatch = std::nullopt;
  /// What y, and the gradient of x, are written into: contiguous, without a gradient. Undefined:
  /// tensors of their own.
  at::Tensor out = {}, dgrad_out = {};
};

struct GroupedLinearOutputs {
  at::Tensor y;
  /// That were not added, in the dtype of y: one for each group, or one for all where they are one
  /// parameter.
  std::vector<at::Tensor> biases;
};

class TANDEM_API GroupedLinearImpl : public PipelineModule {
 public:
  GroupedLinearImpl(int64_t num_gemms, int64_t in_features, int64_t out_features,
                    const GroupedLinearOptions& grouped_linear = {},
                    const at::TensorOptions& options = {});

  /// y. Throws c10::ValueError with return_bias: `forward_all` returns biases.
  at::Tensor forward(const at::Tensor& x, const GroupSplits& m_splits,
                     const GroupedLinearCall& call = {});
  GroupedLinearOutputs forward_all(const at::Tensor& x, const GroupSplits& m_splits,
                                   const GroupedLinearCall& call = {});

 protected:
  /// An archive may hold one tensor for all groups, or one for each, whichever the module has.
  void read_parameter(torch::serialize::InputArchive& archive, const std::string& parameter,
                      at::Tensor& value) override;

 private:
  int64_t num_gemms_;
  bool returns_bias_;
  std::vector<at::Tensor> biases_;
};

/// y_g = x_g weight_g^T + bias_g for the rows x_g of group g, which follow each other; zeros for
/// rows behind the last group. One pipeline.
///
///   tandem::GroupedLinear experts(8, h, f, {.bias = false});
///   y = experts->forward(x, {20, 0, 12, 7, 1, 30, 2, 28});
///
/// Parameters: weight0, weight1, ..., bias0, bias1, ..., or "weight" and "bias". Under a recipe the
/// rows of each group, and each weight, are quantized as tensors of their own.
/// Shapes: x [..., in_features], m_splits [num_gemms] -> y [..., out_features].
/// Throws: c10::ValueError for sizes that are not positive, or that ranks cannot share evenly, and
///         for a bias where ranks share the weights; a call, where m_splits is no list of num_gemms
///         whole numbers whose sum is at most the rows of x; `load`, where the archive has as many
///         groups as another module.
class GroupedLinear : public torch::nn::ModuleHolder<GroupedLinearImpl> {
 public:
  using torch::nn::ModuleHolder<GroupedLinearImpl>::ModuleHolder;
  using Impl = GroupedLinearImpl;
  GroupedLinear(int64_t num_gemms, int64_t in_features, int64_t out_features,
                const GroupedLinearOptions& grouped_linear = {},
                const at::TensorOptions& options = {})
      : ModuleHolder(std::make_shared<GroupedLinearImpl>(num_gemms, in_features, out_features,
                                                         grouped_linear, options)) {}
};

}  // namespace tandem
