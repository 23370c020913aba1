#include "fusions/linear.h"

#include <ATen/ops/addmm.h>

#include "core/call.h"
#include "fusions/refusals.h"
#include "kernel_ops/elementwise/elementwise.h"
#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/unit/activation.h"
#include "kernel_ops/unit/activation_quantize.h"
#include "ops/activation.h"
#include "ops/product.h"
#include "ops/structure.h"
#include "tandem/op_options.h"

namespace tandem::fusions {

namespace {

/// What stands between the product and the last step of a pattern. All forward fusions here read x
/// and weight first, and then the bias if there is one.
struct Parts {
  bool bias = false, scale = false, extra = false;
};

/// The dtype that the unfused product has.
at::ScalarType product_dtype(const Call& call) {
  enum Read { x, weight, bias };
  return call.format(x) == Format::codes ? call.type(x).dtype : call.in(x).scalar_type();
}

/// x W^T + bias as compilers know it best; undefined where that is not what the step computes.
at::Tensor addmm(Call& call) {
  enum Read { x, weight, bias };
  if (call.path() == Path::direct || call.format(x) != Format::plain ||
      call.in(bias).scalar_type() != call.in(x).scalar_type())
    return {};
  ops::check_one_device(call, {x, weight, bias});
  const at::Tensor& input = call.in(x);
  const at::Tensor flat =
      input.dim() == 2 ? input
                       : input.reshape_symint({kernel_ops::rows_of(input), input.sym_size(-1)});
  const at::Tensor y = at::addmm(call.in(bias), flat, call.in(weight).t());
  call.took(kernel_ops::kDispatcher);
  return input.dim() == 2 ? y : y.reshape_symint(ops::output_sizes(input, call.in(weight)));
}

/// product + alpha * bias (+ extra), in the memory of the product.
at::Tensor with_bias(Call& call, const at::Tensor& product, bool scaled, double alpha,
                     const std::optional<at::Tensor>& extra) {
  enum Read { x, weight, bias };
  if (scaled)
    return call.run_into<kernel_ops::AddScaledBias>({product}, product, call.in(bias), alpha,
                                                    extra)[0];
  return call.run_into<kernel_ops::AddBias>({product}, product, call.maybe(bias), extra)[0];
}

/// Adds the product to a tensor of the caller, in the product where that can write there.
template <Parts kParts>
void add_in_place(Call& call, const at::Tensor& target, double alpha) {
  enum Read { x, weight, bias };
  ops::check_linear(call, x, weight);
  const c10::SymDimVector sizes = ops::output_sizes(call.in(x), call.in(weight));
  const bool fits = target.sym_sizes() == c10::SymIntArrayRef(sizes) && target.is_contiguous() &&
                    target.scalar_type() == product_dtype(call);
  const bool is_apart = !target.is_alias_of(call.in(x)) && !target.is_alias_of(call.in(weight));
  if (fits && is_apart && !kParts.bias && ops::multiplies_by(alpha)) {
    ops::product_into(call, {x}, {weight, true},
                      target.view_symint({kernel_ops::rows_of(target), target.sym_size(-1)}),
                      /*accumulate=*/true, alpha);
  } else {
    at::Tensor sum = ops::linear_product(call, x, weight, product_dtype(call), {alpha});
    ops::check_target(call, target, sum);
    if (kParts.bias) sum = with_bias(call, sum, kParts.scale, alpha, std::nullopt);
    target.add_(sum);
  }
  target.unsafeGetTensorImpl()->bump_version();  // below autograd nobody else does
}

/// What is before the sum is smaller than the sum.
template <Parts kParts>
at::Tensor wider_sum(Call& call, size_t extra, double alpha, c10::SymIntArrayRef sizes) {
  enum Read { x, weight, bias };
  at::Tensor sum = ops::linear_product(call, x, weight, product_dtype(call), {alpha});
  if (kParts.bias) sum = with_bias(call, sum, kParts.scale, alpha, std::nullopt);
  return ops::sum_of_sizes(call, sum, extra, sizes);
}

template <Parts kParts>
void linear_sum(Call& call) {
  enum Read { x, weight, bias };
  constexpr size_t kExtra = kParts.bias ? 3 : 2;
  const double alpha =
      kParts.scale ? call.options<ops::ScaleOptions>(kParts.bias ? 2 : 1).factor : 1;
  std::optional<at::Tensor> extra;
  if (kParts.extra) extra = call.in(kExtra);
  if (kParts.extra && !call.step().mutates.empty()) {
    add_in_place<kParts>(call, *extra, alpha);
    call.out(0, *extra);
    return;
  }
  if (kParts.extra) {
    ops::check_linear(call, x, weight);
    const c10::SymDimVector sizes = ops::output_sizes(call.in(x), call.in(weight));
    if (extra->sym_sizes() != c10::SymIntArrayRef(sizes)) {
      const c10::SymDimVector wide = ops::sizes_of_sum(call, kExtra, sizes);
      if (wide != sizes) return call.out(0, wider_sum<kParts>(call, kExtra, alpha, wide));
      extra = ops::extra_of(call, kExtra, sizes);
    }
  }
  if constexpr (kParts.bias && !kParts.scale && !kParts.extra)
    if (at::Tensor y = addmm(call); y.defined()) return call.out(0, std::move(y));
  const at::Tensor product =
      ops::linear_product(call, x, weight, product_dtype(call),
                          {alpha, !kParts.bias && kParts.extra ? &*extra : nullptr});
  call.out(0, kParts.bias ? with_bias(call, product, kParts.scale, alpha, extra) : product);
}

template <typename K, Parts kParts>
void linear_activation(Call& call) {
  enum Read { x, weight, bias };
  enum Write { z, y };
  const at::Tensor product = ops::linear_product(call, x, weight, product_dtype(call));
  // The sum with the bias, or what the activation makes of it, takes the product's memory. A z that
  // is the product is no result of the kernel.
  const bool is_z = !kParts.bias && call.wants(z);
  kernel_ops::ResultsOf<K> spare;
  if (!is_z) spare[call.wants(z) ? z : y] = product;
  auto results =
      call.run_into<K>(spare, product, kParts.bias ? call.maybe(bias) : std::nullopt,
                       call.options<ops::ActivationOptions>(kParts.bias ? 2 : 1).function,
                       std::array<bool, 2>{call.wants(z) && !is_z, call.wants(y)});
  if (call.wants(z)) call.out(z, is_z ? product : std::move(results[z]));
  if (call.wants(y)) call.out(y, std::move(results[y]));
}

template <typename K>
void linear_bias_activation_quantize(Call& call) {
  enum Read { x, weight, bias };
  enum OfUnit { given = bias + 1 };
  enum Write { y, z, row, column, amax };
  const at::Tensor product = ops::linear_product(call, x, weight, product_dtype(call));
  kernel_ops::ResultsOf<K> spare;
  spare[call.wants(z) ? z : y] = product;
  call.hand_out_codes(
      [&] { return K::sizes_of_y(product); },
      call.run_into<K>(spare, product, call.maybe(bias), call.maybe(given),
                       call.options<ops::ActivationOptions>(2).function, call.options<Quantizer>(3),
                       std::array{call.wants(y), call.wants(z), call.wants(row), call.wants(column),
                                  call.wants(amax)}));
}

/// Codes of an argument have the dtype of its numbers. Where these are cast, in which dtype the
/// product computes is known to its own step alone.
Refusal refuse_cast_codes(const Match& match) {
  const Type& own = match.type({0, "x"});
  const at::ScalarType product = match.type({0, "y"}).dtype;
  if (own.format != Format::codes || own.dtype == product) return std::nullopt;
  return std::string("x comes in codes of ") + c10::toString(own.dtype) +
         " numbers, and the product computes in " + c10::toString(product);
}

Refusal refuse_bias(const Match& match) {
  if (auto refusal = refuse_cast_codes(match)) return refusal;
  return refuse_mixed(match, {1, "bias"}, "the bias", {0, "y"}, "the product");
}

template <Parts kParts>
Refusal refuse_sum(const Match& match) {
  const auto last = static_cast<uint32_t>(match.steps.size() - 1);
  if (kParts.extra && is_own_extra(match, last)) return "the product is the extra input of the sum";
  return kParts.bias ? refuse_bias(match) : refuse_cast_codes(match);
}

/// The steps of a pattern, and what the fused step reads, up to the last one.
template <Parts kParts>
Fusion begun(std::string_view name) {
  Fusion fusion{.name = std::string(name), .pattern = {"basic_linear"}};
  fusion.run.reads = {{0, "x"}, {0, "weight"}};
  if (kParts.bias) {
    fusion.pattern.emplace_back("bias");
    fusion.run.reads.push_back({1, "bias"});
  }
  return fusion;
}

template <Parts kParts>
Fusion sum(std::string_view name, std::string_view picture) {
  Fusion fusion = begun<kParts>(name);
  if (kParts.scale) fusion.pattern.emplace_back("constant_scale");
  if (kParts.extra) {
    fusion.run.mutates = {static_cast<uint32_t>(fusion.pattern.size())};
    fusion.run.reads.push_back({fusion.run.mutates[0], "extra"});
    fusion.pattern.push_back(
        PatternStep("add_extra_input|add_extra_input.in_place").through("y", kAnyRead));
  }
  fusion.run.writes = {{static_cast<uint32_t>(fusion.pattern.size() - 1), "y"}};
  fusion.run.run = linear_sum<kParts>;
  fusion.refuse = refuse_sum<kParts>;
  fusion.picture = picture;
  return fusion;
}

template <typename K, Parts kParts>
Fusion activated(std::string_view name, std::string_view family, std::string_view picture) {
  Fusion fusion = begun<kParts>(name);
  const auto last = static_cast<uint32_t>(fusion.pattern.size());
  fusion.pattern.push_back(PatternStep::any_of(family));
  fusion.run.writes = {{last - 1, "y"}, {last, "y"}};
  fusion.run.run = linear_activation<K, kParts>;
  fusion.refuse = kParts.bias ? refuse_bias : refuse_cast_codes;
  fusion.picture = picture;
  return fusion;
}

Refusal refuse_bias_or_codes(const Match& match) {
  if (auto refusal = refuse_bias(match)) return refusal;
  return refuse_without_codes(match);
}

template <typename K>
Fusion quantized(std::string_view name, std::string_view family, std::string_view picture) {
  Fusion fusion = begun<Parts{.bias = true}>(name);
  fusion.pattern.push_back(PatternStep::any_of(family));
  fusion.pattern.emplace_back(StepKind::quantize);
  fusion.run.reads.push_back({3, "given"});
  fusion.run.writes = {{2, "y"}, {1, "y"}, {3, "row_codes"}, {3, "column_codes"}, {3, "amax"}};
  fusion.run.run = linear_bias_activation_quantize<K>;
  fusion.refuse = refuse_bias_or_codes;
  fusion.picture = picture;
  return fusion;
}

void linear_backward_add(Call& call) {
  enum Read { grad_y, weight, grad_residual };
  const at::Tensor& addend = call.in(grad_residual);
  call.out(0, ops::linear_grad_x(call, grad_y, weight, call.out_type(0).dtype, {1, &addend}));
}

Refusal refuse_linear_backward_add(const Match& match) {
  if (!exists(match[{1, kOtherRead}])) return "the sum has no other term";
  return refuse_mixed(match, {1, kOtherRead}, "the other gradient", {0, "grad_x"}, "the product");
}

ops::Epilogue scaled_by_factor(const Call& call) {
  return {call.options<ops::ScaleOptions>().factor};
}

template <size_t kWrite>
void linear_grad_x_scale(Call& call) {
  enum Read { grad_y, weight };
  if (call.wants(kWrite))
    call.out(kWrite, ops::linear_grad_x(call, grad_y, weight, call.out_type(kWrite).dtype,
                                        scaled_by_factor(call)));
}

template <size_t kRead, size_t kWrite>
void linear_grad_weight_scale(Call& call) {
  if (call.wants(kWrite))
    call.out(kWrite, ops::linear_grad_weight(call, 0, kRead, call.out_type(kWrite).dtype,
                                             scaled_by_factor(call)));
}

void linear_backward_scale(Call& call) {
  linear_grad_x_scale<0>(call);
  linear_grad_weight_scale<2, 1>(call);
}

Refusal refuse_other_dtype(const Match& match) {
  return refuse_mixed(match, {0, "grad_x"}, "the scaled gradient", {0, "grad_y"}, "the gradient");
}

constexpr Parts kBias{.bias = true}, kBiasAdd{.bias = true, .extra = true},
    kBiasScale{.bias = true, .scale = true},
    kBiasScaleAdd{.bias = true, .scale = true, .extra = true}, kAdd{.extra = true},
    kScale{.scale = true}, kScaleAdd{.scale = true, .extra = true}, kNone{};

}  // namespace

const Fusion kLinearBias = sum<kBias>("linear_bias", "x, weight -> product -> + bias -> y");
const Fusion kLinearBiasAdd =
    sum<kBiasAdd>("linear_bias_add", "x, weight -> product -> + bias -> + extra -> y");
const Fusion kLinearBiasScale =
    sum<kBiasScale>("linear_bias_scale", "x, weight -> factor * product -> + factor * bias -> y");
const Fusion kLinearBiasScaleAdd = sum<kBiasScaleAdd>(
    "linear_bias_scale_add", "x, weight -> factor * product -> + factor * bias -> + extra -> y");
const Fusion kLinearAdd = sum<kAdd>("linear_add", "x, weight, extra -> product + extra -> y");
const Fusion kLinearScale = sum<kScale>("linear_scale", "x, weight -> factor * product -> y");
const Fusion kLinearScaleAdd =
    sum<kScaleAdd>("linear_scale_add", "x, weight, extra -> factor * product + extra -> y");

const Fusion kLinearBiasActivation = activated<kernel_ops::ActivationForward, kBias>(
    "linear_bias_activation", "activation",
    "x, weight -> product -> + bias -> z (if demanded) -> act -> y");
const Fusion kLinearActivation = activated<kernel_ops::ActivationForward, kNone>(
    "linear_activation", "activation", "x, weight -> product z (if demanded) -> act -> y");
const Fusion kLinearBiasGlu = activated<kernel_ops::GluForward, kBias>(
    "linear_bias_glu", "glu",
    "x, weight -> product -> + bias -> z = [a, b] (if demanded) -> act(a) b -> y");
const Fusion kLinearGlu = activated<kernel_ops::GluForward, kNone>(
    "linear_glu", "glu", "x, weight -> product z = [a, b] (if demanded) -> act(a) b -> y");

const Fusion kLinearBiasActivationQuantize = quantized<kernel_ops::ActivationQuantize>(
    "linear_bias_activation_quantize", "activation",
    "x, weight -> product -> + bias -> z (if demanded) -> act -> y (if demanded) -> codes, scales, "
    "amax");
const Fusion kLinearBiasGluQuantize = quantized<kernel_ops::GluQuantize>(
    "linear_bias_glu_quantize", "glu",
    "x, weight -> product -> + bias -> z = [a, b] (if demanded) -> act(a) b -> y (if demanded) -> "
    "codes, scales, amax");

const Fusion kLinearBackwardAdd{
    .name = "linear_backward_add",
    .pass = Pass::backward,
    .pattern = {"basic_linear.grad_x", StepKind::add},
    .run = {.reads = {{0, "grad_y"}, {0, "weight"}, {1, kOtherRead}},
            .writes = {{1, "y"}},
            .run = linear_backward_add},
    .refuse = refuse_linear_backward_add,
    .picture = "grad_y, weight, grad_residual -> product + grad_residual -> grad_x",
};

const Fusion kLinearBackwardScale{
    .name = "linear_backward_scale",
    .pass = Pass::backward,
    .pattern = {"constant_scale.backward", "basic_linear.grad_x",
                PatternStep("basic_linear.grad_weight").behind(0)},
    .run = {.reads = {{0, "grad_y"}, {1, "weight"}, {2, "x"}},
            .writes = {{1, "grad_x"}, {2, "grad_weight"}},
            .run = linear_backward_scale},
    .refuse = refuse_other_dtype,
    .picture = "grad_y, weight, x -> factor * products -> grad_x, grad_weight",
};

const Fusion kLinearGradXScale{
    .name = "linear_grad_x_scale",
    .pass = Pass::backward,
    .pattern = {"constant_scale.backward", "basic_linear.grad_x"},
    .run = {.reads = {{0, "grad_y"}, {1, "weight"}},
            .writes = {{1, "grad_x"}},
            .run = linear_grad_x_scale<0>},
    .refuse = refuse_other_dtype,
    .picture = "grad_y, weight -> factor * product -> grad_x",
};

const Fusion kLinearGradWeightScale{
    .name = "linear_grad_weight_scale",
    .pass = Pass::backward,
    .pattern = {"constant_scale.backward", "basic_linear.grad_weight"},
    .run = {.reads = {{0, "grad_y"}, {1, "x"}},
            .writes = {{1, "grad_weight"}},
            .run = linear_grad_weight_scale<1, 0>},
    .refuse = refuse_other_dtype,
    .picture = "grad_y, x -> factor * product -> grad_weight",
};

}  // namespace tandem::fusions
