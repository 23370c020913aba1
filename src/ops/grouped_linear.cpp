// A linear layer with one weight for each group of rows, such as the experts of a mixture.
#include <c10/util/Exception.h>

#include "core/json_fields.h"
#include "core/op_def.h"
#include "kernel_ops/framework/shapes.h"
#include "ops/groups.h"
#include "ops/product.h"

namespace tandem::ops {

namespace {

using at::Tensor;
using kernel_ops::group_offsets;
using kernel_ops::rows_between;

const GroupedLinearOptions& options_of(const Call& call) {
  return call.options<GroupedLinearOptions>();
}

/// Returns the tensor that the step writes: memory of the frame, or a tensor of the caller.
/// `is_gradient`: whether autograd gets the tensor as a gradient.
Tensor target_of(Call& call, const char* name, bool is_gradient, at::IntArrayRef sizes,
                 const Tensor& like) {
  if (call.step().mutates.empty()) return call.frame().allocate(sizes, like.scalar_type(), like);
  const Tensor& given = call.mutated(0);
  TORCH_CHECK_VALUE(
      given.sizes() == sizes && given.scalar_type() == like.scalar_type() &&
          given.device() == like.device() && given.is_contiguous() && !given.requires_grad(),
      "grouped_linear: expected a contiguous tensor without a gradient as ", name, ", of shape ",
      sizes, ", ", like.scalar_type(), ", on ", like.device(), ", got one of shape ", given.sizes(),
      ", ", given.scalar_type(), ", on ", given.device(),
      given.is_contiguous() ? "" : ", not contiguous",
      given.requires_grad() ? ", that requires grad" : "", ". Allocate it with torch.empty.");
  check_own_memory(call, "grouped_linear", name, given);
  at::TensorImpl* impl = given.unsafeGetTensorImpl();
  impl->bump_version();  // nothing else does so below autograd
  // A leaf keeps a gradient that nobody else holds as its `grad`, which later gradients are added
  // to: it must see that the caller holds this one.
  if (is_gradient) return given;
  // The alias shares the version counter of the caller's tensor, so that later writes are detected.
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(),
                                                  /*allow_tensor_metadata_change=*/true));
}

/// Returns the sizes of `like` with another last dimension.
c10::DimVector sizes_like(const Tensor& like, int64_t features) {
  c10::DimVector sizes(like.sizes().begin(), like.sizes().end());
  sizes.back() = features;
  return sizes;
}

/// Multiplies the rows of all groups, on any path, as kernel_ops::grouped_product defines it.
Tensor multiply_groups(Call& call, const Tensor& x, const Tensor& splits,
                       const kernel_ops::GroupMatrices& weights,
                       const kernel_ops::GroupBiases& biases, bool transposed, const char* target) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      call.path() == Path::direct || call.step().mutates.empty(), "grouped_linear: expected no \"",
      target, "\" where the call goes through torch's dispatcher, got one. Leave it out of ",
      "op_kwargs under modes, transforms and tensor subclasses.");
  const Tensor rows = as_matrix(x);
  const auto groups = static_cast<int64_t>(weights.matrices.size());
  const auto reshaped = [&](const Tensor& y) {
    if (x.dim() == 2) return y;
    c10::SymDimVector sizes = kernel_ops::sizes_of(x);
    sizes.back() = weights.matrices[0].sym_size(transposed ? 0 : 1);
    return y.reshape_symint(sizes);
  };
  if (call.path() == Path::composite)
    return reshaped(kernel_ops::composite::grouped_product(
        rows, splits, weights.matrices, biases.biases, biases.scales, transposed));
  const kernel_ops::GroupQuantizer quantizer = rows_quantizer_at(call, 0, rows, splits, groups);
  if (call.path() == Path::dispatch) {
    call.took(kernel_ops::kDispatcher);
    return reshaped(
        kernel_ops::grouped_product(rows, splits, weights, biases, transposed, quantizer));
  }
  const auto offsets = group_offsets(splits, groups, rows.size(0));
  const int64_t features = weights.matrices[0].size(transposed ? 0 : 1);
  const Tensor y = target_of(call, target, !transposed, sizes_like(x, features), x);
  call.took(kernel_ops::product_of_groups(rows, offsets, weights, biases, transposed, quantizer,
                                          y.dim() == 2 ? y : y.view({rows.size(0), features})));
  return y;
}

