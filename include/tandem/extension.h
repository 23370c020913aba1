// For those who add ops and fusions in C++: definitions, what an implementation sees, registration.
#pragma once

#include "core/call.h"
#include "core/fusion.h"
#include "core/op_def.h"
#include "planner/registry.h"
