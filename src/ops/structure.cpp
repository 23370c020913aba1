#include "ops/structure.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/mul.h>

#include <algorithm>

#include "core/call.h"
#include "kernel_ops/elementwise/elementwise.h"
#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/shapes.h"
#include "tandem/op_options.h"

namespace tandem::ops {

namespace {

void reshape_forward(Call& call) {
  enum Write { y, x_shape };
  const at::Tensor& x = call.in(0);
  const auto& shape = call.options<ReshapeOptions>().shape;
  if (call.wants(y)) {
    int64_t known = 1;
    bool inferred = false;
    for (const int64_t size : shape) (size == -1 ? inferred = true : (known *= size, false));
    const bool fits = inferred ? known != 0 && x.sym_numel() % known == 0 : x.sym_numel() == known;
    TORCH_CHECK_VALUE(fits, "reshape: expected x with ", inferred ? "a multiple of " : "", known,
                      " elements for shape ", at::IntArrayRef(shape), ", got x of shape ",
                      x.sym_sizes(), ". Change the shape or give one size as -1.");
    call.out(y, x.reshape(shape));
  }
  if (call.wants(x_shape))
    call.frame().shape(call.step().writes[x_shape]) = kernel_ops::sizes_of(x);
}

void reshape_backward(Call& call) {
  enum Read { grad_y, x_shape };
  const auto sizes = call.in(grad_y).sym_sizes();
  const auto& shape = call.options<ReshapeOptions>().shape;
  bool fits = sizes.size() == shape.size();
  for (size_t d = 0; fits && d < shape.size(); ++d) fits = shape[d] == -1 || sizes[d] == shape[d];
  TORCH_CHECK_VALUE(fits, "reshape: expected a gradient of shape ", at::IntArrayRef(shape),
                    ", got ", sizes, ". Return a gradient of the shape of an op's output.");
  call.out(0, call.in(grad_y).reshape_symint(call.frame().shape(call.step().reads[x_shape])));
}

/// An ATen operation, so that a compiler can fuse it with its neighbours.
void scale(Call& call) { call.out(0, at::mul(call.in(0), call.options<ScaleOptions>().factor)); }

void dropout(Call& call) {
  enum Read { x, seed };
  call.write<kernel_ops::Dropout>(
      {.x = call.in(x), .seed = call.in(seed), .p = call.options<DropoutOptions>().p});
}

void add(Call& call) {
  enum Read { x, extra };
  const at::Tensor& own = call.in(x);
  if (own.sym_sizes() == call.in(extra).sym_sizes())
    return call.write<kernel_ops::AddBias>({.x = own, .extra = call.in(extra)});
  call.out(0, sum_of_sizes(call, own, extra, sizes_of_sum(call, extra, own.sym_sizes())));
}

void add_in_place(Call& call) {
  enum Read { x, extra };
  const at::Tensor& target = call.in(extra);
  check_target(call, target, call.in(x));
  target.add_(call.in(x));
  target.unsafeGetTensorImpl()->bump_version();  // nothing else does so below autograd
  call.out(0, target);
}

/// The first value of every plan.
constexpr Value kMainInput{0};

}  // namespace

bool is_callers(const Call& call, size_t read) {
  return call.type(read).origin == Origin::input && call.step().reads[read] != kMainInput;
}

c10::SymDimVector sizes_of_sum(const Call& call, size_t read, c10::SymIntArrayRef sizes) {
  const auto extra = call.in(read).sym_sizes();
  const c10::SymDimVector own(sizes.begin(), sizes.end());
  if (extra == sizes || !call.step().broadcasts_input) return own;
  c10::SymDimVector wide(std::max(sizes.size(), extra.size()), 1);
  for (const c10::SymIntArrayRef each : {sizes, extra})
    for (size_t d = 0; d < each.size(); ++d) {
      c10::SymInt& size = wide[wide.size() - each.size() + d];
      if (each[d] == 1 || each[d] == size) continue;
      if (size != 1) return own;
      size = each[d];
    }
  return extra == c10::SymIntArrayRef(wide) || is_callers(call, read) ? wide : own;
}

namespace {

void check_holds(c10::SymIntArrayRef target, c10::SymIntArrayRef x) {
  TORCH_CHECK_VALUE(target == x, "add_extra_input: expected the extra input of the shape of x, ", x,
                    ", got ", target, ". Expand or reshape the extra input before the call.");
}

}  // namespace

const Options& caller_holds_sum() {
  static const Options mark = std::make_shared<char>();
  return mark;
}

at::Tensor extra_of(const Call& call, size_t read, c10::SymIntArrayRef sizes) {
  const at::Tensor& extra = call.in(read);
  if (extra.sym_sizes() == sizes) return extra;
  if (std::ranges::find(call.step().options, caller_holds_sum()) != call.step().options.end())
    check_holds(extra.sym_sizes(), sizes);
  if (!is_callers(call, read) || !at::is_expandable_to(extra.sym_sizes(), sizes)) return extra;
  return broadcast_to(extra, sizes);
}

at::Tensor broadcast_to(const at::Tensor& x, c10::SymIntArrayRef sizes) {
  return x.sym_sizes() == sizes ? x : x.expand_symint(sizes).contiguous();
}

at::Tensor sum_of_sizes(Call& call, const at::Tensor& x, size_t extra, c10::SymIntArrayRef sizes) {
  return call.run<kernel_ops::AddBias>(
      {.x = broadcast_to(x, sizes), .extra = extra_of(call, extra, sizes)})[0];
}

void check_target(const Call& call, const at::Tensor& target, const at::Tensor& x) {
  if (call.step().broadcasts_input && at::is_expandable_to(x.sym_sizes(), target.sym_sizes()))
    return;
  check_holds(target.sym_sizes(), x.sym_sizes());
}

const OpDef kIdentity{
    .name = "identity",
    .formula = "y = x",
    .dtype = DtypeRule::promote,
    .same = {{"y", "x"}},
    .same_gradients = {{"grad_x", "grad_y"}},
};

const OpDef kReshape{
    .name = "reshape",
    .formula = "y = x.reshape(shape)",
    .signature = {ReshapeOptions{},
                  {{"shape", &ReshapeOptions::shape, "sizes of y; -1 follows from the others"}}},
    .results = {{"y"}, {"x_shape", ResultDef::shape}},
    .dtype = DtypeRule::promote,
    .forward =
        {{.name = "forward", .reads = {"x"}, .writes = {"y", "x_shape"}, .run = reshape_forward}},
    .backward = {{.name = "backward",
                  .reads = {"grad_y", "x_shape"},
                  .writes = {"grad_x"},
                  .run = reshape_backward}},
    .views_input = true,
};

const OpDef kConstantScale{
    .name = "constant_scale",
    .formula = "y = x factor",
    .signature = {ScaleOptions{}, {{"factor", &ScaleOptions::factor, "what x is multiplied by"}}},
    .dtype = DtypeRule::promote_number,
    .forward = {{.name = "forward", .reads = {"x"}, .writes = {"y"}, .run = scale}},
    .backward = {{.name = "backward", .reads = {"grad_y"}, .writes = {"grad_x"}, .run = scale}},
};

const OpDef kDropout{
    .name = "dropout",
    .formula = "y = keep(seed, p) ? x / (1 - p) : 0",
    .signature = {DropoutOptions{},
                  {{"p", &DropoutOptions::p, between(0, 1), "the share that becomes zero"}}},
    .results = {{"y"}, {"seed", ResultDef::seed}},
    .dtype = DtypeRule::promote,
    .forward = {{.name = "forward", .reads = {"x", "seed"}, .writes = {"y"}, .run = dropout}},
    .backward =
        {{.name = "backward", .reads = {"grad_y", "seed"}, .writes = {"grad_x"}, .run = dropout}},
    .context = {"seed"},
    .is_identity =
        [](const void* options, bool training) {
          return !training || static_cast<const DropoutOptions*>(options)->p == 0;
        },
};

const OpDef kQuantize{
    .name = "quantize",
    .formula = "y = dequantize(quantize(x))",
    .signature = {QuantizeOptions{},
                  {{"forward", &QuantizeOptions::forward, "x is rounded"},
                   {"backward", &QuantizeOptions::backward, "the gradient is"}}},
    .dtype = DtypeRule::promote,
    .same = {{"y", "x"}},
    .same_gradients = {{"grad_x", "grad_y"}},
    .is_quantize_point = true,
};

const OpDef kAddExtraInput{
    .name = "add_extra_input",
    .formula = "y = x + extra",
    .inputs = {"x", "extra"},
    .dtype = DtypeRule::promote,
    .same_gradients = {{"grad_x", "grad_y"}, {"grad_extra", "grad_y"}},
    .forward = {{.name = "forward", .reads = {"x", "extra"}, .writes = {"y"}, .run = add}},
    .broadcasts_input = true,
    .in_place = StepDef{.name = "in_place",
                        .reads = {"x", "extra"},
                        .writes = {"y"},
                        .mutates = {"extra"},
                        .run = add_in_place},
};

const OpDef kMakeExtraOutput{
    .name = "make_extra_output",
    .formula = "y = x, extra = x; grad_x = grad_y + grad_extra",
    .results = {{"y"}, {"extra"}},
    .extra_outputs = {"extra"},
    .dtype = DtypeRule::promote,
    .same = {{"y", "x"}, {"extra", "x"}},
};

TANDEM_REGISTER_OP(kIdentity);
TANDEM_REGISTER_OP(kReshape);
TANDEM_REGISTER_OP(kConstantScale);
TANDEM_REGISTER_OP(kDropout);
TANDEM_REGISTER_OP(kQuantize);
TANDEM_REGISTER_OP(kAddExtraInput);
TANDEM_REGISTER_OP(kMakeExtraOutput);

}  // namespace tandem::ops
