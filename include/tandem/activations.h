// The tables of the library's activations and gated units. The enum of kernels, the ops, their
// functions in C++ and on the command line, their classes in Python where tandem.ops has none,
// their tests and docs/ops.md are generated from the rows. The formulas of a row stand in
// src/kernels/cpu/activation_math-inl.h (vector code) and
// src/kernel_ops/unit/activation_reference.h (torch operations).
#pragma once

/// ROW(name, formula): y = formula, element by element.
#define TANDEM_ACTIVATIONS(ROW)                                \
  ROW(gelu, "0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))") \
  ROW(silu, "x sigmoid(x)")                                    \
  ROW(relu, "max(x, 0)")                                       \
  ROW(sigmoid, "1 / (1 + exp(-x))")                            \
  ROW(qgelu, "x sigmoid(1.702 x)")                             \
  ROW(srelu, "max(x, 0)^2")                                    \
  ROW(erf_gelu, "0.5 x (1 + erf(x / sqrt(2)))")                \
  ROW(mish, "x tanh(log(1 + exp(x)))")                         \
  ROW(softplus, "log(1 + exp(x))")                             \
  ROW(hard_swish, "x min(max(x + 3, 0), 6) / 6")               \
  ROW(leaky_relu, "max(x, 0.01 x)")

/// ROW(name, activation): y = activation(a) b, where a and b are the halves of the last dimension
/// of x.
#define TANDEM_GATED_UNITS(ROW) \
  ROW(swiglu, silu)             \
  ROW(geglu, gelu)              \
  ROW(glu, sigmoid)             \
  ROW(qgeglu, qgelu)            \
  ROW(reglu, relu)              \
  ROW(sreglu, srelu)            \
  ROW(erf_geglu, erf_gelu)

/// ROW(name, formula, options...): gated units with numeric options; the formula and the texts
/// behind it use the names of these options.
#define TANDEM_NUMBERED_UNITS(ROW)                                                         \
  ROW(situglu, "beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2)", "beta1", "beta2") \
  ROW(clamped_swiglu,                                                                      \
      "a' sigmoid(alpha a') (b' + glu_linear_offset), a' = min(a, limit), "                \
      "b' = min(max(b, -limit), limit)",                                                   \
      "limit", "alpha", "glu_linear_offset")
