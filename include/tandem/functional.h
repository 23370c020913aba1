// The modules as plain functions on argument structs: no module, no autograd, no state but what is
// passed in and returned. They run the plan that the module's pipeline has: the same steps, fused
// in the same way, and so the same bits.
//
//   using namespace tandem::functional;
//   const LinearArguments arguments{.x = x, .weight = weight, .bias = bias};
//   const Results results = forward(arguments);
//   Context context = setup_context(arguments, results);
//   const Gradients gradients = backward(context, grad_y);  // "x", "weight", "bias"
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
#include <variant>
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
  /// As BasicLinearOptions::save_original_input.
  bool save_original_input = false;
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

/// A module, by its arguments.
using Arguments = std::variant<LinearArguments, LayerNormLinearArguments, LayerNormMLPArguments,
                               GroupedLinearArguments>;

/// Throws: c10::ValueError where tensors do not fit, and where groups have no weights, or biases
///         that are not as many.
TANDEM_API Results forward(const Arguments& arguments);

/// Throws: c10::ValueError where an argument that backward reads is not the one that forward was
///         given, or was written since.
TANDEM_API Context setup_context(const Arguments& arguments, const Results& results);

/// Keeps what is saved where it is told to `retain`. A gradient may be undefined.
///
/// Throws: c10::ValueError where an argument was written since the setup, where gradients have not
///         the shapes and devices of the outputs, and for a gradient of a norm's output that was
///         not returned; c10::TypeError where they have not their dtypes; c10::Error the second
///         time, unless the first has retained.
TANDEM_API Gradients backward(Context& context, const at::Tensor& grad_y,
                              const at::Tensor& grad_layernorm_output = {}, bool retain = false);

}  // namespace tandem::functional
