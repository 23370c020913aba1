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

/// t whose first features are turned by angles_of_features, which broadcast to them; in the dtype
/// of these, rounded once to that of t.
Tensor turned(const Tensor& t, const Tensor& angles, bool interleaved);

/// Queries and keys turned by the angles of their positions, or by minus these; values are copied.
/// Row s has position s, or positions[..., s].
///
/// Shapes:  x as Heads says; positions [sequence], or those of x without the last dimension; y
///          like x. `features` of each head are turned, an even number.
/// Dtypes:  positions real; angles are float32, arithmetic is float32, float64 where x is, and
///          rounded once; y as x.
/// Throws:  c10::ValueError for other shapes, c10::TypeError for other dtypes.
/// Source:  Su et al. 2021, arXiv:2104.09864.
struct Rotary {
  static constexpr const char* kName = "rotary";
  static constexpr std::array kResults{"y"};
  struct Args {
    const Tensor& x;
    std::optional<Tensor> positions = {};
    int64_t num_heads, num_kv_heads, head_dim, features;
    double base;
    bool interleaved, inverse;
    TANDEM_ARGUMENTS(x, positions, num_heads, num_kv_heads, head_dim, features, base, interleaved,
                     inverse)
  };
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};

}  // namespace tandem::kernel_ops
