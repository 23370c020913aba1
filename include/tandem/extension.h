// For those who add ops, fusions and kernels in C++: definitions, what an implementation sees,
// registration.
#pragma once

#include "core/call.h"
#include "core/fusion.h"
#include "core/op_def.h"
#include "kernel_ops/activation.h"
#include "kernel_ops/elementwise.h"
#include "kernel_ops/norm.h"
#include "kernel_ops/product.h"
#include "kernel_ops/quantize.h"
#include "planner/registry.h"
