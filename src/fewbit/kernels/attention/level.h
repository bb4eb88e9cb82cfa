// The kernels of one instruction set, included in a namespace for each.

#include "lanes.h"
#include "../qmatmul/decode.h"
#include "../qmatmul/outer.h"
#include "../qmatmul/turn.h"
#include "exponential.h"
#include "attend.h"