void groups_forward(Call& call) {
  enum Read { x, splits, scales };
  enum List { weight, bias };
  const GroupedLinearOptions& options = options_of(call);
  check_devices(call, weight, splits, options);
  const auto weights = matrices_of(call, weight, options.packed_weight, quantizer_at(call, 1));
  check_features(call, call.in(x).sym_sizes(), weight, options);
  call.out(0,
           multiply_groups(call, call.in(x), call.in(splits), weights,
                           biases_of(call, bias, scales, options), /*transposed=*/true, "output"));
}

void groups_grad_x(Call& call) {
  enum Read { grad_y, splits };
  const auto weights = matrices_of(call, 0, options_of(call).packed_weight, quantizer_at(call, 1));
  call.out(0, multiply_groups(call, call.in(grad_y), call.in(splits), weights, {},
                              /*transposed=*/false, "grad_input"));
}

/// Returns the quantizers of a step that reads grad_y, x and splits.
kernel_ops::GradQuantizers grad_quantizers(Call& call, const Tensor& gradient, int64_t groups,
                                           bool later = false) {
  enum Read { grad_y, x, splits };
  return {rows_quantizer_at(call, 0, gradient, call.in(splits), groups, later),
          quantizer_at(call, 1)};
}

void groups_grad_weight(Call& call) {
  enum Read { grad_y, x, splits };
  const GroupedLinearOptions& options = options_of(call);
  const Tensor gradient = as_matrix(call.in(grad_y)), input = as_matrix(call.in(x));
  const auto groups = static_cast<int64_t>(options.num_groups);
  const kernel_ops::GradQuantizers quantizers = grad_quantizers(call, gradient, groups);
  if (call.path() != Path::direct) {
    call.took(kernel_ops::kDispatcher);
    const Tensor all =
        kernel_ops::grouped_grad_weight(gradient, input, call.in(splits), groups, quantizers);
    const auto parts = all.unbind(0);
    return write_groups(
        call, options.packed_weight, [&](size_t g) { return parts[g].clone(); },
        [&] { return all; });
  }
  const auto offsets = group_offsets(call.in(splits), groups, input.size(0));
  const int64_t sizes[] = {groups, gradient.size(1), input.size(1)};
  const Targets targets(call, options.packed_weight, sizes, input, offsets);
  kernel_ops::for_each_group(offsets, [&](size_t g) {
    if (!targets[g].defined()) return;
    call.took(kernel_ops::grad_weight_of_group(rows_between(gradient, offsets[g], offsets[g + 1]),
                                               rows_between(input, offsets[g], offsets[g + 1]),
                                               quantizers, g, targets[g], /*accumulate=*/false));
  });
}

/// Adds the gradients to main_grads; on the direct path the products do so themselves.
void accumulate(Call& call) {
  enum Read { grad_y, x, splits };
  const GroupedLinearOptions& options = options_of(call);
  const Tensor gradient = as_matrix(call.in(grad_y)), input = as_matrix(call.in(x));
  const auto groups = static_cast<int64_t>(options.num_groups);
  check_main_grads(call, options, gradient.sym_size(1), input.sym_size(1));
  const kernel_ops::GradQuantizers quantizers = grad_quantizers(call, gradient, groups);
  if (call.path() != Path::direct) {
    call.took(kernel_ops::kDispatcher);
    const Tensor all =
        kernel_ops::grouped_grad_weight(gradient, input, call.in(splits), groups, quantizers);
    accumulate_all(call, options, all);
    return finish_main_grads(call, options, input);
  }
  const auto offsets = group_offsets(call.in(splits), groups, input.size(0));
  kernel_ops::for_each_group(offsets, [&](size_t g) {
    call.took(kernel_ops::grad_weight_of_group(rows_between(gradient, offsets[g], offsets[g + 1]),
                                               rows_between(input, offsets[g], offsets[g + 1]),
                                               quantizers, g, main_grad_of_group(call, options, g),
                                               !options.overwrite_main_grad));
  });
  for (size_t g = 0; options.overwrite_main_grad && g < options.num_groups; ++g)
    if (offsets[g] == offsets[g + 1]) main_grad_of_group(call, options, g).zero_();
  finish_main_grads(call, options, input);
}

