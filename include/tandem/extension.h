// Everything that a C++ program includes to add ops, fusions and kernels: definitions, the
// arguments of an implementation, registration.
#pragma once

#include "core/call.h"
#include "core/fusion.h"
#include "core/op_def.h"
#include "kernel_ops/elementwise/elementwise.h"
#include "kernel_ops/norm/norm.h"
#include "kernel_ops/product/product.h"
#include "kernel_ops/quantize/quantize.h"
#include "kernel_ops/unit/activation.h"
#include "planner/registry.h"
