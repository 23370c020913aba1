#include <algorithm>

#include "core/call.h"
#include "core/fusion.h"
#include "core/overlap.h"
#include "fusions/refusals.h"
#include "kernel_ops/elementwise/elementwise.h"
#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/unit/activation.h"
#include "ops/activation.h"
#include "ops/product.h"
#include "ops/structure.h"
#include "tandem/op_options.h"

namespace tandem::fusions {

namespace {

// All forward fusions here read x and weight first, and then the bias if there is one.

/// Returns the dtype of the unfused product.
at::ScalarType product_dtype(const Call& call) {
  enum Read { x, weight, bias };
  return call.format(x) == Format::codes ? call.type(x).dtype : call.in(x).scalar_type();
}

/// Returns the bias of the step, or null.
const at::Tensor* bias_of(const Call& call) {
  enum Read { x, weight, bias };
  return call.has(bias) ? &call.in(bias) : nullptr;
}

/// Adds the product to a tensor of the caller; the product itself adds where it can write there.
void add_in_place(Call& call, const at::Tensor& target, double factor) {
  enum Read { x, weight, bias };
  ops::check_linear(call, x, weight);
  const c10::SymDimVector sizes = ops::output_sizes(call.in(x), call.like(weight));
  const bool fits = target.sym_sizes() == c10::SymIntArrayRef(sizes) && target.is_contiguous() &&
                    target.scalar_type() == product_dtype(call);
  // Tensors without a common storage may share memory: arrays of numpy, parts of one memory.
  const auto shares = [&](const at::Tensor& tensor) {
    return call.path() == Path::direct ? overlap(target, tensor) : target.is_alias_of(tensor);
  };
  const auto* const parts = call.parts(weight);
  const bool is_apart =
      !shares(call.in(x)) &&
      (parts != nullptr ? std::ranges::none_of(*parts, shares) : !shares(call.in(weight)));
  if (fits && is_apart && !call.has(bias) && ops::multiplies_by(factor)) {
    ops::product_into(call, {x}, {weight, true},
                      target.view_symint({kernel_ops::rows_of(target), target.sym_size(-1)}),
                      /*accumulate=*/true, factor);
  } else {
    const at::Tensor product =
        ops::linear_product(call, x, weight, product_dtype(call), {factor, bias_of(call)});
    ops::check_target(call, target, product);
    target.add_(product);
  }
  target.unsafeGetTensorImpl()->bump_version();  // below autograd nobody else does
}

void linear_sum(Call& call) {
  enum Read { x, weight, bias, extra };
  ops::check_one_device(call, {x, weight, bias});
  const auto* scale = member_options<ops::ScaleOptions>(call, 2);
  const double factor = scale == nullptr ? 1 : scale->factor;
  std::optional<at::Tensor> added = call.maybe(extra);
  if (added && !call.step().mutates.empty()) {
    add_in_place(call, *added, factor);
    return call.out(0, *added);
  }
  if (added) {
    ops::check_linear(call, x, weight);
    const c10::SymDimVector sizes = ops::output_sizes(call.in(x), call.like(weight));
    if (added->sym_sizes() != c10::SymIntArrayRef(sizes)) {
      const c10::SymDimVector wide = ops::sizes_of_sum(call, extra, sizes);
      if (wide != sizes) {  // the sum is larger than the product
        const at::Tensor product =
            ops::linear_product(call, x, weight, product_dtype(call), {factor, bias_of(call)});
        return call.out(0, ops::sum_of_sizes(call, product, extra, wide));
      }
      added = ops::extra_of(call, extra, sizes);
    }
  }
  if (call.has(bias) && scale == nullptr && !added && ops::may_do_more(call, x))
    if (auto made =
            ops::linear_product_and(call, x, weight, product_dtype(call), {call.maybe(bias)});
        made.y.defined())
      return call.out(0, std::move(made.y));
  call.out(0, ops::linear_product(call, x, weight, product_dtype(call),
                                  {factor, bias_of(call), added ? &*added : nullptr}));
}

void linear_activation(Call& call) {
  enum Read { x, weight, bias, given };
  enum Write { z, y, codes };
  using Unit = kernel_ops::ActivationForward;
  const auto& [function, is_gated] = call.options<ops::ActivationOptions>(2);
  if (ops::may_do_more(call, x) && member_options<Quantizer>(call, 3) == nullptr) {
    auto made = ops::linear_product_and(call, x, weight, product_dtype(call),
                                        {call.maybe(bias), function, is_gated, call.wants(z)});
    if (made.y.defined()) {
      if (call.wants(z)) call.out(z, std::move(made.z));
      return call.out(y, std::move(made.y));
    }
  }
  ops::check_one_device(call, {x, weight, bias});
  // The unit adds the bias in its own pass, except in 16 bits, where the unit would read a rounded
  // product.
  const at::ScalarType dtype = product_dtype(call);
  const bool adds = call.has(bias) && !kernel_ops::is_narrow(dtype);
  const at::Tensor product =
      ops::linear_product(call, x, weight, dtype, {1, adds ? nullptr : bias_of(call)});
  // Without a bias to add, z is the product and no result of the kernel. Else z, or y where z is
  // not demanded, takes the product's memory.
  const bool is_z = !adds && call.wants(z);
  const Unit::Args args{.x = product,
                        .bias = adds ? call.maybe(bias) : std::nullopt,
                        .activation = function,
                        .is_gated = is_gated,
                        .output_mask = {call.wants(z) && !is_z, call.wants(y)},
                        .codes = codes_of_member(call, 3, given, codes)};
  std::array<at::Tensor, Unit::kResults.size()> spare;
  if (!is_z) spare[call.wants(z) ? Unit::z : Unit::y] = product;
  auto results = call.run<Unit>(args, spare);
  if (is_z) results[Unit::z] = product;
  call.hand_out<Unit>(args, std::move(results));
}

/// Codes of an argument carry the dtype of its numbers. Where the plan casts these numbers, only
/// the product's own step knows the dtype in which it computes.
Refusal refuse_cast_codes(const Match& match) {
  const Type& own = match.type({0, "x"});
  const at::ScalarType product = match.type({0, "y"}).dtype;
  if (own.format != Format::codes || own.dtype == product) return std::nullopt;
  return std::string("x comes in codes of ") + c10::toString(own.dtype) +
         " numbers, and the product computes in " + c10::toString(product);
}

Refusal refuse_bias(const Match& match) {
  if (auto refusal = refuse_cast_codes(match)) return refusal;
  if (!match.has(1)) return std::nullopt;
  return refuse_mixed(match, {1, "bias"}, "the bias", {0, "y"}, "the product");
}

Refusal refuse_sum(const Match& match) {
  if (match.has(3) && is_own_extra(match, 3)) return "the product is the extra input of the sum";
  return refuse_bias(match);
}

Refusal refuse_activation(const Match& match) {
  if (auto refusal = refuse_bias(match)) return refusal;
  return refuse_without_codes(match);
}

Fusion activated(std::string_view family, std::string_view suffix, std::string_view picture) {
  Fusion fusion{.name = "linear",
                .pattern = {"basic_linear", PatternStep("bias").optional("_bias"),
                            PatternStep::any_of(family).named(suffix),
                            PatternStep(StepKind::quantize).optional("_quantize", /*needed=*/1)},
                .run = {.reads = {{0, "x"}, {0, "weight"}, {1, "bias"}, {3, "given"}},
                        .writes = {{1, kMainResult}, {2, "y"}},
                        .run = linear_activation},
                .refuse = refuse_activation,
                .picture = picture};
  write_codes(fusion.run, 3);
  return fusion;
}

void linear_backward_add(Call& call) {
  enum Read { grad_y, weight, grad_residual };
  const at::Tensor& addend = call.in(grad_residual);
  call.out(0,
           ops::linear_grad_x(call, grad_y, weight, call.out_type(0).dtype, {1, nullptr, &addend}));
}

Refusal refuse_linear_backward_add(const Match& match) {
  if (!exists(match[{1, kOtherRead}])) return "the sum has no other term";
  return refuse_mixed(match, {1, kOtherRead}, "the other gradient", {0, "grad_x"}, "the product");
}

void linear_backward_scale(Call& call) {
  enum Read { grad_y, weight, x };
  enum Write { grad_x, grad_weight };
  const ops::Epilogue scaled{call.options<ops::ScaleOptions>(0).factor};
  if (call.wants(grad_x))
    call.out(grad_x, ops::linear_grad_x(call, grad_y, weight, call.out_type(grad_x).dtype, scaled));
  if (call.wants(grad_weight))
    call.out(grad_weight,
             ops::linear_grad_weight(call, grad_y, x, call.out_type(grad_weight).dtype, scaled));
}

/// A fused product rounds once, and an unfused one rounds the scaled gradient first. Results must
/// not depend on a memory budget, so the fusion must not depend on what is kept: an x that backward
/// re-emits, or computes from a re-emitted value, may exist too late for this step.
Refusal refuse_backward_scale(const Match& match) {
  if (match.has(2) && match.type({2, "x"}).may_come_late)
    return "x may be there again only behind the product that the scale is fused with";
  return refuse_mixed(match, {0, "grad_x"}, "the scaled gradient", {0, "grad_y"}, "the gradient");
}

}  // namespace

extern const Fusion kLinearSum{
    .name = "linear",
    .pattern = {"basic_linear", PatternStep("bias").optional("_bias"),
                PatternStep("constant_scale").optional("_scale"),
                PatternStep("add_extra_input|add_extra_input.in_place")
                    .through("y", kAnyRead)
                    .optional("_add")},
    .run = {.reads = {{0, "x"}, {0, "weight"}, {1, "bias"}, {3, "extra"}},
            .writes = {{3, kMainResult}},
            .run = linear_sum,
            .mutates = {3}},
    .refuse = refuse_sum,
    .picture = "x, weight -> (factor *) product (-> + (factor *) bias) (-> + extra) -> y",
};

extern const Fusion kLinearActivation = activated(
    "activation", "_activation",
    "x, weight -> product (-> + bias) -> z (if demanded) -> act -> y (if demanded) (-> codes, "
    "scales, amax)");
extern const Fusion kLinearGlu = activated(
    "glu", "_glu",
    "x, weight -> product (-> + bias) -> z = [a, b] (if demanded) -> act(a) b -> y (if demanded) "
    "(-> codes, scales, amax)");

extern const Fusion kLinearBackwardAdd{
    .name = "linear_backward_add",
    .pass = Pass::backward,
    .pattern = {"basic_linear.grad_x", StepKind::add},
    .run = {.reads = {{0, "grad_y"}, {0, "weight"}, {1, kOtherRead}},
            .writes = {{1, "y"}},
            .run = linear_backward_add},
    .refuse = refuse_linear_backward_add,
    .picture = "grad_y, weight, grad_residual -> product + grad_residual -> grad_x",
};

extern const Fusion kLinearBackwardScale{
    .name = "linear_backward_scale",
    .pass = Pass::backward,
    .pattern = {"constant_scale.backward", PatternStep("basic_linear.grad_x").optional("_x"),
                PatternStep("basic_linear.grad_weight").behind(0).optional("_weight")},
    .run = {.reads = {{0, "grad_y"}, {1, "weight"}, {2, "x"}},
            .writes = {{1, "grad_x"}, {2, "grad_weight"}},
            .run = linear_backward_scale},
    .refuse = refuse_backward_scale,
    .picture = "grad_y, weight, x -> factor * products -> grad_x, grad_weight",
};

}  // namespace tandem::fusions