/// Copies the gradient, because it may become the `grad` of a leaf, to which later gradients are
/// added.
void defer_gradients(Call& call) {
  enum Read { grad_y, x, splits };
  const Tensor gradient = as_matrix(call.in(grad_y));
  const auto groups = static_cast<int64_t>(options_of(call).num_groups);
  defer(call, {gradient.clone(), call.in(x), call.in(splits),
               grad_quantizers(call, gradient, groups, /*later=*/true)});
}

void grad_bias(Call& call) {
  enum Read { grad_y, splits, scales };
  const GroupedLinearOptions& options = options_of(call);
  const Tensor gradient = as_matrix(call.in(grad_y));
  const auto groups = static_cast<int64_t>(options.num_groups);
  const auto factors = flat(call, scales);
  if (call.path() != Path::direct) {
    call.took(kernel_ops::kDispatcher);
    const Tensor all = kernel_ops::grouped_grad_bias(gradient, call.in(splits), factors, groups);
    const auto parts = all.unbind(0);
    return write_groups(
        call, options.packed_bias, [&](size_t g) { return parts[g].clone(); }, [&] { return all; });
  }
  const auto offsets = group_offsets(call.in(splits), groups, gradient.size(0));
  const int64_t sizes[] = {groups, gradient.size(1)};
  const Targets targets(call, options.packed_bias, sizes, gradient, offsets);
  kernel_ops::for_each_group(offsets, [&](size_t g) {
    if (!targets[g].defined()) return;
    std::optional<Tensor> own;
    if (factors) own = rows_between(*factors, offsets[g], offsets[g + 1]);
    call.took(kernel_ops::grad_bias_of_group(rows_between(gradient, offsets[g], offsets[g + 1]),
                                             own, targets[g]));
  });
}

void grad_scales(Call& call) {
  enum Read { grad_y, splits, scales };
  const GroupedLinearOptions& options = options_of(call);
  const Tensor gradient = as_matrix(call.in(grad_y));
  const auto biases = by_group(call, 0, options.packed_bias);
  const Tensor& like = call.in(scales);
  if (call.path() != Path::direct) {
    call.took(kernel_ops::kDispatcher);
    return call.out(0, kernel_ops::grouped_grad_scales(gradient, call.in(splits), biases)
                           .reshape_symint(like.sym_sizes()));
  }
  const auto offsets =
      group_offsets(call.in(splits), static_cast<int64_t>(options.num_groups), gradient.size(0));
  const Tensor result = call.frame().allocate(like.sizes(), gradient.scalar_type(), gradient),
               all = result.view(-1);
  kernel_ops::for_each_group(offsets, [&](size_t g) {
    call.took(kernel_ops::grad_scales_of_group(rows_between(gradient, offsets[g], offsets[g + 1]),
                                               biases[g],
                                               rows_between(all, offsets[g], offsets[g + 1])));
  });
  rows_between(all, offsets.back(), all.size(0)).zero_();
  call.out(0, result);
}

