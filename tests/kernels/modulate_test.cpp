#include "kernels/modulate.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/matrix.h"
#include "tests/support/targets.h"

namespace tandem::testing::kernels_modulate {
namespace {

using kernels::Element;

class Modulate : public OnEachTarget {};
INSTANTIATE_TEST_SUITE_P(All, Modulate, ::testing::ValuesIn(all_targets()), Modulate::name);

struct Size {
  size_t groups, height, cols;
};

double ulp_of(Element element) {
  return element == Element::float32 ? 0x1p-24 : element == Element::bfloat16 ? 0x1p-8 : 0x1p-11;
}

constexpr Size kSizes[] = {{1, 1, 1}, {3, 2, 17}, {2, 70, 130}, {5, 1, 300}, {1, 300, 65}};

TEST_P(Modulate, IsTheFormula) {
  for (const Element element : kElements)
    for (const Element of_scale : {element, Element::float32})
      for (const auto& [groups, height, cols] : kSizes)
        for (const bool has_shift : {true, false})
          for (const bool in_place : {false, true}) {
            SCOPED_TRACE(::testing::Message()
                         << name_of(element) << ", " << groups << " groups of " << height << " by "
                         << cols << (has_shift ? ", shift" : "") << (in_place ? ", in place" : ""));
            const size_t rows = groups * height;
            const Matrix x = Matrix::random(element, rows, cols, 3, 7),
                         scale = Matrix::random(of_scale, groups, cols, 1, 8),
                         shift = Matrix::random(of_scale, groups, cols, 2, 9);
            Matrix own = x, other(element, rows, cols, 1);
            Matrix& y = in_place ? own : other;
            kernels::cpu::modulate(own.view(), scale.view(), 1.0f,
                                   has_shift ? shift.view() : kernels::ConstRows{}, y.view());
            EXPECT_TRUE(y.gaps_untouched());
            for (size_t r = 0; r < rows; ++r)
              for (size_t c = 0; c < cols; ++c) {
                const size_t at = r * cols + c, of_group = r / height * cols + c;
                const double product = x.at(at) * (1 + scale.at(of_group)),
                             added = has_shift ? shift.at(of_group) : 0, want = product + added;
                ASSERT_NEAR(y.at(at), want,
                            0x1p-22 * (std::abs(product) + std::abs(added)) +
                                ulp_of(element) * std::abs(want) + 0x1p-25)
                    << "row " << r << ", column " << c;
              }
          }
}

TEST_P(Modulate, KeepsTheSignOfZeroWithoutAShift) {
  for (const Element element : kElements) {
    Matrix x(element, 1, 3, 1), scale(element, 1, 3, 1), y(element, 1, 3, 1);
    for (size_t c = 0; c < 3; ++c) {
      x.set(c, -0.0f);
      scale.set(c, 1.0f);
    }
    kernels::cpu::modulate(x.view(), scale.view(), 0.0f, {}, y.view());
    for (size_t c = 0; c < 3; ++c) EXPECT_TRUE(std::signbit(y.at(c))) << name_of(element);
  }
}

TEST_P(Modulate, SumsAreTheFormula) {
  for (const Element element : kElements)
    for (const auto& [groups, height, cols] : kSizes) {
      SCOPED_TRACE(::testing::Message() << name_of(element) << ", " << groups << " groups of "
                                        << height << " by " << cols);
      const size_t rows = groups * height;
      const Matrix x = Matrix::random(element, rows, cols, 3, 7),
                   grad = Matrix::random(element, rows, cols, 1, 8);
      Matrix sums(element, groups, cols, 2);
      kernels::cpu::modulate_sums(grad.view(), x.view(), sums.view());
      EXPECT_TRUE(sums.gaps_untouched());
      for (size_t g = 0; g < groups; ++g)
        for (size_t c = 0; c < cols; ++c) {
          double sum = 0, magnitude = 0;
          for (size_t r = g * height; r < (g + 1) * height; ++r) {
            const double product = grad.at(r * cols + c) * x.at(r * cols + c);
            sum += product;
            magnitude += std::abs(product);
          }
          const double bound = 0x1p-24 * (static_cast<double>(height) / 64 + 66);
          ASSERT_NEAR(sums.at(g * cols + c), sum,
                      bound * magnitude + ulp_of(element) * std::abs(sum) + 0x1p-25);
        }
    }
}

}  // namespace
}  // namespace tandem::testing::kernels_modulate
