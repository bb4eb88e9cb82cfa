// Translation units of one source. setup.py compiles a source with `#define FEWBIT_UNITS n` n times at once, with FEWBIT_UNIT 0 to
// n - 1, and links the objects; without FEWBIT_UNIT one object has all of it (tests, arm64).
#pragma once

#if defined(FEWBIT_UNIT)
#define FEWBIT_IN_UNIT(unit) (FEWBIT_UNIT == unit)
#else
#define FEWBIT_IN_UNIT(unit) 1
#endif
