// The integer kernels of one instruction set, included in a namespace for each.

#include "lanes.h"
#include "integer_lanes.h"
#include "integer_few.h"
#include "integer_panels.h"
#include "integer_product.h"
