#include "ops/grouped_linear.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include "core/call.h"
#include "core/json_fields.h"
#include "kernel_ops/elementwise.h"
#include "kernel_ops/grouped.h"
#include "kernel_ops/product.h"
#include "kernel_ops/shapes.h"
#include "ops/product.h"
#include "tandem/op_options.h"

namespace tandem::ops {

namespace {

using at::Tensor;
using kernel_ops::group_offsets;

const GroupedLinearOptions& options_of(const Call& call) {
  return call.options<GroupedLinearOptions>();
}

/// The elements of a list operand by group, those of a packed one too.
std::vector<Tensor> by_group(Call& call, size_t list, bool is_packed) {
  const ListRange& range = call.read_list(list);
  if (is_packed) return call.in(range.first).unbind(0);
  std::vector<Tensor> tensors;
  for (size_t i = range.first; i < range.first + range.count; ++i) tensors.push_back(call.in(i));
  return tensors;
}

Tensor as_matrix(const Tensor& x) {
  return x.dim() == 2 ? x : x.reshape_symint({kernel_ops::rows_of(x), x.sym_size(-1)});
}

/// Whether implementations write the products of x with these into tensors of the frame.
bool is_direct(Call& call, const Tensor& x, const std::vector<Tensor>& others) {
  const auto is_taken = [&](const Tensor& other) {
    return kernel_ops::choose({{x}, {other}, x.scalar_type()}) != nullptr;
  };
  return call.path() == Path::direct && std::ranges::all_of(others, is_taken);
}

void multiply_into(Call& call, const Tensor& a, const Tensor& b, const Tensor& result,
                   kernel_ops::Rows rows) {
  call.took(kernel_ops::multiply({{a}, {b}, result.scalar_type(), rows}, result));
}

Tensor rows_of_group(const Tensor& matrix, const std::vector<int64_t>& offsets, size_t group) {
  return matrix.narrow(0, offsets[group], offsets[group + 1] - offsets[group]);
}

void clear_rows_behind(const Tensor& result, const std::vector<int64_t>& offsets) {
  result.narrow(0, offsets.back(), result.size(0) - offsets.back()).zero_();
}

/// y_g = x_g M_g^T + bias_g, or x_g M_g.
Tensor product_of_groups(Call& call, const Tensor& x, const Tensor& splits,
                         const std::vector<Tensor>& matrices, const std::vector<Tensor>& biases,
                         bool transposed) {
  if (call.path() == Path::composite)
    return kernel_ops::composite::grouped_product(x, splits, matrices, biases, transposed);
  if (!is_direct(call, x, matrices)) {
    call.took(kernel_ops::kDispatcher);
    return kernel_ops::grouped_product(x, splits, matrices, biases, transposed);
  }
  const auto offsets = group_offsets(splits, static_cast<int64_t>(matrices.size()), x.size(0));
  const int64_t sizes[] = {x.size(0), matrices[0].size(transposed ? 0 : 1)};
  const Tensor y = call.frame().allocate(sizes, x.scalar_type(), x);
  for (size_t g = 0; g < matrices.size(); ++g) {
    const Tensor target = rows_of_group(y, offsets, g);
    if (target.size(0) == 0) continue;
    multiply_into(call, rows_of_group(x, offsets, g), transposed ? matrices[g].t() : matrices[g],
                  target, kernel_ops::Rows::of_the_result);
    if (biases.empty()) continue;
    const Tensor sum = call.run_into<kernel_ops::AddBias>(
        {target}, target, std::optional(biases[g]), std::optional<Tensor>())[0];
    if (!sum.is_same(target)) target.copy_(sum);
  }
  clear_rows_behind(y, offsets);
  return y;
}

void check_shapes(const Tensor& x, const std::vector<Tensor>& weights, size_t groups) {
  TORCH_CHECK_VALUE(weights.size() == groups, "grouped_linear: expected a weight of shape [",
                    groups, ", out_features, in_features], got ", weights.size(),
                    " groups. Pack one matrix per group.");
  for (const Tensor& weight : weights) {
    TORCH_CHECK_VALUE(weight.dim() == 2 && weight.sym_sizes() == weights[0].sym_sizes(),
                      "grouped_linear: expected weights of one shape [out_features, in_features], ",
                      "got ", weights[0].sym_sizes(), " and ", weight.sym_sizes(),
                      ". Pass matrices of one shape.");
  }
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.sym_size(-1) == weights[0].sym_size(1),
                    "grouped_linear: expected x with ", weights[0].sym_size(1),
                    " features in its last dimension, as the weights ", weights[0].sym_sizes(),
                    " have, got x of shape ", x.sym_sizes(),
                    ". Build the op with these in_features, or reshape x.");
}

void forward(Call& call) {
  enum Read { x, splits };
  enum List { weight, bias };
  const GroupedLinearOptions& options = options_of(call);
  const auto weights = by_group(call, weight, options.packed_weight);
  const auto biases =
      options.bias ? by_group(call, bias, options.packed_bias) : std::vector<Tensor>();
  check_shapes(call.in(x), weights, options.num_groups);
  const Tensor y =
      product_of_groups(call, as_matrix(call.in(x)), call.in(splits), weights, biases, true);
  call.out(0, call.in(x).dim() == 2 ? y : y.reshape_symint(output_sizes(call.in(x), weights[0])));
}

void grad_x(Call& call) {
  enum Read { grad_y, splits };
  const auto weights = by_group(call, 0, options_of(call).packed_weight);
  const Tensor& gradient = call.in(grad_y);
  const Tensor result =
      product_of_groups(call, as_matrix(gradient), call.in(splits), weights, {}, false);
  if (gradient.dim() == 2) return call.out(0, result);
  c10::SymDimVector sizes(gradient.sym_sizes().begin(), gradient.sym_sizes().end());
  sizes.back() = weights[0].sym_size(1);
  call.out(0, result.reshape_symint(sizes));
}

/// Gives each wanted write of the list its group's part, or the whole where it is packed.
template <typename Part, typename Whole>
void write_groups(Call& call, bool is_packed, Part&& part, Whole&& whole) {
  const ListRange& list = call.write_list(0);
  if (is_packed) return call.out(list.first, whole());
  for (size_t g = 0; g < list.count; ++g)
    if (call.wants(list.first + g)) call.out(list.first + g, part(g));
}

void grad_weight(Call& call) {
  enum Read { grad_y, x, splits };
  const GroupedLinearOptions& options = options_of(call);
  const Tensor gradient = as_matrix(call.in(grad_y)), input = as_matrix(call.in(x));
  const auto groups = static_cast<int64_t>(options.num_groups);
  if (!is_direct(call, input, {gradient})) {
    call.took(kernel_ops::kDispatcher);
    const Tensor all = kernel_ops::grouped_grad_weight(gradient, input, call.in(splits), groups);
    const auto parts = all.unbind(0);
    return write_groups(
        call, options.packed_weight, [&](size_t g) { return parts[g].clone(); },
        [&] { return all; });
  }
  const auto offsets = group_offsets(call.in(splits), groups, input.size(0));
  const int64_t out = gradient.size(1), in = input.size(1);
  const auto write = [&](size_t g, const Tensor& target) {
    if (offsets[g] == offsets[g + 1]) {
      target.zero_();
    } else {
      multiply_into(call, rows_of_group(gradient, offsets, g).t(), rows_of_group(input, offsets, g),
                    target, kernel_ops::Rows::contracted);
    }
  };
  write_groups(
      call, options.packed_weight,
      [&](size_t g) {
        const int64_t sizes[] = {out, in};
        const Tensor target = call.frame().allocate(sizes, input.scalar_type(), input);
        write(g, target);
        return target;
      },
      [&] {
        const int64_t sizes[] = {groups, out, in};
        const Tensor target = call.frame().allocate(sizes, input.scalar_type(), input);
        for (size_t g = 0; g < options.num_groups; ++g)
          write(g, target.select(0, static_cast<int64_t>(g)));
        return target;
      });
}

void grad_bias(Call& call) {
  enum Read { grad_y, splits };
  const GroupedLinearOptions& options = options_of(call);
  call.took(kernel_ops::kDispatcher);
  const Tensor all = kernel_ops::grouped_sum_rows(as_matrix(call.in(grad_y)), call.in(splits),
                                                  static_cast<int64_t>(options.num_groups));
  const auto parts = all.unbind(0);
  write_groups(
      call, options.packed_bias, [&](size_t g) { return parts[g].clone(); }, [&] { return all; });
}

size_t list_length(const void* options, std::string_view operand) {
  const auto& grouped = *static_cast<const GroupedLinearOptions*>(options);
  if (operand == "weight[]") return grouped.packed_weight ? 1 : grouped.num_groups;
  return !grouped.bias ? 0 : grouped.packed_bias ? 1 : grouped.num_groups;
}

bool has_bias(const void* options) {
  return static_cast<const GroupedLinearOptions*>(options)->bias;
}

}  // namespace

