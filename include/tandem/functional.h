// The modules as plain functions on argument structs: no module, no autograd, no state but what is
// passed in and returned. They run the plan that the module's pipeline has: the same steps, fused
// in the same way, and so the same bits.
//
//   using namespace tandem::functional;
//   const LinearArguments arguments{.x = x, .weight = weight, .bias = bias};
//   const Results results = linear_forward(arguments);
//   Context context = linear_setup_context(arguments, results);
//   const Gradients gradients = linear_backward(context, grad_y);  // "x", "weight", "bias"
//
// No output shares memory with an argument, and nothing that forward saves does: the setup finds
// arguments again. What is saved goes with the last step of backward that reads it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tandem/export.h"
#include "tandem/modules.h"
#include "tandem/recipe.h"

namespace tandem::functional {

/// What the functions of all modules take.
struct Common {
  /// nullopt: plain numbers.
  std::optional<Recipe> recipe = std::nullopt;
  /// Of a recipe that keeps amaxes: the number of the region as an int64 tensor [1], then scale,
  /// amax_history and pending of forward and of backward. They are written.
  std::vector<at::Tensor> recipe_state = {};
  /// What an earlier call has returned, nothing at first: codes of weights live there, and are made
  /// again where the weight has changed. nullopt: weights are quantized in each call.
  std::optional<std::vector<at::Tensor>> weight_workspaces = std::nullopt;
  /// What gradients of weights are added to, by their names, instead of being returned.
  MainGrads main_grads = {};
  /// Which gradients are asked for.
  bool needs_grad_x = true, needs_grad_parameters = true;
};

/// Of y = x weight^T + bias; no bias where it is undefined.
struct LinearArguments {
  at::Tensor x, weight, bias = {};
  Common common = {};
};

/// Of y = norm(x) weight^T + bias; layer_norm_bias of a LayerNorm only. Of `options`, those of the
/// norm count, and return_layernorm_output.
struct LayerNormLinearArguments {
  at::Tensor x, layer_norm_weight, layer_norm_bias = {}, weight, bias = {};
  LayerNormLinearOptions options = {};
  Common common = {};
};

/// Of y = activation(norm(x) fc1_weight^T + fc1_bias) fc2_weight^T + fc2_bias; both biases or none.
/// Of `options`, those of the norm count, return_layernorm_output, activation and checkpoint.
struct LayerNormMLPArguments {
  at::Tensor x, layer_norm_weight, layer_norm_bias = {}, fc1_weight, fc1_bias = {}, fc2_weight,
                                   fc2_bias = {};
  LayerNormMLPOptions options = {};
  Common common = {};
};

/// Of y_g = x_g weights[g]^T + biases[g]; no biases where there are none.
struct GroupedLinearArguments {
  at::Tensor x;
  /// Rows of each group, integers [groups].
  at::Tensor m_splits;
  std::vector<at::Tensor> weights, biases = {};
  Common common = {};
};

/// What forward gives.
struct Results {
  at::Tensor y;
  /// Where it was asked for.
  at::Tensor layernorm_output;
  /// Where there are such.
  std::vector<at::Tensor> weight_workspaces;
  /// What backward reads; undefined in the place of what the arguments have.
  std::vector<at::Tensor> saved;
  /// In the place of each: memory and version of the argument, zeros where it is none.
  std::vector<std::pair<int64_t, int64_t>> read;
  /// Sizes that it reads: place of a saved value, sizes.
  std::vector<std::pair<size_t, std::vector<c10::SymInt>>> carried;
};

/// By the names of the arguments, and of groups with their numbers behind: "weight0". Undefined
/// where a gradient goes into a main_grad.
using Gradients = std::map<std::string, at::Tensor>;

/// What backward needs.
class TANDEM_API Context {
 public:
  struct Inner;
  explicit Context(std::unique_ptr<Inner> inner);
  ~Context();
  Context(Context&&) noexcept;

  /// Bytes of what is kept, arguments aside; 0 once backward has run.
  int64_t saved_bytes() const;
  Inner& inner() { return *inner_; }

 private:
  std::unique_ptr<Inner> inner_;
};

/// Each throws c10::ValueError where tensors do not fit; setup where an argument that backward
/// reads is not the one that forward was given, or was written since; backward where one was
/// written since the setup, and where gradients have not the shapes and devices of the outputs,
/// c10::TypeError where not their dtypes, and c10::Error the second time, unless the first was told
/// to `retain` what is kept.
TANDEM_API Results linear_forward(const LinearArguments& arguments);
TANDEM_API Context linear_setup_context(const LinearArguments& arguments, const Results& results);
TANDEM_API Gradients linear_backward(Context& context, const at::Tensor& grad_y,
                                     bool retain = false);

TANDEM_API Results layer_norm_linear_forward(const LayerNormLinearArguments& arguments);
TANDEM_API Context layer_norm_linear_setup_context(const LayerNormLinearArguments& arguments,
                                                   const Results& results);
TANDEM_API Gradients layer_norm_linear_backward(Context& context, const at::Tensor& grad_y,
                                                const at::Tensor& grad_layernorm_output = {},
                                                bool retain = false);

TANDEM_API Results layer_norm_mlp_forward(const LayerNormMLPArguments& arguments);
TANDEM_API Context layer_norm_mlp_setup_context(const LayerNormMLPArguments& arguments,
                                                const Results& results);
TANDEM_API Gradients layer_norm_mlp_backward(Context& context, const at::Tensor& grad_y,
                                             const at::Tensor& grad_layernorm_output = {},
                                             bool retain = false);

TANDEM_API Results grouped_linear_forward(const GroupedLinearArguments& arguments);
TANDEM_API Context grouped_linear_setup_context(const GroupedLinearArguments& arguments,
                                                const Results& results);
TANDEM_API Gradients grouped_linear_backward(Context& context, const at::Tensor& grad_y,
                                             bool retain = false);

}  // namespace tandem::functional
