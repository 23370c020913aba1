// The activations of the library, a row each. The enum of kernels, the ops, their functions in C++
// and on the command line, their classes in Python, their tests and docs/ops.md follow the rows.
// The formulas of a row stand in src/kernels/cpu/activation_math-inl.h (vector code) and
// src/kernel_ops/activation_reference.h (torch's operations).
#pragma once

/// ROW(name, formula): y = formula, element by element.
#define TANDEM_ACTIVATIONS(ROW)                                \
  ROW(gelu, "0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))") \
  ROW(silu, "x sigmoid(x)")                                    \
  ROW(relu, "max(x, 0)")

/// ROW(name, activation): y = activation(a) b, where a and b are the halves of the last dimension
/// of x.
#define TANDEM_GATED_UNITS(ROW) \
  ROW(swiglu, silu)             \
  ROW(geglu, gelu)
