// Rotary position embedding.
#pragma once

#include "kernel_ops/attention/heads.h"
#include "kernel_ops/framework/kernel_op.h"

namespace tandem::kernel_ops {

/// The angles by which positions [n] turn pairs of features: positions base^(-2 i / features), in
/// the dtype of `positions`, [n, features / 2].
Tensor rotary_angles(const Tensor& positions, int64_t features, double base);

/// The angle of each feature: those of pairs [..., features / 2] twice, so that the features of a
/// pair are neighbours or, if not `interleaved`, half of all apart.
Tensor angles_of_features(const Tensor& angles, bool interleaved);

/// t whose first features are turned by cosines and sines of the angles of these features, which
/// broadcast to them; in their dtype, rounded once to that of t. `inverse`: as in Rotary.
Tensor turned(const Tensor& t, const Tensor& cosines, const Tensor& sines, bool interleaved,
              bool inverse = false);

/// Queries and keys turned by the angles of their positions; values are copied. The first and
/// second feature (a, b) of a pair become
///   (a cosines_a - b sines_a, b cosines_b + a sines_b),
/// or, `inverse`, by the transpose of that,
///   (a cosines_a + b sines_b, b cosines_b - a sines_a).
/// Without tables, these are of the angles of positions 0, 1, ... along the last dimension but one.
///
/// Shapes:  x as Heads says; cosines and sines, both or none, alike: of the dimensions of x without
///          the last one, or what broadcasts to these, and `features`; y like x. `features` of each
///          head are turned, an even number.
/// Dtypes:  tables floating; angles are float32, arithmetic is float32, float64 where x is, and
///          rounded once; y as x.
/// Throws:  c10::ValueError for other shapes, c10::TypeError for other dtypes.
/// Source:  Su et al. 2021, arXiv:2104.09864.
struct Rotary {
  static constexpr const char* kName = "rotary";
  static constexpr std::array kResults{"y"};
  struct Args {
    const Tensor& x;
    std::optional<Tensor> cosines = {}, sines = {};
    int64_t num_heads, num_kv_heads, head_dim, features;
    double base;
    bool interleaved, inverse;
    TANDEM_ARGUMENTS(x, cosines, sines, num_heads, num_kv_heads, head_dim, features, base,
                     interleaved, inverse)
  };
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};

}  // namespace tandem::kernel_ops
