// Tandem, the operation fuser for training with PyTorch: everything a C++ program includes.
#pragma once

#include "tandem/attention.h"
#include "tandem/autocast.h"
#include "tandem/functional.h"
#include "tandem/grouped_linear.h"
#include "tandem/memory.h"
#include "tandem/modules.h"
#include "tandem/ops.h"
#include "tandem/quantize.h"
#include "tandem/recipe.h"
#include "tandem/sequential.h"
#include "tandem/transformer.h"
#include "tandem/version.h"
