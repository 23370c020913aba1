// Fusions of sums before norms, and of the gradients of norms and dropout, with the quantizer
// behind: that they are made, with the bits of the unfused steps, and why not.
#include <gmock/gmock.h>

#include "support/plans.h"

namespace tandem::testing::fusions_norm_quantize {
namespace {

using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

const char* const kRecipes[] = {"Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling",
                                "NVFP4BlockScaling"};
const std::string kMx = R"({"training": true, "recipe": {"name": "MXFP8BlockScaling"}})";
const std::string kDropout = R"(dropout {"options": {"p": 0.25}})";

void expect_the_same_bits(const Ops& ops, const Tensors& inputs, const Tensors& params) {
  for (const std::string recipe : kRecipes)
    EXPECT_TRUE(has_bits_without("quantize", ops, inputs, params,
                                 R"({"training": true, "recipe": {"name": ")" + recipe + R"("}})"));
}

/// linear (-> bias) -> norm -> linear, the norm at the head of a residual branch or not.
struct Shape {
  const char* norm;
  bool add, bias;
};
std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  return out << shape.norm << (shape.add ? "_add" : "") << (shape.bias ? "_bias" : "");
}

class NormBackwardQuantize : public ::testing::TestWithParam<Shape> {
 protected:
  static std::string fusion() {
    const auto [norm, add, bias] = GetParam();
    return std::string(norm) + "_backward" + (add ? "_add" : "") + (bias ? "_bias" : "") +
           "_quantize_quantize_y";  // that of the gradient, and that of y
  }
  static Ops ops() {
    const auto [norm, add, bias] = GetParam();
    Ops list{"basic_linear"};
    if (bias) list.emplace_back("bias");
    if (add) list.push_back(to_channel());
    list.emplace_back(norm);
    list.emplace_back("basic_linear");
    if (add) list.push_back(from_channel());
    return list;
  }
  static Tensors params(at::ScalarType dtype = at::kFloat,
                        at::ScalarType of_norm = at::ScalarType::Undefined) {
    if (of_norm == at::ScalarType::Undefined) of_norm = dtype;
    Tensors list{leaf({64, 32}, dtype, 2)};
    if (GetParam().bias) list.push_back(leaf({64}, dtype, 3));
    list.push_back(leaf({64}, of_norm, 4));
    if (std::string_view(GetParam().norm) == "layer_norm") list.push_back(leaf({64}, of_norm, 5));
    list.push_back(leaf({64, 64}, dtype, 6));
    return list;
  }
};
INSTANTIATE_TEST_SUITE_P(
    Shapes, NormBackwardQuantize,
    ::testing::Values(Shape{"rms_norm", false, false}, Shape{"rms_norm", false, true},
                      Shape{"rms_norm", true, false}, Shape{"rms_norm", true, true},
                      Shape{"layer_norm", false, false}, Shape{"layer_norm", false, true},
                      Shape{"layer_norm", true, false}, Shape{"layer_norm", true, true}),
    ::testing::PrintToStringParamName());

TEST_P(NormBackwardQuantize, Fires) {
  const Planned planned(ops(), {leaf({32, 32})}, params(), kMx);
  EXPECT_THAT(planned.backward(), HasSubstr(fusion() + ": grad of "));
  for (const char* gradient : {"0.basic_linear", "1.bias"})
    EXPECT_THAT(planned.backward(), Not(HasSubstr(std::string("\nquantize: grad of ") + gradient)));
  EXPECT_THAT(planned.backward(), Not(ContainsRegex("\nquantize: [0-9]"))) << "y";
  EXPECT_THAT(planned.decisions(),
              Contains(::testing::AllOf(::testing::StartsWith(fusion() + " at "),
                                        ::testing::EndsWith(" + quantize + quantize: made"))));
}

TEST_P(NormBackwardQuantize, EqualsBitwise) {
  for (const auto dtype : kKernelDtypes)
    for (const int64_t rows : {0, 1, 33, 96})
      expect_the_same_bits(ops(), {leaf({rows, 32}, dtype)}, params(dtype));
}

TEST_P(NormBackwardQuantize, EqualsBitwiseOfManyRows) {
  expect_the_same_bits(ops(), {leaf({1120, 32}, at::kBFloat16)}, params(at::kBFloat16));
}

TEST_P(NormBackwardQuantize, OfANormInFloat32) {
  const Tensors inputs{leaf({40, 32}, at::kBFloat16)};
  // Behind a norm in float32 comes a weight of float32.
  Tensors all = params(at::kBFloat16, at::kFloat);
  all.back() = leaf({64, 64}, at::kFloat, 6);
  expect_the_same_bits(ops(), inputs, all);
}

TEST_P(NormBackwardQuantize, KeepsWhatTheUnfusedStepsKeep) {
  EXPECT_TRUE(fused_equals_unfused(ops(), {leaf({32, 32})}, params(), kMx));
}

TEST_P(NormBackwardQuantize, WithFrozenParameters) {
  Tensors all = params();
  for (size_t i = 1; i + 1 < all.size(); ++i) all[i] = all[i].detach();
  const Planned planned(ops(), {leaf({32, 32})}, all, kMx);
  EXPECT_THAT(planned.backward(), HasSubstr("_quantize_quantize_y: grad of "));
  EXPECT_THAT(planned.backward(), Not(HasSubstr("bias_quantize")));
  expect_the_same_bits(ops(), {leaf({32, 32})}, all);
}

TEST(NormBackwardQuantizeOf, AResidualThatGoesOnWritesTheGradient) {
  // x + linear(norm(x)) where x is the sum of a product and the stream before it.
  const Ops ops = {to_channel("a"), "basic_linear", from_channel("a"), to_channel(),
                   "rms_norm",      "basic_linear", from_channel()};
  const auto params = [](at::ScalarType dtype) {
    return Tensors{leaf({32, 32}, dtype, 2), leaf({32}, dtype, 3), leaf({32, 32}, dtype, 4)};
  };
  EXPECT_THAT(Planned(ops, {leaf({40, 32})}, params(at::kFloat), kMx).backward(),
              ContainsRegex("rms_norm_backward_add_quantize_quantize_y: .* -> grad of [^ ]*, "));
  for (const auto dtype : kKernelDtypes)
    EXPECT_TRUE(has_bits_without("quantize", ops, {leaf({40, 32}, dtype)}, params(dtype), kMx));
}

TEST(NormBackwardQuantizeOf, TheSameGradientTwiceIsRefused) {
  const Ops ops = {"basic_linear", to_channel(), from_channel(), "rms_norm", "basic_linear"};
  const Tensors params{leaf({32, 32}, at::kFloat, 2), leaf({32}, at::kFloat, 3),
                       leaf({32, 32}, at::kFloat, 4)};
  EXPECT_THAT(Planned(ops, {leaf({40, 32})}, params, kMx).decisions(),
              Contains("rms_norm_backward_add_quantize at 3.rms_norm.backward + add + quantize: "
                       "the sum has no other term"));
  expect_the_same_bits(ops, {leaf({40, 32})}, params);
}

/// norm -> linear, and nothing that multiplies before it: y alone goes to codes.
class NormBackwardQuantizeY : public ::testing::TestWithParam<Shape> {
 protected:
  static std::string fusion() {
    return std::string(GetParam().norm) + "_backward" + (GetParam().add ? "_add" : "") +
           "_quantize_y";
  }
  static Ops ops() {
    Ops list{GetParam().norm, "basic_linear"};
    if (GetParam().add) {
      list.insert(list.begin(), to_channel());
      list.push_back(from_channel());
    }
    return list;
  }
  static Tensors params(at::ScalarType dtype = at::kFloat) {
    Tensors list{leaf({64}, dtype, 4), leaf({64}, dtype, 5), leaf({64, 64}, dtype, 6)};
    if (std::string_view(GetParam().norm) == "rms_norm") list.erase(list.begin() + 1);
    return list;
  }
};
INSTANTIATE_TEST_SUITE_P(Shapes, NormBackwardQuantizeY,
                         ::testing::Values(Shape{"rms_norm", false, false},
                                           Shape{"rms_norm", true, false},
                                           Shape{"layer_norm", false, false},
                                           Shape{"layer_norm", true, false}),
                         ::testing::PrintToStringParamName());

TEST_P(NormBackwardQuantizeY, FiresAndEqualsBitwise) {
  const Planned planned(ops(), {leaf({32, 64})}, params(), kMx);
  EXPECT_THAT(planned.backward(), HasSubstr(fusion() + ": grad of "));
  EXPECT_THAT(planned.backward(), Not(ContainsRegex("\nquantize: [0-9]")));
  EXPECT_THAT(planned.decisions(),
              Contains(::testing::AllOf(::testing::StartsWith(fusion() + " at "),
                                        ::testing::EndsWith(" + quantize: made"))));
  for (const auto dtype : kKernelDtypes)
    for (const int64_t rows : {0, 1, 33, 1120})
      expect_the_same_bits(ops(), {leaf({rows, 64}, dtype)}, params(dtype));
  EXPECT_TRUE(fused_equals_unfused(ops(), {leaf({32, 64})}, params(), kMx));
}

TEST_P(NormBackwardQuantizeY, NotWhereTheWeightBehindIsFrozen) {
  Tensors all = params();
  all.back() = all.back().detach();
  EXPECT_THAT(Planned(ops(), {leaf({32, 64})}, all, kMx).backward(), Not(HasSubstr("_quantize_y")));
  expect_the_same_bits(ops(), {leaf({32, 64})}, all);
}

TEST(NormBackwardQuantizeOf, AnotherGradientOfAnotherDtypeLeavesYToBeQuantized) {
  // The stream in bfloat16 beside a norm in float32: the sum would round before the codes.
  const Ops ops = {"basic_linear", to_channel(), "rms_norm", "basic_linear", from_channel()};
  const Tensors x{leaf({40, 32}, at::kBFloat16)},
      params{leaf({32, 32}, at::kBFloat16, 2), leaf({32}, at::kFloat, 3),
             leaf({32, 32}, at::kFloat, 4)};
  EXPECT_THAT(Planned(ops, x, params, kMx).backward(), HasSubstr("_quantize_y: grad of "));
  expect_the_same_bits(ops, x, params);
}

TEST(NormBackwardQuantizeOf, WhatIsSkippedIsMadeWithLess) {
  const Ops ops = {"basic_linear", "rms_norm", "basic_linear"};
  const Tensors x{leaf({32, 32})}, params{leaf({32, 32}, at::kFloat, 2), leaf({32}, at::kFloat, 3),
                                          leaf({32, 32}, at::kFloat, 4)};
  const auto backward_without = [&](const std::string& names) {
    return Planned(ops, x, params,
                   R"({"training": true, "recipe": {"name": "MXFP8BlockScaling"}, )"
                   R"("skipped_fusions": [)" +
                       names + "]}")
        .backward();
  };
  const std::string all = R"("rms_norm_backward_quantize_quantize_y")";
  EXPECT_THAT(backward_without(all), HasSubstr("rms_norm_backward_quantize: "));
  EXPECT_THAT(backward_without(all + R"(, "rms_norm_backward_quantize")"),
              HasSubstr("rms_norm_backward_quantize_y: "));
  EXPECT_THAT(backward_without(R"("rms_norm_backward")"), HasSubstr("rms_norm.backward: "));
}

class AddNormQuantize : public ::testing::TestWithParam<const char*> {
 protected:
  static std::string norm() { return GetParam(); }
  static std::string fusion() { return "add_" + norm() + "_quantize"; }
  static Tensors params(at::ScalarType dtype = at::kFloat) {
    Tensors list{leaf({40}, dtype, 2), leaf({40}, dtype, 3), leaf({24, 40}, dtype, 4)};
    if (norm() == "rms_norm") list.erase(list.begin() + 1);
    return list;
  }
};
INSTANTIATE_TEST_SUITE_P(Norms, AddNormQuantize, ::testing::Values("rms_norm", "layer_norm"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(AddNormQuantize, FiresAndEqualsBitwise) {
  const Ops ops = {"add_extra_input", "make_extra_output", norm(), "basic_linear"};
  const Tensors both{leaf({33, 40}), leaf({33, 40}, at::kFloat, 4)};
  const Planned planned(ops, both, params(), kMx);
  EXPECT_THAT(planned.forward(), HasSubstr(fusion() + ": x, extra 0, 2." + norm() + ".weight"));
  EXPECT_THAT(planned.forward(), Not(HasSubstr("\nquantize: 2.")));
  EXPECT_THAT(planned.decisions(),
              Contains(fusion() + " at 0.add_extra_input + 2." + norm() + " + quantize: made"));
  for (const auto dtype : kKernelDtypes)
    for (const int64_t rows : {0, 1, 33, 1120})
      expect_the_same_bits(ops, {leaf({rows, 40}, dtype), leaf({rows, 40}, dtype, 4)},
                           params(dtype));
  EXPECT_TRUE(fused_equals_unfused(ops, both, params(), kMx));
}

TEST_P(AddNormQuantize, OfTermsOfTwoDtypes) {
  const Ops ops = {"add_extra_input", norm(), "basic_linear"};
  expect_the_same_bits(ops, {leaf({33, 40}, at::kBFloat16), leaf({33, 40}, at::kFloat, 4)},
                       params());
}

TEST_P(AddNormQuantize, WritesYAndTheSumWhereTheyAreDemanded) {
  const Ops ops = {"add_extra_input", "make_extra_output", norm(), "make_extra_output",
                   "basic_linear"};
  expect_the_same_bits(ops, {leaf({33, 40}), leaf({33, 40}, at::kFloat, 4)}, params());
}

TEST_P(AddNormQuantize, WritesTheSumIntoTheCallersTensor) {
  const Ops ops = {kAddInPlace, norm(), "basic_linear"};
  const std::string unfused =
      R"({"training": true, "recipe": {"name": "MXFP8BlockScaling"}, "fuse": false})";
  for (const auto dtype : kKernelDtypes)
    for (const bool is_strided : {false, true}) {
      const at::Tensor x = random({7, 40}, dtype), residual = random({40, 7}, dtype, 4);
      const auto target = [&] {
        return is_strided ? residual.clone().t() : residual.t().contiguous();
      };
      const at::Tensor fused = target(), expected = target();
      EXPECT_THAT(Planned(ops, {x, fused}, params(dtype), kMx).forward(),
                  HasSubstr(fusion() + ": "));
      const RunResult got = run(ops, {x, fused}, params(dtype), kMx),
                      wanted = run(ops, {x, expected}, params(dtype), unfused);
      EXPECT_TRUE(same(fused, expected)) << dtype << is_strided;
      EXPECT_TRUE(same(got.outputs[0], wanted.outputs[0])) << dtype << is_strided;
    }
}

TEST_P(AddNormQuantize, RefusesATargetOfAnotherDtype) {
  const Ops ops = {kAddInPlace, norm(), "basic_linear"};
  const Tensors both{leaf({7, 40}, at::kBFloat16), random({7, 40}, at::kFloat, 4)};
  EXPECT_THAT(Planned(ops, both, params(), kMx).decisions(),
              Contains(fusion() + " at 0.add_extra_input.in_place + 1." + norm() +
                       " + quantize: the sum is written into a tensor of Float"));
}

TEST_P(AddNormQuantize, RefusesAnExtraInputThatNoKernelTakes) {
  const Ops ops = {"add_extra_input", norm(), "basic_linear"};
  const Tensors both{leaf({7, 40}), random({7, 40}, at::kFloat, 4).to(at::kLong)};
  EXPECT_THAT(Planned(ops, both, params(), kMx).decisions(),
              Contains(fusion() + " at 0.add_extra_input + 1." + norm() +
                       " + quantize: the extra input is Long, which no kernel takes"));
}

TEST(DropoutBackwardQuantize, FiresAndEqualsBitwise) {
  for (const bool bias : {false, true})
    for (const bool add : {false, true}) {
      Ops ops{"basic_linear"};
      if (bias) ops.emplace_back("bias");
      ops.push_back(kDropout);
      if (add) ops.emplace_back("add_extra_input");
      const auto tensors = [&](at::ScalarType dtype, int64_t rows) {
        Tensors list{leaf({rows, 32}, dtype)};
        if (add) list.push_back(leaf({rows, 40}, dtype, 4));
        return list;
      };
      const auto params = [&](at::ScalarType dtype) {
        Tensors list{leaf({40, 32}, dtype, 2)};
        if (bias) list.push_back(leaf({40}, dtype, 3));
        return list;
      };
      const std::string fusion =
          std::string("dropout_backward_") + (bias ? "bias_quantize" : "quantize");
      const Planned planned(ops, tensors(at::kFloat, 32), params(at::kFloat), kMx);
      EXPECT_THAT(planned.backward(), HasSubstr(fusion + ": grad of "));
      EXPECT_THAT(planned.decisions(),
                  Contains(::testing::AllOf(::testing::StartsWith(fusion + " at "),
                                            ::testing::EndsWith(" + quantize: made"))));
      for (const auto dtype : kKernelDtypes)
        for (const int64_t rows : {0, 1, 33, 1120})
          expect_the_same_bits(ops, tensors(dtype, rows), params(dtype));
      EXPECT_TRUE(fused_equals_unfused(ops, tensors(at::kFloat, 32), params(at::kFloat), kMx));
    }
}

}  // namespace
}  // namespace tandem::testing::fusions_norm_quantize
