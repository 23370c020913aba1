// Linear layers whose groups of rows have a weight each, such as the experts of a mixture, as a
// module with the arguments and parameter names of transformer_engine.pytorch.
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
  /// The biases are returned, not added.
  bool return_bias = false;
  /// The first values of each weight.
  Init init_method = init::normal(0.023);
  /// Each rank holds its share of each weight. As in TransformerEngine, the caller exchanges data
  /// between ranks.
  TensorParallel tensor_parallel = {};
  /// One parameter "weight" [num_gemms, out_features, in_features], one parameter "bias"
  /// [num_gemms, out_features], instead of one for each group.
  bool single_grouped_weight = false, single_grouped_bias = false;
  /// Tensors for all weights, or for none.
  MainGrads main_grads = {};
  /// Backward leaves the gradients of weights to `backward_dw()` of the module.
  bool delay_wgrad_compute = false;
};

/// The numbers of rows of the groups.
struct TANDEM_API GroupSplits {
  GroupSplits(at::Tensor counted) : rows(std::move(counted)) {}  // NOLINT: as Python's
  GroupSplits(const std::vector<int64_t>& counted);              // NOLINT
  GroupSplits(std::initializer_list<int64_t> counted)
      : GroupSplits(std::vector<int64_t>(counted)) {}
  /// Integers [num_gemms], whose sum is at most the rows of x.
  at::Tensor rows;
};

/// The arguments of a call beside x and GroupSplits.
struct GroupedLinearCall {
  /// In a step of several micro-batches: true has the codes of weights computed, false reads the
  /// codes of the first micro-batch; nullopt: codes are computed where a weight has changed.
  std::optional<bool> is_first_microbatch = std::nullopt;
  /// Contiguous tensors that receive y and the gradient of x, and have no gradient themselves.
  /// Undefined: the call allocates the result.
  at::Tensor out = {}, dgrad_out = {};
};

struct GroupedLinearOutputs {
  at::Tensor y;
  /// The biases that were not added, in the dtype of y: one for each group, or one tensor with
  /// single_grouped_bias. Empty without return_bias.
  std::vector<at::Tensor> biases;
};

class TANDEM_API GroupedLinearImpl : public PipelineModule {
 public:
  GroupedLinearImpl(int64_t num_gemms, int64_t in_features, int64_t out_features,
                    const GroupedLinearOptions& grouped_linear = {},
                    const at::TensorOptions& options = {});

  /// Returns y alone.
  ///
  /// Throws:  c10::ValueError with return_bias; `forward_all` returns the biases too.
  at::Tensor forward(const at::Tensor& x, const GroupSplits& m_splits,
                     const GroupedLinearCall& call = {});
  /// Returns y, and with return_bias the biases.
  GroupedLinearOutputs forward_all(const at::Tensor& x, const GroupSplits& m_splits,
                                   const GroupedLinearCall& call = {});

 protected:
  /// Reads one tensor for all groups or one for each group, whichever the archive has and whichever
  /// the module has.
  void read_parameter(torch::serialize::InputArchive& archive, const std::string& parameter,
                      at::Tensor& value) override;

 private:
  int64_t num_gemms_;
  bool returns_bias_;
  std::vector<at::Tensor> biases_;
};

/// y_g = x_g weight_g^T + bias_g, where x_g are the rows of group g; groups follow each other, and
/// rows after the last group give zeros. The module is one pipeline.
///
///   tandem::GroupedLinear experts(8, h, f, {.bias = false});
///   y = experts->forward(x, {20, 0, 12, 7, 1, 30, 2, 28});
///
/// Parameters: weight0, weight1, ..., bias0, bias1, ..., or "weight" and "bias". A recipe quantizes
/// the rows of each group, and each weight, as a tensor of its own.
///
/// Shapes:  x [..., in_features], m_splits [num_gemms] -> y [..., out_features].
/// Dtypes:  y has the dtype of torch.autocast, else of the weights.
/// Throws:  the constructor: c10::ValueError for sizes that are not positive or that ranks cannot
///          share evenly, and for a bias where ranks share the weights.
///          A call: c10::ValueError where m_splits is no list of num_gemms whole numbers whose sum
///          is at most the rows of x.
///          `load`: c10::ValueError where the archive has another number of groups.
using GroupedLinear = ModuleOf<GroupedLinearImpl, GroupedLinearOptions, int64_t, int64_t, int64_t>;

}  // namespace tandem
