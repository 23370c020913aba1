// in_place=True: writes into the caller's tensor, or an error where autograd needs its old value.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/GradMode.h>

#include "core/call.h"
#include "pipeline/pipeline.h"
#include "support/plans.h"
#include "support/throws.h"

namespace tandem::testing::autograd_in_place {
namespace {

Outputs call(const Ops& ops, const Tensors& inputs, const Tensors& params = {}) {
  return Pipeline(ops_json(ops))(inputs, params, true);
}

TEST(InPlace, WritesTheSumIntoTheCallersTensor) {
  const at::Tensor x = random({2, 4}), extra = random({2, 4}, at::kFloat, 2), sum = x + extra;
  const auto version = extra._version();
  const Outputs outputs = call({kAddInPlace}, {x, extra});
  EXPECT_TRUE(outputs[0].is_same(extra));
  EXPECT_TRUE(same(extra, sum));
  EXPECT_EQ(extra._version(), version + 1);
}

TEST(InPlace, WithGradTheOutputIsANewObjectOnThatMemory) {
  const at::Tensor x = leaf({2, 4}), extra = random({2, 4}, at::kFloat, 2),
                   sum = x.detach() + extra;
  const Outputs outputs = call({kAddInPlace}, {x, extra});
  EXPECT_FALSE(outputs[0].is_same(extra));
  EXPECT_TRUE(outputs[0].is_alias_of(extra));
  EXPECT_TRUE(same(extra.detach(), sum));
  EXPECT_EQ(extra.grad_fn(), outputs[0].grad_fn()) << "as behind add_";
  (outputs[0] + 2 * extra).sum().backward();
  EXPECT_TRUE(same(x.grad(), x.detach() * 0 + 3));
}

TEST(InPlace, ALeafIsAddedIntoWhereBackwardDoesNotReadIt) {
  const at::Tensor x = leaf({2, 4}), extra = leaf({2, 4}, at::kFloat, 2),
                   sum = x.detach() + extra.detach();
  const auto version = extra._version();
  const Outputs outputs = call({kAddInPlace}, {x, extra});
  EXPECT_TRUE(same(extra, sum));
  EXPECT_TRUE(extra.is_leaf());
  EXPECT_EQ(extra._version(), version + 1);
  outputs[0].sum().backward();
  EXPECT_TRUE(same(extra.grad(), sum * 0 + 1));
  EXPECT_TRUE(same(x.grad(), sum * 0 + 1));
  EXPECT_ERROR(Planned({R"(test_multiply {"in_place": true})"}, {leaf({2}), leaf({2})}, {}),
               c10::ValueError, ", whose old value another op needs. Use in_place=False.");
}

TEST(InPlace, AnExtraInputWithAHistoryGoesOnWithTheSum) {
  const at::Tensor x = leaf({2, 4}), before = leaf({2, 4}), extra = before * 3;
  const at::Tensor y = call({kAddInPlace}, {x, extra})[0];
  EXPECT_EQ(extra.grad_fn(), y.grad_fn());
  (y + extra).sum().backward();
  EXPECT_TRUE(same(x.grad(), x.detach() * 0 + 2));
  EXPECT_TRUE(same(before.grad(), x.detach() * 0 + 6));
}

/// Gradients of x and of what `base` is made of, where a sum is written into a part of it; `add`
/// writes it.
template <typename Add>
std::vector<at::Tensor> gradients_of_a_part(bool has_history, Add add) {
  const at::Tensor x = leaf({4}), before = leaf({3, 4}, at::kFloat, 2);
  const at::Tensor base = has_history ? before * 3 : before.detach() * 3;
  const at::Tensor other = base.select(1, 2), extra = base.narrow(0, 1, 2).select(0, 0);
  const at::Tensor y = add(x, extra);
  const at::Tensor loss = (y * 5).sum() + (base * base).sum() + (other * extra[1]).sum();
  loss.backward();
  return {loss.detach(), x.grad(), has_history ? before.grad() : loss.detach()};
}

TEST(InPlace, InAViewReachesItsBaseAndTheOtherViews) {
  for (const bool has_history : {true, false}) {
    const auto found = gradients_of_a_part(has_history, [](const auto& x, const auto& extra) {
      return call({kAddInPlace}, {x, extra})[0];
    });
    const auto expected = gradients_of_a_part(
        has_history, [](const auto& x, const auto& extra) { return extra.add_(x); });
    for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(same(found[i], expected[i])) << i;
  }
}

TEST(InPlace, ATensorWhoseSumIsNoOutputHasNoGradientAnyMore) {
  for (const bool has_history : {true, false}) {
    const at::Tensor x = leaf({2, 4}),
                     extra = has_history ? leaf({2, 4}) * 3 : random({2, 4}, at::kFloat, 2);
    const at::Tensor y =
        call({kAddInPlace, R"(constant_scale {"options": {"factor": 2.0}})"}, {x, extra})[0];
    EXPECT_ERROR(at::sum(extra * 2).backward(), std::exception,
                 "pipeline: expected no gradient for a tensor that an in-place sum inside of a "
                 "pipeline has overwritten, got one. Use in_place=False");
    y.sum().backward();
    EXPECT_TRUE(same(x.grad(), x.detach() * 0 + 2));
  }
}

TEST(InPlace, NorHasItOneAmongTheGradientsThatAreAskedFor) {
  for (const bool in_a_part : {true, false})
    for (const bool of_x : {true, false})
      for (const bool with_output : {true, false}) {
        const at::Tensor x = leaf({4}), before = leaf({2, 4}), base = before * 3;
        const at::Tensor extra = in_a_part ? base.select(0, 1) : base.select(0, 1).clone();
        const at::Tensor y = call({kAddInPlace, "silu"}, {x, extra})[0];
        Tensors outputs{in_a_part ? base : extra}, given{at::ones_like(outputs[0])};
        if (with_output) outputs.push_back(y), given.push_back(at::ones_like(y));
        EXPECT_ERROR(
            gradients_of(outputs, {of_x ? x : before}, given), std::exception,
            "pipeline: expected no gradient for a tensor that an in-place sum inside of a pipeline "
            "has overwritten, got one. Use in_place=False, or pass the extra input detached.");
      }
}

TEST(InPlace, InAViewGivesTheGradientsThatAreAskedFor) {
  const auto gradients = [](auto add, bool has_history, std::vector<size_t> requested) {
    const at::Tensor x = leaf({4}), before = leaf({3, 4}, at::kFloat, 2);
    const at::Tensor base = has_history ? before * 3 : before.detach() * 3;
    const at::Tensor y = add(x, base.select(0, 1)) * 5;
    const Tensors leaves{x, before};
    Tensors from;
    for (const size_t i : requested) from.push_back(leaves[i]);
    return gradients_of({base, y}, from, {random({3, 4}), random({4})});
  };
  const auto in_pipeline = [](const at::Tensor& x, const at::Tensor& extra) {
    return call({kAddInPlace}, {x, extra})[0];
  };
  const auto in_torch = [](const at::Tensor& x, const at::Tensor& extra) { return extra.add_(x); };
  for (const bool has_history : {true, false})
    for (const std::vector<size_t>& requested :
         {std::vector<size_t>{0}, std::vector<size_t>{1}, std::vector<size_t>{0, 1}}) {
      const auto found = gradients(in_pipeline, has_history, requested),
                 expected = gradients(in_torch, has_history, requested);
      for (size_t i = 0; i < found.size(); ++i) {
        ASSERT_EQ(found[i].defined(), expected[i].defined()) << i;
        EXPECT_TRUE(!found[i].defined() || same(found[i], expected[i])) << i;
      }
    }
}

TEST(InPlace, AViewOfALeafIsRefused) {
  const at::Tensor base = leaf({2, 4}), before = base.detach().clone();
  EXPECT_ERROR(call({kAddInPlace}, {random({4}), base.select(0, 1)}), c10::ValueError,
               "pipeline: expected memory that no leaf shares for an in-place sum, got a view of a "
               "leaf that requires grad. Use");
  EXPECT_TRUE(same(base.detach(), before));
}

TEST(InPlace, OfAnotherShapeIsRefused) {
  EXPECT_ERROR(call({kAddInPlace}, {random({2, 4}), random({4})}), c10::ValueError,
               "add_extra_input: expected the extra input");
}

TEST(InPlace, OnATensorThatBackwardReadsIsRefused) {
  const at::Tensor x = leaf({2, 4}) * 1;
  EXPECT_ERROR(call({"gelu", kAddInPlace}, {x, x}), c10::Error,
               "pipeline: expected x unchanged until the end of the call",
               " unchanged until the end of the call, as backward reads it",
               "Use in_place=False, or write into a copy");
}

TEST(InPlace, WhatWasSavedBeforeIsChecked) {
  const at::Tensor x = leaf({2, 4}) * 1;
  const at::Tensor y = call({"gelu"}, {x})[0];
  call({kAddInPlace}, {random({2, 4}), x});
  EXPECT_ERROR(y.sum().backward(), c10::Error, "modified by an inplace operation");
}

TEST(InPlace, TheSameMemoryTwiceIsRefused) {
  const at::Tensor extra = random({2, 4});
  EXPECT_ERROR(call({kAddInPlace, kAddInPlace}, {random({2, 4}), extra, extra.view({2, 4})}),
               c10::ValueError,
               "pipeline: expected memory that no other in-place op of the pipeline writes, got "
               "the same twice. Use in_place=False, or pass a copy");
  EXPECT_NO_THROW(call({kAddInPlace, kAddInPlace}, {random({2, 4}), extra, extra.clone()}));
}

/// That a call is refused with this text, before it has written anything.
void expect_refused(const Ops& ops, const Tensors& inputs, const std::string& text) {
  Tensors before;
  for (const at::Tensor& input : inputs) before.push_back(input.detach().clone());
  EXPECT_ERROR(call(ops, inputs), c10::Error, text);
  for (size_t i = 0; i < inputs.size(); ++i) EXPECT_TRUE(same(inputs[i].detach(), before[i])) << i;
}

TEST(InPlace, OnMemoryThatALaterOpReadsIsRefused) {
  const std::string text =
      "pipeline: expected extra 1 unchanged until the end of the call, as a later op reads it, got "
      "an in-place write by an op of the pipeline. Use in_place=False, or write into a copy.";
  const at::Tensor x = leaf({3}), whole = leaf({4}) * 1, extra = whole.narrow(0, 0, 3);
  for (const at::Tensor& again : {extra, extra.view({3}), extra.detach(), whole.narrow(0, 1, 3),
                                  whole.detach().narrow(0, 1, 3)})
    expect_refused({kAddInPlace, "add_extra_input"}, {x, extra, again}, text);
  expect_refused({kAddInPlace, kAddInPlace, "add_extra_input"}, {x, random({3}), extra, extra},
                 "expected extra 2 unchanged");  // the first sum is not written either
  const at::Tensor buffer = random({3});
  expect_refused({kAddInPlace, "add_extra_input"}, {x, buffer, buffer}, text);
}

TEST(InPlace, OnMemoryThatAChannelOrAnOutputHoldsIsRefused) {
  const at::Tensor x = leaf({4}) * 1;
  expect_refused({to_channel(), kAddInPlace, from_channel()}, {x, x},
                 "expected x unchanged until the end of the call, as a later op reads it, got");
  expect_refused({"make_extra_output", kAddInPlace}, {x, x},
                 "expected x unchanged until the end of the call, as it is an output, got");
  expect_refused({to_channel(), R"(reshape {"options": {"shape": [2, 2]}})", "gelu",
                  R"(reshape {"options": {"shape": [4]}})", kAddInPlace},
                 {x, x}, "unchanged until the end of the call, as backward reads it, got");
}

TEST(InPlace, OfAPartThatOverlapsWhatIsAddedIsRefused) {
  const at::Tensor whole = random({8});
  expect_refused({kAddInPlace}, {whole.narrow(0, 0, 3), whole.narrow(0, 1, 3)},
                 "expected x unchanged until the end of the call, as the op that writes reads it");
  expect_refused({kAddInPlace}, {whole.narrow(0, 0, 3), whole.as_strided({3}, {2}, 0)},
                 "expected x unchanged until the end of the call, as the op that writes reads it");
}

TEST(InPlace, ATensorIsAddedToItselfOrReadBefore) {
  const at::Tensor before = leaf({4}), x = before * 1;
  call({kAddInPlace}, {x, x})[0].sum().backward();
  EXPECT_TRUE(same(x.detach(), before.detach() * 2));
  EXPECT_TRUE(same(before.grad(), before.detach() * 0 + 2));
  const at::Tensor other = leaf({4}, at::kFloat, 2), extra = other * 1;
  call({"add_extra_input", kAddInPlace}, {before, extra, extra})[0].sum().backward();
  EXPECT_TRUE(same(other.grad(), before.detach() * 0 + 2));
}

TEST(InPlace, PartsThatLieBetweenEachOtherAreApart) {
  const at::Tensor before = leaf({3, 4}), whole = before * 1, x = leaf({3, 2}, at::kFloat, 2);
  const Outputs outputs =
      call({kAddInPlace, "add_extra_input"}, {x, whole.narrow(1, 0, 2), whole.narrow(1, 2, 2)});
  EXPECT_TRUE(
      same(outputs[0].detach(), (before.narrow(1, 0, 2) + x + before.narrow(1, 2, 2)).detach()));
  outputs[0].sum().backward();
  EXPECT_TRUE(same(before.grad(), before.detach() * 0 + 1));
}

TEST(InPlace, ThatNeedsTheDispatcherIsRefused) {
  const at::Tensor x = random({4}), extra = at::_neg_view(random({4})), before = extra.clone();
  expect_refused({kAddInPlace}, {x, extra},
                 "pipeline: expected a plain call, which writes the sum of in_place=True into the "
                 "caller's tensor, got one through torch.ops.tandem.pipeline, which writes no "
                 "argument: under a mode or a torch.func transform, or with a tensor subclass, a "
                 "tangent or a parametrized weight. Use in_place=False.");
  EXPECT_NO_THROW(call({"add_extra_input"}, {x, extra}));
  EXPECT_TRUE(call({kAddInPlace}, {x.to(at::kMeta), extra.to(at::kMeta)})[0].is_meta());
}

TEST(InPlace, OnAChannelIsAPermissionThatNobodyNeeds) {
  const Ops ops = {to_channel(), "gelu",
                   R"(add_extra_input {"extra_inputs": [{"channel": "r"}], "in_place": true})"};
  const at::Tensor x = random({2, 4}), before = x.clone();
  call(ops, {x});
  EXPECT_TRUE(same(x, before));
  EXPECT_TRUE(gradients_match(function_of(ops), {leaf({2, 4}, at::kDouble)}));
}

TEST(InPlace, ThroughTheDispatcherNothingIsWritten) {
  const at::Tensor x = random({2, 4}), extra = random({2, 4}, at::kFloat, 2),
                   before = extra.clone();
  const RunResult result = run({kAddInPlace}, {x, extra}, {}, "{}", Path::dispatch);
  EXPECT_TRUE(same(extra, before));
  EXPECT_TRUE(same(result.outputs[0], x + before));
}

void multiply(Call& call) { call.out(0, call.in(0) * call.in(1)); }
void multiply_in_place(Call& call) {
  call.in(1).mul_(call.in(0));
  call.out(0, call.in(1));
}

/// y = x * extra, whose backward reads what `in_place` overwrites.
const OpDef kMultiply{
    .name = "test_multiply",
    .formula = "y = x extra",
    .inputs = {"x", "extra"},
    .dtype = DtypeRule::promote,
    .forward = {{.name = "forward", .reads = {"x", "extra"}, .writes = {"y"}, .run = multiply}},
    .backward =
        {{.name = "grad_x", .reads = {"grad_y", "extra"}, .writes = {"grad_x"}, .run = multiply},
         {.name = "grad_extra",
          .reads = {"grad_y", "x"},
          .writes = {"grad_extra"},
          .run = multiply}},
    .in_place = StepDef{.name = "in_place",
                        .reads = {"x", "extra"},
                        .writes = {"y"},
                        .mutates = {"extra"},
                        .run = multiply_in_place},
};
TANDEM_REGISTER_OP(kMultiply);

TEST(InPlace, OfAnOperandThatBackwardReadsIsRefusedByThePlan) {
  EXPECT_ERROR(Planned({R"(test_multiply {"in_place": true})"}, {leaf({2}), random({2})}, {}),
               c10::ValueError,
               "test_multiply.in_place: expected an argument that backward does not read",
               ": expected an argument that backward does not read, got extra 0",
               ", whose old value another op needs. Use in_place=False.");
  EXPECT_NO_THROW(
      Planned({R"(test_multiply {"in_place": true})"}, {random({2}), leaf({2}) * 1}, {}));
  EXPECT_TRUE(gradients_match(function_of({"test_multiply"}, 2),
                              {leaf({3}, at::kDouble), leaf({3}, at::kDouble, 2)}));
}

}  // namespace
}  // namespace tandem::testing::autograd_in_place
