// Sums of columns by parts of the rows: the bits of all rows at once, on every target.
#include "kernels/partial_sums.h"

#include <gtest/gtest.h>

#include "kernels/activation.h"
#include "kernels/elementwise.h"
#include "kernels/norm.h"
#include "support/matrix.h"
#include "support/targets.h"

namespace tandem::testing::kernels_partial_sums {
namespace {

using kernels::ConstRows;
using kernels::Element;
using kernels::PartialSums;
using kernels::Rows;

TEST(SumsByPartsBlocks, FitThoseOfQuantizers) {
  for (size_t rows = 0; rows < 20000; ++rows) {
    const size_t block = kernels::sum_block_rows(rows);
    ASSERT_TRUE(block % 32 == 0 && (block % 128 == 0 || 128 % block == 0)) << rows;
    ASSERT_LE(kernels::sum_blocks(rows), 32u) << rows;
    ASSERT_GE(kernels::sum_blocks(rows) * block, rows);
  }
}
static_assert(kernels::sum_block_rows(4096) == 128 && kernels::sum_block_rows(4097) == 256);

/// Some rows of a matrix.
template <typename View>
View part_of(View whole, size_t first, size_t count) {
  using Byte = std::conditional_t<std::is_same_v<View, Rows>, uint8_t, const uint8_t>;
  whole.data =
      static_cast<Byte*>(whole.data) + first * whole.stride * bytes_per_element(whole.element);
  whole.rows = count;
  return whole;
}

/// Calls `body(first, count)` for parts of a matrix, those of a block of sums in order, the blocks
/// from the last to the first.
template <typename Body>
void for_each_part(size_t rows, const Body& body) {
  const size_t height = kernels::sum_block_rows(rows);
  for (size_t block = (rows + height - 1) / height; block-- > 0;) {
    const size_t end = std::min(rows, (block + 1) * height);
    for (size_t first = block * height; first < end; first += 7)
      body(first, std::min<size_t>(7, end - first));
  }
}

class SumsByParts : public OnEachTarget {
 protected:
  /// `whole(sums)` gives the sums of all rows at once, `part(first, count, sums)` adds some.
  template <typename Whole, typename Part>
  void expect_same_bits(size_t rows, size_t cols, const Whole& whole, const Part& part) {
    for (const Element element : {Element::float32, Element::bfloat16}) {
      Matrix expected(element, 1, cols), got(element, 1, cols);
      whole(expected.vector());
      std::vector<float> memory(kernels::sum_blocks(rows) * cols, 123.0f);
      const PartialSums sums{memory.data(), cols, kernels::sum_block_rows(rows)};
      for_each_part(rows,
                    [&](size_t first, size_t count) { part(first, count, sums.from_row(first)); });
      kernels::cpu::add_partial_sums(sums, rows, got.vector());
      EXPECT_EQ(got.bits(), expected.bits()) << rows << "x" << cols << " " << name_of(element);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Cpu, SumsByParts, ::testing::ValuesIn(all_targets()), SumsByParts::name);

TEST_P(SumsByParts, OfAMatrix) {
  for (const size_t rows : {0, 1, 31, 33, 1025, 3001, 9000})
    for (const Element element : kElements) {
      const Matrix x = Matrix::random(element, rows, 19, 2, 9);
      expect_same_bits(
          rows, 19, [&](kernels::Vector sums) { kernels::cpu::sum_rows(x.view(), sums); },
          [&](size_t first, size_t count, const PartialSums& sums) {
            kernels::cpu::sum_some_rows(part_of(x.view(), first, count), sums);
          });
    }
}

TEST_P(SumsByParts, OfGradients) {
  for (const bool is_gated : {false, true})
    for (const size_t rows : {1, 33, 1100})
      for (const Element element : kElements)
        for (const bool wants_y : {false, true}) {
          constexpr size_t kCols = 37;
          const kernels::Function function(kernels::Activation::gelu, is_gated);
          const Matrix grad_y = Matrix::random(element, rows, kCols, 0, 4),
                       z = Matrix::random(Element::bfloat16, rows, kCols * (is_gated ? 2 : 1), 3,
                                          5);
          Matrix grad_z(z.element(), rows, z.cols()), y(element, rows, kCols),
              other_grad_z = grad_z, other_y = y;
          const auto wanted = [&](Matrix& to) { return wants_y ? to.view() : Rows(); };
          expect_same_bits(
              rows, z.cols(),
              [&](kernels::Vector sums) {
                kernels::cpu::activation_backward(function, std::as_const(grad_y).view(),
                                                  std::as_const(z).view(), grad_z.view(), sums,
                                                  wanted(y));
              },
              [&](size_t first, size_t count, const PartialSums& sums) {
                Rows of_y = wanted(other_y);
                if (of_y) of_y = part_of(of_y, first, count);
                kernels::cpu::some_rows_backward(
                    function, part_of(grad_y.view(), first, count), part_of(z.view(), first, count),
                    part_of(other_grad_z.view(), first, count), sums, of_y);
              });
          EXPECT_EQ(other_grad_z.bits(), grad_z.bits());
          EXPECT_EQ(other_y.bits(), y.bits());
        }
}

TEST_P(SumsByParts, OfGradientsOfDropout) {
  for (const size_t rows : {1, 33, 1100})
    for (const Element element : kElements) {
      const Matrix grad_y = Matrix::random(element, rows, 37, 3, 4);
      Matrix grad_x(element, rows, 37), by_parts = grad_x, without_sums = grad_x;
      expect_same_bits(
          rows, 37,
          [&](kernels::Vector sums) {
            kernels::cpu::dropout_backward_bias(grad_y.view(), 7, 0.3, grad_x.view(), sums);
          },
          [&](size_t first, size_t count, const PartialSums& sums) {
            const auto run = [&](Matrix& to, const PartialSums& part) {
              kernels::cpu::dropout_some_rows_backward(part_of(grad_y.view(), first, count), 7, 0.3,
                                                       part_of(to.view(), first, count), part);
            };
            run(by_parts, sums);
            run(without_sums, PartialSums().from_row(first));
          });
      EXPECT_EQ(by_parts.bits(), grad_x.bits());
      EXPECT_EQ(without_sums.bits(), grad_x.bits());
    }
}

/// The gradients of a norm, all rows at once and by parts.
struct GradientsOfNorm {
  GradientsOfNorm(Element element, size_t rows, size_t hidden)
      : grad_x(element, rows, hidden),
        y(element, rows, hidden),
        grad_weight(element, 1, hidden),
        grad_bias(element, 1, hidden) {}
  Matrix grad_x, y, grad_weight, grad_bias;
};

TEST_P(SumsByParts, OfGradientsOfNorms) {
  constexpr size_t kHidden = 37;
  for (const bool centered : {false, true})
    for (const size_t rows : {1, 33, 1100})
      for (const Element element : kElements) {
        const Matrix grad_y = Matrix::random(element, rows, kHidden, 0, 4),
                     x = Matrix::random(Element::bfloat16, rows, kHidden, 3, 5),
                     residual = Matrix::random(Element::bfloat16, rows, kHidden, 0, 6),
                     weight = Matrix::random(element, 1, kHidden, 0, 7),
                     bias = Matrix::random(element, 1, kHidden, 0, 8);
        std::vector<float> mean(rows), inv_norm(rows);
        Matrix forward(element, rows, kHidden);
        const kernels::cpu::NormOptions options{1e-5, true};
        GradientsOfNorm expected(element, rows, kHidden), got = expected;
        float* const means = centered ? mean.data() : nullptr;
        const kernels::Vector of_bias = centered ? expected.grad_bias.vector() : kernels::Vector();
        kernels::cpu::norm_forward({.x = x.view(),
                                    .weight = weight.parameter(),
                                    .bias = bias.parameter(),
                                    .options = options,
                                    .y = forward.view(),
                                    .mean = means,
                                    .inv_norm = inv_norm.data()});
        kernels::cpu::norm_backward(
            {grad_y.view(), x.view(), weight.parameter(), bias.parameter(), means, inv_norm.data(),
             options, residual.view(), expected.grad_x.view(), expected.y.view()},
            expected.grad_weight.vector(), of_bias);
        const size_t cols = kernels::cpu::norm_sum_cols(kHidden, centered);
        std::vector<float> memory(kernels::sum_blocks(rows) * cols, 123.0f);
        const PartialSums sums{memory.data(), cols, kernels::sum_block_rows(rows)};
        for_each_part(rows, [&](size_t first, size_t count) {
          kernels::cpu::some_rows_norm_backward(
              {part_of(grad_y.view(), first, count), part_of(x.view(), first, count),
               weight.parameter(), bias.parameter(), centered ? mean.data() + first : nullptr,
               inv_norm.data() + first, options, part_of(residual.view(), first, count),
               part_of(got.grad_x.view(), first, count), part_of(got.y.view(), first, count)},
              sums.from_row(first));
        });
        kernels::cpu::add_norm_sums(sums, rows, got.grad_weight.vector(),
                                    centered ? got.grad_bias.vector() : kernels::Vector());
        EXPECT_EQ(got.grad_x.bits(), expected.grad_x.bits()) << name_of(element) << rows;
        EXPECT_EQ(got.y.bits(), expected.y.bits()) << name_of(element) << rows;
        EXPECT_EQ(got.grad_weight.bits(), expected.grad_weight.bits()) << rows;
        EXPECT_EQ(got.grad_bias.bits(), expected.grad_bias.bits()) << rows;
      }
}

}  // namespace
}  // namespace tandem::testing::kernels_partial_sums
