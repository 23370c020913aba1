// What follows from the struct of a kernel op: its schema, calls through the dispatcher, and codes
// by a row that makes none.
#include <ATen/TensorOperators.h>
#include <gmock/gmock.h>

#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"
#include "support/codes.h"
#include "support/throws.h"

namespace tandem::testing::kernel_ops_framework {
namespace {

using namespace kernel_ops;

/// twice = 2 x; thrice = 3 x.
struct Multiples {
  static constexpr const char* kName = "test_multiples";
  enum Result : size_t { twice, thrice };
  static constexpr std::array kResults{"twice", "thrice"};
  struct Args {
    const Tensor& x;
    std::optional<Tensor> unread = {};
    at::ScalarType dtype = at::kFloat;
    std::array<bool, 2> output_mask{true, true};
    CodesOf<thrice> codes = {};
    CodesOf<kFirstOperand> x_codes = {};
    TANDEM_ARGUMENTS(x, unread, dtype, output_mask, codes, x_codes)
  };
  static Specs<2> shapes(const Args& args) {
    return {like(args.x, args.x.scalar_type(), args.output_mask[twice]),
            like(args.x, args.x.scalar_type(), args.output_mask[thrice])};
  }
  /// Knows nothing of codes.
  static void cpu(const Args& args, std::span<Tensor> results) {
    if (results[twice].defined()) results[twice].copy_(args.x * 2);
    if (results[thrice].defined()) results[thrice].copy_(args.x * 3);
  }
  static Results<2> reference(const Args& args) { return {args.x * 2, args.x * 3}; }
};

/// Adds 1 to a tensor in place.
struct Increment {
  static constexpr const char* kName = "test_increment_";
  static constexpr bool kIsUnseenByAutograd = true;
  static constexpr std::array<const char*, 0> kResults{};
  struct Args {
    Tensor& counter;
    const Tensor& like;
    TANDEM_ARGUMENTS(counter, like)
  };
  static Specs<0> shapes(const Args&) { return {}; }
  static Results<0> reference(const Args& args) {
    args.counter.add_(1);
    return {};
  }
};

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<Multiples>(
      library, {{"cpu", at::kCPU,
                 [](const Multiples::Args& args) { return args.x.scalar_type() == at::kFloat; },
                 Multiples::cpu}});
  register_kernel_op<Increment>(library, {});
}

TEST(KernelOp, TheSchemaFollowsFromTheArguments) {
  const auto schema_of = [](const char* name, const char* overload = "") {
    return c10::str(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).schema());
  };
  EXPECT_EQ(schema_of("tandem::test_multiples"),
            "tandem::test_multiples(Tensor x, Tensor? unread, ScalarType dtype, bool[2] "
            "output_mask) -> (Tensor twice, Tensor thrice)");
  EXPECT_EQ(schema_of("tandem::test_multiples", "codes"),
            "tandem::test_multiples.codes(Tensor x, Tensor? unread, ScalarType dtype, bool[2] "
            "output_mask, str? codes_quantizer, Tensor? codes_given, bool[3] codes_wanted, str? "
            "x_codes_quantizer, Tensor? x_codes_given, bool[3] x_codes_wanted) -> (Tensor twice, "
            "Tensor thrice, Tensor row_codes, Tensor row_scale, Tensor row_amax, Tensor "
            "column_codes, Tensor column_scale, Tensor column_amax, Tensor amax, Tensor "
            "x_row_codes, Tensor x_row_scale, Tensor x_row_amax, Tensor x_column_codes, Tensor "
            "x_column_scale, Tensor x_column_amax, Tensor x_amax)");
  EXPECT_EQ(schema_of("tandem::test_increment_"),
            "tandem::test_increment_(Tensor(a!) counter, Tensor like) -> ()");
}

TEST(KernelOp, CodesOfARowThatMakesNoneAreMadeBehindIt) {
  const Tensor x = random({4, 32});
  for (const auto dtype : {at::kFloat, at::kDouble})  // by the row, and in composite form
    for (const bool with_thrice : {true, false}) {
      const Tensor own = x.to(dtype);
      Multiples::Args args{
          .x = own,
          .output_mask = {true, with_thrice},
          .codes = requested(&quantizer("mxfp8_e4m3"), {true, true, false}),
          .x_codes = requested(&quantizer("fp8_e5m2"), {true, false, true}),
      };
      EXPECT_EQ(choose<Multiples>(args).listed != nullptr, dtype == at::kFloat);
      const auto got = dispatch<Multiples>(args);
      const Tensor thrice = own * 3;
      EXPECT_TRUE(same(got[Multiples::twice], own * 2));
      EXPECT_TRUE(same(got[Multiples::thrice], with_thrice ? thrice : own.new_empty({0})));
      expect_codes<Multiples>(got, 0, thrice, args.codes);
      expect_codes<Multiples>(got, 1, own, args.x_codes);
    }
}

TEST(KernelOp, NothingIsThereOfCodesThatNobodyAsksFor) {
  const Tensor x = random({2, 3});
  const auto got = dispatch<Multiples>({.x = x});
  EXPECT_TRUE(same(got[Multiples::thrice], x * 3));
  expect_codes<Multiples>(got, 0, x, {});
  expect_codes<Multiples>(got, 1, x, {});
}

TEST(KernelOp, CodesThatNoQuantizerMakesAreRefused) {
  const Tensor x = random({2, 3});
  EXPECT_ERROR(
      dispatch<Multiples>({.x = x, .codes = RequestedCodes{nullptr, {}, {true, false, false}}}),
      c10::ValueError,
      "test_multiples: expected a quantizer for what is given and wanted of codes, got none. Name "
      "one, or ask for no codes.");
}

TEST(KernelOp, AnOpMayWriteItsArguments) {
  Tensor counter = at::zeros({1});
  dispatch<Increment>({.counter = counter, .like = counter});
  EXPECT_EQ(counter.item<double>(), 1);
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_framework
