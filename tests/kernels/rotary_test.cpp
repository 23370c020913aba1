#include "kernels/rotary.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/support/matrix.h"
#include "tests/support/targets.h"

namespace tandem::testing::kernels_rotary {
namespace {

using kernels::Element;

class Rotary : public OnEachTarget {};
INSTANTIATE_TEST_SUITE_P(All, Rotary, ::testing::ValuesIn(all_targets()), Rotary::name);

struct Size {
  size_t heads, rest, head_dim, features;
};

double ulp_of(Element element) {
  return element == Element::float32 ? 0 : element == Element::bfloat16 ? 0x1p-8 : 0x1p-11;
}

TEST_P(Rotary, Turns) {
  constexpr size_t kRows = 6, kPositions = 3;
  const Size kSizes[] = {{1, 0, 2, 2},     {3, 1, 8, 8},     {2, 2, 34, 34}, {2, 1, 64, 20},
                         {1, 1, 128, 128}, {1, 0, 600, 514}, {5, 1, 80, 80}};
  for (const Element element : kElements)
    for (const auto& [heads, rest, head_dim, features] : kSizes)
      for (const bool interleaved : {false, true})
        for (const bool inverse : {false, true})
          for (const bool in_place : {false, true}) {
            SCOPED_TRACE(::testing::Message()
                         << name_of(element) << ", " << heads << " heads of " << head_dim << ", "
                         << features << " turned" << (interleaved ? ", neighbours" : "")
                         << (inverse ? ", inverse" : "") << (in_place ? ", in place" : ""));
            const size_t cols = (heads + rest) * head_dim;
            const Matrix x = Matrix::random(element, kRows, cols, 3, 7);
            std::vector<float> cosines(kPositions * features), sines(kPositions * features);
            for (size_t i = 0; i < cosines.size(); ++i) {
              cosines[i] = std::cos(static_cast<float>(i));
              sines[i] = std::sin(static_cast<float>(i));
            }
            Matrix own = x, other(element, kRows, cols, 1);
            Matrix& y = in_place ? own : other;
            kernels::cpu::rotary({.x = own.view(),
                                  .cosines = cosines.data(),
                                  .sines = sines.data(),
                                  .positions = kPositions,
                                  .heads = heads,
                                  .head_dim = head_dim,
                                  .features = features,
                                  .interleaved = interleaved,
                                  .inverse = inverse,
                                  .y = y.view()});
            EXPECT_TRUE(y.gaps_untouched());
            for (size_t r = 0; r < kRows; ++r)
              for (size_t c = 0; c < cols; ++c) {
                const size_t i = c % head_dim, at = r * cols + c;
                double want = x.at(at), bound = 0;
                if (c < heads * head_dim && i < features) {
                  const bool is_first = interleaved ? i % 2 == 0 : i < features / 2;
                  const size_t apart = interleaved ? 1 : features / 2;
                  const size_t other = is_first ? i + apart : i - apart;
                  const size_t angles = r % kPositions * features;
                  const double partner = x.at(is_first ? at + apart : at - apart),
                               cosine = cosines[angles + i],
                               sine = inverse ? -sines[angles + other] : sines[angles + i];
                  bound = 0x1p-23 * (std::abs(want * cosine) + std::abs(partner * sine));
                  want = want * cosine + (is_first ? -partner : partner) * sine;
                  bound += ulp_of(element) * std::abs(want) + 0x1p-25;
                }
                ASSERT_NEAR(y.at(at), want, bound) << "row " << r << ", column " << c;
              }
          }
}

}  // namespace
}  // namespace tandem::testing::kernels_rotary