size_t list_length(const void* options, std::string_view operand) {
  const auto& grouped = *static_cast<const GroupedLinearOptions*>(options);
  const size_t weights = grouped.packed_weight ? 1 : grouped.num_groups;
  if (operand == "weight[]") return weights;
  if (operand == "main_grad[]") return grouped.accumulate_into_main_grad ? weights : 0;
  if (operand == "deferred[]") return grouped.delay_wgrad ? kDeferred : 0;
  if (operand == "output[]") return grouped.writes_output ? 1 : 0;
  if (operand == "grad_input[]") return grouped.writes_grad_input ? 1 : 0;
  return !grouped.bias ? 0 : grouped.packed_bias ? 1 : grouped.num_groups;
}

const GroupedLinearOptions& grouped(const void* options) {
  return *static_cast<const GroupedLinearOptions*>(options);
}
size_t group_count(const void* options) { return grouped(options).num_groups; }
bool has_bias(const void* options) { return grouped(options).bias; }
bool has_scales(const void* options) {
  return grouped(options).bias && grouped(options).scale_bias;
}
size_t absent_scales(const void* options) { return has_scales(options) ? 0 : 1; }
bool has_packed_weight(const void* options) { return grouped(options).packed_weight; }
bool always(const void*) { return true; }
bool groups_return_gradient(const void* options) {
  return !grouped(options).accumulate_into_main_grad && !grouped(options).delay_wgrad;
}
bool groups_delay(const void* options) { return grouped(options).delay_wgrad; }
template <bool kDummy>
bool groups_accumulate(const void* options) {
  return grouped(options).accumulate_into_main_grad && !grouped(options).delay_wgrad &&
         (grouped(options).dummy != BasicLinearOptions::Dummy::none) == kDummy;
}

const std::vector<Contract> kGradWeightContracts{{"grad_y", Direction::column, always},
                                                 {"x", Direction::column, always}};

}  // namespace

