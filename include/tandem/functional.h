// The modules as functions on argument structs. They use no module, no autograd and no state but
// their arguments and results. They run the plan of the module's pipeline, with the same fusions,
// so their results have the module's bits.
//
//   using namespace tandem::functional;
//   const LinearArguments arguments{.x = x, .weight = weight, .bias = bias};
//   const Results results = forward(arguments);
//   Context context = setup_context(arguments, results);
//   const Gradients gradients = backward(context, grad_y);  // "x", "weight", "bias"
//
// No output and no saved tensor shares memory with an argument: setup_context takes arguments that
// backward reads from `arguments`. Each saved tensor is freed after the last step of backward that
// reads it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "tandem/export.h"
#include "tandem/modules.h"
#include "tandem/recipe.h"

namespace tandem::functional {

/// Arguments that all functions share.
struct Common {
  /// nullopt: nothing is quantized.
  std::optional<Recipe> recipe = std::nullopt;
  /// The state of a recipe that keeps amaxes: the number of the region as an int64 tensor [1], then
  /// scale, amax_history and pending of forward, then these three of backward. Calls write all of
  /// them.
  std::vector<at::Tensor> recipe_state = {};
  /// Results::weight_workspaces of an earlier call, or an empty list in the first call. Workspaces
  /// hold the codes of weights, which are recomputed once the weight has changed. nullopt: each
  /// call quantizes the weights.
  std::optional<std::vector<at::Tensor>> weight_workspaces = std::nullopt;
  /// Tensors by the names of weights: the gradient of a weight is added to its tensor, not
  /// returned.
  MainGrads main_grads = {};
  /// Whether backward returns the gradient of x, and the gradients of parameters.
  bool needs_grad_x = true, needs_grad_parameters = true;
};

/// Arguments of y = x weight^T + bias; an undefined bias is not added.
struct LinearArguments {
  at::Tensor x, weight, bias = {};
  /// BasicLinearOptions::save_original_input.
  bool save_original_input = false;
  Common common = {};
};

/// Arguments of y = norm(x) weight^T + bias. Only a LayerNorm has layer_norm_bias. `options` counts
/// for the norm and return_layernorm_output.
struct LayerNormLinearArguments {
  at::Tensor x, layer_norm_weight, layer_norm_bias = {}, weight, bias = {};
  LayerNormLinearOptions options = {};
  Common common = {};
};

/// Arguments of y = activation(norm(x) fc1_weight^T + fc1_bias) fc2_weight^T + fc2_bias, with both
/// biases or none. `options` counts for the norm, return_layernorm_output, activation and
/// checkpoint.
struct LayerNormMLPArguments {
  at::Tensor x, layer_norm_weight, layer_norm_bias = {}, fc1_weight, fc1_bias = {}, fc2_weight,
                                   fc2_bias = {};
  LayerNormMLPOptions options = {};
  Common common = {};
};

/// Arguments of y_g = x_g weights[g]^T + biases[g]; `biases` may be empty.
struct GroupedLinearArguments {
  at::Tensor x;
  /// Rows of each group: integers [groups].
  at::Tensor m_splits;
  std::vector<at::Tensor> weights, biases = {};
  Common common = {};
};

/// The results of forward.
struct Results {
  at::Tensor y;
  /// Undefined unless return_layernorm_output is set.
  at::Tensor layernorm_output;
  /// Empty without Common::weight_workspaces or without a weight that is quantized.
  std::vector<at::Tensor> weight_workspaces;
  /// The tensors that backward reads; an argument, or a view of one, leaves an undefined tensor in
  /// its position.
  std::vector<at::Tensor> saved;
  /// For each saved tensor the memory number and the version of the argument that stands for it,
  /// zeros where no argument does; then the same two numbers for each workspace.
  std::vector<std::pair<int64_t, int64_t>> read;
  /// Sizes that backward reads: the index of a saved tensor, and its sizes.
  std::vector<std::pair<size_t, std::vector<c10::SymInt>>> carried;
};

/// Gradients by the names of the arguments; the names of groups end in their numbers, such as
/// "weight0". A gradient that was added to a main_grad is undefined.
using Gradients = std::map<std::string, at::Tensor>;

/// The plan of a call and the tensors that backward reads.
class TANDEM_API Context {
 public:
  struct Inner;
  explicit Context(std::unique_ptr<Inner> inner);
  ~Context();
  Context(Context&&) noexcept;

  /// Bytes of saved tensors, arguments aside; 0 once backward has run.
  int64_t saved_bytes() const;
  Inner& inner() { return *inner_; }

 private:
  std::unique_ptr<Inner> inner_;
};

/// The arguments of any function. Their type selects the module.
using Arguments = std::variant<LinearArguments, LayerNormLinearArguments, LayerNormMLPArguments,
                               GroupedLinearArguments>;

/// Runs forward.
///
/// Throws:  c10::ValueError where shapes do not fit each other, where GroupedLinearArguments has no
///          weights, and where it has biases that are not as many.
TANDEM_API Results forward(const Arguments& arguments);

/// Checks that `results` belong to `arguments`, and collects what backward reads.
///
/// Throws:  c10::ValueError where an argument that backward reads is not the one of forward, or was
///          written since.
TANDEM_API Context setup_context(const Arguments& arguments, const Results& results);

/// Returns the gradients. An output that nothing uses has an undefined gradient. With `retain`,
/// saved tensors stay for another backward.
///
/// Throws:  c10::ValueError where an argument was written since the setup, where a gradient has
///          another shape or device than its output, and for a gradient of a norm's output that was
///          not returned; c10::TypeError where a gradient has another dtype than its output;
///          c10::Error in a second backward, unless the first one retained.
TANDEM_API Gradients backward(Context& context, const at::Tensor& grad_y,
                              const at::Tensor& grad_layernorm_output = {}, bool retain = false);

}  // namespace tandem::functional
