// The kernels of one instruction set: included in a namespace for each, with FEWBIT_LEVEL and FEWBIT_DECODES (whether codes are
// decoded within registers: where an instruction looks up in a table).

#include "lanes.h"
#include "sixteen.h"
#include "decode.h"
#include "turn.h"
#include "short_registers.h"
#include "registers.h"
#include "outer.h"
#include "panels.h"
#include "dots.h"
#include "vectors.h"
#include "across.h"
#include "choice.h"