/// y_g = x_g weight_g^T + bias_g for the rows x_g of group g; groups follow each other, and rows
/// after the last group give zeros. With `scale_bias`, each row's bias is multiplied by the row's
/// number in the extra input scales.
///
/// A recipe quantizes the rows of each group, and each weight, as a tensor of its own. A recipe
/// with a state has slots for x_0, weight_0, x_1, ..., and for grad_y_0, grad_y_1, ...
///
/// Gradients of weights are returned, added to main_grad, or delayed. For delayed gradients the
/// step stores in `deferred`: grad_y, x, splits, the arguments of the quantizers of grad_y and x,
/// and a text with the versions of x and splits and, one per line, the texts of both quantizers. A
/// line is empty without a quantizer. An x in codes is decoded where grad_y has no quantizer.
///
/// Shapes:  x [..., in_features], splits [groups], the rows of each group, scales [...]; weight
///          [out_features, in_features] and bias [out_features] for each group, or packed [groups,
///          ...] -> y [..., out_features].
/// Dtypes:  splits integers; y has the dtype of autocast, else of the weights.
/// Error:   as a linear layer, and one more rounding where a bias is added
///          (test_grouped_linear.py).
/// Throws:  c10::ValueError where features, splits, scales or tensors of the caller do not fit.
const OpDef kGroupedLinear{
    .name = "grouped_linear",
    .formula = "y_g = x_g weight_g^T + bias_g",
    .signature =
        {GroupedLinearOptions{},
         {{"num_groups", &GroupedLinearOptions::num_groups, between(1, limits::kParams / 2),
           "the number of weights"},
          {"bias", &GroupedLinearOptions::bias, "there is a bias"},
          {"packed_weight", &GroupedLinearOptions::packed_weight,
           "the weights are one tensor [num_groups, ...]"},
          {"packed_bias", &GroupedLinearOptions::packed_bias,
           "the biases are one tensor [num_groups, ...]"},
          {"scale_bias", &GroupedLinearOptions::scale_bias,
           "the bias of each row is multiplied by its number among scales, an extra input"},
          {"accumulate_into_main_grad", &GroupedLinearOptions::accumulate_into_main_grad,
           "the gradients of weights are added to main_grad, not returned"},
          {"overwrite_main_grad", &GroupedLinearOptions::overwrite_main_grad,
           "they take the place of what main_grad holds"},
          {"dummy_gradient", &GroupedLinearOptions::dummy, one_of({"none", "empty", "zeros"}),
           "what is returned beside main_grad"},
          {"delay_wgrad", &GroupedLinearOptions::delay_wgrad,
           "the gradients of weights are left to the caller, who is given their operands"},
          {"writes_output", &GroupedLinearOptions::writes_output,
           "y is written into a tensor of the caller"},
          {"writes_grad_input", &GroupedLinearOptions::writes_grad_input,
           "so is the gradient of x"}}},
    .sizes = {{"in_features", "size of the last dimension of x"},
              {"out_features", "size of the last dimension of y"}},
    .inputs = {"x", "splits", "scales"},
    .absent_inputs = absent_scales,
    .indices = {"splits"},
    .params = {{"weight[]", {"out_features", "in_features"}, ParamDef::Init::kaiming_uniform},
               {"bias[]", {"out_features"}}},
    .buffers = {"main_grad[]", "deferred[]", "output[]", "grad_input[]"},
    .dtype = DtypeRule::weight,
    .roles = {{"x", Role::input}, {"weight[]", Role::weight}, {"grad_y", Role::grad_output}},
    .forward = {{.name = "forward",
                 .reads = {"x", "splits", "scales", "weight[]", "bias[]"},
                 .writes = {"y"},
                 .mutates = {"output[]"},
                 .contracts = {{"x", Direction::row, always},
                               {"weight[]", Direction::row, has_packed_weight}},
                 .run = groups_forward}},
    .backward = {{.name = "grad_x",
                  .reads = {"grad_y", "splits", "weight[]"},
                  .writes = {"grad_x"},
                  .mutates = {"grad_input[]"},
                  .contracts = {{"grad_y", Direction::row, always},
                                {"weight[]", Direction::column, has_packed_weight}},
                  .run = groups_grad_x},
                 {.name = "grad_weight",
                  .reads = {"grad_y", "x", "splits"},
                  .writes = {"grad_weight[]"},
                  .contracts = kGradWeightContracts,
                  .run = groups_grad_weight,
                  .applies = groups_return_gradient},
                 {.name = "accumulate",
                  .reads = {"grad_y", "x", "splits"},
                  .writes = {},
                  .mutates = {"main_grad[]"},
                  .absorbs = {"grad_weight[]"},
                  .contracts = kGradWeightContracts,
                  .run = accumulate,
                  .applies = groups_accumulate</*kDummy=*/false>},
                 {.name = "accumulate",
                  .reads = {"grad_y", "x", "splits"},
                  .writes = {"grad_weight[]"},
                  .mutates = {"main_grad[]"},
                  .absorbs = {"grad_weight[]"},
                  .contracts = kGradWeightContracts,
                  .run = accumulate,
                  .applies = groups_accumulate</*kDummy=*/true>},
                 {.name = "defer",
                  .reads = {"grad_y", "x", "splits"},
                  .writes = {},
                  .mutates = {"deferred[]"},
                  .absorbs = {"grad_weight[]"},
                  .contracts = kGradWeightContracts,
                  .run = defer_gradients,
                  .applies = groups_delay},
                 {.name = "grad_bias",
                  .reads = {"grad_y", "splits", "scales"},
                  .writes = {"grad_bias[]"},
                  .run = grad_bias,
                  .applies = has_bias},
                 {.name = "grad_scales",
                  .reads = {"grad_y", "splits", "scales", "bias[]"},
                  .writes = {"grad_scales"},
                  .run = grad_scales,
                  .applies = has_scales}},
    .context = {"x", "splits", "scales"},
    .groups = group_count,
    .list_length = list_length,
};

TANDEM_REGISTER_OP(kGroupedLinear);

}  // namespace tandem::ops
