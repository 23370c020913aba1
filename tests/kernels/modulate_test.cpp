#include "kernels/modulate.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/matrix.h"
#include "tests/support/targets.h"

namespace tandem::testing::kernels_modulate {
namespace {

using kernels::Element;

class Modulate : public ::testing::TestWithParam<int64_t> {
 protected:
  Modulate() : target_(GetParam()) {}
  ScopedTarget target_;
};

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

TEST_P(Modulate, SumsAreTheFormula) {
  for (const Element element : kElements)
    for (const auto& [groups, height, cols] : kSizes)
      for (const bool has_scale : {true, false})
        for (const bool has_shift : {true, false}) {
          SCOPED_TRACE(::testing::Message()
                       << name_of(element) << ", " << groups << " groups of " << height << " by "
                       << cols << (has_scale ? ", scale" : "") << (has_shift ? ", shift" : ""));
          const size_t rows = groups * height;
          const Matrix x = Matrix::random(element, rows, cols, 3, 7),
                       grad = Matrix::random(element, rows, cols, 1, 8);
          Matrix of_scale(element, groups, cols, 2), of_shift(element, groups, cols, 1);
          kernels::cpu::modulate_sums(grad.view(), has_scale ? x.view() : kernels::ConstRows{},
                                      has_scale ? of_scale.view() : kernels::Rows{},
                                      has_shift ? of_shift.view() : kernels::Rows{});
          EXPECT_TRUE(of_scale.gaps_untouched());
          EXPECT_TRUE(of_shift.gaps_untouched());
          for (size_t g = 0; g < groups; ++g)
            for (size_t c = 0; c < cols; ++c) {
              double scale = 0, shift = 0, scale_size = 0, shift_size = 0;
              for (size_t r = g * height; r < (g + 1) * height; ++r) {
                const double product = grad.at(r * cols + c) * x.at(r * cols + c);
                scale += product;
                scale_size += std::abs(product);
                shift += grad.at(r * cols + c);
                shift_size += std::abs(grad.at(r * cols + c));
              }
              const double bound = 0x1p-24 * (static_cast<double>(height) / 64 + 66);
              if (has_scale) {
                ASSERT_NEAR(of_scale.at(g * cols + c), scale,
                            bound * scale_size + ulp_of(element) * std::abs(scale) + 0x1p-25);
              }
              if (has_shift) {
                ASSERT_NEAR(of_shift.at(g * cols + c), shift,
                            bound * shift_size + ulp_of(element) * std::abs(shift) + 0x1p-25);
              }
            }
        }
}

INSTANTIATE_TEST_SUITE_P(All, Modulate, ::testing::ValuesIn(all_targets()),
                         [](const ::testing::TestParamInfo<int64_t>& info) {
                           return target_name(info.param);
                         });

}  // namespace
}  // namespace tandem::testing::kernels_modulate
