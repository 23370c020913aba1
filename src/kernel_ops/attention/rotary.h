// Rotary position embedding.
#pragma once

#include "kernel_ops/attention/heads.h"
#include "kernel_ops/framework/kernel_op.h"

namespace tandem::kernel_ops {

/// The angles by which positions [n] turn pairs of features: positions base^(-2 i / features), [n,
/// features / 2], in the dtype of `positions`.
Tensor rotary_angles(const Tensor& positions, int64_t features, double base);

/// The angle of each feature: each pair's angle [..., features / 2] appears twice. The two features
/// of a pair are neighbours if `interleaved`, else half of the features apart.
Tensor angles_of_features(const Tensor& angles, bool interleaved);

/// t with its first features turned by cosines and sines, which broadcast to these features.
/// Arithmetic is in the dtype of cosines and sines, rounded once to the dtype of t. `inverse`: as
/// in Rotary.
Tensor turned(const Tensor& t, const Tensor& cosines, const Tensor& sines, bool interleaved,
              bool inverse = false);

/// Queries and keys turned by the angles of their positions; values are copied. The first and
/// second feature (a, b) of a pair become
///   (a cosines_a - b sines_a, b cosines_b + a sines_b),
/// or, if `inverse`, the result of the transposed matrix,
///   (a cosines_a + b sines_b, b cosines_b - a sines_a).
/// Without tables, the angles are those of positions 0, 1, ... along the last dimension but one.
///
/// Shapes:  x as Heads says; y like x. cosines and sines, both or none, have equal shapes: they
///          broadcast to [dimensions of x but the last, features]. `features` of each head are
///          turned, an even number.
/// Dtypes:  tables of any floating dtype; angles in float32; arithmetic in float32, float64 if x is
///          float64, rounded once; y as x.
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
