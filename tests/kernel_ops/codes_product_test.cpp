// The product of codes as a kernel op: eager and compiled code call the same.
#include "kernel_ops/codes_product.h"

#include <ATen/ops/empty.h>

#include "kernel_ops/quantize.h"
#include "support/kernel_ops.h"
#include "support/quantizers.h"
#include "support/throws.h"

namespace tandem::testing {
namespace {

using namespace kernel_ops;
using at::Tensor;

/// Codes and what comes with them, of one direction.
struct Part {
  Part(const Tensor& x, const Quantizer& how, Direction direction)
      : column(direction == Direction::column && !serves_both_directions(how)) {
    const Group group =
        dispatch<Quantize>(x, given_for(how), how, std::array{!column, column, false});
    const Direction written = column ? Direction::column : Direction::row;
    codes = group[part_of(written, 0)];
    scale = group[part_of(written, 1)];
    if (how.format->layout.has_amax) amax = group[part_of(written, 2)];
  }
  CodedMatrix matrix(const Quantizer& how) const {
    return {codes, &how, column ? Direction::column : Direction::row, scale,
            amax.value_or(Tensor())};
  }
  bool column;
  Tensor codes, scale;
  std::optional<Tensor> amax;
};

class MultiplyCodesOp : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Formats, MultiplyCodesOp, ::testing::ValuesIn(quantizer_texts()),
                         [](const auto& info) { return word_of(info.param); });

TEST_P(MultiplyCodesOp, HasTheBitsOfTheDirectCall) {
  const Quantizer& how = quantizer(GetParam());
  const Tensor x = random({3, 7, 40}), w = random({24, 40}, at::kFloat, 2),
               g = random({3, 7, 24}, at::kFloat, 3);
  const struct {
    Part a;
    bool a_transposed;
    Part b;
    bool b_transposed;
    int64_t rows, cols;
  } cases[] = {
      {{x, how, Direction::row}, false, {w, how, Direction::row}, true, 21, 24},
      {{g, how, Direction::row}, false, {w, how, Direction::column}, false, 21, 40},
      {{g, how, Direction::column}, true, {x, how, Direction::column}, false, 24, 40},
  };
  for (const auto& c : cases)
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      const Tensor expected = at::empty({c.rows, c.cols}, dtype);
      multiply_codes(c.a.matrix(how), c.a_transposed, c.b.matrix(how), c.b_transposed,
                     Rows::of_the_result, expected);
      const auto call = [&](auto&& product) {
        return product(c.a.codes, c.a.scale, c.a.amax, how, c.a.column, c.a_transposed, c.b.codes,
                       c.b.scale, c.b.amax, how, c.b.column, c.b_transposed, dtype)[0];
      };
      EXPECT_TRUE(same(call([](const auto&... args) { return dispatch<MultiplyCodes>(args...); }),
                       expected));
      const at::ScalarType summed = dtype == at::kDouble ? at::kFloat : dtype;
      EXPECT_TRUE(near(call(MultiplyCodes::reference).to(summed), expected.to(summed),
                       /*magnitude=*/40));
    }
}

TEST(MultiplyCodesErrors, MatricesThatDoNotFit) {
  const Quantizer& how = quantizer("fp8_e4m3");
  const Part a(random({3, 5}), how, Direction::row), b(random({5, 4}), how, Direction::row);
  EXPECT_THAT(
      [&] {
        dispatch<MultiplyCodes>(a.codes, a.scale, a.amax, how, false, false, b.codes, b.scale,
                                b.amax, how, false, true, at::kFloat);
      },
      ThrowsText<c10::ValueError>("multiply_codes: expected matrices [m, k] and [k, n], got [3, 5] "
                                  "and [4, 5]. Transpose one of them."));
}

}  // namespace
}  // namespace tandem::testing