const OpDef kGroupedLinear{
    .name = "grouped_linear",
    .formula = "y_g = x_g weight_g^T + bias_g",
    .signature = {GroupedLinearOptions{},
                  {{"num_groups", &GroupedLinearOptions::num_groups,
                    between(1, limits::kParams / 2), "the number of weights"},
                   {"bias", &GroupedLinearOptions::bias, "there is a bias"},
                   {"packed_weight", &GroupedLinearOptions::packed_weight,
                    "the weights are one tensor [num_groups, ...]"},
                   {"packed_bias", &GroupedLinearOptions::packed_bias,
                    "the biases are one tensor [num_groups, ...]"}}},
    .sizes = {{"in_features", "size of the last dimension of x"},
              {"out_features", "size of the last dimension of y"}},
    .inputs = {"x", "splits"},
    .indices = {"splits"},
    .params = {{"weight[]", {"out_features", "in_features"}, ParamDef::Init::kaiming_uniform},
               {"bias[]", {"out_features"}}},
    .dtype = DtypeRule::weight,
    .forward = {{.name = "forward",
                 .reads = {"x", "splits", "weight[]", "bias[]"},
                 .writes = {"y"},
                 .run = forward}},
    .backward = {{.name = "grad_x",
                  .reads = {"grad_y", "splits", "weight[]"},
                  .writes = {"grad_x"},
                  .run = grad_x},
                 {.name = "grad_weight",
                  .reads = {"grad_y", "x", "splits"},
                  .writes = {"grad_weight[]"},
                  .run = grad_weight},
                 {.name = "grad_bias",
                  .reads = {"grad_y", "splits"},
                  .writes = {"grad_bias[]"},
                  .run = grad_bias,
                  .applies = has_bias}},
    .context = {"x", "splits"},
    .is_unquantized = true,
    .list_length = list_length,
};

TANDEM_REGISTER_OP(kGroupedLinear);

}  // namespace tandem::ops
